"""PARSE checks the draft model's path before SGLang reads the model (ledger: draft_path)."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view

from sglang_parse.algorithm import NAME
from sglang_parse.patches.base import Patch, before
from sglang_parse.startup.models import check_draft_path


def _check_path(server_args: Any) -> None:
    view = resolving_view(server_args)
    if (view.speculative_algorithm or "").upper() == NAME:
        check_draft_path(view.speculative_draft_model_path)


PATCH = Patch(
    "draft_path",
    {"sglang.srt.arg_groups.speculative_hook.handle_speculative_decoding": before(_check_path)},
    why="SGLang reads the draft model's configuration before it calls an algorithm's "
    "`validate_server_args`; with a wrong path it fails with an error that names neither the flag "
    "nor the fix.",
    how="checks the path first, for PARSE only.",
    removed_when="an algorithm's `validate_server_args` runs before the draft model is read.",
)
