"""A checkpoint's own MTP layer as a source of drafts, against plain decoding and stock NEXTN."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from functools import cache
from pathlib import Path

import pytest

from sglang_parse.client.demo_pair import DEMO_PAIR, load_problems
from support.bodies import TRACE, Requests, abort_while, ask_all, changed, tails
from support.client import (
    EXACT,
    Client,
    assert_adds_up,
    assert_same,
    ids_of,
    parse_info,
    random_prompts,
    retractions,
)
from support.demo_pair import rendered
from support.mtp import HYBRIDS, MTP, LayerReference
from support.servers import (
    ALWAYS,
    OVERLAP,
    PARSE,
    SEED,
    SMALL_CHUNKS,
    Start,
    plugin,
    served,
    two_ranks_environment,
)

LIMIT = {"max_new_tokens": 48, "ignore_eos": True}
STEPS = ("--speculative-num-steps", "3")
STOCK = ("--speculative-algorithm", "EAGLE", *STEPS)
STOCK += ("--speculative-eagle-topk", "1", "--speculative-num-draft-tokens", "4")
OWN = ("--parse-mtp", "own", *STEPS, *ALWAYS)
STAND_IN = "tests/e2e/test_mtp.py::test_exact_drafts"
MORE, MOST = pytest.mark.nightly(STAND_IN), pytest.mark.weekly(STAND_IN)
FAST, DENSE = "glm-4.5", "qwen3.5"
SECOND = {DENSE, "deepseek-v3"}
CASES = {name: pytest.param(name, marks=MORE if name in SECOND else MOST) for name in MTP}
CASES[FAST] = pytest.param(FAST)
WITH_STOCK, WITH_STATES = (
    [case for name, case in CASES.items() if (name in HYBRIDS) is has_states]
    for has_states in (False, True)
)
CAPTURED = [case for name, case in CASES.items() if name not in ("mimo-7b", "ernie-4.5")]
"""SGLang captures no layers of the others."""

Serve = Callable[..., Iterator[Client]]


def kv_bytes(config: dict) -> int:
    """Of one token in one layer, in fp32."""
    config = config.get("text_config", config)
    if rank := config.get("kv_lora_rank"):
        return 4 * (rank + config["qk_rope_head_dim"])
    width = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    return 4 * 2 * config["num_key_value_heads"] * width


def num_passes(answer: dict) -> int:
    """Target forwards behind the prefill: rounds, and decode steps, such as the last token's."""
    info, count = parse_info(answer)["sources"]["mtp"], answer["meta_info"]["completion_tokens"]
    return count - 1 - info["accepted_tokens"] - info["matched_tokens"]


@pytest.fixture(scope="module")
def target_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    return cache(lambda name: MTP[name].target(tmp_path_factory.mktemp(name)))


@pytest.fixture(scope="module")
def serve(start_server: Start, target_of: Callable[[str], Path]) -> Serve:
    """Returns ``serve(kind, name, *flags)``: a server of a family's target."""

    def start(kind: str, name: str, *flags: str) -> Iterator[Client]:
        one = MTP[name]
        model = ("--model-path", str(target_of(name)), *one.flags, *SMALL_CHUNKS, *SEED)
        with plugin("given_dtype"), one.kernels():
            name = f"{kind}-{name}"
            yield from served(start_server, name, *model, *flags, **one.variables)

    return start


@pytest.fixture(scope="module", params=CASES.values())
def name(request: pytest.FixtureRequest) -> str:
    return request.param


@pytest.fixture(scope="module")
def own(serve: Serve, name: str) -> Iterator[Client]:
    """No draft model: the layer drafts for the likelihood; but for hybrids overlap, as on a GPU."""
    yield from serve("mtp", name, *PARSE, *OWN, *MTP[name].overlap)


@pytest.fixture(scope="module")
def stock(serve: Serve, name: str) -> Iterator[Client]:
    yield from serve("nextn", name, *STOCK, "--disable-overlap-schedule")


