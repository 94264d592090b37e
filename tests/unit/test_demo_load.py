"""Asking, grading and matches, against a stand-in for a server that says what it was asked."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest

from sglang_parse.client.ask import Asking, ask, graded, trace_answers
from sglang_parse.client.match import Match, Part, Preset, Watcher
from sglang_parse.client.pool import Pool
from sglang_parse.client.records import Assignment, BenchError, BenchRun, Variant
from sglang_parse.client.servers import Remote
from sglang_parse.tasks import Item

PROBLEMS = [Item(str(k), f"problem {k}", k) for k in range(4)]


class Echo(BaseHTTPRequestHandler):
    """Answers with the last turn; ``meta_info`` holds the request."""

    mode = "parse"
    finish_reason = "stop"
    texts: ClassVar[list[str]] = []

    def do_GET(self) -> None:  # noqa: N802 - the library's name
        self.send_response(200)
        self.end_headers()

    def do_POST(self) -> None:  # noqa: N802 - the library's name
        asked = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
        text = asked["messages"][-1]["content"]
        self.texts.append(text)
        meta = {"parse": [{"mode": self.mode, "rounds": 1}], "asked": asked}
        message = {"role": "assistant", "content": f"answer to {text}"}
        choice = {"index": 0, "finish_reason": self.finish_reason, "message": message}
        if asked.get("return_token_ids"):
            choice["response_token_ids"] = [7, 8]
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
    Echo.texts.clear()
    with ThreadingHTTPServer(("127.0.0.1", 0), Echo) as echo:
        Thread(target=echo.serve_forever, daemon=True).start()
        yield Remote("parse", f"http://127.0.0.1:{echo.server_port}")
        echo.shutdown()


def grade(problem: Any, texts: Sequence[str]) -> float:
    (text,) = texts
    return float(text == f"answer to problem {problem.reference}" and problem.reference != 2)


def test_a_leg_is_graded_in_the_problems_order(server: Remote):
    leg = graded(ask(server, PROBLEMS, [3, 2, 0], run=1, concurrency=2), PROBLEMS, grade)
    assert [answer.problem for answer in leg.answers] == [3, 2, 0]
    assert leg.scores == (1, 0, 1)
    assert (leg.variant.server, leg.run, leg.concurrency, leg.output_tokens) == ("parse", 1, 2, 15)
    assert leg.per_request("rounds") == 1


def test_what_is_asked(server: Remote):
    asking = Asking("my-model", 77, 0.5, {"parse": {"threshold": 0.9}})
    (answer,) = ask(server, PROBLEMS, [1], asking=asking).answers
    asked = answer.meta["asked"]
    assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("my-model", 77, 0.5)
    assert asked["custom_params"] == {"parse": {"threshold": 0.9}}
    assert asked["return_meta_info"] is True


def test_a_later_turn_comes_with_the_earlier_answers(server: Remote):
    item = Item("0", "first", None, ("second",))
    (answer,) = ask(server, [item], [0]).answers
    assert answer.texts == ("answer to first", "answer to second")
    assert answer.output_tokens == 10
    assert [m["content"] for m in answer.meta["asked"]["messages"]] == [
        *("first", "answer to first", "second"),
    ]


def test_a_trace_is_asked_for(server: Remote):
    (traced,) = trace_answers(server, PROBLEMS[:1], options={"threshold": 0.9})
    assert (traced.prompt, traced.output_ids) == ("problem 0", (7, 8))
    assert traced.parse == {"mode": "parse", "rounds": 1}
    (answer,) = ask(server, PROBLEMS, [0]).answers
    assert answer.token_ids == ()  # they are asked for only there


def test_an_answer_parse_did_not_make_is_an_error(server: Remote, monkeypatch):
    monkeypatch.setattr(Echo, "mode", "plain")
    with pytest.raises(BenchError, match="PARSE did not serve problem 1"):
        ask(server, PROBLEMS, [1])


def test_an_aborted_answer_is_an_error(server: Remote, monkeypatch):
    monkeypatch.setattr(Echo, "finish_reason", "abort")
    with pytest.raises(BenchError, match="ended with 'abort'"):
        ask(server, PROBLEMS, [1])


@dataclass
class Diary(Watcher[BenchRun]):
    """What a match told its program."""

    lines: list[str] = field(default_factory=list)

    def turn(self, server: str, run: int, parts: Sequence[Part]) -> None:
        self.lines.append(f"{server}, run {run}, {len(parts)} to time")

    def timed(self, found: BenchRun) -> None:
        self.lines.append(f"timed {found.answers[0].problem}")

    def marks(self, parts: dict[str, Sequence[Part]]) -> None:
        self.lines.append(f"marks of {', '.join(parts)}")

    def answered(self) -> None:
        self.lines.append("answered")


def test_a_match_is_played_as_its_preset_says(server: Remote, tmp_path: Path):
    """Turns in their order, each warmed up; looks beside what is timed; marks in groups."""
    names = ("plain", "parse", "draft")
    remotes = {name: replace(server, name=name) for name in names}
    diary = Diary()
    with Pool([], tmp_path, remotes=remotes) as pool:
        match = Match(pool, Assignment("", PROBLEMS, grade, 10), lambda _: Asking())
        preset = Preset(
            runs=2,
            order=lambda run: names if run == 0 else names[::-1],
            timed=lambda name, run: [Part(Variant(name), [run + 1], run)],
            clock=match.ask,
            looks=lambda name, run: [Part(Variant(name), [3], run)] if name == "parse" else [],
            marks=lambda name: [Part(Variant(name), [1, 2])] if name != "plain" else [],
            width=2,
        )
        played = match.play(preset, diary)
    turns = [(name, 0) for name in names] + [(name, 1) for name in names[::-1]]
    told = [line for n, r in turns for line in (f"{n}, run {r}, 1 to time", f"timed {r + 1}")]
    for name in ("parse", "draft"):
        told += [f"marks of {name}", "answered", "answered"]
    assert diary.lines == told
    assert [(leg.variant.server, leg.run) for leg in played.timed] == turns
    assert [(leg.variant.server, leg.run) for leg in played.looks] == [("parse", 0), ("parse", 1)]
    marks = [(leg.variant.server, leg.scores) for leg in played.marks]
    assert marks == [("parse", (1, 0)), ("draft", (1, 0))]
    # Every turn begins with a request that is not measured.
    run_0 = ["problem 0", "problem 1"]
    assert Echo.texts[:7] == [*run_0, *run_0, "problem 3", *run_0]
    assert len(Echo.texts) == 2 * len(turns) + 2 + 4
