"""LoRA requests fall back to plain decoding with their adapter, next to drafting requests."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from support.client import Client, parse_info, random_prompts
from support.random_adapter import make_adapter
from support.servers import BLOCKS, SEED, Start, parse_flags, plain_flags, served

PROMPTS = random_prompts(3, 71)
LIMIT = {"max_new_tokens": 40, "ignore_eos": True}
ADAPTER = {"lora_path": "loud"}


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
    yield from served(start_server, "plain-lora", *plain_flags(pair[0]), *lora_flags)


@pytest.fixture(scope="module")
def parse_lora(
    start_server: Start, block_pair: tuple[Path, Path], lora_flags: tuple[str, ...]
) -> Iterator[Client]:
    flags = parse_flags(
        block_pair,
        *("--parse-verification", "token", "--parse-draft-tokens", "8", *BLOCKS, *lora_flags),
    )
    yield from served(start_server, "parse-lora", *flags)


def test_adapters_batched_with_drafts(plain_lora: Client, parse_lora: Client):
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
            assert info["reason"] == "LoRA"
            assert info["drafted_tokens"] == 0
    # Not vacuous: the adapter changes the output.
    assert expected[0]["output_ids"] != expected[1]["output_ids"]
    parse_lora.assert_nothing_lost()
