"""A stock speculative worker is not created on a half-patched CPU (ledger: guard_cpu)."""

from __future__ import annotations

from typing import Any

from sglang_parse.patches.base import Patch, before


def _assert_patched(*_: Any, **__: Any) -> None:
    from sglang_parse.patches import assert_applied

    assert_applied(cpu_only=True)


PATCH = Patch(
    "guard_cpu",
    {
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker": before(
            _assert_patched
        )
    },
    why="PARSE checks its patches when its worker is created; a stock speculative worker would "
    "run without the check.",
    how="before SGLang creates one, checks every patch that a CPU needs; one that is not in force "
    "stops the server with its name. Only on machines without an accelerator.",
    removed_when="SGLang stops when a hook cannot be applied.",
)
