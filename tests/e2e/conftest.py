"""Real servers for the end-to-end tests: each is started once, and suspended while not in use.

Two model pairs: ``random`` (untied random target, noisy copy as draft: diverse text, partial
agreement) and ``demo`` (the trained pair in examples/demo_pair).
"""

from __future__ import annotations

import contextlib
import os
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from sglang_parse.bench.demo.servers import (
    DEFAULTS,
    ENVIRONMENT,
    Server,
    ServerSpec,
    awake,
    free_ports,
)

sys.path.insert(0, str(Path(__file__).resolve().parent))
sys.path.insert(0, str(Path(__file__).resolve().parents[1]))
PROBE = Path(__file__).resolve().parents[1] / "probe"

from client import Client  # noqa: E402
from random_pair import DEMO, PairShape, make_pair  # noqa: E402
from warm import Nursery  # noqa: E402

# The servers under test need the cores; models this small are no faster on two threads.
torch.set_num_threads(1)
# SGLang asserts its slot accounting on every iteration, not only when idle.
os.environ["SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY"] = "1"
# Before it ends a server, SGLang otherwise waits 65 s for dumps of processes on a GPU.
os.environ["SGLANG_CUDA_COREDUMP_BEFORE_CRASH"] = "0"
os.environ["SGLANG_PYSPY_DUMP_BEFORE_CRASH"] = "0"

PARSE = ("--speculative-algorithm", "PARSE")
QUESTION = ("--parse-question", str(DEMO / "question.json"))
THINKING_QUESTION = Path(__file__).resolve().parent / "thinking_question.json"
"""The same, and two added tokens of the pair as if they were those around a think block."""
Start = Callable[..., Server]


MAX_SERVERS = 8
"""Shared servers alive at a time, per process of tests; modules start more of their own."""


class SharedServers:
    """Servers by name; the one longest out of use ends when there are too many."""

    def __init__(self, logs: Path, nursery: Nursery) -> None:
        self.logs, self.nursery = logs, nursery
        self.alive: dict[str, Server] = {}  # in the order of their last use
        self.num_started = 0

    def start(self, name: str, *flags: str) -> Server:
        """A server of that name, ready and suspended; started again if it had to end."""
        server = self.alive.pop(name, None) or self._started(name, flags)
        self.alive[name] = server
        return server

    def _started(self, name: str, flags: tuple[str, ...]) -> Server:
        self._make_room()
        self.num_started += 1
        (port,) = free_ports(1)
        # An idle server otherwise keeps one of the machine's cores busy.
        spec = ServerSpec(name, (*flags, "--sleep-on-idle"))
        log = self.logs / f"{self.num_started}-{name}.log"
        with probe_environment(log.with_suffix(".probe")):
            server = Server(spec, port, log, self.nursery.start)
        self.alive[name] = server  # so that it ends with the session, whatever happens here
        server.wait_ready()
        server.suspend()
        return server

    def _make_room(self) -> None:
        suspended = [name for name, server in self.alive.items() if server.is_suspended]
        for name in suspended[: max(0, len(self.alive) - MAX_SERVERS + 1)]:
            self.alive.pop(name).stop(0)

    def stop(self) -> None:
        for server in self.alive.values():
            server.stop(0)


@pytest.fixture(scope="session")
def nursery() -> Iterator[Nursery]:
    """Where servers start without importing SGLang again."""
    nursery = Nursery({**DEFAULTS, **os.environ, **ENVIRONMENT})
    yield nursery
    nursery.stop()


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory, nursery: Nursery) -> Iterator[Start]:
    """``start(name, *flags)``: a server of that name, ready and suspended; all end here."""
    shared = SharedServers(tmp_path_factory.mktemp("logs"), nursery)
    yield shared.start
    shared.stop()


@contextlib.contextmanager
def probe_environment(folder: Path) -> Iterator[None]:
    """Servers started in this block load the plugin in tests/probe; ``folder`` is its own."""
    folder.mkdir()
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("PARSE_PROBE_DIR", str(folder))
        environ.setenv("PYTHONPATH", str(PROBE), prepend=os.pathsep)
        yield


@contextlib.contextmanager
def two_ranks_environment() -> Iterator[None]:
    """Servers started in this block may have two ranks: SGLang asks for their cores where there
    are more ranks than NUMA nodes."""
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
        yield


