"""An EAGLE-3 head of the draft model: the same drafts as one token per forward, in fewer forwards.

The question pair's target has a head; here it drafts for the pair's smaller model with noise on its
weights, which refuses some of what it writes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from sglang_parse.client.servers import awake
from support.bodies import abort_while
from support.client import Client, draft_forwards, ids_of, parse_info, retractions
from support.demo_pair import DEMO, disturbed_draft
from support.random_pair import resize
from support.servers import (
    AHEAD,
    ALWAYS,
    OVERLAP,
    SEED,
    Start,
    parse_flags,
    plain_flags,
    plugin,
    served,
)
from support.servers import two_ranks_environment as two_ranks

HEAD = ("--parse-draft-eagle3-path", str(DEMO / "eagle3"))
TOKEN = (*SEED, "--parse-verification", "token", "--parse-draft-tokens", "24")
LIMIT = {"max_new_tokens": 96}
TRACED = {"trace": True}
MORE = pytest.mark.nightly("tests/e2e/test_draft_head.py::test_greedy_drafts_and_answers")


@pytest.fixture(scope="module")
def target(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """With 64 tokens of padding, which the draft model and its head lack."""
    return resize(disturbed_draft(tmp_path_factory.mktemp("disturbed")), 448, 0.0)


def flags(target: Path, *more: str) -> tuple[str, ...]:
    return parse_flags((target, DEMO / "target"), *TOKEN, *more)


@pytest.fixture(scope="module")
def plain_target(start_server: Start, target: Path) -> Iterator[Client]:
    yield from served(start_server, "draft-head-plain", *plain_flags(target))


@pytest.fixture(scope="module")
def head(start_server: Start, target: Path) -> Iterator[Client]:
    """As on a GPU: blocks launched back to back; pages of 16 slots."""
    more = (*HEAD, *ALWAYS, *OVERLAP, "--page-size", "16", "--parse-draft-parallel-tokens", "4")
    more += ("--parse-draft-chunk", "8")  # a draft has several
    yield from served(
        start_server, "draft-head", *flags(target, *more), "--enable-metrics", **AHEAD
    )


@pytest.fixture(scope="module")
def single(start_server: Start, target: Path) -> Iterator[Client]:
    """The same models, one token per forward."""
    yield from served(start_server, "draft-no-head", *flags(target, *ALWAYS))


@pytest.fixture(scope="module")
def prompts(problems: list) -> list[str]:
    return [problem.prompt for problem in problems[:6]]


def per_forward(answers: Sequence[dict[str, Any]]) -> float:
    infos = [*map(parse_info, answers)]
    return sum(i["drafted_tokens"] for i in infos) / sum(i["draft_forwards"] for i in infos)


def num_refused(answers: Sequence[dict[str, Any]]) -> int:
    """Draft tokens that the target refused, or that follow one."""
    infos = map(parse_info, answers)
    return sum(i["drafted_tokens"] - i["accepted_tokens"] - i["matched_tokens"] for i in infos)


def num_beyond(answers: Sequence[dict[str, Any]]) -> int:
    """Tokens behind whole drafts that the last block had proposed."""
    records = [record for answer in answers for record in parse_info(answer)["trace"]]
    return sum(max(0, len(record["bonus_token_ids"]) - 1) for record in records if whole(record))


def whole(record: dict[str, Any]) -> bool:
    return record["accepted_len"] == len(record["draft_token_ids"])


def assert_same_drafts(ours: Sequence[dict[str, Any]], theirs: Sequence[dict[str, Any]]) -> None:
    """Wherever both began one: behind candidates that were output the next one begins later, up to
    a refusal, whose place is the text's."""
    num_same = num_drafts = 0
    for answers in zip(ours, theirs, strict=True):
        drafts, wanted = (
            {one["output_start"]: one["draft_token_ids"] for one in parse_info(answer)["trace"]}
            for answer in answers
        )
        places = drafts.keys() & wanted.keys()
        assert {place: drafts[place] for place in places} == {x: wanted[x] for x in places}
        num_same, num_drafts = num_same + len(places), num_drafts + len(drafts)
    assert num_same > 0.7 * num_drafts


