"""LoRA requests are served plainly, with their adapter, beside drafting requests."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch
from client import Client, parse_info, random_prompts
from conftest import SEED, Start, parse_flags, served
from safetensors.torch import save_file
from transformers import AutoConfig

PROMPTS = random_prompts(3, 71)
LIMIT = {"max_new_tokens": 40, "ignore_eos": True}
ADAPTER = {"lora_path": "loud"}
RANK = 4


def make_adapter(folder: Path, model: Path) -> Path:
    """A random adapter, in PEFT's format, large enough to change the text."""
    config = AutoConfig.from_pretrained(model)
    widths = {
        "q_proj": config.num_attention_heads * config.head_dim,
        "v_proj": config.num_key_value_heads * config.head_dim,
    }
    generator = torch.Generator().manual_seed(5)
    weights = {}
    for layer in range(config.num_hidden_layers):
        for name, width in widths.items():
            stem = f"base_model.model.model.layers.{layer}.self_attn.{name}"
            shapes = {"lora_A": (RANK, config.hidden_size), "lora_B": (width, RANK)}
            for part, shape in shapes.items():
                weights[f"{stem}.{part}.weight"] = 0.3 * torch.randn(shape, generator=generator)
    folder.mkdir()
    save_file(weights, folder / "adapter_model.safetensors")
    content = {
        "peft_type": "LORA",
        "task_type": "CAUSAL_LM",
        "r": RANK,
        "lora_alpha": 2 * RANK,
        "lora_dropout": 0.0,
        "bias": "none",
        "target_modules": sorted(widths),
    }
    (folder / "adapter_config.json").write_text(json.dumps(content))
    return folder


@pytest.fixture(scope="module")
def lora_flags(
    pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> tuple[str, ...]:
    adapter = make_adapter(tmp_path_factory.mktemp("lora") / "adapter", pair[0])
    return (
        *("--enable-lora", "--lora-paths", f"loud={adapter}", "--lora-backend", "torch_native"),
        *("--max-loras-per-batch", "2", *SEED),
    )


@pytest.fixture(scope="module")
def plain_lora(
    start_server: Start, pair: tuple[Path, Path], lora_flags: tuple[str, ...]
) -> Iterator[Client]:
    flags = ("--model-path", str(pair[0]), "--disable-overlap-schedule", *lora_flags)
    yield from served(start_server, "plain-lora", *flags)


@pytest.fixture(scope="module")
def parse_lora(
    start_server: Start, pair: tuple[Path, Path], lora_flags: tuple[str, ...]
) -> Iterator[Client]:
    flags = parse_flags(
        pair, "--parse-verification", "token", "--parse-draft-tokens", "8", *lora_flags
    )
    yield from served(start_server, "parse-lora", *flags)


def test_adapters_beside_drafts(plain_lora: Client, parse_lora: Client):
    tops = (None, ADAPTER, {**ADAPTER, "return_logprob": True})
    jobs = [(prompt, top) for prompt in PROMPTS for top in tops]
    expected = [plain_lora.generate(prompt, top=top, **LIMIT) for prompt, top in jobs]
    with ThreadPoolExecutor(len(jobs)) as pool:
        running = [pool.submit(parse_lora.generate, p, top=top, **LIMIT) for p, top in jobs]
        answers = [job.result() for job in running]
    for (_, top), answer, wanted in zip(jobs, answers, expected, strict=True):
        assert answer["output_ids"] == wanted["output_ids"]
        info = parse_info(answer)
        if top is None:
            assert info["mode"] == "parse"
            assert info["accepted_tokens"] > 0
        else:
            assert info["mode"] == "plain"
            assert info["reason"] in ("LoRA", "log probabilities")
            assert info["drafted_tokens"] == 0
    # The adapter matters, or the rest would be vacuous.
    assert expected[0]["output_ids"] != expected[1]["output_ids"]
    parse_lora.assert_nothing_lost()
