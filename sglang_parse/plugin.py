"""Entry point ``sglang.srt.plugins:parse``: SGLang calls ``register`` once in every process.

SGLang logs and swallows what this raises, so it only registers; whatever may be wrong is
checked where a failure stops the server (the two functions below that SGLang is handed).
"""

from __future__ import annotations

from typing import Any


def register() -> None:
    """Make PARSE known to SGLang. Idempotent."""
    from sglang_parse.algorithm import register_algorithm

    if register_algorithm(create_worker, validate_server_args):
        from sglang_parse.patches import register_all

        register_all()


def validate_server_args(server_args: Any) -> None:
    """SGLang's launcher calls it before anything is loaded or started.

    Raises:
        CompatError: this SGLang is another one, in version or in what PARSE uses or changes.
        ValueError: see ``startup.checks.validate_server_args``.
    """
    from sglang_parse import patches
    from sglang_parse.startup import checks, compat

    compat.check(patches.symbols())
    checks.validate_server_args(server_args)


def create_worker(server_args: Any) -> type:  # noqa: ARG001 - SGLang's factory signature
    """The class SGLang's scheduler makes its speculative worker from.

    Raises:
        PatchError: SGLang runs unpatched; it has logged the reason and gone on.
    """
    from sglang_parse.engine.worker import ParseWorker
    from sglang_parse.patches import assert_applied

    assert_applied()
    return ParseWorker
