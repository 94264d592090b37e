"""Adaptive drafting: whether a request drafts, how many tokens, in which chunks.

Drafting of a key is judged by what it did: the tokens that requests got in a window, against those
of decode steps in the same time. While it is suspended, single requests probe. Costs choose lengths
and keep latency bounds. Time is the sum of stage times: nothing reads a clock, so that the same
observations give the same decisions.
"""

from __future__ import annotations

import math
from collections import OrderedDict
from collections.abc import Iterable, Sequence

from sglang_parse.core.block import ONE_TOKEN, BlockKind
from sglang_parse.core.doubt import Doubt
from sglang_parse.core.eagle_gate import EaglePrefills
from sglang_parse.core.pace import Pace
from sglang_parse.core.phases import DraftKey, DraftPlan
from sglang_parse.core.policy.constants import DEFAULTS, PolicyConfig
from sglang_parse.core.policy.costs import BlockChoice, StageCost
from sglang_parse.core.policy.drafting import Acceptance, KeyStats
from sglang_parse.core.policy.limits import ADAPTIVE, Limits, draft_lengths
from sglang_parse.core.round import Round
from sglang_parse.core.stage import Stage, StageTime

DRAFTING_OFF = "drafting is off (--parse-drafting never)"


class Controller:
    """One per server; every tensor-parallel rank feeds its own with rank 0's times.

    Args:
        mode: "auto"; "always" drafts as ``limits`` say, "never" not.
        kinds: kinds of blocks that may draft.

    Attributes:
        num_running: running requests, with the one that asks; set before each iteration.
        last_plan: None before the first plan.
        no_draft_reason: why ``plan`` returned None the last time.
        speedup: latest measured speedup over decode steps; None before the first.
        head_ms, head_steps: time and forwards of an EAGLE-3 head in the latest decode step; 0
            before the first, or without one.
    """

    def __init__(
        self,
        limits: Limits = ADAPTIVE,
        mode: str = "auto",
        config: PolicyConfig = DEFAULTS,
        kinds: Sequence[BlockKind] = (ONE_TOKEN,),
    ) -> None:
        self.limits, self.mode, self.config, pace = limits, mode, config, Pace()
        self.blocks = BlockChoice(kinds, config)
        self.num_running, self.no_draft_reason, self._tokens_per_step = 1, "", 1.0
        self.last_plan: DraftPlan | None = None
        self.speedup: float | None = None
        self._stats: OrderedDict[DraftKey, KeyStats] = OrderedDict()
        self._costs = {stage: StageCost(config, pace) for stage in Stage}
        self._chosen: dict[DraftKey, tuple[float, int, float]] = {}  # since the last iteration
        self._num_drafting, self._num_decoding, self._num_asked, self._has_plain = 1, 0, 0, False
        self._now = self._debt_ms = self.head_ms = self.head_steps = 0.0
        self._eagle, self._sharing = EaglePrefills(), 1.0

    @property
    def is_adaptive(self) -> bool:
        """Whether observed stage times decide about drafts."""
        return self.mode == "auto"

    @property
    def is_timed(self) -> bool:
        """Whether observed stage times decide anything."""
        return self.is_adaptive or len(self.blocks.costs) > 1

    def rests(self, key: DraftKey, num_failed: int) -> bool:
        """Whether so many failed drafts in a row, where drafting pays in general, tell about a
        request only."""
        is_known = self.stats(key).switch(self.num_running).speedup is not None
        return is_known and num_failed >= self.config.max_failed

    # -- drafts -----------------------------------------------------------------

    def plan(self, key: DraftKey, num_failed: int = 0, *, always: bool = False) -> DraftPlan | None:
        """Plans the next draft of a request; None if it decodes a token instead, for
        ``no_draft_reason``. The plan may be a probe, so call this once per draft.

        Args:
            num_failed: consecutive drafts of this request that brought nothing.
            always: the request asks for drafts whether they pay or not.
        """
        limits, chosen = self.limits, self._choose(key, num_failed)
        if not chosen and not always:
            return None
        is_one = chosen and limits.question_rows and "max_prefixes" not in limits.fixed
        length = limits.draft_tokens if "draft_tokens" in limits.fixed else chosen
        stats, least = self.stats(key), self._best_now(key)[2] if limits.allows_doubt else 0.0
        self.last_plan = DraftPlan(
            draft_tokens=min(length or self.config.probe_tokens, limits.draft_tokens),
            max_prefixes=1 if is_one else limits.max_prefixes,
            draft_chunk=limits.draft_chunk,
            speedup=stats.switch(self.num_running).speedup if chosen and self.is_adaptive else None,
            doubt=Doubt(stats.acceptance.chances.by_level(), least) if least else None,
        )
        return self.last_plan

    def _no_draft(self, reason: str) -> int:
        self.no_draft_reason = reason
        return 0

    def _choose(self, key: DraftKey, num_failed: int) -> int:
        """Returns the draft tokens of a request; 0 to decode."""
        if self.mode == "always":
            return self.limits.draft_tokens
        if self.mode == "never":
            return self._no_draft(DRAFTING_OFF)
        if key[0] > 1:
            return self._no_draft("a threshold above 1 accepts no draft")
        config, stats = self.config, self.stats(key)
        switch = stats.switch(self.num_running)
        self._num_asked += 1
        step, failures = self._costs[Stage.DECODE], max(0, num_failed + 1 - config.max_failed)
        if not step.knows(self.num_running):
            switch.num_timed += 1
            if switch.num_timed <= 8 * self.num_running:  # steps of this size may never come
                return self._no_draft("plain decoding is being timed, to compare drafting with it")
        if switch.is_on:
            if self._num_asked % 2**failures:
                return self._no_draft("the last drafts of this request brought nothing")
            length = self._best_now(key)[1]
            return max(min(4, length), length >> failures)
        if self._now < switch.probe_at:
            return self._no_draft(f"drafting suspended: speedup {switch.speedup or 0:.2f}, below 1")
        stats.begin(0, probing=switch)
        stats.lost_ms = 0.0
        wait_ms = max(switch.wait_ms, config.retry_every * (step.at(self.num_running) or 0.0))
        switch.probe_at = self._now + wait_ms  # for another one, should its request be aborted
        return config.probe_tokens

    def _best_now(self, key: DraftKey) -> tuple[float, int, float]:
        if key not in self._chosen:
            self._chosen[key] = self._best(self.stats(key), self._num_drafting)
        return self._chosen[key]

    def _best(self, stats: KeyStats, num_drafting: int) -> tuple[float, int, float]:
        """Returns the expected speedup if so many requests draft, infinity before costs are known,
        the draft tokens with the most output per ms, and ``Doubt.least``."""
        token_ms, step_ms = self.blocks.per_token(num_drafting), self.ms(Stage.DECODE)
        if not self.ms(Stage.VERIFY, 1) or not self.blocks.knows(num_drafting):
            return math.inf, self.config.probe_tokens, 0.0

        def ms(num_drafted: float) -> float:
            """Of a round: drafting, a step between two chunks if others decode, and a pass."""
            draft_ms = num_drafted * token_ms
            if self._num_decoding and step_ms:
                draft_ms += draft_ms // (self.config.chunk_steps * step_ms) * step_ms
            rows = num_drafting * (1 + num_drafted + self.limits.question_rows)
            return draft_ms + 2 * self.ms(Stage.SCHEDULER) + self.ms(Stage.VERIFY, rows)

        late_ms = min(stats.round_ms - ms(stats.round_tokens), 2 * self.ms(Stage.VERIFY))
        wait_ms = max(0.0, late_ms) if self.blocks.current.size > 1 else 0.0  # for the slowest
        best = (0.0, 0)
        for length in draft_lengths(self.limits.draft_tokens):
            num_drafted, num_output = stats.acceptance.expect(length)
            best = max(best, ((1 + num_output) / (ms(num_drafted) + wait_ms), length))
        speedup, length = best[0] * step_ms / self._tokens_per_step, best[1]
        measured = stats.switch(self.num_running).speedup or speedup
        num_steps = self.steps_in((ms(length) - ms(0)) / length)
        return speedup, length, min(1.0, measured * self._tokens_per_step * num_steps)

    def ms(self, stage: Stage, size: float = 0) -> float:
        """Expected ms of a stage of this size, by default all running requests; 0 if unknown."""
        return self._costs[stage].at(size or self.num_running) or 0.0

    def observe_round(self, key: DraftKey, one: Round, num_failed: int = 0) -> None:
        """Records a verified draft of the draft model; ``num_failed`` before it, as in ``plan``."""
        if self.rests(key, num_failed):
            return
        stats = self.stats(key)
        stats.acceptance.observe(one, self.config.memory * max(1, self._num_drafting))
        stats.num_ignored -= 1
        if stats.num_ignored < 0:
            stats.window.num_rounds += 1
            stats.window.num_drafted += one.num_drafted

    def stats(self, key: DraftKey) -> KeyStats:
        """Returns the statistics of a key; a new one expects what the nearest threshold's did."""
        if key not in self._stats:
            known = [other for other in self._stats if other[1] == key[1]]
            nearest = min(known, key=lambda other: abs(other[0] - key[0]), default=None)
            rate = self._stats[nearest].acceptance.error_rate if nearest else self.config.error_rate
            self._stats[key] = KeyStats(Acceptance(rate))
        self._stats.move_to_end(key)
        while len(self._stats) > self.config.max_keys:
            self._stats.popitem(last=False)
        return self._stats[key]

    # -- iterations -------------------------------------------------------------

    def observe(
        self, stages: Iterable[StageTime], outputs: Sequence[tuple[DraftKey | None, int]]
    ) -> None:
        """Records an iteration.

        Args:
            outputs: per running request its output tokens, and its key if it follows a draft of the
                draft model and does not rest.
        """
        learned = [(timed, self._learn(timed)) for timed in stages]
        self._chosen.clear()
        busy_ms = sum(timed.ms for timed, _ in learned if timed.stage is not Stage.SCHEDULER)
        self._now += busy_ms
        step_ms = self._costs[Stage.DECODE].at(max(1, len(outputs))) or 0.0
        bound_ms = self._has_plain * self.limits.max_slowdown * step_ms
        self._debt_ms = max(0.0, self._debt_ms + busy_ms - bound_ms) if bound_ms else 0.0
        rest = [num_tokens for key, num_tokens in outputs if key is None]
        self._num_drafting = len(outputs) - len(rest) or max(1, len(outputs))
        all_ms = [ms for _, ms in learned if ms is not None]
        is_cold, ms = not step_ms or len(all_ms) < len(learned), sum(all_ms)
        for key in dict.fromkeys(key for key, _ in outputs if key is not None):
            stats, tokens = self.stats(key), [count for other, count in outputs if other == key]
            if is_cold:
                stats.begin(self.num_running)
                continue
            num_steps = ms * self._tokens_per_step / (step_ms + self.ms(Stage.SCHEDULER))
            # Those of other keys have drafts of their own to be judged by.
            per_request = (sum(tokens) + sum(rest)) / (len(tokens) + len(rest))
            stats.window.num_steps += num_steps
            stats.window.own += sum(tokens) / len(tokens)
            stats.window.all += per_request
            stats.window.request_ms += ms * len(tokens)
            stats.lost_ms += ms * (1 - per_request / max(1e-9, num_steps))
            # A probe shows what one draft brings; others' drafts cost more, or share its forwards.
            expected = self._best(stats, self.num_running)[0] if stats.probing else math.inf
            stats.judge(len(tokens), self.num_running, expected, self._now, self.config)
            self.speedup = stats.switch(self.num_running).speedup or self.speedup

    def _learn(self, timed: StageTime) -> float | None:
        """Returns as ``StageCost.add``. A decode step is the verify pass with the fewest rows."""
        if timed.stage is Stage.DRAFT:
            return self.blocks.observe(timed)
        size, weight = max(1, timed.size), self.config.mean_weight
        if timed.stage is Stage.VERIFY:
            self._sharing += weight * (timed.share - self._sharing)
        if timed.stage is Stage.DECODE:
            self._tokens_per_step += weight * (timed.num_tokens / size - self._tokens_per_step)
            self._costs[Stage.VERIFY].add(timed.num_rows or size, timed.ms - timed.head_ms)
            if timed.head_ms:
                self.head_ms, self.head_steps = timed.head_ms, timed.num_forwards
        return self._costs[timed.stage].add(size, timed.ms, timed.graphs)

    def observe_prefill(self, ms: float, num_eagle_tokens: int = 0, eagle_ms: float = 0.0) -> None:
        """Records a prefill of requests that may draft: they finish sooner, so they cause prefills
        more often than plain ones would; ``num_eagle_tokens``: prompt tokens that the EAGLE-3 head
        processed, in ``eagle_ms``."""
        if self._has_plain and self.limits.max_slowdown:
            self._debt_ms += ms
        self._eagle.see(num_eagle_tokens, eagle_ms, self.config)

    def limit_iteration(
        self,
        num_drafting: int,
        verify_rows: Sequence[int],
        num_decoding: int,
        num_plain: int = 0,
        *,
        may_join: bool = False,
    ) -> tuple[int, int]:
        """Limits the next iteration to keep the latency bounds of requests that decode.

        If none does, drafts are written in one go, and a ready one waits for those that may join
        its verify pass: two alternating halves need twice as many forwards.

        Args:
            verify_rows: rows of each draft that is ready for verification, longest waiting first.
            num_decoding: requests that decode; ``num_plain``: those of them that never draft.
            may_join: this iteration completes all drafts, and no ready draft has waited yet.

        Returns:
            Draft tokens of this iteration, and how many ready drafts to verify: at least one of
            each, none while plain requests have a fairness debt: what iterations beside them
            exceeded ``max_slowdown`` by.
        """
        limits, chunk, num_ready = self.limits, self.limits.draft_chunk, len(verify_rows)
        self._has_plain, self._num_decoding = num_plain > 0, num_decoding
        is_fixed = "draft_chunk" in limits.fixed
        if self.mode != "auto":
            return chunk, num_ready
        if not num_decoding:
            return chunk, 0 if may_join and num_drafting else num_ready
        step_ms, token_ms = self.ms(Stage.DECODE), self.blocks.per_token(max(1, num_drafting))
        if not step_ms or token_ms == math.inf:
            return chunk if is_fixed else min(chunk, self.config.probe_tokens), num_ready
        if self._has_plain and self._debt_ms:
            return 0, 0
        bounds = [limits.max_itl_ratio, limits.max_slowdown * self._has_plain]
        bound_ms = step_ms * min(filter(None, bounds), default=math.inf)
        verify, total, num_verified = self._costs[Stage.VERIFY], num_decoding, 0
        for rows in verify_rows:
            if num_verified and (verify.at(total + rows) or 0.0) > bound_ms:
                break
            num_verified, total = num_verified + 1, total + rows
        if is_fixed:
            return chunk, num_verified
        longest = min(chunk, self.last_plan.draft_tokens if self.last_plan else chunk)
        num_chunks = round(longest * token_ms / (self.config.chunk_steps * step_ms))
        chunk = math.ceil(longest / num_chunks) if num_chunks > 1 else chunk
        left_ms = bound_ms - (verify.at(total) or 0.0)
        return max(1, int(min(chunk, left_ms / token_ms))), num_verified

    # -- costs in decode steps, and the EAGLE-3 head ------------------------------

    def steps_in(self, ms: float) -> float:
        """Decode steps that a request misses while it waits; 0 unless adaptive."""
        step_ms = self.ms(Stage.DECODE) if self.is_adaptive else 0.0
        return ms / step_ms if step_ms else 0.0

    def tokens_in(self, ms: float) -> float:
        """Tokens that the running requests decode in that time; 0 unless adaptive."""
        return self.steps_in(ms) * self.num_running * self._tokens_per_step

    def extra_cost(self, rows: int, *, always: bool = False) -> float:
        """Cost of verifying so many rows of one request instead of a decode step of it, in tokens
        that the running requests decode in that time, and those that an EAGLE-3 head would have
        added to the step; 0 unless adaptive, or if the request ``always`` drafts. As many drafts
        as in the latest passes share a pass: one alone would pay for all that it has beside
        rows."""
        if always or not self.is_adaptive:
            return 0.0
        step_ms = self.ms(Stage.VERIFY) + self.head_ms
        if not (step_ms and self.steps_in(1.0)):
            return self.config.row_cost * rows
        num_drafts = max(1.0, self._sharing * self.num_running)
        pass_ms = self.ms(Stage.VERIFY, self.num_running + num_drafts * (rows - 1))
        num_steps = 1 + self.num_running * max(0.0, pass_ms / step_ms - 1) / num_drafts
        return max(0.0, self._tokens_per_step * num_steps - 1)

    def is_step_due(self) -> bool:
        """Whether a decode step should be timed again, so that no text drafts in this iteration."""
        return self.is_adaptive and self._costs[Stage.VERIFY].is_due(self.num_running)

    def tail_cost(self, num_drafted: int, count: int, *, always: bool) -> float:
        """Cost of ``count`` rows more behind a draft, in a pass that verifies such drafts of all
        running requests, in tokens that these decode in that time; 0 as in ``extra_cost``."""
        ms = [self.ms(Stage.VERIFY, self.num_running * (1 + num_drafted) + n) for n in (0, count)]
        return 0.0 if always else self.tokens_in(ms[1] - ms[0])

    def drafted_tokens(self, key: DraftKey) -> float:
        """Tokens that the draft model's drafts bring in the time of a decode step's token, as
        expected until they are measured at this load; 1 where they are suspended, or nothing is
        timed yet."""
        switch, expected = self.stats(key).switch(self.num_running), self._best_now(key)[0]
        known = switch.speedup or (expected if expected < math.inf else 1.0)
        return known if switch.is_on else 1.0

    def observe_answer(self, key: DraftKey, num_tokens: int, num_decoded: int) -> None:
        """Records a finished answer: the tokens that a head processes for it, prompt included, and
        those of decode steps."""
        self.stats(key).gate.observe(num_tokens, num_decoded, self.config)

    def uses_eagle(self, key: DraftKey) -> bool:
        """Decides whether the head runs for a new request: see ``EagleGate``."""
        return self.stats(key).gate.opens(self.tokens_in(self._eagle.token_ms), self.config)
