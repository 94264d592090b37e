"""``sglang-parse load`` against the shared servers of the demo pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_parse import cli
from support.client import Client


@pytest.mark.nightly("tests/unit/test_compare_serving.py")
@pytest.mark.usefixtures("programs")
def test_load(
    wordings: Client,
    wordings_plain: Client,
    tmp_path: Path,
    capsys: Any,
):
    """Six requests, three at a time: the plain server's, PARSE's, and half of those without."""
    urls = ("--url", f"plain={wordings_plain.url}", "--url", f"parse={wordings.url}")
    flags = (
        *("--concurrency", "3", "--requests", "6", "--waves", "2", "--runs", "1", "--warmup", "2"),
        *("--max-tokens", "200", "--output", str(tmp_path)),
    )
    assert cli.main(["load", *urls, *flags]) == 0
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "results.json").read_text())
    found = {(v["server"], v["off_fraction"], v["group"]): v for v in content["variants"]}
    assert list(found) == [
        ("plain", 0.0, "all"),
        ("parse", 0.0, "all"),
        ("parse", 0.5, "drafting"),
        ("parse", 0.5, "off"),
        ("parse", 1.0, "all"),
    ]
    speeds = {key: variant["speeds"][0] for key, variant in found.items()}
    for speed in speeds.values():
        assert (speed["concurrency"], speed["stages"]) == (3, {})  # they publish no metrics
        assert speed["tokens_per_s"]["low"] > 0
        latency = {kind: values["p50"] for kind, values in speed["latency_ms"].items()}
        assert 0 < latency["itl"] <= latency["max_itl"] <= latency["e2e"]
        assert latency["ttft"] <= latency["e2e"]
    # A plain request is sent every token by itself, a draft arrives in one piece.
    drafting, off = (speeds["parse", 0.5, group] for group in ("drafting", "off"))
    assert drafting["latency_ms"]["itl"]["p50"] > off["latency_ms"]["itl"]["p50"]
    assert "PARSE: switched off" in printed
    # All timed answers are graded but those of the mixed load.
    graded = {(one["server"], one["off_fraction"]): one["scores"] for one in content["graded_runs"]}
    assert list(graded) == [("plain", 0.0), ("parse", 0.0), ("parse", 1.0)]
    assert {len(scores) for scores in graded.values()} == {6}
    assert graded["parse", 1.0] == graded["plain", 0.0]
    assert all(sum(scores) > 4 for scores in graded.values())
