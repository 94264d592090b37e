"""A made-up answer with a trace, in characters for tokens."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_parse.client.traced import ExplainedAnswer, Traced, explain_answer
from sglang_parse.core.phases import TraceRecord

QUESTION = "<end>\nIs the answer correct so far?\n"
AT_THE_END = "\nIs the final answer correct?\n"
"""Asked about an answer that has ended."""
TARGET, DRAFT, ANSWER = "a: 40 + 58 = 98\n", "b: 98 - 72 = 25\n", "Answer: 26<end>"


def decode(texts: Sequence[Sequence[int]]) -> list[str]:
    """Every token is a byte of UTF-8."""
    return [bytes(ids).decode(errors="replace") for ids in texts]


def encode(text: str) -> list[int]:
    return list(text.encode())


def record(
    start: int,
    segments: Sequence[str],
    verdicts: Sequence[float],
    num_accepted: int,
    *,
    unverified: str = "",
    finished: bool = False,
    rule: str | None = "first-reject",
    threshold: float = 0.5,
    bonus: str = "?",
) -> TraceRecord:
    """A round whose prefixes are the segments, with unverified draft tokens after them.

    Args:
        bonus: the target's choices after the accepted prefix.
    """
    ends = [len(encode("".join(segments[: k + 1]))) for k in range(len(segments))]
    rejected = num_accepted < len(segments)
    bonus_ids = [] if finished and not rejected else encode(bonus)
    questions = [encode(QUESTION)] * (len(ends) - finished) + [encode(AT_THE_END)] * finished
    return {
        "output_start": start,
        "anchor_token_id": ord("?"),
        "draft_token_ids": encode("".join(segments) + unverified),
        "finished": finished,
        "prefix_ends": ends,
        "judge": "question",
        "question_token_ids": questions,
        "accept_token_id": ord("y"),
        "reject_token_id": ord("n"),
        "verdicts": list(verdicts),
        "verdict_mass": [0.99 - 0.01 * k for k in range(len(ends))],
        "threshold": threshold,
        "strict": None,
        "selection": rule,
        "accepted_len": ends[num_accepted - 1] if num_accepted else 0,
        "decided_by": None if rule is None else num_accepted - (not rejected),
        "next_token_id": bonus_ids[0] if bonus_ids else None,
        "bonus_token_ids": bonus_ids,
        "target_token_ids": [ord("?")] * (1 + sum(map(len, segments))),
    }


def traced(prompt: str, output: str, *records: TraceRecord, **parse: object) -> Traced:
    times = {"prefill_ms": 44.1, "draft_ms": 452.0, "verify_ms": 90.3}
    counters = {"accepted_tokens": 60, "drafted_tokens": 90, "target_tokens": 17}
    info = {"mode": "parse", **times, "decode_ms": 147.2, **counters, "skipped_drafts": 0}
    return Traced(prompt, encode(output), {**info, "trace": list(records), **parse})


def three_answers() -> list[ExplainedAnswer]:
    """One with a rejection, unverified tokens and a long line; one by plain decoding."""
    long = "c: " + "9 + " * 80 + "1 = 721\n"
    accepted = TARGET
    corrected = "b: 98 - 72 = 26\n"
    first = record(1, [accepted[1:], DRAFT, long], [0.9993, 0.03, 0.9], 1)
    start = len(encode(accepted + corrected))
    second = record(start, [long], [0.97], 1, unverified="d: 1")
    last = record(
        *(start + len(encode(long)), ["d: 1 - 2 = 9\n", ANSWER], [0.2, 0.9995], 2),
        finished=True,
        rule="answer-first",
    )
    output = accepted + corrected + long + "d: 1 - 2 = 9\n" + ANSWER
    plain = Traced("Hello?", encode("Hi!"), {"mode": "plain", "reason": "sampling mask"})
    problem = "Start with 40\na: + 58\nb: - 72 <b>&amp;</b>"
    return [
        explain_answer(one, decode) for one in (traced(problem, output, first, second, last), plain)
    ]
