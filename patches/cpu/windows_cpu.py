"""Models with two KV pools on a CPU (ledger: windows_cpu)."""

from __future__ import annotations

from typing import Any

from sglang.srt.arg_groups.model_override_base import attention_backends_of

from sglang_parse.algorithm import names_parse
from sglang_parse.attention.support import FOR_DRAFTS, ON_CPU
from sglang_parse.patches.base import Patch, Value, on_cpu_only


def _listed_backends(settings: Any) -> tuple[str | None, ...]:
    """Those of prefill and decode; a PARSE server's ``torch_native`` under a name on the lists."""
    found = attention_backends_of(settings)
    if not names_parse(settings):
        return found
    return tuple(FOR_DRAFTS if backend == ON_CPU else backend for backend in found)


PATCH = Patch(
    "windows_cpu",
    {"sglang.srt.arg_groups.model_hook.attention_backends_of": Value(_listed_backends)},
    why="SGLang ends at start where gpt-oss or Gemma 4 is to run on `torch_native`: its stock "
    "class knows neither attention sinks nor two KV pools.",
    how="on a PARSE server, whose `torch_native` knows both (`sglang_parse/attention/native.py`), "
    "these two checks read `triton` instead; nothing else does. Only on machines without an "
    "accelerator.",
    removed_when="the stock `torch_native` knows both, and the lists name it.",
    is_needed=on_cpu_only,
)
