"""PARSE's start-up checks see what SGLang resolves (ledger: start_checks)."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view

from sglang_parse.algorithm import names_parse
from sglang_parse.patches.base import Patch, after, before
from sglang_parse.startup.models import check_attention, read_pair
from sglang_parse.startup.states import resolve_states

_GROUPS = "sglang.srt.arg_groups"


def _check_kinds(server_args: Any) -> None:
    view = resolving_view(server_args)
    if names_parse(view):
        target, draft = read_pair(view)
        check_attention(view, target, draft)
        resolve_states(server_args, target)


def _check_resolved(_result: None, server_args: Any) -> None:
    from sglang_parse.startup.checks import check_resolved

    view = resolving_view(server_args)
    if names_parse(view):
        check_resolved(view)


PATCH = Patch(
    "start_checks",
    {
        f"{_GROUPS}.model_hook.handle_model_specific_adjustments": before(_check_kinds),
        f"{_GROUPS}.pipeline.run_resolution_pipeline": after(_check_resolved),
    },
    why="SGLang calls an algorithm's `validate_server_args` in the middle of its resolution. "
    "Before, it configures hybrid and sparse models and reads the draft model's configuration: "
    "with a wrong path, or a model that PARSE refuses, it fails with an error that names neither "
    "the flag nor the fix. Afterwards it may still change a setting that PARSE has checked.",
    how="for PARSE only: checks paths and attention of both models before, sets what a target with "
    "recurrent states needs, and checks the settings again when all are resolved.",
    removed_when="an algorithm can check its server before the models are configured, and after "
    "all settings are resolved.",
)
