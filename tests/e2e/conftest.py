"""Real servers for the end-to-end tests: each is started once, and suspended while not in use.

Three model pairs: ``random`` (untied random target, noisy copy as draft: diverse text, partial
agreement), ``demo`` (the question pair in tests/data) and ``wordings`` (the one in
examples/demo_pair, with its verdict head).
"""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_parse.client.demo_pair import DEMO_PAIR
from sglang_parse.client.servers import awake
from support.client import Client
from support.demo_pair import DEMO
from support.models import load_model
from support.programs import forked
from support.random_pair import PairShape, make_pair, parallel_draft, resize
from support.servers import (
    AHEAD,
    ALWAYS,
    BLOCKS,
    CHAT,
    CUSTOM,
    EVERY_LINE,
    OVERLAP,
    SEED,
    SEMANTIC,
    SMALL_CHUNKS,
    Start,
    parse_flags,
    plain_flags,
    plugin,
    shared,
    shared_servers,
    two_ranks_environment,
)
from support.warm import CHECKS, Nursery

os.environ.update(CHECKS)


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Start]:
    """Returns ``start(name, *flags)``, which starts a suspended server; stops all at the end."""
    with shared_servers(tmp_path_factory.mktemp("logs"), nursery.start) as start:
        yield start


@pytest.fixture
def programs(nursery: Nursery) -> Iterator[None]:
    with forked(nursery):
        yield


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), PairShape(seed=1))


@pytest.fixture(scope="session")
def block_pair(
    pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[Path, Path]:
    """``pair`` with a draft that has a mask token, and tokens of padding behind the target's."""
    draft = parallel_draft(pair[1], tmp_path_factory.mktemp("masks") / "draft")
    return pair[0], resize(draft, 448)


@pytest.fixture(scope="module")
def plain(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    """Stock SGLang with the random target."""
    flags = (*plain_flags(pair[0]), *SEED, CUSTOM, *CHAT)
    yield from shared(start_server, "plain", *flags)


@pytest.fixture(scope="module")
def token(start_server: Start, block_pair: tuple[Path, Path]) -> Iterator[Client]:
    """PARSE with token-level verification on the random pair; drafts in blocks."""
    yield from shared(
        start_server,
        "token",
        *parse_flags(block_pair, "--parse-verification", "token", "--parse-draft-tokens", "8"),
        *("--parse-draft-chunk", "4", *BLOCKS, *SMALL_CHUNKS, *SEED, CUSTOM, *CHAT, *EVERY_LINE),
    )


@pytest.fixture(scope="module")
def semantic(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    """PARSE with questions on the random pair: verdicts mean nothing, drafts are rejected anywhere.

    Pages of 16 slots, where the other servers have pages of one. Always drafts, because programs
    that do not ask for it look at its random verdicts.
    """
    flags = parse_flags(pair, *SEMANTIC, "--page-size", "16", *ALWAYS)
    yield from shared(start_server, "semantic", *flags)


@pytest.fixture(scope="module")
def overlap(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    """As ``semantic``, with the overlap schedule and asynchronous launches, as on a GPU."""
    flags = parse_flags(pair, *SEMANTIC, "--page-size", "16", *OVERLAP, *CHAT, *ALWAYS)
    yield from shared(start_server, "overlap", *flags, **AHEAD)


@pytest.fixture(scope="module")
def blocks(start_server: Start, block_pair: tuple[Path, Path]) -> Iterator[Client]:
    """As ``overlap``, but drafts in blocks that are launched back to back; grammars by llguidance,
    whose mask is applied by a compiled function elsewhere."""
    flags = parse_flags(block_pair, *SEMANTIC, "--page-size", "16", *OVERLAP, *BLOCKS)
    guidance = ("--grammar-backend", "llguidance")
    eager = {"TORCHDYNAMO_DISABLE": "1"}
    yield from shared(
        start_server, "blocks", *flags, *guidance, "--enable-metrics", **AHEAD, **eager
    )


@pytest.fixture(scope="session")
def records(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Where the ranks of ``two_ranks`` write their decisions and times."""
    return tmp_path_factory.mktemp("ranks")


@pytest.fixture(scope="module")
def two_ranks(
    start_server: Start, block_pair: tuple[Path, Path], records: Path
) -> Iterator[Client]:
    """As ``semantic``, on two ranks whose logits differ; drafts in blocks."""
    flags = (*SEMANTIC, *BLOCKS, *EVERY_LINE, "--enable-metrics", "--tp-size", "2")
    with plugin("rank_noise", RANK_NOISE_DIR=str(records)), two_ranks_environment():
        server = start_server("two-ranks", *parse_flags(block_pair, *flags))
    with awake(server):
        yield Client.of(server)


@pytest.fixture(scope="module")
def equal(
    start_server: Start, pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """PARSE with the target as its own draft: any rejected draft is a bug.

    Drafts are written in blocks.
    """
    draft = parallel_draft(pair[0], tmp_path_factory.mktemp("equal") / "draft")
    yield from shared(
        start_server,
        "equal",
        *parse_flags((pair[0], draft), "--parse-verification", "token", *BLOCKS),
        *("--parse-draft-tokens", "16", "--parse-draft-chunk", "4", *SEED),
    )


@pytest.fixture(scope="session")
def demo_folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The question pair's, by a path as people have them."""
    folder = tmp_path_factory.mktemp("folders") / "Modèles de démo = 模型"
    folder.symlink_to(DEMO)
    return folder


@pytest.fixture(scope="module")
def demo(start_server: Start, demo_folder: Path) -> Iterator[Client]:
    """PARSE with the question pair. Always drafts, and so asks after every line: ``auto`` asks
    after as many as pay."""
    question = ("--parse-question", str(demo_folder / "question.json"))
    pair = (demo_folder / "target", demo_folder / "draft")
    yield from shared(start_server, "demo", *parse_flags(pair, *question, *ALWAYS))


@pytest.fixture(scope="module")
def demo_plain(start_server: Start) -> Iterator[Client]:
    """Stock SGLang with the question pair's target."""
    yield from shared(start_server, "demo-plain", *plain_flags(DEMO / "target"))


@pytest.fixture(scope="module")
def small_plain(start_server: Start) -> Iterator[Client]:
    """Stock SGLang with the question pair's draft as its target: it writes problems' answers with
    2 layers instead of 16."""
    yield from shared(start_server, "small-plain", *plain_flags(DEMO / "draft"))


@pytest.fixture(scope="module")
def wordings(start_server: Start) -> Iterator[Client]:
    """PARSE with the pair of `make demo` and its verdict head. Always drafts, for programs."""
    judge = ("--parse-judge", str(DEMO_PAIR / "judge"), *ALWAYS)
    pair = (DEMO_PAIR / "target", DEMO_PAIR / "draft")
    yield from shared(start_server, "wordings", *parse_flags(pair, *judge))


@pytest.fixture(scope="module")
def wordings_plain(start_server: Start) -> Iterator[Client]:
    """Stock SGLang with that pair's target."""
    yield from shared(start_server, "wordings-plain", *plain_flags(DEMO_PAIR / "target"))


@pytest.fixture(scope="session")
def target_model() -> Any:
    """The question pair's target in plain transformers."""
    return load_model(DEMO / "target")
