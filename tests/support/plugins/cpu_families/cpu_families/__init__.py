"""Test-only SGLang plugin: on a CPU, what families need that SGLang runs on GPUs only.

One file each, as in ``patches``. Tiny models of these families prove on a CPU what PARSE does with
them; nobody serves one so, and what users install refuses it. The tests put this folder on
PYTHONPATH of a server of such a family (``support.families.cpu_kernels``).
"""

from __future__ import annotations

from cpu_families import experts, gdn, mamba, mla, softcap, windows
from sglang_parse.patches.base import Patch, on_cpu_only
from sglang_parse.startup.families import NOT_ON_CPU

PATCHES: tuple[Patch, ...] = tuple(
    module.PATCH for module in (experts, gdn, mamba, mla, softcap, windows)
)


def register() -> None:
    NOT_ON_CPU.clear()
    for patch in PATCHES if on_cpu_only() else ():
        patch.register()
