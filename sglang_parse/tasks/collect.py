"""Sends graded problems to a PARSE server; a stopped program resumes from what is on disk.

A first draft costs one target verify: at threshold 0 all of it is accepted, so a finished draft
ends its request, and the length limit ends an unfinished one. Neither changes a verdict on it.
"""

from __future__ import annotations

import contextlib
import json
import os
from bisect import bisect_left, bisect_right
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from functools import cached_property, partial
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import Progress
from transformers import AutoTokenizer

from sglang_parse.client.ask import LONG_LIMIT_S, Asking, ask
from sglang_parse.client.pool import Pool
from sglang_parse.client.program import ProgressLog
from sglang_parse.client.records import PARSE, PLAIN, Answer, Assignment, BenchError
from sglang_parse.client.servers import ENVIRONMENT, Endpoint, Remote
from sglang_parse.client.tables import add_bar, make_progress
from sglang_parse.core.certificate import Fingerprint
from sglang_parse.tasks.settings import GradedSettings

ACCEPT_ALL = {"threshold": 0.0, "strict": "none", "trace": True}
PROBE_TOKENS = 16
"""Answer length of the request that asks what the server serves."""
WAVES = 8
"""Requests between two saves, as a multiple of the concurrency."""
Parse = Mapping[str, Any]
"""``custom_params["parse"]`` of requests."""


@dataclass(frozen=True, slots=True)
class GradedDraft:
    """A graded draft with its verdicts, which depend on no threshold.

    Attributes:
        problem: index into the list of items.
        prefix_ends: prefix k is the draft's first ``prefix_ends[k]`` tokens.
        finished: the draft model ended its answer.
        first_wrong: index of the first prefix with an error; None without an error, or where the
            grader cannot locate one.
        is_answer_right: of a finished draft; else None.
        first_wrong_token: number of the first wrong draft token, from 1; 0 for the anchor; None
            as ``first_wrong``.
        round: number of the draft within its answer, from 0.
    """

    problem: int
    verdicts: Sequence[float]
    prefix_ends: Sequence[int]
    num_drafted: int
    finished: bool
    first_wrong: int | None
    is_answer_right: bool | None
    first_wrong_token: int | None = None
    round: int = 0


