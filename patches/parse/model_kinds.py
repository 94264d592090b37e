"""PARSE checks the models' kinds before SGLang configures them (ledger: model_kinds)."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view

from sglang_parse.algorithm import NAME
from sglang_parse.patches.base import Patch, before
from sglang_parse.startup.models import check_attention, read_pair


def _check_kinds(server_args: Any) -> None:
    view = resolving_view(server_args)
    if (view.speculative_algorithm or "").upper() == NAME:
        check_attention(view, *read_pair(view))


PATCH = Patch(
    "model_kinds",
    {"sglang.srt.arg_groups.model_hook.handle_model_specific_adjustments": before(_check_kinds)},
    why="SGLang configures hybrid and sparse models, and reads the draft model's configuration, "
    "before it calls an algorithm's `validate_server_args`. With a wrong path, or a model that "
    "PARSE refuses, it fails with an error that names neither the flag nor the fix.",
    how="checks paths and attention of both models first, for PARSE only.",
    removed_when="an algorithm's `validate_server_args` runs before the models are configured.",
)
