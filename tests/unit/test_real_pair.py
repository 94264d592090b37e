"""examples/real_pair: what settings are asked, and what their answers are worth."""

from __future__ import annotations

import json
from pathlib import Path

import answers  # examples/real_pair is on pytest's pythonpath
import numpy as np
import pytest
import readings
import side_by_side
import summary
import torch


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


def test_answers_too_short_for_a_draft():
    """They have no round: nothing is kept of nothing."""
    none = {"rounds": 0, "drafted_tokens": 0, "accepted_tokens": 0}
    (result,) = summary.results_of([row("exact", "a", 1, **none)], "exact")
    assert (result["kept"], result["tokens_per_round"]) == (None, None)
    assert result["speedup"]["blocks"] == pytest.approx(1)
    assert summary.cells(result)[7:9] == ["–", "–"]


def test_it_goes_on_problem_by_problem(tmp_path: Path):
    for name in ("one", "two"):
        lines = [json.dumps({"key": f"{name}{n}", "prompt": "?"}) for n in range(5)]
        (tmp_path / f"{name}.jsonl").write_text("\n".join(lines))
    words = [f"{tmp_path}/one.jsonl:3:true", f"{tmp_path}/two.jsonl:2:true"]
    tasks = [answers.read_task(word) for word in words]
    _, others, _ = answers.read_task(f"{tmp_path}/one.jsonl:3-5:true")
    assert len({item.key for item in (*tasks[0][1], *others)}) == 3 + 2
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


def test_readings_of_a_draft():
    """Three tokens of a vocabulary of four; the target would have chosen another second one."""
    target = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.6, 0.3, 0.05, 0.05], [0.25, 0.25, 0.25, 0.25]])
    own = torch.tensor([[0.7, 0.1, 0.1, 0.1], [0.2, 0.6, 0.1, 0.1], [0.25, 0.25, 0.25, 0.25]])
    row = readings.readings_of(target.log(), own.log(), [0, 1, 3])
    assert row["choice"][:2] == [0, 0]
    assert row["rank"] == [0, 1, 0]
    assert row["logprob"] == pytest.approx(np.log([0.7, 0.3, 0.25]), abs=1e-5)
    assert row["entropy"][2] == pytest.approx(np.log(4), abs=1e-5)
    assert row["ratio"] == pytest.approx([0, np.log(0.5), 0], abs=1e-5)
    divergence = 0.2 * np.log(0.2 / 0.6) + 0.6 * np.log(2) + 0.2 * np.log(2)
    assert row["divergence"] == pytest.approx([0, divergence, 0], abs=1e-5)
    assert readings.READINGS["likelihood"](row)[2] == pytest.approx(0, abs=1e-5)


def test_means():
    assert readings.means([2, 4]) == [2, 3]
    assert readings.means([8, *[0] * 7, 16]) == pytest.approx([8 / n for n in range(1, 9)] + [2])


@pytest.mark.parametrize("harm", range(7))
def test_the_token_that_turns_an_answer_is_found(harm: int):
    places, asked = [3, 4, 9, 12, 20, 21, 40], []

    def is_right(place: int) -> bool:
        asked.append(place)
        return place < places[harm]

    assert readings.turning_place(places, is_right) == places[harm]
    assert len(asked) <= 3


def test_places_where_the_target_would_have_chosen_another_token():
    row = {"draft": [5, 6, 7, 8], "choice": [5, 9, 7, 3]}
    assert readings.places_of(row) == [1, 3]


