"""Parts of one server's engine, made by ``build`` and shared by all iterations."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.counters import Counters
from sglang_parse.core.phases import MODEL, DraftKey, Phase
from sglang_parse.core.policy.controller import Controller
from sglang_parse.core.stage import StageTime
from sglang_parse.engine.broadcast import broadcast_object
from sglang_parse.engine.commit import Committer
from sglang_parse.engine.drafting.drafter import Drafter
from sglang_parse.engine.eagle import EagleDecoder
from sglang_parse.engine.faults import DraftGuard
from sglang_parse.engine.judge.judge import Judge
from sglang_parse.engine.schedule import Schedule
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.chain import SourceChain
from sglang_parse.engine.timing import StageTimer
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
    layout: str
    timer: StageTimer = field(init=False)

    def __post_init__(self) -> None:
        self.timer = StageTimer(self.verifier.target.runner.device)

    @property
    def reads_drafts_late(self) -> bool:
        """Whether a pass may be launched before the host has its drafts' tokens: none is in a
        question, and no recurrent state lags behind."""
        asks = self.judge is not None and self.judge.question is not None
        return not asks and self.verifier.states is None

    def key_of(self, req: Req) -> DraftKey | None:
        """The key of a request that follows a draft of the draft model, unless it rests."""
        state = req.parse_state
        is_drafted = state.phase in (Phase.DRAFTING, Phase.VERIFYING) or state.in_segment
        counts = is_drafted and state.draft.source == MODEL and self.drafter is not None
        if not counts or self.controller.rests(state.draft_key, state.num_failed):
            return None
        return state.draft_key

    def observe(
        self,
        stages: Sequence[StageTime],
        keys: Sequence[DraftKey | None],
        tokens: Sequence[Sequence[int]],
    ) -> None:
        """Learns from an iteration; with the same stage times on all ranks where they decide.

        Args:
            keys, tokens: per request, as ``key_of`` it, and its output tokens.
        """
        if self.controller.is_timed:
            stages = broadcast_object(stages)
        self.controller.observe(stages, [*zip(keys, map(len, tokens), strict=True)])
        self.counters.drafting_speedup = self.controller.speedup
        self.counters.last_plan = self.controller.last_plan
