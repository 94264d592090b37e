"""Servers for the tests with a language model that nobody here made: `make test-real`."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
from make_pair import make_pair

from support.client import Client
from support.models import load_model, load_tokenizer
from support.servers import Start, parse_flags, plain_flags, shared, shared_servers
from support.warm import CHECKS, Nursery

os.environ.update(CHECKS)
WRONG_WAY_ROUND = "Is the answer above wrong? Answer Yes or No."
ROOT = Path(__file__).resolve().parents[2]


@pytest.fixture(scope="session")
def pair() -> tuple[Path, Path]:
    folder = ROOT / "build" / "real"
    make_pair(folder)
    return folder / "target", folder / "draft"


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    with shared_servers(tmp_path_factory.mktemp("logs"), Nursery().start) as start:
        yield start


@pytest.fixture(scope="module")
def plain(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    yield from shared(start_server, "plain", *plain_flags(pair[0]))


@pytest.fixture(scope="module")
def token(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    yield from shared(start_server, "token", *parse_flags(pair, "--parse-verification", "token"))


@pytest.fixture(scope="module")
def semantic(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    """No question is named: it finds itself."""
    yield from shared(start_server, "semantic", *parse_flags(pair, "--parse-segment", "sentence"))


@pytest.fixture(scope="module")
def states(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    """As ``semantic``, and traces have hidden states."""
    flags = ("--parse-segment", "sentence", "--parse-max-prefixes", "64")
    layers = ("--parse-hidden-layers", "15,22,28")
    yield from shared(start_server, "states", *parse_flags(pair, *flags, *layers))


@pytest.fixture(scope="module")
def contradicted(
    start_server: Start, pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> Iterator[Client]:
    """Asked the wrong way round: it answers No about whatever it would have written itself."""
    question = tmp_path_factory.mktemp("question") / "question.json"
    words = dict.fromkeys(("partial", "complete"), WRONG_WAY_ROUND)
    question.write_text(json.dumps(words | {"accept": "Yes", "reject": "No"}))
    flags = ("--parse-question", str(question), "--parse-segment", "tokens:3")
    # Drafting is suspended as soon as it does not pay: doctor and explain ask for drafts.
    adaptive = ("--parse-drafting", "auto")
    yield from shared(start_server, "contradicted", *parse_flags(pair, *flags, *adaptive))


@pytest.fixture(scope="session")
def tokenizer(pair: tuple[Path, Path]) -> Any:
    return load_tokenizer(pair[0])


@pytest.fixture(scope="session")
def target_model(pair: tuple[Path, Path]) -> Any:
    return load_model(pair[0])
