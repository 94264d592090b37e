"""Sampling numbers at the ends of fp32: a 400, or the answer of stock SGLang."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from typing import Any

from support.client import Client, random_prompts

PROMPT = random_prompts(1, 53)[0]
LENGTH = 16
REFUSED: list[dict[str, Any]] = [{"logit_bias": {"5": 1e39}}, {"repetition_penalty": 1e-320}]
"""One of each kind; tests/compat/test_request_bounds.py has all."""
ALLOWED: list[dict[str, Any]] = [
    {"logit_bias": {"5": 1e30}},
    {"logit_bias": {"5": -1e30, "7": 1e5}},
    {"repetition_penalty": 1e-20},
    # Not with a repetition penalty: see test_adjusted.
    {"frequency_penalty": 0.0, "presence_penalty": -2.0},
    {"repetition_penalty": 2.0},
    {"min_p": 1.0, "top_p": 1.2e-38},
    {"min_p": 1.2e-38, "top_k": 2**31 - 1},
    {"max_new_tokens": LENGTH, "min_new_tokens": LENGTH},
    {"stream_interval": 0},
]


def test_refused_numbers_leave_the_server_as_it_was(semantic: Client):
    """Sampled, most of them would end the server; stock SGLang's, too."""
    for refused in REFUSED:
        params = {"max_new_tokens": 4, "temperature": 0.7, **refused}
        answer = semantic.post("/generate", {"input_ids": PROMPT, "sampling_params": params})
        assert answer.status_code == 400, params
        assert f"PARSE: {next(iter(refused))}" in answer.text
    assert len(semantic.generate(PROMPT, max_new_tokens=4, ignore_eos=True)["output_ids"]) == 4
    semantic.assert_nothing_lost()


def test_numbers_that_remain_allowed(token: Client, plain: Client):
    """Greedy the tokens of stock SGLang; sampled as many. All at once: none disturbs another."""

    def send(client: Client, params: dict[str, Any], temperature: float) -> list[int]:
        params = {"max_new_tokens": LENGTH, "ignore_eos": True, **params}
        return client.generate(PROMPT, **params, temperature=temperature)["output_ids"]

    temperatures = (0, 1e-6, 0.7, 3.4e38)
    with ThreadPoolExecutor(len(ALLOWED) * len(temperatures)) as pool:
        ours = [
            [pool.submit(send, token, params, temperature) for temperature in temperatures]
            for params in ALLOWED
        ]
        theirs = [pool.submit(send, plain, params, 0) for params in ALLOWED]
    for params, (greedy, *sampled), plainly in zip(ALLOWED, ours, theirs, strict=True):
        assert greedy.result() == plainly.result(), params
        assert [len(drawn.result()) for drawn in sampled] == [LENGTH] * len(sampled), params
    token.assert_nothing_lost()
