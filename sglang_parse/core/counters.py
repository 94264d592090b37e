"""What PARSE counts: of one request, and of all requests of a scheduler process. No tensors.

Only numbers the host knows anyway: no tensor is read for a count. ``telemetry`` names and
publishes them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import fields
from typing import Any

from sglang_parse.core.phases import DraftPlan, Phase
from sglang_parse.core.request import RequestState, Stats

# Figure of a request -> the counter it adds to, its label's value, the factor.
_COUNTERS = {
    "requests": ("requests_total", "", 1.0),
    "faults": ("faults_total", "", 1.0),
    "rounds": ("rounds_total", "", 1.0),
    "drafted_tokens": ("drafted_tokens_total", "", 1.0),
    "draft_forwards": ("draft_forwards_total", "", 1.0),
    "accepted_tokens": ("accepted_tokens_total", "", 1.0),
    "matched_tokens": ("matched_tokens_total", "", 1.0),
    "target_tokens": ("target_tokens_total", "parse", 1.0),
    "eagle3_steps": ("eagle3_steps_total", "", 1.0),
    "eagle3_tokens": ("eagle3_tokens_total", "", 1.0),
    "kv_truncated_drafts": ("kv_truncated_drafts_total", "", 1.0),
    "skipped_drafts": ("skipped_drafts_total", "", 1.0),
    "prefill_ms": ("stage_seconds_total", "prefill", 1e-3),
    "draft_ms": ("stage_seconds_total", "draft", 1e-3),
    "verify_ms": ("stage_seconds_total", "verify", 1e-3),
    "decode_ms": ("stage_seconds_total", "decode", 1e-3),
}
_STATS = tuple(field.name for field in fields(Stats))


def request_counts(req: Any) -> dict[str, float]:
    """The counters of one request that has reached the worker, as its client sees them."""
    stats = req.parse_state.stats
    values = {name: getattr(stats, name) for name in _STATS}
    num_visible = len(req.parse_state.output_ids)
    if req.finished():
        num_visible = len(req.output_ids_through_stop)
        # A stop inside the last run cut these off; nobody sees them.
        accepted, matched = req.parse_state.at_the_end(len(req.output_ids) - num_visible)
        values["accepted_tokens"] -= accepted
        values["matched_tokens"] -= matched
    values["target_tokens"] = num_visible - values["accepted_tokens"]
    return values


def num_kv_slots(req: Any) -> int:
    """KV slots of a request behind its final ones."""
    return req.kv.kv_allocated_len - req.parse_state.committed_len


Totals = dict[tuple[str, str], float]
"""(counter, value of its label) -> total."""


class Counters:
    """What the requests of this process add up to.

    A request's figures are counted as far as they have grown since it was last looked at, so it
    does not matter how often that happens.

    Attributes:
        totals: the counters.
        collects_samples: whether histograms' samples are kept until they are taken; somebody must
            take them then.
        latest_reqs: the requests of the latest iteration; under overlap of the one before, too, whose
            result comes after the launch.
        expected_speedup, last_plan: as ``controller.Controller``'s.
        simulated_accept_ratio: share of every draft that is kept in place of the verdicts (``simulation``).
        certificate_mismatch: what the server's certificate was made for and is not so here.
        verdict_drift: how far the latest verdicts are from the certificate's, 0 to 1.
    """

    def __init__(self) -> None:
        self.totals: Totals = defaultdict(float)
        self.collects_samples = False
        self.latest_reqs: Sequence[Any] = ()
        self._launched: Sequence[Any] = ()
        self.expected_speedup: float | None = None
        self.last_plan: DraftPlan | None = None
        self.simulated_accept_ratio: float | None = None
        self.certificate_mismatch: Collection[str] = ()
        self.verdict_drift: float | None = None
        self._samples: dict[str, list[float]] = defaultdict(list)

    def count(self, name: str, amount: float = 1.0, label_value: str = "") -> None:
        self.totals[name, label_value] += amount

    def observe(self, name: str, values: Sequence[float]) -> None:
        if self.collects_samples:
            self._samples[name].extend(values)

    def drain_samples(self) -> dict[str, list[float]]:
        """Histogram -> samples since the last call."""
        samples, self._samples = self._samples, defaultdict(list)
        return samples

    def observe_verify(
        self, num_drafted: int, accepted_len: int, verdicts: Sequence[float]
    ) -> None:
        """One draft was judged: its length, what was kept of it, its verdicts."""
        self.count("verified_tokens_total", num_drafted)
        self.observe("accept_ratio", (accepted_len / max(1, num_drafted),))
        self.observe("verdict", verdicts)

    def observe_output(self, state: RequestState, now: float) -> None:
        """A request emits tokens."""
        gap = state.gap(now)
        if gap is not None:
            self.observe("decode_itl_seconds", (gap,))

    def record_launch(self, reqs: Sequence[Any], *, overlap: bool) -> None:
        """An iteration of these requests has begun."""
        before = self._launched if overlap else ()
        self.latest_reqs = list({id(req): req for req in (*reqs, *before)}.values())
        self._launched = reqs

    def observe_kv_slots(self, reqs: Sequence[Any]) -> None:
        """A decode iteration starts: its slots are allocated."""
        if self.collects_samples:
            self.observe("kv_slots_held", (sum(map(num_kv_slots, reqs)),))

    def update(self, req: Any) -> None:
        """Count what a request has added.

        What a retraction takes back (``RequestState.restart``) is not counted again.
        """
        state = getattr(req, "parse_state", None)
        if state is None:
            return
        now = {**request_counts(req), "requests": 1, "faults": int(bool(state.fault))}
        for figure, value in now.items():
            change = state.count(figure, value)
            if change > 0:
                name, label_value, factor = _COUNTERS[figure]
                if state.policy.is_plain and figure == "requests":
                    name, label_value = "plain_requests_total", state.policy.plain_reason
                elif state.policy.is_plain and figure == "target_tokens":
                    label_value = "plain"
                self.count(name, change * factor, label_value)

    def update_latest(self) -> None:
        for req in self.latest_reqs:
            self.update(req)

    @property
    def any_finished(self) -> bool:
        """Whether a request of the latest iteration has."""
        return any(req.finished() for req in self.latest_reqs)

    def count_phases(self) -> dict[str, int]:
        """Requests still running after the latest iteration, by phase."""
        counts = {phase.value: 0 for phase in Phase}
        for req in self._launched:
            if not req.finished():
                counts[req.parse_state.phase.value] += 1
        return counts


class Window:
    """What was added to the counters since the last look."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._seen: Totals = {}

    def advance(self) -> Totals:
        """The growth of every counter since the last call; the labels' values summed up are at
        (counter, "*")."""
        growth: Totals = defaultdict(float)
        for key, total in self._counters.totals.items():
            change = total - self._seen.get(key, 0)
            growth[key] += change
            growth[key[0], "*"] += change
        self._seen = dict(self._counters.totals)
        return growth
