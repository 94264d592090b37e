"""A bounded map for keys that clients choose."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable
from typing import TypeVar

K = TypeVar("K")
V = TypeVar("V")


def lru_get(entries: OrderedDict[K, V], key: K, create: Callable[[], V], max_size: int) -> V:
    """Returns the entry of ``key``, creates it if missing, and evicts the least recently used.

    Args:
        entries: in order of use, least recent first.
        create: makes a missing entry; may access other entries.
        max_size: at least 1.
    """
    if key not in entries:
        entries[key] = create()
    entries.move_to_end(key)
    while len(entries) > max_size:
        entries.popitem(last=False)
    return entries[key]
