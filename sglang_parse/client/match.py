"""The one match that programs are presets of: servers take turns, then answer for their marks.

A preset says who takes part, which problems each server gets in each run, by which clock they are
timed and whose answers are graded. Run k sends every server the same problems, shortly after one
another, so that a machine busy with something else slows all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from itertools import chain
from typing import Generic, TypeVar

from sglang_parse.client.ask import Asking, ask, graded, run_together
from sglang_parse.client.pool import Pool
from sglang_parse.client.records import Assignment, BenchRun, ServingRun, Variant
from sglang_parse.client.servers import Endpoint

StageTime = TypeVar("StageTime", BenchRun, ServingRun)
"""What a clock brings back."""


@dataclass(frozen=True, slots=True)
class Part:
    """Some of the task's problems, sent one way in one go; ``run`` as of ``BenchRun``."""

    variant: Variant
    indices: Sequence[int]
    run: int = -1
    concurrency: int = 1


def _no_parts(server: str, run: int) -> Sequence[Part]:
    del server, run
    return ()


@dataclass(frozen=True)
class Preset(Generic[StageTime]):
    """A program's match.

    Attributes:
        runs: timed ones.
        order: run -> the servers' names, in the order of their turns.
        timed: (server, run) -> what is timed in its turn. The first part's way is the server's
            own: it is warmed up with that.
        clock: how a part is timed.
        looks: (server, run) -> what is asked once more in its turn, where the clock keeps
            ``meta_info`` to itself.
        marks: server -> what only has to be answered and graded, after all runs.
        width: how many servers answer for their marks beside one another.
    """

    runs: int
    order: Callable[[int], Sequence[str]]
    timed: Callable[[str, int], Sequence[Part]]
    clock: Callable[[Endpoint, Part], StageTime]
    marks: Callable[[str], Sequence[Part]]
    width: int
    looks: Callable[[str, int], Sequence[Part]] = _no_parts


@dataclass(frozen=True, slots=True)
class Played(Generic[StageTime]):
    """What a match brought back: what was timed, what was looked at, what was graded."""

    timed: list[StageTime] = field(default_factory=list)
    looks: list[BenchRun] = field(default_factory=list)
    marks: list[BenchRun] = field(default_factory=list)


class Watcher(Generic[StageTime]):
    """What a program shows of a match as it goes on; nothing by itself."""

    def turn(self, server: str, run: int, parts: Sequence[Part]) -> None:
        """A server's turn begins."""

    def timed(self, found: StageTime) -> None:
        """A part of it was timed."""

    def marks(self, parts: dict[str, Sequence[Part]]) -> None:
        """Servers begin to answer for their marks: name -> its parts."""

    def answered(self) -> None:
        """One more answer of those that ``ask`` sends; from any thread."""


@dataclass(frozen=True, slots=True)
class Match:
    """The servers and what they are asked; ``asking`` is made for a way's own parameters."""

    pool: Pool
    task: Assignment
    asking: Callable[[Variant], Asking]

    def play(self, preset: Preset[StageTime], watcher: Watcher[StageTime]) -> Played[StageTime]:
        """All of it. Raises: BenchError, when a server or a request fails."""
        played: Played[StageTime] = Played()
        for run in range(preset.runs):
            for server in preset.order(run):
                with self.pool.awake(server) as (endpoint,):
                    self._turn(preset, watcher, endpoint, run, played)
        names = preset.order(0)
        for group in (names[k : k + preset.width] for k in range(0, len(names), preset.width)):
            played.marks.extend(self._marks(preset, watcher, group))
        return played

    def _turn(
        self,
        preset: Preset[StageTime],
        watcher: Watcher[StageTime],
        endpoint: Endpoint,
        run: int,
        played: Played[StageTime],
    ) -> None:
        parts = preset.timed(endpoint.name, run)
        watcher.turn(endpoint.name, run, parts)
        self.ask(endpoint, Part(parts[0].variant, range(1)))  # its first answers are its slowest
        for part in parts:
            played.timed.append(preset.clock(endpoint, part))
            watcher.timed(played.timed[-1])
        looks = preset.looks(endpoint.name, run)
        played.looks.extend(self.ask(endpoint, part) for part in looks)

    def _marks(
        self, preset: Preset[StageTime], watcher: Watcher[StageTime], names: Sequence[str]
    ) -> list[BenchRun]:
        parts = {name: found for name in names if (found := preset.marks(name))}
        if not parts:
            return []
        watcher.marks(parts)

        def play(endpoint: Endpoint) -> list[BenchRun]:
            return [
                self.ask(endpoint, part, on_answer=watcher.answered)
                for part in parts[endpoint.name]
            ]

        with self.pool.awake(*parts) as endpoints:
            legs = run_together([partial(play, endpoint) for endpoint in endpoints], len(parts))
        return [self.graded(leg) for leg in chain.from_iterable(legs)]

    def ask(
        self, endpoint: Endpoint, part: Part, on_answer: Callable[[], None] = lambda: None
    ) -> BenchRun:
        """One part by our own clock, with every answer's ``meta_info``, not yet graded."""
        return ask(
            endpoint,
            self.task.items,
            part.indices,
            variant=part.variant,
            run=part.run,
            concurrency=part.concurrency,
            asking=self.asking(part.variant),
            on_answer=on_answer,
        )

    def graded(self, leg: BenchRun) -> BenchRun:
        """With scores. Not where answers arrive, see ``ask.graded``."""
        return graded(leg, self.task.items, self.task.grade)
