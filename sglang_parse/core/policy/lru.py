"""What is kept by a key that a client may choose: the entries used last."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def used(kept: OrderedDict[K, V], key: K, opened: Callable[[], V], most: int) -> V:
    """The entry of ``key``, now the one used last; those used longest ago go.

    Args:
        kept: the entries, the one used longest ago first.
        opened: makes an entry for a key that has none; may use others.
        most: entries kept, at least 1.
    """
    if key not in kept:
        kept[key] = opened()
    kept.move_to_end(key)
    while len(kept) > most:
        kept.popitem(last=False)
    return kept[key]
