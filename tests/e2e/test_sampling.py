"""Temperature > 0: every path samples the target's exact distribution; seeds reproduce runs."""

from __future__ import annotations

import random
from pathlib import Path

import pytest
import torch
from client import Client, parse_info, random_prompts
from conftest import SEED, Start, parse_flags
from scipy import stats
from transformers import AutoModelForCausalLM

from sglang_parse.demo.servers import awake

PROMPT = random_prompts(1, 51)[0]
NUM_SAMPLES = 240
NUM_TOKENS = 3
ACCEPTABLE_P = 1e-3


@pytest.fixture(scope="module")
def target_model(pair: tuple[Path, Path]):
    return AutoModelForCausalLM.from_pretrained(pair[0], dtype=torch.float32).eval()


def _uniform_values(model, answers: list[list[int]], temperature: float) -> list[float]:
    """Each sampled token's place in its exact distribution: uniform if and only if it is right.

    Randomised probability integral transform: F(t-1) + u * p(t), given the tokens before it.
    """
    rng = random.Random(0)
    known: dict[tuple[int, ...], torch.Tensor] = {}
    values = []
    for answer in answers:
        for place in range(1, len(answer)):
            before = tuple(answer[:place])
            if before not in known:
                with torch.no_grad():
                    logits = model(torch.tensor([[*PROMPT, *before]])).logits[0, -1]
                known[before] = torch.softmax(logits / temperature, dim=-1)
            probabilities = known[before]
            below = float(probabilities[: answer[place]].sum())
            values.append(below + rng.random() * float(probabilities[answer[place]]))
    return values


@pytest.mark.parametrize(
    ("path", "kwargs"),
    [
        ("plain", {"parse": {"enabled": False}}),
        ("fallback", {"logit_bias": {"5": 0.0001}}),
        ("token", {}),
    ],
)
def test_distribution(token: Client, target_model, path: str, kwargs: dict):
    params = {"temperature": 0.8, "max_new_tokens": NUM_TOKENS, "ignore_eos": True, **kwargs}
    answers = token.generate_all([PROMPT] * NUM_SAMPLES, 16, **params)
    assert {parse_info(answer)["mode"] for answer in answers} == {
        "parse" if path == "token" else "plain"
    }
    values = _uniform_values(target_model, [a["output_ids"] for a in answers], 0.8)
    assert stats.kstest(values, "uniform").pvalue > ACCEPTABLE_P
    # The test can fail: the same samples do not fit another temperature.
    wrong = _uniform_values(target_model, [a["output_ids"] for a in answers], 0.2)
    assert stats.kstest(wrong, "uniform").pvalue < ACCEPTABLE_P


def test_threshold_above_one_samples_the_target(semantic: Client, target_model):
    params = {"temperature": 0.8, "max_new_tokens": NUM_TOKENS, "ignore_eos": True}
    answers = semantic.generate_all([PROMPT] * NUM_SAMPLES, 16, parse={"threshold": 1.5}, **params)
    values = _uniform_values(target_model, [a["output_ids"] for a in answers], 0.8)
    assert stats.kstest(values, "uniform").pvalue > ACCEPTABLE_P


def test_the_same_server_seed_gives_the_same_samples(start_server: Start, pair):
    """One request at a time: SGLang draws from one generator per server."""
    runs = []
    for name in ("seeded-1", "seeded-2"):
        flags = ("--parse-verification", "token", *SEED)
        server = start_server(name, *parse_flags(pair, *flags))
        with awake(server):
            client = Client(server.url)
            params = {"temperature": 1.0, "top_p": 0.9, "top_k": 40, "max_new_tokens": 20}
            runs.append([client.generate(p, **params)["output_ids"] for p in random_prompts(3, 52)])
    assert runs[0] == runs[1]
    assert len({tuple(ids) for ids in runs[0]}) == 3
