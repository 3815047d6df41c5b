"""The listening socket and what the terminal says when the server is ready."""

from __future__ import annotations

import json
import shlex
import socket
import subprocess
import sys
from types import SimpleNamespace

import msgspec
import pytest

from ceiba.config.records import (
    Config,
    ModelConfig,
    RunnerConfig,
    SchedulerConfig,
    ServerConfig,
)
from ceiba.core.errors import ConfigError
from ceiba.launch import children, starting
from ceiba.launch.run import listen, ready_text


def config(**server) -> Config:
    return Config(
        model=ModelConfig(path="/m.gguf", name="it's a model", tokenizer_path="/m.gguf"),
        scheduler=SchedulerConfig(),
        runner=RunnerConfig(),
        server=ServerConfig(**server),
    )


def test_a_taken_port_is_named_with_a_free_one():
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = taken.getsockname()[1]
        with pytest.raises(ConfigError) as caught:
            listen("127.0.0.1", port)
        assert f"port {port} on 127.0.0.1 is in use" in caught.value.message
        other = int(caught.value.message.rsplit(" ", 1)[1])
        with listen("127.0.0.1", other) as sock:
            assert sock.getsockname() == ("127.0.0.1", other)


def test_the_port_of_a_connection_that_lingers_can_be_taken_again():
    with listen("127.0.0.1", 0) as first:
        port = first.getsockname()[1]
        client = socket.create_connection(("127.0.0.1", port))
        served, _ = first.accept()
        served.close()  # the side that closes first waits in TIME_WAIT
    client.close()
    with listen("127.0.0.1", port) as again:
        assert again.getsockname()[1] == port


def test_children_do_not_inherit_the_listening_socket():
    with listen("127.0.0.1", 0) as sock:
        assert sock.get_inheritable() is False


@pytest.mark.parametrize("host", ["no.such.host.invalid", "999.1.1.1"])
def test_a_host_that_is_none(host):
    with pytest.raises(ConfigError, match="--host"):
        listen(host, 0)


@pytest.mark.parametrize(
    ("host", "shown"),
    [("127.0.0.1", "127.0.0.1"), ("0.0.0.0", "127.0.0.1"), ("::", "[::1]"), ("::1", "[::1]"), ("[::1]", "[::1]")],
)
def test_the_printed_command_is_one_that_a_shell_understands(host, shown):
    front = SimpleNamespace(template=object(), tokenizer=object())
    text = ready_text(config(host=host), front, 1234)
    command = text[text.index("curl") :].replace("\\\n", " ")
    words = shlex.split(command)
    assert words[:2] == ["curl", f"http://{shown}:1234/v1/chat/completions"]
    body = json.loads(words[words.index("-d") + 1])
    assert body["temperature"] == 0
    assert body["model"] == "it's a model"
    assert body["messages"] == [{"role": "user", "content": "What is the capital of France?"}]


def test_no_template_no_chat_and_no_key_in_the_terminal():
    front = SimpleNamespace(template=None, tokenizer=object())
    text = ready_text(config(api_key="s3cret", root_path="/api"), front, 1)
    assert "/api/v1/completions" in text
    assert "s3cret" not in text
    assert "Authorization: Bearer" in text


def test_the_configuration_reaches_a_child_as_it_is():
    boot = children.Boot(
        config(preferred_sampling_params={"temperature": 0.5, "stop": ["a"]}, port=7),
        children.Endpoints("a", "b", "c", "d"),
    )
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(boot), type=children.Boot) == boot


def test_a_child_is_found_from_any_directory_and_takes_no_module_from_there(tmp_path):
    (tmp_path / "msgspec.py").write_text("raise SystemExit('the wrong module')")
    (tmp_path / "ceiba").mkdir()
    (tmp_path / "ceiba" / "__init__.py").write_text("raise SystemExit('the wrong package')")
    command = [*starting.command("detokenizer"), "1"]
    done = subprocess.run(command, cwd=tmp_path, stdin=subprocess.DEVNULL, capture_output=True, timeout=60, check=False)
    assert b"wrong" not in done.stderr
    assert done.returncode == 1  # no first message: the parent is gone


def test_nothing_heavy_is_imported_to_start_the_children():
    show = "print('torch' in sys.modules, 'fastapi' in sys.modules)"
    code = f"import sys, ceiba.launch.run, ceiba.launch.children; {show}"
    out = subprocess.check_output([sys.executable, "-c", code], text=True, timeout=60)
    assert out.split() == ["False", "False"]
