"""A real HTTP server on loopback that answers from a script and remembers what it was asked."""

from __future__ import annotations

import contextlib
import json
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any


@dataclass
class Answer:
    """``body``: JSON, or bytes as they are; ``chunks``: sent one by one, then the connection closes."""

    body: Any = None
    status: int = 200
    headers: dict[str, str] = field(default_factory=dict)
    chunks: list[bytes] | None = None
    delay: float = 0.0


@dataclass
class Asked:
    method: str
    path: str
    body: Any
    headers: dict[str, str]


@dataclass
class Script:
    url: str
    answers: list[Answer] = field(default_factory=list)
    asked: list[Asked] = field(default_factory=list)


def error(status: int, message: str, **more: Any) -> Answer:
    headers = more.pop("headers", {})
    return Answer({"error": {"message": message, "type": "x", "param": None, "code": None, **more}}, status, headers)


def events(*values: Any, done: bool = True) -> bytes:
    parts = [b"data: " + json.dumps(value, ensure_ascii=False).encode() + b"\n\n" for value in values]
    return b"".join(parts) + (b"data: [DONE]\n\n" if done else b"")


@contextlib.contextmanager
def scripted(*answers: Answer) -> Iterator[Script]:
    script = Script("", list(answers))

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def _answer(self) -> None:
            length = int(self.headers.get("content-length") or 0)
            raw = self.rfile.read(length)
            headers = {name.lower(): value for name, value in self.headers.items()}
            script.asked.append(Asked(self.command, self.path, json.loads(raw) if raw else None, headers))
            answer = script.answers.pop(0) if script.answers else error(500, "the script is over")
            time.sleep(answer.delay)
            body = answer.body if isinstance(answer.body, bytes) else json.dumps(answer.body).encode()
            self.send_response(answer.status)
            for name, value in answer.headers.items():
                self.send_header(name, value)
            if answer.chunks is not None:
                self.send_header("connection", "close")
                self.end_headers()
                for chunk in answer.chunks:
                    self.wfile.write(chunk)
                    self.wfile.flush()
                    time.sleep(0.002)
                self.close_connection = True
                return
            self.send_header("content-length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        do_GET = do_POST = _answer

        def log_message(self, *args: Any) -> None:
            pass

    server = ThreadingHTTPServer(("127.0.0.1", 0), Handler)
    server.daemon_threads = True
    script.url = f"http://127.0.0.1:{server.server_address[1]}"
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield script
    finally:
        server.shutdown()
        server.server_close()
        thread.join(5)