def test_harms_that_pass():
    """The reading that is low at the one harm lets it pass in no case; strict numbers neither."""
    length = 320
    draft, same = [0] * length, {"task": "sums", "draft": [0] * length, "entropy": [0.0] * length}
    choice, low = [*draft], [0.0] * length
    for place in (5, 50):
        choice[place], low[place] = 1, -9.0 if place == 5 else -1.0
    flat = {name: [0.0] * length for name in ("ratio", "divergence", "rank")}
    row = {**same, **flat, "key": "a", "choice": choice, "logprob": low}
    other = row | {"key": "b", "choice": [*draft[:-1], 1], "logprob": [*draft[:-1], -1.0]}
    turns = [{"task": "sums", "key": key, "harm": harm} for key, harm in (("a", 5), ("b", None))]
    results = [*readings.compare([row, other], turns, str)]
    found = {(one["reading"], *one["strict"]): one for one in results}
    assert len(found) == 2 * len(readings.READINGS)
    alone = found["likelihood",]
    assert (alone["auroc"]["auroc"], alone["harms"], alone["harmless"]) == (1, 1, 1)
    assert alone["harms_passed"] == dict.fromkeys(readings.EVERY, 0)
    assert found["rank in the target",]["harms_passed"] == dict.fromkeys(readings.EVERY, 1)
    assert found["rank in the target", "numbers"]["harms_passed"] == dict.fromkeys(
        readings.EVERY, 0
    )


def answer(server: str, key: str, **found: object) -> dict:
    """One of four servers' answers, 100 tokens in two seconds."""
    same = {"server": server, "task": "gsm8k", "key": key, "max_tokens": 8, "right": 1.0}
    same |= {"output_tokens": 100, "ms": 2000.0, "token_ids": [1], "parse": {}}
    return same | {"accept_length": None} | found


def test_four_servers_side_by_side():
    parse = row("exact", "a", 1)["parse"]  # 102 tokens in 10 rounds and 2 decode steps
    rows = {
        "plain": [answer("plain", "a"), answer("plain", "b", right=0.0)],
        "standalone": [answer("standalone", key, accept_length=2.5, ms=1000.0) for key in "ab"],
        "parse-token": [
            answer("parse-token", key, parse=parse, output_tokens=102, ms=500.0, token_ids=ids)
            for key, ids in (("a", [1]), ("b", [2]))
        ],
    }
    found = [side_by_side.figures(server, some, rows["plain"]) for server, some in rows.items()]
    facts, gpu = {"machine": "two cores"}, {"Speedup": [side_by_side.Text("1x")]}
    shown = side_by_side.sections(found, rows, gpu, facts)
    ((grid,), (each,), *_) = shown.values()
    assert [[*line] for line in grid.rows] == [
        ["plain target", "1 of 2", "200", "50.0", "1.00x", "1.0", "", "", "", "2 of 2"],
        ["STANDALONE", "2 of 2", "200", "100.0", "2.00x", "2.5", "", "", "", "2 of 2"],
        ["PARSE, token mode", "2 of 2", "204", "204.0", "4.08x", "8.5", "56%", "2.8x", "5.3x"]
        + ["1 of 2"],
    ]
    assert [*each.rows[1]][:2] == ["gsm8k b", ("50.0", "wrong")]


def test_ten_problems_that_were_measured(tmp_path: Path):
    """Six and four; what was answered is not asked again."""
    items = side_by_side.problems(None)
    assert [task for task, _ in items] == 6 * ["gsm8k"] + 4 * ["humaneval"]
    assert len(side_by_side.problems(1)) == 2
    path, (first, *_) = tmp_path / "answers.jsonl", items
    path.write_text(json.dumps(answer("plain", first[1].key)) + "\n")
    turns = side_by_side.Turns(path, items, 8)
    assert turns.missing("plain") == items[1:]
    assert turns.missing("standalone") == items
    assert side_by_side.Turns(path, items, 9).missing("plain") == items


class Spelled:
    """A tokenizer of letters; "." ends an answer."""

    eos_token_id = ord(".")

    def decode(self, token_ids: list[int]) -> str:
        return "".join(map(chr, token_ids))


def test_drafts_for_train_judge():
    row = {"draft": [*map(ord, "abc.")]}
    right = readings.labeled("?", row, {"harm": None}, Spelled())
    asked = [{"role": "user", "content": "?"}]
    assert right == {"messages": asked, "draft": "abc", "score": 1, "right_chars": None}
    wrong = readings.labeled("?", row, {"harm": 1}, Spelled())
    assert (wrong["score"], wrong["right_chars"]) == (0, 1)
    # The answer's end is the error.
    assert readings.labeled("?", row, {"harm": 3}, Spelled())["right_chars"] == 3
