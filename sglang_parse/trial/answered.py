"""What a trial measured of PARSE as it is served, beside the plain target."""

from __future__ import annotations

from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from sglang_parse.client.records import Answer, BenchRun
from sglang_parse.core.phases import SourceStats


@dataclass(frozen=True)
class Answered:
    """Answers to the same prompts in the same order.

    Attributes:
        parse: by PARSE as it is served.
        plain: by the plain target.
        concurrency: prompts asked together; the next ones follow when all are answered.
    """

    parse: BenchRun
    plain: BenchRun
    concurrency: int

    @cached_property
    def pairs(self) -> list[tuple[Answer, Answer]]:
        """(PARSE's, the plain target's), of the prompts that both answered."""
        return [*zip(self.parse.answers, self.plain.answers, strict=False)]

    @property
    def speedup(self) -> float:
        """Output tokens per second over the plain target's."""
        ours, plain = map(self._tokens_per_ms, zip(*self.pairs, strict=True))
        return ours / plain

    def _tokens_per_ms(self, answers: Sequence[Answer]) -> float:
        starts = range(0, len(answers), self.concurrency)
        together = [answers[start : start + self.concurrency] for start in starts]
        ms = sum(max(one.wall_ms for one in some) for some in together)
        return sum(one.output_tokens for one in answers) / ms

    @property
    def speedups(self) -> list[float]:
        """By prompt, the smallest first."""
        rates = ([one.output_tokens / one.wall_ms for one in pair] for pair in self.pairs)
        return sorted(ours / plain for ours, plain in rates)

    @property
    def num_same(self) -> int:
        """Answers that are the plain target's, token for token."""
        return sum(ours.token_ids == plain.token_ids for ours, plain in self.pairs)

    @cached_property
    def sources(self) -> dict[str, SourceStats]:
        """Counts of all answers by source of drafts, the one with the most kept tokens first."""
        found: dict[str, Counter[str]] = defaultdict(Counter)
        for answer in self.parse.answers:
            for source, counts in answer.parse["sources"].items():
                found[source].update(counts)
        stats = {source: SourceStats(**counts) for source, counts in found.items()}
        return dict(sorted(stats.items(), key=lambda one: -one[1].accepted_tokens))

    @property
    def reason(self) -> str:
        """Why most answers had no draft; "" if any had one."""
        reasons = Counter(answer.parse.get("reason", "") for answer in self.parse.answers)
        return "" if self.sources else reasons.most_common(1)[0][0]