@pytest.mark.parametrize("concurrency", [8, pytest.param(1, marks=MORE)])
def test_greedy_drafts_and_answers(
    head: Client, single: Client, plain_target: Client, prompts: list, concurrency: int
):
    prompts = prompts[: max(2, concurrency)]
    ours, theirs = (
        server.generate_all(prompts, concurrency, parse=TRACED, **LIMIT)
        for server in (head, single)
    )
    assert_same_drafts(ours, theirs)
    assert ids_of(ours) == ids_of(plain_target.generate_all(prompts, concurrency, **LIMIT))
    assert per_forward(theirs) == 1
    assert per_forward(ours) > 1.8
    assert all(parse_info(answer)["tokens_per_draft_forward"] > 1.5 for answer in ours)
    assert num_refused(ours) > 6 * len(prompts)
    assert head.num_async_chunks(prompts[0], parse=TRACED, **LIMIT) > 0
    assert head.look()["overlap"]["async_passes"] > 0
    assert num_beyond(ours) > num_beyond(theirs) == 0
    assert "head" in draft_forwards(head)
    head.assert_nothing_lost()


def test_sampled_drafts_and_answers(head: Client, single: Client, prompts: list):
    """Noise goes by seed and position: whatever the head proposes, the draw is the same."""
    params = {"temperature": 0.8, "sampling_seed": 11, "parse": TRACED, **LIMIT}
    ours, theirs = (server.generate_all(prompts, 8, **params) for server in (head, single))
    assert_same_drafts(ours, theirs)
    assert ids_of(ours) == ids_of(theirs)
    assert per_forward(ours) > 1.2
    assert num_refused(ours) > 50


def test_sampled_and_greedy_requests_share_a_block(
    head: Client, plain_target: Client, prompts: list
):
    with ThreadPoolExecutor(8) as pool:
        jobs = [
            pool.submit(head.generate, prompt, temperature=i % 2, **LIMIT)
            for i, prompt in enumerate(prompts)
        ]
        answers = [job.result() for job in jobs]
    expected = plain_target.generate_all(prompts[::2], 4, **LIMIT)
    assert ids_of(answers[::2]) == ids_of(expected)
    assert per_forward(answers) > 1.1


def test_the_cache_holds_the_heads_kv(head: Client, prompts: list):
    """A later turn takes as many forwards with the first one's KV as with its own."""
    cached, fresh = [], []
    for prompt in prompts[:2]:
        turn = prompt + head.generate(prompt, **LIMIT)["text"][:20]  # noise comes later
        cached.append(head.generate(turn, **LIMIT))
        head.flush()
        fresh.append(head.generate(turn, **LIMIT))
    for one, other in zip(cached, fresh, strict=True):
        assert one["meta_info"]["cached_tokens"] >= 48 > other["meta_info"]["cached_tokens"]
        forwards = [parse_info(answer)["draft_forwards"] for answer in (one, other)]
        assert forwards[0] == pytest.approx(forwards[1], abs=1)
    assert ids_of(cached) == ids_of(fresh)
    assert per_forward(cached) > 1.3


@pytest.mark.parametrize("place", ["draft-chunk", "head-extend"])
def test_aborts_in_a_block(head: Client, plain_target: Client, prompts: list, place: str):
    expected = ids_of(plain_target.generate_all(prompts[:2], 2, **LIMIT))
    requests = ({"prompt": prompt, **LIMIT} for prompt in prompts[:2])
    abort_while(head, place, *requests, expected=expected, skip=4, times=4)
    head.assert_nothing_lost()


def test_a_failing_head_ends_its_requests(head: Client, plain_target: Client, prompts: list):
    with head.probe.fault("head-extend", "raise", skip=4, times=1) as fault:
        response = head.send(prompts[1], **LIMIT)
        assert fault.num_fired() == 1
    assert "the draft model failed: InjectedError" in response.text
    head.assert_nothing_lost()
    expected = plain_target.generate(prompts[1], **LIMIT)["output_ids"]
    assert head.generate(prompts[1], **LIMIT)["output_ids"] == expected


