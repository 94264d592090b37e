"""The checks of the patch request_bounds, and the cases that it leaves to SGLang."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_parse.algorithm import NAME
from sglang_parse.core.phases import RequestPolicy
from sglang_parse.core.request import RequestState
from sglang_parse.engine.logits.adjust import LogitBias, Penalties
from sglang_parse.engine.logits.rows import LogitsRows
from sglang_parse.patches.parse import request_bounds

pytestmark = pytest.mark.compat

VOCAB = 300
BAD = {
    "no tokens": ([], "the prompt has no tokens; send at least one"),
    "too large": ([5, 300, 6], "input_ids has 300 at place 1; this model's token ids are 0..299"),
    "negative": ([5, 6, -1], "input_ids has -1 at place 2; this model's token ids are 0..299"),
}


@pytest.fixture(autouse=True)
def algorithm(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    spec = SimpleNamespace(speculative_algorithm=NAME)
    monkeypatch.setattr(request_bounds, "get_spec", lambda: spec)
    return spec


def check_prompt(ids: list[int] | None, *, has_image: bool = False, **fields: Any) -> None:
    """Runs the check of SGLang's tokenizer manager."""
    manager = SimpleNamespace(model_config=SimpleNamespace(vocab_size=VOCAB))
    obj = SimpleNamespace(contains_mm_input=lambda: has_image, **fields)
    request_bounds._check_prompt(None, manager, obj, ids)


def check_request(
    ids: list[int], images: object = None, vocab_size: int | None = VOCAB
) -> str | None:
    """Runs the check of the scheduler."""
    req = SimpleNamespace(
        origin_input_ids=array("q", ids), vocab_size=vocab_size, multimodal_inputs=images
    )
    return request_bounds._check_request(lambda *_: "SGLang's answer", req, 10, False)


@pytest.mark.parametrize("ids", [[0], [299], list(range(300))])
def test_a_prompt_of_the_models_tokens(ids: list[int]):
    check_prompt(ids)
    assert check_request(ids) == "SGLang's answer"


@pytest.mark.parametrize("case", BAD)
def test_refusals(case: str, algorithm: SimpleNamespace):
    ids, text = BAD[case]
    with pytest.raises(ValueError, match=f"PARSE: .*{text}"):
        check_prompt(ids)
    problem = check_request(ids)
    assert problem is not None
    assert problem.startswith("PARSE: ")
    assert text in problem
    algorithm.speculative_algorithm = None  # a server without PARSE is SGLang's own
    check_prompt(ids)
    assert check_request(ids) == "SGLang's answer"


def test_inputs_without_token_ids_of_the_model():
    """Embeddings, and placeholders of images, whose ids may be any numbers."""
    check_prompt(None)
    check_prompt([-7], has_image=True)
    assert check_request([2**40], images=object()) == "SGLang's answer"


def test_a_session_may_continue_without_new_tokens():
    check_prompt([], session_params={"id": "s"})
    with pytest.raises(ValueError, match="input_ids has -1"):
        check_prompt([-1], session_params={"id": "s"})


@pytest.mark.parametrize(
    ("fields", "text"),
    [
        ({"top_logprobs_num": 301}, "top_logprobs_num is 301; use 300 at most"),
        (
            {"return_logprob": True, "logprob_start_len": -2},
            r"logprob_start_len is -2; use -1 \(the output's tokens only\) or more",
        ),
        ({"positional_embed_overrides": [1]}, "positional_embed_overrides cannot be sent as JSON"),
    ],
)
def test_other_fields(fields: dict[str, Any], text: str, algorithm: SimpleNamespace):
    with pytest.raises(ValueError, match=f"PARSE: {text}"):
        check_prompt([5], **fields)
    check_prompt([5], top_logprobs_num=300, return_logprob=True, logprob_start_len=-1)
    check_prompt([5], return_logprob=False, logprob_start_len=-2)
    algorithm.speculative_algorithm = None
    check_prompt([5], **fields)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        (
            {"min_new_tokens": 1, "stop_token_ids": [5, 300]},
            "stop_token_ids has 300 beside min_new_tokens; this model's token ids are 0..299",
        ),
        ({"min_new_tokens": 1, "stop_token_ids": [-5]}, "stop_token_ids has -5 beside"),
    ],
)
def test_stop_token_ids(params: dict[str, Any], text: str, algorithm: SimpleNamespace):
    with pytest.raises(ValueError, match=f"PARSE: {text}"):
        check(**params)
    check(stop_token_ids=[-5, 300])  # never met, never looked up
    algorithm.speculative_algorithm = None
    check(**params)


def test_a_request_for_embeddings_has_no_vocabulary_size():
    assert check_request([0, 5, 1 << 20], vocab_size=None) == "SGLang's answer"
    assert "-1 at place 1" in (check_request([5, -1], vocab_size=None) or "")


