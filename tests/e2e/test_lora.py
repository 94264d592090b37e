"""LoRA adapters on the target are drafted for by the base draft, in one batch with the base model.

The target's generation_config.json sets a repetition penalty, which chat requests have by default.
"""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from support.client import EXACT, Client, assert_same, parse_info, random_prompts
from support.random_adapter import two_adapters
from support.servers import (
    AHEAD,
    BLOCKS,
    OVERLAP,
    SEED,
    SEMANTIC,
    Start,
    parse_flags,
    plain_flags,
    served,
)

pytestmark = pytest.mark.nightly("tests/compat/test_lora_rows.py")

PROMPTS = random_prompts(3, 71)
# A seed in all of them: the probe's seeds are those of a whole batch.
LIMIT = {"max_new_tokens": 40, "ignore_eos": True, "sampling_seed": 5}
LOUD, QUIET = {"lora_path": "loud"}, {"lora_path": "quiet"}
GRAMMAR = {"regex": "([a-z]: [0-9]{2}\n){4,9}"}
SAMPLED = {"temperature": 1.2, "top_k": 50}
CASES: dict[str, dict[str, Any]] = {
    "base": {"parse": EXACT},
    "loud": {"top": LOUD},
    "quiet": {"top": QUIET},
    "judged": {"top": QUIET, "parse": EXACT},
    "with log probabilities": {"top": {**QUIET, "return_logprob": True}},
    "with a penalty": {"top": QUIET, "repetition_penalty": 1.4},
    "with a grammar": {"top": QUIET, "regex": "[a-z ]{300,400}"},
    "sampled": {"top": QUIET, **SAMPLED},
}


@pytest.fixture(scope="module")
def target(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> Path:
    target = tmp_path_factory.mktemp("penalized") / "target"
    shutil.copytree(pair[0], target)
    path = target / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"repetition_penalty": 1.1}))
    return target


@pytest.fixture(scope="module")
def lora_flags(target: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[str, ...]:
    return two_adapters(target, tmp_path_factory.mktemp("lora"))


@pytest.fixture(scope="module")
def plain_lora(start_server: Start, target: Path, lora_flags: tuple[str, ...]) -> Iterator[Client]:
    yield from served(start_server, "plain-lora", *plain_flags(target), *lora_flags, *SEED)


@pytest.fixture(scope="module")
def parse_lora(
    start_server: Start,
    target: Path,
    block_pair: tuple[Path, Path],
    lora_flags: tuple[str, ...],
) -> Iterator[Client]:
    """Asks questions, with the overlap schedule, and drafts in blocks."""
    flags = parse_flags((target, block_pair[1]), *SEMANTIC, *OVERLAP, *BLOCKS, *lora_flags)
    yield from served(start_server, "parse-lora", *flags, **AHEAD)


def test_adapters_are_drafted_for_in_one_batch(plain_lora: Client, parse_lora: Client):
    jobs = [(prompt, name) for prompt in PROMPTS for name in CASES]

    def ask_all(client: Client, cases: dict[str, dict[str, Any]]) -> list[dict[str, Any]]:
        with ThreadPoolExecutor(len(jobs)) as pool:
            return [*pool.map(lambda job: client.generate(job[0], **LIMIT, **cases[job[1]]), jobs)]

    plain = {name: {k: v for k, v in case.items() if k != "parse"} for name, case in CASES.items()}
    keys = [(str(prompt), name) for prompt, name in jobs]
    expected = dict(zip(keys, ask_all(plain_lora, plain), strict=True))
    answers = ask_all(parse_lora, CASES)
    accepted = dict.fromkeys(CASES, 0)
    for (prompt, name), answer in zip(jobs, answers, strict=True):
        wanted, info = expected[str(prompt), name], parse_info(answer)
        assert_same(answer, wanted)
        assert info["mode"] == "parse"
        assert info["rounds"] > 0
        # A question was not chosen for an adapter: its requests are compared token by token.
        assert info.get("judge") == ("question" if "parse" in CASES[name] else None)
        accepted[name] += info["accepted_tokens"]
        left, right = (
            [row[0] for row in a["meta_info"].get("output_token_logprobs", ())]
            for a in (answer, wanted)
        )
        assert left == pytest.approx(right, abs=1e-4)
        # Not vacuous: the adapter changes the output.
        is_same = answer["output_ids"] == expected[str(prompt), "base"]["output_ids"]
        assert is_same == (name == "base")
    assert accepted["base"] == accepted["judged"] == 0
    assert accepted["quiet"] > 0
    assert accepted["with a penalty"] > 0
    parse_lora.assert_nothing_lost()


def test_a_second_turn_finds_the_adapters_kv(plain_lora: Client, parse_lora: Client):
    """In the radix cache, where the draft's KV of the first turn is, too."""
    turns: list[list[dict[str, Any]]] = []
    for client in (plain_lora, parse_lora):
        first = client.generate(PROMPTS[0], top=QUIET, **LIMIT)
        both = [*PROMPTS[0], *first["output_ids"], *PROMPTS[1]]
        turns.append([first, client.generate(both, top=QUIET, **LIMIT)])
    for wanted, answer in zip(*turns, strict=True):
        assert_same(answer, wanted)
    assert turns[1][1]["meta_info"]["cached_tokens"] >= len(PROMPTS[0])
    parse_lora.assert_nothing_lost()


def test_the_models_default_penalty(plain_lora: Client, parse_lora: Client):
    """As Qwen2.5's: chat requests that set none are drafted and verified under it."""
    body = {
        "model": "default",
        "messages": [{"role": "user", "content": "1 + 2"}],
        "max_tokens": 60,
        "temperature": 0,
        "ignore_eos": True,
        "custom_params": {"parse": EXACT},
        "return_meta_info": True,
    }
    texts = []
    for penalty in ({}, {"repetition_penalty": 1.0}):
        replies = [c.post("/v1/chat/completions", body | penalty) for c in (plain_lora, parse_lora)]
        wanted, answer = (reply.raise_for_status().json()["choices"][0] for reply in replies)
        assert answer["message"]["content"] == wanted["message"]["content"]
        (info,) = answer["meta_info"]["parse"]
        assert (info["mode"], info["rounds"] > 0) == ("parse", True)
        texts.append(answer["message"]["content"])
    assert texts[0] != texts[1]
