"""What a refusal names as the fix passes the checks that refused: for every family of the table."""

from __future__ import annotations

import json
import re
from collections.abc import Callable
from functools import cache
from pathlib import Path

import pytest

from sglang_parse.startup.families import FAMILIES, TEXTS
from support.demo_pair import DEMO
from support.families import TINY
from support.launch import changed, launch
from support.random_pair import PairShape, make_pair

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("clean_environment")]
TOKEN = ("--parse-verification", "token")
K = 1024
QWEN3 = {"Qwen3-0.6B": (151936, 40 * K), "Qwen3-1.7B": (151936, 40 * K)}
QWEN3_MOE = {"Qwen3-0.6B": (151936, 40 * K), "4B": (151936, 256 * K)}
QWEN3_MOE |= {"Qwen3-30B-A3B": (151936, 256 * K)}
GEMMA_3 = {"Gemma 3 270M": (262144, 32 * K), "1B": (262144, 32 * K), "4B": (262208, 128 * K)}
LITE = {"DeepSeek-V2-Lite": (102400, 160 * K), "DeepSeek-Coder-V2-Lite": (102400, 160 * K)}
CODER = {"Qwen2.5-0.5B": (151936, 32 * K), "Coder-0.5B": (151936, 32 * K)}
E2B = {"Gemma 4 E2B": (262144, 128 * K), "E4B": (262144, 128 * K)}
Sizes = tuple[int, int]
"""Tokens of the embedding, and of the context, as published."""
PUBLISHED: dict[str, tuple[str, Sizes, dict[str, Sizes]]] = {
    "Qwen3": ("Qwen3ForCausalLM", (151936, 40 * K), QWEN3),
    "Llama 3, SmolLM2": (
        "LlamaForCausalLM",
        (128256, 128 * K),
        {"Llama-3.2-1B": (128256, 128 * K)},
    ),
    "Qwen3-MoE, Qwen3-Coder": ("Qwen3MoeForCausalLM", (151936, 256 * K), QWEN3_MOE),
    "GLM-4.5 to 4.7": (
        "Glm4MoeForCausalLM",
        (151552, 198 * K),
        {"GLM-4.5-Air": (151552, 128 * K)},
    ),
    "Qwen2.5": ("Qwen2ForCausalLM", (152064, 32 * K), CODER),
    "DeepSeek V2, V2.5, Coder V2": ("deepseek-v2", (102400, 160 * K), LITE),
    "Gemma 3": ("gemma-3", (262208, 128 * K), GEMMA_3),
    "Gemma 2": ("gemma-2", (256000, 8 * K), {"Gemma 2 2B": (256000, 8 * K)}),
    "OLMo 3": ("olmo-3", (100278, 64 * K), {"OLMo 3 7B": (100278, 64 * K)}),
    "Command A, Command R7B": ("command-a", (256000, 128 * K), {"Command R7B": (256000, 128 * K)}),
    "EXAONE 4": ("exaone-4", (102400, 128 * K), {"EXAONE 4.0 1.2B": (102400, 64 * K)}),
    "gpt-oss": ("gpt-oss", (201088, 128 * K), {"gpt-oss-20b": (201088, 128 * K)}),
    "Gemma 4, text": ("gemma-4", (262144, 256 * K), E2B),
}
"""Family -> a tiny model of it, or its class; the target's sizes, and those of the drafts that the
table names. Where there are several targets, the one with the most tokens."""
NAMED = [one for one in FAMILIES if one.draft != TEXTS and one.seen and one.architectures]


def names_in(draft: str) -> list[str]:
    """The models that a family's ``draft`` names, but for those behind an endpoint."""
    here, _, _ = draft.removesuffix(TEXTS).partition("; ")
    here = "" if "behind" in here else here.partition(", which")[0]
    return re.split(", | or | to ", here) if here else []


def test_every_draft_of_the_table_is_here():
    named = {family.name: names_in(family.draft) for family in NAMED}
    assert {name: drafts for name, drafts in named.items() if drafts} == {
        name: [*drafts] for name, (_, _, drafts) in PUBLISHED.items()
    }


@pytest.fixture(scope="module")
def tiny(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Path]:
    """A folder of a small model of this family, or with full attention, of this class."""

    @cache
    def make(kind: str) -> Path:
        folder = tmp_path_factory.mktemp("tiny")
        if kind in TINY:
            return TINY[kind].pair(folder)[0]
        model = make_pair(folder, PairShape(num_layers=1))[0]
        return changed(model, folder / "class", architectures=[kind])

    return make


def resized(model: Path, folder: Path, sizes: Sizes) -> Path:
    changed(model, folder)
    file = folder / "config.json"
    config = json.loads(file.read_text())
    names = {"vocab_size": sizes[0], "max_position_embeddings": sizes[1]}
    config.get("text_config", config).update(names)
    file.write_text(json.dumps(config))
    return folder


@pytest.mark.parametrize("family", PUBLISHED)
def test_the_drafts_that_refusals_name_are_served(
    tiny: Callable[[str], Path], family: str, tmp_path: Path
):
    """Where their context is shorter, with the context length that this refusal names."""
    kind, sizes, drafts = PUBLISHED[family]
    target = resized(tiny(kind), tmp_path / "target", sizes)
    more = (*TOKEN, *(TINY[kind].flags if kind in TINY else ()))
    for name, draft_sizes in drafts.items():
        draft = resized(tiny(kind), tmp_path / name, draft_sizes)
        if draft_sizes[1] >= sizes[1]:
            launch((target, draft), *more, ask=False)
            continue
        with pytest.raises(Exception, match="context length.*or --context-length") as error:
            launch((target, draft), *more, ask=False)
        fix = re.search(r"--context-length \d+", str(error.value))[0].split()
        launch((target, draft), *more, *fix, ask=False)


def test_the_drafts_that_it_names_for_an_unfit_one(tmp_path: Path):
    """The refusal of a draft without the tokenizer's tokens names drafts of the table."""
    draft = changed(DEMO / "draft", tmp_path / "draft", vocab_size=99)
    with pytest.raises(Exception, match=r"99 tokens.*\(for Qwen3: (.*)\)") as error:
        launch((DEMO / "target", draft), *TOKEN, ask=False)
    named = re.search(r"\(for Qwen3: (.*)\)", str(error.value))[1]
    assert names_in(named) == [*PUBLISHED["Qwen3"][2]]
