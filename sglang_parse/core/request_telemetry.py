"""What a server tells about one request: counts, times, its trace. No output depends on it."""

from __future__ import annotations

import json
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

from sglang_parse.core.phases import SourceStats, Stats, TraceRecord
from sglang_parse.core.round import Round

MAX_TRACE_BYTES = 2**27
"""Of one request's trace, as JSON; the round that exceeds it is its last one."""


@dataclass(slots=True)
class RequestTelemetry:
    """Telemetry of one request.

    Attributes:
        stats: counters for ``meta_info``; ``sources``: those of each source of drafts.
        last_parts: of the last verified draft, from its end: source, accepted and matched tokens.
        num_target_run, num_matched_run: tokens of the last output that the target chose, and how
            many of those are matched draft tokens.
        strict_refusals: by class, drafts whose acceptance one of its tokens has ended.
        last_decode_at: time of its last output, in seconds, while the target decodes.
        trace: one record per round; ``trace_bytes``: their size as JSON.
        counted: what ``counters.Counters`` has counted so far.
    """

    stats: Stats = field(default_factory=Stats)
    sources: dict[str, SourceStats] = field(default_factory=dict)
    last_parts: Sequence[tuple[str, int, int]] = ()
    num_target_run: int = 1
    num_matched_run: int = 0
    strict_refusals: dict[str, int] = field(default_factory=dict)
    last_decode_at: float | None = None
    trace: list[TraceRecord] = field(default_factory=list)
    trace_bytes: int = 0
    counted: dict[str, float] = field(default_factory=dict)

    @property
    def is_trace_full(self) -> bool:
        """Whether further rounds are left out of its trace."""
        return self.trace_bytes >= MAX_TRACE_BYTES

    def source(self, name: str) -> SourceStats:
        """Counters of one source's drafts."""
        return self.sources.setdefault(name, SourceStats())

    def count_drafted(self, source: str, num_tokens: int) -> None:
        self.stats.drafted_tokens += num_tokens
        self.source(source).drafted_tokens += num_tokens

    def count_round(self, one: Round) -> None:
        """Counts a verified draft; a text that extends it has tokens, but no round."""
        self.num_target_run, self.num_matched_run = len(one.bonus), one.num_matched
        self.last_parts = [
            (part.draft.source, part.accepted_len, part.num_matched) for part in one.parts[::-1]
        ]
        self.stats.rounds += 1
        self.source(one.draft.source).rounds += 1
        for source, accepted, matched in self.last_parts:
            for stats in (self.stats, self.source(source)):
                stats.accepted_tokens += accepted
                stats.matched_tokens += matched

    def add_record(self, record: TraceRecord) -> None:
        """Adds a round to the trace."""
        self.trace.append(record)
        rest = {key: value for key, value in record.items() if key != "hidden_states"}
        data = record.get("hidden_states", {}).get("data", "")
        self.trace_bytes += len(json.dumps(rest)) + len(data)

    def count_decode(self, num_tokens: int) -> None:
        self.num_target_run, self.num_matched_run = num_tokens, 0

    def take_back(self, num_lost: int, num_output: int) -> None:
        """Uncounts the last ``num_lost`` of ``num_output`` tokens, which a retraction under overlap
        discards."""
        accepted, matched = self.last_of_output(num_lost)
        self.stats.accepted_tokens -= accepted
        self.stats.matched_tokens -= matched
        for source, accepted, matched in self.last_by_source(num_lost):
            self.source(source).accepted_tokens -= accepted
            self.source(source).matched_tokens -= matched
        start = num_output - num_lost
        self.trace = [record for record in self.trace if record["output_start"] < start]

    def last_of_output(self, num_tokens: int) -> tuple[int, int]:
        """(accepted, matched) draft tokens among the last ``num_tokens`` of the last output."""
        drafted = max(0, num_tokens - (self.num_target_run - self.num_matched_run))
        return max(0, num_tokens - self.num_target_run), min(drafted, self.num_matched_run)

    def last_by_source(self, num_tokens: int) -> Iterator[tuple[str, int, int]]:
        """``last_of_output`` by source."""
        accepted, matched = self.last_of_output(num_tokens)
        for source, *own in self.last_parts:
            found = min(accepted, own[0]), min(matched, own[1])
            accepted, matched = accepted - found[0], matched - found[1]
            yield source, *found

    def charge(self, stage: str, ms: float) -> None:
        """Adds the request's part of a stage's wall time, in ms: of "prefill", "draft", "verify" or
        "decode"."""
        name = f"{stage}_ms"
        setattr(self.stats, name, getattr(self.stats, name) + ms)
        if stage == "verify" and self.last_parts:
            self.sources[self.last_parts[-1][0]].verify_ms += ms

    def count(self, figure: str, value: float) -> float:
        """Growth of a figure since it was last counted; a figure that shrank is not recounted."""
        growth = value - self.counted.get(figure, 0)
        if growth > 0:
            self.counted[figure] = value
        return growth
