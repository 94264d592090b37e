"""The overlap schedule: SGLang processes a result while the next iteration is under way.

Plain steps and bursts are launched before the last one's tokens have been read; everything else
reads first.
The random pair: cuts fall anywhere, so all phases occur. ``plugins/probe`` counts what came when.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.client import EXACT, Client, ids_of, parse_info, random_prompts

PROMPTS = random_prompts(6, seed=41)
LONG = {"max_new_tokens": 72, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected(plain: Client) -> list[list[int]]:
    return ids_of(plain.generate_all(PROMPTS, 6, **LONG))


def counts(client: Client) -> dict[str, int]:
    return client.look()["overlap"]


@pytest.mark.parametrize("concurrency", [1, 6])
def test_exact_above_one(overlap: Client, expected: list, concurrency: int):
    before = counts(overlap)
    answers = overlap.generate_all(PROMPTS, concurrency, parse=EXACT, **LONG)
    assert ids_of(answers) == expected
    assert all(parse_info(answer)["rounds"] > 3 for answer in answers)
    grown = {name: count - before[name] for name, count in counts(overlap).items()}
    # A result waits for the next launch, but for the last one of a busy time.
    assert grown["processed_late"] >= grown["launched"] - 2 * len(PROMPTS)
    overlap.assert_nothing_lost()


@pytest.mark.parametrize("concurrency", [1, 6])
def test_plain_steps_are_launched_unread(overlap: Client, expected: list, concurrency: int):
    before = counts(overlap)
    answers = overlap.generate_all(PROMPTS, concurrency, parse={"enabled": False}, **LONG)
    assert ids_of(answers) == expected
    grown = {name: count - before[name] for name, count in counts(overlap).items()}
    assert grown["allow_async_decode"] > 0.8 * (grown["launched"] - len(PROMPTS))


@pytest.mark.parametrize("concurrency", [1, 6])
def test_drafts_verdicts_and_cuts_are_those_without(
    overlap: Client, semantic: Client, concurrency: int
):
    """Drafts and the target's continuations end where they do, though the next burst or step is
    under way."""
    before = counts(overlap)
    judged = {"threshold": 0.3, "trace": True}
    ours, theirs = (
        server.generate_all(PROMPTS, concurrency, parse=judged, **LONG)
        for server in (overlap, semantic)
    )
    assert ids_of(ours) == ids_of(theirs)
    for left, right in zip(map(parse_info, ours), map(parse_info, theirs), strict=True):
        assert left["accepted_tokens"] == right["accepted_tokens"] > 0
        assert left["accepted_tokens"] + left["target_tokens"] == LONG["max_new_tokens"]
        for one, other in zip(left["trace"], right["trace"], strict=True):
            assert one["output_start"] == other["output_start"]
            assert one["draft_token_ids"] == other["draft_token_ids"]
            assert one["verdicts"] == pytest.approx(other["verdicts"], abs=1e-4)
            assert one["accepted_len"] == other["accepted_len"]
    assert counts(overlap)["bursts_unread"] > before["bursts_unread"]


def test_all_phases_beside_each_other(overlap: Client, expected: list):
    """Drafters, plain steps and prefills in one batch."""
    kinds = [EXACT, {"enabled": False}, {"threshold": 0.3}]
    with ThreadPoolExecutor(18) as pool:
        jobs = [
            pool.submit(overlap.generate, prompt, parse=kind, **LONG)
            for prompt in PROMPTS
            for kind in kinds
        ]
        answers = [job.result() for job in jobs]
    assert ids_of(answers[0::3]) == ids_of(answers[1::3]) == expected
    alone = overlap.generate_all(PROMPTS, 1, parse=kinds[2], **LONG)
    assert ids_of(answers[2::3]) == ids_of(alone)
    overlap.assert_nothing_lost()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5])
def test_short_answers_are_whole(overlap: Client, expected: list, num_tokens: int):
    """While a draft is written nothing comes out: no answer may be taken for over by then."""
    short = {"max_new_tokens": num_tokens, "ignore_eos": True}
    for parse in (EXACT, {"enabled": False}):
        answers = overlap.generate_all(PROMPTS, 6, parse=parse, **short)
        assert ids_of(answers) == [ids[:num_tokens] for ids in expected]


@pytest.mark.parametrize("parse", [EXACT, {"enabled": False}])
def test_stops_end_an_answer_where_they_stand(overlap: Client, plain: Client, parse: dict):
    """At a stop token the worker ends it; a stop string is seen when the next step is launched."""
    for prompt in PROMPTS[:3]:
        whole = plain.generate(prompt, **LONG)
        text = whole["text"]
        for stops in ({"stop_token_ids": [whole["output_ids"][40]]}, {"stop": text[90:94]}):
            stopped = plain.generate(prompt, **LONG | stops)
            answer = overlap.generate(prompt, parse=parse, **LONG | stops)
            assert answer["output_ids"] == stopped["output_ids"]
            assert answer["text"] == stopped["text"]
            reason = answer["meta_info"]["finish_reason"]
            assert reason == stopped["meta_info"]["finish_reason"]
    overlap.assert_nothing_lost()


@pytest.mark.parametrize(
    "wish",
    [
        {"frequency_penalty": 0.7},
        {"repetition_penalty": 1.3},
        {"min_new_tokens": 20},
        {"regex": "[a-z ]{20,40}"},
    ],
    ids=lambda wish: next(iter(wish)),
)
def test_what_depends_on_the_last_token_sees_it(overlap: Client, plain: Client, wish: dict):
    """The plain server runs without overlap; SGLang's own penalties are a step late with it."""
    sampling = {"max_new_tokens": 40, **wish}
    theirs = ids_of(plain.generate_all(PROMPTS[:3], 3, **sampling))
    beside = overlap.generate_all(PROMPTS[:3], 3, **sampling)
    assert ids_of(beside) == theirs
    assert {parse_info(answer)["mode"] for answer in beside} == {"plain"}


