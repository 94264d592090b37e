"""Admission: which judge decides, who is served plainly, and whose answers draft for it."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.sampling.custom_logit_processor import CustomLogitProcessor

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.counters import Counters
from sglang_parse.core.options import RequestOptions
from sglang_parse.core.phases import ANSWERS
from sglang_parse.core.policy.controller import Controller
from sglang_parse.engine.admission import admit, policy_for
from sglang_parse.engine.sources.answers import AnswerSource
from sglang_parse.engine.sources.incoming import IncomingTexts
from sglang_parse.engine.sources.text import TextParts
from sglang_parse.startup import fallback
from sglang_parse.startup.certificates import Certified

pytestmark = pytest.mark.compat

CERTIFICATE = SimpleNamespace(threshold=0.5)
ASKS = ParseConfig(question="default")


class Impure(CustomLogitProcessor):
    """Says nothing about ``is_pure``."""

    def __call__(self, logits: Any, _: Any = None) -> Any:
        return logits


def request(**fields: Any) -> Any:
    """SGLang's request, with these fields set after it was made."""
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(temperature=0)
    params.normalize(None)
    req = Req("0", "", array("q", [1]), params, vocab_size=9, lora_id=fields.pop("lora_id", None))
    for name, value in fields.items():
        assert hasattr(req, name)
        setattr(req, name, value)
    return req


def engine_of(judge: str | None) -> Any:
    return SimpleNamespace(
        config=SimpleNamespace(
            judge_name=judge, proposer="", accept_threshold=0.5, strict_classes=()
        ),
        certified=Certified(SimpleNamespace(), CERTIFICATE),
        sources=SimpleNamespace(),
        eagle=None,
    )


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
    req, engine = request(lora_id=adapter), engine_of(judge)
    policy = policy_for(engine, req, RequestOptions.read({"parse": options}, ASKS))
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
    given, req = RequestOptions.read({"parse": options}, ASKS), request()
    req.parse_policy, req.parse_incoming = policy_for(engine_of("question"), req, given), {}
    req.cache_salt = "tenant"
    parts = TextParts(ASKS, Controller(), IncomingTexts(None, Counters()))
    AnswerSource(parts).receive(req, given)
    assert (ANSWERS in req.parse_incoming) == shares


@pytest.mark.parametrize(
    ("fields", "proposer"),
    [
        ({}, "mtp"),
        ({"return_sampling_mask": True}, "none"),
        ({"multimodal_inputs": object()}, "none"),
        ({"lora_id": "a"}, "none"),
    ],
    ids=["text", "mask", "image", "adapter"],
)
def test_whom_a_head_proposes_for(fields: dict[str, Any], proposer: str):
    """It sees no image, so that it does not even run for the others that may share its prefix."""
    engine, controller = engine_of("likelihood"), Controller()
    engine.config.proposer, engine.eagle, engine.controller = "mtp", object(), controller
    policy = policy_for(engine, request(**fields), RequestOptions.read({"parse": {}}, ASKS))
    assert policy.proposer == proposer
    assert policy.uses_eagle == (not {"multimodal_inputs", "lora_id"} & {*fields})


def test_a_request_that_joins_the_queue_again_is_retracted():
    retracted: list[Any] = []
    engine = SimpleNamespace(sources=SimpleNamespace(retract=retracted.append))
    waiting = SimpleNamespace(parse_policy=object())  # before its first prefill
    running = SimpleNamespace(parse_policy=object(), parse_state=object())
    for req in (waiting, running):
        admit(engine, req)
    assert retracted == [running]


FALLBACKS = {
    "sampling mask": lambda: {"return_sampling_mask": True},
    "hidden states": lambda: {"return_hidden_states": True},
    "grammar": lambda: {"grammar": object()},
    "custom logit processor": lambda: {"custom_logit_processor": Impure.to_str()},
    "multimodal input": lambda: {"multimodal_inputs": object()},
    "input embeddings": lambda: {"input_embeds": [[0.0]]},
}
"""Reason for the fallback -> what a request with it has.

The first, third and fourth are served, too (test_fallbacks, test_lengths and test_adjusted of
tests/e2e). Hidden states need a flag that PARSE refuses, multimodal inputs another kind of target,
and SGLang makes embeddings bfloat16, which ends a server whose weights have another type.
"""


@pytest.mark.parametrize("reason", [reason for reason, *_ in fallback._PLAIN_REASONS])
@pytest.mark.parametrize("enabled", [True, False])
def test_every_fallback(reason: str, enabled: bool, monkeypatch: pytest.MonkeyPatch):
    backend = SimpleNamespace(kernel=SimpleNamespace(grammar_backend="outlines"))
    monkeypatch.setattr(fallback, "get_exec", lambda: backend)
    options = RequestOptions.read({"parse": {"enabled": enabled}}, ParseConfig())
    policy = policy_for(engine_of("question"), request(**FALLBACKS[reason]()), options)
    assert policy.plain_reason == (reason if enabled else "switched off")
    assert policy.is_plain
    assert policy.judge is None
    assert not policy.allow_async_decode


@pytest.mark.parametrize("backend", ["xgrammar", "llguidance"])
def test_a_grammar_that_can_go_ahead_is_no_reason(backend: str, monkeypatch: pytest.MonkeyPatch):
    execution = SimpleNamespace(kernel=SimpleNamespace(grammar_backend=backend))
    monkeypatch.setattr(fallback, "get_exec", lambda: execution)
    assert not fallback.unsupported_feature(request(grammar=object()))
    assert not fallback.unsupported_feature(request())
