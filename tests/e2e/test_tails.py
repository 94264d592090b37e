"""Texts that go on where an EAGLE-3 head's proposals end: the same answers in fewer passes."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import pytest

from support.client import Client, assert_adds_up, flat, ids_of, parse_info
from support.demo_pair import DEMO, held_out
from support.servers import COPIES, PARSE, SEED, Start, plugin, served

pytestmark = pytest.mark.nightly(
    "tests/e2e/test_eagle3_drafts.py::test_a_text_goes_on_where_a_proposal_ends"
)

TEXTS = ("--model-path", str(DEMO / "target"), *PARSE, *COPIES, *SEED)
TEXTS = (*TEXTS, "--parse-verification", "token")
HEAD = ("--parse-eagle3-path", str(DEMO / "eagle3"))
LIMIT = {"max_new_tokens": 110}
DIGITS = str.maketrans("0123456789", "1234567890")
COSTS = "10 0.04 1.5"
"""ms of a target forward, of each row, of the head: the policy decides as on a GPU, and not by what
else the tests' machine does."""
Asked = Sequence[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def both(start_server: Start) -> Iterator[Client]:
    """As a user starts it: the head, the prompt, and what requests bring."""
    with plugin("stage_times"):
        yield from served(start_server, "tails", *TEXTS, *HEAD, STAGE_COSTS=COSTS)


@pytest.fixture(scope="module")
def texts(start_server: Start) -> Iterator[Client]:
    with plugin("stage_times"):
        yield from served(start_server, "tails-texts", *TEXTS, STAGE_COSTS=COSTS)


def changed(text: str) -> str:
    """Every second line with other numbers."""
    lines = text.splitlines(keepends=True)
    return "".join(line.translate(DIGITS) if n % 2 else line for n, line in enumerate(lines))


PROBLEMS = [one.prompt for one in held_out(8)]


@pytest.fixture(scope="module")
def plain_answers(demo_plain: Client) -> list[dict[str, Any]]:
    return demo_plain.generate_all(PROBLEMS, 8, **LIMIT)


@pytest.fixture(scope="module")
def kinds(plain_answers: list[dict[str, Any]]) -> dict[str, Asked]:
    """Problems with the answer, changed, as the prediction; and with no text that fits."""
    asked, drafts = PROBLEMS, [changed(one["text"]) for one in plain_answers]
    return {
        "prediction": [(ask, {"draft": text}) for ask, text in zip(asked, drafts, strict=True)],
        "none": [(ask, {}) for ask in asked],
        "another's": [(ask, {"draft": "and so on, as ever. " * 9}) for ask in asked],
    }


def answers_of(
    client: Client, asked: Asked, concurrency: int, top: dict | None = None, **more: Any
) -> list[dict[str, Any]]:
    with ThreadPoolExecutor(concurrency) as pool:
        jobs = [
            pool.submit(client.generate, prompt, top=top or {}, parse=parse, **LIMIT | more)
            for prompt, parse in asked
        ]
        return [job.result() for job in jobs]


@pytest.fixture(scope="module")
def alone(both: Client) -> Callable[[int, int], list[dict[str, Any]]]:
    """Returns ``alone(num, concurrency)``: answers with the head and no text."""
    without = [(prompt, {"prompt_drafts": "off"}) for prompt in PROBLEMS]
    return cache(lambda num, concurrency: answers_of(both, without[:num], concurrency))


def per_pass(answers: Sequence[dict[str, Any]]) -> float:
    """Output tokens per pass: each has one token of the target's own, but for the prefill's."""
    num_passes = sum(parse_info(answer)["target_tokens"] - 1 for answer in answers)
    return sum(len(answer["output_ids"]) - 1 for answer in answers) / num_passes


@pytest.mark.parametrize(
    ("kind", "concurrency"),
    [("prediction", 8), ("prediction", 1), ("none", 8), ("none", 1), ("another's", 8)],
)
def test_both_in_one_pass(
    both: Client,
    texts: Client,
    alone: Callable[[int, int], list[dict[str, Any]]],
    plain_answers: list[dict[str, Any]],
    kinds: dict[str, Asked],
    kind: str,
    concurrency: int,
):
    """At least 1.15 times as many tokens a pass as the better one where a text fits in part, and
    never less than 0.98 times where none does."""
    asked = kinds[kind][: 8 if concurrency > 1 else 3]
    found = {}
    for name, answers in (
        ("head", alone(len(asked), concurrency)),
        ("texts", answers_of(texts, asked, concurrency)),
        ("both", answers_of(both, asked, concurrency)),
    ):
        assert ids_of(answers) == ids_of(plain_answers[: len(asked)]), name
        list(map(assert_adds_up, answers))
        found[name] = per_pass(answers)
    least = 1.15 if kind == "prediction" else 0.98
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
    both: Client, demo_plain: Client, kinds: dict[str, Asked], wish: dict
):
    asked = kinds["prediction"][:4]
    ours = answers_of(both, asked, 4, **wish)
    theirs = demo_plain.generate_all([prompt for prompt, _ in asked], 4, **LIMIT | wish)
    assert ids_of(ours) == ids_of(theirs)
    list(map(assert_adds_up, ours))
    for answer, wanted in zip(ours, theirs, strict=True):
        if "top" in wish:
            found, logs = (flat(a["meta_info"]["output_token_logprobs"]) for a in (answer, wanted))
            assert found == pytest.approx(logs, abs=1e-4)
    both.assert_nothing_lost()
