"""An answer with its trace, taken apart into rounds and segments.

    output   | before | accepted | instead | accepted | instead | ...
    drafts            | segment | segment | ... | not verified |      round 0, then round 1, ...

``before`` and ``instead`` are the target's tokens. Segments after the accepted prefix are in no
output.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from itertools import pairwise
from typing import Any

from rich import box
from rich.table import Table
from rich.text import Text

from sglang_parse.client.records import BenchError
from sglang_parse.core.phases import TraceRecord
from sglang_parse.core.selection import matching_tokens, select

Decode = Callable[[Sequence[Sequence[int]]], list[str]]
"""Token ids of several texts -> the texts, special tokens among them."""
CONTEXT = 8
"""Tokens decoded before a text: some tokenizers decode a token differently at a start."""
_CUT = "\ufffd"
"""Of a character whose bytes are not all there."""
KEPT, REJECTED, DROPPED, UNJUDGED = "kept", "rejected", "dropped", "not judged"


@dataclass(frozen=True, slots=True)
class Traced:
    """An answer of a server.

    Attributes:
        prompt: the user's text; "" where it is not known.
        output_ids: the answer's tokens.
        parse: ``meta_info["parse"]``'s object, with its trace unless it was served plainly.
    """

    prompt: str
    output_ids: Sequence[int]
    parse: Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Segment:
    """The last segment of a prefix of a draft, or the draft's end that nobody judged.

    Attributes:
        text: as the draft model wrote it.
        end: draft tokens up to its end.
        fate: "kept", "rejected" (the cut is before it), "dropped" (behind a rejected one) or "not
            judged".
        verdict, mass: of the prefix; None where no question was asked.
        question: what was asked, as text.
        decided: whether this verdict made the cut.
    """

    text: str
    end: int
    fate: str
    verdict: float | None = None
    mass: float | None = None
    question: str = ""
    decided: bool = False


@dataclass(frozen=True, slots=True)
class Keeps:
    """What a round would have kept of its draft.

    Attributes:
        up_to: largest threshold this holds for; from the one of the entry before on.
        accepted_len: draft tokens.
        decided_by: as of a trace's record.
    """

    up_to: float
    accepted_len: int
    decided_by: int | None


@dataclass(frozen=True, slots=True)
class Round:
    """A draft, its judgement, and what the target wrote behind the cut.

    Attributes:
        record: the trace's.
        segments: of the draft.
        instead: the target's own text up to the next draft; "" where it wrote none.
        num_instead: tokens of it.
        num_matched: those of them that came with the pass, as the draft had them.
        verdict_words: accept and reject token as texts; () where no question was asked.
        keeps: at every threshold, ascending; () where verdicts made no cut.
    """

    record: TraceRecord
    segments: tuple[Segment, ...]
    instead: str
    num_instead: int
    num_matched: int
    verdict_words: tuple[str, ...]
    keeps: tuple[Keeps, ...]


@dataclass(frozen=True, slots=True)
class Made:
    """An answer, taken apart.

    Attributes:
        text: all of it.
        before: what the target wrote before the first draft; all of it where there is none.
    """

    prompt: str
    text: str
    before: str
    rounds: tuple[Round, ...]
    parse: Mapping[str, Any]


ToText = Callable[[Sequence[int], Sequence[int]], str]
"""(Token ids before, token ids) -> their text."""


class _Batch:
    """Texts of runs of tokens, decoded in one go: recorded first, then returned in that order."""

    def __init__(self) -> None:
        self._asked: list[list[int]] = []
        self._found: Iterator[str] | None = None

    def decode(self, decode: Decode) -> None:
        """A character whose bytes are not all there yet is left to the run that ends it."""
        texts = decode(self._asked)
        pairs = zip(texts[::2], texts[1::2], strict=True)
        self._found = iter(
            [after[len(before.rstrip(_CUT)) :].rstrip(_CUT) for before, after in pairs]
        )

    def __call__(self, before: Sequence[int], ids: Sequence[int]) -> str:
        if self._found is not None:
            return next(self._found)
        context = list(before[-CONTEXT:])
        self._asked += [context, [*context, *ids]]
        return ""


def take_apart(traced: Traced, decode: Decode) -> Made:
    """An answer in reading order.

    Raises:
        BenchError: the trace was not asked for, or is another answer's.
    """
    batch, records = _Batch(), _records(traced)
    _made(traced, records, batch)
    batch.decode(decode)
    return _made(traced, records, batch)


def _made(traced: Traced, records: Sequence[TraceRecord], text: ToText) -> Made:
    output = list(traced.output_ids)
    starts = [*(record["output_start"] for record in records), len(output)]
    return Made(
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
    """Raises: BenchError."""
    parse, output = traced.parse, list(traced.output_ids)
    if parse.get("mode") == "parse" and "trace" not in parse:
        fix = 'ask with custom_params = {"parse": {"trace": true}}'
        raise BenchError(f"an answer has no trace; fix: {fix}")
    records = parse.get("trace", [])
    for record in records:
        start = record["output_start"]
        kept = record["draft_token_ids"][: record["accepted_len"]]
        if output[start : start + len(kept)] != kept[: max(0, len(output) - start)]:
            raise BenchError(
                f"a trace says that {len(kept)} draft tokens were kept behind {start} output "
                "tokens, where the answer has others; fix: give output_ids and trace of one answer"
            )
    return records


def _ends(record: TraceRecord) -> list[int]:
    """Draft offsets at which a segment ends: prefixes, a cut of token mode, the draft's end."""
    ends = {*record["prefix_ends"], record["accepted_len"], len(record["draft_token_ids"])} - {0}
    return sorted(ends)


