"""The SGLang version that PARSE supports: the pin, and the checks of the installed one."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable
from dataclasses import dataclass
from importlib import metadata

from packaging.requirements import Requirement

DISTRIBUTION = "sglang-parse"


class CompatError(RuntimeError):
    """The installed SGLang is not the one that PARSE was built for."""


@dataclass(frozen=True, slots=True)
class Symbol:
    """One use of an SGLang symbol.

    Attributes:
        user: the file and line that use it, or the patch that changes it.
        keywords: parameters that it must have.
        num_positional: positional arguments of the call; None where it is not called here, or
            with arguments that the source does not show (``*args``, ``**kwargs``).
    """

    path: str
    user: str
    keywords: tuple[str, ...] = ()
    num_positional: int | None = None

    def problem(self) -> str:
        """Describes how the installed SGLang differs; "" if it does not."""
        try:
            target = pkgutil.resolve_name(self.path)
        except (ImportError, AttributeError) as error:
            return f"{self.path}: found nothing ({error}), used by {self.user}"
        if not self.keywords and self.num_positional is None:
            return ""
        signature = inspect.signature(target)
        arguments = dict.fromkeys(self.keywords)
        try:
            if self.num_positional is None:
                signature.bind_partial(**arguments)
            else:
                signature.bind(*[None] * self.num_positional, **arguments)
        except TypeError as error:
            found, wanted = [*signature.parameters], [*self.keywords]
            return (
                f"{self.path}: found parameters {found}, expected {wanted} ({error}), "
                f"used by {self.user}"
            )
        return ""


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
