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


@pytest.fixture(scope="module")
def graphs(start_server: Start, block_pair: tuple[Path, Path]) -> Iterator[Client]:
    with plugin("graphs", TRITON_INTERPRET="1", PARSE_GRAPHS="faster"):
        yield from served(start_server, "graphs", *parse_flags(block_pair, *FLAGS), *FEW)


def test_answers_are_the_plain_targets(plain: Client, graphs: Client):
    """Passes, prefills and one kind of blocks have passed their check, and answers are by replays.
    No row of the other kind sees its context: that is off, as the log and the metric say."""
    options = {"max_new_tokens": 14, "ignore_eos": True}
    answers = graphs.generate_all(PROMPTS, 2, **options)
    assert ids_of(answers) == ids_of(plain.generate_all(PROMPTS, 2, **options))
    graphs.assert_nothing_lost()
    assert sum(parse_info(answer)["accepted_tokens"] for answer in answers) > 0
    (wrong,) = CHECKED.findall(graphs.probe.folder.with_suffix(".log").read_text())
    assert wrong.startswith("draft model: blocks")
    speedups = dict(SPEEDUP.findall(HTTP.get(f"{graphs.url}/metrics").text))
    assert speedups.pop(wrong) == "0.0"
    # Passes and prefills of 16 and 32 rows, and blocks.
    assert len(speedups) == 2 + 2 + 1
    assert all(float(ratio) > 1 for ratio in speedups.values())
