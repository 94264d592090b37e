"""Requests for sampling masks are served by plain decoding (ledger: sampling_mask)."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang_parse.algorithm import is_parse
from sglang_parse.patches.base import Patch, around


def _validate(original: Callable, req: Any, spec_algorithm: Any) -> str | None:
    return None if is_parse(spec_algorithm) else original(req, spec_algorithm)


PATCH = Patch(
    "sampling_mask",
    {
        "sglang.srt.speculative.spec_sampling_mask.validate_spec_sampling_mask_request": around(
            _validate
        )
    },
    why="SGLang rejects `return_sampling_mask` under every speculative algorithm but its DFlash "
    "family. PARSE serves such a request by plain decoding, with the mask of SGLang's own sampler.",
    how="accepts the request for PARSE; other algorithms call the original.",
    removed_when="an algorithm can accept such requests itself.",
)
