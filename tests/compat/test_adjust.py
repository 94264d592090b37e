"""Logit adjustments, of any rows and in any pieces, equal SGLang's own, one token at a time."""

from __future__ import annotations

import math
from array import array
from collections.abc import Sequence
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_parse.core.phases import RequestPolicy
from sglang_parse.core.request import RequestState

pytestmark = pytest.mark.compat

VOCAB, EOS = 13, 2
OUTPUT, DRAFT = [4, 5, 4], [5, 7, 7, 4, 11]
PARAMS: dict[str, dict[str, Any]] = {
    "nothing": {},
    "frequency": {"frequency_penalty": 0.7},
    "presence": {"presence_penalty": -0.9},
    "repetition": {"repetition_penalty": 1.3},
    "all penalties": {
        "frequency_penalty": 0.7,
        "presence_penalty": 0.4,
        "repetition_penalty": 1.3,
    },
    "min_new_tokens": {"min_new_tokens": 5, "stop_token_ids": [9]},
    "logit_bias": {"logit_bias": {"1": 3.0, "7": -4.0}},
    "everything": {
        "repetition_penalty": 1.3,
        "presence_penalty": 0.4,
        "min_new_tokens": 6,
        "logit_bias": {"7": -4.0},
    },
}


def request(name: str) -> Any:
    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.sampling.sampling_params import SamplingParams

    params = SamplingParams(**PARAMS[name])
    req = Req(name, "", array("q", [1] * 4), params, vocab_size=VOCAB, eos_token_ids={EOS})
    req.parse_state = RequestState(RequestPolicy(threshold=0.5))
    req.tokenizer = SimpleNamespace(additional_stop_token_ids=None, eos_token_id=EOS)
    return req


def sglangs(req: Any, tokens: Sequence[int], logits: torch.Tensor) -> torch.Tensor:
    """[vocab] the logits after ``tokens``, one at a time, as its decode steps adjust them."""
    from sglang.srt.sampling.sampling_batch_info import SamplingBatchInfo

    class Batch(SimpleNamespace):
        """Of the kind that can be referred to weakly."""

    batch = Batch(reqs=[req], device="cpu")
    info = SamplingBatchInfo.from_schedule_batch(batch, VOCAB)
    for token in tokens:
        info.penalizer_orchestrator.cumulate_output_tokens(torch.tensor([token]))
    adjusted = logits[None].clone()
    info.copy_for_forward().apply_logits_bias(adjusted)
    return adjusted[0]


@pytest.fixture
def exec_features(monkeypatch: pytest.MonkeyPatch) -> None:
    from sglang.srt.sampling import sampling_batch_info

    features = SimpleNamespace(enable_custom_logit_processor=False, enable_watermark=False)
    deterministic = SimpleNamespace(enable_deterministic_inference=False)
    found = SimpleNamespace(features=features, deterministic=deterministic)
    monkeypatch.setattr(sampling_batch_info, "get_exec", lambda: found)


@pytest.mark.usefixtures("exec_features")
@pytest.mark.parametrize("piece_rows", [1, 4, 1000])
def test_rows_of_a_pass(monkeypatch: pytest.MonkeyPatch, piece_rows: int):
    """Row t is adjusted for the output and t draft tokens; rows of masks for all of them."""
    from sglang_parse.engine.logits import adjust
    from sglang_parse.engine.logits.rows import LogitsRows

    monkeypatch.setattr("sglang_parse.engine.logits.rows.PIECE_BYTES", 4 * VOCAB * piece_rows)
    reqs = [request(name) for name in PARAMS]
    num_rows = len(DRAFT) + 3
    logits = torch.randn(len(reqs) * num_rows, VOCAB, generator=torch.Generator().manual_seed(2))
    expected = [
        sglangs(req, [*OUTPUT, *DRAFT[:row]], logits[place * num_rows + row])
        for place, req in enumerate(reqs)
        for row in range(num_rows)
    ]
    parts = [
        LogitsRows(req, place * num_rows, num_rows, OUTPUT, DRAFT)
        for place, req in enumerate(reqs)
        if adjust.Adjustment.adjusts(req)
    ]
    assert [part.req.rid for part in parts] == [*PARAMS][1:]
    before = logits.clone()
    adjust.adjust(logits, parts)
    torch.testing.assert_close(logits, torch.stack(expected))
    assert torch.equal(logits[:num_rows], before[:num_rows])
    assert not torch.equal(logits[num_rows:], before[num_rows:])


@pytest.mark.usefixtures("exec_features")
def test_draft_steps():
    """Each step's tokens, on the device, count in the next one."""
    from sglang_parse.engine.logits.adjust import Adjustment
    from sglang_parse.engine.logits.rows import LogitsRows

    reqs = [request(name) for name in PARAMS]
    parts = [
        LogitsRows(req, place, before=OUTPUT)
        for place, req in enumerate(reqs)
        if Adjustment.adjusts(req)
    ]
    adjustment = Adjustment(parts, torch.device("cpu"))
    generator = torch.Generator().manual_seed(3)
    for step in range(len(DRAFT)):
        logits = torch.randn(len(reqs), VOCAB, generator=generator)
        expected = [
            sglangs(req, [*OUTPUT, *DRAFT[:step]], row)
            for req, row in zip(reqs, logits, strict=True)
        ]
        adjustment.apply(logits)
        torch.testing.assert_close(logits, torch.stack(expected))
        adjustment.advance(torch.full((len(reqs),), DRAFT[step]))


