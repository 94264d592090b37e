"""Whether drafts of one key pay, by what they did, and how far they are accepted."""

from __future__ import annotations

import math
from dataclasses import dataclass, field

from sglang_parse.core.doubt import Chances
from sglang_parse.core.eagle_gate import EagleGate
from sglang_parse.core.policy.constants import PolicyConfig
from sglang_parse.core.round import Round


@dataclass(slots=True)
class Acceptance:
    """Decayed counts of verified drafts; before the first, ``prior`` errors per draft token.

    Attributes:
        output, errors: draft tokens that were output, and drafts with an error; of a draft in doubt
            the one at its last token was foreseen, and its length has no part in it.
        drafted, ends: draft tokens, and drafts that ended the answer, or in doubt.
        chances: of acceptance, by how sure the draft model is.
        unverified: mean draft tokens after the last prefix, which are carried over.
    """

    prior: float
    output: float = 0.0
    errors: float = 0.0
    drafted: float = 0.0
    ends: float = 0.0
    unverified: float = 0.0
    chances: Chances = field(default_factory=Chances)

    @property
    def error_rate(self) -> float:
        return (1 + self.errors) / (1 / self.prior + self.output)

    def observe(self, one: Round, memory: float) -> None:
        """Records a draft, one of about ``memory`` that count."""
        keep = 1 - 1 / memory
        self.output = keep * self.output + one.num_output
        self.errors = keep * self.errors + (one.num_output < one.num_verified - one.draft.in_doubt)
        self.drafted = keep * self.drafted + one.num_drafted
        self.ends = keep * self.ends + (one.is_finished or one.draft.in_doubt)
        self.chances.observe(one.draft.levels, one.num_output, keep)
        self.unverified += (one.num_drafted - one.num_verified - self.unverified) / memory

    def expect(self, draft_tokens: int) -> tuple[float, float]:
        """Returns mean draft tokens and mean output draft tokens of drafts of this length."""
        ends, length = (1e-3 + self.ends) / (1 + self.drafted), draft_tokens - self.unverified
        errors, length = ends + self.error_rate, max(1.0, length)
        return (1 - math.exp(-ends * length)) / ends, (1 - math.exp(-errors * length)) / errors


@dataclass(slots=True)
class Window:
    """What happened since it began.

    Attributes:
        num_steps: tokens of a request that decodes for as long.
        own, all: tokens per request that drafts with this key; and per one that does, or decodes.
        num_rounds, num_drafted: verified drafts, and their tokens.
        request_ms: time of each drafting request.
    """

    num_steps: float = 0.0
    own: float = 0.0
    all: float = 0.0
    num_rounds: int = 0
    num_drafted: int = 0
    request_ms: float = 0.0


@dataclass(slots=True)
class Switch:
    """Whether drafting of one key is on at one load; all times are of the controller.

    Attributes:
        speedup: measured, over decode steps; None before the first window.
        paid_at: when drafting paid last, at the earliest when it was judged first.
        probe_at, wait_ms: while it is suspended, when the next probe is due, and after what wait.
        num_timed: tokens that were decoded to time decode steps.
    """

    is_on: bool = True
    speedup: float | None = None
    paid_at: float | None = None
    probe_at: float = 0.0
    wait_ms: float = 0.0
    num_timed: int = 0

    def judge(
        self, brought: float, lost_ms: float, now: float, config: PolicyConfig, *, is_probe: bool
    ) -> None:
        """Suspends or resumes drafting.

        Args:
            brought: tokens that the window, or the probe, brought per token of decode steps.
            lost_ms: what was lost since drafting paid last, or by the probe.
        """
        known = self.speedup if self.is_on and self.speedup is not None else brought
        self.speedup = (known + brought) / 2
        self.is_on = brought >= config.resume_above if is_probe else self.speedup >= 1
        if self.paid_at is None or (self.is_on and not is_probe):
            self.paid_at = now
        if self.is_on:
            self.speedup = None if is_probe else self.speedup  # it was one short draft's
            return
        lost_ms = max(0.0, lost_ms)
        longest = min(lost_ms / config.probe_loss, config.max_wait * (now - self.paid_at))
        self.wait_ms = max(lost_ms / config.first_loss, longest)
        self.probe_at = now + self.wait_ms


@dataclass(slots=True)
class KeyStats:
    """What is known of one key's drafts.

    Attributes:
        switches: by octaves of running requests.
        probing: the switch that a probe in flight is for.
        num_ignored: verified drafts until the window begins: theirs began before it.
        lost_ms: time lost since drafting paid last, or since a probe began.
        round_ms, round_tokens: mean duration and draft tokens of the last window's rounds.
        gate: whether an EAGLE-3 head pays beside these drafts.
    """

    acceptance: Acceptance
    switches: dict[int, Switch] = field(default_factory=dict)
    window: Window = field(default_factory=Window)
    probing: Switch | None = None
    num_ignored: int = 0
    lost_ms: float = 0.0
    round_ms: float = 0.0
    round_tokens: float = 0.0
    gate: EagleGate = field(default_factory=EagleGate)

    def switch(self, num_running: int) -> Switch:
        """Returns the switch at this load; a new one is set as that of the nearest load."""
        octave = round(math.log2(max(1, num_running)))
        if octave not in self.switches:
            nearest = min(self.switches, key=lambda known: abs(known - octave), default=None)
            self.switches[octave] = Switch(nearest is None or self.switches[nearest].is_on)
            self.begin(num_running)
        return self.switches[octave]

    def begin(self, num_ignored: int, probing: Switch | None = None) -> None:
        """Begins a window."""
        self.window, self.probing, self.num_ignored = Window(), probing, num_ignored

    def judge(
        self, num_requests: int, num_running: int, expected: float, now: float, config: PolicyConfig
    ) -> None:
        """Judges a probe that is over, or a window in which most of ``num_requests`` drafted;
        ``expected``: speedup if all running requests draft."""
        window, switch = self.window, self.switch(num_running)
        num_steps, lost_ms = max(1e-9, window.num_steps), self.lost_ms
        if self.probing is not None:
            if window.num_rounds:
                brought = min(window.own / num_steps, expected)
                self.probing.judge(brought, lost_ms, now, config, is_probe=True)
                self.begin(2 * num_running)  # the others draft from their next tokens on
        elif self.num_ignored > 0 or not switch.is_on:
            self.window = Window()
        elif window.num_rounds >= max(config.window, config.window_share * num_requests):
            self.round_ms = window.request_ms / window.num_rounds
            self.round_tokens = window.num_drafted / window.num_rounds
            brought = min(window.own, window.all) / num_steps
            switch.judge(brought, lost_ms, now, config, is_probe=False)
            self.window, self.lost_ms = Window(), 0.0 if switch.is_on else lost_ms