@pytest.fixture(scope="module")
def plain(serve: Serve, name: str) -> Iterator[Client]:
    yield from serve("no-mtp", name, "--disable-overlap-schedule")


@pytest.fixture(scope="module")
def prompts() -> list[list[int]]:
    return [prompt * (1 + 3 * (i % 2)) for i, prompt in enumerate(random_prompts(8, 91))]


def test_exact_drafts(own: Client, plain: Client, prompts: list):
    """Plain's tokens, in fewer passes; drafts are kept whole, in part and not at all."""
    wanted = ids_of(plain.generate_all(prompts, 8, **LIMIT))
    for concurrency, count in ((1, 2), (8, 8)):
        answers = own.generate_all(prompts[:count], concurrency, parse=EXACT, **LIMIT)
        assert ids_of(answers) == wanted[:count]
    infos = [parse_info(answer)["sources"]["mtp"] for answer in answers]
    matched = sum(info["matched_tokens"] for info in infos)
    assert 0 < matched < sum(info["drafted_tokens"] for info in infos)
    own.assert_nothing_lost()


def test_start_up_says_what_the_layer_takes(own: Client, target_of: Callable, name: str):
    log = own.probe.folder.with_suffix(".log").read_text()
    size = kv_bytes(json.loads((target_of(name) / "config.json").read_text()))
    assert f"proposes up to 3 tokens; its KV takes {size} bytes of each slot" in log


@MORE
@pytest.mark.parametrize("name", CAPTURED, indirect=True)
def test_beside_captured_layers(
    serve: Serve, own: Client, name: str, target_of: Callable, prompts: list
):
    """As a verdict head reads them: the layer proposes the same tokens."""
    flags = (*OWN, *MTP[name].overlap, "--parse-hidden-layers", "0,1")
    options = EXACT | {"trace": True, "hidden_states": True}
    wanted = own.generate_all(prompts, 1, parse=EXACT, **LIMIT)
    for client in serve("mtp-captured", name, *PARSE, *flags):
        answers = client.generate_all(prompts, 1, parse=options, **LIMIT)
        assert ids_of(answers) == ids_of(wanted)
        assert [*map(num_passes, answers)] == [*map(num_passes, wanted)]
        config = json.loads((target_of(name) / "config.json").read_text())
        width = config.get("text_config", config)["hidden_size"]
        for record in parse_info(answers[0])["trace"]:
            assert record["hidden_states"]["shape"][1] == 2 * width
        client.assert_nothing_lost()


@MORE
def test_turns_hit_the_prefix_cache(own: Client, plain: Client, prompts: list):
    """The layer's KV is there, too, and answers of later turns are the same."""
    prompt, tail = prompts[0], prompts[2]
    first = own.generate(prompt, parse=EXACT, **LIMIT)
    turn = [*prompt, *first["output_ids"], *tail]
    second = own.generate(turn, parse=EXACT, **LIMIT)
    assert second["meta_info"]["cached_tokens"] >= len(prompt) + 40
    assert ids_of([second]) == ids_of([plain.generate(turn, **LIMIT)])
    assert parse_info(second)["sources"]["mtp"]["matched_tokens"] > 0


@MORE
def test_judges_texts_samples_and_aborts(own: Client, plain: Client, prompts: list):
    """The likelihood keeps more of its drafts, a wrong text ends where it goes on, sampled tokens
    are plain's, and no slot is lost."""
    exact, judged = (
        sum(num_passes(one) for one in own.generate_all(prompts, 8, parse=parse, **LIMIT))
        for parse in (EXACT, {"threshold": 0.0, "strict": []})
    )
    assert judged < exact
    text = plain.generate(prompts[0], **LIMIT)["text"][:24] + "and so on, as ever. " * 2
    for prompt, parse, more in (
        (prompts[0], {"draft": text}, {}),
        (prompts[1], {}, {"temperature": 2.0, "top_k": 20, "sampling_seed": 5}),
        (prompts[2], {}, {"max_new_tokens": 3}),
    ):
        answer = own.generate(prompt, parse=parse | EXACT, **LIMIT | more)
        assert_same(answer, plain.generate(prompt, **LIMIT | more))
        assert parse_info(answer)["sources"]["mtp"]["rounds"] > 0
    abort_while(own, "target-verify", {"prompt": prompts[3], "parse": EXACT, **LIMIT})
    own.assert_nothing_lost()


