"""Settings of a program: a dataclass whose fields are argparse flags."""

from __future__ import annotations

import argparse
import shlex
from collections.abc import Callable
from dataclasses import Field, field, fields
from typing import Any, Self


def option(
    default: Any,
    text: str = "",
    *,
    read: Callable[[Any], Any] | None = None,
    group: str = "",
    **words: Any,
) -> Any:
    """Declares a field as a flag, ``--its-name``.

    Args:
        default: a value, or a function that returns it.
        text: the help; it ends with the default unless it speaks of one.
        read: converts argparse's value; unlike argparse's ``type`` it may raise ``BenchError``.
        group: of flags in the help.
        words: arguments of ``add_argument``; ``name`` replaces the flag, without dashes for a
            positional argument.
    """
    make = default if callable(default) else lambda: default
    metadata = {"make": make, "read": read, "group": group, "text": text, "words": words}
    return field(default_factory=make, metadata=metadata)


class Flags:
    @classmethod
    def add_arguments(cls, parser: argparse.ArgumentParser, **defaults: Any) -> None:
        """Adds the flags in the order of the fields; some with other defaults."""
        groups: dict[str, argparse._ActionsContainer] = {"": parser}
        for setting in cls._options():
            group, words = setting.metadata["group"], dict(setting.metadata["words"])
            if group not in groups:
                groups[group] = parser.add_argument_group(group)
            name = words.pop("name", f"--{setting.name}".replace("_", "-"))
            default = defaults.get(setting.name, setting.metadata["make"]())
            text = setting.metadata["text"]
            if default and "action" not in words and "default" not in text:
                text = f"{text} (default {_shown(default)})".strip()
            if name.startswith("-"):  # a positional argument is its field by its name
                words["dest"] = setting.name
            groups[group].add_argument(name, default=default, help=text, **words)

    @classmethod
    def read(cls, arguments: argparse.Namespace) -> Self:
        values = {}
        for setting in cls._options():
            value, read = getattr(arguments, setting.name), setting.metadata["read"]
            values[setting.name] = value if read is None else read(value)
        return cls(**values)

    @classmethod
    def _options(cls) -> list[Field]:
        return [one for one in fields(cls) if "make" in one.metadata]  # type: ignore[arg-type]


def _shown(value: Any) -> str:
    if isinstance(value, tuple):
        return ",".join(map(_shown, value))
    return f"{value:g}" if isinstance(value, float) else str(value)


def split_names(text: str) -> tuple[str, ...]:
    """A setting's ``read``: a list such as plain,parse."""
    return tuple(name.strip() for name in text.split(",") if name.strip())


def split_words(text: str) -> tuple[str, ...]:
    """A setting's ``read``: as a shell takes a line apart."""
    return tuple(shlex.split(text))


def at_least(low: int) -> Callable[[str], int]:
    """An argparse type: whole numbers from ``low``."""

    def number(text: str) -> int:
        value = int(text)
        if value < low:
            raise argparse.ArgumentTypeError(f"{value} is too small; use {low} or more")
        return value

    return number


def fraction(text: str) -> float:
    """An argparse type: a number from 0 to 1."""
    value = float(text)
    if not 0 <= value <= 1:
        raise argparse.ArgumentTypeError(f"{text} is no fraction; use a number from 0 to 1")
    return value


def numbers(kind: Callable[[str], Any]) -> Callable[[str], tuple]:
    """An argparse type: a set such as 1,8,64, as a sorted tuple."""

    def read(text: str) -> tuple:
        try:
            return tuple(sorted({kind(word) for word in text.split(",") if word.strip()}))
        except ValueError as error:
            wanted = "no list of numbers such as 1,4,16"
            raise argparse.ArgumentTypeError(f"{text!r} is {wanted}") from error

    return read
