"""The checks of the patch request_bounds, and the cases that it leaves to SGLang."""

from __future__ import annotations

from array import array
from types import SimpleNamespace
from typing import Any

import pytest
from sglang.srt.sampling.sampling_params import SamplingParams

from sglang_parse.algorithm import NAME
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
        ({"positional_embed_overrides": [1]}, "positional_embed_overrides cannot be sent as JSON"),
    ],
)
def test_other_fields(fields: dict[str, Any], text: str, algorithm: SimpleNamespace):
    with pytest.raises(ValueError, match=f"PARSE: {text}"):
        check_prompt([5], **fields)
    check_prompt([5], top_logprobs_num=300)
    algorithm.speculative_algorithm = None
    check_prompt([5], **fields)


@pytest.mark.parametrize(
    ("params", "text"),
    [
        ({"top_k": 2**30 + 1}, "top_k is 1073741825; use -1 for all tokens, or 300 at most"),
        (
            {"min_new_tokens": 1, "stop_token_ids": [5, 300]},
            "stop_token_ids has 300 beside min_new_tokens; this model's token ids are 0..299",
        ),
        ({"min_new_tokens": 1, "stop_token_ids": [-5]}, "stop_token_ids has -5 beside"),
    ],
)
def test_sampling_parameters(params: dict[str, Any], text: str, algorithm: SimpleNamespace):
    def check(**given: Any) -> None:
        sampling = SamplingParams(max_new_tokens=4, **given)
        request_bounds._check_sampling(None, sampling, VOCAB)

    with pytest.raises(ValueError, match=f"PARSE: {text}"):
        check(**params)
    check(top_k=-1)
    check(stop_token_ids=[-5, 300])  # never met, never looked up
    algorithm.speculative_algorithm = None
    check(**params)


def test_a_request_for_embeddings_has_no_vocabulary_size():
    assert check_request([0, 5, 1 << 20], vocab_size=None) == "SGLang's answer"
    assert "-1 at place 1" in (check_request([5, -1], vocab_size=None) or "")
