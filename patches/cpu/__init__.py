"""Features that stock SGLang lacks on a CPU: LoRA and its own speculation (EAGLE3, STANDALONE)."""

from __future__ import annotations

from sglang_parse.patches.base import patches_in

PATCHES = patches_in(__name__, __path__)