def test_nan_in_the_head_costs_speed_only(head: Client, plain_target: Client, prompts: list):
    with head.probe.fault("head-extend", "nan"):
        answer = head.generate(prompts[2], **LIMIT)
    assert answer["output_ids"] == plain_target.generate(prompts[2], **LIMIT)["output_ids"]


# -- layouts compete; few slots ---------------------------------------------------------


@pytest.fixture(scope="module")
def tight(start_server: Start, target: Path) -> Iterator[Client]:
    """Adaptive drafting and layouts, in a pool that is too small for the load."""
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION", "8")
        few = ("--max-total-tokens", "900", "--page-size", "4")
        server = start_server("draft-head-tight", *flags(target, *HEAD, *few), "--enable-metrics")
    with awake(server):
        yield Client.of(server)
    server.stop()


@MORE
def test_layouts_compete_and_requests_are_retracted(
    tight: Client, plain_target: Client, prompts: list
):
    wanted = ids_of(plain_target.generate_all(prompts, 8, **LIMIT))
    for _ in range(3):
        with retractions(tight):
            assert ids_of(tight.generate_all(prompts, 8, **LIMIT)) == wanted
    assert ids_of(tight.generate_all(prompts, 4, **LIMIT)) == wanted
    log = tight.probe.folder.with_suffix(".log").read_text()
    assert "tokens that the draft model writes per forward: up to 4 tokens, by its EAGLE-3" in log
    (line, *_) = (line for line in log.splitlines() if "PARSE: draft blocks: " in line)
    for layout in ("4 tokens per forward, proposed by the EAGLE-3 head", "one token per forward"):
        assert f"{layout}: " in line
    tight.assert_nothing_lost()


# -- as many forwards as stock EAGLE3 ----------------------------------------------------


@MORE
def test_as_many_forwards_as_stock_eagle3(start_server: Start, prompts: list):
    """Its chains of three tokens, written by the model that here drafts for itself; but a draft's
    first forward has no candidates, where stock EAGLE3's prefill proposes."""
    path, limit = str(DEMO / "target"), {"max_new_tokens": 120}
    stock = start_server(
        "stock-chain",
        *("--model-path", path, "--speculative-algorithm", "EAGLE3", *SEED),
        *("--speculative-draft-model-path", str(DEMO / "eagle3"), "--speculative-num-steps", "3"),
        *("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4"),
    )
    with awake(stock):
        theirs = Client.of(stock).generate_all(prompts, 8, **limit)
    stock.stop()
    ours = start_server(
        "draft-is-target",
        *parse_flags((DEMO / "target", DEMO / "target"), "--parse-verification", "token"),
        *(*HEAD, *ALWAYS, *SEED, "--parse-draft-parallel-tokens", "4"),
        *("--parse-draft-tokens", "128"),
    )
    with awake(ours):
        answers = Client.of(ours).generate_all(prompts, 8, **limit)
    ours.stop()
    assert ids_of(answers) == ids_of(theirs)
    for answer, other in zip(answers, theirs, strict=True):
        found, wanted = parse_info(answer)["draft_forwards"], other["meta_info"]["spec_verify_ct"]
        assert wanted <= found <= wanted + 2


# -- two ranks --------------------------------------------------------------------------


@MORE
def test_two_ranks(
    start_server: Start, target: Path, plain_target: Client, prompts: list, tmp_path_factory: Any
):
    """Rank 1's logits are noise, so only rank 0's proposals and choices may count."""
    folder = tmp_path_factory.mktemp("head-ranks")
    with plugin("rank_noise", RANK_NOISE_DIR=str(folder)), two_ranks():
        server = start_server("draft-head-ranks", *flags(target, *HEAD, *ALWAYS, "--tp-size", "2"))
    with awake(server):
        client = Client.of(server)
        answers = client.generate_all(prompts[:4], 4, **LIMIT)
        client.assert_nothing_lost()
    server.stop()
    assert ids_of(answers) == ids_of(plain_target.generate_all(prompts[:4], 4, **LIMIT))
    assert per_forward(answers) > 1.5
