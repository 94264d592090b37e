"""A server with the selection of the paper and a certified threshold, and calibrate on servers."""

from __future__ import annotations

import json
import shlex
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from sglang_parse import cli
from sglang_parse.calibrate.run import NO_SEPARATION
from sglang_parse.core.selection import select
from support.calibration import demo_fingerprint, write_certificate
from support.client import Client, parse_info
from support.demo_pair import DEMO, RenderedProblem
from support.one_chain import write_task
from support.servers import QUESTION, Start, parse_flags, served

SELECTION = "answer-first"
THRESHOLD = 0.4


@pytest.fixture(scope="module")
def certificate(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The certificate of the server below, before that starts."""
    fingerprint = demo_fingerprint(selection=SELECTION).model_dump()
    folder = tmp_path_factory.mktemp("certificate")
    return write_certificate(folder, threshold=THRESHOLD, fingerprint=fingerprint)


@pytest.fixture(scope="module")
def client(start_server: Start, certificate: Path) -> Iterator[Client]:
    pair = (DEMO / "target", DEMO / "draft")
    flags = ("--parse-selection", SELECTION, "--parse-threshold", str(certificate))
    yield from served(start_server, "certified", *parse_flags(pair, *QUESTION, *flags))


def ask(client: Client, problem: RenderedProblem, **options: Any) -> dict[str, Any]:
    parse = options.pop("parse", {}) | {"trace": True}
    return client.generate(problem.prompt, **{"max_new_tokens": 160} | options, parse=parse)


# -- the selection of the paper ----------------------------------------------------------


@pytest.fixture(scope="module")
def first_rounds(client: Client, problems: list[RenderedProblem]) -> list[dict[str, Any]]:
    """Traces of some problems; at threshold 0 everything is accepted in one round."""
    prompts = [problem.prompt for problem in problems[:24]]
    answers = client.generate_all(
        prompts, 8, parse={"threshold": 0.0, "trace": True}, max_new_tokens=160
    )
    return [parse_info(answer)["trace"][0] for answer in answers]


def test_an_accepted_answer_overrules_a_rejected_prefix(
    client: Client, problems: list[RenderedProblem], first_rounds: list[dict[str, Any]]
):
    """At a threshold between the lowest prefix's verdict and the finished answer's, the answer's
    verdict accepts the draft whole, where first-reject would have rejected a prefix."""
    tried = 0
    for problem, record in zip(problems, first_rounds, strict=False):
        lowest, last = min(record["verdicts"]), record["verdicts"][-1]
        if not record["finished"] or last - lowest < 1e-4:
            continue
        tried += 1
        threshold = (lowest + last) / 2
        answer = ask(client, problem, parse={"threshold": threshold})
        (now,) = parse_info(answer)["trace"]
        assert now["draft_token_ids"] == record["draft_token_ids"]
        assert now["accepted_len"] == len(record["draft_token_ids"])
        assert now["decided_by"] == len(now["verdicts"]) - 1
        assert now["next_token_id"] is None  # the draft's end is the answer's
        strict, _ = select(now["verdicts"], now["prefix_ends"], threshold, "first-reject")
        assert strict < now["accepted_len"]
        if tried == 2:
            return
    pytest.fail("no finished draft whose answer has a higher verdict than a prefix of it")


def test_after_a_rejected_answer_the_prefixes_decide(
    client: Client, problems: list[RenderedProblem]
):
    """Every round accepts what the selection returns, for finished drafts and others."""
    rejected = 0
    for problem in problems[:8]:
        for record in parse_info(ask(client, problem, parse={"threshold": 0.9985}))["trace"]:
            found = select(
                *(record["verdicts"], record["prefix_ends"], 0.9985, SELECTION),
                is_finished=record["finished"],
            )
            assert (record["accepted_len"], record["decided_by"]) == found
            rejected += record["finished"] and record["verdicts"][-1] < 0.9985
    assert rejected > 0


# -- the certificate -----------------------------------------------------------------------


def test_the_server_uses_its_certificate(
    client: Client, problems: list[RenderedProblem], certificate: Path
):
    info = parse_info(ask(client, problems[0]))
    assert {record["threshold"] for record in info["trace"]} == {THRESHOLD}
    assert info["certified"] is True
    # Computed here and by the server: nothing differs.
    assert info["fingerprint"] == json.loads(certificate.read_text())["fingerprint"]


@pytest.mark.parametrize(
    ("options", "certified"),
    [
        ({"parse": {"threshold": 0.7}}, True),  # stricter
        ({"parse": {"threshold": 0.39}}, False),
        ({"parse": {"enabled": False}}, False),
        ({"temperature": 0.8}, False),
        ({"regex": "[a-z]+"}, False),
    ],
)
def test_a_request_that_overrides_something_is_not_certified(
    client: Client, problems: list[RenderedProblem], options: dict, certified: bool
):
    info = parse_info(ask(client, problems[0], max_new_tokens=8, **options))
    assert info["certified"] is certified


# -- sglang-parse calibrate ----------------------------------------------------------------


def calibrate(client: Client, folder: Path, *flags: str) -> tuple[int, dict[str, Any]]:
    """Returns the exit code and calibration.json of a small run on a server."""
    sizes = ("--requests", "100", "--pilot", "8", "--served", "0", "--concurrency", "16")
    own = ("--url", client.url, "--model-name", "default", "--output", str(folder))
    code = cli.main(["calibrate", *sizes, *own, *flags])
    return code, json.loads((folder / "calibration.json").read_text())


@pytest.fixture
def printed(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Any:
    """Returns what was printed since, each run of white space as a space."""
    monkeypatch.setattr(cli, "end_on_sigterm", lambda: None)
    return lambda: " ".join(capsys.readouterr().out.split())


@pytest.mark.nightly("tests/unit/test_calibrate_run.py")
def test_calibrate_tests_the_threshold_that_is_served(client: Client, tmp_path: Path, printed: Any):
    flags = (*write_task(tmp_path, 48), "--requests", "40", "--alpha", "0.1")
    code, found = calibrate(client, tmp_path / "out", *flags)
    said = printed()
    assert code == 0
    assert found["results"]["served_threshold"] == THRESHOLD
    rows = {row["threshold"]: row for row in found["results"]["thresholds"]}
    verdict = "is certified, too" if rows[THRESHOLD]["certified"] else "is NOT certified"
    assert f"The server's threshold 0.4 {verdict}: " in said
    assert "Right drafts get higher verdicts than wrong ones" in said


COIN = """
import json, sys, zlib
for line in sys.stdin:
    right = zlib.crc32(json.loads(line)["prompt"].encode()) % 2
    print(json.dumps({"score": right, "right_chars": None if right else 0}), flush=True)
"""


@pytest.mark.nightly("tests/unit/test_calibrate_run.py")
def test_calibrate_says_that_right_and_wrong_get_the_same_verdicts(
    semantic: Client, tmp_path: Path, printed: Any
):
    """A random model knows nothing; a coin says which of its drafts are right."""
    prompts = tmp_path / "prompts.jsonl"
    rows = ({"prompt": f"What is {n} + {n * n}?"} for n in range(108))
    prompts.write_text("".join(json.dumps(row) + "\n" for row in rows))
    grader = shlex.join([sys.executable, "-c", COIN])
    task = ("--task-file", str(prompts), "--grader", grader, "--max-tokens", "24")
    code, found = calibrate(semantic, tmp_path / "out", *task)
    said = printed()
    assert code == NO_SEPARATION == 3
    separation = found["results"]["separation"]
    assert separation["low"] <= 0.5 < separation["high"] < 0.7
    assert separation["right"] + separation["wrong"] == 100
    assert f"SAME verdicts as wrong ones (AUROC {separation['auroc']:.2f}, 95 % interval" in said
    assert "--parse-verification token" in said
    assert "serve with it" not in said
    assert "SAME verdicts as wrong ones" in (tmp_path / "out" / "report.html").read_text()
