"""Changes that PARSE needs beyond SGLang's registries, on every device."""

from __future__ import annotations

from sglang_parse.patches.base import patches_in

PATCHES = patches_in(__name__, __path__)
