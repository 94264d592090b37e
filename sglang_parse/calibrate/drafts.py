"""First drafts and the target's verdicts on them, as cheap as they can be had.

A request needs only its first draft judged. At threshold 0 all of it is kept, so that a finished
one ends the request with its one pass; an unfinished one ends it at the length limit, one token
behind the draft's budget. Neither changes the first draft, nor a verdict on it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import partial
from typing import Any

from sglang_parse.calibrate.losses import FirstDraft
from sglang_parse.calibrate.store import Store
from sglang_parse.client.ask import Asking, ask
from sglang_parse.client.records import PARSE, Answer, Assignment, BenchError, Variant
from sglang_parse.client.servers import Endpoint
from sglang_parse.core.certificate import Fingerprint

JUDGE_ALL = {"parse": {"enabled": True, "threshold": 0.0, "trace": True}}
WAVES = 8
"""Requests between two saves, in multiples of those under way at once."""
Decode = Callable[[Sequence[int]], str]


def look_at(endpoint: Endpoint, task: Assignment, asking: Asking) -> Fingerprint:
    """What the server is, by its own word.

    Raises:
        BenchError: it asks no question.
    """
    (answer,) = ask(endpoint, task.items, [0], variant=Variant(PARSE), asking=asking).answers
    found = Fingerprint(**_shown(answer, "fingerprint"))
    if not found.question:
        raise BenchError(
            f"{endpoint.url} runs --parse-verification token: there are no verdicts to calibrate"
        )
    return found


def collect(
    endpoint: Endpoint,
    task: Assignment,
    indices: Sequence[int],
    asking: Asking,
    store: Store,
    decode: Decode,
    concurrency: int,
    on_draft: Callable[[int], None],
) -> list[FirstDraft]:
    """The first drafts of these items, in their order; those that the store has are not asked.

    Args:
        on_draft: called with the number of drafts that have come, for progress.
    """
    known = {line["problem"]: _draft(line) for line in store.lines}
    missing = [index for index in indices if index not in known]
    on_draft(len(indices) - len(missing))
    size = WAVES * concurrency
    for start in range(0, len(missing), size):
        part = missing[start : start + size]
        way = Variant(PARSE)
        leg = ask(
            *(endpoint, task.items, part),
            variant=way,
            concurrency=concurrency,
            asking=asking,
            on_answer=partial(on_draft, 1),
        )
        drafts = [first_draft(answer, task, decode) for answer in leg.answers]
        store.add(asdict(draft) for draft in drafts)
        known |= {draft.problem: draft for draft in drafts}
    return [known[index] for index in indices]


def first_draft(answer: Answer, task: Assignment, decode: Decode) -> FirstDraft:
    """Of an answer with its trace. Raises: BenchError, where its draft is not as in use."""
    info, item = answer.parse, task.items[answer.problem]
    if info["kv_truncated_drafts"]:
        raise BenchError(
            f"problem {answer.problem}: KV slots were short, so drafts were cut by the load; fix: "
            "a smaller --concurrency, or a larger --max-total-tokens of the server"
        )
    trace = _shown(answer, "trace")
    if not trace or trace[0]["output_start"] != 1:
        raise BenchError(
            f"problem {answer.problem}: the server did not draft at once; fix: start it with "
            "--parse-drafting always"
        )
    record = trace[0]
    right = None
    if record["finished"]:
        text = decode([record["anchor_token_id"], *record["draft_token_ids"]])
        score = task.grade(item, [text])
        if score is not None and score not in (0, 1):
            raise BenchError(f"{task.title} grades with {score}; calibrate needs right or wrong")
        right = None if score is None else bool(score)
    return FirstDraft(
        problem=answer.problem,
        verdicts=tuple(record["verdicts"]),
        prefix_ends=tuple(record["prefix_ends"]),
        num_drafted=len(record["draft_token_ids"]),
        finished=record["finished"],
        first_wrong=_first_wrong(record, task, item, decode),
        is_answer_right=right,
        mass=min(record["verdict_mass"]),
        draft_ms=info["draft_ms"],
        verify_ms=info["verify_ms"],
    )


def _first_wrong(record: Any, task: Assignment, item: Any, decode: Decode) -> int | None:
    """The first judged prefix with an error in it. An error of the target's own first token counts
    as the draft's: nothing that follows it is right."""
    if task.locate is None:
        return None
    ids, finished = record["draft_token_ids"], record["finished"]
    anchor = record["anchor_token_id"]
    num_right = task.locate(item, decode([anchor, *ids]), finished)
    if num_right is None:
        return None
    for place, end in enumerate(record["prefix_ends"]):
        is_answer = finished and end == len(ids)  # its end may be what is wrong
        if is_answer or len(decode([anchor, *ids[:end]])) > num_right:
            return place
    return None


def _shown(answer: Answer, key: str) -> Any:
    if key not in answer.parse:
        raise BenchError(f"the server shows no {key} in meta_info['parse']; is it this version's?")
    return answer.parse[key]


def _draft(line: dict[str, Any]) -> FirstDraft:
    lists = {name: tuple(line[name]) for name in ("verdicts", "prefix_ends")}
    return FirstDraft(**line | lists)
