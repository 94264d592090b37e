"""Families with other attention than full: plain answers, and the verdicts of transformers.

Random weights of their real classes, as target and, with noise, as draft.
"""

from __future__ import annotations

import base64
import io
from collections.abc import Callable, Collection, Iterable, Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from PIL import Image

from support.bodies import PLAIN, TRACE, abort_while, assert_token_mode
from support.client import (
    Client,
    assert_all_kinds_of_drafts,
    ids_of,
    parse_info,
    random_prompts,
)
from support.families import TINY, WINDOWED, cpu_kernels
from support.heads import (
    TOLERANCE,
    HeadShape,
    check_verdicts,
    decode_hidden_states,
    rows_of,
    write_head,
)
from support.reference_verdicts import assert_chosen, assert_likelihoods, reference_verdicts
from support.servers import (
    ALWAYS,
    QUESTION,
    SEED,
    SMALL_CHUNKS,
    Start,
    parse_flags,
    plugin,
    served,
)

LIMIT = {"max_new_tokens": 40, "ignore_eos": True}
TOKEN = ("--parse-verification", "token", "--parse-draft-tokens", "8", *SMALL_CHUNKS, *ALWAYS)
FAST = ("deepseek-v2", "gemma-3", "qwen3.5")
EXACT = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
"""Of the states of convolutions, which are kept in bf16 otherwise."""
STAND_IN = "tests/e2e/test_families.py::test_token_mode"
SECOND, THIRD = pytest.mark.nightly(STAND_IN), pytest.mark.weekly(STAND_IN)
LIKE_OTHERS = {"kimi-k2.5", "mistral-large-3", "gemma-3-images", "olmo-3", "exaone-4", "mellum-2"}
LIKE_OTHERS |= {"granite-swash", "granite-4", "granite-4-moe", "lfm2-moe", "nemotron-3"}
LIKE_OTHERS |= {"qwen3.5-moe", "qwen3.5-moe-images"}
"""Families whose kinds of attention and of states other ones have, too."""


def marked(names: Iterable[str], third: Collection[str] = LIKE_OTHERS) -> list[Any]:
    return [pytest.param(name, marks=THIRD if name in third else SECOND) for name in names]


NAMES = [*FAST, *marked(name for name in TINY if name not in FAST)]
READ = ("deepseek-v2", "deepseek-v3", "glm-4.7-flash", "kimi-k2.5")
"""Families with captured layers, beside questions."""
UNREAD = ("minicpm-3", "mistral-large-3")
ASKED = marked((*READ, *UNREAD, *WINDOWED))
LAYERS = (0, 1)
HEADED = ("qwen3-next", "qwen3.5", "qwen3.5-images", "qwen3.5-moe")
HEADED += ("nemotron-h", "nemotron-3", "lfm2", "lfm2-moe")
"""Families with captured layers, but no questions."""
COVERED = {*READ, *UNREAD, *WINDOWED, *HEADED} - {*FAST}
"""By other verdicts, of a pass with the same layers; token mode has their logits."""
JUDGED = marked(TINY, COVERED | LIKE_OTHERS)


@pytest.fixture(scope="module")
def pair_of(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], tuple[Path, Path]]:
    return cache(lambda name: TINY[name].pair(tmp_path_factory.mktemp(name) / name))


@pytest.fixture(scope="module")
def serve(
    start_server: Start, pair_of: Callable[[str], tuple[Path, Path]]
) -> Callable[..., Iterator]:
    """Returns ``serve(kind, name, *flags)``: a server of a family, and its target's folder."""

    def start(kind: str, name: str, *flags: str) -> Iterator[tuple[Client, Path]]:
        pair = pair_of(name)
        flags = parse_flags(pair, *flags, *SEED, *TINY[name].flags)
        with plugin("given_dtype"), cpu_kernels(name):
            for client in served(start_server, f"{kind}-{name}", *flags, **EXACT):
                yield client, pair[0]

    return start


def load(target: Path) -> Any:
    """The target in transformers."""
    return TINY[target.parent.name].load(target)


def assert_layers(model: Any, prompt: list[int], answer: dict, record: dict) -> None:
    """The captured hidden states are those of transformers."""
    found = decode_hidden_states(record["hidden_states"])
    before = [*prompt, *answer["output_ids"][: record["output_start"]]]
    draft = record["draft_token_ids"][: record["prefix_ends"][-1]]
    rows = rows_of(model, before, draft, LAYERS)
    np.testing.assert_allclose(found, rows.hidden, atol=1e-3 * rows.scale)


