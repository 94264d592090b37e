"""A calibration without a server: its requests, what it stores, and how it resumes."""

from __future__ import annotations

import io
import json
from argparse import ArgumentParser
from dataclasses import replace
from pathlib import Path

import pytest
from rich.console import Console

from sglang_parse.calibrate.run import calibrate as run_calibration
from sglang_parse.calibrate.settings import CalibrateSettings
from sglang_parse.client.records import Answer, Assignment, BenchError, BenchRun, Item, Variant
from sglang_parse.client.servers import Remote
from sglang_parse.client.tables import make_progress
from sglang_parse.tasks import collect
from sglang_parse.tasks.collect import Collector
from support.calibration import FINGERPRINT

pytestmark = pytest.mark.unit

TASK = Assignment("words", [Item(str(n), f"{n}", None) for n in range(40)], lambda *_: 1.0, 64)


class Server:
    """Answers in place of ``ask``; its verdict of problem n is n / 100."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, dict]] = []
        self.changes: dict = {}
        self.on_answer = lambda _: None

    def ask(self, server, items, indices, *, concurrency, asking, on_answer) -> BenchRun:
        del items
        parse = asking.parse
        answers = []
        for index in indices:
            self.asked.append((server.name, index, parse))
            record = {"output_start": 1, "anchor_token_id": 1, "draft_token_ids": [2, 3]}
            record |= {"finished": True, "verdicts": [index / 100], "prefix_ends": [2]}
            record["threshold"] = parse.get("threshold", 0.04)
            info = {"fingerprint": FINGERPRINT.model_dump(), "kv_truncated_drafts": 0}
            info |= {"trace": [record]}
            answers.append(Answer(index, ("3",), 3, 1.0, {"parse": [info | self.changes]}))
            self.on_answer(index)
            on_answer()
        return BenchRun(Variant(server.name), -1, concurrency, 1.0, tuple(answers))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server()
    monkeypatch.setattr(collect, "ask", found.ask)
    return found


def read(*words: str) -> CalibrateSettings:
    parser = ArgumentParser()
    CalibrateSettings.add_arguments(parser)
    return CalibrateSettings.read(parser.parse_args(words))


def calibrate(folder: Path, *words: str, task: Assignment = TASK):
    sizes = ("--pilot", "10", "--requests", "20", "--served", "10", "--concurrency", "4")
    settings = read(*sizes, "--output", str(folder), "--loss", "answer", *words)
    endpoint = Remote("parse", "http://nowhere")
    with make_progress(Console(file=io.StringIO())) as progress:
        collector = Collector(settings, task, endpoint, progress, lambda ids: str(len(ids)))
        return run_calibration(settings, "answer", collector)


def test_a_server_with_another_judge_asks_no_question():
    (found,) = read().server_specs()
    assert found.flags[-2] == "--parse-judge"  # the demo pair's own
    assert "--parse-question" not in found.flags
    (asking,) = read("--judge", "question").server_specs()
    assert "--parse-question" in asking.flags
    assert "--parse-judge" not in asking.flags
    (spec,) = read("--judge", "likelihood", "--parse-flags", "--parse-segment line").server_specs()
    assert spec.flags[-4:] == ("--parse-judge", "likelihood", "--parse-segment", "line")
    assert "--parse-question" not in spec.flags


def test_the_three_sets_are_disjoint_and_asked_once(server: Server, tmp_path: Path):
    words = ("--thresholds", "0.5", "--alpha", "0.2")
    figures, certificate = calibrate(tmp_path, *words)
    drafts = [index for _, index, parse in server.asked[1:] if parse.get("trace")]
    plain = [index for name, index, _ in server.asked if name == "plain"]
    assert (drafts, plain) == (list(range(30)), list(range(30, 40)))
    always = {parse["drafting"] for _, _, parse in server.asked if parse["enabled"]}
    assert always == {"always"}
    # No draft is wrong: the loosest threshold passes, and is served beside the others.
    assert certificate.errors == 0
    assert certificate.threshold == min(row.threshold for row in figures.thresholds)
    served = [row.threshold for row in figures.served]
    assert served == sorted({certificate.threshold, 0.04, 0.5})
    asked = len(server.asked)
    assert calibrate(tmp_path, *words) == (figures, certificate)
    assert len(server.asked) == asked + 1  # the fingerprint alone


@pytest.mark.usefixtures("server")
def test_the_servers_threshold_is_tested(tmp_path: Path):
    figures, _ = calibrate(tmp_path)
    assert figures.served_threshold == 0.04
    assert 0.04 in [row.threshold for row in figures.thresholds]


def test_a_stopped_calibration_resumes(server: Server, tmp_path: Path):
    """It stops at the 21st problem; the wave of 32 before it is on disk."""
    task = replace(TASK, items=[*TASK.items, *TASK.items])
    sizes = ("--requests", "50", "--served", "0", "--concurrency", "4")

    def on_answer(index: int) -> None:
        if index == 40:
            raise KeyboardInterrupt

    server.on_answer = on_answer
    with pytest.raises(KeyboardInterrupt):
        calibrate(tmp_path, *sizes, task=task)
    server.asked.clear()
    server.on_answer = lambda _: None
    calibrate(tmp_path, *sizes, task=task)
    assert [index for _, index, _ in server.asked[1:]] == list(range(32, 60))


def test_results_of_another_server_are_refused(server: Server, tmp_path: Path):
    calibrate(tmp_path, "--served", "0")
    server.changes = {"fingerprint": FINGERPRINT.model_dump() | {"draft": "b", "target": "a"}}
    with pytest.raises(BenchError, match="was measured with another draft, target; fix: give"):
        calibrate(tmp_path)
    server.changes = {"fingerprint": FINGERPRINT.model_dump() | {"selection": "answer-first"}}
    calibrate(tmp_path, "--served", "0")  # first drafts do not depend on the selection
    (tmp_path / "first-drafts.json").write_text("{]")
    with pytest.raises(BenchError, match="is damaged"):
        calibrate(tmp_path)


@pytest.mark.usefixtures("server")
@pytest.mark.parametrize("score", [0.5, 2.0])
def test_other_grades_are_refused(tmp_path: Path, score: float):
    with pytest.raises(BenchError, match=f"words grades problem 0 with {score}, not 0 or 1"):
        calibrate(tmp_path, task=replace(TASK, grade=lambda *_: score))


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            {"fingerprint": FINGERPRINT.model_dump() | {"question": {}, "judge": ""}},
            "there are no verdicts",
        ),
        ({"kv_truncated_drafts": 1}, "drafts were truncated for lack of KV slots"),
        ({"trace": []}, "the server did not draft at once; fix: .*--parse-drafting always"),
    ],
)
def test_unusable_answers_are_refused(server: Server, tmp_path: Path, changes: dict, message: str):
    server.changes = json.loads(json.dumps(changes))
    with pytest.raises(BenchError, match=message):
        calibrate(tmp_path)