@MORE
@pytest.mark.parametrize("name", WITH_STOCK, indirect=True)
def test_as_many_passes_as_stock_nextn(own: Client, stock: Client, prompts: list):
    for concurrency, count in ((1, 2), (8, 8)):
        for one in (own, stock):
            one.flush()
        answers = own.generate_all(prompts[:count], concurrency, parse=EXACT, **LIMIT)
        theirs = stock.generate_all(prompts[:count], concurrency, **LIMIT)
        assert ids_of(answers) == ids_of(theirs)
        passes = [answer["meta_info"]["spec_verify_ct"] for answer in theirs]
        assert [*map(num_passes, answers)] == passes


@MORE
@pytest.mark.parametrize("name", WITH_STATES, indirect=True)
def test_proposals_are_those_of_plain_pytorch(
    own: Client, name: str, target_of: Callable[[str], Path], prompts: list
):
    """Behind drafts of which all, some or none is kept, and behind retractions."""
    layer, kinds = LayerReference(HYBRIDS[name], target_of(name)), set[tuple[bool, bool]]()
    for is_forced in (False, True):
        own.flush()
        with retractions(own, is_forced):
            answers = own.generate_all(prompts, 8, parse=EXACT | TRACE, **LIMIT)
        assert any(answer["meta_info"]["num_retractions"] for answer in answers) is is_forced
        for prompt, answer in zip(prompts, answers, strict=True):
            ids = [*prompt, *answer["output_ids"]]
            hidden = layer.hidden(ids)
            for record in parse_info(answer)["trace"]:
                known, draft = len(prompt) + record["output_start"], record["draft_token_ids"]
                assert draft == layer.propose(hidden[: known - 1], ids[:known], len(draft))
                num_kept = record["accepted_len"] + len(record["bonus_token_ids"]) - 1
                kinds.add((num_kept > 0, num_kept == len(draft)))
    assert kinds == {(True, True), (True, False), (False, False)}
    own.assert_nothing_lost()


@MORE
@pytest.mark.parametrize("name", [FAST, pytest.param(DENSE, marks=MOST)], indirect=True)
def test_two_ranks(serve: Serve, plain: Client, name: str, tmp_path: Path, prompts: list):
    """Rank 1's logits are noise, so only rank 0's proposals and choices may count."""
    flags = (*PARSE, *OWN, *MTP[name].overlap, "--tp-size", "2")
    with plugin("rank_noise", RANK_NOISE_DIR=str(tmp_path)), two_ranks_environment():
        for client in serve("mtp-ranks", name, *flags):
            answers = client.generate_all(prompts, 8, parse=EXACT, **LIMIT)
            assert ids_of(answers) == ids_of(plain.generate_all(prompts, 8, **LIMIT))
            assert sum(map(num_passes, answers)) < 8 * (LIMIT["max_new_tokens"] - 1)
            client.assert_nothing_lost()


# -- a trained layer --------------------------------------------------------------------

DEMO = ("--model-path", str(DEMO_PAIR / "target"), *SEED)
LAYER = str(DEMO_PAIR / "mtp")
WHOLE = {"max_new_tokens": 220}
"""Answers end by themselves: of one that is cut off stock SGLang counts another pass."""
FEW_SLOTS = {"SGLANG_CLIP_MAX_NEW_TOKENS_ESTIMATION": "8", "SGLANG_TEST_RETRACT_INTERVAL": "5"}
"""More requests are admitted than fit."""


@pytest.fixture(scope="module")
def trained(start_server: Start) -> Iterator[Client]:
    """Token mode, short of KV slots; proposals of stock's length, whatever passes take."""
    layer = ("--parse-mtp", LAYER, *STEPS, *ALWAYS, "--parse-verification", "token", *OVERLAP)
    tight = ("--max-total-tokens", "1100", "--page-size", "4")
    flags = (*DEMO, *PARSE, *layer, *tight)
    yield from served(start_server, "mtp-trained", *flags, **FEW_SLOTS)


