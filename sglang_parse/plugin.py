"""Entry point ``sglang.srt.plugins:parse``: SGLang calls ``register`` once in every process.

SGLang logs and swallows what this raises, so it only registers; whatever may be wrong is
checked where a failure stops the server (``algorithm.validate_server_args``, the worker).
"""

from __future__ import annotations


def register() -> None:
    """Make PARSE known to SGLang. Idempotent."""
    from sglang_parse.algorithm import register_algorithm

    if register_algorithm():
        from sglang_parse.patches import register_all

        register_all()
