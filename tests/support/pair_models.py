"""A folder with a pair of models as the servers of tests and of the soak."""

from __future__ import annotations

from pathlib import Path

from sglang_parse.client.records import BenchError
from sglang_parse.client.targets import Models, parse_settings


def pair_models(pair: Path) -> Models:
    """Models of the pair in a folder, with its question.

    Raises:
        BenchError: it is not there.
    """
    target, draft = pair / "target", pair / "draft"
    for folder in (target, draft):
        if not (folder / "config.json").is_file():
            raise BenchError(
                f"{folder} is not a model (no config.json); fix: give --pair a folder with "
                "target/, draft/ and question.json, as tests/data/question_pair"
            )
    flags = parse_settings(segment="line")
    return Models(str(target), str(draft), question=str(pair / "question.json"), parse_flags=flags)
