"""The only file that knows SGLang versions: the pin, the check of ``seams``, one error text."""

from __future__ import annotations

import inspect
import pkgutil
from collections.abc import Iterable
from importlib import metadata

from packaging.requirements import Requirement

from sglang_parse.startup.seams import BACKEND_SEAMS, SEAMS, Seam

DISTRIBUTION = "sglang-parse"


class CompatError(RuntimeError):
    """This SGLang is not the one PARSE was built for."""


def pinned_version() -> str:
    """The SGLang version in our own metadata (pyproject.toml is the only place that names it)."""
    for text in metadata.requires(DISTRIBUTION) or ():
        requirement = Requirement(text)
        if requirement.name == "sglang" and not requirement.marker:
            return str(requirement.specifier).removeprefix("==")
    raise CompatError(f"{DISTRIBUTION} names no SGLang version; reinstall it")


def check_version() -> None:
    """Raises: CompatError, when the installed SGLang is another one."""
    pinned = pinned_version()
    found = metadata.version("sglang")
    if found != pinned:
        raise CompatError(
            f"PARSE: found SGLang {found}, expected {pinned}. "
            f"Fix: pip install 'sglang=={pinned}', or the sglang-parse made for {found}"
        )


def check_seams(seams: Iterable[Seam]) -> None:
    """Raises: CompatError, naming every seam that is missing or has other parameters."""
    problems = [problem for seam in seams if (problem := _problem(seam))]
    if problems:
        raise CompatError(
            "PARSE: this SGLang differs from the one PARSE was built for:\n  "
            + "\n  ".join(problems)
            + f"\nFix: reinstall sglang=={pinned_version()}"
        )


def _problem(seam: Seam) -> str:
    try:
        target = pkgutil.resolve_name(seam.path)
    except (ImportError, AttributeError) as error:
        return f"{seam.path}: found nothing ({error}), needed because it {seam.why}"
    if not seam.parameters:
        return ""
    found = list(inspect.signature(target).parameters)
    missing = [name for name in seam.parameters if name not in found]
    if missing:
        return (
            f"{seam.path}: found parameters {found}, expected {missing} too, "
            f"needed because it {seam.why}"
        )
    return ""


def check_backend(attention_backend: str) -> None:
    """Raises: CompatError, as ``check_seams``, for what only this attention backend needs."""
    check_seams(BACKEND_SEAMS.get(attention_backend, ()))


def check(patched: Iterable[Seam] = ()) -> None:
    """The version and the seams of every server, for its start.

    Args:
        patched: what this machine's patches change; they stand above this module, and are handed
            in (``patches.seams``).
    """
    check_version()
    check_seams((*SEAMS, *patched))