def test_pure_processors():
    """One that bans the last two tokens in front of each row, of the prompt or the answer."""
    from sglang.srt.sampling.custom_logit_processor import (
        CustomLogitProcessor,
        DisallowedTokensLogitsProcessor,
    )

    from sglang_parse.engine.logits.adjust import Adjustment, adjust
    from sglang_parse.engine.logits.rows import LogitsRows
    from sglang_parse.startup.fallback import is_pure, unsupported_feature

    class Stateful(CustomLogitProcessor):
        def __call__(self, logits, _params=None):
            return logits

    class BanLastTwo(CustomLogitProcessor):
        is_pure = True

        def __call__(self, logits, custom_param_list=None):
            for row, params in enumerate(custom_param_list):
                req = params["__req__"]
                ids = [*req.origin_input_ids, *req.output_ids][-2:]
                logits[row, ids] = params["value"]
            return logits

    assert is_pure(DisallowedTokensLogitsProcessor.to_str())
    assert is_pure(BanLastTwo.to_str())
    assert not is_pure(Stateful.to_str())
    req = request("nothing")
    req.custom_logit_processor = Stateful.to_str()
    assert unsupported_feature(req) == "custom logit processor"
    assert not Adjustment.adjusts(req)
    req.custom_logit_processor = BanLastTwo.to_str()
    req.sampling_params.custom_params = {"value": -5.0, "__req__": req}
    assert not unsupported_feature(req)
    logits = torch.zeros(4, VOCAB)
    adjust(logits, [LogitsRows(req, 0, 4, [4], [8, 9])])
    banned = [row.nonzero().flatten().tolist() for row in logits]
    assert banned == [[1, 4], [4, 8], [8, 9], [8, 9]]
    adjustment = Adjustment([LogitsRows(req, 1, before=[4])], torch.device("cpu"))
    adjustment.advance(torch.tensor([0, 6]))
    logits = torch.zeros(2, VOCAB)
    adjustment.apply(logits)
    assert logits.nonzero().tolist() == [[1, 4], [1, 6]]


def test_penalties_count_each_output_token_once(monkeypatch: pytest.MonkeyPatch):
    """The work per step does not grow with the answer; a retraction takes output back."""
    from sglang_parse.engine.logits import adjust
    from sglang_parse.engine.logits.rows import LogitsRows

    req, output, sent = request("all penalties"), [*OUTPUT] * 40, []
    on_device = adjust.on_device
    monkeypatch.setattr(
        adjust,
        "on_device",
        lambda values, *args: sent.append(len(values)) or on_device(values, *args),
    )

    def counts(before: list[int]) -> torch.Tensor:
        part = LogitsRows(req, 0, 2, before, DRAFT, first=1)
        return adjust.Penalties([part], torch.device("cpu"))._count(VOCAB)

    def expected(before: list[int]) -> torch.Tensor:
        rows = [[*before, *DRAFT[: 1 + row]] for row in range(2)]
        return torch.stack([torch.bincount(torch.tensor(row), minlength=VOCAB) for row in rows])

    for end in (*range(90, len(output)), 50, 51):
        torch.testing.assert_close(counts(output[:end]), expected(output[:end]).float())
        if end not in (90, 50):
            assert max(sent) <= 4
        sent.clear()


@pytest.mark.parametrize("value", [float("inf"), float("nan")])
def test_rows_of_which_nothing_finite_is_left(value: float):
    """They are told apart from a NaN of the model, and no sampler raises on them."""
    from sglang_parse.engine.logits.adjust import adjust
    from sglang_parse.engine.logits.rows import LogitsRows

    req = request("nothing")
    req.sampling_params.logit_bias = {"3": value}
    logits = torch.zeros(3, VOCAB)
    assert adjust(logits, []) is None
    assert adjust(logits, [LogitsRows(req, 1)]).tolist() == [False, True, False]
    assert logits.isfinite().all()
    never = request("nothing")
    never.sampling_params.logit_bias = {str(token): float("-inf") for token in range(VOCAB)}
    assert adjust(logits, [LogitsRows(never, 2)]).tolist() == [False, False, True]


def test_an_error_of_a_processor_ends_its_request():
    from sglang.srt.sampling.custom_logit_processor import DisallowedTokensLogitsProcessor

    from sglang_parse.engine.logits.adjust import Adjustment
    from sglang_parse.engine.logits.rows import LogitsRows

    broken, other = request("nothing"), request("logit_bias")
    broken.custom_logit_processor = DisallowedTokensLogitsProcessor.to_str()
    broken.sampling_params.custom_params = {"token_ids": [VOCAB + 5]}
    logits = torch.zeros(2, VOCAB)
    Adjustment([LogitsRows(broken, 0), LogitsRows(other, 1)], torch.device("cpu")).apply(logits)
    assert broken.parse_state.fault.startswith("its custom logit processor failed: ")
    assert not other.parse_state.fault
    assert logits[1].nonzero().flatten().tolist() == [1, 7]


def test_likelihoods_are_numbers_whatever_is_left():
    from sglang_parse.engine.judge.scorer import MIN_LOGPROB, next_likelihoods

    logits = torch.zeros(3, 4)
    logits[1] = -float("inf")
    logits[2, 1] = float("inf")
    found = next_likelihoods(logits, torch.arange(3), torch.zeros(3, dtype=torch.int64))
    assert found[0, 0].item() == pytest.approx(-math.log(4))
    assert found[1:, 0].tolist() == [MIN_LOGPROB, MIN_LOGPROB]
    assert found.isfinite().all()
