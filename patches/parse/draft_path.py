"""A wrong draft path is refused by PARSE, before SGLang trips over it (ledger: draft_path)."""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.algorithm import NAME
from sglang_parse.patches.base import Hook, hook_patch


def _check_path(server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    from sglang_parse.startup.models import check_draft_path

    view = resolving_view(server_args)
    if (view.speculative_algorithm or "").upper() == NAME:
        check_draft_path(view.speculative_draft_model_path)


PATCH = hook_patch(
    "draft_path",
    {
        "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding": Hook(
            _check_path, HookType.BEFORE, ("server_args",)
        ),
    },
    why="before an algorithm's own checks run, SGLang reads the draft model's configuration "
    "to see whether it is one of its own kinds; a wrong path then ends in an error that "
    "names neither the flag nor the fix.",
    how="looks at the path first, for PARSE only.",
    removed_when="an algorithm's `validate_server_args` runs before the draft model is read.",
)
