"""A hybrid target, whose layers have recurrent states, short of slots for KV and states."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from support.bodies import PLAIN, TRACE, abort_while
from support.client import (
    Client,
    assert_all_kinds_of_drafts,
    ids_of,
    parse_info,
    random_prompts,
    retractions,
)
from support.families import TINY, cpu_kernels
from support.servers import (
    ALWAYS,
    SEED,
    SMALL_CHUNKS,
    Start,
    parse_flags,
    served,
    two_ranks_environment,
)

LIMIT = {"max_new_tokens": 40, "ignore_eos": True}
VARIABLES = {"SGLANG_MAMBA_CONV_DTYPE": "float32", "SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8"}
VARIABLES |= {"SGLANG_TEST_RETRACT_INTERVAL": "5"}
STAND_IN = "tests/e2e/test_families.py::test_token_mode"
pytestmark = pytest.mark.nightly(STAND_IN)
WITH_EXPERTS = pytest.param("qwen3.5-moe-images", marks=pytest.mark.weekly(STAND_IN))


def flags_of(name: str, folder: Path) -> tuple[str, ...]:
    token = ("--parse-verification", "token", "--parse-draft-tokens", "8", *TINY[name].flags)
    return parse_flags(TINY[name].pair(folder), *token, *SEED, *ALWAYS, *SMALL_CHUNKS)


@pytest.fixture(scope="module", params=["qwen3.5-images", WITH_EXPERTS])
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def client(
    start_server: Start, name: str, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """With slots for about half of twelve requests."""
    flags = flags_of(name, tmp_path_factory.mktemp("states"))
    tight = ("--max-total-tokens", "500", "--max-mamba-cache-size", "36")
    answers = ("--parse-reuse-answers", "100:shared")
    server_name, flags = f"states-tight-{name}", (*flags, *tight, *answers)
    with cpu_kernels(name):
        yield from served(start_server, server_name, *flags, **VARIABLES)


@pytest.fixture(scope="module", params=["qwen3.5-images", WITH_EXPERTS, "nemotron-3"])
def ranks(
    request: pytest.FixtureRequest, start_server: Start, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """Of models with linear attention, and of one with Mamba layers and experts."""
    flags = flags_of(request.param, tmp_path_factory.mktemp("ranks"))
    with cpu_kernels(request.param), two_ranks_environment():
        name = f"states-ranks-{request.param}"
        yield from served(start_server, name, *flags, "--tp-size", "2", **VARIABLES)


@pytest.fixture(scope="module")
def expected(client: Client) -> dict[tuple[int, ...], list[int]]:
    prompts = random_prompts(12, 41)
    answers = client.generate_all(prompts, 1, **LIMIT, parse=PLAIN)
    return dict(zip(map(tuple, prompts), ids_of(answers), strict=True))


@pytest.mark.parametrize("is_forced", [False, True])
def test_short_of_slots(client: Client, expected: dict, is_forced: bool):
    """More drafts than a pass verifies, retractions, and states that leave the prefix cache."""
    for _ in range(2):  # the second time earlier answers draft, too
        client.flush()
        with retractions(client, is_forced):
            answers = client.generate_all([*map(list, expected)], 12, **LIMIT, parse=TRACE)
        assert ids_of(answers) == [*expected.values()]
        infos = [parse_info(answer) for answer in answers]
        num_retracted = sum(answer["meta_info"]["num_retractions"] for answer in answers)
        assert num_retracted + sum(info["kv_truncated_drafts"] for info in infos) > 0
        assert num_retracted > 0 or not is_forced
    client.assert_nothing_lost()


def test_turns_after_drafts_that_end_the_answer(client: Client, expected: dict):
    """A state that consumed a draft's last token is one token ahead of the KV."""
    tail, found = random_prompts(1, 43)[0], {}
    for options in (PLAIN, TRACE, TRACE):  # the last time with the whole answer as drafts
        client.flush()
        for prompt in map(list, expected):
            first = client.generate(prompt, **LIMIT, parse=options)
            turn = [*prompt, *first["output_ids"], *tail]
            second = client.generate(turn, **LIMIT, parse=options)
            assert second["meta_info"]["cached_tokens"] == len(turn) - len(tail) - 1
            both = ids_of([first, second])
            assert both == found.setdefault(tuple(prompt), both)


def test_a_state_that_lags_far(client: Client):
    """What it lacks is repeated by a forward of its own before the next pass, from 64 tokens on."""
    limit = LIMIT | {"max_new_tokens": 160}
    prompts, longest = random_prompts(3, 47), 0
    expected = client.generate_all(prompts, 1, **limit, parse=PLAIN)
    client.flush()
    answers = client.generate_all(prompts, 1, **limit, parse=TRACE)
    assert ids_of(answers) == ids_of(expected)
    for answer in answers:
        lag = 0
        for record in parse_info(answer)["trace"]:
            longest = max(longest, lag)
            is_whole = record["accepted_len"] == len(record["draft_token_ids"])
            lag = 0 if is_whole else lag + record["accepted_len"] + len(record["bonus_token_ids"])
    assert longest > 64


def test_an_abort_leaves_no_wrong_state(client: Client, expected: dict):
    client.flush()
    prompt = [*next(iter(expected))]
    (answer,) = abort_while(client, "target-verify", {"prompt": prompt, "parse": TRACE, **LIMIT})
    turn = [*prompt, *answer["output_ids"]]
    answers = [client.generate(turn, **LIMIT, parse=TRACE)]
    client.flush()
    assert ids_of(answers) == ids_of([client.generate(turn, **LIMIT, parse=PLAIN)])


def test_two_ranks(ranks: Client):
    """Each rank copies its own part of a state."""
    prompts = random_prompts(12, 41)
    expected = ranks.generate_all(prompts, 12, **LIMIT, parse=PLAIN)
    ranks.flush()
    answers = ranks.generate_all(prompts, 12, **LIMIT, parse=TRACE)
    assert ids_of(answers) == ids_of(expected)
    assert_all_kinds_of_drafts(answers)
    ranks.assert_nothing_lost()
