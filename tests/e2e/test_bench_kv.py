"""``make bench-kv``, smaller: PARSE holds what its phases need, STANDALONE a standing reserve."""

from __future__ import annotations

import json
from argparse import Namespace
from pathlib import Path

import pytest
from rich.console import Console

from sglang_parse.bench import kv
from sglang_parse.bench.harness import servers
from sglang_parse.bench.harness.demo_pair import DEMO_PAIR
from sglang_parse.bench.harness.kv_log import Held
from sglang_parse.core.config import ParseConfig
from support.warm import Nursery


def test_bench_kv(tmp_path: Path, nursery: Nursery, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(servers, "start_process", nursery.start)
    output = tmp_path / "bench_kv.json"
    # Enough of them that the first drafts, judged at many places, are few.
    load = Namespace(pair=DEMO_PAIR, problems=16, concurrency=8, output=output)
    kv.run(load, Console(quiet=True))
    parse, short, long = json.loads(output.read_text()).values()
    draft_tokens = ParseConfig().draft_tokens
    # A standing reserve: two windows for every request in every iteration.
    assert (short["mean"], short["peak"]) == (12, 12)
    assert (long["mean"], long["peak"]) == (2 * (draft_tokens + 1),) * 2
    # By phase: much less on average; at most a draft, the anchor and the questions of one pass.
    assert parse["mean"] < long["mean"] / 2
    longest_question = 24
    assert parse["peak"] <= 1 + draft_tokens + ParseConfig().max_prefixes * longest_question


def test_an_empty_log_is_an_error():
    with pytest.raises(ValueError, match="plugin"):
        Held.of([], 1.0)
