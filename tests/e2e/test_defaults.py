"""A server of each mechanism as users start it: no limit of running requests, so with what SGLang
and PARSE resolve for it, under 64 requests at a time."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import pytest

from sglang_parse.client.demo_pair import DEMO_PAIR
from support.client import DRAFTS, EXACT, Client, ids_of, parse_info, random_prompts
from support.families import TINY, cpu_kernels
from support.servers import (
    COPIES,
    PARSE,
    QUESTION,
    SEED,
    UNLIMITED,
    Start,
    parse_flags,
    plugin,
    served,
    two_ranks_environment,
)

TOKEN = ("--parse-verification", "token")
HEAD = ("--model-path", str(DEMO_PAIR / "target"), "--parse-eagle3-path", str(DEMO_PAIR / "eagle3"))
FAMILIES = {"hybrid": "qwen3.5", "latent": "deepseek-v2", "windows": "gemma-3", "pools": "gpt-oss"}
PLAIN = {"enabled": False}
LIMIT = {"max_new_tokens": 16, "ignore_eos": True}
NUM = 64
EXACT_STATES = {"SGLANG_MAMBA_CONV_DTYPE": "float32"}
MORE = pytest.mark.nightly("tests/e2e/test_defaults.py::test_many_at_a_time")
SLOW = ("full", "latent", "windows", "pools", "texts", "question", "ranks")
MECHANISMS = ["hybrid", "head", *(pytest.param(name, marks=MORE) for name in SLOW)]


@pytest.fixture(scope="module")
def flags_of(
    pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Callable[[str], tuple[str, ...]]:
    """What a user gives for a mechanism."""

    def flags(name: str) -> tuple[str, ...]:
        if name == "head":
            return (*HEAD, *PARSE, *TOKEN)
        if name == "texts":
            reused = ("--parse-reuse-answers", "1000:shared")
            return ("--model-path", str(pair[0]), *PARSE, *TOKEN, *reused)
        if name in ("full", "ranks"):
            return (*parse_flags(pair, *TOKEN), *(("--tp-size", "2") if name == "ranks" else ()))
        if name == "question":
            return parse_flags(pair, *QUESTION)
        tiny = TINY[FAMILIES[name]]
        models = tiny.pair(tmp_path_factory.mktemp(name) / FAMILIES[name])
        return (*parse_flags(models, *TOKEN), *tiny.flags)

    return flags


@pytest.fixture(scope="module", params=MECHANISMS)
def client(
    request: pytest.FixtureRequest, start_server: Start, flags_of: Callable
) -> Iterator[tuple[str, Client]]:
    name = request.param
    with ExitStack() as stack:
        if name == "ranks":
            stack.enter_context(two_ranks_environment())
        if name in FAMILIES:
            stack.enter_context(plugin("given_dtype"))
            stack.enter_context(cpu_kernels(FAMILIES[name]))
        flags = (*flags_of(name), *COPIES, *SEED)
        started = served(start_server, f"defaults-{name}", *flags, common=UNLIMITED, **EXACT_STATES)
        for one in started:
            yield name, one


def test_many_at_a_time(client: tuple[str, Client]):
    """Texts draft from the second time on: from the first answers."""
    name, server = client
    prompts = random_prompts(NUM, 7, longest=30)
    expected = ids_of(server.generate_all(prompts, NUM, **LIMIT, parse=PLAIN))
    options = EXACT if name == "question" else DRAFTS
    server.flush()
    for _ in range(2 if name == "texts" else 1):
        answers = server.generate_all(prompts, NUM, **LIMIT, parse=options)
        assert ids_of(answers) == expected
    drafted = sum(parse_info(answer)["drafted_tokens"] for answer in answers)
    assert drafted > NUM
    server.assert_nothing_lost()
