"""The overlap schedule: SGLang processes a result while the next iteration runs.

Plain decode steps and draft chunks are launched before the host has the last one's tokens;
everything else waits for them.
The random pair: drafts are rejected anywhere, so all phases occur. ``plugins/probe`` counts events.
"""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor

import pytest

from support.client import EXACT, Client, assert_same, ids_of, parse_info, random_prompts

PROMPTS = random_prompts(6, seed=41)
LONG = {"max_new_tokens": 48, "ignore_eos": True}


@pytest.fixture(scope="module")
def expected(plain: Client) -> list[list[int]]:
    return ids_of(plain.generate_all(PROMPTS, 6, **LONG))


MORE = pytest.mark.nightly("tests/e2e/test_overlap.py::test_exact_above_one")
one_or_all = pytest.mark.parametrize(
    ("concurrency", "prompts"), [(6, PROMPTS), pytest.param(1, PROMPTS[:2], marks=MORE)]
)


def counts(client: Client) -> dict[str, int]:
    return client.look()["overlap"]


@one_or_all
def test_exact_above_one(overlap: Client, expected: list, concurrency: int, prompts: list):
    before = counts(overlap)
    answers = overlap.generate_all(prompts, concurrency, parse=EXACT, **LONG)
    assert ids_of(answers) == expected[: len(prompts)]
    assert all(parse_info(answer)["rounds"] > 3 for answer in answers)
    grown = {name: count - before[name] for name, count in counts(overlap).items()}
    # A result is processed after the next launch, except the last one of a busy period.
    assert grown["processed_late"] >= grown["launched"] - 2 * len(prompts)
    overlap.assert_nothing_lost()


@pytest.mark.parametrize("concurrency", [6, pytest.param(1, marks=MORE)])
def test_text_drafts(overlap: Client, plain: Client, expected: list, concurrency: int):
    """Texts of random tokens are other tokens in parts: they fit here and there."""
    texts = [answer["text"] for answer in plain.generate_all(PROMPTS, 6, **LONG)]
    with ThreadPoolExecutor(concurrency) as pool:
        jobs = [
            pool.submit(overlap.generate, prompt, parse=EXACT | {"draft": text}, **LONG)
            for prompt, text in zip(PROMPTS, texts, strict=True)
        ]
        answers = [job.result() for job in jobs]
    assert ids_of(answers) == expected
    sources = [parse_info(answer)["sources"] for answer in answers]
    assert sum(one.get("prediction", {}).get("matched_tokens", 0) for one in sources) > 20
    overlap.assert_nothing_lost()


@one_or_all
def test_decode_steps_are_launched_before_the_last_result(
    overlap: Client, expected: list, concurrency: int, prompts: list
):
    before = counts(overlap)
    answers = overlap.generate_all(prompts, concurrency, parse={"enabled": False}, **LONG)
    assert ids_of(answers) == expected[: len(prompts)]
    grown = {name: count - before[name] for name, count in counts(overlap).items()}
    assert grown["async_decodes"] > 0.8 * (grown["launched"] - len(prompts))


@one_or_all
def test_drafts_verdicts_and_accepted_lengths_equal_those_without_overlap(
    overlap: Client, semantic: Client, concurrency: int, prompts: list
):
    """Drafts and segments end at the same tokens although the next forward is in flight."""
    options = {"threshold": 0.3, "trace": True}
    ours, theirs = (
        server.generate_all(prompts, concurrency, parse=options, **LONG)
        for server in (overlap, semantic)
    )
    assert ids_of(ours) == ids_of(theirs)
    for left, right in zip(map(parse_info, ours), map(parse_info, theirs), strict=True):
        assert left["accepted_tokens"] == right["accepted_tokens"]
        assert left["accepted_tokens"] + left["target_tokens"] == LONG["max_new_tokens"]
        for one, other in zip(left["trace"], right["trace"], strict=True):
            assert one["output_start"] == other["output_start"]
            assert one["draft_token_ids"] == other["draft_token_ids"]
            assert one["verdicts"] == pytest.approx(other["verdicts"], abs=1e-4)
            assert one["accepted_len"] == other["accepted_len"]
    accepted = [parse_info(answer)["accepted_tokens"] for answer in ours]
    assert 0 < sum(accepted) < len(accepted) * LONG["max_new_tokens"]
    assert overlap.num_async_chunks(prompts[0], parse=options, **LONG) > 0


def test_all_phases_in_one_batch(overlap: Client, expected: list):
    """Drafts, decode steps and prefills share a batch."""
    prompts, kinds = PROMPTS[:3], [EXACT, {"enabled": False}, {"threshold": 0.3}]
    with ThreadPoolExecutor(9) as pool:
        jobs = [
            pool.submit(overlap.generate, prompt, parse=kind, **LONG)
            for prompt in prompts
            for kind in kinds
        ]
        answers = [job.result() for job in jobs]
    assert ids_of(answers[0::3]) == ids_of(answers[1::3]) == expected[:3]
    alone = overlap.generate_all(prompts, 1, parse=kinds[2], **LONG)
    assert ids_of(answers[2::3]) == ids_of(alone)
    overlap.assert_nothing_lost()


