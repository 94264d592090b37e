"""Asking, grading and the run loop, against a stand-in server that echoes requests."""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from threading import Thread
from typing import Any, ClassVar

import pytest
from rich.console import Console

from sglang_parse.client.ask import Asking, ask, graded, trace_answers
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import ProgressLog
from sglang_parse.client.records import (
    Answer,
    Assignment,
    BenchError,
    Item,
    ServingRun,
    Variant,
)
from sglang_parse.client.servers import Remote
from sglang_parse.compare.figures import Measured
from sglang_parse.compare.run import Runner
from sglang_parse.compare.serving import Load
from sglang_parse.compare.settings import CompareSettings, add_arguments

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


def grade(problem: Any, text: str) -> float:
    return float(text == f"answer to problem {problem.reference}" and problem.reference != 2)


def test_a_run_is_graded_in_the_order_of_its_problems(server: Remote):
    leg = graded(ask(server, PROBLEMS, [3, 2, 0], run=1, concurrency=2), PROBLEMS, grade)
    assert [answer.problem for answer in leg.answers] == [3, 2, 0]
    assert leg.scores == (1, 0, 1)
    assert (leg.variant.server, leg.run, leg.concurrency, leg.output_tokens) == ("parse", 1, 2, 15)
    assert leg.per_request("rounds") == 1


def test_fields_of_a_request(server: Remote):
    asking = Asking("my-model", 77, 0.5, {"threshold": 0.9})
    (answer,) = ask(server, PROBLEMS, [1], asking=asking).answers
    asked = answer.meta["asked"]
    assert (asked["model"], asked["max_tokens"], asked["temperature"]) == ("my-model", 77, 0.5)
    assert asked["custom_params"] == {"parse": {"threshold": 0.9}}
    assert asked["return_meta_info"] is True


def test_a_trace_is_asked_for(server: Remote):
    (traced,) = trace_answers(server, PROBLEMS[:1], Asking(parse={"threshold": 0.9}))
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


NAMES = ("plain", "parse", "draft")


@pytest.fixture
def loads(monkeypatch: pytest.MonkeyPatch) -> list[Load]:
    """What ``bench_serving``'s stand-in was asked; it answers all problems of a load right."""
    found: list[Load] = []

    def serve(_: Remote, load: Load, __: Path) -> tuple[list[ServingRun], list[Answer]]:
        found.append(load)
        answers = [
            Answer(index, f"answer to {one.text}", 5, 1.0, {})
            for index, one in enumerate(load.problems)
        ]
        runs = [
            ServingRun(variant, load.run, load.concurrency, 1, 1, 1.0, 1.0, {}, None)
            for variant in load.groups()
        ]
        return runs, answers

    monkeypatch.setattr("sglang_parse.compare.run.bench", serve)
    return found


def measure(server: Remote, folder: Path, *flags: str) -> Measured:
    urls = [word for name in NAMES for word in ("--url", f"{name}={server.url}")]
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    settings = CompareSettings.read(parser.parse_args([*urls, *flags]))
    task = Assignment("", PROBLEMS, grade, 10)
    with Pool([], folder, remotes=settings.remotes) as pool:
        return Runner(settings, task, pool, ProgressLog(Console(quiet=True))).measure()


def test_servers_take_turns_and_graded_answers_come_last(
    server: Remote, tmp_path: Path, loads: list[Load]
):
    """The order turns round; a server is warmed up before its first run; grades come last."""
    words = ["--runs", "2", "--thresholds", "0.9", "--concurrency", "1,2", "--requests", "1"]
    words += ["--problems", "2", "--sweep-problems", "1", "--traced", "1", "--warmup", "3"]
    measured = measure(server, tmp_path, *words)
    own = {name: [(Variant(name), 1), (Variant(name), 2)] for name in NAMES}
    own["parse"].append((Variant("parse", 0.9), 1))
    turns = [(name, 0) for name in NAMES] + [(name, 1) for name in NAMES[::-1]]
    expected = [(*load, run) for name, run in turns for load in own[name]]
    assert [(load.variant, load.concurrency, load.run) for load in loads] == expected
    assert [(run.variant, run.run) for run in measured.serving] == [(v, r) for v, _, r in expected]
    both = (Variant("parse"), Variant("parse", 0.9))
    assert [(one.variant, one.run) for one in measured.traced] == [
        (variant, run) for run in (0, 1) for variant in both
    ]
    graded_runs = [(one.variant, one.run, len(one.answers)) for one in measured.graded]
    assert graded_runs == [
        *((Variant("plain"), 0, 2), (Variant("plain"), 1, 2)),
        *((both[0], 0, 2), (both[1], 0, 1), (Variant("draft"), 0, 2)),
    ]
    assert measured.graded[0].scores == (1, 1)
    # Three answers before a server's first run, one before the next.
    warm_up, again = ["problem 0", "problem 1", "problem 2"], ["problem 0"]
    assert sorted(Echo.texts[:3]) == warm_up
    traced = 2 * 2
    assert len(Echo.texts) == 3 * (len(warm_up) + len(again)) + traced + 2 * 2 + 2 + 1 + 2


def test_timed_answers_are_graded_where_no_others_are(
    server: Remote, tmp_path: Path, loads: list[Load]
):
    """Of every variant all that it was timed with, in the same order; not those of a mixed load."""
    words = ["--runs", "2", "--thresholds", "0.9", "--concurrency", "1,2", "--requests", "1"]
    words += ["--problems", "0", "--traced", "0", "--off", "0,0.5"]
    measured = measure(server, tmp_path, *words)
    found = {one.variant: one for one in measured.graded}
    assert set(found) == {*map(Variant, NAMES), Variant("parse", 0.9)}
    # Runs of 1 and 6 of the four problems, of which the third is not right.
    sent = [load for load in loads if load.variant == Variant("plain")]
    assert [len(load.problems) for load in sent] == [1, 6, 1, 6]
    alone = [problem.reference for load in sent[::2] for problem in load.problems]
    pairs = [problem.reference for load in sent[1::2] for problem in load.problems]
    expected = tuple(float(number != 2) for number in alone + pairs)
    assert {found[Variant(name)].scores for name in NAMES} == {expected}
    assert found[Variant("parse", 0.9)].scores == expected[:2]
    assert found[Variant("plain")].output_tokens == 5 * 14
