"""``sglang-parse doctor`` and ``explain`` on the question pair's server."""

from __future__ import annotations

import json
import re
import signal
import time
from pathlib import Path
from typing import Any

import pytest

from sglang_parse import cli
from sglang_parse.client.program import ProgressLog
from sglang_parse.client.traced import ACCEPTED, explain_answer
from sglang_parse.core.config import ENV_VAR
from sglang_parse.doctor import served
from sglang_parse.explain import run as explain_run
from support.client import Client
from support.demo_pair import DEMO
from support.explained import assert_says, shown
from support.models import load_tokenizer
from support.one_chain import held_out_problems
from support.open_page import assert_fits

NUM_PROMPTS, NUM_ASKED = 4, 2


@pytest.fixture
def prompts(tmp_path: Path) -> Path:
    """Problems of the question pair; programs know those of the demo pair only."""
    path = tmp_path / "prompts.jsonl"
    texts = [problem.text for problem in held_out_problems(NUM_PROMPTS, seed=5)]
    path.write_text("\n".join(map(json.dumps, texts)))
    return path


def doctor(
    url: str, capsys: pytest.CaptureFixture[str], *words: str
) -> tuple[int, dict[str, Any], str]:
    """Of two prompts: exit code, lines by name, progress."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv(ENV_VAR, "")  # where it reads the server's flags to, as a launcher does
        code = cli.main(["doctor", "--url", url, "--json", "--requests", str(NUM_ASKED), *words])
    printed = capsys.readouterr()
    lines = json.loads(printed.out)["findings"]
    found = {line["check"]: line for line in lines}
    assert len(found) == len(lines)
    return code, found, printed.err


@pytest.mark.nightly("tests/compat/test_doctor.py")
def test_doctor_looks_at_a_running_server(
    demo: Client, prompts: Path, capsys: pytest.CaptureFixture[str]
):
    """Every line of a server that works, with figures of its answers, within its minute."""
    started = time.monotonic()
    code, found, progress = doctor(demo.url, capsys, "--prompts", str(prompts))
    assert (code, time.monotonic() - started < 60) == (0, True)
    assert {*found} == {"server", "PARSE", *served.NAMES}
    assert "--enable-metrics" in found.pop("CUDA graphs")["found"]
    assert {line["status"] for line in found.values()} <= {"ok", "warning"}
    answered = f"{NUM_ASKED} of {NUM_ASKED} prompts answered"
    assert f"{answered}; " in found["answers"]["found"]
    assert answered in progress
    mass = re.search(r"^mean ([\d.]+), smallest", found["verdict mass"]["found"])
    assert mass is not None
    assert float(mass[1]) > 0.99
    assert found["matched prefixes"]["status"] == "ok"
    assert re.search(
        r"^\d+% of draft tokens accepted, \d+% of the output", found["acceptance"]["found"]
    )
    assert re.search(r"^[\d.]+x over plain decoding", found["speedup"]["found"])
    demo.assert_nothing_lost()


def test_doctor_names_a_target_that_answers_nan(
    demo: Client, prompts: Path, capsys: pytest.CaptureFixture[str]
):
    with demo.probe.fault("target-verify", "nan"):
        code, found, _ = doctor(demo.url, capsys, "--prompts", str(prompts))
    assert (code, found["answers"]["status"]) == (1, "fails")
    assert found["answers"]["found"].startswith("the target answers NaN: its weights are damaged")
    assert found["answers"]["fix"].startswith("load its weights again")
    demo.assert_nothing_lost()


def test_doctor_reports_what_it_has_when_it_is_ended(
    demo: Client,
    prompts: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
):
    """SIGTERM after the first prompt."""
    end = lambda *_: signal.raise_signal(signal.SIGTERM)  # noqa: E731
    monkeypatch.setattr(ProgressLog, "__call__", end)
    code, found, _ = doctor(demo.url, capsys, "--prompts", str(prompts))
    assert code == 128 + signal.SIGTERM
    assert f"1 of {NUM_ASKED} prompts answered, then it was ended" in found["answers"]["found"]
    assert found["acceptance"]["status"] != "not checked"
    assert found["ended"]["found"] == "not done: further prompts"
    demo.assert_nothing_lost()


def test_explain_shows_what_the_traces_say(
    demo: Client, tmp_path: Path, prompts: Path, capsys: pytest.CaptureFixture[str]
):
    """Answers of the server, then the same from the file: the page shows what the traces hold."""
    texts = [problem.text for problem in held_out_problems(3, seed=5)]
    words = ["--requests", "3", "--prompt", texts[2]]
    words += ["--prompts", str(prompts), "--threshold", "0.9988"]
    output = ["--output", str(tmp_path)]
    assert cli.main(["explain", "--url", demo.url, *words, *output]) == 0
    said = capsys.readouterr().out
    page, answers = tmp_path / "explain.html", tmp_path / "answers.json"
    traces = explain_run.read(answers)
    assert [traced.prompt for traced in traces] == [texts[2], *texts]
    records = [record for traced in traces for record in traced.parse["trace"]]
    assert {record["threshold"] for record in records} == {0.9988}
    assert any(0 < record["accepted_len"] < len(record["draft_token_ids"]) for record in records)
    tokenizer = load_tokenizer(DEMO / "target")
    made = [explain_answer(traced, tokenizer.batch_decode) for traced in traces]
    for one in made:
        # Accepted segments and target tokens are the whole output, in order.
        pieces = [one.before]
        for r in one.rounds:
            pieces += [segment.text for segment in r.segments if segment.status == ACCEPTED]
            pieces.append(r.target_text)
        assert "".join(pieces) == one.text
        for text in (segment.text for r in one.rounds for segment in r.segments):
            assert all(line in said for line in text.splitlines())
    found = shown(page, 1280)
    assert_fits(found, page, 1280)
    assert_says(found, made)
    again = ["explain", str(answers), "--tokenizer", str(DEMO / "target")]
    assert cli.main([*again, "--output", str(tmp_path / "again")]) == 0
    (first, second) = (
        re.sub(r'<p class="low">.*?</p>', "", path.read_text(encoding="utf-8"), count=1)
        for path in (page, tmp_path / "again" / "explain.html")
    )
    assert first == second
