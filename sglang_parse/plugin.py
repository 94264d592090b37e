"""Entry point ``sglang.srt.plugins:parse``: SGLang calls ``register`` once in every process.

SGLang logs and swallows what this raises, so it only registers; whatever may be wrong is
checked where a failure stops the server (``startup.checks``, the worker's factory below).
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make PARSE known to SGLang. Idempotent."""
    from sglang_parse.algorithm import register_algorithm

    if register_algorithm(create_worker):
        from sglang_parse.patches import register_all

        register_all()


def create_worker(server_args: Any) -> type:  # noqa: ARG001 - SGLang's factory signature
    """The class SGLang's scheduler makes its speculative worker from.

    Raises:
        PatchError: SGLang runs unpatched; it has logged the reason and gone on.
    """
    from sglang_parse.engine.worker import ParseWorker
    from sglang_parse.patches import assert_applied

    assert_applied()
    return ParseWorker
