"""Texts that go on where an EAGLE-3 head's proposals end: the same answers in fewer passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import cache
from typing import Any

import pytest
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from support.bodies import Requests, ask_all, by_value, changed
from support.client import Client, assert_adds_up, flat, ids_of, parse_info
from support.demo_pair import DEMO, held_out
from support.servers import COPIES, CUSTOM, PARSE, SEED, Start, plugin, served

pytestmark = pytest.mark.nightly(
    "tests/e2e/test_eagle3_drafts.py::test_a_text_goes_on_where_a_proposal_ends"
)

TEXTS = ("--model-path", str(DEMO / "target"), *PARSE, *COPIES, *SEED)
TEXTS = (*TEXTS, "--parse-verification", "token", CUSTOM)
HEAD = ("--parse-eagle3-path", str(DEMO / "eagle3"), "--speculative-num-steps", "3")
LIMIT = {"max_new_tokens": 110}
COSTS = "10 0.04 1.5"
"""ms of a target forward, of each row, of the head: the policy decides as on a GPU, and not by what
else the tests' machine does."""


@pytest.fixture(scope="module")
def both(start_server: Start) -> Iterator[Client]:
    """As a user starts it: the head, the prompt, and what requests bring."""
    with plugin("stage_times"):
        yield from served(start_server, "tails", *TEXTS, *HEAD, STAGE_COSTS=COSTS)


@pytest.fixture(scope="module")
def texts(start_server: Start) -> Iterator[Client]:
    with plugin("stage_times"):
        yield from served(start_server, "tails-texts", *TEXTS, STAGE_COSTS=COSTS)


PROBLEMS = [one.prompt for one in held_out(8)]


@pytest.fixture(scope="module")
def plain_answers(demo_plain: Client) -> list[dict[str, Any]]:
    return demo_plain.generate_all(PROBLEMS, 8, **LIMIT)


def writes(answer: Sequence[int]) -> dict[str, Any]:
    """Of a request: the target chooses this answer. The demo's targets were not taught to edit."""

    class Writes(CustomLogitProcessor):
        is_pure = True

        def __call__(self, logits: Any, custom_param_list: Any = None) -> Any:
            for row, params in enumerate(custom_param_list):
                place = min(len(params["__req__"].output_ids), len(params["ids"]) - 1)
                logits[row, params["ids"][place]] = 1e4
            return logits

    end = 2  # the tokenizer's
    return {"custom_params": {"ids": [*answer, end]}, "top": by_value(Writes)}


@pytest.fixture(scope="module")
def kinds(plain_answers: list[dict[str, Any]]) -> dict[str, Requests]:
    """Problems with the answer, changed, as the prediction; a text to edit, in the prompt; and no
    text that fits."""
    texts, answers = [changed(one["text"]) for one in plain_answers], ids_of(plain_answers)
    return {
        "prediction": [
            {"prompt": ask, "parse": {"draft": text}}
            for ask, text in zip(PROBLEMS, texts, strict=True)
        ],
        "edit": [
            {"prompt": ask + text + ask, "parse": {}, **writes(answer)}
            for ask, text, answer in zip(PROBLEMS, texts, answers, strict=True)
        ],
        "none": [{"prompt": ask, "parse": {}} for ask in PROBLEMS],
        "another's": [
            {"prompt": ask, "parse": {"draft": "and so on, as ever. " * 9}} for ask in PROBLEMS
        ],
    }


@pytest.fixture(scope="module")
def alone(both: Client, kinds: dict[str, Requests]) -> Callable[..., list[dict[str, Any]]]:
    """Returns ``alone(kind, num, concurrency)``: answers with the head and no text."""
    without = {"parse": {"prompt_drafts": "off"}}
    return cache(
        lambda kind, num, concurrency: ask_all(
            both, kinds[kind][:num], concurrency, **without, **LIMIT
        )
    )


def per_pass(answers: Sequence[dict[str, Any]]) -> float:
    """Output tokens per pass: each has one token of the target's own, but for the prefill's."""
    num_passes = sum(parse_info(answer)["target_tokens"] - 1 for answer in answers)
    return sum(len(answer["output_ids"]) - 1 for answer in answers) / num_passes


@pytest.mark.parametrize(
    ("kind", "concurrency"),
    [
        *(("prediction", 8), ("prediction", 1), ("edit", 8), ("edit", 1)),
        *(("none", 8), ("none", 1), ("another's", 8)),
    ],
)
def test_both_in_one_pass(
    both: Client,
    texts: Client,
    alone: Callable[..., list[dict[str, Any]]],
    plain_answers: list[dict[str, Any]],
    kinds: dict[str, Requests],
    kind: str,
    concurrency: int,
):
    """At least 1.15 times as many tokens a pass as the better one where a text fits in part, and
    never less than 0.98 times where none does."""
    asked = kinds[kind][: 8 if concurrency > 1 else 3]
    found = {}
    for name, answers in (
        ("head", alone("edit" if kind == "edit" else "none", len(asked), concurrency)),
        ("texts", ask_all(texts, asked, concurrency, **LIMIT)),
        ("both", ask_all(both, asked, concurrency, **LIMIT)),
    ):
        assert ids_of(answers) == ids_of(plain_answers[: len(asked)]), name
        list(map(assert_adds_up, answers))
        found[name] = per_pass(answers)
    least = 1.15 if kind in ("prediction", "edit") else 0.98
    assert found["both"] >= least * max(found["head"], found["texts"]), found
    both.assert_nothing_lost()


@pytest.mark.parametrize(
    "wish",
    [
        {"top": {"return_logprob": True, "top_logprobs_num": 2}},
        {"regex": "([a-l]: [0-9]{2} [+-] [0-9]{2} = [0-9]{2}\n){3,5}"},
        {"frequency_penalty": 0.4},
        {"min_new_tokens": 90},
        {"temperature": 3.0, "top_k": 30, "sampling_seed": 5},
        {"stop": ["="]},
        {"max_new_tokens": 30},
    ],
    ids=lambda wish: next(iter(wish)),
)
def test_all_kinds_of_requests(
    both: Client, demo_plain: Client, kinds: dict[str, Requests], wish: dict
):
    asked = kinds["prediction"][:4]
    ours = ask_all(both, asked, 4, **LIMIT | wish)
    theirs = demo_plain.generate_all(PROBLEMS[:4], 4, **LIMIT | wish)
    assert ids_of(ours) == ids_of(theirs)
    list(map(assert_adds_up, ours))
    for answer, wanted in zip(ours, theirs, strict=True):
        if "top" in wish:
            found, logs = (flat(a["meta_info"]["output_token_logprobs"]) for a in (answer, wanted))
            assert found == pytest.approx(logs, abs=1e-4)
    both.assert_nothing_lost()
