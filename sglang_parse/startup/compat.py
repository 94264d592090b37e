"""The SGLang version that PARSE supports: the pin, and the check of the installed one."""

from __future__ import annotations

from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement

from sglang_parse.startup.sglang_api import Symbol, backend_symbols, server_symbols

DISTRIBUTION = "sglang-parse"


class CompatError(RuntimeError):
    """The installed SGLang is not the one that PARSE was built for."""


def pinned_version() -> str:
    """Returns the SGLang version in our own metadata; only pyproject.toml names it."""
    for text in metadata.requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        if requirement.name == "sglang" and not requirement.marker:
            return str(requirement.specifier).removeprefix("==")
    raise CompatError(f"{DISTRIBUTION} names no SGLang version; reinstall it")


def check_version() -> None:
    """Raises CompatError if another SGLang version is installed."""
    pinned = pinned_version()
    found = metadata.version("sglang")
    if found != pinned:
        raise CompatError(
            f"PARSE: found SGLang {found}, expected {pinned}. "
            f"Fix: pip install 'sglang=={pinned}', or the sglang-parse made for {found}"
        )


def check_symbols(symbols: Iterable[Symbol]) -> None:
    """Raises CompatError, naming every symbol that is missing or has other parameters."""
    problems = dict.fromkeys(problem for symbol in symbols if (problem := symbol.problem()))
    if problems:
        raise CompatError(
            "PARSE: this SGLang differs from the one PARSE was built for:\n  "
            + "\n  ".join(problems)
            + f"\nFix: reinstall sglang=={pinned_version()}"
        )


def check_backend(attention_backend: str) -> None:
    """Raises CompatError for what only this attention backend needs."""
    check_symbols(backend_symbols(attention_backend))


def check(patched: Iterable[Symbol] = ()) -> None:
    """Checks the version and every symbol that a server uses.

    Args:
        patched: those of ``patches.symbols``, which cannot be imported here.
    """
    check_version()
    check_symbols((*server_symbols(), *patched))
