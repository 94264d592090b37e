"""Servers and requests that a certificate covers."""

from __future__ import annotations

import logging
import shutil
from pathlib import Path
from typing import Any

import pytest

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.question import Question
from sglang_parse.startup.certificates import Certified, certified_server, model_digest
from support.calibration import demo_args, demo_fingerprint, demo_question, write_certificate
from support.demo_pair import DEMO

pytestmark = pytest.mark.compat


@pytest.fixture(scope="module")
def question() -> Question:
    return demo_question()


def server(question: Question | None, draft: Path = DEMO / "draft", **settings: Any) -> Certified:
    config = ParseConfig(judge="question", **settings)
    return certified_server(demo_args(draft), config, question, "torch.float32")


@pytest.fixture
def file(tmp_path: Path) -> str:
    """A certificate for the demo pair."""
    return str(write_certificate(tmp_path, fingerprint=demo_fingerprint().model_dump()))


def test_the_server_it_was_made_for(file: str, question: Question, caplog: Any):
    with caplog.at_level(logging.WARNING):
        found = server(question, threshold=file)
    assert found.mismatch == {}
    assert caplog.text == ""


@pytest.mark.parametrize(
    ("threshold", "greedy", "plain", "covered"),
    [
        (0.9, True, False, True),
        (0.95, True, False, True),  # stricter thresholds are covered
        (0.89, True, False, False),
        (0.9, False, False, False),
        (0.9, True, True, False),
    ],
)
def test_requests_it_covers(
    file: str, question: Question, threshold: float, greedy: bool, plain: bool, covered: bool
):
    found = server(question, threshold=file)
    assert found.covers(threshold, greedy=greedy, plain=plain) is covered
    assert server(question).covers(threshold, greedy=greedy, plain=plain) is None


@pytest.mark.parametrize(
    ("settings", "name"),
    [
        ({"segment": "sentence"}, "segment"),
        ({"selection": "answer-first"}, "selection"),
        ({"draft_tokens": 64}, "draft_tokens"),
        ({"draft": DEMO / "eagle3"}, "draft"),
    ],
)
def test_what_differs_is_named(
    file: str, question: Question, settings: dict, name: str, caplog: Any
):
    with caplog.at_level(logging.WARNING):
        found = server(question, threshold=file, **settings)
    assert set(found.mismatch) == {name}
    assert f"was certified for another {name}" in caplog.text
    assert found.covers(0.9, greedy=True, plain=False) is False


def test_no_question_is_another_one(file: str):
    assert set(server(None, threshold=file).mismatch) == {"question"}


def test_simulated_acceptance_is_not_covered(
    file: str, question: Question, monkeypatch: pytest.MonkeyPatch
):
    monkeypatch.setenv("SGLANG_PARSE_SIMULATE_ACCEPTANCE", "0.5")
    assert set(server(question, threshold=file).mismatch) == {"acceptance"}


def test_a_model_is_known_wherever_it_lies(tmp_path: Path):
    """By its shapes and its weights, of which a retrained one has others."""
    copy = tmp_path / "copy"
    shutil.copytree(DEMO / "draft", copy)
    digest = model_digest(str(DEMO / "draft"))
    assert model_digest(str(copy)) == digest != model_digest(str(DEMO / "target"))
    weights = copy / "model.safetensors"
    content = bytearray(weights.read_bytes())
    content[len(content) // 2] ^= 1
    weights.write_bytes(content)
    assert model_digest(str(copy)) != digest


def test_large_weights_are_read_in_slices(tmp_path: Path):
    (tmp_path / "config.json").write_text("{}")
    weights = tmp_path / "model.safetensors"
    weights.write_bytes(bytes(8_000_000))
    digest = model_digest(str(tmp_path))
    for place in (0, 4_063_000, 7_999_999):  # in the first, a middle and the last slice
        content = bytearray(8_000_000)
        content[place] = 1
        weights.write_bytes(content)
        assert model_digest(str(tmp_path)) != digest


def test_a_name_that_leads_nowhere_stands_for_itself():
    assert model_digest("nobody/nothing") == "nobody/nothing@main"
    assert model_digest("s3://bucket/model", "v2") == "s3://bucket/model@v2"
