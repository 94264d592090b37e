"""PARSE's figures in SGLang's periodic decode log line (ledger: decode_log)."""

from __future__ import annotations

import logging
import re

from sglang_parse.context import process_context
from sglang_parse.core.counters import Counters, Growth
from sglang_parse.patches.base import Patch, log_filter

_LOGGER = "sglang.srt.managers.scheduler_components.metrics_reporter"
_ACCEPTANCE = re.compile(r"accept len: [^,]+, accept rate: [^,]+, ")
_COUNTED = ("rounds", "drafted_tokens", "draft_forwards", "verified_tokens", "accepted_tokens")


class DecodeLine(logging.Filter):
    """Replaces SGLang's acceptance figures with PARSE's since the last line."""

    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self.counters = counters
        self.window = Growth(counters)

    def filter(self, record: logging.LogRecord) -> bool:
        # Without PARSE in this process the counters are empty, and nothing is changed.
        if self.counters.latest_reqs and _ACCEPTANCE.search(str(record.msg)):
            record.msg = _ACCEPTANCE.sub(self.figures(), record.msg, count=1)
        return True

    def figures(self) -> str:
        self.counters.update_latest()
        growth = self.window.advance()
        rounds, drafted, forwards, verified, accepted, target = (
            round(growth[f"{name}_total", "*"]) for name in (*_COUNTED, "target_tokens")
        )
        parts = [
            f"rounds: {rounds}, drafted: {drafted}, verified: {verified}",
            f"accepted: {accepted} ({accepted / max(1, verified):.2f}), target tokens: {target}",
            *(f"#{name}: {count}" for name, count in self.counters.count_phases().items()),
        ]
        if forwards:
            parts.append(f"tokens per draft forward: {drafted / forwards:.1f}")
        if self.counters.drafting_speedup is not None:
            parts.append(f"drafting speedup: {self.counters.drafting_speedup:.2f}")
        if self.counters.simulated_accept_ratio is not None:
            parts.append(f"SIMULATED acceptance: {self.counters.simulated_accept_ratio:g}")
        return "".join(f"{part}, " for part in parts)


PATCH = Patch(
    "decode_log",
    {f"{_LOGGER}.logger": log_filter(_LOGGER, DecodeLine(process_context().counters))},
    why='SGLang\'s "accept len" and "accept rate" count every iteration as a verify step and every '
    "reserved slot as a draft token. Under PARSE most iterations draft, and drafts vary in length.",
    how="a `logging.Filter` on that logger replaces the two figures with PARSE's, in processes "
    "where PARSE serves requests.",
    removed_when="an algorithm can provide the figures of its log line.",
)