@pytest.fixture(scope="module")
def problems() -> list[str]:
    return rendered(DEMO_PAIR / "target", load_problems().held_out_problems(8, seed=1))


@pytest.fixture(scope="module")
def wanted(wordings_plain: Client, problems: list[str]) -> list[dict]:
    return wordings_plain.generate_all(problems, 8, **WHOLE)


@pytest.fixture(scope="module")
def with_texts(problems: list[str], wanted: list[dict]) -> Requests:
    """With a text that goes on where the layer's chain ends, in part."""
    texts = [changed(one["text"]) for one in wanted]
    return [
        {"prompt": ask, "parse": TRACE | {"draft": text}, **WHOLE}
        for ask, text in zip(problems, texts, strict=True)
    ]


@MORE
@pytest.mark.parametrize("is_forced", [False, True])
def test_tails_in_a_pool_too_small(
    trained: Client, wanted: list[dict], with_texts: Requests, is_forced: bool
):
    """And with retractions every few iterations, too."""
    with retractions(trained, is_forced):
        answers = ask_all(trained, with_texts, 8)
    assert ids_of(answers) == ids_of(wanted)
    list(map(assert_adds_up, answers))
    num_retractions = sum(answer["meta_info"]["num_retractions"] for answer in answers)
    num_short = sum(parse_info(answer)["kv_truncated_drafts"] for answer in answers)
    assert num_retractions > 0 or (num_short > 0 and not is_forced)
    assert len(tails(answers)) > 8
    trained.assert_nothing_lost()


@MORE
def test_aborts_beside_tails(trained: Client, wanted: list[dict], with_texts: Requests):
    expected, place = ids_of(wanted[:4]), "target-verify"
    answers = abort_while(trained, place, *with_texts[:4], expected=expected, skip=4, times=1)
    assert tails(answers[1:])
    trained.assert_nothing_lost()


@MORE
def test_a_trained_heads_verdicts(start_server: Start, trained: Client, problems: list[str]):
    """It reads a layer beside what the MTP layer reads, and accepts other words."""
    judged = (*DEMO, *PARSE, "--parse-mtp", LAYER, "--parse-judge", str(DEMO_PAIR / "judge"))
    exact = trained.generate_all(problems, 8, parse=EXACT, **WHOLE)
    for client in served(start_server, "mtp-judged", *judged, *STEPS, *ALWAYS):
        answers = client.generate_all(problems, 8, **WHOLE)
        assert ids_of(client.generate_all(problems, 8, parse=EXACT, **WHOLE)) == ids_of(exact)
        client.assert_nothing_lost()
    sources = [parse_info(answer)["sources"]["mtp"] for answer in answers]
    accepted = sum(one["accepted_tokens"] for one in sources)
    assert 0.9 < accepted / sum(one["drafted_tokens"] for one in sources) <= 1
    assert sum(map(num_passes, answers)) < sum(map(num_passes, exact))


@MORE
def test_a_trained_layers_passes(
    start_server: Start, trained: Client, problems: list[str], wanted: list[dict]
):
    """Stock NEXTN's, at a chain's length."""
    answers = trained.generate_all(problems, 1, parse=EXACT | {"prompt_drafts": "off"}, **WHOLE)
    stock = (*DEMO, *STOCK, "--speculative-draft-model-path", LAYER)
    for client in served(start_server, "nextn-trained", *stock, "--disable-overlap-schedule"):
        theirs = client.generate_all(problems, 1, **WHOLE)
    assert ids_of(answers) == ids_of(theirs) == ids_of(wanted)
    passes = [*map(num_passes, answers)]
    assert passes == [answer["meta_info"]["spec_verify_ct"] for answer in theirs]
    assert sum(map(len, ids_of(answers))) > 3 * sum(passes)
