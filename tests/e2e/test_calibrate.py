"""A server with the selection of the paper and a certified threshold."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_parse.core.certificate import Certificate
from sglang_parse.core.config import ParseConfig
from sglang_parse.core.question import QuestionWording, render_question
from sglang_parse.core.selection import select
from sglang_parse.startup.certificates import fingerprint_of
from support.client import Client, parse_info
from support.demo_pair import DEMO, RenderedProblem
from support.servers import QUESTION, Start, parse_flags, served

SELECTION = "answer-first"
THRESHOLD = 0.4


@pytest.fixture(scope="module")
def certificate(tokenizer: Any, tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Any]:
    """Makes the certificate of the server below, before that starts."""
    args = SimpleNamespace(
        model_path=str(DEMO / "target"),
        speculative_draft_model_path=str(DEMO / "draft"),
        **dict.fromkeys(("revision", "speculative_draft_model_revision", "download_dir")),
    )
    question = render_question(tokenizer, QuestionWording.read(DEMO / "question.json"))
    fingerprint = fingerprint_of(args, ParseConfig(selection=SELECTION), question, "torch.float32")
    made = Certificate(
        threshold=THRESHOLD,
        alpha=0.01,
        delta=0.05,
        loss="token",
        requests=500,
        errors=0,
        data_set="problems",
        sampling="greedy",
        fingerprint=fingerprint,
        first_verdicts=[0.1, 0.9],
    )
    path = tmp_path_factory.mktemp("certificate") / "calibration.json"
    path.write_text(made.model_dump_json())
    return path, made


@pytest.fixture(scope="module")
def client(start_server: Start, certificate: tuple[Path, Any]) -> Iterator[Client]:
    pair = (DEMO / "target", DEMO / "draft")
    flags = ("--parse-selection", SELECTION, "--parse-threshold", str(certificate[0]))
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
        strict = select(now["verdicts"], now["prefix_ends"], threshold, "first-reject")
        assert strict.accepted_len < now["accepted_len"]
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
            assert (record["accepted_len"], record["decided_by"]) == (
                found.accepted_len,
                found.decided_by,
            )
            rejected += record["finished"] and record["verdicts"][-1] < 0.9985
    assert rejected > 0


# -- the certificate -----------------------------------------------------------------------


def test_the_server_uses_its_certificate(
    client: Client, problems: list[RenderedProblem], certificate: tuple[Path, Any]
):
    info = parse_info(ask(client, problems[0]))
    assert {record["threshold"] for record in info["trace"]} == {THRESHOLD}
    assert info["certified"] is True
    # Computed here and by the server: nothing differs.
    assert (
        Certificate(**certificate[1].model_dump() | {"fingerprint": info["fingerprint"]})
        == certificate[1]
    )


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
