"""The patch ledger, written from the patches: ``python -m sglang_parse.patches.ledger``."""

from __future__ import annotations

import textwrap
from types import ModuleType

from sglang_parse.patches import cpu, parse
from sglang_parse.patches.base import Patch

_HEAD = """\
# Patch ledger

Everything `sglang_parse` changes in a running SGLang, one file and one entry each. Nothing of SGLang's source is
touched: the changes are made in memory when SGLang loads its plugins, and a server on which one is not in force does
not start (`patches.assert_applied`). On a server without PARSE, `kv_by_phase`, `whole_batches`, `meta_info` and
`request_bounds` call the original and add nothing.
"The pinned one" is the SGLang version in `pyproject.toml`, the only place that names it.
This page is printed by `python -m sglang_parse.patches.ledger`; its texts stand in the patches' files."""  # noqa: E501


def render() -> str:
    """The ledger in Markdown: a head, then every patch in the order of its room's list."""
    return "\n\n".join([_HEAD, *_room(parse), *_room(cpu)]) + "\n"


def _room(room: ModuleType) -> list[str]:
    name = room.__name__.rpartition(".")[2]
    return [f"## {name}", room.__doc__ or "", *(_entry(patch) for patch in room.PATCHES)]


def _entry(patch: Patch) -> str:
    fields = {
        "Target": ", ".join(f"`{path}`" for path in patch.targets),
        "SGLang versions": "the pinned one",
        "Why": patch.why,
        "How": patch.how,
        "Upstream": patch.upstream,
        "Removed when": patch.removed_when,
    }
    lines = (_wrapped(f"- {name}: {text}") for name, text in fields.items())
    return "\n".join([f"### {patch.name}", "", *lines])


def _wrapped(line: str) -> str:
    return textwrap.fill(
        line, 120, subsequent_indent="  ", break_long_words=False, break_on_hyphens=False
    )


if __name__ == "__main__":
    print(render(), end="")
