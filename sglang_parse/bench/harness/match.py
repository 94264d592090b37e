"""Who plays when: servers take turns run by run, or answer all at once where only answers count.

Run k sends every server the same problems, shortly after one another, so that a machine busy with
something else slows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from sglang_parse.bench.harness.ask import Asking, ask, graded, run_together
from sglang_parse.bench.harness.pool import Pool
from sglang_parse.bench.harness.records import Grader, Item, Leg, Way
from sglang_parse.bench.harness.servers import Endpoint


@dataclass(frozen=True, slots=True)
class Assignment:
    """What is asked, and how it is graded.

    ``title`` is for people, with what a reader must know.
    """

    title: str
    items: Sequence[Item]
    grade: Grader
    max_tokens: int


@dataclass(frozen=True, slots=True)
class Match:
    """The servers and what they are asked; ``asking`` is made for a way's own parameters."""

    pool: Pool
    task: Assignment
    asking: Callable[[Way], Asking]

    def turns(
        self, runs: int, order: Callable[[int], Sequence[str]]
    ) -> Iterator[tuple[int, Endpoint]]:
        """(Run, server), awake until the next is asked for; ``order``: run -> names."""
        for run in range(runs):
            for name in order(run):
                with self.pool.awake(name) as (endpoint,):
                    yield run, endpoint

    def ask(self, endpoint: Endpoint, way: Way, indices: Sequence[int], **leg: Any) -> Leg:
        """One leg of the task's problems; ``leg`` as of ``ask.ask``."""
        return ask(endpoint, self.task.items, indices, way=way, asking=self.asking(way), **leg)

    def graded(self, leg: Leg) -> Leg:
        """With scores. Not where answers arrive, see ``ask.graded``."""
        return graded(leg, self.task.items, self.task.grade)

    def all_at_once(self, names: Sequence[str], play: Callable[[Endpoint], list[Leg]]) -> list[Leg]:
        """Graded legs of servers that run beside one another; ``play``: a server -> its legs."""
        with self.pool.awake(*names) as endpoints:
            found = run_together([partial(play, endpoint) for endpoint in endpoints], len(names))
        return [self.graded(leg) for legs in found for leg in legs]
