"""A file with the KV slots each request holds, for `sglang-parse bench` (ledger: kv_log)."""

from __future__ import annotations

import json
import os
from functools import lru_cache
from typing import Any, TextIO

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.patches.base import Hook, hook_patch

ENV_VAR = "SGLANG_PARSE_KV_LOG"
"""File to append to; the patch is in force only where it is set."""


def _is_asked_for() -> bool:
    return bool(os.environ.get(ENV_VAR))


@lru_cache(maxsize=1)
def _file() -> TextIO:
    return open(os.environ[ENV_VAR], "a", buffering=1, encoding="utf-8")  # noqa: SIM115


def _log(_result: None, batch: Any, *_: Any, **__: Any) -> None:
    held = [req.kv.kv_allocated_len - req.kv.kv_committed_len for req in batch.reqs]
    _file().write(json.dumps(held) + "\n")


PATCH = hook_patch(
    "kv_log",
    {
        "sglang.srt.speculative.spec_utils.spec_prepare_for_decode": Hook(
            _log, HookType.AFTER, ("batch",)
        ),
    },
    why="`make bench-gpu` reports the KV slots that each request holds; SGLang reports "
    "totals only.",
    how="after the slots of an iteration are allocated, appends what each request holds "
    "beyond its committed tokens to the file that the environment variable "
    "`SGLANG_PARSE_KV_LOG` names. Not applied where it is unset.",
    removed_when="SGLang reports over-allocated slots per request.",
    is_needed=_is_asked_for,
)
