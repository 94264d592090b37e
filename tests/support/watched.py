"""A request's output that counts how many of its tokens are read: the work of a step on it."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any


class Watched(list[int]):
    num_read = 0

    def __iter__(self) -> Iterator[int]:
        self.num_read += len(self)
        return super().__iter__()

    def __getitem__(self, place: Any) -> Any:
        found = super().__getitem__(place)
        self.num_read += len(found) if isinstance(place, slice) else 1
        return found
