"""PARSE with an EAGLE-3 head for plain decode steps: the demo pair and
its trained head against the plain demo target, in every phase, and a pool too small for the load.
"""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from functools import partial
from itertools import pairwise
from pathlib import Path

import pytest

from sglang_parse.client.servers import awake
from support.bodies import abort_while
from support.client import (
    EXACT,
    Client,
    assert_adds_up,
    assert_same,
    by_head,
    chunks_of,
    ids_of,
    parse_info,
)
from support.demo_pair import DEMO, disturbed_draft
from support.servers import ALWAYS, QUESTION, SEED, Start, parse_flags, served

HEAD_PATH = ("--parse-eagle3-path", str(DEMO / "eagle3"))
NORMAL, OFF = {}, {"enabled": False}
LIMIT = {"max_new_tokens": 110}
MORE = pytest.mark.nightly("tests/e2e/test_eagle3_continuation.py::test_exact_above_one")
one_or_all = pytest.mark.parametrize("concurrency", [8, pytest.param(1, marks=MORE)])
TARGET, DRAFT, HEAD = range(3)
TOLERANCE = 5e-2
"""Of fingerprints that range over 150 and more. In fp32 some tokens are delicate: after one of
these answers' tokens the target's are 0.003 off its fp64 in plain transformers, and 0.006 to 0.021
off one another in prefills of other chunks. All others, and the draft's and the head's, are within
0.0003."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """A draft with an error in every third line."""
    return DEMO / "target", disturbed_draft(tmp_path_factory.mktemp("disturbed"))


@pytest.fixture(scope="module")
def eagle(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    """The target ends rejected lines with its head, whether that pays or not."""
    flags = parse_flags(pair, *QUESTION, *HEAD_PATH, *SEED, *ALWAYS)
    yield from served(start_server, "demo-eagle3", *flags)


@pytest.fixture(scope="module")
def tight(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    """Token mode; the head decodes requests that are switched off. Few KV slots."""
    with pytest.MonkeyPatch.context() as environ:
        # Admits many more requests than fit into the pool.
        environ.setenv("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "8")
        server = start_server(
            "tight-eagle3",
            *parse_flags(pair, "--parse-verification", "token"),
            *(*HEAD_PATH, "--parse-draft-tokens", "24", "--parse-draft-chunk", "6"),
            *("--max-total-tokens", "720", "--page-size", "4", "--speculative-num-steps", "2"),
        )
    with awake(server):
        yield Client.of(server)
    server.stop()


@pytest.fixture(scope="module")
def choosing(start_server: Start) -> Iterator[Client]:
    """The demo pair with adaptive drafting: verify passes yield nearly all of an answer."""
    pair = (DEMO / "target", DEMO / "draft")
    flags = parse_flags(pair, *QUESTION, *HEAD_PATH, *SEED)
    for client in served(start_server, "choosing-eagle3", *flags):
        yield replace(client, options={})


@pytest.fixture(scope="module")
def prompts(problems: list) -> list[str]:
    return [problem.prompt for problem in problems[:8]]


@pytest.fixture(scope="module")
def expected(demo_plain: Client, prompts: list[str]) -> list[dict]:
    return demo_plain.generate_all(prompts, 8, **LIMIT)


def _accept_length(answers: list[dict]) -> float:
    """Returns tokens per target forward with the head."""
    rounds, tokens = by_head([parse_info(answer) for answer in answers])
    return tokens / rounds


def _with_head(answers: list[dict]) -> int:
    """Returns the number of requests that the head ran for."""
    return [parse_info(answer)["proposer"] for answer in answers].count("eagle3")


@one_or_all
def test_exact_above_one(eagle: Client, prompts: list, expected: list, concurrency: int):
    """No draft is accepted: the output is matched and bonus tokens, and decode steps with the
    head."""
    count = 2 if concurrency == 1 else 8
    answers = eagle.generate_all(prompts[:count], concurrency, parse=EXACT, **LIMIT)
    assert ids_of(answers) == ids_of(expected[:count])
    assert _accept_length(answers) > 2
    for answer in answers:
        info = parse_info(answer)
        assert (info["mode"], info["proposer"]) == ("parse", "eagle3")
        assert info["accepted_tokens"] == 0
        assert 0 < by_head([info])[1] < info["target_tokens"]
        assert info["sources"]["model"]["matched_tokens"] > 0
        assert_adds_up(answer)


@one_or_all
def test_switched_off_requests(eagle: Client, prompts: list, expected: list, concurrency: int):
    count = 2 if concurrency == 1 else 8
    answers = eagle.generate_all(prompts[:count], concurrency, parse=OFF, **LIMIT)
    assert ids_of(answers) == ids_of(expected[:count])
    assert _accept_length(answers) > 2.5
    infos = [parse_info(answer) for answer in answers]
    assert {(info["mode"], info["reason"]) for info in infos} == {("plain", "switched off")}
    assert {tuple(info["sources"]) for info in infos} == {("eagle3",)}
    assert {info["draft_forwards"] for info in infos} == {0}
    for answer, info in zip(answers, infos, strict=True):
        assert_adds_up(answer)
        spent_ms = sum(info[f"{stage}_ms"] for stage in ("prefill", "draft", "verify", "decode"))
        assert 0 < spent_ms < answer["meta_info"]["e2e_latency"] * 1e3


@MORE
def test_drafts_and_head_together(eagle: Client, problems: list):
    """The head accelerates the decode steps behind rejected drafts."""
    problems = problems[:24]
    answers = eagle.generate_all([problem.prompt for problem in problems], 8, max_new_tokens=220)
    right = sum(p.is_right(a["text"]) for p, a in zip(problems, answers, strict=True))
    assert right >= 0.9 * len(problems)
    infos = [parse_info(answer) for answer in answers]
    drafted = sum(info["accepted_tokens"] + info["matched_tokens"] for info in infos)
    assert drafted > 0.05 * sum(len(ids) for ids in ids_of(answers))
    assert _accept_length(answers) > 2
    list(map(assert_adds_up, answers))


LOGPROBS = {"top": {"return_logprob": True, "top_logprobs_num": 2}}
SPECIAL = {
    "sampling mask": {"top": {"return_sampling_mask": True}},
}
ADJUSTED = (
    {"frequency_penalty": 0.4},
    {"logit_bias": {"17": 2.0}},
    {"min_new_tokens": 90},
)


@MORE
def test_all_kinds_of_requests_share_a_batch(
    eagle: Client, demo_plain: Client, prompts: list, expected: list
):
    """Requests that the head does not support decode token by token in the same batch."""
    options = ([OFF, EXACT, NORMAL] * 3)[: len(prompts)]
    seeded = {"temperature": 0.9, "top_k": 9, "top_p": 0.9}
    with ThreadPoolExecutor(32) as pool:
        wishes = {
            name: pool.submit(eagle.generate, prompts[0], **LIMIT, **wish)
            for name, wish in SPECIAL.items()
        }
        # One unsupported option decides, whatever the others are.
        both = pool.submit(
            eagle.generate, prompts[0], parse=OFF, **LIMIT, **SPECIAL["sampling mask"]
        )
        jobs = [
            pool.submit(eagle.generate, prompt, parse=parse, **LIMIT)
            for prompt, parse in zip(prompts, options, strict=False)
        ]
        asked = [
            pool.submit(eagle.generate, prompts[0], parse=parse, **LIMIT, **LOGPROBS)
            for parse in (OFF, EXACT)
        ]
        adjusted = [
            pool.submit(eagle.generate, prompts[0], parse=parse, **LIMIT, **wish)
            for wish in ADJUSTED
            for parse in (OFF, EXACT)
        ]
        sampled = pool.submit(eagle.generate, prompts[1], parse=OFF, **LIMIT, **seeded)
    for (job, parse), answer in zip(zip(jobs, options, strict=True), expected, strict=False):
        if parse is not NORMAL:
            assert_same(job.result(), answer)
        assert_adds_up(job.result())
    for name, wish in SPECIAL.items():
        ours, theirs = wishes[name].result(), demo_plain.generate(prompts[0], **LIMIT, **wish)
        assert_same(ours, theirs)
        info = parse_info(ours)
        assert (info["reason"], info["proposer"]) == (name, "none")
        assert by_head([info]) == (0, 0)
    plainly = partial(demo_plain.generate, prompts[0], **LIMIT)
    with ThreadPoolExecutor(8) as pool:
        theirs, *alone = pool.map(lambda wish: plainly(**wish), (LOGPROBS, *ADJUSTED))
    for ours in (job.result() for job in asked):
        assert_same(ours, theirs)
        assert by_head([parse_info(ours)])[0] > 0
        for key in ("output_token_logprobs", "output_top_logprobs"):
            ours_log, their_log = (_numbers(a["meta_info"][key]) for a in (ours, theirs))
            assert ours_log == pytest.approx(their_log, abs=1e-4)
    for number, theirs in enumerate(alone):
        for ours in (job.result() for job in adjusted[2 * number : 2 * number + 2]):
            assert_same(ours, theirs)
            assert by_head([parse_info(ours)])[0] > 0
    assert both.result()["output_ids"] == wishes["sampling mask"].result()["output_ids"]
    assert parse_info(both.result())["proposer"] == "none"
    assert by_head([parse_info(sampled.result())])[0] > 0
    eagle.assert_nothing_lost()


@pytest.mark.parametrize("parse", [EXACT, pytest.param(OFF, marks=MORE)])
def test_the_head_proposes_under_grammars(
    eagle: Client, demo_plain: Client, prompts: list, parse: dict
):
    """What it proposes need not be valid; what the target chooses is."""
    grammar = {"regex": "([a-l]: [0-9]{2} [+-] [0-9]{2} = [0-9]{2}\n){3,5}", **LIMIT}
    ours = eagle.generate_all(prompts[:4], 4, parse=parse, **grammar)
    for answer, expected in zip(
        ours, demo_plain.generate_all(prompts[:4], 4, **grammar), strict=True
    ):
        assert_same(answer, expected)
        assert parse_info(answer)["proposer"] == "eagle3"
    assert _accept_length(ours) > 1.5


def _numbers(nested: object) -> list[float]:
    if isinstance(nested, (list, tuple)):
        return [number for item in nested for number in _numbers(item)]
    return [float(nested)] if isinstance(nested, (int, float)) else []


def test_seeded_samples_equal_the_plain_servers(
    eagle: Client, demo_plain: Client, prompts: list, expected: list
):
    """At each position, the sampled token is the one the target alone draws."""
    params = {"temperature": 3.0, "top_k": 30, "sampling_seed": 5, "max_new_tokens": 40}
    ours = eagle.generate_all(prompts, 8, parse=OFF, **params)
    theirs = demo_plain.generate_all(prompts, 8, **params)
    assert ids_of(ours) == ids_of(theirs)
    greedy = [ids[:40] for ids in ids_of(expected)]
    assert ids_of(ours) != greedy
    assert _accept_length(ours) > 1


@pytest.mark.parametrize(
    "parse", [pytest.param(OFF, marks=MORE, id="off"), pytest.param(EXACT, id="exact")]
)
def test_stop_conditions_are_exact(
    eagle: Client, demo_plain: Client, prompts: list, expected: list, parse: dict
):
    """Length limits, stop tokens and stop strings inside a run of the head's tokens."""
    cases = [(0, {"max_new_tokens": limit}) for limit in range(1, 9)]
    for number in (1, 2):
        ids, text = expected[number]["output_ids"], expected[number]["text"]
        cases += [(number, {**LIMIT, "stop_token_ids": [ids[place]]}) for place in (4, 11, 23)]
        cases += [(number, {**LIMIT, "stop": [text[at : at + 2]]}) for at in (9, 20, 31)]
        cases += [(number, {"max_new_tokens": len(ids) + 30, "ignore_eos": True})]
    with ThreadPoolExecutor(8) as pool:
        ours = pool.map(lambda c: eagle.generate(prompts[c[0]], parse=parse, **c[1]), cases)
        theirs = pool.map(lambda c: demo_plain.generate(prompts[c[0]], **c[1]), cases)
        for left, right in zip(ours, theirs, strict=True):
            assert_same(left, right)


