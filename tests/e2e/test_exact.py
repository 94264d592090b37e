"""Exactness: token mode and a threshold above 1 give the plain server's tokens (fp32, greedy)."""

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.client import (
    EXACT,
    Client,
    assert_adds_up,
    greedy_ids,
    ids_of,
    parse_info,
    random_prompts,
)
from support.verified_tokens import gaps

SEEDS = (11, 12)
MORE = pytest.mark.nightly("tests/e2e/test_exact.py::test_token_mode")


@pytest.fixture(scope="module")
def expected(plain: Client) -> dict[int, list[list[int]]]:
    return greedy_ids(plain, SEEDS)


@pytest.mark.parametrize(("concurrency", "count"), [(1, 3), (8, 6)])
@pytest.mark.parametrize("seed", [SEEDS[0], pytest.param(SEEDS[1], marks=MORE)])
def test_token_mode(token: Client, expected: dict, seed: int, concurrency: int, count: int):
    prompts = random_prompts(6, seed)[:count]
    answers = token.generate_all(prompts, concurrency, max_new_tokens=48, ignore_eos=True)
    assert ids_of(answers) == expected[seed][:count]
    infos = [parse_info(answer) for answer in answers]
    assert {info["mode"] for info in infos} == {"parse"}
    # Not vacuous: text is diverse, some drafts are accepted and some are not.
    assert len({token for ids in expected[seed] for token in ids}) > 50
    accepted = sum(info["accepted_tokens"] for info in infos)
    assert 0 < accepted < sum(info["drafted_tokens"] for info in infos)
    for answer in answers:
        assert_adds_up(answer)


@pytest.mark.parametrize(("concurrency", "count"), [(1, 3), (8, 6)])
def test_threshold_above_one(semantic: Client, expected: dict, concurrency: int, count: int):
    prompts = random_prompts(6, SEEDS[0])[:count]
    limit = {"max_new_tokens": 48, "ignore_eos": True}
    answers = semantic.generate_all(prompts, concurrency, parse=EXACT, **limit)
    assert ids_of(answers) == expected[SEEDS[0]][:count]
    assert all(parse_info(answer)["accepted_tokens"] == 0 for answer in answers)
    assert all(parse_info(answer)["rounds"] > 3 for answer in answers)


def test_prefills_join_while_others_draft(token: Client, expected: dict):
    """More requests than run at once, different lengths: phases mix in one running batch."""
    seed = SEEDS[1]
    prompts = random_prompts(6, seed)
    answers = token.generate_all(prompts * 4, 24, max_new_tokens=48, ignore_eos=True)
    assert ids_of(answers) == expected[seed] * 4


def test_switched_off_requests_batched_with_drafting_ones(token: Client, expected: dict):
    seed = SEEDS[0]
    prompts = random_prompts(6, seed)
    bodies = [None, {"enabled": False}]
    with ThreadPoolExecutor(12) as pool:
        jobs = [
            pool.submit(
                token.generate, prompt, parse=bodies[i % 2], max_new_tokens=48, ignore_eos=True
            )
            for i, prompt in enumerate(prompts * 2)
        ]
        answers = [job.result() for job in jobs]
    assert ids_of(answers) == expected[seed] * 2
    for i, answer in enumerate(answers):
        info = parse_info(answer)
        if i % 2:
            assert (info["mode"], info["reason"]) == ("plain", "switched off")
            assert info["drafted_tokens"] == 0
        else:
            assert info["mode"] == "parse"


@pytest.mark.parametrize("server", ["token", "semantic"])
def test_text_drafts(request: pytest.FixtureRequest, plain: Client, expected: dict, server: str):
    """Beside a draft model, with pages of 1 and 16 slots; texts of random tokens fit in parts."""
    client, seed = request.getfixturevalue(server), SEEDS[0]
    prompts = random_prompts(6, seed)
    limit = {"max_new_tokens": 48, "ignore_eos": True}
    texts = [answer["text"] for answer in plain.generate_all(prompts, 6, **limit)]
    with ThreadPoolExecutor(6) as pool:
        jobs = [
            pool.submit(client.generate, prompt, parse=EXACT | {"draft": text}, **limit)
            for prompt, text in zip(prompts, [*texts[:4], texts[0], ""], strict=True)
        ]
        answers = [job.result() for job in jobs]
    assert ids_of(answers) == expected[seed]
    sources = [parse_info(answer)["sources"] for answer in answers]
    assert sum(one.get("prediction", {}).get("matched_tokens", 0) for one in sources) > 20
    client.flush()
    assert client.used_slots() == 0


def test_gaps_are_those_of_each_token(plain: Client, expected: dict):
    """The GPU tests' criterion, for tokens that are equal up to rounding."""
    prompt, ids = random_prompts(6, SEEDS[0])[0], list(expected[SEEDS[0]][0])
    assert gaps(plain, prompt, ids) == [0] * len(ids)
    ids[30] = ids[30] - 1 if ids[30] > 3 else 4
    found = gaps(plain, prompt, ids)
    assert found[:30] == [0] * 30
    assert found[30] > 0.1


def test_slots_come_back(token: Client, semantic: Client):
    for client in (token, semantic):
        client.generate_all(random_prompts(8, 99), 8, max_new_tokens=40)
        client.flush()
        assert client.used_slots() == 0
