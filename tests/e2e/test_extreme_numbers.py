"""Sampling numbers at the ends of fp32: a 400, or the answer of stock SGLang."""

from __future__ import annotations

from typing import Any

import pytest

from support.client import Client, random_prompts

PROMPT = random_prompts(1, 53)[0]
LENGTH = 24
REFUSED: dict[str, list[Any]] = {
    "logit_bias": [{"5": value} for value in (1e39, -1e39, 1e31)],
    "repetition_penalty": [1e-320, 1e-38],
    "temperature": [1e39],
    "top_p": [1e-320],
    "min_p": [1e-320],
    "stream_interval": [2**40],
}
"""Values of other types are refused by SGLang itself in ``/generate``."""
ALLOWED: list[dict[str, Any]] = [
    {"logit_bias": {"5": 1e30}},
    {"logit_bias": {"5": -1e30, "7": 1e5}},
    {"repetition_penalty": 1e-20},
    {"repetition_penalty": 2.0, "frequency_penalty": 0.0, "presence_penalty": -2.0},
    {"min_p": 1.0, "top_p": 1.2e-38},
    {"min_p": 1.2e-38, "top_k": 2**31 - 1},
    {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH},
    {"stream_interval": 0},
]


@pytest.mark.parametrize("name", REFUSED)
def test_numbers_that_no_tensor_holds(semantic: Client, name: str):
    """Sampled, most of them would end the server; stock SGLang's, too."""
    for value in REFUSED[name]:
        for temperature in (0, 0.7):
            params = {"max_new_tokens": 4, "temperature": temperature, name: value}
            answer = semantic.post("/generate", {"input_ids": PROMPT, "sampling_params": params})
            assert answer.status_code == 400, params
            assert f"PARSE: {name}" in answer.text
    assert len(semantic.generate(PROMPT, max_new_tokens=4, ignore_eos=True)["output_ids"]) == 4
    semantic.assert_nothing_lost()


@pytest.mark.parametrize("params", ALLOWED)
def test_numbers_that_remain_allowed(token: Client, plain: Client, params: dict[str, Any]):
    """Greedy the tokens of stock SGLang; sampled as many."""
    params = {"max_new_tokens": LENGTH, "ignore_eos": True, **params}
    ours, theirs = (server.generate(PROMPT, **params) for server in (token, plain))
    assert ours["output_ids"] == theirs["output_ids"]
    for temperature in (1e-6, 0.7, 3.4e38):
        drawn = token.generate(PROMPT, **{**params, "temperature": temperature})
        assert len(drawn["output_ids"]) == LENGTH
    token.assert_nothing_lost()
