"""The trained pair in ``examples/demo_pair``, the default models of all programs."""

from __future__ import annotations

import sys
from collections.abc import Mapping
from importlib.machinery import SourceFileLoader
from pathlib import Path
from types import ModuleType

from sglang_parse.client.records import BenchError
from sglang_parse.core.config import OWN

DEMO_PAIR = Path(__file__).resolve().parents[2] / "examples" / "demo_pair"
WITHOUT = "a wheel comes without the demo pair"
CHECKOUT = "run this from a checkout of the repository"


def demo_path(name: str) -> Path:
    path = DEMO_PAIR / name
    if not path.exists():
        raise BenchError(f"{path} is missing: {WITHOUT}; fix: {CHECKOUT}")
    return path


def short_path(name: str) -> str:
    """Path of a file or folder of the demo pair, relative if it is below the current folder."""
    path, here = DEMO_PAIR / name, Path.cwd()
    return str(path.relative_to(here) if path.is_relative_to(here) else path)


def check_there(paths: Mapping[str, str | None]) -> None:
    """Refuses flags whose default, a path of the demo pair, does not exist."""
    given = {flag: Path(path).absolute() for flag, path in paths.items() if path}
    missing = [
        flag for flag, path in given.items() if path.is_relative_to(DEMO_PAIR) and not path.exists()
    ]
    if missing:
        which = f"{', '.join(missing)} would be in {DEMO_PAIR}"
        raise BenchError(f"{which}: {WITHOUT}; fix: give them, or {CHECKOUT}")


def is_of_demo_pair(path: str) -> bool:
    return Path(path).resolve() in [(DEMO_PAIR / name).resolve() for name in ("target", "draft")]


def judge_of(target: str) -> str:
    """The demo pair's verdict head, if this is its target; else ""."""
    return short_path("judge") if is_of_demo_pair(target) else ""


def layer_of(target: str) -> str:
    """The demo pair's MTP layer, if this is its target; else the target's own."""
    return short_path("mtp") if is_of_demo_pair(target) else OWN


def load_problems() -> ModuleType:
    """Imports ``examples/demo_pair/problems.py``, which is in no package."""
    loader = SourceFileLoader("demo_pair_problems", str(demo_path("problems.py")))
    module = ModuleType(loader.name)
    sys.modules[loader.name] = module  # its dataclasses look themselves up
    loader.exec_module(module)
    return module
