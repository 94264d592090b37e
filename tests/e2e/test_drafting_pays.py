"""``--parse-drafting``: auto, always and never.

A draft model slower than its target (the demo pair, exchanged) never pays, the demo pair does.
Nothing here is timed: the server's counters show its decisions.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from statistics import median

import pytest

from support.client import HTTP, Client, ids_of, parse_info
from support.demo_pair import DEMO
from support.servers import QUESTION, Start, parse_flags, served

MORE = pytest.mark.nightly(
    "tests/e2e/test_drafting_pays.py::test_a_request_may_ask_for_drafts_that_do_not_pay"
)
one_or_all = pytest.mark.parametrize("concurrency", [8, pytest.param(1, marks=MORE)])
STARTS = 3
"""Answers until the server knows that drafting does not pay."""
LIMIT = {"max_new_tokens": 48, "ignore_eos": True}
OFF = {"enabled": False}


def flags(target: str, draft: str, drafting: str, *more: str) -> tuple[str, ...]:
    return parse_flags((DEMO / target, DEMO / draft), "--parse-drafting", drafting, *more)


SLOW = ("--parse-verification", "token", "--parse-draft-tokens", "8", "--parse-draft-chunk", "8")


@pytest.fixture(scope="module")
def slow(start_server: Start) -> Iterator[Client]:
    more = (*SLOW, "--enable-metrics")
    for client in served(start_server, "slow-draft", *flags("draft", "target", "auto", *more)):
        yield replace(client, options={})


@pytest.fixture(scope="module")
def never(start_server: Start) -> Iterator[Client]:
    for client in served(start_server, "never", *flags("draft", "target", "never", *SLOW)):
        yield replace(client, options={})


@pytest.fixture(scope="module")
def auto(start_server: Start) -> Iterator[Client]:
    """It listens on every address: its clients are the public."""
    more = (*QUESTION, "--host", "0.0.0.0")
    for client in served(start_server, "auto", *flags("target", "draft", "auto", *more)):
        yield replace(client, options={})


@pytest.fixture(scope="module")
def prompts(problems: list) -> list[str]:
    return [problem.prompt for problem in problems[:12]]


def total(answers: list[dict], figure: str) -> float:
    return sum(parse_info(answer)[figure] for answer in answers)


@one_or_all
def test_drafting_is_suspended_where_it_does_not_pay(
    slow: Client, prompts: list[str], concurrency: int
):
    slow.generate_all(prompts[:STARTS], 1, **LIMIT)
    answers = slow.generate_all(prompts, concurrency, **LIMIT)
    assert ids_of(answers) == ids_of(slow.generate_all(prompts, 8, parse=OFF, **LIMIT))
    assert total(answers, "skipped_drafts") > len(prompts)
    # Probes, and drafts before the cost of a decode step was measured.
    assert total(answers, "drafted_tokens") < 0.2 * len(prompts) * LIMIT["max_new_tokens"]
    slow.assert_nothing_lost()


def test_metrics_show_the_decision(slow: Client, prompts: list[str]):
    """The gauge is the last estimate: one of several may be of a busy moment."""
    slow.generate_all(prompts[:STARTS], 1, **LIMIT)
    speedups, skipped = [], 0.0
    for prompt in prompts[:5]:
        slow.generate(prompt, **LIMIT)
        page = HTTP.get(f"{slow.url}/metrics", timeout=60).text
        (speedup,) = re.findall(r"^sglang:parse_drafting_speedup\{.*\} (\S+)", page, re.MULTILINE)
        (count,) = re.findall(r"^sglang:parse_skipped_drafts_total\{.*\} (\S+)", page, re.MULTILINE)
        speedups.append(float(speedup))
        assert float(count) >= skipped
        skipped = float(count)
    assert 0 < median(speedups) < 1
    assert skipped > 0


@pytest.mark.nightly("tests/unit/test_controller.py")
def test_never(never: Client, prompts: list[str]):
    answers = never.generate_all(prompts[:4], 4, **LIMIT)
    assert total(answers, "drafted_tokens") == 0 < total(answers, "skipped_drafts")
    assert {parse_info(answer)["mode"] for answer in answers} == {"parse"}
    assert ids_of(answers) == ids_of(never.generate_all(prompts[:4], 4, parse=OFF, **LIMIT))


@pytest.mark.parametrize("server", ["slow", pytest.param("never", marks=MORE)])
def test_a_request_may_ask_for_drafts_that_do_not_pay(
    server: str, prompts: list[str], request: pytest.FixtureRequest
):
    """Beside requests that leave it to the server; both are exact in token mode."""
    client: Client = request.getfixturevalue(server)
    for options in ({}, OFF) * 4:  # until the server knows that it does not pay
        client.generate(prompts[0], parse=options, **LIMIT)
    ways = [{"drafting": "always"}, {}] * 2
    with ThreadPoolExecutor(len(ways)) as pool:
        answers = list(pool.map(lambda way: client.generate(prompts[0], parse=way, **LIMIT), ways))
    assert len(set(map(tuple, ids_of(answers)))) == 1
    assert total(answers[::2], "skipped_drafts") == 0 < total(answers[::2], "drafted_tokens")
    assert total(answers[1::2], "skipped_drafts") > 0
    client.assert_nothing_lost()


@one_or_all
def test_drafting_continues_where_it_pays(auto: Client, prompts: list[str], concurrency: int):
    limit = {"max_new_tokens": 200}
    answers = auto.generate_all(prompts, concurrency, **limit)
    output = sum(len(ids) for ids in ids_of(answers))
    assert total(answers, "accepted_tokens") > 0.6 * output
    auto.assert_nothing_lost()


def test_no_draft_begins_that_cannot_be_accepted(auto: Client, prompts: list[str]):
    answers = auto.generate_all(prompts[:4], 4, parse={"threshold": 1.5}, **LIMIT)
    assert total(answers, "drafted_tokens") == 0
    assert ids_of(answers) == ids_of(auto.generate_all(prompts[:4], 4, parse=OFF, **LIMIT))


def test_requests_switched_off_are_exact_next_to_drafting_ones(auto: Client, prompts: list[str]):
    """``--parse-max-slowdown`` delays drafts and loses none."""
    alone = auto.generate_all(prompts[::2], 6, parse=OFF, **LIMIT)
    with ThreadPoolExecutor(2) as pool:
        off = pool.submit(auto.generate_all, prompts[::2], 3, parse=OFF, **LIMIT)
        drafting = pool.submit(auto.generate_all, prompts[1::2], 3, **LIMIT)
    assert ids_of(off.result()) == ids_of(alone)
    assert total(drafting.result(), "accepted_tokens") > 0
    auto.assert_nothing_lost()


@pytest.mark.parametrize(
    "options",
    [{"threshold": 0.1}, {"trace": True}, {"drafting": "always"}],
    ids=lambda one: [*one][0],
)
def test_the_public_may_set_safe_options_only(auto: Client, prompts: list[str], options: dict):
    params = {"max_new_tokens": 4, "custom_params": {"parse": options}}
    answer = auto.post("/generate", {"text": prompts[0], "sampling_params": params})
    assert answer.status_code == 400
    assert "--parse-request-options safe" in answer.text
    chat = {"model": "demo", "messages": [{"role": "user", "content": prompts[0]}], **params}
    answer = auto.post("/v1/chat/completions", chat)
    assert answer.status_code == 400
    assert "--parse-request-options safe" in answer.text