def test_requests_end_between_a_plan_and_its_launch(overlap: Client, plain: Client):
    """There SGLang processes a result while a grammar is in the batch. Stop strings end a request
    without the worker's knowing."""
    grammar = {"regex": "[a-z ]{300,400}", "max_new_tokens": 150}
    stopping = []
    for prompt in PROMPTS:
        text = plain.generate(prompt, **LONG)["text"]
        start = len(text) // 3
        stopping.append({**LONG, "stop": text[start : start + 3]})
    with ThreadPoolExecutor(8) as pool:
        longest = pool.submit(overlap.generate, PROMPTS[0], **grammar)
        jobs = [
            pool.submit(overlap.generate, prompt, parse=parse, **sampling)
            for prompt, sampling in zip(PROMPTS, stopping, strict=True)
            for parse in (EXACT, {"enabled": False})
        ]
        answers = [job.result() for job in jobs]
    for i, (prompt, sampling) in enumerate(zip(PROMPTS, stopping, strict=True)):
        expected = plain.generate(prompt, **sampling)["output_ids"]
        assert ids_of(answers[2 * i : 2 * i + 2]) == [expected, expected]
    assert longest.result()["output_ids"] == plain.generate(PROMPTS[0], **grammar)["output_ids"]
    overlap.assert_nothing_lost()


def test_log_probabilities_are_those_of_the_tokens(overlap: Client, plain: Client):
    top = {"return_logprob": True, "top_logprobs_num": 2}
    theirs, ours = (server.generate(PROMPTS[0], top=top, **LONG) for server in (plain, overlap))
    key = "output_token_logprobs"
    for left, right in zip(ours["meta_info"][key], theirs["meta_info"][key], strict=True):
        assert left[1] == right[1]
        assert left[0] == pytest.approx(right[0], abs=1e-4)


def test_the_next_turn_drafts_from_what_the_last_one_left(overlap: Client):
    """What the draft model has read is marked, while another iteration may be under way."""
    first = overlap.generate_all(PROMPTS, 6, parse={"threshold": 0.3}, **LONG)
    turns = [prompt + ids for prompt, ids in zip(PROMPTS, ids_of(first), strict=True)]
    look = overlap.look()["tree"]
    drafted = sum(sum(path["marked"]) >= min(map(len, PROMPTS)) for path in look)
    assert drafted >= len(PROMPTS)
    for path in look:
        # A tree keeps who came first: behind the slots of a request that never drafted there may
        # be those of one that did.
        for target, draft, is_marked in zip(*path["written"], path["marked"], strict=True):
            assert draft == target or not is_marked, "marked, but the draft model read another"
    again = overlap.generate_all(turns, 6, parse={"threshold": 0.3}, **LONG)
    assert all(answer["meta_info"]["cached_tokens"] > 0 for answer in again)
