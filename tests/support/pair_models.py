"""A folder with a pair of models as the servers of tests and of the soak."""

from __future__ import annotations

from pathlib import Path

from sglang_parse.client.demo_pair import demo_path
from sglang_parse.client.records import BenchError
from sglang_parse.client.targets import Models, parse_settings


def demo_models(pair: Path) -> Models:
    """Models of the pair in a folder.

    Raises:
        BenchError: it is not there.
    """
    question = demo_path("question.json")
    target, draft = pair / "target", pair / "draft"
    for folder in (target, draft):
        if not (folder / "config.json").is_file():
            raise BenchError(
                f"{folder} is not a model (no config.json); fix: give --pair a folder with "
                "target/ and draft/, or make one with `make train-demo-pair`"
            )
    flags = parse_settings(segment="line")
    return Models(str(target), str(draft), question=str(question), parse_flags=flags)
