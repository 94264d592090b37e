"""Hostile grammars and forced text under a verdict head, which verifies at every token."""

from __future__ import annotations

import re
from concurrent.futures import ThreadPoolExecutor

import pytest

from support.client import EXACT, Client, assert_same, parse_info
from support.hostile_grammars import GRAMMARS

PROMPT = [5, 6, 7]
WAYS = (EXACT, {"threshold": 0.5}, {"threshold": 0.0})


def asked(client: Client, wishes: list[dict], ways: tuple[dict | None, ...]) -> list[list[dict]]:
    """By wish, its answers each way; all at once."""
    with ThreadPoolExecutor(len(wishes) * len(ways)) as pool:
        jobs = [
            [pool.submit(client.generate, PROMPT, parse=way, **wish) for way in ways]
            for wish in wishes
        ]
        return [[job.result() for job in made] for made in jobs]


@pytest.mark.nightly("tests/e2e/test_hostile_grammars.py")
def test_hostile_grammars_under_a_head(wordings: Client, wordings_plain: Client):
    """The head verifies at every token: each is an end that may lie inside forced text."""
    grammars = [GRAMMARS[name] for name in ("a million", "no end", "scripts", "fixed text")]
    wishes = [{"max_new_tokens": 90, **grammar} for grammar in grammars]
    ours, theirs = asked(wordings, wishes, WAYS), asked(wordings_plain, wishes, (None,))
    for (exact, *others), (plain,) in zip(ours, theirs, strict=True):
        assert_same(exact, plain)
        assert all(parse_info(answer)["drafted_tokens"] > 0 for answer in others)
    assert all(re.fullmatch(grammars[-1]["regex"], answer["text"]) for answer in ours[-1])
    wordings.assert_nothing_lost()


def test_an_answer_at_its_grammars_end(wordings: Client, wordings_plain: Client):
    """Where a grammar has ended only the stop token is left."""
    wishes = [{"regex": "[0-9]{40}", "max_new_tokens": limit} for limit in (39, 40, 41, 60)]
    ours, theirs = asked(wordings, wishes, WAYS), asked(wordings_plain, wishes, (None,))
    for wish, answers, (plain,) in zip(wishes, ours, theirs, strict=True):
        assert_same(answers[0], plain)
        for answer in answers:
            assert re.fullmatch(f"[0-9]{{{min(wish['max_new_tokens'], 40)}}}", answer["text"])
            assert len(answer["output_ids"]) == len(plain["output_ids"])
    wordings.assert_nothing_lost()
