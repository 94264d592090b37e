"""Requests first drafts and whole answers; a stopped calibration resumes from what is on disk.

A first draft costs one target verify: at threshold 0 all of it is accepted, so a finished draft
ends its request, and the length limit ends an unfinished one. Neither changes a verdict on it.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

from sglang_parse.calibrate.figures import GradedAnswer
from sglang_parse.calibrate.first_draft import FirstDraft
from sglang_parse.client.ask import Asking, ask, graded
from sglang_parse.client.records import PLAIN, Answer, Assignment, BenchError, BenchRun, Variant
from sglang_parse.client.servers import Endpoint, Remote
from sglang_parse.core.certificate import Fingerprint

ACCEPT_ALL = {"parse": {"enabled": True, "threshold": 0.0, "trace": True}}
WAVES = 8
"""Requests between two saves, as a multiple of the concurrency."""
Decode = Callable[[Sequence[int]], str]


class Store:
    """A JSONL file of results: the conditions they were measured under, then one line each.

    Raises:
        BenchError: the file was measured under other conditions, or is damaged.
    """

    def __init__(self, path: Path, conditions: Mapping[str, Any]) -> None:
        self._path = path
        wanted = json.loads(json.dumps(conditions))
        if not path.exists():
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(json.dumps(wanted) + "\n", encoding="utf-8")
        found, *self.lines = _read_whole_lines(path)
        if found != wanted:
            differ = sorted(key for key in {*found, *wanted} if found.get(key) != wanted.get(key))
            raise BenchError(
                f"{path} was measured with another {', '.join(differ)}; fix: give another "
                "--output, or move the file away"
            )

    def add(self, lines: Iterable[Mapping[str, Any]]) -> None:
        new = [dict(line) for line in lines]
        with self._path.open("a", encoding="utf-8") as file:
            file.writelines(json.dumps(line) + "\n" for line in new)
        self.lines += new


def _read_whole_lines(path: Path) -> list[dict[str, Any]]:
    """Truncates a last line that was not written to its end."""
    content = path.read_bytes()
    whole = content[: content.rfind(b"\n") + 1]
    if len(whole) < len(content):
        path.write_bytes(whole)
    try:
        return [json.loads(line) for line in whole.splitlines()] or [{}]
    except json.JSONDecodeError as error:
        raise BenchError(f"{path} is damaged ({error}); fix: move it away") from error


@dataclass(frozen=True, slots=True)
class Collector:
    """Sends a task's problems to one server.

    Attributes:
        asking: parameters of all requests; each method sets ``custom_params``.
        decode: token ids to text.
    """

    endpoint: Endpoint
    task: Assignment
    asking: Asking
    decode: Decode
    concurrency: int

    def fingerprint(self) -> Fingerprint:
        """Asks the server what it serves. Raises: BenchError, for a server without questions."""
        (answer,) = self._ask(self.endpoint, [0], ACCEPT_ALL).answers
        found = Fingerprint(**answer.parse["fingerprint"])
        if not found.question:
            raise BenchError(
                f"{self.endpoint.url} runs --parse-verification token: there are no verdicts to "
                "calibrate"
            )
        return found

    def first_drafts(
        self, indices: Sequence[int], store: Store, on_done: Callable[[int], None]
    ) -> list[FirstDraft]:
        """Returns the first drafts of these items, in their order.

        Args:
            store: results on disk are not requested again.
            on_done: called with the number of results that were added.
        """

        def request(part: Sequence[int]) -> list[dict[str, Any]]:
            answers = self._ask(self.endpoint, part, ACCEPT_ALL, on_done).answers
            return [asdict(first_draft(answer, self.task, self.decode)) for answer in answers]

        lines = self._resume(indices, store, {}, request, on_done)
        lists = ("verdicts", "prefix_ends")
        return [FirstDraft(**line | {name: tuple(line[name]) for name in lists}) for line in lines]

    def graded_answers(
        self,
        indices: Sequence[int],
        variant: str,
        threshold: float | None,
        store: Store,
        on_done: Callable[[int], None],
    ) -> list[GradedAnswer]:
        """Returns graded answers to these items, in their order; threshold None: plain decoding."""
        server, parse = self.endpoint, {"enabled": True, "threshold": threshold}
        if threshold is None:  # under PARSE's name the client would require drafts
            server, parse = Remote(PLAIN, self.endpoint.url), {"enabled": False}

        def request(part: Sequence[int]) -> list[dict[str, Any]]:
            found = self._ask(server, part, {"parse": parse}, on_done)
            answers = graded(found, self.task.items, self.task.grade).answers
            return [
                asdict(graded_answer(one, variant, found.seconds / len(part))) for one in answers
            ]

        lines = self._resume(indices, store, {"variant": variant}, request, on_done)
        return [GradedAnswer(**line) for line in lines]

    def _resume(
        self,
        indices: Sequence[int],
        store: Store,
        key: dict[str, Any],
        request: Callable[[Sequence[int]], list[dict[str, Any]]],
        on_done: Callable[[int], None],
    ) -> list[dict[str, Any]]:
        """Requests what the store lacks, in waves, and saves each wave."""
        known = {line["problem"]: line for line in store.lines if key.items() <= line.items()}
        missing = [index for index in indices if index not in known]
        on_done(len(indices) - len(missing))
        size = WAVES * self.concurrency
        for start in range(0, len(missing), size):
            lines = request(missing[start : start + size])
            store.add(lines)
            known |= {line["problem"]: line for line in lines}
        return [known[index] for index in indices]

    def _ask(
        self,
        server: Endpoint,
        indices: Sequence[int],
        custom_params: Mapping[str, Any],
        on_done: Callable[[int], None] = lambda _: None,
    ) -> BenchRun:
        return ask(
            *(server, self.task.items, indices),
            variant=Variant(server.name),
            concurrency=self.concurrency,
            asking=replace(self.asking, custom_params=custom_params),
            on_answer=partial(on_done, 1),
        )


def first_draft(answer: Answer, task: Assignment, decode: Decode) -> FirstDraft:
    """Reads an answer's trace. Raises: BenchError, where its first draft is not as in use."""
    info, item = answer.parse, task.items[answer.problem]
    if info["kv_truncated_drafts"]:
        raise BenchError(
            f"problem {answer.problem}: drafts were truncated for lack of KV slots; fix: a smaller "
            "--concurrency, or a larger --max-total-tokens of the server"
        )
    trace = info["trace"]
    if not trace or trace[0]["output_start"] != 1:
        raise BenchError(
            f"problem {answer.problem}: the server did not draft at once; fix: start it with "
            "--parse-drafting always"
        )
    record = trace[0]
    score = None
    if record["finished"]:
        score = task.grade(item, decode([record["anchor_token_id"], *record["draft_token_ids"]]))
    if score not in (None, 0, 1):
        raise BenchError(f"{task.title} grades with {score}; calibrate needs right or wrong")
    return FirstDraft(
        problem=answer.problem,
        verdicts=tuple(record["verdicts"]),
        prefix_ends=tuple(record["prefix_ends"]),
        num_drafted=len(record["draft_token_ids"]),
        finished=record["finished"],
        first_wrong=_first_wrong(record, task, item, decode),
        is_answer_right=None if score is None else bool(score),
        draft_ms=info["draft_ms"],
        verify_ms=info["verify_ms"],
    )


def _first_wrong(record: Any, task: Assignment, item: Any, decode: Decode) -> int | None:
    """Index of the first verified prefix with an error. An error in the target's own first token
    (the anchor) counts too: nothing after it is right."""
    if task.locate is None:
        return None
    ids, finished = [record["anchor_token_id"], *record["draft_token_ids"]], record["finished"]
    num_right = task.locate(item, decode(ids), finished)
    if num_right is None:
        return None
    for place, end in enumerate(record["prefix_ends"]):
        is_answer = finished and end == len(ids) - 1  # the end itself may be the error
        if is_answer or len(decode(ids[: end + 1])) > num_right:
            return place
    return None


def graded_answer(answer: Answer, variant: str, seconds: float) -> GradedAnswer:
    """Raises: BenchError, for a grade other than 0 and 1."""
    if answer.score not in (0, 1):
        raise BenchError(f"problem {answer.problem} was graded {answer.score}, not right or wrong")
    info = answer.parse
    accepted_tokens, decode_ms = info.get("accepted_tokens", 0), info.get("decode_ms", 0.0)
    counts = answer.output_tokens, accepted_tokens, seconds, decode_ms
    return GradedAnswer(answer.problem, variant, float(answer.score), *counts)
