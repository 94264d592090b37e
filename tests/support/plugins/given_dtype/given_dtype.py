"""Test-only SGLang plugin: models run in the dtype of ``--dtype``.

SGLang runs Mistral Large 3 in bf16 whatever the flag says. Rounded so, forwards of other shapes
choose other tokens, with PARSE or without. The tests put this folder on PYTHONPATH of a server.
"""

from __future__ import annotations


def register() -> None:
    from sglang.srt.arg_groups.model_override_base import MODEL_OVERRIDES

    for overrides in MODEL_OVERRIDES.values():
        overrides.pop("dtype", None)
