"""A stock speculative worker is not created on a half-patched CPU (ledger: guard_cpu)."""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.patches.base import hook_patch, on_cpu_only


def _assert_patched(*_: Any, **__: Any) -> None:
    from sglang_parse.patches import assert_applied

    assert_applied(cpu_only=True)


PATCH = hook_patch(
    "guard_cpu",
    {
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker": (
            _assert_patched,
            HookType.BEFORE,
        )
    },
    on_cpu_only,
)
