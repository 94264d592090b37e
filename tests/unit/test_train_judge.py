"""Training a verdict head, its labels and its figures, without a server."""

from __future__ import annotations

import base64
import json
import math
from argparse import ArgumentParser
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import numpy as np
import pytest

from sglang_parse.client.records import Answer, Assignment, BenchError, Item
from sglang_parse.core.segment import SegmentRule
from sglang_parse.tasks.collect import Collector, GradedDraft
from sglang_parse.train_judge.data import data_assignment, read_data
from sglang_parse.train_judge.drafts import (
    FOLDS,
    LabeledDraft,
    NothingToLearnError,
    TrainingSet,
)
from sglang_parse.train_judge.figures import Bootstrap, threshold_at
from sglang_parse.train_judge.gather import HiddenStates, label, prompt_numbers, resegmented
from sglang_parse.train_judge.report import summary
from sglang_parse.train_judge.result import JudgeReport
from sglang_parse.train_judge.settings import TrainJudgeSettings
from sglang_parse.train_judge.training import (
    likelihood_scores,
    num_steps,
    platt,
    train,
)
from support.labeled_drafts import HIDDEN, make_drafts

pytestmark = pytest.mark.unit

MAX_ROWS = 32


# -- training --------------------------------------------------------------------------------


def test_a_planted_direction_is_found():
    data, direction = make_drafts(160)
    steps = []
    found = train(data, MAX_ROWS, lambda: steps.append(1))
    assert found.candidate.layers[-1] == 5
    assert Bootstrap(data.drafts).auroc(found.scores).value > 0.98
    # The state at a wrong token's own row tells, not the one before.
    at = found.head.weights[1][-HIDDEN:]
    assert at @ direction / np.linalg.norm(at) > 0.9
    assert len(steps) == num_steps(data)
    assert [count for count, _ in found.curve] == [16, 32, 64, 128]


def test_scores_are_log_odds():
    data, _ = make_drafts(160, signal=1.0)
    found = train(data, MAX_ROWS)
    pairs = [
        (1 / (1 + math.exp(-scores[place])), draft.right[place])
        for draft, scores in zip(data.drafts, found.scores, strict=True)
        for place in draft.labeled
    ]
    verdicts, right = np.array(pairs, float).T
    assert verdicts.mean() == pytest.approx(right.mean(), abs=0.01)


def test_held_out_prompts_decide():
    """Drafts of one prompt share a fold, so learning the prompts by heart is not rewarded."""
    data, _ = make_drafts(80, per_prompt=4)
    by_prompt: dict[int, set[int]] = {}
    for draft, fold in zip(data.drafts, data.folds, strict=True):
        by_prompt.setdefault(draft.prompt, set()).add(int(fold))
    assert all(len(folds) == 1 for folds in by_prompt.values())
    assert {*data.folds.tolist()} == {*range(FOLDS)}


def test_log_probabilities_are_used_where_they_tell():
    data, _ = make_drafts(160, signal=0.0, likely=True)
    found = train(data, MAX_ROWS)
    assert found.head.scalars[0] > 0
    assert Bootstrap(data.drafts).auroc(found.scores).value > 0.95


def test_complete_drafts_alone_train_a_running_mean():
    data, _ = make_drafts(200, locates=False)
    found = train(data, MAX_ROWS)
    assert found.candidate.pooling == "running-mean"
    assert found.head.weights.shape[0] == 3
    assert Bootstrap(data.drafts).auroc(found.scores).value > 0.75


def test_noise_trains_a_head_that_is_called_useless():
    data, _ = make_drafts(160, signal=0.0)  # some head is right by chance
    report = JudgeReport.of(data, train(data, MAX_ROWS))
    assert report.is_useless
    assert "do not serve it" in summary(report)[0]


