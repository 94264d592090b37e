"""Settings as pydantic fields: how they are shown, and what is wrong with a value, or with a JSON
file that another program has written."""

from __future__ import annotations

import json
import reprlib
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Annotated, Any, Literal, TypeVar, get_args, get_origin

from pydantic import BaseModel, ConfigDict, Field, ValidationError
from pydantic.fields import FieldInfo

STRICT = ConfigDict(frozen=True, strict=True, extra="forbid", use_attribute_docstrings=True)
Threshold = Annotated[float, Field(ge=0, le=2, allow_inf_nan=False)]
Model = TypeVar("Model")


class ConfigError(ValueError):
    """A setting is unknown or out of range; the message names it, its value and the fix."""


@dataclass(frozen=True, slots=True)
class Setting:
    name: str
    field: FieldInfo

    @property
    def default(self) -> Any:
        return self.field.default

    @property
    def description(self) -> str:
        return " ".join((self.field.description or "").split())

    @property
    def metavar(self) -> str | None:
        extra = self.field.json_schema_extra
        return str(extra["metavar"]) if isinstance(extra, dict) else None

    @property
    def choices(self) -> tuple[str, ...]:
        """Allowed values; () for texts and numbers."""
        kind = self.field.annotation
        return get_args(kind) if get_origin(kind) is Literal else ()

    @property
    def parse(self) -> Callable[[str], Any]:
        return _number_or_text if self.is_number_or_file else type(self.default)

    @property
    def is_number_or_file(self) -> bool:
        return str in get_args(self.field.annotation)

    @property
    def expected(self) -> str:
        """Description of the allowed values, for error messages."""
        kind = self.field.annotation
        if kind is bool:
            return "true or false"
        if self.name == "threshold":
            file = ", or a file of sglang-parse calibrate" if self.is_number_or_file else ""
            return (
                "a number from 0 (accept everything) to 1, or up to 2 (above 1 accepts nothing)"
                f"{file}"
            )
        if kind in (int, float):
            limits = {key: n for limit in self.field.metadata for key, n in asdict(limit).items()}
            number = "a whole number" if kind is int else "a number"
            return f"{number} {limits['ge']}..{limits['le']}"
        if get_origin(kind) is list:
            return "a list of whole numbers"
        if get_origin(kind) is tuple:
            return "a list of names, or a text with commas between them"
        return f"one of {', '.join(self.choices)}" if self.choices else "a text"


def settings_of(model: Any) -> list[Setting]:
    """Returns the settings of ``ParseConfig``, ``RequestOptions`` or ``QuestionWording``."""
    return [Setting(name, field) for name, field in model.__pydantic_fields__.items()]


def problems_of(
    error: ValidationError, model: type[BaseModel], shown_as: Callable[[str], str]
) -> list[str]:
    """Returns one per setting."""
    problems: dict[str, str] = {}
    for problem in error.errors(include_url=False):
        name = str(problem["loc"][0])
        if problem["type"] == "value_error":  # raised by one of our validators
            text = f": {problem['ctx']['error']}"
        else:
            expected = Setting(name, model.model_fields[name]).expected
            text = f" is {shown(problem['input'])}; use {expected}"
        problems.setdefault(name, shown_as(name) + text)
    return list(problems.values())


def unknown_names(error: ValidationError) -> list[str]:
    problems = error.errors(include_url=False)
    kinds = ("extra_forbidden", "invalid_key")
    return sorted(str(problem["loc"][0]) for problem in problems if problem["type"] in kinds)


def read_json_file(model: type[Model], path: Path, name: str, error: type[ValueError]) -> Model:
    """Reads an object of ``model``.

    Raises:
        ValueError: an ``error``: it cannot be read, is not a JSON object, or a value is wrong.
    """
    try:
        return model(**json.loads(path.read_text(encoding="utf-8")))
    except OSError as found:
        raise error(f"{name} cannot be read ({found.strerror})") from found
    except (UnicodeDecodeError, json.JSONDecodeError, TypeError) as found:
        raise error(f"{name} is not a JSON object: {found}") from found
    except ValidationError as found:
        problems = [
            f"{'.'.join(map(str, problem['loc']))}: {problem['msg']}"
            for problem in found.errors(include_url=False)
        ]
        raise error(f"{name} has a wrong {', '.join(problems)}") from found


def shown(value: object) -> str:
    """Abbreviates a value for an error message: requests may contain anything of any length."""
    return reprlib.repr(value)


def _number_or_text(text: str) -> float | str:
    try:
        return float(text)
    except ValueError:
        return text
