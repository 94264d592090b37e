"""Requests for sampling masks reach PARSE's plain path (ledger: sampling_mask)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.algorithm import is_parse
from sglang_parse.patches.base import Hook, hook_patch


def _validate(original: Callable, req: Any, spec_algorithm: Any) -> str | None:
    # Such a request is served by plain target decoding, whose masks are SGLang's own.
    return None if is_parse(spec_algorithm) else original(req, spec_algorithm)


PATCH = hook_patch(
    "sampling_mask",
    {
        "sglang.srt.speculative.spec_sampling_mask.validate_spec_sampling_mask_request": Hook(
            _validate, HookType.AROUND, ("req", "spec_algorithm")
        ),
    },
    why="SGLang refuses `return_sampling_mask` under every speculative algorithm but its "
    "DFlash family. PARSE serves such a request by plain target decoding, where the mask "
    "is what SGLang's own sampler kept.",
    how="no objection for PARSE; other algorithms call the original.",
    removed_when="an algorithm can answer the question itself.",
)
