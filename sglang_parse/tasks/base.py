"""What a task is, and how its file is read."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from sglang_parse.client.records import BenchError, Grader, Item, Locator


class TaskError(BenchError):
    """A task's file is missing or not what it should be; the text says where to get it."""


@dataclass(frozen=True, slots=True)
class Options:
    """What graders may need from the command line.

    Attributes:
        allow_code: whether programs a model wrote may be run on this machine.
        judge_url, judge_model: an OpenAI-compatible server that grades open answers.
        judge_prompts: file with the judge's prompts.
        grader: command that grades the answers to one's own prompts.
    """

    allow_code: bool = False
    judge_url: str | None = None
    judge_model: str = "default"
    judge_prompts: Path | None = None
    grader: str = ""


@dataclass(frozen=True, slots=True)
class Task:
    """A task whose items come from a file.

    Attributes:
        source: where the file is to be had, for people.
        make_item: (a row of the file, its number) -> item.
        make_grader: looks up packages and options once.
        max_tokens: room for an answer, unless the command line says otherwise.
        note: what a reader of the figures must know.
        make_locator: likewise for where a text goes wrong; None where that cannot be told.
    """

    name: str
    title: str
    source: str
    make_item: Callable[[Mapping[str, Any], int], Item]
    make_grader: Callable[[Options], Grader]
    max_tokens: int = 1024
    note: str = ""
    make_locator: Callable[[Options], Locator] | None = None

    def read(self, path: Path | None) -> list[Item]:
        """The items of the file, in its order.

        Raises:
            TaskError: no file, or its rows lack what the task needs.
        """
        if path is None or not path.is_file():
            given = "is missing" if path is None else f"is {str(path)!r}, which is not there"
            raise TaskError(f"{self.title}: --task-file {given}; get it: {self.source}")
        items = []
        for number, row in enumerate(read_rows(path)):
            try:
                items.append(self.make_item(row, number))
            except (KeyError, IndexError, TypeError, ValueError) as error:
                raise TaskError(
                    f"{self.title}: row {number} of {path} does not fit ({error!r}), it has "
                    f"{sorted(map(str, row))}; expected {self.source}"
                ) from error
        if not items:
            raise TaskError(f"{self.title}: {path} has no rows; expected {self.source}")
        return items


def read_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    """Rows of a .jsonl, .jsonl.gz, .json, .csv or .parquet file.

    Raises:
        TaskError: another kind of file, or not what its name says.
    """
    import pandas

    suffix = "".join(path.suffixes[-2:]) if path.suffix == ".gz" else path.suffix
    try:
        if suffix in (".jsonl", ".jsonl.gz", ".json"):
            yield from _json_rows(path)
        elif suffix == ".csv":
            yield from pandas.read_csv(path, dtype=str, keep_default_na=False).to_dict("records")
        elif suffix == ".parquet":
            yield from pandas.read_parquet(path).to_dict("records")
        else:
            raise TaskError(
                f"{path}: use a file that ends in .jsonl, .jsonl.gz, .json, .csv or .parquet"
            )
    except (OSError, ValueError) as error:
        raise TaskError(f"{path} cannot be read: {error}") from error


def _json_rows(path: Path) -> Iterator[Mapping[str, Any]]:
    import gzip

    opener = gzip.open if path.suffix == ".gz" else open
    with opener(path, "rt", encoding="utf-8") as file:
        if path.suffix == ".json":
            yield from json.load(file)
            return
        for line in file:
            if line.strip():
                yield json.loads(line)


def need(package: str, what: str) -> None:
    """Raises: TaskError, when an optional package is not installed."""
    import importlib.util

    if importlib.util.find_spec(package) is None:
        raise TaskError(f"{what} needs {package}; fix: pip install 'sglang-parse[compare]'")
