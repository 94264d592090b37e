"""A calibration without a server: its requests, what it stores, and how it resumes."""

from __future__ import annotations

import io
import json
from argparse import ArgumentParser
from pathlib import Path

import pytest
from rich.console import Console

from sglang_parse.calibrate import collect, run
from sglang_parse.calibrate.collect import Collector, Store
from sglang_parse.calibrate.settings import CalibrateSettings
from sglang_parse.client.ask import Asking
from sglang_parse.client.records import Answer, Assignment, BenchError, BenchRun, Item
from sglang_parse.client.servers import Remote
from sglang_parse.client.tables import make_progress
from support.calibration import FINGERPRINT

pytestmark = pytest.mark.unit

TASK = Assignment("words", [Item(str(n), f"{n}", None) for n in range(40)], lambda *_: 1.0, 64)


class Server:
    """Answers in place of ``ask``; its verdict of problem n is n / 100."""

    def __init__(self) -> None:
        self.asked: list[tuple[str, int, dict]] = []
        self.changes: dict = {}

    def ask(self, server, items, indices, *, variant, concurrency, asking, on_answer) -> BenchRun:
        del items
        parse = asking.custom_params["parse"]
        answers = []
        for index in indices:
            self.asked.append((server.name, index, parse))
            record = {"output_start": 1, "anchor_token_id": 1, "draft_token_ids": [2, 3]}
            record |= {"finished": True, "verdicts": [index / 100], "prefix_ends": [2]}
            info = {"fingerprint": FINGERPRINT.model_dump(), "kv_truncated_drafts": 0}
            info |= {"trace": [record], "draft_ms": 1.0, "verify_ms": 1.0, "decode_ms": 9.0}
            answers.append(Answer(index, ("3",), 3, 1.0, {"parse": [info | self.changes]}))
            on_answer()
        return BenchRun(variant, -1, concurrency, 1.0, tuple(answers))


@pytest.fixture
def server(monkeypatch: pytest.MonkeyPatch) -> Server:
    found = Server()
    monkeypatch.setattr(collect, "ask", found.ask)
    return found


def calibrate(folder: Path, *words: str):
    parser = ArgumentParser()
    CalibrateSettings.add_arguments(parser)
    sizes = ("--pilot", "10", "--requests", "20", "--served", "10", "--concurrency", "4")
    settings = CalibrateSettings.read(
        parser.parse_args([*sizes, "--output", str(folder), "--loss", "answer", *words])
    )
    endpoint = Remote("parse", "http://nowhere")
    collector = Collector(endpoint, TASK, Asking(max_tokens=64), lambda ids: str(len(ids)), 4)
    with make_progress(Console(file=io.StringIO())) as progress:
        return run._calibrate(settings, "answer", collector, progress)


def test_the_three_sets_are_disjoint_and_asked_once(server: Server, tmp_path: Path):
    figures, certificate = calibrate(tmp_path, "--thresholds", "0.5", "--alpha", "0.2")
    drafts = [index for _, index, parse in server.asked[1:] if parse.get("trace")]
    plain = [index for name, index, _ in server.asked if name == "plain"]
    assert (drafts, plain) == (list(range(30)), list(range(30, 40)))
    # No draft is wrong: the loosest threshold passes, and is served beside the requested one.
    assert certificate.errors == 0
    assert certificate.threshold == min(row.threshold for row in figures.selections["longest"])
    assert [row.threshold for row in figures.served] == sorted({certificate.threshold, 0.5})
    asked = len(server.asked)
    assert calibrate(tmp_path, "--thresholds", "0.5", "--alpha", "0.2") == (figures, certificate)
    assert len(server.asked) == asked + 1  # the fingerprint alone


def test_a_stopped_calibration_resumes(server: Server, tmp_path: Path):
    calibrate(tmp_path)
    path = tmp_path / "drafts.jsonl"
    lines = path.read_text().splitlines(keepends=True)
    path.write_text("".join(lines[:11]) + lines[11][:9])  # the 11th draft was being written
    server.asked.clear()
    calibrate(tmp_path)
    assert [index for _, index, _ in server.asked[1:]] == list(range(10, 30))
    assert sorted(path.read_text().splitlines()) == sorted(line.strip() for line in lines)


def test_results_of_another_server_are_refused(tmp_path: Path):
    path = tmp_path / "drafts.jsonl"
    Store(path, {"target": "a", "draft": "b"}).add([{"problem": 0}])
    assert Store(path, {"target": "a", "draft": "b"}).lines == [{"problem": 0}]
    with pytest.raises(BenchError, match="was measured with another draft, target; fix: give"):
        Store(path, {"target": "c", "draft": "d"})
    path.write_text("{]\n")
    with pytest.raises(BenchError, match="is damaged"):
        Store(path, {})


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"fingerprint": FINGERPRINT.model_dump() | {"question": {}}}, "there are no verdicts"),
        ({"kv_truncated_drafts": 1}, "drafts were truncated for lack of KV slots"),
        ({"trace": []}, "the server did not draft at once; fix: .*--parse-drafting always"),
    ],
)
def test_unusable_answers_are_refused(server: Server, tmp_path: Path, changes: dict, message: str):
    server.changes = json.loads(json.dumps(changes))
    with pytest.raises(BenchError, match=message):
        calibrate(tmp_path)
