"""Parts of one server's engine, made by ``build`` and shared by all iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.counters import Counters
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.policy.stage_cost import StageTime
from sglang_parse.engine.broadcast import broadcast_object
from sglang_parse.engine.commit import Committer
from sglang_parse.engine.drafting.drafter import Drafter
from sglang_parse.engine.eagle import EagleDecoder
from sglang_parse.engine.faults import DraftGuard
from sglang_parse.engine.schedule import Schedule
from sglang_parse.engine.sources.chain import SourceChain
from sglang_parse.engine.timing import StageTimer
from sglang_parse.engine.verdicts import Judge
from sglang_parse.engine.verify import Verifier
from sglang_parse.startup.certificates import Certified


@dataclass(slots=True)
class Engine:
    """Everything that an iteration works with; ``drafter`` is None without a draft model,
    ``eagle`` without an EAGLE-3 head, ``judge`` in token mode."""

    config: ParseConfig
    drafter: Drafter | None
    draft_guard: DraftGuard
    eagle: EagleDecoder | None
    judge: Judge | None
    verifier: Verifier
    committer: Committer
    schedule: Schedule
    sources: SourceChain
    controller: Controller
    counters: Counters
    certified: Certified
    timer: StageTimer = field(default_factory=StageTimer)

    def observe(self, stages: Sequence[StageTime]) -> None:
        """Learns from an iteration's stage times; the same on all ranks where they decide."""
        choice = self.drafter.choice if self.drafter else None
        if self.controller.is_adaptive or (choice and len(choice.costs) > 1):
            stages = broadcast_object(stages)
        self.controller.observe(stages)
        if choice:
            choice.observe(stages)
        self.counters.expected_speedup = self.controller.speedup
        self.counters.last_plan = self.controller.last_plan
