"""What SGLang's factories and the patches find of PARSE in a scheduler's process.

Everything PARSE makes itself is handed its settings, its counters and its pipeline. SGLang, though,
makes a relay and a metrics collector from names, and calls patched functions with its own objects
only. Those look here, and nobody else does. (Settings travel by the environment, ``core.config``.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any, Protocol

from sglang_parse.core.counters import Counters


class Pipeline(Protocol):
    """What SGLang asks of the iterations under way (``engine.overlap.Pipeline``)."""

    def receive(self, req: Any) -> None: ...

    def slots_required(self, batch: Any, requests: Sequence[Any], page_size: int) -> int: ...

    def plan(self, batch: Any) -> None: ...

    def finish(self) -> None: ...


@dataclass(slots=True)
class Context:
    """One process's.

    Attributes:
        counters: what its requests add up to.
        pipeline: its iterations; set by the worker, None in processes without one.
    """

    counters: Counters = field(default_factory=Counters)
    pipeline: Pipeline | None = None

    def running_pipeline(self) -> Pipeline:
        """Raises: RuntimeError, in a process without PARSE's worker."""
        if self.pipeline is None:
            raise RuntimeError("PARSE: requests are served in a process without PARSE's worker")
        return self.pipeline


@lru_cache(maxsize=1)
def process_context() -> Context:
    """This process's."""
    return Context()
