"""Whole answers with a threshold, beside the plain target's: the request-level check."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Any

from sglang_parse.calibrate.figures import Served, Share, paired_difference, upper_bound
from sglang_parse.calibrate.store import Store
from sglang_parse.client.ask import Asking, ask, graded
from sglang_parse.client.records import (
    PARSE,
    PLAIN,
    Answer,
    Assignment,
    BenchError,
    BenchRun,
    Variant,
)
from sglang_parse.client.servers import Endpoint, Remote

WAVES = 4
"""Requests between two saves, in multiples of those under way at once."""


@dataclass(frozen=True, slots=True)
class Mark:
    """One graded answer.

    Attributes:
        problem: index into the list of items.
        way: "plain", or the rule and the threshold.
        score: 0 or 1.
        output_tokens: as the server counted them.
        accepted_tokens: those of them that were the draft's.
        seconds: its share of the time its neighbours and it took.
        decode_ms: its share of the target's steps.
    """

    problem: int
    way: str
    score: float
    output_tokens: int
    accepted_tokens: int
    seconds: float
    decode_ms: float


def way_name(rule: str, threshold: float | None) -> str:
    """``Mark.way``; None is the plain target."""
    return PLAIN if threshold is None else f"{rule} at {threshold:g}"


def answer_all(
    endpoint: Endpoint,
    task: Assignment,
    indices: Sequence[int],
    asking: Asking,
    way: tuple[str, float | None],
    store: Store,
    concurrency: int,
    on_answer: Callable[[int], None],
) -> list[Mark]:
    """Graded answers to these items, in their order; those that the store has are not asked.

    Args:
        way: the server's rule and the requests' threshold; None: served by the plain target.
        on_answer: called with the number of answers that have come, for progress.
    """
    name = way_name(*way)
    known = {line["problem"]: Mark(**line) for line in store.lines if line["way"] == name}
    missing = [index for index in indices if index not in known]
    on_answer(len(indices) - len(missing))
    # Under the plain target's name nobody wonders that a draft was not used.
    server = Remote(PLAIN, endpoint.url) if way[1] is None else endpoint
    asking = replace(asking, custom_params=_params(way[1]))
    size = WAVES * concurrency
    for start in range(0, len(missing), size):
        part = missing[start : start + size]
        leg = ask(
            *(server, task.items, part),
            variant=Variant(PLAIN if way[1] is None else PARSE, way[1]),
            concurrency=concurrency,
            asking=asking,
            on_answer=partial(on_answer, 1),
        )
        marks = [_mark(answer, name, leg) for answer in graded(leg, task.items, task.grade).answers]
        store.add(_as_line(mark) for mark in marks)
        known |= {mark.problem: mark for mark in marks}
    return [known[index] for index in indices]


def _params(threshold: float | None) -> Mapping[str, Any]:
    if threshold is None:
        return {"parse": {"enabled": False}}
    return {"parse": {"enabled": True, "threshold": threshold}}


def _mark(answer: Answer, name: str, leg: BenchRun) -> Mark:
    if answer.score not in (0, 1):
        raise BenchError(f"problem {answer.problem} was graded {answer.score}, not right or wrong")
    info = answer.parse
    return Mark(
        problem=answer.problem,
        way=name,
        score=float(answer.score),
        output_tokens=answer.output_tokens,
        accepted_tokens=info.get("accepted_tokens", 0),
        seconds=leg.seconds / len(leg.answers),
        decode_ms=info.get("decode_ms", 0.0),
    )


def _as_line(mark: Mark) -> dict[str, Any]:
    return {name: getattr(mark, name) for name in Mark.__slots__}


def plain_ms(marks: Sequence[Mark]) -> float | None:
    """Ms per output token of the plain target; None before it has answered."""
    tokens = sum(mark.output_tokens for mark in marks)
    return sum(mark.decode_ms for mark in marks) / tokens if tokens else None


def compared(
    rule: str, threshold: float, marks: Sequence[Mark], plain: Sequence[Mark], delta: float
) -> Served:
    """The figures of one threshold; the same problems in the same order."""
    total = len(marks)
    pairs = [(ours.score, theirs.score) for ours, theirs in zip(marks, plain, strict=True)]
    better, worse = pairs.count((1.0, 0.0)), pairs.count((0.0, 1.0))
    right, plain_right = (sum(pair[k] == 1 for pair in pairs) for k in (0, 1))
    difference, low, high = paired_difference(better, worse, total)
    return Served(
        rule=rule,
        threshold=threshold,
        problems=total,
        right=Share.of(right, total),
        plain_right=Share.of(plain_right, total),
        wrong_where_plain_right=Share.of(worse, plain_right),
        bound=upper_bound(worse, total, delta),
        difference=difference,
        difference_low=low,
        difference_high=high,
        tokens_per_s=_tokens_per_s(marks),
        plain_tokens_per_s=_tokens_per_s(plain),
        draft_share=sum(m.accepted_tokens for m in marks) / _tokens(marks),
    )


def _tokens(marks: Sequence[Mark]) -> int:
    return max(1, sum(mark.output_tokens for mark in marks))


def _tokens_per_s(marks: Sequence[Mark]) -> float:
    return _tokens(marks) / sum(mark.seconds for mark in marks)
