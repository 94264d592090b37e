"""A refused draft costs no decode step: its pass yields the target's token, and drafting resumes
right behind it."""

from __future__ import annotations

from typing import Any

from sglang_parse.client.demo_pair import DEMO_PAIR, load_problems
from support.client import EXACT, Client, parse_info, random_prompts
from support.demo_pair import rendered

TRACE = {"trace": True}


def test_where_verdicts_come_from_rows(wordings: Client):
    prompts = rendered(DEMO_PAIR / "target", load_problems().held_out_problems(4, seed=8))
    answers = [
        answer
        for options in ({"threshold": 0.99}, EXACT)
        for answer in wordings.generate_all(prompts, 6, parse=options | TRACE, max_new_tokens=72)
    ]
    num_tokens = sum(len(answer["output_ids"]) for answer in answers)
    assert num_refused(answers) > num_tokens / 40


def test_where_questions_are_asked(semantic: Client):
    options, limit = {"threshold": 0.4, **TRACE}, {"max_new_tokens": 64, "ignore_eos": True}
    answers = semantic.generate_all(random_prompts(6, 3), 6, parse=options, **limit)
    assert num_refused(answers) > len(answers)


def num_refused(answers: list[dict[str, Any]]) -> int:
    """Drafts that were refused in part; no token of these answers is a decode step's."""
    rounds = [record for answer in answers for record in parse_info(answer)["trace"]]
    output = sum(record["accepted_len"] + len(record["bonus_token_ids"]) for record in rounds)
    prefills = len(answers)
    assert sum(len(answer["output_ids"]) for answer in answers) == prefills + output
    return sum(record["accepted_len"] < record["prefix_ends"][-1] for record in rounds)
