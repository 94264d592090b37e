"""Lengths: prompts of 1 to 3,000 tokens in chunks, the context limit, drafts that end at once or
never end a segment. Exact modes equal the plain server; semantic mode loses no token."""

from __future__ import annotations

import random
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from support.client import Client, ids_of, parse_info, random_prompts
from support.models import load_model
from support.servers import QUESTION, SEED, Start, parse_flags, served

CONTEXT = 4096
"""Positions of the random pair; chunks of prefill have 256 tokens (``conftest.SMALL_CHUNKS``)."""
PROMPT_LENS = (1, 2, 3, 17, 64, 255, 256, 257, 511, 512, 513, 1000, 2047, 3000)
SERVERS = {"token": {}, "semantic": {"threshold": 1.5}}
"""Servers, and the options that make them exact."""
FREE = {"max_new_tokens": 24, "ignore_eos": True}
MIXED = pytest.mark.nightly("tests/e2e/test_lengths.py::test_mixed_prompt_lengths_in_chunks")
MORE = pytest.mark.nightly("tests/e2e/test_lengths.py::test_context_ends_in_the_middle_of_a_draft")


def _prompt(length: int, seed: int = 0) -> list[int]:
    rng = random.Random(1000 * seed + length)
    return [rng.randrange(3, 300) for _ in range(length)]


@pytest.fixture(scope="module")
def mixed(plain: Client) -> list[list[int]]:
    return ids_of(plain.generate_all([_prompt(n) for n in PROMPT_LENS], 2, **FREE))


@pytest.mark.parametrize("server", ["token", pytest.param("semantic", marks=MIXED)])
def test_mixed_prompt_lengths_in_chunks(
    request: pytest.FixtureRequest, mixed: list[list[int]], server: str
):
    """Prefills long prompts in chunks between the draft chunks of others."""
    client: Client = request.getfixturevalue(server)
    client.flush()
    prompts = [_prompt(n) for n in PROMPT_LENS]
    answers = client.generate_all(prompts, len(prompts), parse=SERVERS[server], **FREE)
    assert ids_of(answers) == mixed
    assert all(parse_info(answer)["rounds"] > 1 for answer in answers)
    again = client.generate_all(prompts, len(prompts), parse=SERVERS[server], **FREE)
    assert ids_of(again) == mixed
    assert sum(answer["meta_info"]["cached_tokens"] for answer in again) > sum(PROMPT_LENS) / 2
    client.assert_nothing_lost()


def test_mixed_lengths_in_semantic_mode(semantic: Client):
    prompts = [_prompt(n, seed=1) for n in PROMPT_LENS]
    answers = semantic.generate_all(prompts, len(prompts), **FREE)
    assert all(len(ids) == FREE["max_new_tokens"] for ids in ids_of(answers))
    assert sum(parse_info(answer)["accepted_tokens"] for answer in answers) > 0
    semantic.assert_nothing_lost()


