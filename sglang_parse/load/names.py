"""Servers' names in a load: a kind's, or NAME@SHARE where that share of every draft is kept."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_parse.client.records import TITLES, WITH_PARSE
from sglang_parse.core.simulation import ENV_VAR

_AT = "@"


def names_at(kind: str, shares: Sequence[float]) -> tuple[str, ...]:
    """A server for each share, of those with PARSE; else the one there is."""
    if kind not in WITH_PARSE or not shares:
        return (kind,)
    return tuple(f"{kind}{_AT}{share:g}" for share in shares)


def kind_of(name: str) -> str:
    """The name without the share."""
    return name.partition(_AT)[0]


def environment_of(name: str) -> tuple[tuple[str, str], ...]:
    """What makes the server keep that share."""
    kept = name.partition(_AT)[2]
    return ((ENV_VAR, kept),) if kept else ()


def title_of(name: str) -> str:
    """For people."""
    kind, at, kept = name.partition(_AT)
    return TITLES.get(kind, kind) + (f", {float(kept):.0%} kept" if at else "")
