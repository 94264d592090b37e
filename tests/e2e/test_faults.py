"""NaN logits end the request with an error that says whose they are; the server lives on."""

from __future__ import annotations

from pathlib import Path

import pytest
from client import Client, parse_info, random_prompts
from conftest import SEED, Start, parse_flags
from random_pair import PairShape, make_pair
from safetensors.torch import load_file, save_file

from sglang_parse.demo.servers import awake

TARGET_POISON, DRAFT_POISON = 301, 302
"""Tokens whose embedding is NaN in the target, and in the draft."""


def _poison(folder: Path, token_id: int) -> None:
    path = folder / "model.safetensors"
    weights = load_file(path)
    weights["model.embed_tokens.weight"][token_id] = float("nan")
    save_file(weights, path, metadata={"format": "pt"})


@pytest.fixture(scope="module")
def poisoned(start_server: Start, tmp_path_factory: pytest.TempPathFactory):
    pair = make_pair(tmp_path_factory.mktemp("poisoned"), PairShape(num_layers=2, seed=3))
    _poison(pair[0], TARGET_POISON)
    _poison(pair[1], DRAFT_POISON)
    server = start_server("poisoned", *parse_flags(pair, "--parse-verification", "token", *SEED))
    with awake(server):
        yield Client(server.url)


@pytest.mark.parametrize("temperature", [0, 1])
@pytest.mark.parametrize(
    ("token_id", "whose"), [(TARGET_POISON, "target"), (DRAFT_POISON, "draft")]
)
def test_nan_logits(poisoned: Client, token_id: int, whose: str, temperature: float):
    healthy, sick = random_prompts(2, 61)
    params = {"temperature": temperature, "max_new_tokens": 12, "ignore_eos": True}
    body = {"input_ids": [*sick, token_id, 9], "sampling_params": params}
    response = poisoned.post("/generate", body)
    text = response.text
    aborted = response.status_code == 200 and '"type":"abort"' in text.replace(" ", "")
    assert response.status_code == 500 or aborted
    assert f"NaN in the {whose} model's logits" in text
    assert parse_info(poisoned.generate(healthy, **params))["mode"] == "parse"
    poisoned.flush()
