"""Models with sliding windows on a CPU."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.model_override_base import (
    ResolvedView,
    attention_backends_of,
    model_config_of,
    resolved_view,
)

from sglang_parse.algorithm import names_parse
from sglang_parse.attention.support import FOR_DRAFTS, ON_CPU
from sglang_parse.patches.base import Patch, Value


def _listed_backends(settings: Any) -> tuple[str | None, ...]:
    """Those of prefill and decode; a PARSE server's ``torch_native`` under a name on the lists."""
    found = attention_backends_of(settings)
    if not names_parse(settings):
        return found
    return tuple(FOR_DRAFTS if backend == ON_CPU else backend for backend in found)


def _listed_view(server_args: Any) -> ResolvedView:
    """SGLang's. EXAONE's check alone reads the backend from it, and no other model's may find
    another one there: LFM2's refuses ``triton``."""
    view = resolved_view(server_args)
    if "Exaone4ForCausalLM" not in model_config_of(server_args).hf_config.architectures:
        return view
    return ResolvedView(view, {"attention_backend": _listed_backends(view)[0]})


_HOOK = "sglang.srt.arg_groups.model_hook"
PATCH = Patch(
    "windows",
    {
        f"{_HOOK}.attention_backends_of": Value(_listed_backends),
        f"{_HOOK}.resolved_view": Value(_listed_view),
    },
    why="SGLang ends at start where gpt-oss, Gemma 4 or EXAONE 4 is to run on `torch_native`: its "
    "stock class knows neither attention sinks nor two KV pools, and EXAONE's list leaves it out.",
    how="on a PARSE server, whose `torch_native` knows both (`sglang_parse/attention/native.py`), "
    "these three checks read `triton` instead; nothing else does.",
    removed_when="the stock `torch_native` knows both, and the lists name it.",
)
