"""Bodies of tests that servers of many kinds run."""

from __future__ import annotations

import json
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import dill

from support.client import Client, assert_same, ids_of, parse_info, random_prompts

PLAIN = {"enabled": False}
TRACE = {"drafting": "always", "trace": True}
DIGITS = str.maketrans("0123456789", "1234567890")
Requests = Sequence[dict[str, Any]]
"""Keyword arguments of ``Client.generate``."""


def assert_token_mode(
    client: Client, concurrency: int, count: int, **limit: Any
) -> tuple[list[list[int]], list[dict[str, Any]]]:
    """A server in token mode answers as it does without drafts, and loses nothing.

    Returns the prompts, short and long ones, and the traced answers.
    """
    prompts = [random_prompts(1, 61 + i)[0] * (1 + 4 * (i % 2)) for i in range(count)]
    expected = client.generate_all(prompts, concurrency, **limit, parse=PLAIN)
    client.flush()
    answers = client.generate_all(prompts, concurrency, **limit, parse=TRACE)
    for ours, theirs in zip(answers, expected, strict=True):
        assert_same(ours, theirs)
    client.assert_nothing_lost()
    return prompts, answers


def by_value(processor: type) -> dict[str, str]:
    """Request field of a custom logit processor whose module a server cannot import."""
    found = {"callable": dill.dumps(processor, recurse=True).hex()}
    return {"custom_logit_processor": json.dumps(found)}


def ask_all(
    client: Client, requests: Requests, concurrency: int, **more: Any
) -> list[dict[str, Any]]:
    """Answers in the order of the requests, which have ``more`` in common."""
    with ThreadPoolExecutor(concurrency) as pool:
        jobs = [pool.submit(client.generate, **one | more) for one in requests]
        return [job.result() for job in jobs]


def changed(text: str) -> str:
    """Every second line with other numbers: a text that fits an answer in part."""
    lines = text.replace("<|im_end|>", "").splitlines(keepends=True)
    return "".join(line.translate(DIGITS) if n % 2 else line for n, line in enumerate(lines))


def tails(answers: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """The trace's records of drafts that a text extends, of traced answers."""
    records = [record for answer in answers for record in parse_info(answer)["trace"]]
    return [record for record in records if record["tail_source"]]


def abort_while(
    client: Client,
    place: str,
    *requests: dict[str, Any],
    expected: Sequence[list[int]] = (),
    seconds: float = 0.4,
    skip: int = 0,
    times: int = -1,
) -> list[dict[str, Any]]:
    """Aborts the first of these requests during a forward of that kind, which takes ``seconds``
    more: the others go on. Returns their answers.

    Args:
        place, skip, times: see ``Probe.fault``. Without ``skip`` the others come when the first one
            is there.
        requests: keyword arguments of ``Client.generate``.
        expected: output ids of each, where it isn't aborted; none: they are not looked at.
    """
    with (
        client.probe.fault(place, "slow", seconds=seconds, skip=skip, times=times) as slow,
        ThreadPoolExecutor(len(requests)) as pool,
    ):
        first, *others = requests
        jobs = [pool.submit(client.generate, **first, top={"rid": f"gone-{place}"})]
        if not skip:
            slow.wait_fired()
        jobs += [pool.submit(client.generate, **other) for other in others]
        slow.wait_fired()
        client.abort(f"gone-{place}")
        answers = [job.result() for job in jobs]
    aborted = [one["meta_info"]["finish_reason"]["type"] == "abort" for one in answers]
    assert aborted == [True] + [False] * len(others)
    if expected:
        ids = ids_of(answers)
        assert ids == [expected[0][: len(ids[0])], *expected[1:]]
    return answers
