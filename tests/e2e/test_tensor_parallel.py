"""Two tensor-parallel ranks on the CPU: outputs and traces of one rank, the same decisions.

The plugin ``plugins/rank_noise`` makes rank 1's logits differ so much that most of its decisions
would be others; rank 0's are untouched.
"""

from __future__ import annotations

import json
import math
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from support.client import EXACT, HTTP, Client, ids_of, parse_info, random_prompts

LENGTH = {"max_new_tokens": 28, "ignore_eos": True}
MORE = pytest.mark.nightly("tests/e2e/test_tensor_parallel.py::test_exact_mode")


@pytest.mark.parametrize("concurrency", [8, pytest.param(1, marks=MORE)])
@pytest.mark.parametrize("parse", [EXACT, {"enabled": False}])
def test_exact_mode(two_ranks: Client, plain: Client, parse: dict, concurrency: int):
    prompts = random_prompts(1 if concurrency == 1 else 6, 71)
    answers = two_ranks.generate_all(prompts, concurrency, parse=parse, **LENGTH)
    assert ids_of(answers) == ids_of(plain.generate_all(prompts, 6, **LENGTH))
    if parse is EXACT:
        assert all(parse_info(answer)["rounds"] > 2 for answer in answers)


def test_semantic_accepted_lengths(two_ranks: Client, semantic: Client):
    prompts = random_prompts(6, 72)
    both = [
        client.generate_all(prompts, 6, parse={"trace": True}, **LENGTH)
        for client in (two_ranks, semantic)
    ]
    assert ids_of(both[0]) == ids_of(both[1])
    infos = [[parse_info(answer) for answer in answers] for answers in both]
    for ours, theirs in zip(*infos, strict=True):
        assert ours["accepted_tokens"] == theirs["accepted_tokens"]
        for record, other in zip(ours["trace"], theirs["trace"], strict=True):
            assert record.pop("verdicts") == pytest.approx(other.pop("verdicts"), abs=1e-4)
            assert record.pop("verdict_mass") == pytest.approx(other.pop("verdict_mass"), abs=1e-4)
            record["plan"].pop("speedup"), other["plan"].pop("speedup")  # of measured times
            assert record == other
    accepted = sum(info["accepted_tokens"] for info in infos[0])
    assert 0 < accepted < sum(info["drafted_tokens"] for info in infos[0])


@MORE
def test_sampled_requests_and_grammars_next_to_drafting_ones(two_ranks: Client, plain: Client):
    """The ranks have different random numbers; a grammar needs the same tokens on both, in drafts,
    too."""
    prompts = random_prompts(4, 73)
    requests = [
        *({"temperature": 1.0, "top_p": 0.9, **LENGTH} for _ in range(2)),
        *({"regex": "[a-f]{20}", "max_new_tokens": 30, "parse": EXACT} for _ in range(2)),
    ]
    with ThreadPoolExecutor(4) as pool:
        jobs = [
            pool.submit(two_ranks.generate, prompt, **request)
            for prompt, request in zip(prompts, requests, strict=True)
        ]
        answers = [job.result() for job in jobs]
    assert [len(answer["output_ids"]) for answer in answers[:2]] == [28] * 2
    assert all(parse_info(answer)["drafted_tokens"] > 0 for answer in answers[2:])
    theirs = plain.generate_all(prompts[2:], 2, regex="[a-f]{20}", max_new_tokens=30)
    assert ids_of(answers[2:]) == ids_of(theirs)
    two_ranks.assert_nothing_lost()


def lines_of(records: Path, rank: int) -> list[dict]:
    """A line per shared decision of a rank: its ``own`` values, and the ``agreed`` ones."""
    return [json.loads(line) for line in (records / f"rank{rank}.jsonl").read_text().splitlines()]


def decisions(records: Path, rank: int) -> list[str]:
    """What a rank acted on; as text, because NaN is not equal to itself."""
    return [repr(line["agreed"]) for line in lines_of(records, rank)]


