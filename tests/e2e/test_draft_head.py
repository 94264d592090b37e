"""An EAGLE-3 head of the draft model: the same drafts as one token per forward, in fewer forwards.

The question pair's target has a head; here it drafts for the pair's smaller model, which refuses
some of what it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import pytest

from support.client import Client, ids_of, parse_info
from support.demo_pair import DEMO
from support.servers import AHEAD, ALWAYS, OVERLAP, SEED, Start, parse_flags, served

HEAD = ("--parse-draft-eagle3-path", str(DEMO / "eagle3"))
FLAGS = (*ALWAYS, *SEED, "--parse-verification", "token", "--parse-draft-tokens", "24")
LIMIT = {"max_new_tokens": 96}
TRACED = {"trace": True}


def flags(*more: str) -> tuple[str, ...]:
    return parse_flags((DEMO / "draft", DEMO / "target"), *FLAGS, *more)


@pytest.fixture(scope="module")
def head(start_server: Start) -> Iterator[Client]:
    """As on a GPU: blocks launched back to back; pages of 16 slots."""
    more = (*HEAD, *OVERLAP, "--page-size", "16", "--parse-draft-parallel-tokens", "4")
    yield from served(start_server, "draft-head", *flags(*more), "--enable-metrics", **AHEAD)


@pytest.fixture(scope="module")
def single(start_server: Start) -> Iterator[Client]:
    """The same models, one token per forward."""
    yield from served(start_server, "draft-no-head", *flags())


@pytest.fixture(scope="module")
def prompts(problems: list) -> list[str]:
    return [problem.prompt for problem in problems[:8]]


def drafts(answers: Sequence[dict[str, Any]]) -> list[list[list[int]]]:
    return [[r["draft_token_ids"] for r in parse_info(a)["trace"]] for a in answers]


def per_forward(answers: Sequence[dict[str, Any]]) -> float:
    infos = [*map(parse_info, answers)]
    return sum(i["drafted_tokens"] for i in infos) / sum(i["draft_forwards"] for i in infos)


@pytest.mark.parametrize("concurrency", [8, 1])
def test_greedy_drafts_and_answers(
    head: Client, single: Client, small_plain: Client, prompts: list, concurrency: int
):
    ours, theirs = (
        c.generate_all(prompts, concurrency, parse=TRACED, **LIMIT) for c in (head, single)
    )
    assert drafts(ours) == drafts(theirs)
    assert ids_of(ours) == ids_of(small_plain.generate_all(prompts, concurrency, **LIMIT))
    print(
        "tokens per forward", per_forward(ours), per_forward(theirs), [len(d) for d in drafts(ours)]
    )
    assert per_forward(ours) > 1.5 > per_forward(theirs) == 1
    head.assert_nothing_lost()
