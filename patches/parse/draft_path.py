"""A wrong draft path is refused by PARSE, before SGLang trips over it (ledger: draft_path)."""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.algorithm import NAME
from sglang_parse.patches.base import hook_patch


def _check_path(server_args: Any) -> None:
    from sglang.srt.arg_groups.overrides import resolving_view

    from sglang_parse.startup.models import check_draft_path

    view = resolving_view(server_args)
    if (view.speculative_algorithm or "").upper() == NAME:
        check_draft_path(view.speculative_draft_model_path)


PATCH = hook_patch(
    "draft_path",
    {
        "sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding": (
            _check_path,
            HookType.BEFORE,
        )
    },
)
