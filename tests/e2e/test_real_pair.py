"""``make real-pair``, smaller and with the question pair's models."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
import side_by_side

from support.demo_pair import DEMO


@pytest.mark.nightly("tests/unit/test_real_pair.py")
@pytest.mark.usefixtures("programs")
def test_a_small_one_that_is_stopped(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch):
    """The second call asks what the first one has no answer to."""
    flags = ["--target", str(DEMO / "target"), "--draft", str(DEMO / "draft"), "--problems", "1"]
    words = [*flags, "--max-tokens", "12", "--output", str(tmp_path)]
    monkeypatch.setattr(side_by_side, "SERVERS", side_by_side.SERVERS[:2])
    assert side_by_side.main(words) == 0
    assert "start PARSE" not in capsys.readouterr().out
    monkeypatch.undo()
    assert side_by_side.main(words) == 0
    assert "start plain" not in (printed := capsys.readouterr().out)
    assert "start PARSE, likelihood" in printed
    rows = [json.loads(line) for line in (tmp_path / "answers.jsonl").read_text().splitlines()]
    assert [(row["server"], row["task"]) for row in rows] == [
        (server, task) for server in side_by_side.SERVERS for task in ("gsm8k", "humaneval")
    ]
    found = json.loads((tmp_path / "results.json").read_text())["servers"]
    assert [one["server"] for one in found] == [*side_by_side.SERVERS]
    assert found[0]["tokens_per_pass"] == 1 < found[1]["tokens_per_pass"]
    assert all("by_counts" in one for one in found[2:])
    assert "by the roofline" in (tmp_path / "report.html").read_text()
