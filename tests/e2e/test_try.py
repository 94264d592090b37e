"""``sglang-parse try`` on servers that run: two pairs, the likelihood, and what it predicts."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_parse import cli
from sglang_parse.client.demo_pair import DEMO_PAIR
from support.client import Client
from support.demo_pair import DEMO
from support.servers import COPIES, PARSE, Start, parse_flags, served

pytestmark = pytest.mark.nightly("tests/unit/test_try.py")
JUDGE = ("--parse-judge", "likelihood")
Ask = Callable[..., dict[str, Any]]
WITHIN = 0.2
"""The prediction's distance from what was measured."""


@pytest.fixture(scope="module")
def likelihood(start_server: Start) -> Iterator[Client]:
    """As `sglang-parse try` starts it, with the pair of `make demo`."""
    pair = (DEMO_PAIR / "target", DEMO_PAIR / "draft")
    yield from served(start_server, "likelihood", *parse_flags(pair, *JUDGE))


@pytest.fixture(scope="module")
def question_pair(start_server: Start) -> Iterator[Client]:
    """The same with the question pair, whose models use the same words."""
    pair = (DEMO / "target", DEMO / "draft")
    yield from served(start_server, "question-pair", *parse_flags(pair, *JUDGE))


@pytest.fixture(scope="module")
def alone(start_server: Start) -> Iterator[Client]:
    """A target whose prompts draft."""
    flags = ("--model-path", str(DEMO / "draft"), *PARSE, *COPIES)
    yield from served(start_server, "alone", *flags)


@pytest.fixture
def ask(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Ask:
    """Returns what the program says about two servers."""
    monkeypatch.setattr(cli, "end_on_sigterm", lambda: None)

    def run(parse: Client, plain: Client, *flags: str) -> dict[str, Any]:
        urls = ("--url", f"plain={plain.url}", "--url", f"parse={parse.url}")
        few = ("--requests", "16", "--budget", "120", "--output", str(tmp_path))
        assert cli.main(["try", *urls, *few, *flags]) == 0
        page = (tmp_path / "report.html").read_text(encoding="utf-8")
        assert "What each judge would give" in page or "Where drafts came from" in page
        return json.loads((tmp_path / "results.json").read_text(encoding="utf-8"))

    return run


def check(found: dict[str, Any]) -> None:
    token_mode, *others = found["forecasts"]
    assert [one["threshold"] for one in (token_mode, *others)] == [None, 0.5, 0.2]
    assert token_mode["refusals"] >= others[0]["refusals"] >= others[1]["refusals"]
    assert min(found["costs"][name] for name in ("plain_ms", "draft_ms")) > 0
    assert found["costs"]["draft_ms"] < found["costs"]["plain_ms"]


def test_models_that_use_other_words(ask: Ask, likelihood: Client, wordings_plain: Client):
    """The problems of the pair are the default prompts for its target. Their drafts go on
    in the target's words behind its token, and are refused more often: the forecast is too high."""
    check(found := ask(likelihood, wordings_plain))
    assert found["predicted"]["tokens"] >= (1 - WITHIN) * found["measured"]["tokens"]


def test_models_that_use_the_same_words(
    ask: Ask, question_pair: Client, demo_plain: Client, problems: list, tmp_path: Path
):
    prompts = tmp_path / "prompts.jsonl"
    rows = (json.dumps({"prompt": one.problem.text}) for one in problems[:16])
    prompts.write_text("\n".join(rows), encoding="utf-8")
    check(found := ask(question_pair, demo_plain, "--prompts", str(prompts)))
    measured, predicted = found["measured"], found["predicted"]
    assert predicted["tokens"] == pytest.approx(measured["tokens"], rel=WITHIN)


@pytest.mark.parametrize("together", [1, 4])
def test_a_target_alone(
    ask: Ask, alone: Client, small_plain: Client, problems: list, tmp_path: Path, together: int
):
    """Its answer stands in each prompt; copies are exact."""
    prompts = tmp_path / "prompts.jsonl"
    asked = [one.problem.text for one in problems[:8]]
    told = small_plain.generate_all([one.prompt for one in problems[:8]], 8, max_new_tokens=64)
    rows = [f"{text}\n{answer['text']}\n{text}" for text, answer in zip(asked, told, strict=True)]
    prompts.write_text("\n".join(map(json.dumps, rows)), encoding="utf-8")
    found = ask(
        alone,
        small_plain,
        "--prompts",
        str(prompts),
        "--concurrency",
        str(together),
        "--requests",
        "8",
    )
    assert found["sources"]["prompt"]["accepted_tokens"] > 0
    assert found["measured"]["identical"] == 8
    assert "forecasts" not in found
