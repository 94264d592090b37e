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

from support.client import EXACT, HTTP, Client, ids_of, parse_info, random_prompts
from support.servers import ALWAYS, BLOCKS, SEED, Start, parse_flags, plugin, served

PROMPTS = [prompt[:70] for prompt in random_prompts(3, seed=59)]
FLAGS = ("--parse-verification", "token", "--parse-draft-tokens", "8", *BLOCKS, *SEED, *ALWAYS)
FEW = ("--max-running-requests", "4", "--enable-metrics")
"""Requests: a graph has tensors for as many, and the interpreter is slow."""
CHECKED = re.compile(
    r"PARSE: (no CUDA graphs|CUDA graphs) of the (.*?)(?: are checked)?: (rows differ.*|they .*)"
)
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
    ours = server.generate_all(PROMPTS, 3, parse=EXACT, **options)
    assert ids_of(ours) == ids_of(plain.generate_all(PROMPTS, 3, **options))
    server.assert_nothing_lost()
    return [parse_info(answer) for answer in ours]


def test_answers_by_graphs_are_the_plain_targets(graphs: Client, plain: Client):
    """Each kind has passed its check, and answers are by replays: no forward of several rows is."""
    infos = answers_are_the_plain_targets(graphs, plain)
    assert sum(info["accepted_tokens"] for info in infos) > 0
    found = CHECKED.findall(log_of(graphs))
    kinds = {what for _, what, _ in found}
    assert {kind for kind, _, _ in found} == {"CUDA graphs"}
    assert len(kinds) == 2 + 2 + 2  # passes and prefills of two units, two kinds of blocks
    speedups = dict(SPEEDUP.findall(HTTP.get(f"{graphs.url}/metrics").text))
    assert speedups.keys() == kinds
    assert all(float(ratio) > 1 for ratio in speedups.values())


@pytest.mark.nightly("tests/compat/test_pass_graphs.py")
def test_graphs_that_are_wrong_are_off(wrong: Client, plain: Client):
    """No row of theirs sees its context: the log and the metric say so, and answers are right."""
    answers_are_the_plain_targets(wrong, plain)
    found = CHECKED.findall(log_of(wrong))
    assert {kind for kind, _, _ in found} == {"no CUDA graphs"}
    assert all("they differ from forwards in pieces" in text for _, _, text in found)
    assert {ratio for _, ratio in SPEEDUP.findall(HTTP.get(f"{wrong.url}/metrics").text)} == {"0.0"}
