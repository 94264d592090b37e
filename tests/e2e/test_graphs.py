"""PARSE's CUDA graphs in a server, without a GPU: passes, the draft model's prefills and blocks.

A replay runs what a capture would have recorded (``support/plugins/graphs``), with attention by
Triton's kernels in the interpreter; the models' own backend is ``torch_native``. At start PARSE
checks each kind both ways, as it does on a GPU.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path

import pytest

from support.client import HTTP, Client, ids_of, parse_info, random_prompts
from support.servers import ALWAYS, BLOCKS, SEED, Start, parse_flags, plugin, served

PROMPTS = [prompt[:70] for prompt in random_prompts(2, seed=59)]
FLAGS = ("--parse-verification", "token", "--parse-draft-tokens", "8", *BLOCKS, *SEED, *ALWAYS)
pytestmark = pytest.mark.nightly("tests/compat/test_pass_graphs.py")
FEW = ("--max-running-requests", "2", "--enable-metrics")
"""Requests: a graph has tensors for as many, and the interpreter is slow."""
CHECKED = re.compile(r"PARSE: no CUDA graph of the (.*?): it differs from forwards in pieces")
SPEEDUP = re.compile(r'parse_graph_speedup\{.*graph="(.*?)".*\} (\S+)')


def graphs_of(
    start_server: Start, pair: tuple[Path, Path], name: str, mode: str
) -> Iterator[Client]:
    with plugin("graphs", TRITON_INTERPRET="1", PARSE_GRAPHS=mode):
        yield from served(start_server, name, *parse_flags(pair, *FLAGS), *FEW)


@pytest.fixture(scope="module")
def graphs(start_server: Start, block_pair: tuple[Path, Path]) -> Iterator[Client]:
    yield from graphs_of(start_server, block_pair, "graphs", "faster")


@pytest.fixture(scope="module")
def wrong(start_server: Start, block_pair: tuple[Path, Path]) -> Iterator[Client]:
    yield from graphs_of(start_server, block_pair, "wrong-graphs", "wrong")


def log_of(server: Client) -> str:
    return server.probe.folder.with_suffix(".log").read_text()


def answers_are_the_plain_targets(server: Client, plain: Client) -> list[dict]:
    options = {"max_new_tokens": 14, "ignore_eos": True}
    ours = server.generate_all(PROMPTS, 2, **options)
    assert ids_of(ours) == ids_of(plain.generate_all(PROMPTS, 2, **options))
    server.assert_nothing_lost()
    return [parse_info(answer) for answer in ours]


def test_answers_by_graphs_are_the_plain_targets(graphs: Client, plain: Client):
    """Each kind has passed its check, and answers are by replays: no forward of several rows is."""
    infos = answers_are_the_plain_targets(graphs, plain)
    assert sum(info["accepted_tokens"] for info in infos) > 0
    assert not CHECKED.findall(log_of(graphs))
    speedups = dict(SPEEDUP.findall(HTTP.get(f"{graphs.url}/metrics").text))
    # Passes and prefills of 16 and 32 rows, two kinds of blocks.
    assert len(speedups) == 2 + 2 + 2
    assert all(float(ratio) > 1 for ratio in speedups.values())


def test_graphs_that_are_wrong_are_off(wrong: Client, plain: Client):
    """No row of theirs sees its context: the log and the metric say so, and answers are right."""
    answers_are_the_plain_targets(wrong, plain)
    found = CHECKED.findall(log_of(wrong))
    assert len(found) == 1 + 1 + 2  # of passes and prefills the smallest
    assert SPEEDUP.findall(HTTP.get(f"{wrong.url}/metrics").text) == [
        (what, "0.0") for what in found
    ]
