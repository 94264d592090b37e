"""Drafts that copy from the prompt and the output so far: no draft model, and nothing is sent."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from support.client import Client, assert_adds_up, assert_same, flat, ids_of, parse_info
from support.demo_pair import DEMO, held_out
from support.servers import COPIES, OVERLAP, PARSE, SEED, Start, served

TARGET = ("--model-path", str(DEMO / "draft"), *PARSE, *COPIES, *SEED)
PROBLEMS = held_out(8)
LIMIT = {"max_new_tokens": 70}
MORE = pytest.mark.nightly("tests/e2e/test_prompt.py::test_copies_are_the_targets_choices")


@pytest.fixture(scope="module")
def copying(start_server: Start) -> Iterator[Client]:
    """A server as a user starts it: the likelihood judges, and nothing but the prompt drafts."""
    yield from served(start_server, "prompt", *TARGET)


@pytest.fixture(scope="module")
def ahead(start_server: Start) -> Iterator[Client]:
    yield from served(start_server, "prompt-overlap", *TARGET, *OVERLAP)


@pytest.fixture(scope="module")
def prompts(small_plain: Client) -> list[str]:
    """Each problem behind its own answer, which the target writes again in parts, and with numbers
    changed in it: the passage that an answer must not be changed by."""
    asked = [one.prompt for one in PROBLEMS]
    answers = [one["text"] for one in small_plain.generate_all(asked, 8, **LIMIT)]
    changed = [text.translate(str.maketrans("0123456789", "1234567890")) for text in answers]
    return [
        f"{text} {ask}"
        for pair in zip(answers, changed, asked, strict=True)
        for text, ask in ((pair[0], pair[2]), (pair[1], pair[2]))
    ]


@pytest.fixture(scope="module")
def expected(small_plain: Client, prompts: list[str]) -> list[dict]:
    return small_plain.generate_all(prompts, 8, **LIMIT)


def copied(answers: list[dict]) -> tuple[int, int]:
    """(draft tokens, accepted ones) of copies."""
    found = [parse_info(answer)["sources"].get("prompt") for answer in answers]
    sums = (
        sum(one[name] for one in found if one) for name in ("drafted_tokens", "accepted_tokens")
    )
    drafted, accepted = sums
    return drafted, accepted


@pytest.mark.parametrize("threshold", [0.0, 0.5, 1.5])
@pytest.mark.parametrize("concurrency", [8, pytest.param(1, marks=MORE)])
def test_copies_are_the_targets_choices(
    copying: Client, prompts: list, expected: list, concurrency: int, threshold: float
):
    """At a threshold of 0, too, at which another source's text would be output as it is."""
    count = len(prompts) if concurrency > 1 else 3
    parse = {"threshold": threshold}
    answers = copying.generate_all(prompts[:count], concurrency, parse=parse, **LIMIT)
    assert ids_of(answers) == ids_of(expected[:count])
    list(map(assert_adds_up, answers))
    drafted, accepted = copied(answers)
    assert 0 < accepted <= drafted if threshold <= 1 else accepted == 0
    copying.assert_nothing_lost()


def test_a_request_can_do_without(copying: Client, prompts: list, expected: list):
    parse = {"prompt_drafts": "off"}
    answers = copying.generate_all(prompts[:4], 4, parse=parse, **LIMIT)
    assert ids_of(answers) == ids_of(expected[:4])
    for answer in answers:
        info = parse_info(answer)
        assert info["sources"] == {}
        assert info["reason"] == "no draft model, and no text that may draft"


@MORE
@pytest.mark.parametrize(
    "wish",
    [
        {"top": {"return_logprob": True, "top_logprobs_num": 2}},
        {"regex": "([a-l]: [0-9]{2} [+-] [0-9]{2} = [0-9]{2}\n){2,4}"},
        {"frequency_penalty": 0.4},
        {"min_new_tokens": 60},
        {"stop": ["="]},
        {"temperature": 0.9, "top_k": 30, "sampling_seed": 5},
        {"max_new_tokens": 3},
    ],
    ids=lambda wish: next(iter(wish)),
)
def test_all_kinds_of_requests(copying: Client, small_plain: Client, prompts: list, wish: dict):
    parse = {"drafting": "always"}
    ours = copying.generate_all(prompts[:6], 6, parse=parse, **LIMIT | wish)
    theirs = small_plain.generate_all(prompts[:6], 6, **LIMIT | wish)
    if "temperature" not in wish:
        assert ids_of(ours) == ids_of(theirs)
    for answer, wanted in zip(ours, theirs, strict=True):
        if "top" in wish:
            found, logs = (
                flat(one["meta_info"]["output_token_logprobs"]) for one in (answer, wanted)
            )
            assert found == pytest.approx(logs, abs=1e-4)
    if "max_new_tokens" not in wish:
        assert copied(ours)[0] > 0
    copying.assert_nothing_lost()


def test_a_prediction_that_fits_drafts_first(copying: Client, prompts: list, expected: list):
    answer = copying.generate(prompts[0], parse={"draft": expected[0]["text"]}, **LIMIT)
    assert_same(answer, expected[0])
    sources = parse_info(answer)["sources"]
    assert sources["prediction"]["accepted_tokens"] > 20


def test_steps_in_flight_are_not_dropped(ahead: Client, prompts: list, expected: list):
    """Under the overlap schedule a draft waits for the step in flight: at most one in ten is
    dropped."""
    before = ahead.look()["overlap"]["dropped"]
    answers = [
        *ahead.generate_all(prompts, 8, **LIMIT),
        *ahead.generate_all(prompts[:2], 1, **LIMIT),
    ]
    assert ids_of(answers) == ids_of([*expected, *expected[:2]])
    rounds = sum(parse_info(answer)["rounds"] for answer in answers)
    assert rounds > 10
    assert ahead.look()["overlap"]["dropped"] - before <= 0.1 * rounds
    ahead.assert_nothing_lost()
