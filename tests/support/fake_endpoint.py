"""A server with an OpenAI API whose drafts a test chooses, faults included."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

Draft = Callable[[str, str], str]
"""(question, answer so far) -> the rest of the answer."""


@dataclass
class FakeEndpoint:
    """What the endpoint does.

    Attributes:
        draft: what it writes.
        kind: "stream", "whole" (no stream), or a fault: "status", "garbage", "json", "half",
            "stall", "break", "killed" (connections end in the middle).
        part: characters of one event.
        delay_s: before the first event; ``part_s``: before each further one.
        bodies: the requests it got.
    """

    draft: Draft = lambda _question, _answer: ""
    kind: str = "stream"
    part: int = 3
    delay_s: float = 0.0
    part_s: float = 0.0
    bodies: list[Mapping[str, Any]] = field(default_factory=list)
    port: int = 0

    @property
    def url(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def rest(self, body: Mapping[str, Any]) -> str:
        messages = body.get("messages")
        if messages is None:
            question, _, answer = body["prompt"].partition("<|im_start|>assistant\n")
            return self.draft(question, answer)
        last = messages[-1]
        is_unfinished = last["role"] == "assistant"
        assert not is_unfinished or body["continue_final_message"]
        return self.draft(messages[0]["content"], last["content"] if is_unfinished else "")


def rest_of(texts: Mapping[str, str]) -> Draft:
    """Writes on in the text whose question, the key, is asked."""

    def draft(question: str, answer: str) -> str:
        (text,) = (text for known, text in texts.items() if known in question)
        return text[len(answer) :]

    return draft


@contextmanager
def fake_endpoint(port: int) -> Iterator[FakeEndpoint]:
    fake = FakeEndpoint(port=port)

    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def end_headers(self) -> None:
            self.send_header("connection", "close")
            super().end_headers()

        def do_GET(self) -> None:
            self.reply(json.dumps({"data": [{"id": "fake"}]}).encode(), "application/json")

        def do_POST(self) -> None:
            body = json.loads(self.rfile.read(int(self.headers["content-length"])))
            fake.bodies.append(body)
            with suppress(OSError):  # where nobody reads on
                self.answer(body)

        def answer(self, body: Mapping[str, Any]) -> None:
            time.sleep(fake.delay_s)
            if fake.kind == "status":
                self.reply(b"no", "text/plain", 503)
                return
            key = "messages" if "messages" in body else "text"
            text = fake.rest(body)
            if fake.kind == "whole":
                choice = {"message": {"content": text}} if key == "messages" else {"text": text}
                content = {"choices": [{**choice, "finish_reason": "stop"}]}
                self.reply(json.dumps(content).encode(), "application/json")
                return
            self.send_response(200)
            self.send_header("content-type", "text/event-stream")
            self.send_header("transfer-encoding", "chunked")
            self.end_headers()
            for event in self.events(text, key):
                if fake.kind == "killed":
                    return
                self.wfile.write(b"%x\r\n%b\r\n" % (len(event), event))
                time.sleep(fake.part_s)
            self.wfile.write(b"0\r\n\r\n")

        def events(self, text: str, key: str) -> Iterator[bytes]:
            if fake.kind == "garbage":
                yield b"\xff\xfe\x00data: \xf0\x9f\ndata: {\x00}\n\n" * 50
                return
            if fake.kind == "json":
                yield b'data: {"choices": [{"delta": {"content": 5}}]}\n\n'
                return
            for start in range(0, len(text), fake.part):
                part = text[start : start + fake.part]
                if fake.kind == "half":
                    part = part[:1] + "\ud83d"
                choice = {"delta": {"content": part}} if key == "messages" else {"text": part}
                yield f"data: {json.dumps({'choices': [choice]})}\n\n".encode()
                if fake.kind == "stall":
                    time.sleep(3)
                if fake.kind == "break" and start > 8:
                    return
            yield b'data: {"choices": [{"delta": {}, "finish_reason": "stop"}]}\n\n'
            yield b"data: [DONE]\n\n"

        def reply(self, content: bytes, kind: str, status: int = 200) -> None:
            self.send_response(status)
            self.send_header("content-type", kind)
            self.send_header("content-length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Silent."""

    server = ThreadingHTTPServer(("127.0.0.1", port), Handler)
    server.daemon_threads = True
    thread = Thread(target=server.serve_forever, daemon=True)
    thread.start()
    try:
        yield fake
    finally:
        server.shutdown()
        server.server_close()
