"""Hostile grammars and forced text under a verdict head, which verifies at every token."""

from __future__ import annotations

import re

import pytest

from support.client import EXACT, Client, assert_same, parse_info
from support.hostile_grammars import GRAMMARS


@pytest.mark.parametrize("threshold", [0.0, 0.5])
@pytest.mark.parametrize("name", ["a million", "no end", "scripts", "fixed text"])
def test_hostile_grammars_under_a_head(
    wordings: Client, wordings_plain: Client, name: str, threshold: float
):
    """The head verifies at every token: each is an end that may lie inside forced text."""
    wish = {"max_new_tokens": 120, **GRAMMARS[name]}
    ours = wordings.generate([5, 6, 7], parse={"threshold": threshold}, **wish)
    assert parse_info(ours)["drafted_tokens"] > 0
    if name == "fixed text":
        assert re.fullmatch(GRAMMARS[name]["regex"], ours["text"])
    exact = wordings.generate([5, 6, 7], parse=EXACT, **wish)
    assert_same(exact, wordings_plain.generate([5, 6, 7], **wish))
    wordings.assert_nothing_lost()


@pytest.mark.parametrize("limit", [39, 40, 41, 60])
def test_an_answer_at_its_grammars_end(wordings: Client, wordings_plain: Client, limit: int):
    """Where a grammar has ended only the stop token is left."""
    wish = {"regex": "[0-9]{40}", "max_new_tokens": limit}
    theirs = wordings_plain.generate([5, 6, 7], **wish)
    for options in (EXACT, {"threshold": 0.5}, {"threshold": 0.0}):
        ours = wordings.generate([5, 6, 7], parse=options, **wish)
        assert re.fullmatch(f"[0-9]{{{min(limit, 40)}}}", ours["text"])
        assert len(ours["output_ids"]) == len(theirs["output_ids"])
        if options is EXACT:
            assert_same(ours, theirs)
    wordings.assert_nothing_lost()
