"""The terminal chat, driven without a terminal: turns, commands, interruption, errors, and reading a server."""

from __future__ import annotations

import io
import json
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer

import pytest
from rich.console import Console

from ceiba.core.errors import CeibaError
from ceiba.launch import chat


class Echo:
    """Answers with the last message in capitals, word by word, and keeps what it was sent."""

    name = "echo"
    suggested = True

    def __init__(self) -> None:
        self.seen: list[list[dict[str, str]]] = []
        self.options: list[float | None] = []
        self.interrupt = self.fail = False

    def stream(self, messages, options, usage):
        self.seen.append(messages)
        self.options.append(options.temperature)
        if self.fail:
            raise CeibaError("the engine is gone")
        usage.prompt_tokens, usage.cached_tokens = 10, 4
        for word in messages[-1]["content"].upper().split():
            usage.completion_tokens += 1
            yield word + " "
            if self.interrupt:
                raise KeyboardInterrupt

    def close(self) -> None:
        pass


@pytest.fixture
def session():
    return chat.Session(Echo(), Console(file=io.StringIO(), width=200))


def shown(session) -> str:
    return session.console.file.getvalue()


def test_turns_build_one_conversation(session):
    assert session.say("hello there")
    assert session.say("again")
    assert session.backend.seen[1] == [
        {"role": "user", "content": "hello there"},
        {"role": "assistant", "content": "HELLO THERE "},
        {"role": "user", "content": "again"},
    ]
    assert "HELLO THERE" in shown(session)
    assert "4 of 10 prompt tokens cached" in shown(session)


def test_commands(session, tmp_path):
    session.say("one")
    assert session.command("/system be brief")
    assert session.messages == []
    session.command("/temperature 0.25")
    session.say("two")
    assert session.backend.seen[-1][0] == {"role": "system", "content": "be brief"}
    assert session.backend.options == [None, 0.25]
    session.command("/temperature hot")
    session.command("/temperature -1")
    assert session.options.temperature == 0.25
    session.command("/stats")
    assert "2 answers, 2 tokens" in shown(session)
    file = tmp_path / "talk.json"
    session.command(f"/save {file}")
    assert [m["role"] for m in json.loads(file.read_text())["messages"]] == ["system", "user", "assistant"]
    session.command("/save /no/such/place/x")
    session.command("/reset")
    assert session.messages == []
    session.command("/nonsense")
    assert "no command /nonsense" in shown(session)
    assert session.command("/exit") is False


def test_markup_in_an_answer_is_text(session):
    session.say("[bold]x[/bold] [/]")
    assert "[BOLD]X[/BOLD] [/]" in shown(session)


def test_an_interrupted_answer_stays_as_far_as_it_came(session):
    session.backend.interrupt = True
    session.say("a b c")
    assert session.messages[-1] == {"role": "assistant", "content": "A "}


def test_an_error_is_said_and_the_turn_forgotten(session):
    session.backend.fail = True
    assert not session.say("x")
    assert "the engine is gone" in shown(session)
    assert session.messages == []


class Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        if self.path == "/model_info":
            known = self.server.defaults
            self.reply(json.dumps({} if known is None else {"sampling_defaults": known}).encode())
            return
        self.reply(json.dumps({"data": [{"id": "served"}]}).encode())

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.server.bodies.append(body)
        if body["messages"][-1]["content"] == "fail":
            self.reply(json.dumps({"error": {"message": "too long"}}).encode(), 400)
            return
        usage = {"prompt_tokens": 9, "completion_tokens": 2, "prompt_tokens_details": {"cached_tokens": 3}}
        events = [
            {"choices": [{"delta": {"role": "assistant", "content": ""}}]},
            {"choices": [{"delta": {"content": "Pa"}}]},
            {"choices": [{"delta": {"content": "ris"}}]},
            {"choices": [{"delta": {}, "finish_reason": "stop"}]},
            {"choices": [], "usage": usage},
        ]
        self.reply("".join(f"data: {json.dumps(e)}\n\n" for e in events).encode() + b"data: [DONE]\n\n")

    def reply(self, data: bytes, status: int = 200) -> None:
        self.send_response(status)
        self.send_header("content-length", str(len(data)))
        self.end_headers()
        self.wfile.write(data)

    def log_message(self, *args) -> None:
        pass


@pytest.fixture
def url():
    with ThreadingHTTPServer(("127.0.0.1", 0), Handler) as server:
        server.bodies = []
        server.defaults = None
        threading.Thread(target=server.serve_forever, daemon=True).start()
        Handler.last = server
        yield f"http://127.0.0.1:{server.server_port}"
        server.shutdown()


@pytest.mark.parametrize("suffix", ["", "/", "/v1"])
def test_http_backend(url, suffix):
    backend = chat.HttpBackend(url + suffix, None, "key")
    assert backend.name == "served"
    usage = chat.Usage()
    pieces = list(backend.stream([{"role": "user", "content": "hi"}], chat.Options(temperature=0.0, seed=3), usage))
    assert pieces == ["Pa", "ris"]
    assert usage == chat.Usage(9, 3, 2)
    body = Handler.last.bodies[-1]
    assert (body["temperature"], body["seed"], "top_p" in body) == (0.0, 3, False)
    with pytest.raises(CeibaError, match="too long"):
        list(backend.stream([{"role": "user", "content": "fail"}], chat.Options(), usage))
    backend.close()


def test_piped_input_is_one_message_or_a_turn_a_line(url, monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("first line\nsecond line\n"))
    assert chat.main(["--url", url]) == 0
    assert Handler.last.bodies[-1]["messages"] == [{"role": "user", "content": "first line\nsecond line"}]
    assert capsys.readouterr().out.strip() == "Paris"
    monkeypatch.setattr("sys.stdin", io.StringIO("one\n/system short\ntwo\n/exit\nthree\n"))
    assert chat.main(["--url", url, "--each-line"]) == 0
    sent = [b["messages"] for b in Handler.last.bodies[1:]]
    assert sent == [
        [{"role": "user", "content": "one"}],
        [{"role": "system", "content": "short"}, {"role": "user", "content": "two"}],
    ]
    monkeypatch.setattr("sys.stdin", io.StringIO("fail"))
    assert chat.main(["--url", url]) == 1


@pytest.mark.parametrize(
    ("defaults", "words", "sent"),
    [
        (None, [], (None, None)),  # not a server of ours: it knows best
        ({}, [], (chat.MILD["temperature"], chat.MILD["top_p"])),
        ({"max_new_tokens": 9}, [], (chat.MILD["temperature"], chat.MILD["top_p"])),
        ({"temperature": 0.2}, [], (None, None)),
        ({}, ["--temperature", "1"], (1.0, None)),
        ({}, ["--top-p", "0.5"], (None, 0.5)),
    ],
)
def test_sampling_is_mild_where_nobody_suggests_any(url, monkeypatch, defaults, words, sent):
    Handler.last.defaults = defaults
    monkeypatch.setattr("sys.stdin", io.StringIO("hi"))
    assert chat.main(["--url", url, *words]) == 0
    body = Handler.last.bodies[-1]
    assert (body.get("temperature"), body.get("top_p")) == sent


def test_nobody_there(monkeypatch, capsys):
    monkeypatch.setattr("sys.stdin", io.StringIO("x"))
    assert chat.main(["--url", "http://127.0.0.1:9"]) == 2
    assert "no server answers" in capsys.readouterr().err
