"""A traced answer, split into rounds and segments for people.

    output   | before | accepted | target | accepted | target | ...
    drafts            | segment | segment | ... | not verified |      round 0, then round 1, ...

``before`` and ``target`` are the target's tokens, matched tokens included. Segments after the
rejection point are not in the output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from itertools import groupby, pairwise
from typing import Any

from sglang_parse.client.records import BenchError
from sglang_parse.core.phases import TraceRecord
from sglang_parse.core.selection import matching_tokens, select
from sglang_parse.core.strict import NUMBERS

Decode = Callable[[Sequence[Sequence[int]]], list[str]]
"""Decodes a batch of token ids, special tokens included."""
CONTEXT = 8
"""Tokens decoded before a text: some tokenizers decode a token differently at the start."""
_INCOMPLETE = "\ufffd"
"""Decoded in place of a character whose bytes are incomplete."""
ACCEPTED, REJECTED, DROPPED, UNVERIFIED = "accepted", "rejected", "dropped", "not verified"
CONTRADICTED = " (the target's own)"


@dataclass(frozen=True, slots=True)
class Traced:
    """An answer as a server sent it: the user's text, "" if unknown; the answer's tokens; and
    ``meta_info["parse"]``, with a trace unless plain decoding served it."""

    prompt: str
    output_ids: Sequence[int]
    parse: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Run:
    """Draft tokens in a row that all equal the target's choices in their places, or all differ.
    ``target``: its choice in place of the first; "" where they are equal, or unknown."""

    text: str
    target: str = ""


@dataclass(frozen=True, slots=True)
class Segment:
    """The last segment of a draft's prefix, or the unverified end of the draft.

    Attributes:
        end: draft tokens up to its end.
        num_tokens: of them, its own.
        status: ``ACCEPTED``, ``REJECTED`` (the first one not accepted), ``DROPPED`` (after a
            rejected one) or ``UNVERIFIED``.
        verdict, mass: of the prefix; None without a verdict, or a question.
        decided: whether this verdict set the accepted length.
        contradicted: the target would have written this prefix itself, which its verdict rejects.
        refused: "a number" and the like, if ``--parse-strict`` refuses one of its tokens.
        runs: its text, by whether the target would have chosen the same tokens there.
    """

    end: int
    num_tokens: int
    status: str
    runs: tuple[Run, ...]
    verdict: float | None = None
    mass: float | None = None
    question: str = ""
    decided: bool = False
    contradicted: bool = False
    refused: str = ""

    @property
    def text(self) -> str:
        return "".join(run.text for run in self.runs)


@dataclass(frozen=True, slots=True)
class ExplainedRound:
    """A draft, its verdicts, and the target's text after the accepted prefix.

    Attributes:
        target_text: the target's text up to the next draft.
        num_matched: matched tokens in it.
        num_reworded: accepted tokens in whose places the target would have chosen others.
        verdict_tokens: accept and reject token as text; () where no question is set.
        accepted_at: (largest threshold of a range, accepted length there), ascending; () if
            verdicts did not set the accepted length.
    """

    record: TraceRecord
    segments: tuple[Segment, ...]
    target_text: str
    num_matched: int
    num_reworded: int
    verdict_tokens: tuple[str, ...]
    accepted_at: tuple[tuple[float, int], ...]


@dataclass(frozen=True, slots=True)
class ExplainedAnswer:
    """An answer by rounds; ``before``: the target's text before the first draft."""

    prompt: str
    text: str
    before: str
    rounds: tuple[ExplainedRound, ...]
    parse: Mapping[str, Any]


ToText = Callable[[Sequence[int], Sequence[int]], str]
"""(preceding token ids, token ids) -> text of the latter."""


class _Batch:
    """Decodes many texts in one call: recorded in a first pass, returned in a second."""

    def __init__(self) -> None:
        self._asked: list[list[int]] = []
        self._found: Iterator[str] | None = None

    def decode(self, decode: Decode) -> None:
        """An incomplete character is left to the text that completes it."""
        texts = [text.rstrip(_INCOMPLETE) for text in decode(self._asked)]
        pairs = zip(texts[::2], texts[1::2], strict=True)
        self._found = iter([after[len(before) :] for before, after in pairs])

    def __call__(self, before: Sequence[int], ids: Sequence[int]) -> str:
        if self._found is not None:
            return next(self._found)
        context = list(before[-CONTEXT:])
        self._asked += [context, [*context, *ids]]
        return ""


def explain_answer(traced: Traced, decode: Decode) -> ExplainedAnswer:
    batch, records = _Batch(), _records(traced)
    explain = partial(_explain, traced, records, batch)
    explain()
    batch.decode(decode)
    return explain()


def _explain(traced: Traced, records: Sequence[TraceRecord], text: ToText) -> ExplainedAnswer:
    output = list(traced.output_ids)
    starts = [*(record["output_start"] for record in records), len(output)]
    return ExplainedAnswer(
        prompt=traced.prompt,
        text=text([], output),
        before=text([], output[: starts[0]]),
        rounds=tuple(
            _round(record, output, end, text)
            for record, end in zip(records, starts[1:], strict=True)
        ),
        parse=traced.parse,
    )


def _records(traced: Traced) -> list[TraceRecord]:
    parse, output = traced.parse, list(traced.output_ids)
    if parse.get("mode") == "parse" and "trace" not in parse:
        fix = 'send custom_params = {"parse": {"trace": true}}'
        raise BenchError(f"an answer has no trace; fix: {fix}")
    records = parse.get("trace", [])
    for record in records:
        start = record["output_start"]
        accepted = record["draft_token_ids"][: record["accepted_len"]]
        if output[start : start + len(accepted)] != accepted[: max(0, len(output) - start)]:
            raise BenchError(
                f"a trace has {len(accepted)} accepted draft tokens at output token {start}, where "
                "the answer has others; fix: give output_ids and trace of one answer"
            )
    return records


