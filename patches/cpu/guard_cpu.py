"""A stock speculative worker is not created on a half-patched CPU (ledger: guard_cpu)."""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.patches.base import Hook, hook_patch, on_cpu_only


def _assert_patched(*_: Any, **__: Any) -> None:
    from sglang_parse.patches import assert_applied

    assert_applied(cpu_only=True)


PATCH = hook_patch(
    "guard_cpu",
    {
        "sglang.srt.speculative.spec_info.SpeculativeAlgorithm.create_worker": Hook(
            _assert_patched, HookType.BEFORE, ("self", "server_args")
        ),
    },
    why="a stock speculative worker has no constructor of ours that would notice a patch that "
    "is not in force.",
    how="before SGLang makes one, every patch a CPU needs is looked at; one that is not in "
    "force stops the server with its name. Only on machines without an accelerator.",
    removed_when="SGLang stops when a hook cannot be applied.",
    is_needed=on_cpu_only,
)
