"""Memory of decode CUDA graphs at the recipes' shapes."""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.warm import Nursery

pytestmark = pytest.mark.compat

ROOT = Path(__file__).resolve().parents[2]
GIB = 2**30
QUESTION_LEN, MAX_PREFIXES = 60, 16
"""Of a server that asks questions, with the shapes of a recipe."""


def flags_of(recipe: str) -> dict[str, int]:
    text = (ROOT / "examples" / recipe).read_text().partition("\nexec ")[2]
    return {name: int(value) for name, value in re.findall(r"--([a-z-]+) (\d+) ", text)}


# Requests in SGLang's largest decode graph on 80 and 141 GB: 256, from 4 ranks on 512
# (arg_groups/memory_hook.py); GiB of the mask; and draft tokens.
RECIPES = {"serve_qwen3_32b.sh": (256, 9.8, 256), "serve_llama3_70b.sh": (512, 17.5, 128)}


def sizes_of(recipe: str) -> list[int]:
    """Tokens of the longest verify pass, context length, requests."""
    max_bs, _, draft_tokens = RECIPES[recipe]
    rows = 1 + draft_tokens + MAX_PREFIXES * QUESTION_LEN
    return [rows, flags_of(recipe)["context-length"], max_bs]


@pytest.fixture(scope="module")
def measured(nursery: Nursery) -> dict[str, dict[str, list[int]]]:
    """Recipe -> backend -> bytes, from a process of their own: it changes SGLang."""
    printed = nursery.run("-m", "support.graph_memory", json.dumps([*map(sizes_of, RECIPES)]))
    return dict(zip(RECIPES, json.loads(printed.splitlines()[-1]), strict=True))


@pytest.mark.nightly("tests/compat/test_attention_backends.py")
@pytest.mark.parametrize("recipe", RECIPES)
def test_graphs_allocate_no_mask_for_verify_passes(recipe: str, measured: dict):
    """SGLang's mask, of the longest pass for every request of a graph, would fill the GPU."""
    max_bs, mask_gib, _ = RECIPES[recipe]
    stock, parse = measured[recipe]["triton"]
    assert stock - parse > mask_gib * GIB
    assert parse < 0.3 * GIB
    stock, parse = measured[recipe]["fa3"]
    assert stock - parse > 0.4 * GIB
    # Page tables of the steps that are captured, four bytes a column.
    assert parse < 1.1 * 4 * max_bs * flags_of(recipe)["context-length"]


@pytest.mark.nightly("tests/compat/test_attention_backends.py")
def test_parses_graphs_have_no_masks_of_the_context(nursery: Nursery):
    """Their tensors are slots of contexts, and the parts of attention: 0.3 GB at 128k tokens, where
    masks as wide as the context and buffers of decode steps would be more."""
    printed = nursery.run("-m", "support.graph_memory", json.dumps([[385, 131_072, 48]]))
    (found,) = json.loads(printed.splitlines()[-1])
    blocks, passes = found["blocks"]
    slots = 8 * 131_072
    parts = 4 * 64 * (128 + 1) * 1024  # heads, and each one's values and weight, of a row and part
    assert blocks < 16 * slots + 3 * parts
    assert passes < 129 * slots + 3 * parts
    assert blocks + passes < 0.4 * GIB
    for computed, kept in zip(found["computed"], found["kept"], strict=True):
        assert computed < kept < 1.07 * computed  # SGLang's buffers of decode steps
