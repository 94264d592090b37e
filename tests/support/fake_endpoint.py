"""A server with an OpenAI API whose drafts a test chooses, faults included.

As real servers do, it keeps connections open, and sends bodies and events in several pieces.
"""

from __future__ import annotations

import json
import socket
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Draft = Callable[[str, str], str]
"""(question, answer so far) -> the rest of the answer."""
ELSEWHERE = "/elsewhere"
"""Where the kind "redirect" sends its clients; drafts are written there, too."""
STATUSES = {"status": 503, "refuse": 400}


@dataclass
class FakeEndpoint:
    """What the endpoint does.

    Attributes:
        draft: what it writes.
        kind: "stream", "whole" (no stream), or a fault: "status" (503), "refuse" (400), "error"
            (an event with code 400), "redirect", "garbage", "json", "half", "stall", "mute"
            (no event), "break", "killed" (connections end in the middle).
        kinds: part of a question -> its kind instead.
        models_kind: the same for the list of models: "stream" is a right one.
        part: characters of one event.
        delay_s: before the first event; ``part_s``: before each further one.
        bodies: the requests it got; ``paths``: all paths it was asked for.
        num_connections: that it has accepted; ``most_open``: most requests answered at a time.
    """

    draft: Draft = lambda _question, _answer: ""
    kind: str = "stream"
    kinds: dict[str, str] = field(default_factory=dict)
    models_kind: str = "stream"
    part: int = 3
    delay_s: float = 0.0
    part_s: float = 0.0
    bodies: list[Mapping[str, Any]] = field(default_factory=list)
    paths: list[str] = field(default_factory=list)
    num_connections: int = 0
    num_open: int = 0
    most_open: int = 0
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def kind_of(self, body: Mapping[str, Any]) -> str:
        turns = body.get("messages") or [{"content": body["prompt"]}]
        text = turns[0]["content"]
        return next((kind for part, kind in self.kinds.items() if part in text), self.kind)

    def rest(self, body: Mapping[str, Any]) -> str:
        messages = body.get("messages")
        if messages is None:
            question, _, answer = body["prompt"].partition("<|im_start|>assistant\n")
            return self.draft(question, answer)
        last = messages[-1]
        is_unfinished = last["role"] == "assistant"
        assert not is_unfinished or body["continue_final_message"]
        return self.draft(messages[0]["content"], last["content"] if is_unfinished else "")

    def count_open(self, change: int) -> None:
        self.num_open += change
        self.most_open = max(self.most_open, self.num_open)


def rest_of(texts: Mapping[str, str]) -> Draft:
    """Writes on in the text whose question, the key, is asked."""

    def draft(question: str, answer: str) -> str:
        (text,) = (text for known, text in texts.items() if known in question)
        return text[len(answer) :]

    return draft


class Server(ThreadingHTTPServer):
    daemon_threads = True
    request_queue_size = 512

    def __init__(self, fake: FakeEndpoint) -> None:
        super().__init__(("127.0.0.1", fake.port), Handler)
        self.fake, self.connections = fake, []

    def process_request(self, request: Any, client_address: Any) -> None:
        self.connections.append(request)
        self.fake.num_connections += 1
        super().process_request(request, client_address)

    def end(self) -> None:
        """Also ends the connections that are kept open."""
        self.shutdown()
        self.server_close()
        for connection in self.connections:
            with suppress(OSError):
                connection.shutdown(socket.SHUT_RDWR)


class Handler(BaseHTTPRequestHandler):
    protocol_version = "HTTP/1.1"
    disable_nagle_algorithm = True
    server: Server

    @property
    def fake(self) -> FakeEndpoint:
        return self.server.fake

    def do_GET(self) -> None:
        self.fake.paths.append(self.path)
        if self.fake.models_kind == "redirect":
            self.redirect()
        elif status := STATUSES.get(self.fake.models_kind):
            self.reply(b"no", "text/plain", status)
        else:
            self.reply(json.dumps({"data": [{"id": "fake"}]}).encode(), "application/json")

    def do_POST(self) -> None:
        body = json.loads(self.rfile.read(int(self.headers["content-length"])))
        self.fake.paths.append(self.path)
        self.fake.bodies.append(body)
        self.fake.count_open(1)
        with suppress(OSError):  # where nobody reads on
            self.answer(body)
        self.fake.count_open(-1)

    def answer(self, body: Mapping[str, Any]) -> None:
        fake, kind = self.fake, self.fake.kind_of(body)
        time.sleep(fake.delay_s)
        key = "messages" if "messages" in body else "text"
        if kind == "redirect" and self.path != ELSEWHERE:
            self.redirect()
        elif status := STATUSES.get(kind):
            self.reply(b"no", "text/plain", status)
        elif kind == "whole":
            text = fake.rest(body)
            choice = {"message": {"content": text}} if key == "messages" else {"text": text}
            content = {"choices": [{**choice, "finish_reason": "stop"}]}
            self.reply(json.dumps(content).encode(), "application/json")
        else:
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            self.stream(fake.rest(body), key, kind)

    def stream(self, text: str, key: str, kind: str) -> None:
        for event in self.events(text, key, kind):
            for piece in (event[: len(event) // 2], event[len(event) // 2 :]):
                if self.fake.kind == "killed":  # also those under way
                    self.close_connection = True
                    return
                self.wfile.write(b"%x\r\n%b\r\n" % (len(piece), piece))
            time.sleep(self.fake.part_s)
        self.wfile.write(b"0\r\n\r\n")

    def events(self, text: str, key: str, kind: str) -> Iterator[bytes]:
        if kind == "mute":
            time.sleep(30)
        if kind == "garbage":
            yield b"\xff\xfe\x00data: \xf0\x9f\ndata: {\x00}\n\n" * 50
            return
        if kind == "json":
            yield b'data: {"choices": [{"delta": {"content": 5}}]}\n\n'
            return
        if kind == "error":
            yield b'data: {"error": {"message": "too long", "code": 400}}\n\n'
            return
        for start in range(0, len(text), self.fake.part):
            part = text[start : start + self.fake.part]
            if kind == "half":
                part = part[:1] + "\ud83d"
            choice = {"delta": {"content": part}} if key == "messages" else {"text": part}
            yield f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
            if kind == "stall":
                time.sleep(3)
            if kind == "break" and start > 8:
                return
        yield b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
        yield b"data: [DONE]\n\n"

    def redirect(self) -> None:
        self.send_response(307)
        self.send_header("location", ELSEWHERE)
        self.send_header("content-length", "0")
        self.end_headers()

    def reply(self, content: bytes, kind: str, status: int = 200) -> None:
        """Sends a body in two pieces, the second a moment later."""
        self.send_response(status)
        self.send_header("content-type", kind)
        self.send_header("content-length", str(len(content)))
        self.end_headers()
        self.wfile.write(content[: len(content) // 2])
        time.sleep(0.02)
        self.wfile.write(content[len(content) // 2 :])

    def log_message(self, *_: object) -> None:
        """Silent."""


@contextmanager
def fake_endpoint(port: int) -> Iterator[FakeEndpoint]:
    fake = FakeEndpoint(port=port)
    server = Server(fake)
    Thread(target=server.serve_forever, daemon=True).start()
    try:
        yield fake
    finally:
        server.end()