def test_streaming(eagle: Client, prompts: list, expected: list):
    for parse in (OFF, EXACT):
        params = {"temperature": 0, **LIMIT, "custom_params": {"parse": parse}}
        body = {"text": prompts[3], "sampling_params": params}
        chunks = [*chunks_of(eagle, "/generate", body)]
        assert chunks[-1]["text"] == expected[3]["text"]
        texts = [chunk["text"] for chunk in chunks]
        assert all(later.startswith(sooner) for sooner, later in pairwise(texts))
        assert len(set(texts)) > 10


@MORE
def test_later_turns_reuse_the_heads_kv(eagle: Client, demo_plain: Client, prompts: list):
    """The radix cache's KV equals a prefill's, for tokens of draft, head, target or prefill."""
    limit = {"max_new_tokens": 72}
    for client in (eagle, demo_plain):
        client.flush()
    kinds = [{"parse": EXACT}, {"parse": OFF}, {"parse": NORMAL}, {"parse": OFF, **LOGPROBS}]
    jobs = list(zip(prompts, kinds, strict=False))
    with ThreadPoolExecutor(8) as pool:
        first = list(pool.map(lambda job: eagle.generate(job[0], **job[1], **limit), jobs))
        plain = list(pool.map(lambda job: demo_plain.generate(job[0], **limit), jobs))
    tree = eagle.look()["tree"]
    turns = [job[0] + answer["text"] + job[0] for job, answer in zip(jobs, plain, strict=True)]
    second = eagle.generate_all(turns, 8, parse=OFF, **limit)
    expected = demo_plain.generate_all(turns, 8, **limit)
    assert ids_of(second) == ids_of(expected)
    exact = [i for i, kind in enumerate(kinds) if kind != {"parse": NORMAL}]
    assert all(first[i]["output_ids"] == plain[i]["output_ids"] for i in exact)
    assert all(second[i]["meta_info"]["cached_tokens"] > len(jobs[i][0]) / 4 for i in exact)
    _assert_kv_of_a_prefill(eagle, tree)


