"""What the settings let the policy choose, and the latency bounds that it keeps."""

from __future__ import annotations

from dataclasses import dataclass

from sglang_parse.core.config import MAX_PREFIXES, ParseConfig


def draft_lengths(maximum: int) -> list[int]:
    """Returns candidate draft lengths, two per octave from 16 on: 4, 8, 16, 24, 32, 48, ..."""
    lengths = [4, 8] + [size << n for n in range(3, 13) for size in (2, 3)]
    return [*(length for length in lengths if length < maximum), maximum]


@dataclass(frozen=True, slots=True)
class Limits:
    """Maxima, or fixed values, of what the policy chooses; bounds, 0 for none.

    Attributes:
        draft_tokens, max_prefixes, draft_chunk: see ``phases.DraftPlan``.
        fixed: names among these three that are not chosen.
        question_rows: rows per prefix of a verify pass; 0 where verdicts need none.
        allows_doubt: drafts may end where the draft model is unsure.
        max_itl_ratio: of the ITL of decoding requests while others draft, in decode steps.
        max_slowdown: of the mean iteration while plain requests run, in decode steps.
    """

    draft_tokens: int = 128
    max_prefixes: int = 16
    draft_chunk: int = 128
    fixed: frozenset[str] = frozenset()
    question_rows: float = 0.0
    allows_doubt: bool = False
    max_itl_ratio: float = 0.0
    max_slowdown: float = 0.0

    @classmethod
    def of(
        cls,
        config: ParseConfig,
        question_rows: float,
        *,
        is_timed: bool = True,
        fixed_ratio: bool = False,
    ) -> Limits:
        """Derives the limits of a server. Given and certified settings are fixed, and the length
        with a trained head: what it knows of other lengths was not measured.

        Args:
            question_rows: rows per question; 0 without.
            is_timed: whether wall times may decide anything (not in deterministic inference).
            fixed_ratio: a fixed share of every draft is accepted, simulated, whatever its length.
        """
        adaptive = {"draft_tokens", "max_prefixes", "draft_chunk"}
        fixed = adaptive & config.model_fields_set
        if config.certificate is not None or config.judge_file is not None or fixed_ratio:
            fixed |= {"draft_tokens", "max_prefixes"}
        if config.scores_tokens:  # every segment is verified, because a prefix costs nothing
            fixed.add("max_prefixes")
        if not is_timed or config.drafting != "auto":
            fixed = adaptive
        return cls(
            draft_tokens=config.draft_tokens,
            max_prefixes=MAX_PREFIXES if config.scores_tokens else config.max_prefixes,
            draft_chunk=config.draft_chunk if "draft_chunk" in fixed else config.draft_tokens,
            fixed=frozenset(fixed),
            question_rows=0.0 if config.scores_tokens else question_rows,
            allows_doubt=config.verifies_tokens and "draft_tokens" not in fixed,
            max_itl_ratio=config.max_itl_ratio * is_timed,
            max_slowdown=config.max_slowdown * is_timed,
        )


ADAPTIVE = Limits()
