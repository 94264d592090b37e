"""Texts that go on where an EAGLE-3 head's proposals end: the same answers in fewer passes."""

from __future__ import annotations

import os
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest

from sglang_parse.client.demo_pair import DEMO_PAIR, load_problems
from support.client import Client, assert_adds_up, ids_of, parse_info
from support.demo_pair import rendered
from support.servers import COPIES, PARSE, SEED, Start, plugin, served

pytestmark = pytest.mark.nightly(
    "tests/e2e/test_eagle3_drafts.py::test_a_text_goes_on_where_a_proposal_ends"
)

TEXTS = ("--model-path", str(DEMO_PAIR / "target"), *PARSE, *COPIES, *SEED)
TEXTS = (*TEXTS, "--parse-verification", "token")
HEAD = ("--parse-eagle3-path", str(DEMO_PAIR / "eagle3"))
LIMIT = {"max_new_tokens": 110}
DIGITS = str.maketrans("0123456789", "1234567890")
COSTS = os.environ.get("COSTS", "10 0.04 1.5")
"""ms of a target forward, of each row, of the head: the policy decides as on a GPU, and not by what
else the tests' machine does."""
Asked = Sequence[tuple[str, dict[str, Any]]]


@pytest.fixture(scope="module")
def both(start_server: Start) -> Iterator[Client]:
    """As a user starts it: the head, the prompt, and what requests bring; by measured costs."""
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


@pytest.fixture(scope="module")
def kinds(wordings_plain: Client) -> dict[str, Asked]:
    """Problems with the answer, changed, as the prediction or in the prompt; and with no text that
    fits."""
    asked = rendered(DEMO_PAIR / "target", load_problems().held_out_problems(8, seed=1))
    plain = wordings_plain.generate_all(asked, 8, **LIMIT)
    drafts = [changed(one["text"].replace("<|im_end|>", "")) for one in plain]
    return {
        "prediction": [(ask, {"draft": text}) for ask, text in zip(asked, drafts, strict=True)],
        "prompt": [(text + ask, {}) for ask, text in zip(asked, drafts, strict=True)],
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


def per_pass(answers: Sequence[dict[str, Any]]) -> float:
    """Output tokens per pass: each has one token of the target's own, but for the prefill's."""
    num_passes = sum(parse_info(answer)["target_tokens"] - 1 for answer in answers)
    return sum(len(answer["output_ids"]) - 1 for answer in answers) / num_passes


@pytest.mark.parametrize("concurrency", [8, 1])
@pytest.mark.parametrize("kind", ["prediction", "prompt", "none", "another's"])
def test_both_in_one_pass(
    both: Client,
    texts: Client,
    wordings_plain: Client,
    kinds: dict[str, Asked],
    kind: str,
    concurrency: int,
):
    """At least 1.15 times as many tokens a pass as the better one where a text fits in part, and
    never less than 0.98 times where none does."""
    asked = kinds[kind]
    wanted = ids_of(wordings_plain.generate_all([prompt for prompt, _ in asked], 8, **LIMIT))
    alone = [(prompt, {"prompt_drafts": "off"}) for prompt, _ in asked]
    found = {}
    for name, client, parts in (
        ("head", both, alone),
        ("texts", texts, asked),
        ("both", both, asked),
    ):
        answers = answers_of(client, parts, concurrency)
        assert ids_of(answers) == wanted, name
        list(map(assert_adds_up, answers))
        found[name] = per_pass(answers)
        if name != "head":
            found["sources"] = [parse_info(a)["sources"] for a in answers]
    if os.environ.get("SHOW"):
        t = {}
        for one in found.pop("sources"):
            for s, v in one.items():
                for k in ("rounds", "drafted_tokens", "accepted_tokens"):
                    t[s, k] = t.get((s, k), 0) + v[k]
        if os.environ.get("PARSE_MAX_TAIL"):
            print("NOTAIL")
        print("COUNT", kind, concurrency, found, t, flush=True)
    both.assert_nothing_lost()
    if not os.environ.get("SHOW"):
        least = 1.15 if kind in ("prediction", "prompt") else 0.98
        assert found["both"] >= least * max(found["head"], found["texts"])
