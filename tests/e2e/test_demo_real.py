"""``make demo-real``, smaller and with the question pair's draft as its model."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import measure
import pytest
from real_requests import FIRST

from support.demo_pair import DEMO


@pytest.mark.nightly("tests/unit/test_demo_real.py")
@pytest.mark.usefixtures("programs")
def test_a_small_one(tmp_path: Path, capsys: Any):
    """Every kind of work, each answer the plain server's; what texts gain is the model's affair."""
    flags = ["--model", str(DEMO / "draft"), "--of-each-kind", "1", "--max-tokens", "16"]
    assert measure.main([*flags, "--output", str(tmp_path)]) == 0
    found = json.loads((tmp_path / "results.json").read_text())
    assert len({row["kind"] for row in found["requests"]}) == 10
    for row in found["requests"]:
        assert row["is_same"]
        assert row["tokens"] > 0
        assert ("prediction" in row["sent"]) == (not row["kind"].startswith(FIRST))
        assert "prediction" not in row["nothing_sent"]
        assert "answers" not in row["nothing_sent"].get("sources", {})
    assert row["sent"]["sources"]["answers"]["drafted_tokens"] > 0
    assert "10 of 10" in capsys.readouterr().out
    assert "Each request" in (tmp_path / "report.html").read_text()
