"""examples/real_pair: what settings are asked, and what their answers are worth."""

from __future__ import annotations

import json
from pathlib import Path

import answers  # examples/real_pair is on pytest's pythonpath
import pytest
import summary


def row(setting: str, key: str, right: int, **parse: int) -> dict:
    counts = {"rounds": 10, "drafted_tokens": 160, "accepted_tokens": 90, "matched_tokens": 0}
    found = {**counts, "target_tokens": 12, **parse}
    tokens = found["accepted_tokens"] + found["target_tokens"]
    same = {"task": "sums", "setting": setting, "key": key, "right": right, "token_ids": [right]}
    return same | {"output_tokens": tokens, "parse": found}


def test_a_setting_is_tested_on_the_baselines_problems():
    rows = [row("exact", key, right) for key, right in zip("abcd", (1, 1, 1, 0), strict=True)]
    rows += [row("lossy", key, right) for key, right in zip("abdz", (1, 0, 1, 0), strict=True)]
    exact, lossy = summary.results_of(rows, "exact")
    assert (exact["right"], exact["better"], exact["worse"], exact["same_text"]) == (3, 0, 0, 4)
    # Without z, which the baseline has not answered yet.
    assert (lossy["problems"], lossy["right"]) == (3, 2)
    assert (lossy["better"], lossy["worse"], lossy["p_value"]) == (1, 1, 1)
    assert lossy["same_text"] == 1


def test_counts():
    (result,) = summary.results_of([row("exact", "a", 1)], "exact")
    assert result["tokens_per_round"] == 10.2
    assert result["decode_steps"] == 2
    steps = 2 + 10 * 1.1 + 0.004 * 170
    assert result["speedup"]["small draft"] == pytest.approx(102 / (steps + 160 * 0.14))
    assert summary.cells(result)[:3] == ["sums", "exact", "1 of 1"]
    assert len(summary.cells(result)) == len(summary.HEADINGS)


def test_it_goes_on_problem_by_problem(tmp_path: Path):
    for name in ("one", "two"):
        lines = [json.dumps({"key": f"{name}{n}", "prompt": "?"}) for n in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    words = [f"{tmp_path}/one.jsonl:3:true", f"{tmp_path}/two.jsonl:2:true"]
    tasks = [answers.read_task(word) for word in words]
    settings = [answers.read_setting('low={"threshold": 0.2}'), answers.read_setting("draft")]
    assert settings == [("low", {"threshold": 0.2}), ("draft", None)]
    given = type("Given", (), {"task": tasks, "setting": settings})
    jobs = answers.jobs_of(given, tmp_path / "none.jsonl")
    assert [(job.task, job.setting) for job in jobs[:4]] == [
        *(("one", "low"), ("one", "draft"), ("two", "low"), ("two", "draft"))
    ]
    assert len(jobs) == 2 * (3 + 2) == len({(job.item.key, job.setting) for job in jobs})
    first = {"task": "one", "key": jobs[0].item.key, "setting": "low"}
    (tmp_path / "some.jsonl").write_text(json.dumps(first) + "\n")
    assert answers.jobs_of(given, tmp_path / "some.jsonl") == jobs[1:]