def _assert_kv_of_a_prefill(client: Client, tree: list[dict]) -> None:
    client.flush()
    texts = [path["written"][TARGET] for path in tree]
    assert len(tree) == 4
    marked = [sum(path["marked"]) for path in tree]
    # Requests that never drafted share only the first words of a prompt with the others.
    assert min(marked) < 10 < sorted(marked)[len(tree) // 2]
    for path, tokens, count in zip(tree, texts, marked, strict=True):
        client.generate(tokens, max_new_tokens=4, ignore_eos=True, parse=EXACT)
        paths = client.look()["tree"]
        client.flush()
        # The head's KV of a token depends on the next one; after the last, it is another request's.
        length = len(tokens) - 1
        (again,) = (p for p in paths if p["written"][TARGET][:length] == tokens[:length])
        for model, end in ((TARGET, length), (DRAFT, min(count, length)), (HEAD, length)):
            ours, theirs = (p["fingerprints"][model][:end] for p in (path, again))
            assert ours == pytest.approx(theirs, abs=TOLERANCE)
            assert len(ours) < 10 or max(ours) - min(ours) > 2000 * TOLERANCE


def test_the_accept_length_after_a_cached_prefix(eagle: Client, prompts: list):
    """The patch head_prefixes: problems share a prefix and then differ."""
    limit = {"parse": OFF, "max_new_tokens": 12}
    eagle.flush()
    shared = eagle.generate_all(prompts[:8], 1, **limit)
    assert sum(answer["meta_info"]["cached_tokens"] > 0 for answer in shared) == 7
    for prompt, answer in zip(prompts, shared, strict=False):
        eagle.flush()
        alone = eagle.generate(prompt, **limit)
        assert alone["meta_info"]["cached_tokens"] == 0
        assert by_head([parse_info(answer)]) == by_head([parse_info(alone)])


@pytest.mark.nightly("tests/unit/test_eagle_gate.py")
def test_the_head_is_bypassed_where_it_does_not_pay(
    choosing: Client, problems: list, prompts: list, expected: list
):
    """Bypassed requests, without the head's KV, use another namespace of the radix cache."""
    limit = {"max_new_tokens": 220}
    # A new server's first answers have decode steps that measure their cost; they must fade out.
    for _ in range(6):
        warm = choosing.generate_all([problem.prompt for problem in problems[12:36]], 8, **limit)
        if not _with_head(warm):
            break
    before = choosing.look()["forwards"]
    answers = choosing.generate_all(prompts, 8, **limit)
    after = choosing.look()["forwards"]
    assert _with_head(answers) <= 1  # one in 64
    assert after["head-prefill eager"] - before["head-prefill eager"] <= _with_head(answers)
    assert sum(p.is_right(a["text"]) for p, a in zip(problems, answers, strict=False)) >= 7
    plainly = choosing.generate_all(prompts[:6], 2, parse=OFF, **limit)
    assert [ids[: LIMIT["max_new_tokens"]] for ids in ids_of(plainly)] == ids_of(expected[:6])
    assert {parse_info(answer)["proposer"] for answer in plainly} == {"eagle3"}
    assert _accept_length(plainly) > 2.5
    # They share the first words with the prompts just sent.
    cached = [answer["meta_info"]["cached_tokens"] for answer in plainly]
    assert sorted(cached)[-2] < 10
    again = choosing.generate_all(prompts[:6], 2, **limit)
    lengths = [answer["meta_info"]["prompt_tokens"] for answer in again]
    cached = [answer["meta_info"]["cached_tokens"] for answer in again]
    assert sum(count > length / 2 for count, length in zip(cached, lengths, strict=True)) >= 5
    choosing.assert_nothing_lost()


@pytest.mark.parametrize(
    "place",
    [
        *("head-draft", "head-extend"),
        *(
            pytest.param(place, marks=MORE)
            for place in ("head-prefill", "draft-chunk", "target-verify")
        ),
    ],
)
def test_abort_while(eagle: Client, prompts: list, expected: list, place: str):
    """Aborts during a forward of that kind; other requests in the batch continue."""
    cases = ((6, EXACT, 110), (4, OFF, 24), (5, EXACT, 24))
    requests = [{"prompt": prompts[i], "parse": p, "max_new_tokens": n} for i, p, n in cases]
    wanted = [expected[i]["output_ids"][:limit] for i, _, limit in cases]
    skip = 0 if place == "head-prefill" else 2
    abort_while(eagle, place, *requests, expected=wanted, seconds=0.3, skip=skip, times=4)
    eagle.assert_nothing_lost()


@pytest.mark.parametrize("place", ["head-draft", pytest.param("head-extend", marks=MORE)])
def test_a_failing_head_ends_drafting_requests_only(
    eagle: Client, prompts: list, expected: list, place: str
):
    with eagle.probe.fault(place, "raise", skip=3, times=1):
        answer = eagle.generate(prompts[7], parse=OFF, **LIMIT)
    assert_same(answer, expected[7])
    params = {"temperature": 0, **LIMIT, "custom_params": {"parse": EXACT}}
    body = {"text": prompts[7], "sampling_params": params}
    with eagle.probe.fault(place, "raise", skip=3, times=1):
        response = eagle.post("/generate", body)
    assert response.status_code == 500
    assert "the EAGLE-3 head failed" in response.text
    assert_same(eagle.generate(prompts[7], parse=EXACT, **LIMIT), expected[7])
    eagle.assert_nothing_lost()


@pytest.mark.nightly("tests/e2e/test_memory.py")
def test_a_pool_too_small(tight: Client, prompts: list, expected: list):
    """Drafting and accelerated requests are retracted and delayed, and stay exact."""
    # One HTTP request, so that all prompts arrive before the first one finishes.
    wishes = [
        {"temperature": 0, "max_new_tokens": 90, "custom_params": {"parse": parse}}
        for parse in (NORMAL, OFF, EXACT)
    ]
    body = {
        "text": [prompt for prompt in prompts for _ in wishes],
        "sampling_params": wishes * len(prompts),
    }
    answers = tight.post("/generate", body).raise_for_status().json()
    assert ids_of(answers) == [ids[:90] for ids in ids_of(expected) for _ in wishes]
    list(map(assert_adds_up, answers))
    # Not vacuous: slots were short, and some decode steps ran without the head, others with it.
    assert sum(answer["meta_info"]["num_retractions"] for answer in answers) > 0
    assert 1.5 < _accept_length(answers[1::3]) <= 3
    assert sum(parse_info(answer)["accepted_tokens"] for answer in answers[::3]) > 0
    infos = [parse_info(answer) for answer in answers[1::3]]
    _, ahead = by_head(infos)
    written = sum(info["accepted_tokens"] + info["target_tokens"] for info in infos)
    # Without the head, the target decodes only each answer's first token, and at most its last.
    assert ahead < written - 2 * len(infos)
    tight.assert_nothing_lost()