@pytest.fixture(scope="session")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), PairShape(seed=1))


def parse_flags(pair: tuple[Path, Path], *flags: str) -> tuple[str, ...]:
    """A PARSE server that drafts whatever it brings: these pairs are here to be judged.

    ``PARSE_TEST_FLAGS`` runs a whole suite another way: "--parse-overlap on", for one.
    """
    target, draft = pair
    return (
        *("--model-path", str(target), *PARSE, "--speculative-draft-model-path", str(draft)),
        *("--parse-drafting", "always"),
        *flags,
        *os.environ.get("PARSE_TEST_FLAGS", "").split(),
    )


def served(start_server: Start, name: str, *flags: str) -> Iterator[Client]:
    """What a fixture of one server yields from: it is awake while a module uses it."""
    server = start_server(name, *flags)
    with awake(server):
        yield Client.of(server)


# SGLang draws from one generator per server.
SEED = ("--random-seed", "7")
SMALL_CHUNKS = ("--chunked-prefill-size", "256")
OVERLAP = ("--parse-overlap", "on")
SEMANTIC = (
    *("--parse-question", str(THINKING_QUESTION), "--parse-segment", "tokens:3"),
    *("--parse-draft-tokens", "20", "--parse-burst-tokens", "6"),
    *(*SMALL_CHUNKS, *SEED),
)
"""Semantic verification of the random pair."""


@pytest.fixture(scope="module")
def plain(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    """Stock SGLang with the random target; no overlap, as PARSE runs."""
    yield from served(
        start_server,
        "plain",
        "--model-path",
        str(pair[0]),
        "--disable-overlap-schedule",
        *SEED,
    )


@pytest.fixture(scope="module")
def token(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    """PARSE with token-level verification on the random pair."""
    yield from served(
        start_server,
        "token",
        *parse_flags(pair, "--parse-verification", "token", "--parse-draft-tokens", "16"),
        *("--parse-burst-tokens", "4", *SMALL_CHUNKS, *SEED),
    )


@pytest.fixture(scope="module")
def semantic(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    """PARSE with questions on the random pair: verdicts mean nothing, cuts fall anywhere.

    Pages of 16 slots, where the other servers have pages of one.
    """
    flags = parse_flags(pair, *SEMANTIC, "--page-size", "16")
    yield from served(start_server, "semantic", *flags)


@pytest.fixture(scope="module")
def overlap(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    """As ``semantic``, with the overlap schedule."""
    flags = parse_flags(pair, *SEMANTIC, "--page-size", "16", *OVERLAP)
    yield from served(start_server, "overlap", *flags)


@pytest.fixture(scope="module")
def equal(start_server: Start, pair: tuple[Path, Path]) -> Iterator[Client]:
    """PARSE with the target as its own draft: whatever is not accepted shows a fault."""
    yield from served(
        start_server,
        "equal",
        *parse_flags((pair[0], pair[0]), "--parse-verification", "token"),
        *("--parse-draft-tokens", "16", "--parse-burst-tokens", "4", *SEED),
    )


@pytest.fixture(scope="module")
def demo(start_server: Start) -> Iterator[Client]:
    """PARSE with the demo pair."""
    yield from served(
        start_server, "demo", *parse_flags((DEMO / "target", DEMO / "draft"), *QUESTION)
    )


@pytest.fixture(scope="module")
def demo_plain(start_server: Start) -> Iterator[Client]:
    """Stock SGLang with the demo target."""
    yield from served(
        start_server,
        "demo-plain",
        "--model-path",
        str(DEMO / "target"),
        "--disable-overlap-schedule",
    )


@pytest.fixture(scope="session")
def problems() -> list:
    """Held-out problems of the demo pair, as prompts through its chat template."""
    from demo_problems import held_out

    return held_out(100)


@pytest.fixture(scope="session")
def target_model() -> Any:
    """The demo target in plain transformers."""
    from transformers import AutoModelForCausalLM

    return AutoModelForCausalLM.from_pretrained(DEMO / "target", dtype=torch.float32).eval()


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The demo pair's tokenizer."""
    from transformers import AutoTokenizer

    return AutoTokenizer.from_pretrained(DEMO / "target")
