"""Hybrid targets, whose layers have recurrent states: plain answers, and transformers' verdicts.

Random weights of their real classes. Drafts are a full-attention model's, which are hardly ever
right, and earlier answers to the same prompt or to one like it.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from support.client import Client, ids_of, parse_info, random_prompts
from support.families import HYBRID
from support.models import load_model
from support.servers import ALWAYS, SEED, SMALL_CHUNKS, Start, parse_flags, served

LIMIT = {"max_new_tokens": 40, "ignore_eos": True}
TRACE = {"drafting": "always", "trace": True}
PLAIN = {"enabled": False}
TOKEN = ("--parse-verification", "token", "--parse-draft-tokens", "8")
ANSWERS = ("--parse-reuse-answers", "100:shared", *ALWAYS)
EXACT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
FAST = "qwen3.5"
SECOND = pytest.mark.nightly("tests/e2e/test_states.py::test_token_mode")
NAMES = [name if name == FAST else pytest.param(name, marks=SECOND) for name in HYBRID]


@pytest.fixture(scope="module")
def serve(start_server: Start, tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Iterator]:
    """Returns ``serve(kind, name, *flags)``: a server of a family, and its target's folder."""
    pair_of = cache(lambda name: HYBRID[name].pair(tmp_path_factory.mktemp(name)))

    def start(kind: str, name: str, *flags: str) -> Iterator[tuple[Client, Path]]:
        pair = pair_of(name)
        flags = parse_flags(pair, *flags, *SEED, *HYBRID[name].flags)
        for client in served(start_server, f"{kind}-{name}", *flags, **EXACT):
            yield client, pair[0]

    return start


@pytest.fixture(scope="module", params=NAMES)
def family(
    request: pytest.FixtureRequest, serve: Callable[..., Iterator]
) -> Iterator[tuple[Client, Path]]:
    """In token mode; prompts are prefilled in chunks."""
    yield from serve("hybrid", request.param, *TOKEN, *ANSWERS, *SMALL_CHUNKS)


def like(prompt: Sequence[int]) -> list[int]:
    """The prompt with other tokens at its beginning."""
    return [(token + 7) % 290 + 3 for token in prompt[:2]] + [*prompt[2:]]


def kinds_of(answers: Sequence[Any]) -> set[tuple[bool, bool]]:
    """(kept something, kept all) of each draft."""
    records = [record for answer in answers for record in parse_info(answer)["trace"]]
    lens = [(record["accepted_len"], len(record["draft_token_ids"])) for record in records]
    return {(kept > 0, kept == length) for kept, length in lens}


@pytest.mark.parametrize(("concurrency", "count"), [(1, 2), (8, 10)])
def test_token_mode(family: tuple[Client, Path], concurrency: int, count: int):
    client, target = family
    prompts = [random_prompts(1, 61 + i)[0] * (1 + 4 * (i % 2)) for i in range(count)]
    prompts += [*map(like, prompts)]
    expected = client.generate_all(prompts, concurrency, **LIMIT, parse=PLAIN)
    client.flush()
    first = client.generate_all(prompts, concurrency, **LIMIT, parse=TRACE)
    client.flush()
    second = client.generate_all(prompts, concurrency, **LIMIT, parse=TRACE)
    assert ids_of(first) == ids_of(expected)
    assert ids_of(second) == ids_of(expected)
    assert kinds_of([*first, *second]) >= {(True, True), (True, False), (False, False)}
    if concurrency == 1:
        ids = prompts[0] + first[0]["output_ids"]
        with torch.no_grad():
            chosen = load_model(target)(torch.tensor([ids])).logits[0].argmax(-1)
        assert chosen[len(prompts[0]) - 1 : -1].tolist() == first[0]["output_ids"]


def test_turns_hit_the_prefix_cache(family: tuple[Client, Path]):
    """The second turn starts from the state behind the first answer, however its drafts ended."""
    client, _ = family
    prompts, tail = random_prompts(2, 71, longest=40), random_prompts(1, 73)[0]
    found = {}
    for options in (PLAIN, TRACE, TRACE):
        for prompt in (*prompts, *map(like, prompts)):
            client.flush()
            first = client.generate(prompt, **LIMIT, parse=options)
            turn = [*prompt, *first["output_ids"], *tail]
            second = client.generate(turn, **LIMIT, parse=options)
            assert second["meta_info"]["cached_tokens"] >= len(turn) - len(tail) - 1
            expected = found.setdefault(tuple(prompt), ids_of([first, second]))
            assert ids_of([first, second]) == expected


def test_slots_come_back_after_an_abort(family: tuple[Client, Path]):
    client, _ = family
    prompt = random_prompts(1, 81)[0]
    expected = client.generate(prompt, **LIMIT, parse=PLAIN)
    with (
        client.probe.fault("target-verify", "slow", seconds=0.4) as slow,
        ThreadPoolExecutor(1) as pool,
    ):
        job = pool.submit(client.generate, prompt, parse=TRACE, top={"rid": "gone"}, **LIMIT)
        slow.wait_fired()
        client.abort("gone")
        assert job.result()["meta_info"]["finish_reason"]["type"] == "abort"
    again = client.generate(prompt, **LIMIT, parse=TRACE)  # the prefix cache has no wrong state
    assert ids_of([again]) == ids_of([expected])
    client.assert_nothing_lost()
