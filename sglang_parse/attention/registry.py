"""PARSE's attention backends in SGLang's registry, under the stock names.

Each derives from the stock backend and differs in PARSE's verify passes only. Backends without one
here run causal passes.
"""

from __future__ import annotations

import pkgutil
from functools import partial
from typing import Any

from sglang.srt.layers.attention.attention_registry import (
    ATTENTION_BACKENDS,
    register_attention_backend,
)

from sglang_parse.attention.support import CAUSAL, SUPPORT, BackendError, check_kv

_PACKAGE = __package__


def _create(name: str, runner: Any) -> Any:
    """Creates a backend; imports its kernels only then."""
    if not runner.is_draft_worker:  # a draft may run no verify passes
        check_kv(name, runner.kv_cache_dtype)
    return pkgutil.resolve_name(SUPPORT[name].factory)(runner)


_FACTORIES = {name: partial(_create, name) for name in SUPPORT}


def register_backends(*names: str) -> None:
    """Registers PARSE's backends: all, or the named ones. Idempotent."""
    for name in names or _FACTORIES:
        register_attention_backend(name)(_FACTORIES[name])


def is_registered(name: str) -> bool:
    return ATTENTION_BACKENDS.get(name) is _FACTORIES[name]


def assert_used(runner: Any, layout: str, model: str = "target") -> None:
    """Raises BackendError if a model's attention would not run PARSE's passes in this layout."""
    backend = runner.attn_backend
    if layout != CAUSAL and not type(backend).__module__.startswith(_PACKAGE):
        found = f"the {model}'s attention backend is {type(backend).__name__}"
        found = f"{found}, which ignores the layout of PARSE's verify passes"
        raise BackendError(found, f"--attention-backend {', '.join(SUPPORT)}")
    if runner.kv_index_translator.reads_are_translated:
        found = "the KV pool is a unified memory pool, whose slot numbers are virtual"
        raise BackendError(found, "start without SGLang's unified memory pool")
