"""The periodic decode log line shows PARSE's own figures (ledger: decode_log)."""

from __future__ import annotations

import logging
import re

from sglang_parse.context import process_context
from sglang_parse.core.counters import Counters, Window
from sglang_parse.patches.base import Patch

_LOGGER = "sglang.srt.managers.scheduler_components.metrics_reporter"
_ACCEPTANCE = re.compile(r"accept len: [^,]+, accept rate: [^,]+, ")


class DecodeLine(logging.Filter):
    """Puts the counters' growth since the last line in the place of SGLang's acceptance figures."""

    def __init__(self, counters: Counters) -> None:
        super().__init__()
        self.counters = counters
        self.window = Window(counters)

    def filter(self, record: logging.LogRecord) -> bool:
        # Without PARSE in this process nothing has been counted, and nothing is changed.
        if self.counters.latest_reqs and _ACCEPTANCE.search(str(record.msg)):
            record.msg = _ACCEPTANCE.sub(self.figures(), record.msg, count=1)
        return True

    def figures(self) -> str:
        self.counters.update_latest()
        growth = self.window.advance()
        rounds, drafted, forwards, judged, accepted, target = (
            round(growth[f"{name}_total", "*"])
            for name in (
                "rounds",
                "drafted_tokens",
                "draft_forwards",
                "verified_tokens",
                "accepted_tokens",
                "target_tokens",
            )
        )
        share = accepted / judged if judged else 0.0
        speedup = self.counters.expected_speedup
        per_forward = f"tokens a draft forward: {drafted / forwards:.1f}, " if forwards else ""
        pays = "" if speedup is None else f"expected speedup: {speedup:.2f}, "
        if self.counters.simulated_accept_ratio is not None:
            pays += f"SIMULATED acceptance: {self.counters.simulated_accept_ratio:g}, "
        phases = "".join(
            f"#{name}: {count}, " for name, count in self.counters.count_phases().items()
        )
        return (
            f"rounds: {rounds}, drafted: {drafted}, judged: {judged}, "
            f"accepted: {accepted} ({share:.2f}), target-written: {target}, "
            f"{phases}{per_forward}{pays}"
        )


_FILTER = DecodeLine(process_context().counters)


def _register() -> None:
    logger = logging.getLogger(_LOGGER)
    logger.addFilter(_FILTER)


def _is_applied() -> bool:
    return _FILTER in logging.getLogger(_LOGGER).filters


PATCH = Patch(
    "decode_log",
    targets={f"{_LOGGER}.logger": ()},
    register=_register,
    is_applied=_is_applied,
    why='the periodic decode line\'s "accept len" and "accept rate" take every iteration for a '
    "verification pass and every reserved slot for a draft token. Under PARSE most "
    "iterations draft, and drafts are as long as they come.",
    how="a `logging.Filter` on that logger puts PARSE's figures in their place, in processes "
    "where PARSE serves requests.",
    removed_when="an algorithm can say what its line shows.",
)
