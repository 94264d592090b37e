"""Admission: which judge decides about a request's drafts, and whose answers draft for it."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.options import RequestOptions
from sglang_parse.engine.admission import admit, policy_for
from sglang_parse.startup.certificates import Certified

pytestmark = pytest.mark.compat

CERTIFICATE = SimpleNamespace(threshold=0.5)


@pytest.mark.parametrize(
    ("judge", "adapter", "options", "expected"),
    [
        ("head", None, {}, "head"),
        ("head", "a", {}, None),
        ("head", "a", {"threshold": 0.5}, "head"),
        ("question", "a", {}, None),
        ("question", "a", {"threshold": 0.5}, "question"),
        ("likelihood", "a", {}, "likelihood"),
        ("likelihood+question", "a", {}, None),
        (None, "a", {"threshold": 0.5}, None),
        ("head", "a", {"threshold": 0.5, "enabled": False}, None),
    ],
)
def test_the_judge_of_an_adapters_drafts(
    judge: str | None, adapter: str | None, options: dict[str, Any], expected: str | None
):
    """Trained or chosen for the base weights, it judges others only if the request says so."""
    policy = policy_of(adapter, options, judge=judge)
    assert (policy.judge, policy.adapter) == (expected, adapter or "")
    assert policy.is_plain == ("enabled" in options)
    assert policy.certified == (adapter is None)


@pytest.mark.parametrize(
    ("options", "shares"),
    [
        ({}, True),
        ({"threshold": 0.5}, True),
        ({"threshold": 1.5}, True),
        ({"threshold": 0.49}, False),
        ({"threshold": 0}, False),
        ({"enabled": False}, False),
    ],
)
def test_who_accepts_more_than_the_server_shares_no_answers(options: dict[str, Any], shares: bool):
    """At threshold 0 another's answer would be the output, and any text an answer for others."""
    assert (policy_of(None, options).reuse_scope is not None) == shares


def policy_of(adapter: str | None, options: dict[str, Any], judge: str | None = "question") -> Any:
    """A server's policy for a request; the server's threshold is 0.5."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(temperature=0)
    params.normalize(None)
    req = Req("0", "", array("q", [1]), params, vocab_size=9, lora_id=adapter)
    engine = SimpleNamespace(
        config=SimpleNamespace(judge_name=judge, uses_eagle3=False, accept_threshold=0.5),
        certified=Certified(SimpleNamespace(), CERTIFICATE),
        sources=SimpleNamespace(scope_of=lambda _: ("tenant",)),
        eagle=None,
    )
    return policy_for(engine, req, RequestOptions.read({"parse": options}, ParseConfig()))


def test_a_request_that_joins_the_queue_again_is_retracted():
    retracted: list[Any] = []
    engine = SimpleNamespace(sources=SimpleNamespace(retract=retracted.append))
    waiting = SimpleNamespace(parse_policy=object())  # before its first prefill
    running = SimpleNamespace(parse_policy=object(), parse_state=object())
    for req in (waiting, running):
        admit(engine, req)
    assert retracted == [running]
