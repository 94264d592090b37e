"""Aborts and disconnects in every phase: partial outputs are correct, and no KV slot leaks."""

from __future__ import annotations

import json
import random
import threading
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any

import pytest

from support.bodies import abort_while
from support.client import EXACT, HTTP, Client, random_prompts, wait_until

PROMPTS = random_prompts(12, 91)
LONG = {"max_new_tokens": 120, "ignore_eos": True}
OFF = {"enabled": False}
"""No refusal costs a decode step: whoever switches PARSE off has them."""
PREFILLS_AND_STEPS = ("target-prefill", "draft-prefill", "target-decode")
NUM_ABORTS = 48
CONCURRENCY = 16
MORE = pytest.mark.nightly("tests/e2e/test_aborts.py::test_random_aborts")


@pytest.fixture(scope="module")
def expected(plain: Client) -> list[list[int]]:
    answers = plain.generate_all(PROMPTS, 8, **LONG)
    return [answer["output_ids"] for answer in answers]


def _is_aborted(answer: dict) -> bool:
    return answer["meta_info"]["finish_reason"]["type"] == "abort"


def _assert_prefix(answer: dict, expected: list[int]) -> None:
    ids = answer["output_ids"]
    assert ids == expected[: len(ids)]


def _assert_healthy(client: Client, expected: list[list[int]]) -> None:
    client.assert_nothing_lost()
    answers = client.generate_all(PROMPTS, 12, parse=EXACT, max_new_tokens=12, ignore_eos=True)
    assert [answer["output_ids"] for answer in answers] == [ids[:12] for ids in expected]


@pytest.mark.parametrize(
    "place",
    [
        *("draft-chunk", "target-verify"),
        *(pytest.param(place, marks=MORE) for place in PREFILLS_AND_STEPS),
    ],
)
def test_abort_while(semantic: Client, expected: list[list[int]], place: str):
    """Aborts during a forward of that kind; other requests in the batch continue."""
    parse = OFF if place == "target-decode" else EXACT
    requests = (
        {"prompt": PROMPTS[0], "parse": parse, **LONG},
        {"prompt": PROMPTS[1], "parse": parse, "max_new_tokens": 6, "ignore_eos": True},
    )
    skip = 0 if place in ("target-prefill", "draft-prefill") else 2
    wanted = (expected[0], expected[1][:6])
    abort_while(semantic, place, *requests, expected=wanted, skip=skip)
    _assert_healthy(semantic, expected)


@pytest.mark.parametrize("place", ["draft-chunk", "target-verify", "target-decode"])
def test_disconnect_while(semantic: Client, expected: list[list[int]], place: str):
    parse = OFF if place == "target-decode" else EXACT
    body = {
        "input_ids": PROMPTS[0],
        "stream": True,
        "sampling_params": {"temperature": 0, "custom_params": {"parse": parse}, **LONG},
    }
    with semantic.probe.fault(place, "slow", seconds=0.1) as slow:
        with HTTP.stream("POST", f"{semantic.url}/generate", json=body, timeout=60) as response:
            lines = response.iter_lines()  # dropping the iterator disconnects
            next(lines)
            slow.wait_fired()
            assert semantic.look()["running"]
        semantic.wait_idle()
    _assert_healthy(semantic, expected)


def test_abort_while_waiting(semantic: Client, expected: list[list[int]]):
    """Aborts some of more requests than can run at once, before they start."""
    with ThreadPoolExecutor(24) as pool:
        jobs = [
            pool.submit(
                semantic.generate, PROMPTS[i % 12], parse=EXACT, top={"rid": f"queued-{i}"}, **LONG
            )
            for i in range(24)
        ]

        def num_there() -> int:
            seen = semantic.look()
            return len(seen["running"]) + seen["waiting"]

        wait_until(lambda: num_there() == 24, "every request to be there")
        assert semantic.look()["waiting"]
        semantic.abort_all()
        answers = [job.result() for job in jobs]
    assert sum(not answer["output_ids"] for answer in answers) > 2
    assert all(_is_aborted(answer) for answer in answers)
    for i, answer in enumerate(answers):
        _assert_prefix(answer, expected[i % 12])
    _assert_healthy(semantic, expected)


