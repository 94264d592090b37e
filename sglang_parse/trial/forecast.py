"""What other judges and draft lengths would give, by counts of rounds.

Answers that are drafted and accepted whole (threshold 0) show what the target reads in every draft
token, and so which tokens each judge refuses. A round drafts up to ``length`` tokens, keeps those
before the first refused one, and gets the target's token from the same pass. Behind a refusal the
draft is assumed to go on as it did.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from statistics import fmean

import numpy as np
from scipy.optimize import nnls

from sglang_parse.client.records import Answer, BenchRun
from sglang_parse.core.judge import LIKELIHOOD, LIKELIHOOD_BIAS, LIKELIHOOD_STRICT, sigmoid
from sglang_parse.core.phases import TraceRecord
from sglang_parse.core.strict import CodeBlocks, find_refusal
from sglang_parse.trial.answered import Answered

LENGTHS = (4, 8, 16, 32, 64, 128)
THRESHOLDS = (0.5, 0.2)
"""Of the likelihood. What lower ones than the first cost has to be counted (docs/choosing.md)."""
CLEARLY = 1.1
"""How much faster a judge has to be than token mode, and PARSE than plain decoding, to be advised:
a forecast is not better than a tenth."""
Marks = Sequence[bool]
"""[n] of an answer's draft tokens, which of them a judge refuses."""


@dataclass(frozen=True, slots=True)
class PerRound:
    """Means: output tokens, and draft tokens of a round."""

    tokens: float
    drafted: float


def through(texts: Sequence[Marks], length: int) -> PerRound:
    """What rounds with drafts of at most ``length`` tokens bring on their way through texts.

    >>> through([[False, False, False, True, False, False]], 4)  # 3 and the target's, then 2
    PerRound(tokens=3.0, drafted=3.0)
    """
    rounds = drafted = 0
    for marks in texts:
        start = 0
        while start < len(marks):
            end = min(start + length, len(marks))
            rounds, drafted = rounds + 1, drafted + end - start
            start = 1 + next((place for place in range(start, end) if marks[place]), end)
    return PerRound(sum(map(len, texts)) / rounds, drafted / rounds)


def refused(answer: Answer, texts: Mapping[int, str], threshold: float | None) -> Iterator[bool]:
    """Yields for each draft token whether it is refused: by the likelihood at this threshold,
    numbers and code strict; None: by token mode. The target's tokens between drafts are left out.
    ``texts``: of token ids in the answer and its trace."""
    code = CodeBlocks()
    for record in answer.parse["trace"]:
        # Without what was not verified, and without what follows a refused token.
        choices = record["target_token_ids"][:-1][: record["accepted_len"] + 1]
        ids, before = record["draft_token_ids"], [*answer.token_ids[: record["output_start"]]]
        for place, (ours, theirs) in enumerate(zip(ids, choices, strict=False)):
            if threshold is None:
                yield ours != theirs
                continue
            known, classes = before + ids[:place], LIKELIHOOD_STRICT
            strict = find_refusal(known, [ours], [theirs], classes, lambda one, _: texts[one], code)
            score = record["draft_logprobs"][place] + record["draft_entropies"][place]
            yield strict is not None or sigmoid(score + LIKELIHOOD_BIAS) < threshold


@dataclass(frozen=True, slots=True)
class TrialCosts:
    """Measured here, in ms.

    Attributes:
        plain_ms: per output token of the plain target, prefill included.
        draft_ms: per draft token.
        pass_ms, row_ms: of a verify pass, and more for each of its rows.
        other_ms: of PARSE per output token, beside drafting and verifying: prefill, the host.
    """

    plain_ms: float
    draft_ms: float
    pass_ms: float
    row_ms: float
    other_ms: float = 0.0

    def verify_ms(self, drafted: float) -> float:
        return self.pass_ms + self.row_ms * (1 + drafted)

    def speedup(self, found: PerRound) -> float:
        """Over the plain target, of rounds that bring and draft so much."""
        round_ms = found.drafted * self.draft_ms + self.verify_ms(found.drafted)
        return self.plain_ms / (round_ms / found.tokens + self.other_ms)


def fit_pass(passes: Sequence[tuple[float, float]]) -> tuple[float, float]:
    """(ms of a verify pass, ms per row), neither negative, from (rows, ms) of passes: the line of
    the smallest relative errors, where a long pass is worth no more than a short one."""
    rows, ms = np.array(passes).T
    (pass_ms, row_ms), _ = nnls(np.array([1 / ms, rows / ms]).T, np.ones(len(ms)))
    return float(pass_ms), float(row_ms)


