"""Passes as SGLang's decode steps, a row each, on servers: where a GPU replays their graphs for
targets that have none of PARSE's (``support/plugins/graphs``). A CPU runs the same steps without
graphs."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import NamedTuple

import pytest

from support.client import Client, assert_same, parse_info, random_prompts
from support.families import TINY, cpu_kernels
from support.mtp import MTP
from support.random_adapter import two_adapters
from support.servers import (
    ALWAYS,
    COPIES,
    OVERLAP,
    PARSE,
    SEED,
    SMALL_CHUNKS,
    Start,
    parse_flags,
    plugin,
    served,
)

pytestmark = pytest.mark.nightly("tests/compat/test_step_graphs.py")
TOKEN = ("--parse-verification", "token", "--parse-draft-tokens", "8", *SMALL_CHUNKS, *SEED)
LIMIT = {"max_new_tokens": 40, "ignore_eos": True}
PLAIN = {"enabled": False}
SAMPLED = {"temperature": 2.0, "top_k": 20, "sampling_seed": 5}
FORCED = {"SGLANG_PARSE_PASS_GRAPHS": "1"}
"""Steps are slower than a pass on a CPU."""


class Setup(NamedTuple):
    """A server's flags, the adapters that it has, and what drafts."""

    flags: tuple[str, ...]
    adapters: tuple[str | None, ...] = (None,)
    source: str = "model"


def latent(folder: Path, _: tuple[Path, Path]) -> Setup:
    """Its own layer drafts, and reads the hidden states of every row."""
    one = MTP["deepseek-v3"]
    flags = ("--model-path", str(one.target(folder)), *PARSE, "--parse-mtp", "own", *one.flags)
    return Setup((*flags, *TOKEN, *OVERLAP, *COPIES), source="mtp")


def two_pools(folder: Path, _: tuple[Path, Path]) -> Setup:
    pair = TINY["gpt-oss"].pair(folder)
    return Setup((*parse_flags(pair, *TOKEN), *TINY["gpt-oss"].flags, "--page-size", "4"))


def adapters(folder: Path, pair: tuple[Path, Path]) -> Setup:
    flags = two_adapters(pair[0], folder)
    return Setup((*parse_flags(pair, *TOKEN), *flags), (None, "loud", "quiet"))


@pytest.fixture(scope="module", params=[latent, two_pools, adapters])
def steps(
    request: pytest.FixtureRequest,
    start_server: Start,
    pair: tuple[Path, Path],
    tmp_path_factory: pytest.TempPathFactory,
) -> Iterator[tuple[Client, Setup]]:
    make: Callable[..., Setup] = request.param
    setup = make(tmp_path_factory.mktemp(make.__name__), pair)
    with plugin("given_dtype"), plugin("graphs", PARSE_GRAPHS="steps"), cpu_kernels("gpt-oss"):
        flags = (*setup.flags, *ALWAYS)
        for client in served(start_server, f"steps-{make.__name__}", *flags, **FORCED):
            yield client, setup


@pytest.mark.parametrize(("at_a_time", "count"), [(1, 2), (8, 6)])
def test_answers_are_the_plain_ones(steps: tuple[Client, Setup], at_a_time: int, count: int):
    """Of drafts that are kept whole, in part and not at all; passes of more rows run in pieces."""
    client, setup = steps
    prompts = [prompt * (1 + 2 * (i % 2)) for i, prompt in enumerate(random_prompts(count, 97))]
    tops = [{"lora_path": one, "return_logprob": True} for one in setup.adapters * 8]

    def answers_of(parse: dict, sampling: dict) -> list[dict]:
        def ask(prompt: list[int], top: dict) -> dict:
            return client.generate(prompt, parse=parse, top=top, **LIMIT, **sampling)

        client.flush()
        with ThreadPoolExecutor(at_a_time) as pool:
            return [*pool.map(ask, prompts, tops[: len(prompts)])]

    for sampling in ({}, SAMPLED):
        answers = answers_of({}, sampling)
        for one, other in zip(answers, answers_of(PLAIN, sampling), strict=True):
            assert_same(one, other)
    counts = [parse_info(answer)["sources"].get(setup.source, {}) for answer in answers]
    assert sum(one.get("matched_tokens", 0) + one.get("accepted_tokens", 0) for one in counts) > 0
    client.assert_nothing_lost()


def test_passes_are_steps(steps: tuple[Client, Setup]):
    """At start they were compared with passes in pieces; then drafts are verified so."""
    client, _ = steps
    log = client.probe.folder.with_suffix(".log").read_text()
    assert "CUDA graphs of the target: decode steps run passes of 16 rows" in log
    assert "differs from forwards in pieces" not in log
    assert len(re.findall(r"a pass as \d+ steps", log.partition("prewarmed")[2])) > 20
