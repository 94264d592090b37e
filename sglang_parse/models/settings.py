"""Flags of ``sglang-parse models``."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_parse.client.flags import Flags, option


@dataclass(frozen=True)
class ModelsSettings(Flags):
    model: str = option(
        "",
        "a model's folder, its name on the Hugging Face hub, or part of a family's name (default: "
        "all families)",
        name="model",
        nargs="?",
    )


add_arguments = ModelsSettings.add_arguments
