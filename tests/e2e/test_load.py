"""``sglang-parse load`` against the shared servers of the demo pair."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from sglang_parse import cli
from support.client import Client
from support.pages import documented_keys, report_keys


def test_load(
    demo: Client, demo_plain: Client, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
):
    """Sixteen requests, four at a time: the plain server's, PARSE's, and half of those without."""
    monkeypatch.setattr(cli, "end_on_sigterm", lambda: None)
    urls = ("--url", f"plain={demo_plain.url}", "--url", f"parse={demo.url}")
    flags = ("--concurrency", "4", "--runs", "1", "--max-tokens", "64", "--output", str(tmp_path))
    assert cli.main(["load", *urls, *flags]) == 0
    printed = capsys.readouterr().out
    content = json.loads((tmp_path / "results.json").read_text())
    lines = {(line["server"], line["requests_are"]): line for line in content["lines"]}
    assert set(lines) == {
        ("plain", "all"),
        ("parse", "all"),
        ("parse", "drafting"),
        ("parse", "off"),
    }
    for line in lines.values():
        assert line["answers"] > 0
        assert line["tokens_per_s"] > 0
        assert 0 < line["gap_p50_ms"] <= line["longest_p50_ms"] <= line["e2e_p50_ms"]
        assert line["ttft_p50_ms"] <= line["e2e_p50_ms"]
    # A plain request is sent every token by itself, a draft arrives in one piece.
    assert lines["parse", "drafting"]["gap_p50_ms"] > lines["parse", "off"]["gap_p50_ms"]
    assert "PARSE: switched off" in printed
    shares = [f"{stage}_share" for stage in ("prefill", "draft", "verify", "decode")]
    for line in content["lines"]:  # these servers publish no metrics
        assert [line.pop(share) for share in shares] == [None] * 4
        line.update(dict.fromkeys(shares, 0.0))
    del content["conditions"]["machine"], content["conditions"]["versions"]
    parents = {"conditions.machine", "conditions.versions", "conditions.commands"}
    assert documented_keys("load keys") == {*report_keys(content), *parents}
