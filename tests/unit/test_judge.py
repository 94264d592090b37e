"""Verdict heads: pooling, the likelihood reader's promise, files, settings."""

from __future__ import annotations

import json
import math
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.judge import (
    FILE,
    LIKELIHOOD_BIAS,
    LIKELIHOOD_SCALARS,
    JudgeError,
    pooled_scores,
    read_judge,
    sigmoid,
)
from sglang_parse.core.policy.limits import Limits
from sglang_parse.core.setting import ConfigError
from support.heads import HeadShape, write_head

SCORES, AT_ENDS, ENDS = [3.0, -1.0, 2.0, 4.0], [0.5, 0.0, 1.0, -2.0], [2, 4]


@pytest.mark.parametrize(
    ("pooling", "expected"),
    [
        ("worst-token", [-1.0, -1.0]),
        ("running-mean", [1.0 + 0.0, 2.0 - 2.0]),
    ],
)
def test_pooling(pooling, expected: list[float]):
    assert pooled_scores(pooling, SCORES, AT_ENDS, ENDS) == pytest.approx(expected)
    assert pooled_scores(pooling, SCORES, AT_ENDS, []) == []


@given(st.lists(st.floats(-50, 50), min_size=1, max_size=30))
def test_the_worst_token_never_recovers(scores: list[float]):
    ends = [*range(1, len(scores) + 1)]
    pooled = pooled_scores("worst-token", scores, [0.0] * len(scores), ends)
    assert pooled == sorted(pooled, reverse=True)


@given(st.lists(st.floats(0, 30), min_size=2, max_size=40))
def test_the_likelihood_never_rejects_a_greedy_choice(logits: list[float]):
    """In any distribution, the most likely token's verdict is at least 1 / 1.3."""
    total = math.log(sum(map(math.exp, logits)))
    logprobs = [logit - total for logit in logits]
    entropy = -sum(math.exp(p) * p for p in logprobs)
    score = LIKELIHOOD_SCALARS[0] * max(logprobs) + LIKELIHOOD_SCALARS[1] * entropy
    assert sigmoid(score + LIKELIHOOD_BIAS) >= 1 / 1.3 - 1e-9


def test_sigmoid_has_no_overflow():
    assert (sigmoid(-1e4), sigmoid(0.0), sigmoid(1e4)) == (0.0, 0.5, 1.0)
    assert math.isnan(sigmoid(float("nan")))


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    for name in ("target", "draft"):
        (tmp_path / name).mkdir()
        (tmp_path / name / "config.json").write_text("{}")
    shape = HeadShape("worst-token", (2, 5), 8)
    return write_head(tmp_path / "judge", (tmp_path / "target", tmp_path / "draft"), shape, 1.0)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"version": 2}, "wrong version"),
        ({"pooling": "median"}, "wrong pooling"),
        ({"layers": [1, 2, 3, 4]}, "wrong layers"),
        ({"fingerprint": {}}, "wrong fingerprint.target"),
    ],
)
def test_a_damaged_file_is_named(folder: Path, change: dict, words: str):
    path = folder / FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), **change}))
    with pytest.raises(JudgeError, match=words):
        read_judge(str(folder))


def test_no_file(tmp_path: Path):
    (tmp_path / FILE).write_text("no JSON")
    with pytest.raises(JudgeError, match="not a JSON object"):
        read_judge(str(tmp_path))
    with pytest.raises(
        ConfigError, match=r"--parse-judge is '/none'.*cannot be read.*use question"
    ):
        ParseConfig(judge="/none")


@pytest.mark.parametrize(
    ("settings", "name", "max_questions"),
    [
        ({}, "likelihood", 0),
        ({"question": "chatml", "max_prefixes": 4}, "question", 4),
        ({"judge": "question"}, "question", 16),
        ({"judge": "likelihood"}, "likelihood", 0),
        ({"judge": "likelihood", "question": "chatml"}, "likelihood+question", 1),
        ({"judge": "HEAD"}, "head", 0),
        ({"judge": "HEAD", "question": "chatml"}, "head+question", 1),
        ({"verification": "token"}, None, 0),
    ],
)
def test_the_judge_of_settings(folder: Path, settings: dict, name, max_questions: int):
    settings = {key: str(folder) if value == "HEAD" else value for key, value in settings.items()}
    config = ParseConfig(**settings)
    assert (config.judge_name, config.max_questions) == (name, max_questions)


def test_a_trained_head_fixes_the_draft_length(folder: Path):
    """It was trained, and its figures were measured, on drafts of that length."""
    assert "draft_tokens" in Limits.of(ParseConfig(judge=str(folder)), 0).fixed
    assert "draft_tokens" not in Limits.of(ParseConfig(judge="likelihood"), 0).fixed


def test_a_trained_head_has_a_threshold_of_its_own(folder: Path):
    assert ParseConfig(judge=str(folder)).accept_threshold == 0.5  # its file has none
    path = folder / FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), "threshold": 0.9}))
    read_judge.cache_clear()
    assert ParseConfig(judge=str(folder)).accept_threshold == 0.9
    assert ParseConfig(judge=str(folder), threshold=0.5).accept_threshold == 0.5
    assert ParseConfig(judge="likelihood").accept_threshold == 0.5


@pytest.mark.parametrize(
    ("key", "value"),
    [
        *(("threshold", value) for value in (float("nan"), float("inf"), -0.1, 2.1)),
        ("first_verdicts", [0.5, float("nan")]),
    ],
)
def test_numbers_of_a_trained_head(folder: Path, key: str, value: object):
    """With the threshold NaN every request would be a 400 that blames its own."""
    path = folder / FILE
    path.write_text(json.dumps({**json.loads(path.read_text()), key: value}))
    read_judge.cache_clear()
    words = rf"--parse-judge is .*judge.json has a wrong {key}.*; use .*train-judge"
    with pytest.raises(ConfigError, match=words):
        ParseConfig(judge=str(folder))


def test_a_trained_head_has_segments_of_its_own(folder: Path):
    path = folder / FILE
    content = json.loads(path.read_text())
    trained_with = content["fingerprint"]["segment"]
    assert str(ParseConfig(judge=str(folder)).segment_rule) == trained_with
    path.write_text(json.dumps({**content, "segment": "tokens:1"}))
    read_judge.cache_clear()
    assert str(ParseConfig(judge=str(folder)).segment_rule) == "tokens:1"
    assert str(ParseConfig(judge=str(folder), segment="line").segment_rule) == "line"
    assert str(ParseConfig(judge="likelihood").segment_rule) == "tokens:1"
    assert str(ParseConfig(judge="likelihood", segment="line").segment_rule) == "line"
    assert str(ParseConfig(judge="question").segment_rule) == "line"
    path.write_text(json.dumps({**content, "segment": "word"}))
    read_judge.cache_clear()
    with pytest.raises(ConfigError, match="'word'"):
        ParseConfig(judge=str(folder))


def test_layers_to_capture(folder: Path):
    assert ParseConfig().captured_layers == ()
    assert ParseConfig(judge=str(folder)).captured_layers == (2, 5)
    assert ParseConfig(judge=str(folder), hidden_layers="7, 2").captured_layers == (2, 5, 7)
    for wrong in ("1,2,3,4", "-1", "a", "1,,2"):
        with pytest.raises(ConfigError, match="at most 3 layers"):
            ParseConfig(hidden_layers=wrong)
    for settings in ({"hidden_layers": "1"}, {"judge": "question"}):
        with pytest.raises(ConfigError, match="needs no verdicts"):
            ParseConfig(verification="token", **settings)
