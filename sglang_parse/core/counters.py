"""Counters of one request and of all requests of a scheduler process.

Everything counted is already on the host, so counting never syncs the device. ``telemetry`` names
and publishes the counters.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Sequence
from dataclasses import asdict, fields
from typing import Any
from weakref import ref

from sglang_parse.core.phases import DraftPlan, Phase, Stats
from sglang_parse.core.request import RequestState
from sglang_parse.core.round import Round

_STAGES = ("prefill", "draft", "verify", "decode")
# Count of a request -> (counter, label value, factor), where not simply (count_total, "", 1).
_COUNTERS = {f"{stage}_ms": ("stage_seconds_total", stage, 1e-3) for stage in _STAGES}
_COUNTERS["target_tokens"] = ("target_tokens_total", "parse", 1.0)
_SOURCE_COUNTERS = {
    "verify_ms": ("source_verify_seconds_total", 1e-3),
    "wait_ms": ("source_wait_seconds_total", 1e-3),
}
_STATS = tuple(field.name for field in fields(Stats))


def request_counts(req: Any) -> dict[str, float]:
    """Returns the counts of one request as its client sees them."""
    telemetry = req.parse_state.notes.telemetry
    values = {name: getattr(telemetry.stats, name) for name in _STATS}
    accepted, matched = telemetry.last_of_output(_num_hidden(req))
    values["accepted_tokens"] -= accepted
    values["matched_tokens"] -= matched
    output_ids = req.output_ids_through_stop if req.finished() else req.parse_state.output_ids
    values["target_tokens"] = len(output_ids) - values["accepted_tokens"]
    return values


def source_counts(req: Any) -> dict[str, dict[str, float]]:
    """Returns the counts of each source of a request's drafts as its client sees them."""
    state = req.parse_state
    counts = {source: asdict(stats) for source, stats in state.notes.telemetry.sources.items()}
    for source, accepted, matched in state.notes.telemetry.last_by_source(_num_hidden(req)):
        counts[source]["accepted_tokens"] -= accepted
        counts[source]["matched_tokens"] -= matched
    return counts


def _num_hidden(req: Any) -> int:
    """Tokens after a stop inside the last run, which are not output."""
    return len(req.output_ids) - len(req.output_ids_through_stop) if req.finished() else 0


Totals = dict[tuple[str, str], float]
"""(counter, label value) -> total."""


class Counters:
    """Totals of this process.

    Each update adds the growth of a request's counts since its last update.

    Attributes:
        collects_samples: whether to collect histogram samples; then call ``drain_samples``.
        drafting_speedup, last_plan: see ``Controller.speedup``.
        simulated_accept_ratio: see ``simulation``; None if verdicts decide.
        certificate_mismatch: properties in which this server differs from its certificate's.
        verdict_drift: distance of recent verdicts from the certificate's, or those of the verdict
            head's training, 0 to 1.
        judge: where verdicts come from; None in token mode.
        graphs: by kind of CUDA graph, how many times as fast as in pieces its forwards are; 0 where
            the start-up check has switched it off.
    """

    def __init__(self) -> None:
        self.totals: Totals = defaultdict(float)
        self.collects_samples = False
        # SGLang owns the requests: an idle server keeps no prompt and no answer.
        self._launched: Sequence[ref[Any]] = ()
        self._launched_before: Sequence[ref[Any]] = ()
        self.drafting_speedup: float | None = None
        self.last_plan: DraftPlan | None = None
        self.simulated_accept_ratio: float | None = None
        self.certificate_mismatch: Collection[str] = ()
        self.verdict_drift: float | None = None
        self.judge: str | None = None
        self.graphs: dict[str, float] = {}
        self._samples: dict[str, list[float]] = defaultdict(list)

    def count(self, name: str, amount: float = 1.0, label_value: str = "") -> None:
        self.totals[name, label_value] += amount

    def sample(self, name: str, values: Sequence[float]) -> None:
        if self.collects_samples:
            self._samples[name].extend(values)

    def drain_samples(self) -> dict[str, list[float]]:
        """Returns the samples since the last call, by histogram."""
        samples, self._samples = self._samples, defaultdict(list)
        return samples

    def count_round(self, one: Round) -> None:
        self.count("verified_tokens_total", one.num_verified)
        self.sample("accept_ratio", (one.accepted_len / max(1, one.num_verified),))
        self.sample("verdict", one.verdicts.values)

    def sample_itl(self, state: RequestState, now: float) -> None:
        """Records the ITL of a decoding request that outputs tokens at ``now``."""
        telemetry = state.notes.telemetry
        if telemetry.last_decode_at is not None:
            self.sample("decode_itl_seconds", (now - telemetry.last_decode_at,))
        telemetry.last_decode_at = now if state.target_decodes else None

    def record_launch(self, reqs: Sequence[Any], *, overlap: bool) -> None:
        self._launched_before = self._launched if overlap else ()
        self._launched = [*map(ref, reqs)]

    def sample_kv_slots(self, reqs: Sequence[Any]) -> None:
        """Samples the KV slots of a decode iteration after their allocation."""
        if self.collects_samples:
            held = sum(req.kv.kv_allocated_len - req.parse_state.committed_len for req in reqs)
            self.sample("kv_slots_held", (held,))

    def update(self, req: Any) -> None:
        """Adds the growth of a request's counts, without tokens repeated after a retraction."""
        state = getattr(req, "parse_state", None)
        if state is None:
            return
        now = {**request_counts(req), "requests": 1, "faults": int(bool(state.fault))}
        for count, value in now.items():
            growth = state.notes.telemetry.count(count, value)
            if growth > 0:
                name, label_value, factor = _COUNTERS.get(count, (f"{count}_total", "", 1.0))
                if state.policy.is_plain and count == "requests":
                    name, label_value = "plain_requests_total", state.policy.plain_reason
                elif state.policy.is_plain and count == "target_tokens":
                    label_value = "plain"
                self.count(name, growth * factor, label_value)
        for source, counts in source_counts(req).items():
            for count, value in counts.items():
                growth = state.notes.telemetry.count(f"{source} {count}", value)
                if growth > 0:
                    name, factor = _SOURCE_COUNTERS.get(count, (f"source_{count}_total", 1.0))
                    self.count(name, growth * factor, source)

    @property
    def latest_reqs(self) -> Sequence[Any]:
        """Requests of the latest iteration, and with overlap of the one before, whose result is
        processed after the launch; without those that SGLang has dropped."""
        return _alive((*self._launched, *self._launched_before))

    def update_latest(self) -> None:
        for req in self.latest_reqs:
            self.update(req)

    def count_phases(self) -> dict[str, int]:
        """Returns the number of running requests by phase; WAITING if there are any."""
        running = [req.parse_state.phase for req in _alive(self._launched) if not req.finished()]
        shown = [phase for phase in Phase if phase is not Phase.WAITING or phase in running]
        return {phase.value: running.count(phase) for phase in shown}


def _alive(refs: Sequence[ref[Any]]) -> list[Any]:
    found = (each() for each in refs)
    return [*{id(req): req for req in found if req is not None}.values()]


class Growth:
    """Growth of the counters between two calls of ``advance``."""

    def __init__(self, counters: Counters) -> None:
        self._counters = counters
        self._seen: Totals = {}

    def advance(self) -> Totals:
        """Returns the growth since the last call; (counter, "*") sums all label values."""
        growth: Totals = defaultdict(float)
        for key, total in self._counters.totals.items():
            change = total - self._seen.get(key, 0)
            growth[key] += change
            growth[key[0], "*"] += change
        self._seen = dict(self._counters.totals)
        return growth
