"""``sglang-parse models``: prints families, or the one of a model."""

from __future__ import annotations

import argparse
from pathlib import Path

from rich.console import Console
from rich.table import Table

from sglang_parse.client.records import BenchError
from sglang_parse.models.settings import ModelsSettings
from sglang_parse.startup.families import FAMILIES, HEADINGS, refusal, row


def run(arguments: argparse.Namespace, console: Console) -> int:
    """Returns the exit code: 1 for a model that is refused as target."""
    name = ModelsSettings.read(arguments).model
    alike = [one for one in FAMILIES if name.lower() in one.name.lower()]
    if alike and not Path(name).is_dir():
        shown = Table(*HEADINGS)
        for family in alike:
            shown.add_row(*row(family))
        console.print(shown)
        return 0
    from sglang.srt.configs.model_config import ModelConfig

    try:
        model = ModelConfig(model_path=name)  # reads config.json alone
    except (OSError, ValueError, KeyError) as error:
        fix = "give a folder with config.json, a name on the Hugging Face hub, or a family's"
        raise BenchError(f"{name!r} cannot be read as a model ({error}); fix: {fix}") from error
    why = refusal(model, None, is_draft=False)
    console.print(f"as target: {why or 'served'}")
    console.print(f"as draft: {refusal(model, None, is_draft=True) or 'served'}")
    return int(bool(why))