@pytest.fixture(scope="module", params=NAMES)
def family(
    request: pytest.FixtureRequest, serve: Callable[..., Iterator]
) -> Iterator[tuple[Client, Path]]:
    """In token mode; prompts are prefilled in chunks."""
    yield from serve("family", request.param, *TOKEN)


def test_token_mode(family: tuple[Client, Path]):
    client, target = family
    prompts, answers = assert_token_mode(client, 8, 6, **LIMIT)
    assert_all_kinds_of_drafts(answers)
    assert_chosen(load(target), prompts[0], answers[0]["output_ids"])


@pytest.mark.parametrize("family", FAST, indirect=True)
def test_one_at_a_time(family: tuple[Client, Path]):
    assert_token_mode(family[0], 1, 2, **LIMIT)


PADDED = {
    "none": {},
    "forced": {"logit_bias": {"440": 3.0, "447": 3.0}},
    "penalties": {"logit_bias": {"440": 3.0}, "repetition_penalty": 1.4, "frequency_penalty": 0.4},
    "grammar": {"regex": "[a-z0-9 ]{12,40}"},
    "sampled": {"temperature": 1.2, "sampling_seed": 5},
}
"""Cases of requests to a target whose padding it chooses now and then: ids from 416 on, which its
draft model lacks, and from 384 on, which the tokenizer does."""


@pytest.mark.parametrize("family", ["gemma-3"], indirect=True)
def test_padded_vocabularies(family: tuple[Client, Path]):
    """No draft has a token of padding; what the target outputs of it costs a draft, no more."""
    client, _ = family
    prompts = [[*prompt, 447, 400, 5] for prompt in random_prompts(2, 81)]
    logged = {"return_logprob": True, "top_logprobs_num": 2, "token_ids_logprob": [3, 445]}
    outputs, drafts = [], []
    for case in PADDED.values():
        answers = [
            client.generate_all(prompts, 2, **LIMIT | case, parse=options, top=logged)
            for options in (PLAIN, TRACE)
        ]
        assert ids_of(answers[1]) == ids_of(answers[0])
        for one, other in zip(*answers, strict=True):
            for key in ("output_token_logprobs", "output_token_ids_logprobs"):
                found, wanted = (np.array(a["meta_info"][key], dtype=object) for a in (other, one))
                values = (found[..., 0].astype(float), wanted[..., 0].astype(float))
                np.testing.assert_allclose(*values, atol=1e-3)
            outputs += one["output_ids"]
            drafts += [
                t for record in parse_info(other)["trace"] for t in record["draft_token_ids"]
            ]
    assert max(outputs) >= 416
    assert len(drafts) > 200
    assert max(drafts) < 384


def test_turns_hit_the_prefix_cache(family: tuple[Client, Path]):
    """The second turn reads KV that drafts' passes have written."""
    client, _ = family
    prompt, tail = random_prompts(2, 71)
    for options in (PLAIN, TRACE):
        client.flush()
        first = client.generate(prompt, **LIMIT, parse=options)
        second = client.generate([*prompt, *first["output_ids"], *tail], **LIMIT, parse=options)
        assert second["meta_info"]["cached_tokens"] >= len(prompt) + 30
        if options is PLAIN:
            expected = ids_of([first, second])
    assert ids_of([first, second]) == expected


def test_slots_come_back_after_an_abort(family: tuple[Client, Path]):
    client, _ = family
    prompt = random_prompts(1, 81)[0]
    abort_while(client, "target-verify", {"prompt": prompt, "parse": TRACE, **LIMIT})
    client.assert_nothing_lost()


def picture() -> str:
    """In base64; 4 tokens."""
    pixels = np.random.default_rng(3).integers(0, 256, (64, 64, 3), dtype=np.uint8)
    file = io.BytesIO()
    Image.fromarray(pixels).save(file, "png")
    return base64.b64encode(file.getvalue()).decode()


@SECOND
@pytest.mark.parametrize("family", ["qwen3.5-images"], indirect=True)
def test_requests_with_images_are_served_plainly(family: tuple[Client, Path]):
    """Beside requests with drafts; positions behind an image are not those of its tokens."""
    client, _ = family
    text = "1 + 2 = <|vision_start|><|image_pad|><|vision_end|> 3 + 4 ="
    prompts, image = random_prompts(3, 97), {"image_data": [picture()]}
    expected = [client.generate(text, top=image, parse=PLAIN, **LIMIT)]
    expected += client.generate_all(prompts, 3, **LIMIT, parse=PLAIN)
    client.flush()
    with ThreadPoolExecutor(1) as pool:
        asked = pool.submit(client.generate, text, top=image, parse=TRACE, **LIMIT)
        answers = client.generate_all(prompts, 3, **LIMIT, parse=TRACE)
    assert ids_of([asked.result(), *answers]) == ids_of(expected)
    info = parse_info(asked.result())
    assert (info["mode"], info["reason"]) == ("plain", "multimodal input")
    assert sum(parse_info(answer)["accepted_tokens"] for answer in answers) > 0


