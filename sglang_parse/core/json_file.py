"""Reads a JSON file that another program has written."""

from __future__ import annotations

import json
from pathlib import Path
from typing import TypeVar

from pydantic import ValidationError

Model = TypeVar("Model")


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
