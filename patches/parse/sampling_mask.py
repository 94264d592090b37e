"""Requests for sampling masks reach PARSE's plain path (ledger: sampling_mask)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.algorithm import is_parse
from sglang_parse.patches.base import hook_patch


def _validate(original: Callable, req: Any, spec_algorithm: Any) -> str | None:
    # Such a request is served by plain target decoding, whose masks are SGLang's own.
    return None if is_parse(spec_algorithm) else original(req, spec_algorithm)


PATCH = hook_patch(
    "sampling_mask",
    {
        "sglang.srt.speculative.spec_sampling_mask.validate_spec_sampling_mask_request": (
            _validate,
            HookType.AROUND,
        )
    },
)
