"""Defines the candidate plans and latency bounds that the settings allow."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass

from sglang_parse.core.config import MAX_PREFIXES, ParseConfig

LENGTHS = (4, 8, 16, 24, 32, 48, 64, 96, 128, 192, 256, 512, 1024, 2048, 4096)
PREFIXES = (1, 2, 4, 8, 16, 32, 64, 128)
CHUNKS = (4, 8, 16, 32, 64, 128)
"""Candidate values of a plan below the configured maxima."""
ADAPTIVE_SETTINGS = ("draft_tokens", "max_prefixes", "draft_chunk")
"""Settings a plan chooses unless they are given."""
INITIAL_CHUNK = 16
"""Draft tokens per iteration before costs are known."""


@dataclass(frozen=True, slots=True)
class Limits:
    """Maxima, or fixed values, of what the policy may choose.

    Attributes:
        draft_tokens, max_prefixes, draft_chunk: see ``phases.DraftPlan``.
        fixed: names among these three that are not chosen.
        question_rows: rows per prefix; 0 in token mode and with a verdict head.
        every_token: drafts are verified at every token, in token mode or from their rows.
        max_itl_ratio: upper bound of the ITL of decoding requests while others draft, relative to
            a decode step at this load; 0 for no bound.
        max_slowdown: upper bound of the mean iteration while plain requests run, relative to a
            decode step; 0 for no bound.
        max_draft_latency_ms: upper bound of a round; 0 for no bound.
    """

    draft_tokens: int = 128
    max_prefixes: int = 16
    draft_chunk: int = 128
    fixed: frozenset[str] = frozenset()
    question_rows: float = 0.0
    every_token: bool = False
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
        fixed_ratio: bool = False,
    ) -> Limits:
        """Derives the limits of a server. Given and certified settings are fixed,
        and with a trained head the draft length.

        Args:
            question_rows: rows per question; 0 without.
            is_timed: whether wall times may influence decisions (not in deterministic inference).
            fixed_ratio: whether a fixed share of every draft is accepted, simulated: it does not
                depend on the draft's length, so the length must not be chosen by it.
        """
        fixed = set(ADAPTIVE_SETTINGS) & config.model_fields_set
        # What a head knows of drafts of other lengths, nobody has measured.
        if config.certificate is not None or config.head is not None or fixed_ratio:
            fixed |= {"draft_tokens", "max_prefixes"}
        if config.has_head:  # every segment is verified, because a prefix costs nothing
            fixed.add("max_prefixes")
        if not is_timed or config.drafting != "auto":
            fixed |= set(ADAPTIVE_SETTINGS)
        is_fixed = "draft_chunk" in fixed
        return cls(
            draft_tokens=config.draft_tokens,
            max_prefixes=MAX_PREFIXES if config.has_head else config.max_prefixes,
            draft_chunk=config.draft_chunk if is_fixed else config.draft_tokens,
            fixed=frozenset(fixed),
            question_rows=0.0 if config.has_head else question_rows,
            every_token=not config.is_semantic
            or (config.has_head and config.segment_rule.num_tokens == 1),
            max_itl_ratio=config.max_itl_ratio if is_timed else 0.0,
            max_slowdown=config.max_slowdown if is_timed else 0.0,
            max_draft_latency_ms=1e3 * config.max_draft_latency if is_timed else 0.0,
        )

    @property
    def initial_chunk(self) -> int:
        """Draft tokens per iteration before the first plan."""
        is_fixed = "draft_chunk" in self.fixed
        return self.draft_chunk if is_fixed else min(INITIAL_CHUNK, self.draft_chunk)

    def draft_candidates(self, segment_len: float) -> Iterator[tuple[int, int]]:
        """Yields candidate (draft tokens, prefixes), those with more prefixes than segments once.

        Args:
            segment_len: tokens per segment.
        """
        for length in self._values("draft_tokens", LENGTHS):
            for prefixes in self._values("max_prefixes", () if self.every_token else PREFIXES):
                yield length, prefixes
                if prefixes >= int(length / max(1.0, segment_len)):
                    break

    def chunk_candidates(self, draft_tokens: int) -> Iterator[int]:
        """Yields candidate draft tokens per iteration, those that hold a whole draft once."""
        for chunk in self._values("draft_chunk", CHUNKS):
            yield chunk
            if chunk >= draft_tokens:
                break

    def _values(self, name: str, candidates: Sequence[int]) -> list[int]:
        maximum: int = getattr(self, name)
        if name in self.fixed:
            return [maximum]
        return [*(value for value in candidates if value < maximum), maximum]
