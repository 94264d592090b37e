"""What answers of a running server tell about its verdicts and its speedup.

Notation as in ``client.statistics``.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from statistics import fmean, median
from typing import Any

from sglang_parse.client.records import Answer, BenchError, BenchRun, Variant
from sglang_parse.client.statistics import costs_of, limit_of
from sglang_parse.core import phases
from sglang_parse.core.question import LOW_VERDICT_MASS
from sglang_parse.core.selection import contradicts_target, matching_tokens
from sglang_parse.doctor.finding import WARNING, Problem, not_checked, warn_if

LOW_ACCEPT_RATIO = 0.2
"""Accepted / drafted tokens below which most of the drafting is wasted."""
CHECKS = ("verdict mass", "matched prefixes", "refusals", "acceptance", "speedup")
"""By methods of these names."""
ANOTHER_JUDGE = (
    "--parse-judge likelihood, or a head of sglang-parse train-judge; another --parse-question; "
    "a threshold from sglang-parse calibrate; or --parse-verification token"
)
CHEAP_REFUSALS = (
    "leave out --parse-segment, if it is set; a lower --parse-threshold; "
    "or --parse-verification token"
)


@dataclass(kw_only=True)
class Evidence:
    """Answers to the same prompts, with PARSE and without.

    Attributes:
        with_parse: answers as the server gives them, with traces.
        drafted: the same, or where nothing was drafted, answers that were asked to be drafted.
    """

    with_parse: list[Answer] = field(default_factory=list)
    drafted: list[Answer] = field(default_factory=list)
    plain: list[Answer] = field(default_factory=list)

    @property
    def run(self) -> BenchRun:
        """The drafted answers. Raises: Problem, without any."""
        if not self.drafted:
            not_checked("no drafts")
        return BenchRun(Variant("the server"), -1, 1, 1.0, tuple(self.drafted))

    @property
    def rounds(self) -> list[dict[str, Any]]:
        return [record for answer in self.run.answers for record in answer.parse["trace"]]

    @property
    def _masses(self) -> list[float]:
        """Of all verdicts by a question."""
        masses = (mass for record in self.rounds for mass in record["verdict_mass"])
        return [mass for mass in masses if mass is not None]

    def verdict_mass(self) -> str:
        """A target may answer with other tokens than the verdict tokens."""
        values = self._masses
        if not values:
            has_verdicts = any(record["verdicts"] for record in self.rounds)
            return f"no questions: {self._judge_name if has_verdicts else 'token mode'}"
        found = (
            f"mean {fmean(values):.3f}, smallest {min(values):.3f} of the probability, "
            f"of {len(values)} verdicts"
        )
        fix = (
            "give --parse-question a wording that this model answers with the verdict tokens, "
            "or other tokens; then take --parse-threshold from its own verdicts"
        )
        is_low = fmean(values) < LOW_VERDICT_MASS
        return warn_if(is_low, f"{found}: they mean little" if is_low else found, fix)

    def matched_prefixes(self) -> str:
        matched, rejected = self._matched()
        if not matched:
            return "the target would have written no whole prefix itself, or nothing was asked"
        found = f"{rejected} of {matched} prefixes that the target would have written are rejected"
        if contradicts_target(matched, rejected):
            found += ": the target would have written what the judge refuses, so the "
            found += f"{self._judge_name} does not work for this model"
            raise Problem(found, ANOTHER_JUDGE, WARNING)
        return found

    def refusals(self) -> str:
        """Settings may make a refused draft so expensive that token mode is faster with the same
        drafts: they are compared by output tokens per target forward."""
        rounds, answers = self.rounds, self.run.answers
        refused = sum(record["accepted_len"] < _num_verified(record) for record in rounds)
        output = sum(record["accepted_len"] + len(record["bonus_token_ids"]) for record in rounds)
        decoded = sum(a.output_tokens - 1 - a.parse["skipped_drafts"] for a in answers) - output
        steps = max(0, decoded)
        matched = sum(
            matching_tokens(record["draft_token_ids"], record["target_token_ids"])
            for record in rounds
        )
        ours = (output + steps) / (len(rounds) + steps)
        exact = matched / len(rounds) + 1
        found = f"{ours:.1f} tokens per target forward; token mode: {exact:.1f} with these drafts"
        if refused:
            every = (output + steps) / refused
            found += f"; one refusal in {every:.0f} tokens, {steps / refused:.1f} decode steps each"
        return warn_if(ours < exact, found, CHEAP_REFUSALS)

    @property
    def _judge_name(self) -> str:
        return str(self.run.answers[0].parse.get("judge", "question"))

    def _matched(self) -> list[int]:
        """Counts prefixes that the target would have written itself, and the rejected ones."""
        keys = ("matched_prefixes", "rejected_matched_prefixes")
        return [sum(answer.parse[key] for answer in self.run.answers) for key in keys]

    @property
    def _accept_fix(self) -> str:
        """What would make more draft tokens accepted, by the evidence."""
        matched, rejected = self._matched()
        if not matched:
            return "a better draft model: see what it writes with sglang-parse explain"
        if contradicts_target(matched, rejected):
            return ANOTHER_JUDGE
        rejections = "see which prefixes are rejected with sglang-parse explain"
        return f"another --parse-threshold, or another --parse-judge: {rejections}"

    def acceptance(self) -> str:
        run, verdicts = self.run, [value for record in self.rounds for value in record["verdicts"]]
        ratio = run.per_request("accepted_tokens") / run.per_request("drafted_tokens")
        found = (
            f"{ratio:.0%} of draft tokens accepted, {run.per_token('accepted_tokens'):.0%} of the "
            "output; "
        )
        if sources := self._by_source():
            found += f"{sources}; "
        if verdicts:
            thresholds = sorted({record["threshold"] for record in self.rounds})
            found += (
                f"verdicts {min(verdicts):.4f} to {max(verdicts):.4f}, median "
                f"{median(verdicts):.4f}; threshold {', '.join(map('{:g}'.format, thresholds))}"
            )
        else:
            found += "token-level verification"
        return warn_if(ratio < LOW_ACCEPT_RATIO, found, self._accept_fix)

    def _by_source(self) -> str:
        """Accepted tokens of each source of drafts, where there are others than the draft model."""
        found: dict[str, list[int]] = {}
        for answer in self.run.answers:
            for source, counts in answer.parse.get("sources", {}).items():
                total = found.setdefault(source, [0, 0])
                total[0] += counts["accepted_tokens"]
                total[1] += counts["drafted_tokens"]
        if not found.keys() - {phases.MODEL}:
            return ""
        return ", ".join(f"{source} {part} of {all_}" for source, (part, all_) in found.items())

    def speedup(self) -> str:
        run = self.run
        if not self.plain:
            not_checked("no prompt was answered without PARSE")
        t = _ms_per_token(self.plain)
        r, v, a = costs_of(run, t)
        speedup = t / _ms_per_token(self.with_parse[: len(self.plain)])
        shorter = "fewer prefixes (--parse-max-prefixes), a shorter question, longer drafts"
        cost, stage, fix = max(
            (r, "drafting", "a smaller or faster draft model"),
            (v, "verify", shorter if self._masses else "longer drafts"),
            (1 - a, "decode", self._accept_fix),
        )
        found = (
            f"{speedup:.2f}x over plain decoding, one request at a time; with these drafts at most "
            f"{limit_of(r, v, a):.2f}x = 1 / (r {r:.2f} + v {v:.2f} + 1 - a {a:.2f}). "
            f"Largest cost: {stage} ({cost:.2f}; {fix})"
        )
        return warn_if(speedup < 1, found, fix)


def _num_verified(record: dict[str, Any]) -> int:
    ends = record["prefix_ends"]
    return ends[-1] if ends else len(record["draft_token_ids"])


def _ms_per_token(answers: Sequence[Answer]) -> float:
    tokens = sum(answer.output_tokens for answer in answers)
    if not tokens:
        raise BenchError("the answers have no tokens")
    return sum(answer.wall_ms for answer in answers) / tokens
