"""The target's EAGLE-3 head as a source of drafts: the demo pair's target and its trained head,
without a draft model and beside one, against the plain target and stock EAGLE3."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import partial
from typing import Any

import pytest

from sglang_parse.client.demo_pair import DEMO_PAIR, load_problems
from sglang_parse.client.servers import awake
from support.bodies import ask_all, changed, tails
from support.client import (
    EXACT,
    Client,
    assert_adds_up,
    assert_same,
    flat,
    ids_of,
    parse_info,
)
from support.demo_pair import DEMO, rendered
from support.random_adapter import two_adapters
from support.servers import (
    AHEAD,
    ALWAYS,
    OVERLAP,
    PARSE,
    SEED,
    Start,
    plugin,
    served,
    two_ranks_environment,
)

HEAD = str(DEMO_PAIR / "eagle3")
STEPS = ("--speculative-num-steps", "3")
ALONE = ("--model-path", str(DEMO_PAIR / "target"), *PARSE, "--parse-eagle3-path", HEAD, *STEPS)
LIMIT = {"max_new_tokens": 110}
WHOLE = {"max_new_tokens": 220}
"""Answers end by themselves: of one that is cut off stock SGLang counts another pass."""
OFF = {"enabled": False}
LOGPROBS = {"return_logprob": True, "top_logprobs_num": 2}
GRAMMAR = {"regex": "([a-l]: [0-9]{2} [+-] [0-9]{2} = [0-9]{2}\n){3,5}"}
MORE = pytest.mark.nightly("tests/e2e/test_eagle3_drafts.py::test_exact_drafts")


@pytest.fixture(scope="module")
def alone(start_server: Start) -> Iterator[Client]:
    """No draft model: the head drafts for the likelihood; overlap, as on a GPU."""
    yield from served(start_server, "eagle3-drafts", *ALONE, *ALWAYS, *OVERLAP, *SEED, **AHEAD)


@pytest.fixture(scope="module")
def stock(start_server: Start) -> Iterator[Client]:
    """Stock EAGLE3 with the same head: chains of three tokens."""
    yield from served(
        start_server,
        "eagle3-chain",
        *("--model-path", str(DEMO_PAIR / "target"), "--speculative-algorithm", "EAGLE3"),
        *("--speculative-draft-model-path", HEAD, *STEPS, "--speculative-eagle-topk", "1"),
        *("--speculative-num-draft-tokens", "4", *SEED),
    )


@pytest.fixture(scope="module")
def tasks() -> list[tuple[str, Callable[[str], bool]]]:
    """Held-out problems as prompts, and what tells whether an answer is right."""
    module = load_problems()
    problems = module.held_out_problems(24, seed=1)
    checks = [partial(module.is_answer_right, problem) for problem in problems]
    return [*zip(rendered(DEMO_PAIR / "target", problems), checks, strict=True)]


@pytest.fixture(scope="module")
def prompts(tasks: list) -> list[str]:
    return [prompt for prompt, _ in tasks[:8]]


def _head(answer: dict[str, Any]) -> dict[str, Any]:
    """What the head's drafts brought to an answer."""
    return parse_info(answer)["sources"]["eagle3"]


def _per_pass(answers: Sequence[dict[str, Any]]) -> float:
    """Output tokens per verify pass, the target's own included."""
    heads = [*map(_head, answers)]
    brought = sum(head["accepted_tokens"] + head["matched_tokens"] for head in heads)
    return 1 + brought / sum(head["rounds"] for head in heads)


def test_exact_drafts(alone: Client, wordings_plain: Client, prompts: list):
    """Above threshold 1 the drafts are stock EAGLE3's chain; lower ones accept more of them, and
    the head goes on from what was accepted."""
    expected = wordings_plain.generate_all(prompts, 8, **LIMIT)
    answers = alone.generate_all(prompts, 8, parse=EXACT, **LIMIT)
    for answer, wanted in zip(answers, expected, strict=True):
        assert_same(answer, wanted)
        info = parse_info(answer)
        assert ([*info["sources"]], info["skipped_drafts"]) == (["eagle3"], 0)
        assert info["draft_ms"] > 0 < _head(answer)["verify_ms"]
    assert _per_pass(answers) > 2.5
    judged = alone.generate_all(prompts, 8, parse={"threshold": 0.0, "strict": []}, **LIMIT)
    list(map(assert_adds_up, judged))
    assert _per_pass(judged) > _per_pass(answers)
    assert all(_head(answer)["accepted_tokens"] > 0 for answer in judged)
    alone.assert_nothing_lost()