@pytest.mark.parametrize(
    "room", [9, *(pytest.param(room, marks=MORE) for room in (1, 2, 5, 8, 20, 25))]
)
@pytest.mark.parametrize("server", SERVERS)
def test_context_ends_in_the_middle_of_a_draft(
    request: pytest.FixtureRequest, plain: Client, server: str, room: int
):
    """``room`` tokens are left; a round drafts 8 or 20. Questions exceed the context."""
    client: Client = request.getfixturevalue(server)
    # Prefixes of one text: all but the first test hit the radix cache.
    prompt = _prompt(CONTEXT, seed=2)[: CONTEXT - 6 - room]
    params = {"max_new_tokens": None, "ignore_eos": True}
    expected = plain.generate(prompt, **params)
    answer = client.generate(prompt, parse=SERVERS[server], **params)
    assert 0 < len(answer["output_ids"]) <= room + 6
    assert answer["output_ids"] == expected["output_ids"]
    assert answer["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
    if server == "semantic":
        verified = client.generate(prompt, **params)
        assert len(verified["output_ids"]) == len(expected["output_ids"])


@pytest.mark.parametrize("server", SERVERS)
def test_one_token(request: pytest.FixtureRequest, plain: Client, server: str):
    """The token comes from prefill, without a draft, in a batch with drafting requests."""
    client: Client = request.getfixturevalue(server)
    prompts = random_prompts(8, 44)
    params = {"max_new_tokens": 1, "ignore_eos": True}
    answers = client.generate_all(prompts, 8, **params)
    assert ids_of(answers) == ids_of(plain.generate_all(prompts, 8, **params))
    assert all(parse_info(answer)["drafted_tokens"] == 0 for answer in answers)
    client.assert_nothing_lost()


@pytest.mark.parametrize("server", SERVERS)
def test_drafts_that_end_at_once(request: pytest.FixtureRequest, plain: Client, server: str):
    """Every token that the target does not choose is a stop token, so a wrong draft ends at its
    first error."""
    client: Client = request.getfixturevalue(server)
    empty = 0
    for prompt in random_prompts(4, 45):
        free = plain.generate(prompt, **FREE)["output_ids"]
        stops = sorted(set(range(300)) - set(free))
        params = {"max_new_tokens": len(free), "stop_token_ids": stops}
        expected = plain.generate(prompt, **params)
        answer = client.generate(prompt, parse=SERVERS[server] | {"trace": True}, **params)
        assert answer["output_ids"] == expected["output_ids"] == free
        assert answer["meta_info"]["finish_reason"] == expected["meta_info"]["finish_reason"]
        drafts = [record["draft_token_ids"] for record in parse_info(answer)["trace"]]
        empty += sum(len(draft) == 1 and draft[0] in stops for draft in drafts)
        # Semantic mode: an accepted empty draft ends the answer, as plain decoding would.
        verified = client.generate(prompt, parse={"threshold": 0.0, "trace": True}, **params)
        last = parse_info(verified)["trace"][-1]
        if server == "semantic" and last["draft_token_ids"][-1] in stops:
            assert verified["meta_info"]["finish_reason"]["type"] == "stop"
    assert empty > 0
    client.assert_nothing_lost()


@pytest.mark.parametrize(
    "room", [1, 7, 20, *(pytest.param(room, marks=MORE) for room in (2, 18, 19))]
)
def test_a_draft_at_the_length_limit_is_accepted_in_full(semantic: Client, room: int):
    """The last segment is verified even if unfinished: no token is drafted twice."""
    for prompt in random_prompts(3, 47):
        params = {"max_new_tokens": 1 + room, "ignore_eos": True}
        answer = semantic.generate(prompt, parse={"threshold": 0.0, "trace": True}, **params)
        info = parse_info(answer)
        (record,) = info["trace"]
        assert record["draft_token_ids"] == answer["output_ids"][1:]
        assert record["prefix_ends"] == sorted({*range(3, room, 3), room})
        assert (record["accepted_len"], record["next_token_id"]) == (room, None)
        assert info["drafted_tokens"] == info["accepted_tokens"] == room
    semantic.assert_nothing_lost()


def test_the_carry_over_begins_the_next_draft(semantic: Client, pair: tuple[Path, Path]):
    """A round drafts 20 tokens and verifies 18; the others are carried over if the target's choice
    matches. Every draft equals the draft model's own output."""
    draft_model = load_model(pair[1])
    params = {"max_new_tokens": 120, "ignore_eos": True}
    carried = 0
    for prompt in random_prompts(4, 48):
        answer = semantic.generate(prompt, parse={"threshold": 0.0, "trace": True}, **params)
        info, output = parse_info(answer), answer["output_ids"]
        begun: list[int] = []
        drafted = 0
        for record in info["trace"]:
            draft = record["draft_token_ids"]
            assert draft[: len(begun)] == begun
            drafted += len(draft) - len(begun)
            context = torch.tensor([[*prompt, *output[: record["output_start"]]]])
            written = draft_model.generate(
                context,
                attention_mask=torch.ones_like(context),  # a written padding token counts, too
                max_new_tokens=len(draft),
                do_sample=False,
                eos_token_id=-1,
            )
            assert draft == written[0, context.shape[1] :].tolist()
            unverified = draft[record["accepted_len"] :]
            goes_on = unverified[:1] == [record["next_token_id"]]
            begun = unverified[1:] if goes_on else []
            carried += len(begun)
        assert info["drafted_tokens"] == drafted
        assert info["accepted_tokens"] + info["target_tokens"] == len(output)
    assert carried > 0
    semantic.assert_nothing_lost()


@pytest.fixture(scope="module")
def lines(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    """Semantic mode with segments by line, which random text lacks; the target is the draft.

    Grammars by outlines, whose requests are served plainly.
    """
    flags = (*QUESTION, "--parse-draft-tokens", "20", "--parse-draft-chunk", "7", *SEED)
    flags = (*flags, "--grammar-backend", "outlines")
    yield from served(start_server, "lines", *parse_flags((pair[0], pair[0]), *flags))


@pytest.mark.nightly("tests/unit/test_segment.py")
@pytest.mark.parametrize("threshold", [0.0, 1.5])
def test_drafts_that_never_end_a_segment(plain: Client, lines: Client, threshold: float):
    """The whole draft is one prefix. Accepted or not, the output is the target's."""
    prompts = random_prompts(6, 46)
    params = {"max_new_tokens": 70, "ignore_eos": True}
    expected = ids_of(plain.generate_all(prompts, 6, **params))
    answers = lines.generate_all(
        prompts, 6, parse={"threshold": threshold, "trace": True}, **params
    )
    assert ids_of(answers) == expected
    rounds = [record for answer in answers for record in parse_info(answer)["trace"]]
    whole = [r for r in rounds if r["prefix_ends"] == [len(r["draft_token_ids"])]]
    assert len(whole) > len(rounds) / 2
    if threshold == 0:
        assert all(record["accepted_len"] == len(record["draft_token_ids"]) for record in whole)
    lines.assert_nothing_lost()


@pytest.mark.nightly("tests/compat/test_admission.py::test_every_fallback")
def test_grammars_that_cannot_go_ahead(plain: Client, lines: Client):
    """Served plainly, beside requests that draft, with the plain server's answer."""
    (prompt,) = random_prompts(1, 49)
    grammar = {"max_new_tokens": 40, "regex": "[a-z]{50}"}  # backends differ behind its end
    with ThreadPoolExecutor(3) as pool:
        others = [pool.submit(lines.generate, other, **FREE) for other in random_prompts(2, 46)]
        answer = pool.submit(lines.generate, prompt, **grammar).result()
    assert all(parse_info(other.result())["rounds"] > 0 for other in others)
    assert answer["output_ids"] == plain.generate(prompt, **grammar)["output_ids"]
    info = parse_info(answer)
    assert (info["mode"], info["reason"], info["drafted_tokens"]) == ("plain", "grammar", 0)
    lines.assert_nothing_lost()
