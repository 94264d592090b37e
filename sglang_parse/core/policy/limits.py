"""What the settings leave to decide about drafts: the grid of plans there may be, and bounds."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_parse.core.config import ParseConfig

LENGTHS = (8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
PREFIXES = (1, 2, 4, 8, 16, 32, 64, 128)
CHUNKS = (4, 8, 16, 32, 64, 128)
"""What a plan may be, below what the settings allow."""
CHOSEN = ("draft_tokens", "max_prefixes", "draft_chunk")
"""The settings a plan chooses."""
FIRST_CHUNK = 16
"""Draft tokens per iteration before prices are known."""


@dataclass(frozen=True, slots=True)
class Limits:
    """What the settings leave to decide. Each number is the most, or fixed.

    Attributes:
        draft_tokens, max_prefixes, draft_chunk: as in ``phases.DraftPlan``.
        fixed: the names of those of them that are not to be chosen.
        question_rows: rows of one question; 0 in token mode.
        by_token: token mode.
        max_itl_ratio: what a request that does not draft may wait for its next token while others draft, in
            plain steps at this load; 0 for any time.
        max_slowdown: what a mean iteration may take while requests that never draft run, in the same; 0
            for any time.
        max_draft_latency_ms: how long a round may take; 0 for any time.
    """

    draft_tokens: int = 128
    max_prefixes: int = 16
    draft_chunk: int = 128
    fixed: frozenset[str] = frozenset()
    question_rows: float = 0.0
    by_token: bool = False
    max_itl_ratio: float = 0.0
    max_slowdown: float = 0.0
    max_draft_latency_ms: float = 0.0

    @classmethod
    def of(
        cls,
        config: ParseConfig,
        question_rows: float,
        *,
        is_timed: bool = True,
        is_simulated: bool = False,
    ) -> Limits:
        """What a server's settings leave to decide: those that were given are fixed, and what a
        certificate is about is as it says.

        Args:
            question_rows: rows of one question.
            is_timed: whether anything may depend on the clock.
            is_simulated: whether a share of each draft is kept, whatever its length: then shorter
                drafts are no better than long ones, as those of a draft model are.
        """
        fixed = set(CHOSEN) & config.model_fields_set
        if config.certificate is not None or is_simulated:
            fixed |= {"draft_tokens", "max_prefixes"}
        if not is_timed or config.drafting != "auto":
            fixed |= set(CHOSEN)
        is_fixed = "draft_chunk" in fixed
        return cls(
            draft_tokens=config.draft_tokens,
            max_prefixes=config.max_prefixes,
            draft_chunk=config.draft_chunk if is_fixed else config.draft_tokens,
            fixed=frozenset(fixed),
            question_rows=question_rows if config.is_semantic else 0.0,
            by_token=not config.is_semantic,
            max_itl_ratio=config.max_itl_ratio if is_timed else 0.0,
            max_slowdown=config.max_slowdown if is_timed else 0.0,
            max_draft_latency_ms=1e3 * config.max_draft_latency if is_timed else 0.0,
        )

    @property
    def first_chunk(self) -> int:
        """Before anything is known."""
        is_fixed = "draft_chunk" in self.fixed
        return self.draft_chunk if is_fixed else min(FIRST_CHUNK, self.draft_chunk)

    def drafts(self, segment: float) -> Iterator[tuple[int, int]]:
        """(Draft tokens, prefixes) of all rounds there may be.

        Args:
            segment: a draft is at least as long: a verdict on half a segment is worth little.
        """
        for length in self._values("draft_tokens", LENGTHS, 0 if self.by_token else segment):
            for prefixes in self._values("max_prefixes", () if self.by_token else PREFIXES):
                yield length, prefixes

    def bursts(self) -> list[int]:
        """Draft tokens per iteration there may be."""
        return self._values("draft_chunk", CHUNKS)

    def _values(self, name: str, known: Sequence[int], least: float = 0) -> list[int]:
        most: int = getattr(self, name)
        if name in self.fixed:
            return [most]
        return [*(value for value in known if least <= value < most), most]