@pytest.mark.parametrize("num_tokens", [1, 2, 3, 5])
def test_short_answers_are_whole(overlap: Client, expected: list, num_tokens: int):
    """A request that drafts emits nothing and must not be taken for finished."""
    short = {"max_new_tokens": num_tokens, "ignore_eos": True}
    for parse in (EXACT, {"enabled": False}):
        answers = overlap.generate_all(PROMPTS, 6, parse=parse, **short)
        assert ids_of(answers) == [ids[:num_tokens] for ids in expected]


@pytest.mark.parametrize("parse", [EXACT, {"enabled": False}])
def test_stop_conditions_are_exact(overlap: Client, plain: Client, parse: dict):
    """The worker handles stop tokens; a stop string is found after the next step is launched."""
    jobs = []
    with ThreadPoolExecutor(12) as pool:
        for prompt, whole in zip(PROMPTS, plain.generate_all(PROMPTS[:3], 3, **LONG), strict=False):
            text = whole["text"]
            for stops in ({"stop_token_ids": [whole["output_ids"][30]]}, {"stop": text[60:64]}):
                theirs = pool.submit(plain.generate, prompt, **LONG | stops)
                ours = pool.submit(overlap.generate, prompt, parse=parse, **LONG | stops)
                jobs.append((ours, theirs))
    for ours, theirs in jobs:
        assert_same(ours.result(), theirs.result())
    overlap.assert_nothing_lost()


def test_requests_end_beside_a_constrained_one(overlap: Client, plain: Client):
    """Grammars need no result processed early. The worker does not see stop strings."""
    grammar = {"regex": "[a-z ]{300,400}", "max_new_tokens": 100}
    stopping = []
    for text in (answer["text"] for answer in plain.generate_all(PROMPTS, 6, **LONG)):
        start = len(text) // 3
        stopping.append({**LONG, "stop": text[start : start + 3]})
    with ThreadPoolExecutor(8) as pool:
        longest = pool.submit(overlap.generate, PROMPTS[0], parse=EXACT, **grammar)
        jobs = [
            pool.submit(overlap.generate, prompt, parse=parse, **sampling)
            for prompt, sampling in zip(PROMPTS, stopping, strict=True)
            for parse in (EXACT, {"enabled": False})
        ]
        answers = [job.result() for job in jobs]
    with ThreadPoolExecutor(6) as pool:
        wishes = zip(PROMPTS, stopping, strict=True)
        theirs = [*pool.map(lambda wish: plain.generate(wish[0], **wish[1]), wishes)]
    for i, expected in enumerate(ids_of(theirs)):
        assert ids_of(answers[2 * i : 2 * i + 2]) == [expected, expected]
    assert longest.result()["output_ids"] == plain.generate(PROMPTS[0], **grammar)["output_ids"]
    overlap.assert_nothing_lost()


def test_log_probabilities_belong_to_their_tokens(overlap: Client, plain: Client):
    top = {"return_logprob": True, "top_logprobs_num": 2}
    both = [
        server.generate(PROMPTS[0], parse=EXACT, top=top, **LONG) for server in (plain, overlap)
    ]
    theirs, ours = both
    key = "output_token_logprobs"
    assert len(theirs["meta_info"][key]) == LONG["max_new_tokens"]
    for left, right in zip(ours["meta_info"][key], theirs["meta_info"][key], strict=True):
        assert left[1] == right[1]
        assert left[0] == pytest.approx(right[0], abs=1e-4)


def test_the_next_turn_reuses_draft_kv(overlap: Client):
    """Draft KV is marked while another iteration is in flight."""
    first = overlap.generate_all(PROMPTS, 6, parse={"threshold": 0.3}, **LONG)
    turns = [prompt + ids for prompt, ids in zip(PROMPTS, ids_of(first), strict=True)]
    look = overlap.look()["tree"]
    drafted = sum(sum(path["marked"]) >= min(map(len, PROMPTS)) for path in look)
    assert drafted >= len(PROMPTS)
    for path in look:
        # The radix tree retains the first request's slots: after those of a request that never
        # drafted, there may be slots of one that did.
        for target, draft, is_marked in zip(*path["written"], path["marked"], strict=True):
            assert draft == target or not is_marked, "marked, but the draft model read another"
    again = overlap.generate_all(turns, 6, parse={"threshold": 0.3}, **LONG)
    assert all(answer["meta_info"]["cached_tokens"] > 0 for answer in again)