@dataclass
class _Tally:
    """Outcome of the random requests."""

    aborted: int = 0
    disconnected: int = 0
    finished: int = 0


@pytest.mark.parametrize(
    "server", ["overlap", *(pytest.param(one, marks=MORE) for one in ("semantic", "token"))]
)
def test_random_aborts(
    request: pytest.FixtureRequest, expected: list[list[int]], tokenizer: Any, server: str
):
    client: Client = request.getfixturevalue(server)
    record = client.probe.folder / "record"
    lines = client.probe.folder / "iterations.jsonl"
    lines.unlink(missing_ok=True)
    record.touch()
    texts = [tokenizer.decode(ids) for ids in expected]
    counters = _Tally()
    lock = threading.Lock()

    def work(worker: int) -> None:
        rng = random.Random(1000 + worker)
        number = 0
        while counters.aborted < NUM_ABORTS or min(counters.disconnected, counters.finished) < 4:
            number += 1
            name = f"{server}-{worker}-{number}"
            outcome = _one_request(client, rng, name, expected, texts)
            with lock:
                setattr(counters, outcome, getattr(counters, outcome) + 1)

    with ThreadPoolExecutor(CONCURRENCY) as pool:
        list(pool.map(work, range(CONCURRENCY)))
    record.unlink()
    assert counters.disconnected > 3
    assert counters.finished > 3
    # Not vacuous: requests ended in every phase.
    last = {}
    for line in lines.read_text().splitlines():
        last |= {req["rid"]: req["phase"] for req in json.loads(line)}
    assert {"drafting", "verifying"} <= set(last.values())
    _assert_healthy(client, expected)


def _one_request(
    client: Client,
    rng: random.Random,
    rid: str,
    expected: list[list[int]],
    texts: Sequence[str],
) -> str:
    """Sends a request, a third of them with a prediction, then lets it finish, aborts it or
    disconnects; returns which."""
    number = rng.randrange(len(PROMPTS))
    fate = rng.choices(["finished", "aborted", "disconnected"], [2, 7, 1])[0]
    limit = rng.randrange(1, 16) if fate == "finished" else LONG["max_new_tokens"]
    is_exact = "token" in rid or rng.random() < 0.7
    options = client.options_of({} if "token" in rid else EXACT if is_exact else {"threshold": 0.4})
    params = {
        "temperature": 0,
        "max_new_tokens": limit,
        "ignore_eos": True,
        "custom_params": {"parse": options | rng.choice([{}, {}, {"draft": texts[number]}])},
    }
    body = {"input_ids": PROMPTS[number], "rid": rid, "sampling_params": params}
    if fate == "disconnected":
        return _hang_up(client, body, rng.randrange(1, 6))
    is_answered = threading.Event()
    if fate == "aborted":
        killer = threading.Thread(target=_abort_soon, args=(client, rid, rng, is_answered))
        killer.start()
    answer = client.post("/generate", body).raise_for_status().json()
    is_answered.set()
    if fate == "aborted":
        killer.join()
    if is_exact:
        _assert_prefix(answer, expected[number])
    if _is_aborted(answer):
        return "aborted"
    assert answer["meta_info"]["completion_tokens"] == limit
    return "finished"


def _abort_soon(client: Client, rid: str, rng: random.Random, is_answered: threading.Event) -> None:
    """Repeats the abort, because one that arrives before its request is ignored."""
    # Token mode responds sooner.
    while not is_answered.wait(rng.uniform(0.01, 0.2 if "token" in rid else 0.6)):
        client.abort(rid)


def _hang_up(client: Client, body: dict, after_lines: int) -> str:
    url = f"{client.url}/generate"
    with HTTP.stream("POST", url, json=body | {"stream": True}, timeout=60) as response:
        for _, _ in zip(range(after_lines), response.iter_lines(), strict=False):
            pass
    return "disconnected"