def test_ranks_take_the_same_actions(two_ranks: Client, records: Path):
    two_ranks.generate_all(random_prompts(4, 74), 4, **LENGTH)
    assert decisions(records, 0) == decisions(records, 1)
    first, second = (lines_of(records, rank) for rank in (0, 1))
    assert all(repr(line["own"]) == repr(line["agreed"]) for line in first)
    different = [repr(line["own"]) != repr(line["agreed"]) for line in second]
    assert sum(different) > len(different) / 2 > 50
    assert any(_has_fault(line["own"]) for line in second)
    assert not any(_has_fault(line["agreed"]) for line in second)


def test_ranks_use_rank_0s_times(two_ranks: Client, records: Path):
    """Their clocks differ; their decisions must not."""
    two_ranks.generate_all(random_prompts(4, 76), 4, **LENGTH)
    first, second = ((records / f"rank{rank}.times").read_text().splitlines() for rank in (0, 1))
    # The last line of one rank may be missing.
    assert all(ours == theirs for ours, theirs in zip(first, second, strict=False))
    assert sum("Stage.DRAFT" in line for line in second) > 10


@pytest.mark.nightly("tests/e2e/test_tensor_parallel.py::test_ranks_take_the_same_actions")
def test_adaptive_drafting_beside_texts_and_plain_requests(
    two_ranks: Client, plain: Client, records: Path
):
    """Whether a draft pays, and who waits for whom, is decided by rank 0's times alone."""
    auto, prompts = replace(two_ranks, options={}), random_prompts(9, 77)
    expected = plain.generate_all(prompts, 9, **LENGTH)
    texts, exact = [answer["text"] for answer in expected], [n for n in range(9) if n % 3]

    def ask(number: int) -> dict:
        ways = {}, {"enabled": False}, {"threshold": 1.5, "draft": texts[number]}
        return auto.generate(prompts[number], parse=ways[number % 3], **LENGTH)

    sources: list[set[str]] = [set(), set(), set()]
    for _ in range(3):  # at first nothing is known of what costs how much
        with ThreadPoolExecutor(9) as pool:
            answers = [*pool.map(ask, range(9))]
        for number in exact:
            assert answers[number]["output_ids"] == expected[number]["output_ids"]
        for number, answer in enumerate(answers):
            sources[number % 3].update(parse_info(answer)["sources"])
    assert "model" in sources[0]
    assert not sources[1]
    assert "prediction" in sources[2]
    assert decisions(records, 0) == decisions(records, 1)
    two_ranks.assert_nothing_lost()


def _has_fault(values: list) -> bool:
    """Missing tokens are -1, missing logits NaN."""
    return any(math.isnan(value[0]) if isinstance(value, list) else value < 0 for value in values)


@pytest.mark.nightly("tests/e2e/test_tensor_parallel.py::test_ranks_take_the_same_actions")
def test_without_the_broadcast_the_ranks_diverge(two_ranks: Client, plain: Client, records: Path):
    """Runs last, because it breaks the server."""
    prompts = random_prompts(4, 75)
    expected = ids_of(plain.generate_all(prompts, 4, **LENGTH))
    started = time.monotonic()
    assert ids_of(two_ranks.generate_all(prompts, 4, parse=EXACT, **LENGTH)) == expected
    limit_s = 5 + 3 * (time.monotonic() - started)  # far longer than the same answers take
    num_agreed = [len(decisions(records, rank)) for rank in (0, 1)]
    assert num_agreed[0] == num_agreed[1]
    (records / "alone").touch()
    params = {"temperature": 0, "custom_params": {"parse": EXACT}, **LENGTH}

    def ask(prompt: list[int]) -> list[int] | None:
        body = {"input_ids": prompt, "sampling_params": params}
        try:
            answer = HTTP.post(f"{two_ranks.url}/generate", json=body, timeout=limit_s)
        except httpx.HTTPError:
            return None  # it hangs or has exited
        return answer.json()["output_ids"] if answer.status_code == 200 else None

    with ThreadPoolExecutor(4) as pool:
        answers = list(pool.map(ask, prompts))
    assert answers != expected
    # Not for another reason: from their first decision on, each rank has acted on its own values.
    first, second = (decisions(records, rank)[num_agreed[rank] :] for rank in (0, 1))
    assert first
    assert second
    assert any(ours != theirs for ours, theirs in zip(first, second, strict=False))