def _round(record: TraceRecord, output: Sequence[int], end: int, text: ToText) -> Round:
    """``end``: where the next round starts in the output."""
    accepted_end = record["output_start"] + record["accepted_len"]
    words = (record["accept_token_id"], record["reject_token_id"])
    return Round(
        record=record,
        segments=tuple(_segments(record, output[: record["output_start"]], text)),
        instead=text(output[:accepted_end], output[accepted_end:end]),
        num_instead=max(0, end - accepted_end),
        num_matched=num_matched(record),
        verdict_words=tuple(text([], [word]) for word in words if word is not None),
        keeps=tuple(_keeps(record)),
    )


def _segments(record: TraceRecord, before: Sequence[int], text: ToText) -> Iterator[Segment]:
    draft, prefix_of = (
        record["draft_token_ids"],
        {e: k for k, e in enumerate(record["prefix_ends"])},
    )
    has_verdicts, is_cut = bool(record["verdicts"]), False
    for low, high in pairwise([0, *_ends(record)]):
        prefix = prefix_of.get(high)
        fate = _fate(high, record, is_cut, has_verdicts and prefix is None)
        is_cut = is_cut or high > record["accepted_len"]
        segment = Segment(text([*before, *draft[:low]], draft[low:high]), high, fate)
        if prefix is not None and has_verdicts:
            segment = replace(
                segment,
                verdict=record["verdicts"][prefix],
                mass=record["verdict_mass"][prefix],
                question=text([], record["question_token_ids"][prefix]),
                decided=record["decided_by"] == prefix,
            )
        yield segment


def num_matched(record: TraceRecord) -> int:
    """Draft tokens behind the cut that came with the pass; 0 in traces that do not say."""
    judged = record["draft_token_ids"][: max(record["prefix_ends"], default=0)]
    return matching_tokens(judged[record["accepted_len"] :], record.get("bonus_token_ids", ()))


def _fate(end: int, record: TraceRecord, is_cut: bool, is_unjudged: bool) -> str:
    if end <= record["accepted_len"]:
        return KEPT
    if is_unjudged:
        return UNJUDGED
    return DROPPED if is_cut else REJECTED


def _keeps(record: TraceRecord) -> list[Keeps]:
    """By the rule that made the cut; what is kept changes at the verdicts only."""
    rule, verdicts = record["selection"], record["verdicts"]
    if rule is None:
        return []
    found = []
    for threshold in sorted({*verdicts, 2.0}):
        kept = select(
            *(verdicts, record["prefix_ends"], threshold, rule), is_finished=record["finished"]
        )
        found.append(Keeps(threshold, kept.accepted_len, kept.decided_by))
    return found


_STYLES = {
    KEPT: "green",
    REJECTED: "bold red strike",
    DROPPED: "dim strike",
    UNJUDGED: "dim italic",
}


def answer_table(made: Made, title: str) -> Table:
    """A row per segment: its author, the verdict on the answer up to here, what became of it."""
    table = Table(box=box.SIMPLE_HEAD, title=title)
    for name in ("written by", "text", "verdict", "mass", ""):
        table.add_column(name, justify="right" if name in ("verdict", "mass") else "left")
    _add_own(table, made.before)
    for one in made.rounds:
        for segment in one.segments:
            _add_segment(table, segment)
        _add_own(table, one.instead)
    return table


def _add_own(table: Table, text: str) -> None:
    if text:
        table.add_row("target", Text(text.rstrip("\n"), "cyan"), "", "", "")


def _add_segment(table: Table, segment: Segment) -> None:
    if segment.fate == REJECTED:
        table.add_row("", Text("-" * 8 + " cut " + "-" * 8, "bold yellow"), "", "", "")
    style = _STYLES[segment.fate]
    numbers = [
        Text("" if value is None else f"{value:.{places}f}", style.replace(" strike", ""))
        for value, places in ((segment.verdict, 4), (segment.mass, 2))
    ]
    note = "" if segment.fate == KEPT else segment.fate
    table.add_row("draft", Text(segment.text.rstrip("\n"), style), *numbers, note)
