"""Entry point ``sglang.srt.plugins:parse``: SGLang calls ``register`` once in every process.

SGLang logs and ignores its exceptions, so it only registers. The checks are in the two other
functions, whose exceptions stop the server.
"""

from __future__ import annotations

import sys
from typing import Any


def register() -> None:
    """Registers PARSE and its patches. Idempotent.

    Raises:
        SystemExit: it fails, and the command line asks for PARSE. SGLang would go on, and then
            refuse PARSE's flags as unknown.
    """
    try:
        from sglang_parse.algorithm import register_algorithm

        if register_algorithm(create_worker, validate_server_args):
            from sglang_parse.patches import register_all

            register_all()
    except Exception as error:
        from sglang_parse.startup.report import is_asked_for

        if not is_asked_for(" ".join(sys.argv)):
            raise
        sys.exit(
            f"PARSE: cannot be registered ({type(error).__name__}: {error}). Fix: remove the "
            "cause; `sglang-parse doctor` tries the same imports"
        )


def validate_server_args(server_args: Any) -> None:
    """Checks a server in the launcher, before models are loaded and processes are started.

    Raises:
        CompatError: SGLang's version, or what is patched in it, differs from the supported one.
        ValueError: see ``startup.checks.validate_server_args``.
    """
    from sglang_parse import patches
    from sglang_parse.startup import checks, compat

    compat.check_version()
    compat.check_symbols(patches.symbols())
    checks.validate_server_args(server_args)


def create_worker(server_args: Any) -> type:  # noqa: ARG001 - SGLang's factory signature
    """Returns the class of the speculative worker; SGLang calls it in the scheduler.

    Raises:
        PatchError: a patch is not in force; SGLang has logged the reason.
    """
    from sglang_parse.engine.worker import ParseWorker
    from sglang_parse.patches import assert_applied

    assert_applied()
    return ParseWorker
