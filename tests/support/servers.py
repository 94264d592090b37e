"""Servers under test: shared by name, the plugins they load, and the flags they start with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from sglang_parse.bench.harness.servers import (
    Server,
    ServerSpec,
    StartProcess,
    awake,
    free_ports,
)
from support.client import Client
from support.demo_pair import DEMO

Start = Callable[..., Server]
PLUGINS = Path(__file__).resolve().parent / "plugins"
CHECKS = {
    # SGLang asserts its slot accounting on every iteration, not only when idle.
    "SGLANG_ENABLE_STRICT_MEM_CHECK_DURING_BUSY": "1",
    # Before it ends a server, SGLang otherwise waits 65 s for dumps of processes on a GPU.
    "SGLANG_CUDA_COREDUMP_BEFORE_CRASH": "0",
    "SGLANG_PYSPY_DUMP_BEFORE_CRASH": "0",
}
"""In the environment of every server under test."""
MAX_SERVERS = 8
"""Shared servers alive at a time, per process of tests; modules start more of their own."""


class SharedServers:
    """Servers by name; the one longest out of use ends when there are too many."""

    def __init__(self, logs: Path, start_process: StartProcess) -> None:
        self.logs, self.start_process = logs, start_process
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
        server = start_probed(spec, port, log, self.start_process)
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


# -- what they load -------------------------------------------------------------------


@contextlib.contextmanager
def plugin(name: str, **variables: str) -> Iterator[None]:
    """Servers started in this block load ``plugins/<name>`` and have its ``variables``."""
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("PYTHONPATH", str(PLUGINS / name), prepend=os.pathsep)
        for variable, value in variables.items():
            environ.setenv(variable, value)
        yield


def start_probed(spec: ServerSpec, port: int, log: Path, start: StartProcess) -> Server:
    """A server that is starting, with the probe in it; ``Client.of`` finds the probe's folder."""
    folder = log.with_suffix(".probe")
    folder.mkdir()
    with plugin("probe", PARSE_PROBE_DIR=str(folder)):
        return Server(spec, port, log, start)


@contextlib.contextmanager
def two_ranks_environment() -> Iterator[None]:
    """Servers started in this block may have two ranks: SGLang asks for their cores where there
    are more ranks than NUMA nodes."""
    cores = sorted(os.sched_getaffinity(0))
    with pytest.MonkeyPatch.context() as environ:
        environ.setenv("SGLANG_CPU_OMP_THREADS_BIND", f"{cores[0]}|{cores[-1]}")
        yield


# -- their flags ----------------------------------------------------------------------

PARSE = ("--speculative-algorithm", "PARSE")
QUESTION = ("--parse-question", str(DEMO / "question.json"))
THINKING_QUESTION = Path(__file__).resolve().parent / "thinking_question.json"
"""The same, and two added tokens of the pair as if they were those around a think block."""
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


def plain_flags(target: Path) -> tuple[str, ...]:
    """Stock SGLang; no overlap, as PARSE runs on a CPU."""
    return ("--model-path", str(target), "--disable-overlap-schedule")


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
