"""Targets with two KV pools: full attention's, and a smaller one of what is in the windows.

Both are too small for what is sent. Windows are 16 tokens, and slots leave theirs every 4 tokens.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import NamedTuple

import pytest
import torch

from sglang_parse.client.servers import awake
from support.bodies import PLAIN, TRACE
from support.client import Client, ids_of, parse_info, random_prompts, retractions
from support.families import TINY, Tiny, cpu_kernels
from support.servers import OVERLAP, SEED, Start, parse_flags

LIMIT, AT_A_TIME = {"max_new_tokens": 56, "ignore_eos": True}, 8
PROMPTS = random_prompts(10, 71)
TOKEN = (*("--parse-verification", "token", "--parse-draft-tokens", "8"), *SEED)
TIGHT = ("--max-total-tokens", "560", "--swa-full-tokens-ratio", "0.5")
"""560 slots, 280 of them for windows."""
CHUNKS = ("--chunked-prefill-size", "64")
SERVERS = {
    "pages": (*TIGHT, *CHUNKS, "--page-size", "4"),
    "overlap": (*TIGHT, *CHUNKS, *OVERLAP),
    "no-cache": (*CHUNKS, *OVERLAP, "--max-total-tokens", "560", "--disable-radix-cache"),
    "one-pool": ("--max-total-tokens", "400", *CHUNKS, "--disable-hybrid-swa-memory"),
}
EQUAL = "overlap"
"""Where the draft is the target itself."""
STAND_IN = "tests/e2e/test_pools.py::test_many_at_a_time"
MORE, MOST = pytest.mark.nightly(STAND_IN), pytest.mark.weekly(STAND_IN)
CASES = [
    ("gpt-oss", "pages"),
    *(
        pytest.param(case, marks=MORE)
        for case in (
            *(("gpt-oss", EQUAL), ("gpt-oss", "no-cache"), ("gpt-oss", "one-pool")),
            *(("gemma-4", EQUAL), ("mimo-v2-flash", "pages")),
        )
    ),
    *(
        pytest.param(case, marks=MOST)
        for case in (
            *(("gemma-4", "pages"), ("granite-swash", "pages"), ("laguna", EQUAL)),
            *(("mellum-2", "pages"), ("mimo-v2-flash", EQUAL), ("step-3.5", "pages")),
        )
    ),
]


class Tight(NamedTuple):
    """A server short of KV slots, and its target's folder."""

    client: Client
    target: Path
    tiny: Tiny
    is_equal: bool


@pytest.fixture(scope="module", params=CASES, ids="-".join)
def tight(
    request: pytest.FixtureRequest, start_server: Start, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Tight]:
    """In token mode, with drafts of a copy."""
    name, kind = request.param
    noise = 0.0 if kind == EQUAL else 0.01
    pair = TINY[name].pair(tmp_path_factory.mktemp(name), noise)
    with cpu_kernels(name), pytest.MonkeyPatch.context() as environ:
        # Admits more requests than fit.
        environ.setenv("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "8")
        environ.setenv("SGLANG_SWA_EVICTION_INTERVAL", "4")
        environ.setenv("SGLANG_TEST_RETRACT_INTERVAL", "5")
        flags = parse_flags(pair, *TOKEN, *SERVERS[kind], *TINY[name].flags)
        server = start_server(f"{kind}-{name}", *flags)
    with awake(server):
        yield Tight(Client.of(server), pair[0], TINY[name], kind == EQUAL)


def test_longer_than_the_window_pool(tight: Tight):
    """Alone it would not fit if slots did not leave the window; those of the prompt do, too.

    The draft model has them still: it drafts what the target would write.
    """
    client = tight.client
    prompt = random_prompts(1, 61, longest=120)[0]
    client.flush()
    limit = {"max_new_tokens": 380 - len(prompt), "ignore_eos": True}
    answer = client.generate(prompt, **limit, parse=TRACE)
    ids, info = prompt + answer["output_ids"], parse_info(answer)
    assert len(ids) == 380
    least = 0.98 if tight.is_equal else 0.02
    assert info["accepted_tokens"] >= least * info["drafted_tokens"]
    with torch.no_grad():
        chosen = tight.tiny.load(tight.target)(torch.tensor([ids])).logits[0].argmax(-1)
    assert chosen[len(prompt) - 1 : -1].tolist() == answer["output_ids"]
    client.assert_nothing_lost()


@pytest.fixture(scope="module")
def expected(tight: Tight) -> list[list[int]]:
    """Plain answers to ``PROMPTS``, one after the other."""
    return ids_of(tight.client.generate_all(PROMPTS, 1, **LIMIT, parse=PLAIN))


@pytest.mark.parametrize("is_forced", [False, pytest.param(True, marks=MORE)])
def test_many_at_a_time(tight: Tight, expected: list[list[int]], is_forced: bool):
    """Too many for the pools; retractions every few iterations, too, where they are forced."""
    client = tight.client
    with retractions(client, is_forced):
        answers = client.generate_all(PROMPTS, AT_A_TIME, **LIMIT, parse=TRACE)
    assert ids_of(answers) == expected
    infos = [parse_info(answer) for answer in answers]
    num_retractions = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    assert num_retractions + sum(info["kv_truncated_drafts"] for info in infos) > 0
    assert num_retractions > 0 or not is_forced
    kept = [sum(info[key] for info in infos) for key in ("accepted_tokens", "drafted_tokens")]
    assert 0 < kept[0] < kept[1] or tight.is_equal
    client.assert_nothing_lost()


def test_turns(tight: Tight):
    """What left the window is not in the prefix cache, and what is found there is right."""
    client = tight.client
    prompts, tails = random_prompts(4, 81), random_prompts(4, 82, longest=12)
    found = []
    for options, at_a_time in ((PLAIN, 1), (TRACE, 4)):
        client.flush()
        turns = client.generate_all(prompts, at_a_time, **LIMIT, parse=options)
        ids = [[*p, *t["output_ids"], *e] for p, t, e in zip(prompts, turns, tails, strict=True)]
        turns += client.generate_all(ids, at_a_time, **LIMIT, parse=options)
        found.append(ids_of(turns))
    assert found[1] == found[0]
    client.assert_nothing_lost()