@MORE
def test_as_many_passes_as_stock_eagle3(
    alone: Client, stock: Client, wordings_plain: Client, tasks: list
):
    prompts = [prompt for prompt, _ in tasks[:12]]
    answers = alone.generate_all(prompts, 8, parse=EXACT, **WHOLE)
    theirs = stock.generate_all(prompts, 8, **WHOLE)
    wanted = ids_of(wordings_plain.generate_all(prompts, 8, **WHOLE))
    assert ids_of(answers) == ids_of(theirs) == wanted
    passes = [_head(answer)["rounds"] for answer in answers]
    assert passes == [answer["meta_info"]["spec_verify_ct"] for answer in theirs]


@MORE
def test_what_the_likelihood_accepts_is_right(alone: Client, tasks: list):
    answers = alone.generate_all([prompt for prompt, _ in tasks], 8, max_new_tokens=400)
    texts = [answer["text"].replace("<|im_end|>", "") for answer in answers]
    right = sum(is_right(text) for (_, is_right), text in zip(tasks, texts, strict=True))
    assert right >= 0.9 * len(tasks)


@MORE
@pytest.mark.parametrize(
    "wish",
    [
        {"top": LOGPROBS},
        GRAMMAR,
        {"frequency_penalty": 0.4},
        {"min_new_tokens": 90},
        {"temperature": 3.0, "top_k": 30, "sampling_seed": 5},
        {"stop": ["="]},
        {"max_new_tokens": 3},
    ],
    ids=lambda wish: next(iter(wish)),
)
@pytest.mark.parametrize("parse", [EXACT, OFF], ids=["exact", "off"])
def test_all_kinds_of_requests(
    alone: Client, wordings_plain: Client, prompts: list, wish: dict, parse: dict
):
    """Requests that switch PARSE off decode with the head, too."""
    ours = alone.generate_all(prompts[:4], 4, parse=parse, **LIMIT | wish)
    theirs = wordings_plain.generate_all(prompts[:4], 4, **LIMIT | wish)
    for answer, wanted in zip(ours, theirs, strict=True):
        assert_same(answer, wanted)
        info = parse_info(answer)
        assert info["sources"]["eagle3"]["rounds"] > 0
        assert info["mode"] == ("parse" if parse is EXACT else "plain")
        if "top" in wish:
            for key in ("output_token_logprobs", "output_top_logprobs"):
                found, logs = (flat(a["meta_info"][key]) for a in (answer, wanted))
                assert found == pytest.approx(logs, abs=1e-4)