def _round(record: TraceRecord, output: Sequence[int], end: int, text: ToText) -> ExplainedRound:
    """``end``: start of the next round in the output."""
    start = record["output_start"]
    accepted_end = start + record["accepted_len"]
    verdict_ids = (record["accept_token_id"], record["reject_token_id"])
    return ExplainedRound(
        record=record,
        segments=_by_line(_segments(record, output[:start], text)),
        target_text=text(output[:accepted_end], output[accepted_end:end]),
        num_matched=num_matched(record),
        num_reworded=num_reworded(record),
        verdict_tokens=tuple(text([], [token]) for token in verdict_ids if token is not None),
        accepted_at=tuple(_accepted_at(record)),
    )


def _segments(record: TraceRecord, before: Sequence[int], text: ToText) -> Iterator[Segment]:
    draft, accepted_len = record["draft_token_ids"], record["accepted_len"]
    prefixes = {end: k for k, end in enumerate(record["prefix_ends"])} if record["verdicts"] else {}
    # In token mode the accepted length may be between two prefixes.
    ends = sorted({*record["prefix_ends"], accepted_len, len(draft)} - {0})
    choices = record.get("target_token_ids", [])
    own_len = matching_tokens(draft, choices)
    is_rejected = False
    for start, end in pairwise([0, *ends]):
        status = ACCEPTED
        if end > accepted_len:
            if prefixes and end not in prefixes:
                status = UNVERIFIED
            else:
                status = DROPPED if is_rejected else REJECTED
            is_rejected = True
        context = [*before, *draft[:start]]
        runs = tuple(_runs(context, draft[start:end], choices[start:end], text))
        segment = Segment(end, end - start, status, runs)
        if (prefix := prefixes.get(end)) is not None:
            verdict = record["verdicts"][prefix]
            segment = replace(
                segment,
                verdict=verdict,
                mass=record["verdict_mass"][prefix],
                question=text([], record["question_token_ids"][prefix]),
                decided=record["decided_by"] == prefix,
                contradicted=end <= own_len and verdict < record["threshold"] <= 1,
                refused=_refused_in(record, start, end) if status == REJECTED else "",
            )
        yield segment


def _refused_in(record: TraceRecord, start: int, end: int) -> str:
    """What a strict class refuses in this part of the draft: a number, or code."""
    strict = record.get("strict")
    if strict is None or not start <= strict["place"] < end:
        return ""
    return "a number" if strict["name"] == NUMBERS else strict["name"]


def _by_line(segments: Iterable[Segment]) -> tuple[Segment, ...]:
    """Joins tokens that are verified one by one and share a line and a fate, for people."""
    lines: list[Segment] = []
    for segment in segments:
        if lines and _joins(lines[-1], segment):
            line = lines.pop()
            segment = replace(
                segment,
                runs=_joined(line.runs, segment.runs),
                decided=line.decided or segment.decided,
                contradicted=line.contradicted or segment.contradicted,
            )
        lines.append(segment)
    return tuple(lines)


def _joined(before: Sequence[Run], after: Sequence[Run]) -> tuple[Run, ...]:
    """Runs of two texts, one behind the other."""
    if not before or not after or bool(before[-1].target) != bool(after[0].target):
        return (*before, *after)
    middle = Run(before[-1].text + after[0].text, before[-1].target)
    return (*before[:-1], middle, *after[1:])


def _joins(line: Segment, segment: Segment) -> bool:
    is_asked = bool(line.question or segment.question)
    return (
        segment.num_tokens == 1
        and segment.status == line.status
        and not is_asked
        and not line.text.endswith("\n")
    )


def _runs(
    before: Sequence[int], draft: Sequence[int], choices: Sequence[int], text: ToText
) -> Iterator[Run]:
    """A segment by runs; where choices are not recorded, tokens count as equal."""
    places = range(len(draft))
    for differs, group in groupby(
        places, lambda place: place < len(choices) and choices[place] != draft[place]
    ):
        run = list(group)
        context = [*before, *draft[: run[0]]]
        target = text(context, [choices[run[0]]]) if differs else ""
        yield Run(text(context, [draft[place] for place in run]), target)


def num_reworded(record: TraceRecord) -> int:
    """Counts accepted draft tokens in whose places the target would have chosen others."""
    accepted = record["draft_token_ids"][: record["accepted_len"]]
    choices = record.get("target_token_ids", [])
    return sum(own != token for own, token in zip(choices, accepted, strict=False))


def num_matched(record: TraceRecord) -> int:
    """Counts matched tokens; 0 in traces without bonus tokens."""
    verified = record["draft_token_ids"][: max(record["prefix_ends"], default=0)]
    return matching_tokens(verified[record["accepted_len"] :], record.get("bonus_token_ids", ()))


def _accepted_at(record: TraceRecord) -> Iterator[tuple[float, int]]:
    """By the round's selection rule; the accepted length changes at verdicts only."""
    rule, verdicts, ends = record["selection"], record["verdicts"], record["prefix_ends"]
    refused_at = strict["place"] if (strict := record.get("strict")) else None
    if rule is None:
        return
    for threshold in sorted({*verdicts, 2.0}):
        accepted_len, _ = select(
            verdicts, ends, threshold, rule, is_finished=record["finished"], refused_at=refused_at
        )
        yield threshold, accepted_len