def test_a_head_that_knows_prompts_only_is_said_to():
    """Half of the prompts are hard, all of whose drafts but one are wrong."""
    numbers = np.random.default_rng(3)
    hard = [prompt % 2 == 1 for prompt in range(60) for _ in range(4)]
    right = [(place % 4 == 0) == is_hard for place, is_hard in enumerate(hard)]
    drafts = []
    for place, (is_hard, is_right) in enumerate(zip(hard, right, strict=True)):
        rows = np.array([[0.0], [1.0], [1.0]], np.float32) * (1 - 2 * is_hard)
        rows += numbers.normal(scale=0.1, size=(3, 1)).astype(np.float32)
        load = partial(np.copy, rows)
        drafts.append(LabeledDraft(place // 4, [2], [is_right], None, [-1.0] * 2, [1.0] * 2, load))
    data = TrainingSet(drafts, (1,), 1, False)
    report = JudgeReport.of(data, train(data, MAX_ROWS))
    assert report.head.auroc.low > 0.6
    assert "it may know which prompts are hard, not which drafts are wrong" in " ".join(
        summary(report)
    )


def test_scores_that_are_lower_where_drafts_are_right_are_nothing_to_serve():
    drafts = drafts_of(*[[True]] * 10, *[[False]] * 10)
    with pytest.raises(NothingToLearnError, match="know nothing about these labels"):
        platt(drafts, [[0.1]] * 10 + [[0.9]] * 10)


def test_a_head_that_is_no_better_than_the_likelihood_is_said_to_be():
    data, _ = make_drafts(120, signal=0.0, likely=True)
    report = JudgeReport.of(data, train(data, MAX_ROWS))
    assert report.unbeaten == ["logprob"]
    assert "NOT clearly better" in summary(report)[0]


@pytest.mark.parametrize("right", [True, False])
def test_one_kind_of_label_is_nothing_to_learn_from(right: bool):
    rows = partial(np.zeros, (3, 4), np.float32)
    drafts = [LabeledDraft(n, [2], [right], None, [-1.0] * 2, [1.0] * 2, rows) for n in range(20)]
    data = TrainingSet(drafts, (1,), 4, False)
    with pytest.raises(NothingToLearnError, match="training needs 5 of each"):
        train(data, MAX_ROWS)


def test_few_rows_keep_the_wrong_token():
    data, _ = make_drafts(160)
    found = train(data, max_rows=1)
    assert Bootstrap(data.drafts).auroc(found.scores).value > 0.9


# -- figures ---------------------------------------------------------------------------------


def drafts_of(*right: Sequence[bool | None], prompts: Sequence[int] | None = None):
    return [
        LabeledDraft(
            prompt=prompts[n] if prompts else n,
            prefix_ends=[10 * (k + 1) for k in range(len(own))],
            right=own,
            wrong_token=None,
            logprobs=[-1.0] * 10 * len(own),
            entropies=[1.0] * 10 * len(own),
            load=partial(np.zeros, (1 + 10 * len(own), 1), np.float32),
        )
        for n, own in enumerate(right)
    ]


def test_auroc_counts_pairs():
    drafts = drafts_of([True, False, None], [True, True], [False, None])
    scores = [[0.9, 0.5, 0.0], [0.5, 0.7], [0.6, 0.9]]
    # right: 0.9, 0.5, 0.7; wrong: 0.5, 0.6; won: 2 + 0.5 + 2
    assert Bootstrap(drafts).figures(scores).auroc.value == pytest.approx(4.5 / 6)


def test_auroc_within_prompts_ignores_prompts_of_one_kind():
    drafts = drafts_of([True], [False], [True], [False], prompts=[0, 0, 1, 2])
    figures = Bootstrap(drafts).figures([[0.1], [0.2], [0.9], [0.0]])
    assert figures.auroc_within_prompt.value == 0.0
    assert figures.auroc.value == 0.75


def test_kept_at_risk_is_that_of_first_reject():
    drafts = drafts_of(*[[True, True]] * 98, [True, False], [False, None])
    scores = [[0.9, 0.8]] * 98 + [[0.9, 0.7], [0.1, 0.99]]
    kept = Bootstrap(drafts).figures(scores).kept_at_risk
    # At threshold 0.7 one draft of 100 has an error accepted; above it none, and half the tokens
    # of that draft; the last draft is rejected at its first prefix.
    assert kept["1"].value == pytest.approx((98 * 20 + 20) / 2000)
    assert kept["2"].value == pytest.approx(1.0)


def test_the_threshold_at_a_risk_accepts_so_many_errors():
    drafts = drafts_of(*[[True, True]] * 96, *[[True, False]] * 4)
    wrong = [[0.9, 0.7], [0.6, 0.8], [0.9, 0.3], [0.9, 0.2]]
    scores = [[0.9, 0.8]] * 96 + wrong
    assert [threshold_at(drafts, scores, percent) for percent in (0, 1, 2, 4)] == [
        *(pytest.approx(value) for value in (0.7, 0.6, 0.3)),
        0.2,
    ]
    assert all(threshold_at(drafts, scores, n) > value for n, value in enumerate((0.7, 0.6, 0.3)))


def test_a_draft_by_token_is_right_up_to_its_first_wrong_token():
    draft = make_drafts(1)[0].drafts[0]
    whole = replace(draft, prefix_ends=[3, 5], right=[True, True], wrong_token=None)
    assert list(whole.by_token.prefix_ends) == [1, 2, 3, 4, 5]
    assert whole.by_token.right == [True] * 5
    wrong = replace(draft, prefix_ends=[3, 5], right=[False, None], wrong_token=2)
    assert wrong.by_token.right == [True, False, None, None, None]
    assert replace(wrong, wrong_token=0).by_token.right == [False, *[None] * 4]


def test_drafts_that_are_labeled_as_a_whole_are_kept_whole():
    """Or a reader that rejects only the last segment of every draft would keep the others."""
    drafts = drafts_of(*[[None, None, True]] * 2, *[[None, None, False]] * 2)
    scores = [[0.9, 0.9, 0.8], [0.9, 0.9, 0.2], [0.9, 0.9, 0.4], [0.9, 0.9, 0.1]]
    kept = Bootstrap(drafts).figures(scores).kept_at_risk
    assert kept["1"].value == pytest.approx(30 / 120)


def test_intervals_are_by_prompt():
    """A hundred copies of one prompt's drafts know no more than one prompt."""
    drafts = drafts_of(*[[True], [False]] * 50, prompts=[n // 2 for n in range(100)])
    scores = [[float(numbers)] for numbers in np.random.default_rng(0).random(100)]
    one = Bootstrap(drafts).figures(scores).auroc
    assert one.low < one.value < one.high
    same = Bootstrap([*drafts] * 4).figures([*scores] * 4).auroc
    assert (same.low, same.high) == pytest.approx((one.low, one.high))


def test_likelihood_is_the_worst_token():
    (draft,) = drafts_of([True, True])
    scores = likelihood_scores(draft)
    assert scores == [pytest.approx(-math.log(0.3))] * 2


# -- labels ----------------------------------------------------------------------------------

STATES = HiddenStates("question", (1,), 4, "float32", Path())


def stored_draft(**changes) -> dict[str, Any]:
    given = {
        "problem": 0,
        "verdicts": [0.9, 0.8, 0.7],
        "prefix_ends": [2, 4, 6],
        "num_drafted": 6,
        "finished": True,
        "first_wrong": 1,
        "is_answer_right": False,
        "first_wrong_token": 3,
    }
    return {"draft": given | changes, "logprobs": [-1.0] * 6, "entropies": [1.0] * 6}


def test_a_draft_cut_anew_ends_with_its_last_prefix(tmp_path: Path):
    """A head's draft is verified at every token; lines may end before it does."""
    states = replace(STATES, folder=tmp_path)
    pieces = ["a", "b\n", "c", "d\n", "e", "f"]
    segments = SimpleNamespace(pieces=lambda _: pieces, rule=SegmentRule.parse("line"))
    hidden = base64.b64encode(np.zeros((7, 4), np.float32)).decode()
    whole = {
        "draft_token_ids": [*range(6)],
        "finished": False,
        "prefix_ends": [*range(1, 7)],
        "verdicts": [0.9] * 6,
        "hidden_states": {"data": hidden, "dtype": "float32", "shape": [7, 4]},
        "draft_logprobs": [-1.0] * 6,
        "draft_entropies": [1.0] * 6,
    }
    cut = resegmented(whole, segments)
    assert (cut["prefix_ends"], cut["verdicts"]) == ([2, 4], [])
    graded = GradedDraft(0, cut["verdicts"], cut["prefix_ends"], 6, False, None, None)
    found = label(states.store(graded, whole), [0], states, is_located=True)
    assert (len(found.logprobs), len(found.entropies), found.right) == (4, 4, [True, True])
    assert found.load().shape == (1 + found.num_tokens, 4) == (5, 4)


def record(start: int, anchor: str, draft: str) -> dict[str, Any]:
    """Of a draft whose lines end with a capital; tokens are characters."""
    ends = [n for n, letter in enumerate(draft, start=1) if letter.isupper()]
    return {
        "output_start": start,
        "anchor_token_id": ord(anchor),
        "draft_token_ids": [*map(ord, draft)],
        "finished": False,
        "prefix_ends": ends,
        "verdicts": [0.9] * len(ends),
    }


@pytest.mark.parametrize(
    ("wrong_at", "found"),
    [
        (None, [(1, None, None), (2, None, None)]),  # of the whole answer
        (12, [(1, None, None), (2, 1, 4)]),  # in the third draft
        (7, [(1, 0, 2)]),  # accepted: what follows has no label
        (6, [(1, 0, 1)]),
        (1, []),
    ],
)
def test_later_drafts_have_labels_while_what_is_before_them_is_right(wrong_at, found):
    output = "abCdeFghIjkLmN"
    trace = [record(1, "a", "bCdx"), record(6, "F", "ghI"), record(9, "I", "jkLmN")]
    task = Assignment("", [Item("0", "?", None)], lambda *_: 0, 99, lambda *_: wrong_at)
    decode = lambda ids: "".join(map(chr, ids))  # noqa: E731
    answer = Answer(
        *(0, output, 14, 1.0, {"parse": {"kv_truncated_drafts": 0, "trace": trace}}),
        token_ids=tuple(map(ord, output)),
    )
    drafts = Collector(None, task, None, None, decode).grade_later_drafts(answer, dict)
    assert [(one.round, one.first_wrong, one.first_wrong_token) for one in drafts] == found


def test_prefixes_after_the_first_wrong_one_have_no_label():
    found = label(stored_draft(), [5], STATES, is_located=True)
    assert found.right == [True, False, None]
    assert (found.prompt, found.wrong_token, found.labeled) == (5, 3, [0, 1])
    assert list(found.asked) == [0.9, 0.8, 0.7]


def test_without_located_errors_only_complete_drafts_have_a_label():
    found = label(stored_draft(), [5], STATES, is_located=False)
    assert found.right == [None, None, False]
    unfinished = stored_draft(finished=False, is_answer_right=None)
    assert label(unfinished, [5], STATES, is_located=False) is None


def test_items_of_one_prompt_share_a_number():
    items = [Item("0", "a", None), Item("1", "b", None), Item("2", "a", None)]
    assert prompt_numbers(items) == [0, 1, 0]


# -- files and flags -------------------------------------------------------------------------

GOOD = {
    "messages": [{"role": "user", "content": "2 + 2?"}],
    "draft": "It is 5.",
    "score": 0,
    "right_chars": 6,
}


def write(folder: Path, *rows: object) -> Path:
    path = folder / "data.jsonl"
    path.write_text("".join(f"{json.dumps(row)}\n" for row in rows))
    return path


def test_data_is_a_task_that_knows_its_labels(tmp_path: Path):
    right = GOOD | {"draft": "It is 4.", "score": 1, "right_chars": None}
    task = data_assignment(write(tmp_path, GOOD, right), "made")
    assert [task.grade(item, "") for item in task.items] == [0.0, 1.0]
    assert [task.locate(item, "", True) for item in task.items] == [6, None]
    unlocated = data_assignment(write(tmp_path, GOOD | {"right_chars": None}, right), "made")
    assert unlocated.locate is None


@pytest.mark.parametrize(
    ("row", "message"),
    [
        (GOOD | {"score": 2}, "data.jsonl:1: score: "),
        (GOOD | {"draft": ""}, "data.jsonl:1: draft: "),
        (GOOD | {"right_chars": 9}, "right_chars is 9, but score is 0 and draft has 8 characters"),
        (GOOD | {"score": 1}, "right_chars is 6, but score is 1"),
        (GOOD | {"messages": [{"role": "assistant", "content": "x"}]}, "ends with the assistant's"),
        (GOOD | {"messages": [{"role": "user"}]}, "without a role or content"),
        ({"draft": "x", "score": 1}, "data.jsonl:1: messages: "),
    ],
)
def test_data_names_line_field_and_fix(tmp_path: Path, row: object, message: str):
    with pytest.raises(BenchError) as caught:
        read_data(write(tmp_path, row))
    assert message in str(caught.value)
    assert "fix: one object per line" in str(caught.value)


def test_data_that_is_no_json_names_its_line(tmp_path: Path):
    path = write(tmp_path, GOOD)
    path.write_text(path.read_text() + "{\n")
    with pytest.raises(BenchError, match=r"data\.jsonl:2 is not JSON"):
        read_data(path)


def read(*words: str) -> TrainJudgeSettings:
    parser = ArgumentParser()
    TrainJudgeSettings.add_arguments(parser)
    return TrainJudgeSettings.read(parser.parse_args(list(words)))


def segment_of(settings: TrainJudgeSettings) -> str:
    flags = settings.models.parse_flags
    return dict(zip(flags[::2], flags[1::2], strict=True))["--parse-segment"]


def test_the_server_sends_whole_drafts_and_their_hidden_states():
    """Of a fixed length: left alone, a busy server drafts 32 tokens. Cut into lines, which get
    labels; the head that they train may be served at every token."""
    flags = read("--parse-flags", "--parse-segment sentence").models.parse_flags
    wanted = {"--parse-hidden-layers": "8,12,14", "--parse-draft-tokens": "128"}
    assert wanted.items() <= dict(zip(flags[::2], flags[1::2], strict=True)).items()
    assert flags[-2:] == ("--parse-segment", "sentence")
    assert segment_of(read()) == "line"
    assert segment_of(read().with_judge(None)) == "line"
    assert segment_of(read().with_judge("tokens:1")) == "tokens:1"


def test_default_layers_are_half_three_quarters_and_the_last_one_but_one():
    settings = read()
    assert settings.layers == (8, 12, 14)
    assert "--parse-hidden-layers" in settings.models.parse_flags


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--data", "a.jsonl", "--task-file", "b.jsonl"), "leave out --task-file"),
        (("--layers", "1,2,3,4"), "--layers names 4; use at most 3"),
        (("--target", "no/such/model"), "fix: --layers"),
    ],
)
def test_settings_that_do_not_fit(words: tuple[str, ...], message: str):
    with pytest.raises(BenchError, match=message):
        read(*words)
