"""PARSE's numbers: of one request for ``meta_info["parse"]``, and of a whole scheduler process.

Only numbers the host knows anyway: no tensor is read for a metric. ``observability`` publishes
them, ``patches/decode_log`` prints them.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from dataclasses import dataclass, fields
from functools import lru_cache
from typing import Any

from sglang_parse.core.request import Phase, Stats


@dataclass(frozen=True, slots=True)
class Metric:
    """One Prometheus metric.

    Attributes:
        name: without the prefix ``sglang:parse_``; counters end in ``_total``.
        text: what it counts.
        label: its own label beside SGLang's; "" for none.
        label_values: the values known beforehand, shown as 0 until something happens.
        buckets: upper bounds, included; a metric with buckets is a histogram, else a counter.
        is_gauge: it is what it was last set to, and not there before.
    """

    name: str
    text: str
    label: str = ""
    label_values: tuple[str, ...] = ("",)
    buckets: tuple[float, ...] = ()
    is_gauge: bool = False


PREFIX = "sglang:parse_"
TENTHS = tuple(i / 10 for i in range(1, 10))
METRICS = (
    Metric("requests_total", "Requests served with PARSE."),
    Metric("plain_requests_total", "Requests served by the plain target.", "reason", ()),
    Metric("faults_total", "Requests PARSE ended with an error."),
    Metric("drafted_tokens_total", "Tokens the draft model wrote."),
    Metric("judged_tokens_total", "Drafted tokens that a verification pass judged."),
    Metric("accepted_tokens_total", "Drafted tokens that were kept: output."),
    Metric(
        "target_tokens_total",
        "Output tokens the target wrote itself; with the accepted ones they are all of the output.",
        "mode",
        ("parse", "plain"),
    ),
    Metric("rounds_total", "Drafts that were judged."),
    Metric("passes_total", "Verification passes: target forwards that judged drafts."),
    Metric("eagle3_steps_total", "Target forwards of one request with an EAGLE-3 head ahead."),
    Metric("eagle3_tokens_total", "Output tokens those wrote, some of target_tokens_total."),
    Metric("short_drafts_total", "Drafts ended or given up because KV slots were short."),
    Metric("skipped_drafts_total", "Drafts not begun because drafting did not pay."),
    Metric(
        "stage_seconds_total",
        "Wall time of each stage.",
        "stage",
        ("prefill", "draft", "verification", "continuation"),
    ),
    Metric(
        "expected_speedup",
        "What drafting was last expected to bring over the plain target; below 1 it rests.",
        is_gauge=True,
    ),
    Metric(
        "simulated_acceptance",
        "Share of each draft that is kept where verdicts are ignored, for benchmarks.",
        is_gauge=True,
    ),
    Metric("verdict", "Verdicts, one per judged prefix.", buckets=(0.01, *TENTHS, 0.99, 1.0)),
    Metric(
        "cut_fraction",
        "Share of each judged draft that was kept.",
        buckets=(0.0, *TENTHS, 0.999, 1.0),
    ),
    Metric(
        "kv_slots_held",
        "KV slots held behind the committed tokens (drafts, questions, next tokens), all running "
        "requests together, once per decode iteration.",
        buckets=(1, 4, 16, 64, 256, 1024, 4096, 16384, 65536),
    ),
)

# Figure of a request -> the counter it adds to, its label's value, the factor.
_COUNTERS = {
    "requests": ("requests_total", "", 1.0),
    "faults": ("faults_total", "", 1.0),
    "rounds": ("rounds_total", "", 1.0),
    "drafted_tokens": ("drafted_tokens_total", "", 1.0),
    "accepted_tokens": ("accepted_tokens_total", "", 1.0),
    "target_tokens": ("target_tokens_total", "parse", 1.0),
    "eagle3_steps": ("eagle3_steps_total", "", 1.0),
    "eagle3_tokens": ("eagle3_tokens_total", "", 1.0),
    "short_drafts": ("short_drafts_total", "", 1.0),
    "skipped_drafts": ("skipped_drafts_total", "", 1.0),
    "prefill_ms": ("stage_seconds_total", "prefill", 1e-3),
    "draft_ms": ("stage_seconds_total", "draft", 1e-3),
    "verification_ms": ("stage_seconds_total", "verification", 1e-3),
    "continuation_ms": ("stage_seconds_total", "continuation", 1e-3),
}
_STATS = tuple(field.name for field in fields(Stats))


def figures(req: Any) -> dict[str, float]:
    """The counters of one request that has reached the worker, as its client sees them."""
    stats = req.parse_state.stats
    values = {name: getattr(stats, name) for name in _STATS}
    num_visible = len(req.parse_state.output_ids)
    if req.finished():
        num_visible = len(req.output_ids_through_stop)
        values["accepted_tokens"] -= _accepted_behind_the_stop(req, num_visible)
    values["target_tokens"] = num_visible - values["accepted_tokens"]
    return values


def _accepted_behind_the_stop(req: Any, num_visible: int) -> int:
    """Accepted draft tokens that a stop inside the last run cut off; nobody sees them."""
    num_cut_off = len(req.output_ids) - num_visible
    return max(0, num_cut_off - req.parse_state.target_run)


def response_info(req: Any) -> dict[str, Any]:
    """The JSON object of one finished request; its keys are documented in the README.

    Requests that never reached the worker (aborted while waiting) have no counters and the
    reason "not started".
    """
    state = getattr(req, "parse_state", None)
    simulated = process_tally().simulated
    note = {} if simulated is None else {"simulated": simulated}
    if state is None:
        return {"mode": "plain", "reason": "not started", **note}
    info: dict[str, Any] = {"mode": "plain" if state.is_plain else "parse", **note}
    if state.is_plain:
        info["reason"] = state.plain_reason
    shown = figures(req)
    if state.continuation:
        info["continuation"] = state.continuation
    else:
        shown = {k: v for k, v in shown.items() if not k.startswith("eagle3_")}
    info.update({k: round(v, 3) if isinstance(v, float) else v for k, v in shown.items()})
    if state.keep_trace:
        info["trace"] = state.trace
    return info


def slots_held(req: Any) -> int:
    """KV slots of a request behind its final ones."""
    return req.kv.kv_allocated_len - req.parse_state.committed_len


Totals = dict[tuple[str, str], float]
"""(counter, value of its label) -> total."""


class Tally:
    """What the requests of this process add up to.

    A request's figures are counted as far as they have grown since it was last settled, so it
    does not matter how often that happens.

    Attributes:
        totals: the counters.
        keeps_samples: whether histograms' samples are kept until they are taken; somebody must
            take them then.
        latest: the requests of the latest iteration; under overlap of the one before, too, whose
            result comes after the launch.
        expected_speedup: as ``switch.OffSwitch.speedup``.
        simulated: share of every draft that is kept in place of the verdicts (``simulation``).
    """

    def __init__(self) -> None:
        self.totals: Totals = defaultdict(float)
        self.keeps_samples = False
        self.latest: Sequence[Any] = ()
        self._launched: Sequence[Any] = ()
        self.expected_speedup: float | None = None
        self.simulated: float | None = None
        self._samples: dict[str, list[float]] = defaultdict(list)

    def count(self, name: str, amount: float = 1.0, label_value: str = "") -> None:
        self.totals[name, label_value] += amount

    def observe(self, name: str, values: Sequence[float]) -> None:
        if self.keeps_samples:
            self._samples[name].extend(values)

    def take_samples(self) -> dict[str, list[float]]:
        """Histogram -> samples since the last call."""
        samples, self._samples = self._samples, defaultdict(list)
        return samples

    def judged(self, num_drafted: int, cut: int, verdicts: Sequence[float]) -> None:
        """One draft was judged: its length, what was kept of it, its verdicts."""
        self.count("judged_tokens_total", num_drafted)
        self.observe("cut_fraction", (cut / max(1, num_drafted),))
        self.observe("verdict", verdicts)

    def launched(self, reqs: Sequence[Any], *, overlap: bool) -> None:
        """An iteration of these requests has begun."""
        before = self._launched if overlap else ()
        self.latest = list({id(req): req for req in (*reqs, *before)}.values())
        self._launched = reqs

    def hold(self, reqs: Sequence[Any]) -> None:
        """A decode iteration starts: its slots are allocated."""
        if self.keeps_samples:
            self.observe("kv_slots_held", (sum(map(slots_held, reqs)),))

    def settle(self, req: Any) -> None:
        """Count what a request has added.

        What a retraction takes back (``RequestState.restart``) is not counted again.
        """
        state = getattr(req, "parse_state", None)
        if state is None:
            return
        now = {**figures(req), "requests": 1, "faults": int(bool(state.fault))}
        for figure, value in now.items():
            change = value - state.settled.get(figure, 0)
            if change > 0:
                state.settled[figure] = value
                name, label_value, factor = _COUNTERS[figure]
                if state.is_plain and figure == "requests":
                    name, label_value = "plain_requests_total", state.plain_reason
                elif state.is_plain and figure == "target_tokens":
                    label_value = "plain"
                self.count(name, change * factor, label_value)

    def settle_latest(self) -> None:
        for req in self.latest:
            self.settle(req)

    def phases(self) -> dict[str, int]:
        """Requests still running after the latest iteration, by phase."""
        counts = {phase.value: 0 for phase in Phase}
        for req in self._launched:
            if not req.finished():
                counts[req.parse_state.phase.value] += 1
        return counts


class Window:
    """What was added to a tally since the last look."""

    def __init__(self, tally: Tally) -> None:
        self._tally = tally
        self._seen: Totals = {}

    def advance(self) -> Totals:
        """The growth of every counter since the last call; the labels' values summed up are at
        (counter, "*")."""
        growth: Totals = defaultdict(float)
        for key, total in self._tally.totals.items():
            change = total - self._seen.get(key, 0)
            growth[key] += change
            growth[key[0], "*"] += change
        self._seen = dict(self._tally.totals)
        return growth


@lru_cache(maxsize=1)
def process_tally() -> Tally:
    """The tally of this scheduler process."""
    return Tally()
