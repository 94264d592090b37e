"""A public benchmark through SGLang's own harness, as in docs/benchmarks.md.

sgl-eval is not among our dependencies (it needs older pandas and datasets): this runs where its
command is on the PATH.
"""

from __future__ import annotations

import json
import shutil
import subprocess
from pathlib import Path

import pytest

from sglang_parse.tasks.assignment import make_assignment
from support.client import Client


@pytest.mark.skipif(not shutil.which("sgl-eval"), reason="pip install sgl-eval==0.1.3 elsewhere")
def test_sgl_eval_grades_a_parse_server(wordings: Client, tmp_path: Path):
    items = make_assignment(None, "", 4, None).items
    # The demo pair's problems in GSM8K's place; the pair does not write \boxed{}.
    rows = [
        {"problem": item.text, "expected_answer": str(item.reference.answer[0])} for item in items
    ]
    path = tmp_path / "problems.jsonl"
    path.write_text("".join(json.dumps(row) + "\n" for row in rows))
    command = ("sgl-eval", "run", "gsm8k", "--base-url", f"{wordings.url}/v1")
    flags = ("--from-dataset", str(path), "--out-dir", str(tmp_path), "--max-tokens", "256")
    subprocess.run([*command, *flags], check=True, timeout=300)
    (metrics,) = tmp_path.glob("sgl_eval_gsm8k_*/metrics.json")
    (answers,) = tmp_path.glob("sgl_eval_gsm8k_*/output-rs0.jsonl")
    assert len(answers.read_text().splitlines()) == len(items)
    assert json.loads(metrics.read_text())