@pytest.fixture(scope="module", params=JUDGED)
def judged(
    request: pytest.FixtureRequest, serve: Callable[..., Iterator]
) -> Iterator[tuple[Client, Path]]:
    """With the likelihood, which verifies causal passes."""
    flags = ("--parse-judge", "likelihood", "--parse-segment", "tokens:3")
    yield from serve("judged", request.param, *flags, "--parse-draft-tokens", "12")


def test_verdicts_are_those_of_transformers(judged: tuple[Client, Path]):
    client, target = judged
    model, compared = load(target), 0
    for prompt in random_prompts(3, 91):
        answer = client.generate(prompt, **LIMIT, parse=TRACE)
        compared += assert_likelihoods(model, prompt, answer)
    assert compared > 10


@pytest.fixture(scope="module", params=ASKED)
def asked(
    request: pytest.FixtureRequest, serve: Callable[..., Iterator]
) -> Iterator[tuple[Client, Path]]:
    """Asks questions, in the layout that the backend prefers; one family in the other."""
    name = request.param
    flags = (*QUESTION, "--parse-segment", "tokens:3", "--parse-draft-tokens", "12", *SMALL_CHUNKS)
    if name in READ:
        flags += ("--parse-hidden-layers", ",".join(map(str, LAYERS)))
    layout = ("--parse-layout", "alias") if name == "deepseek-v2" else ()
    yield from serve("asked", name, *flags, *layout)


def test_answers_to_questions_and_layers(asked: tuple[Client, Path], request: Any):
    """Of several requests in a pass; behind contexts that are longer than a window."""
    client, target = asked
    model, verdicts = load(target), []
    is_read = request.node.callspec.params["asked"] in READ
    prompts = random_prompts(3, 95)
    answers = client.generate_all(
        prompts, 3, **LIMIT, parse=TRACE | ({"hidden_states": True} if is_read else {})
    )
    for prompt, answer in zip(prompts, answers, strict=True):
        for record in parse_info(answer)["trace"]:
            expected = reference_verdicts(model, prompt, answer["output_ids"], record).verdicts
            assert record["verdicts"] == pytest.approx(expected.tolist(), abs=TOLERANCE)
            verdicts += record["verdicts"]
            if is_read:
                assert_layers(model, prompt, answer, record)
    assert len(verdicts) > 10
    assert max(verdicts) - min(verdicts) > 0.01


@pytest.fixture(scope="module", params=marked(HEADED))
def headed(
    request: pytest.FixtureRequest,
    serve: Callable[..., Iterator],
    pair_of: Callable[[str], tuple[Path, Path]],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Client, Path, Path]]:
    """With a trained head's form and random weights, which reads two layers."""
    pair = pair_of(request.param)
    scale = rows_of(load(pair[0]), *random_prompts(2, 93), LAYERS).scale
    shape = HeadShape("running-mean", LAYERS, 64)
    folder = write_head(tmp_path_factory.mktemp("head") / "head", pair, shape, scale)
    flags = ("--parse-judge", str(folder), "--parse-segment", "tokens:3", *SMALL_CHUNKS)
    for client, target in serve("headed", request.param, *flags, "--parse-draft-tokens", "12"):
        yield client, target, folder


def test_heads_that_read_a_hybrid(headed: tuple[Client, Path, Path]):
    """Of several requests in a pass, also in rows behind tokens that a state lacked."""
    client, target, folder = headed
    model, verdicts = load(target), []
    prompts = random_prompts(6, 97)
    options = TRACE | {"hidden_states": True}
    answers = client.generate_all(prompts, 3, **LIMIT, parse=options)
    for prompt, answer in zip(prompts, answers, strict=True):
        verdicts += check_verdicts(model, folder, LAYERS, prompt, answer)
        for record in parse_info(answer)["trace"]:
            assert_layers(model, prompt, answer, record)
    assert min(verdicts) < 0.3 < 0.7 < max(verdicts)
    client.assert_nothing_lost()