def check(**given: Any) -> SamplingParams:
    """Runs both checks of sampling parameters, SGLang's and ours after it."""
    sampling = SamplingParams(**{"max_new_tokens": 4, **given})
    type(sampling).verify(sampling, VOCAB)
    request_bounds._check_sampling(None, sampling, VOCAB)
    return sampling


HUGE, TINY = 1e39, 1e-320
"""Finite in JSON; in fp32 infinite, and 0."""
BAD_NUMBERS = {
    **{name: (HUGE, float("nan")) for name in ("frequency_penalty", "presence_penalty")},
    "temperature": (HUGE, 1e400, float("nan")),
    "top_p": (HUGE, TINY, float("nan")),
    "min_p": (HUGE, TINY, float("nan")),
    "repetition_penalty": (HUGE, TINY, 1e-38, float("nan")),
    "max_new_tokens": (4.5, 4.0),
    "min_new_tokens": (2**40, 1.5, float("nan")),
    "top_k": (2**31, 1.5, HUGE, float("nan")),
    "n": (2**40, 1.5),
    "beam_width": (2**40, 1.5),
    "stream_interval": (2**40, 1.5, "1"),
    "sampling_seed": (2**63, 1.5),
    "stop_str_max_len": (1.5,),
    "stop_regex_max_len": (1.5,),
}
"""Every numeric field of ``SamplingParams`` -> values that must not reach the scheduler."""


def test_every_number_of_sampling_parameters_is_tried():
    """A new SGLang's new number fails here until somebody has looked."""
    assert {*BAD_NUMBERS} == {*request_bounds._FLOATS, *request_bounds._INTEGERS}


@pytest.mark.parametrize(
    ("name", "value"), [(name, value) for name, values in BAD_NUMBERS.items() for value in values]
)
def test_numbers_that_no_tensor_holds(name: str, value: Any):
    room = {"max_new_tokens": 2**41} if name == "min_new_tokens" else {}
    with pytest.raises(ValueError, match=name):
        check(**{**room, name: value})


@pytest.mark.parametrize(
    "bias",
    [
        *(
            {"5": value}
            for value in (HUGE, -HUGE, 1e31, 1e400, -1e400, float("nan"), "1", None, [])
        ),
        *([5], (5,), {"5": 10**400}),
    ],
)
def test_biases_that_no_logit_holds(bias: Any, algorithm: SimpleNamespace):
    with pytest.raises(ValueError, match="PARSE: logit_bias .*use"):
        check(logit_bias=bias)
    algorithm.speculative_algorithm = None
    request_bounds._check_sampling(None, SamplingParams(logit_bias=bias), VOCAB)


EXTREMES: list[dict[str, Any]] = [
    {"logit_bias": {"5": 1e30, "7": -1e30}},
    {"logit_bias": {"5": -1e30}},
    {"temperature": 1e-6},
    {"temperature": 3.4e38},
    {"repetition_penalty": 1e-20},
    {"repetition_penalty": 1e-20, "logit_bias": {"5": 1e30}, "temperature": 1e-6},
    {"repetition_penalty": 2.0, "frequency_penalty": 2.0, "presence_penalty": -2.0},
    {"min_p": 1.0, "top_p": 1.2e-38},
    {"min_p": 1.2e-38, "top_p": 1.0, "top_k": 2**31 - 1},
]
"""The largest and smallest that remain allowed."""


@pytest.mark.parametrize("params", EXTREMES)
@pytest.mark.parametrize("masked", [False, True])
def test_numbers_that_remain_allowed_leave_a_distribution(params: dict[str, Any], *, masked: bool):
    """With logits up to 1e6, also where a grammar allows one token only: nothing is NaN."""
    sampling = check(**params)
    logits = torch.linspace(-1e6, 1e6, VOCAB)[None].clone()
    if masked:
        logits[:, [i for i in range(VOCAB) if i != 5]] = float("-inf")
    req = SimpleNamespace(sampling_params=sampling, grammar=None, custom_logit_processor=None)
    req.parse_state = RequestState(RequestPolicy(threshold=0.5))
    part = LogitsRows(req, 0, 1, before=[5, 299])
    for adjuster in (Penalties, LogitBias):
        if adjuster.adjusts(req):
            adjuster([part], logits.device).apply(logits)
    assert logits.log_softmax(-1).isnan().sum() == 0
    drawn = (logits / sampling.temperature).softmax(-1)
    assert torch.multinomial(drawn, 1).shape == (1, 1)  # raises for NaN and inf
    top_p, min_p = torch.tensor([sampling.top_p]), torch.tensor([sampling.min_p])
    assert top_p > 0
    assert bool(min_p > 0) == bool(sampling.min_p)
