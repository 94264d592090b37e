"""Servers under test: shared by name, the plugins they load, and the flags they start with."""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import psutil
import pytest

from sglang_parse.client.pool import Pool
from sglang_parse.client.servers import (
    COMMON_FLAGS,
    MAX_RUNNING_REQUESTS,
    Server,
    ServerSpec,
    StartProcess,
    awake,
)
from support.client import Client
from support.demo_pair import DEMO
from support.starts import probe_folder, record_starts

record_starts(Server)
PLUGINS = Path(__file__).resolve().parent / "plugins"
GIB = 1 << 30
MAX_SERVERS = max(4, int((psutil.virtual_memory().total / GIB - 4) / 2.6))
"""Servers alive at a time, for each of two processes of tests; one takes 0.9 to 1.3 GB, and 2.3
where it does not start from the warm process."""


@dataclass(frozen=True)
class Start:
    """``start(name, *flags)``: a server of that name, ready and suspended, restarted if it had
    to end for another. Its first flags are ``common``."""

    pool: Pool

    def __call__(self, name: str, *flags: str, common: Sequence[str] = COMMON_FLAGS) -> Server:
        # An idle server otherwise keeps one of the machine's cores busy.
        return self.pool.server(ServerSpec(name, (*flags, "--sleep-on-idle"), (*common,)))


@contextlib.contextmanager
def shared_servers(logs: Path, start_process: StartProcess) -> Iterator[Start]:
    """All end with the block."""
    launch = partial(start_probed, start=start_process)
    with Pool([], logs, max_alive=MAX_SERVERS, launch=launch, stop_limit_s=0) as pool:
        yield Start(pool)


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
    folder = probe_folder(log)
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

UNLIMITED = tuple(
    flag
    for flag in COMMON_FLAGS
    if flag not in ("--max-running-requests", str(MAX_RUNNING_REQUESTS))
)
"""What a user must give on a CPU, and a small KV pool: servers under test share the memory."""
COPIES = ("--parse-prompt-drafts", "on")
"""As by default."""
PARSE = ("--speculative-algorithm", "PARSE", "--parse-prompt-drafts", "off")
"""Most tests count what one source drafts; COPIES behind it is a server as users start it."""
QUESTION = ("--parse-question", str(DEMO / "question.json"))
THINKING_QUESTION = Path(__file__).resolve().parent / "thinking_question.json"
"""The same, and two added tokens of the pair as if they were those around a think block."""
# SGLang draws from one generator per server.
SEED = ("--random-seed", "7")
ALWAYS = ("--parse-drafting", "always")
"""Whether it pays or not; a request can ask for it, too."""
EVERY_LINE = ("--decode-log-interval", "1")
SMALL_CHUNKS = ("--chunked-prefill-size", "256")
BLOCKS = ("--parse-draft-parallel-tokens", "4")
"""For drafts that have a mask token."""
OVERLAP = ("--parse-overlap", "on")
AHEAD = {"PARSE_PROBE_AHEAD": "1"}
"""Environment of a server whose host runs ahead of the device, as on a GPU."""
CUSTOM = "--enable-custom-logit-processor"
CHAT = ("--reasoning-parser", "qwen3", "--tool-call-parser", "qwen")
"""Thoughts and tool calls apart from the answer."""
SEMANTIC = (
    *("--parse-question", str(THINKING_QUESTION), "--parse-segment", "tokens:3"),
    *("--parse-draft-tokens", "20", "--parse-draft-chunk", "6", "--parse-max-prefixes", "16"),
    *(*SMALL_CHUNKS, *SEED, CUSTOM),
)
"""Semantic verification of the random pair."""


def plain_flags(target: Path) -> tuple[str, ...]:
    """Stock SGLang; no overlap, as PARSE runs on a CPU."""
    return ("--model-path", str(target), "--disable-overlap-schedule")


def parse_flags(pair: tuple[Path, Path], *flags: str) -> tuple[str, ...]:
    """A PARSE server that asks a question unless ``flags`` say otherwise.

    ``PARSE_TEST_FLAGS`` runs a whole suite another way: "--parse-overlap on", for one.
    """
    target, draft = pair
    named = {"--parse-question", "--parse-judge", "--parse-verification"} & {*flags}
    question = () if named else ("--parse-judge", "question")
    return (
        *("--model-path", str(target), *PARSE, "--speculative-draft-model-path", str(draft)),
        *question,
        *flags,
        *os.environ.get("PARSE_TEST_FLAGS", "").split(),
    )


def shared(
    start_server: Start,
    name: str,
    *flags: str,
    common: Sequence[str] = COMMON_FLAGS,
    **variables: str,
) -> Iterator[Client]:
    """The server of a fixture that several files use; it is awake while a module uses it.

    ``variables`` are its own in the environment.
    """
    with pytest.MonkeyPatch.context() as environ:
        for variable, value in variables.items():
            environ.setenv(variable, value)
        server = start_server(name, *flags, common=common)
    with awake(server):
        yield Client.of(server)


def served(start_server: Start, name: str, *flags: str, **more: Any) -> Iterator[Client]:
    """As ``shared``, of a server that ends with its module: its memory is for those shared."""
    yield from shared(start_server, name, *flags, **more)
    start_server.pool.end(name)
