"""Where the host may wait for the device. On a GPU each of them can leave it without work, so a new
one has to say why it must be there."""

from __future__ import annotations

import ast
from collections.abc import Iterator
from pathlib import Path

import pytest

import sglang_parse

pytestmark = pytest.mark.unit

ROOT = Path(sglang_parse.__file__).parent
WAITING = {"tolist", "item", "cpu", "synchronize", "nonzero", "numpy"}
"""Methods of tensors, copies and events that return when the device is ready."""
WAITS = {
    "device.py:HostCopy.tolist": "a copy that was sent; returns when it has arrived",
    "engine/verify.py:TargetForward.wait": "a pass's result: the next plan depends on it",
    "engine/target.py:PrefillForward.wait": "first tokens, when SGLang processes the prefill",
    "engine/drafting/chunk.py:DraftChunk.wait": "draft tokens, all but the last while others run",
    "engine/drafting/kv_marks.py:DraftKvMarks._marked_lengths": "how much draft KV the radix cache "
    "gave a request, or left it when SGLang had processed its prefill",
    "engine/graph_check.py:_timed": "at the start: a graph is timed against a forward in pieces",
    "engine/eagle.py:EagleDecoder.propose": "proposals: they are rows of the pass that follows",
    "engine/logits/adjust.py:_OnHost.advance": "a grammar walks on the host, token by token",
    "engine/judge/scorer.py:encode_hidden_states": "requests that return hidden states",
    "attention/flashinfer.py:ParseFlashInferBackend._planning": "FlashInfer plans on the host",
}
ON_HOST = {
    "engine/logits/grammar.py:_allowed": "NumPy words of a grammar's mask",
    "engine/prefill.py:prefill": "``seq_lens_cpu``",
    "engine/prefill.py:take_prefilled": "``seq_lens_cpu``",
    "core/text_match.py:TextMatch.rest": "tokens in an array",
    "core/prompt_match.py:PromptMatch.rest": "tokens in an array",
    "attention/native.py:MaskedTorchNativeBackend.init_forward_metadata": "runs on a CPU only",
    "attention/native.py:_masked_parts": "runs on a CPU only",
}
FOLDERS = ("engine", "attention", "core")


def calls(path: Path) -> Iterator[str]:
    """The functions of a module that call one of ``WAITING``, as path:Class.function."""

    def walk(node: ast.AST, names: tuple[str, ...]) -> Iterator[str]:
        for child in ast.iter_child_nodes(node):
            inner = names
            if isinstance(child, ast.ClassDef | ast.FunctionDef):
                inner = (*names, child.name)
            is_call = isinstance(child, ast.Call) and isinstance(child.func, ast.Attribute)
            if is_call and child.func.attr in WAITING:
                yield f"{path.relative_to(ROOT)}:{'.'.join(names)}"
            yield from walk(child, inner)

    yield from walk(ast.parse(path.read_text(encoding="utf-8")), ())


def test_the_host_waits_nowhere_else():
    paths = [ROOT / "device.py", *(p for folder in FOLDERS for p in (ROOT / folder).rglob("*.py"))]
    found = {call for path in paths for call in calls(path)}
    assert found == WAITS.keys() | ON_HOST.keys()
