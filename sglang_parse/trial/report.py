"""A trial described once: results.json, the terminal, report.html."""

from __future__ import annotations

import shlex
from collections.abc import Iterator, Sequence
from dataclasses import asdict, replace
from typing import Any

from sglang_parse.client.records import PARSE, PLAIN
from sglang_parse.client.sections import Cell, Columns, Facts, Grid, Sections, Text, filled
from sglang_parse.client.statistics import rounded
from sglang_parse.client.targets import Models, algorithm_flags, command_of, server_specs
from sglang_parse.client.targets import parse_settings as flags_for
from sglang_parse.core.judge import LIKELIHOOD
from sglang_parse.trial.answered import Answered
from sglang_parse.trial.forecast import LENGTHS, THRESHOLDS, Forecast, PerRound, Trial, advised
from sglang_parse.trial.settings import parse_kind

NOTE = (
    "Speedup over plain decoding, one request at a time, * at the best length; output tokens per "
    "round. From the drafts of {answers} answers and costs measured here. Behind a refused token "
    "the draft is assumed to go on as it did. Beside the likelihood, numbers and code are strict. "
    "Below {threshold:g} it may cost right answers: count them with sglang-parse compare."
)
NONE_PAYS = (
    "No judge is expected to pay for this pair: serve the target without PARSE, or give it a "
    "faster source of drafts."
)
DOES_NOT_PAY = (
    "It does not pay on these prompts: serve the target without PARSE, or give it a draft model, "
    "an EAGLE-3 head, or requests that bring a prediction."
)
SOURCES: Columns = {
    "": lambda source, _: source,
    "drafts": lambda _, counts: str(counts.rounds),
    "drafted tokens": lambda _, counts: str(counts.drafted_tokens),
    "accepted": lambda _, counts: str(counts.accepted_tokens),
}


def sections(found: Answered, models: Models, warnings: Sequence[str], facts: Any) -> Sections:
    """Everything that a reader is told, by heading."""
    forecasts = found.forecasts if isinstance(found, Trial) else ()
    answers = len(found.drafts.answers) if isinstance(found, Trial) else 0
    note = NOTE.format(answers=answers, threshold=THRESHOLDS[0])
    headings = ["", "exact", "a refusal every", *(f"drafts of {one}" for one in LENGTHS)]
    shown: Sections = {
        "": [*said(found, models)],
        "What each judge would give": [Grid(headings, [*map(row, forecasts)], note)],
        "Where drafts came from": [Grid.of(found.sources.items(), SOURCES)],
        "From the doctor": [*map(Text, warnings)],
        "Conditions": [Facts(facts)],
    }
    return filled(shown)


def content(found: Answered, facts: Any) -> dict[str, Any]:
    """``results.json`` as plain data."""
    plain: dict[str, Any] = {
        "conditions": facts,
        "measured": {"speedup": found.speedup, "identical": found.num_same},
        "sources": {name: asdict(counts) for name, counts in found.sources.items()},
    }
    if not isinstance(found, Trial):
        return rounded(plain)
    best, measured, predicted = advised(found.forecasts), found.per_round, found.predicted
    plain["measured"] |= asdict(measured) if measured else {}
    plain |= {
        "costs": asdict(found.costs),
        "predicted": predicted and {"speedup": found.costs.speedup(predicted), **asdict(predicted)},
        "forecasts": [asdict(one) for one in found.forecasts],
        "advised": best and [*flags_of(best)],
    }
    return rounded(plain)


def said(found: Answered, models: Models) -> Iterator[str]:
    """What PARSE gains, why not more, and what to set."""
    return _trial_said(found, models) if isinstance(found, Trial) else _served_said(found, models)


def _served_said(found: Answered, models: Models) -> Iterator[str]:
    at_once = f", {found.concurrency} at a time" if found.concurrency > 1 else ""
    yield (
        f"Measured as it is served: {found.speedup:.2f}x plain decoding, {len(found.pairs)} "
        f"answers{at_once}; {found.speedups[0]:.2f}x to {found.speedups[-1]:.2f}x by answer."
    )
    if found.reason:
        yield f"Nothing was drafted: {found.reason}."
    yield f"{found.num_same} of them are the plain target's, token for token."
    if found.speedup < 1:
        yield DOES_NOT_PAY
    elif models.target:
        yield command_of(*server_specs(models, [parse_kind(models)]))


def _trial_said(trial: Trial, models: Models) -> Iterator[str]:
    gain = f"Measured as it is served: {trial.speedup:.2f}x plain decoding"
    if trial.per_round is None:
        yield f"{gain}, in answers without a round of drafting: ask for longer ones."
    else:
        yield from _rounds_said(trial, trial.per_round, gain)
    best = advised(trial.forecasts)
    if best is None:
        yield NONE_PAYS
        return
    exact, flags = "exact" if best.threshold is None else "not exact", flags_of(best)
    yield f"Set {shlex.join(flags)}: {best.speedups[best.best]:.2f}x predicted, {exact}."
    if models.target:
        (plain,) = server_specs(models, [PLAIN])
        parse_flags = (*algorithm_flags(PARSE, models.draft), *flags)
        yield command_of(replace(plain, flags=(*plain.flags, *parse_flags)))


def _rounds_said(trial: Trial, found: PerRound, gain: str) -> Iterator[str]:
    """What was measured of rounds, behind what they gain."""
    costs, parse = trial.costs, trial.parse
    ms, step = 1e3 / parse.tokens_per_s, costs.plain_ms
    gain = f"{gain}, {found.tokens:.1f} tokens per round; "
    if trial.predicted is None:
        yield f"{gain}not predicted, because its judge's verdicts on single tokens are not known."
    else:
        speedup = costs.speedup(trial.predicted)
        yield f"{gain}predicted from drafts: {speedup:.2f}x, {trial.predicted.tokens:.1f}."
    yield (
        f"Drafting takes {parse.per_token('draft_ms') / ms:.0%} of the time: a draft token costs "
        f"{costs.draft_ms / step:.2f} of a token of the plain target."
    )
    yield (
        f"Verifying takes {parse.per_token('verify_ms') / ms:.0%}: a pass of "
        f"{1 + found.drafted:.0f} rows costs {costs.verify_ms(found.drafted) / step:.1f} of them."
    )
    lost = max(0.0, 1 - (found.tokens - 1) / found.drafted)
    yield f"{lost:.0%} of the draft tokens are refused, or behind a refused one."


def flags_of(one: Forecast) -> tuple[str, ...]:
    """PARSE's flags for a judge and its best draft length."""
    if one.threshold is None:
        return flags_for(verification="token", draft_tokens=one.best)
    return flags_for(judge=LIKELIHOOD, threshold=one.threshold, draft_tokens=one.best)


def row(one: Forecast) -> list[Cell]:
    """A line of the table."""
    name = "token mode" if one.threshold is None else f"{LIKELIHOOD} {one.threshold:g}"
    error = f"± {2 / one.refusals**0.5:.0%}" if one.refusals else ""
    cells: list[Cell] = [
        (f"{speedup:.2f}x{' *' * (length == one.best)}", f"{one.rounds[length].tokens:.1f}")
        for length, speedup in one.speedups.items()
    ]
    every = f"{one.tokens / one.refusals:.0f} tokens" if one.refusals else "none"
    return [name, "yes" if one.threshold is None else "no", (every, error), *cells]