@dataclass(frozen=True)
class Collector:
    """Sends a task's problems to one server that is awake; ``decode`` makes text of token ids."""

    settings: GradedSettings
    task: Assignment
    endpoint: Endpoint
    progress: Progress
    decode: Callable[[Sequence[int]], str]

    def ask(
        self,
        indices: Sequence[int],
        parse: Parse | None,
        max_tokens: int,
        on_answer: Callable[[], None] = lambda: None,
        **asking_more: Any,
    ) -> Sequence[Answer]:
        """Answers these problems, always by drafting; ``parse`` None: by plain decoding.
        ``asking_more``: further fields of ``Asking``."""
        server, options = self.endpoint, {"enabled": True, "drafting": "always", **(parse or {})}
        if parse is None:  # under PARSE's name the client would require drafts
            server, options = Remote(PLAIN, self.endpoint.url), {"enabled": False}
        more = {"parse": options, "limit_s": LONG_LIMIT_S, **asking_more}
        asking = Asking(self.settings.model_name, max_tokens, **more)
        items, at_once = self.task.items, self.settings.concurrency
        run = ask(server, items, indices, concurrency=at_once, asking=asking, on_answer=on_answer)
        return run.answers

    @cached_property
    def served(self) -> tuple[Fingerprint, float]:
        """What the server serves, and its threshold; asks it once."""
        (answer,) = self.ask([0], {"trace": True}, PROBE_TOKENS)
        found = Fingerprint(**answer.parse["fingerprint"])
        if not found.judge:
            raise BenchError(
                f"{self.endpoint.url} runs --parse-verification token: there are no verdicts"
            )
        return found, first_record(answer)["threshold"]

    def first_drafts(self, indices: Sequence[int]) -> list[GradedDraft]:
        """The graded first drafts of these problems, in their order."""
        limit = min(self.task.max_tokens, self.served[0].draft_tokens + 2)  # ends with the draft
        read = lambda answer: asdict(self.grade_draft(answer))  # noqa: E731
        found = self.collect("first drafts", indices, ACCEPT_ALL, read, limit)
        return [GradedDraft(**draft) for draft in found]

    def collect(
        self,
        name: str,
        indices: Sequence[int],
        parse: Parse | None,
        read: Callable[[Answer], Any],
        max_tokens: int | None = None,
        **asking: Any,
    ) -> list[Any]:
        """What ``read`` makes of the answer to each problem, plain data; saves it in waves.

        Args:
            name: of the progress bar and of the file, whose results are not requested again; it has
                the selection where results depend on it.
            max_tokens: per answer; default: the task's.
        """
        limit = max_tokens or self.task.max_tokens
        conditions = {
            **self.served[0].model_dump(exclude={"selection"}),
            "task": self.task.title,
            "task_file": str(self.settings.task_file or ""),
            "max_tokens": limit,
            "located": self.task.locate is not None,
        }
        path = self.settings.output / f"{name.replace(' ', '-')}.json"
        results = _read_results(path, conditions)
        missing = [index for index in indices if str(index) not in results]
        bar, size = add_bar(self.progress, name, len(indices)), WAVES * self.settings.concurrency
        advance = partial(self.progress.advance, bar)
        advance(len(indices) - len(missing))
        for start in range(0, len(missing), size):
            wave = missing[start : start + size]
            answers = self.ask(wave, parse, limit, partial(advance, 1), **asking)
            results |= {str(answer.problem): read(answer) for answer in answers}
            fresh = path.with_suffix(".tmp")  # replaced in one step, in case this is interrupted
            fresh.write_text(json.dumps({"conditions": conditions, "results": results}))
            fresh.replace(path)
        return [results[str(index)] for index in indices]

    def grade(self, problem: int, text: str) -> int:
        """Grades an answer with 0 or 1."""
        score = self.task.grade(self.task.items[problem], text)
        if score not in (0, 1):
            raise BenchError(f"{self.task.title} grades problem {problem} with {score}, not 0 or 1")
        return int(score)

    def grade_draft(self, answer: Answer) -> GradedDraft:
        """Grades the first draft in an answer's trace; may raise as ``first_record`` does.

        An error in the target's own first token (the anchor) counts too: nothing after it is right.
        """
        return self._graded(answer, 0, first_record(answer), ())

    def grade_later_drafts(
        self, answer: Answer, cut: Callable[[Mapping[str, Any]], Mapping[str, Any]]
    ) -> Iterator[GradedDraft]:
        """Grades the drafts behind the first one, as long as what is before them is right; of an
        answer with token ids, of a task that locates errors. ``cut`` gives a draft's trace record
        the prefixes that are graded."""
        first_record(answer)
        for number, record in enumerate(answer.parse["trace"][1:], start=1):
            before = answer.token_ids[: record["output_start"] - 1]
            draft = self._graded(answer, number, cut(record), before)
            if draft.first_wrong_token is not None and draft.first_wrong_token < 0:
                return
            yield draft

    def _graded(
        self, answer: Answer, number: int, record: Mapping[str, Any], before: Sequence[int]
    ) -> GradedDraft:
        """Args: before: the answer's tokens before the anchor; an error there has a number < 0."""
        ids = [*before, record["anchor_token_id"], *record["draft_token_ids"]]
        finished, ends, locate = record["finished"], record["prefix_ends"], self.task.locate
        text, wrong = self.decode(ids), None
        num_right = locate and locate(self.task.items[answer.problem], text, finished)
        if num_right is not None:
            text_len = lambda token: len(self.decode(ids[: token + 1]))  # noqa: E731
            wrong = bisect_right(range(len(ids)), num_right, key=text_len)
            if finished:  # the end itself may be the error
                wrong = min(wrong, len(ids) - 1)
            wrong -= len(before)
            if wrong > ends[-1]:  # it was not verified
                wrong = None
        return GradedDraft(
            problem=answer.problem,
            verdicts=record["verdicts"],
            prefix_ends=ends,
            num_drafted=len(record["draft_token_ids"]),
            finished=finished,
            first_wrong=None if wrong is None else bisect_left(ends, wrong),
            is_answer_right=bool(self.grade(answer.problem, text)) if finished else None,
            first_wrong_token=wrong,
            round=number,
        )


def first_record(answer: Answer) -> dict[str, Any]:
    if answer.parse["kv_truncated_drafts"]:
        raise BenchError(
            f"problem {answer.problem}: drafts were truncated for lack of KV slots; fix: a smaller "
            "--concurrency, or a larger --max-total-tokens of the server"
        )
    trace = answer.parse["trace"]
    if not trace or trace[0]["output_start"] != 1:
        raise BenchError(
            f"problem {answer.problem}: the server did not draft at once; fix: start it with "
            "--parse-drafting always"
        )
    return trace[0]


def _read_results(path: Path, conditions: dict[str, Any]) -> dict[str, Any]:
    path.parent.mkdir(parents=True, exist_ok=True)
    if not path.exists():
        return {}
    try:
        found = json.loads(path.read_text())
        old = found["conditions"]
    except (ValueError, LookupError, TypeError) as error:
        raise BenchError(f"{path} is damaged ({error}); fix: move it away") from error
    if differ := sorted(key for key in conditions if old.get(key) != conditions[key]):
        raise BenchError(
            f"{path} was measured with another {', '.join(differ)}; fix: give another --output, or "
            "move the file away"
        )
    return found["results"]


@contextlib.contextmanager
def open_collector(
    settings: GradedSettings, task: Assignment, console: Console, log: ProgressLog
) -> Iterator[Collector]:
    """Starts the server, or takes the running one, for the length of a block."""
    specs = settings.server_specs()
    os.environ.update(ENVIRONMENT if specs else {})
    tokenizer: Any = AutoTokenizer.from_pretrained(settings.tokenizer)
    as_is = {"skip_special_tokens": True, "clean_up_tokenization_spaces": False}
    remotes, logs = {PARSE: settings.remote} if settings.remote else {}, settings.output / "logs"
    with (
        Pool(specs, logs, log=log, remotes=remotes) as pool,
        pool.awake(PARSE) as (endpoint,),
        make_progress(console) as progress,
    ):
        yield Collector(settings, task, endpoint, progress, partial(tokenizer.decode, **as_is))