@dataclass(frozen=True)
class Forecast:
    """What a judge is expected to bring: token mode (``threshold`` None), or the likelihood.

    Attributes:
        tokens, refusals: draft tokens read, and those that it refuses.
        rounds, speedups: by draft length.
    """

    threshold: float | None
    tokens: int
    refusals: int
    rounds: Mapping[int, PerRound]
    speedups: Mapping[int, float]

    @classmethod
    def of(cls, threshold: float | None, texts: Sequence[Marks], costs: TrialCosts) -> Forecast:
        rounds = {length: through(texts, length) for length in LENGTHS}
        speedups = {length: costs.speedup(found) for length, found in rounds.items()}
        return cls(threshold, sum(map(len, texts)), sum(map(sum, texts)), rounds, speedups)

    @property
    def best(self) -> int:
        """The draft length with the highest speedup."""
        return max(self.speedups, key=self.speedups.__getitem__)


def advised(forecasts: Sequence[Forecast]) -> Forecast | None:
    """The fastest at its best length, of token mode and the default threshold: token mode, unless
    the other is clearly faster. None where neither pays."""
    some = [one for one in forecasts if one.threshold in (None, THRESHOLDS[0])]
    best = max(
        some, key=lambda one: max(one.speedups.values()) * (CLEARLY if one.threshold is None else 1)
    )
    return best if best.speedups[best.best] >= CLEARLY else None


@dataclass(frozen=True)
class Trial(Answered):
    """Answers one at a time, with traces and always drafted by PARSE, and what they predict.

    Attributes:
        drafts: drafted and accepted whole, with traces and token ids.
        step_ms: of a decode step of the server with PARSE.
        texts: of all token ids in ``drafts``.
    """

    drafts: BenchRun
    step_ms: float
    texts: Mapping[int, str]

    @property
    def rounds(self) -> list[TraceRecord]:
        """Of PARSE as it is served."""
        return [record for answer in self.parse.answers for record in answer.parse["trace"]]

    @cached_property
    def costs(self) -> TrialCosts:
        passes, parse_ms = [(1.0, self.step_ms)], 1e3 / self.parse.tokens_per_s
        for one in (answer.parse for answer in (*self.drafts.answers, *self.parse.answers)):
            if one["rounds"]:
                rows = 1 + one["drafted_tokens"] / one["rounds"]
                passes.append((rows, one["verify_ms"] / one["rounds"]))
        busy_ms = self.parse.per_token("draft_ms") + self.parse.per_token("verify_ms")
        drafted = self.parse if self.rounds else self.drafts
        return TrialCosts(
            1e3 / self.plain.tokens_per_s,
            drafted.per_request("draft_ms") / drafted.per_request("drafted_tokens"),
            *fit_pass(passes),
            max(0.0, parse_ms - busy_ms),
        )

    @property
    def per_round(self) -> PerRound | None:
        """Measured; None if no answer had a round, as one of a single token has none."""
        if not self.rounds:
            return None
        tokens = [one["accepted_len"] + len(one["bonus_token_ids"]) for one in self.rounds]
        return PerRound(fmean(tokens), fmean(len(one["draft_token_ids"]) for one in self.rounds))

    def marks(self, threshold: float | None) -> list[Marks]:
        return [[*refused(answer, self.texts, threshold)] for answer in self.drafts.answers]

    @cached_property
    def forecasts(self) -> list[Forecast]:
        """Token mode first; then the likelihood, where the server's judge reads it."""
        read = {"draft_logprobs" in one for a in self.drafts.answers for one in a.parse["trace"]}
        thresholds = (None, *THRESHOLDS) if read == {True} else (None,)
        return [Forecast.of(at, self.marks(at), self.costs) for at in thresholds]

    @cached_property
    def predicted(self) -> PerRound | None:
        """Of the judge that is served, at the draft lengths that the server chose, and where the
        draft model was unsure; None for a question or a trained head, whose verdicts on single
        tokens are not known, and where there were no rounds."""
        if not self.rounds:
            return None
        judge, threshold = self.rounds[0]["judge"], self.rounds[0]["threshold"]
        if judge not in (None, LIKELIHOOD):
            return None
        texts = self.marks(threshold if judge else None)
        lengths = [_length_of(record) for record in self.rounds]
        by_length = {length: through(texts, length) for length in {*lengths}}
        found = [by_length[length] for length in lengths]
        return PerRound(fmean(one.tokens for one in found), fmean(one.drafted for one in found))


def _length_of(record: TraceRecord) -> int:
    """The draft's, where the text is long enough."""
    planned = None if record["in_doubt"] else record["plan"].get("draft_tokens")
    return int(planned or len(record["draft_token_ids"]))