@MORE
def test_the_head_goes_on_where_a_text_is_wrong(
    alone: Client, wordings_plain: Client, prompts: list
):
    """And after a hit of the prefix cache, which holds the head's KV."""
    right = wordings_plain.generate(prompts[0], **LIMIT)
    alone.flush()
    for length in (len(right["text"]) // 2, 24):
        text = right["text"][:length] + "and so on, as ever. " * 4
        answer = alone.generate(prompts[0], parse={"draft": text, **EXACT}, **LIMIT)
        assert_same(answer, right)
        sources = parse_info(answer)["sources"]
        assert sources["prediction"]["rounds"] > 0 < sources["eagle3"]["rounds"]
    assert answer["meta_info"]["cached_tokens"] > 0
    assert _per_pass([answer]) > 2


def tail_lens(answers: Sequence[dict[str, Any]]) -> list[int]:
    """Output tokens of each text's tail behind a proposal, of traced answers."""
    records = tails(answers)
    for one in records:
        assert (one["source"], one["tail_source"]) == ("eagle3", "prediction")
        assert 0 < one["tail_at"] <= 3 < 3 + 32 >= len(one["draft_token_ids"])
    return [
        max(0, one["accepted_len"] + len(one["bonus_token_ids"]) - 1 - one["tail_at"])
        for one in records
    ]


def test_a_text_goes_on_where_a_proposal_ends(alone: Client, wordings_plain: Client, prompts: list):
    """Of the answer with other numbers in every second line; each source counts its own tokens, and
    above threshold 1 the answer is the plain target's. Below it the texts are judged as the head's
    tokens are."""
    expected = wordings_plain.generate_all(prompts, 8, **LIMIT)
    texts = [changed(one["text"]) for one in expected]
    for threshold in (1.5, 0.0):
        options = {"threshold": threshold, "trace": True, "strict": []}
        requests = [
            {"prompt": ask, "parse": options | {"draft": text}}
            for ask, text in zip(prompts, texts, strict=True)
        ]
        answers = ask_all(alone, requests, 8, **LIMIT)
        if threshold > 1:
            assert ids_of(answers) == ids_of(expected)
        list(map(assert_adds_up, answers))
        assert sum(tail_lens(answers)) > 4
        for info in map(parse_info, answers):
            for figure in ("drafted_tokens", "accepted_tokens", "matched_tokens", "rounds"):
                assert sum(own[figure] for own in info["sources"].values()) == info[figure]
    alone.assert_nothing_lost()


@MORE
@pytest.mark.parametrize("place", ["head-draft", "head-extend"])
def test_a_failing_head_ends_its_requests(
    alone: Client, wordings_plain: Client, prompts: list, place: str
):
    with alone.probe.fault(place, "raise", skip=3, times=1):
        response = alone.send(prompts[1], **LIMIT)
    assert response.status_code == 500
    assert "the EAGLE-3 head failed" in response.text
    wanted = wordings_plain.generate(prompts[1], **LIMIT)
    assert_same(alone.generate(prompts[1], parse=EXACT, **LIMIT), wanted)
    alone.assert_nothing_lost()


@MORE
def test_two_ranks_and_adapters(
    start_server: Start,
    wordings_plain: Client,
    prompts: list,
    tmp_path_factory: pytest.TempPathFactory,
):
    """Rank 1's logits are noise, so only rank 0's proposals and choices may count. The head does
    not know what an adapter makes of the target: such requests do without it, in the same batch."""
    folder = tmp_path_factory.mktemp("head-drafts-ranks")
    adapters = two_adapters(DEMO_PAIR / "target", folder / "lora")
    flags = (*ALONE, *ALWAYS, *OVERLAP, *SEED, "--tp-size", "2", *adapters)
    with plugin("rank_noise", RANK_NOISE_DIR=str(folder)), two_ranks_environment():
        server = start_server("eagle3-drafts-ranks", *flags)
    with awake(server):
        client = Client.of(server)
        with ThreadPoolExecutor(8) as pool:
            jobs = [
                pool.submit(client.generate, prompt, top=top, parse=EXACT, **LIMIT)
                for prompt, top in zip(prompts, [{}, {"lora_path": "loud"}] * 4, strict=True)
            ]
            answers = [job.result() for job in jobs]
        client.assert_nothing_lost()
    server.stop()
    assert ids_of(answers[::2]) == ids_of(wordings_plain.generate_all(prompts[::2], 4, **LIMIT))
    assert _per_pass(answers[::2]) > 2.5
    for answer in answers[1::2]:
        info = parse_info(answer)
        assert info["proposer"] == "none"
        assert "eagle3" not in info["sources"]


# -- beside a draft model ---------------------------------------------------------------


@pytest.fixture(scope="module")
def beside(start_server: Start) -> Iterator[Client]:
    """In token mode, adaptive, beside a draft model: the faster of the two drafts."""
    flags = (
        "--speculative-draft-model-path",
        str(DEMO_PAIR / "draft"),
        "--parse-verification",
        "token",
    )
    yield from served(start_server, "eagle3-beside", *ALONE, *flags, "--speculative-num-steps", "5")


@MORE
def test_beside_a_draft_model(beside: Client, wordings_plain: Client, tasks: list):
    prompts = [prompt for prompt, _ in tasks[:16]]
    wanted = wordings_plain.generate_all(prompts, 8, **LIMIT)
    with ThreadPoolExecutor(8) as pool:
        jobs = zip(prompts, [{}, {"drafting": "auto"}] * 8, strict=True)
        answers = list(pool.map(lambda j: beside.generate(j[0], parse=j[1], **LIMIT), jobs))
    for answer, right in zip(answers, wanted, strict=True):
        assert_same(answer, right)
    used = [{*parse_info(answer)["sources"]} for answer in answers]
    assert set.union(*used) == {"model", "eagle3"}
    beside.assert_nothing_lost()


@MORE
def test_another_pairs_head(start_server: Start, demo_plain: Client, problems: list):
    """The question pair's target and head: plain's answers in stock EAGLE3's passes."""
    target, head = ("--model-path", str(DEMO / "target")), str(DEMO / "eagle3")
    prompts = [problem.prompt for problem in problems[:8]]
    wanted = ids_of(demo_plain.generate_all(prompts, 8, **WHOLE))
    flags = ("--parse-eagle3-path", head, "--parse-verification", "token", *ALWAYS, *STEPS)
    for client in served(start_server, "eagle3-other", *target, *PARSE, *flags, *SEED):
        answers = client.generate_all(prompts, 8, **WHOLE)
        client.assert_nothing_lost()
    chain = ("--speculative-algorithm", "EAGLE3", "--speculative-draft-model-path", head)
    steps = (*STEPS, "--speculative-eagle-topk", "1")
    more = ("--speculative-num-draft-tokens", "4", *SEED)
    for client in served(start_server, "eagle3-other-chain", *target, *chain, *steps, *more):
        theirs = client.generate_all(prompts, 8, **WHOLE)
    assert ids_of(answers) == ids_of(theirs) == wanted
    passes = [_head(answer)["rounds"] for answer in answers]
    assert passes == [answer["meta_info"]["spec_verify_ct"] for answer in theirs]
    assert _per_pass(answers) > 2
