"""Asking and grading, against a stand-in for a server that says what it was asked."""

from __future__ import annotations

import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from threading import Thread
from typing import Any

import pytest

from sglang_parse.bench.compare.pool import Remote
from sglang_parse.bench.demo.load import Asking, ask_all, send_problems, trace_answer
from sglang_parse.bench.demo.records import DemoError
from sglang_parse.bench.tasks import Item

PROBLEMS = [Item(str(k), f"problem {k}", k) for k in range(4)]


class Echo(BaseHTTPRequestHandler):
    """Answers with the last turn; ``meta_info`` holds the request."""

    mode = "parse"
    finish_reason = "stop"

    def do_POST(self) -> None:  # noqa: N802 - the library's name
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = asked["messages"][-1]["content"]
        meta = {"parse": [{"mode": self.mode, "rounds": 1}], "asked": asked}
        message = {"role": "assistant", "content": f"answer to {text}"}
        choice = {"index": 0, "finish_reason": self.finish_reason, "message": message}
        body = {"id": "1", "object": "chat.completion", "choices": [choice | {"meta_info": meta}]}
        body["usage"] = {"completion_tokens": 5, "prompt_tokens": 1, "total_tokens": 6}
        self.send_response(200)
        self.send_header("Content-Type", "application/json")
        self.end_headers()
        self.wfile.write(json.dumps(body).encode())

    def log_message(self, *arguments: object) -> None:
        """Not into the test's output."""


@pytest.fixture
def server() -> Iterator[Remote]:
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as echo:
        Thread(target=echo.serve_forever, daemon=True).start()
        yield Remote("parse", f"http://127.0.0.1:{echo.server_port}")
        echo.shutdown()


def is_right(problem: Any, text: str) -> bool:
    return text == f"answer to problem {problem.reference}" and problem.reference != 2


def test_a_leg_is_graded_in_the_problems_order(server: Remote):
    leg = send_problems(server, PROBLEMS, [3, 2, 0], is_right, run=1, concurrency=2)
    assert [answer.problem for answer in leg.answers] == [3, 2, 0]
    assert [answer.is_right for answer in leg.answers] == [True, False, True]
    assert (leg.server, leg.run, leg.concurrency, leg.output_tokens) == ("parse", 1, 2, 15)
    assert leg.per_request("rounds") == 1


def test_what_is_asked(server: Remote):
    asking = Asking("my-model", 77, 0.5, {"parse": {"threshold": 0.9}})
    (reply,) = ask_all(server, PROBLEMS, [1], 1, asking=asking)[1]
    asked = reply.meta["asked"]
    assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("my-model", 77, 0.5)
    assert asked["custom_params"] == {"parse": {"threshold": 0.9}}
    assert asked["return_meta_info"] is True


def test_a_later_turn_comes_with_the_earlier_answers(server: Remote):
    item = Item("0", "first", None, ("second",))
    (reply,) = ask_all(server, [item], [0], 1)[1]
    assert reply.texts == ("answer to first", "answer to second")
    assert reply.output_tokens == 10
    assert [m["content"] for m in reply.meta["asked"]["messages"]] == [
        *("first", "answer to first", "second"),
    ]


def test_a_trace_is_asked_for(server: Remote):
    text, info = trace_answer(server, PROBLEMS[0])
    assert (text, info) == ("answer to problem 0", {"mode": "parse", "rounds": 1})


def test_an_answer_parse_did_not_make_is_an_error(server: Remote, monkeypatch):
    monkeypatch.setattr(Echo, "mode", "plain")
    with pytest.raises(DemoError, match="PARSE did not serve problem 1"):
        send_problems(server, PROBLEMS, [1], is_right, run=0, concurrency=1)


def test_an_aborted_answer_is_an_error(server: Remote, monkeypatch):
    monkeypatch.setattr(Echo, "finish_reason", "abort")
    with pytest.raises(DemoError, match="ended with 'abort'"):
        send_problems(server, PROBLEMS, [1], is_right, run=0, concurrency=1)
