"""Requests drafts with the target's hidden states, stores both on disk, and labels the drafts by
what the grader says about them.

Hidden states are one file per draft, as the server sends them: training reads one at a time.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
from transformers import AutoTokenizer

from sglang_parse.client.records import Answer, BenchError, Item
from sglang_parse.core.judge import QUESTION
from sglang_parse.core.segment import Segmenter, SegmentRule, prefix_ends
from sglang_parse.tasks.collect import (
    ACCEPT_ALL,
    PROBE_TOKENS,
    Collector,
    GradedDraft,
    first_record,
)
from sglang_parse.train_judge.drafts import LabeledDraft, labels_up_to

WITH_STATES = {**ACCEPT_ALL, "hidden_states": True}
_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
"""Stored as; NumPy has no bfloat16."""
Given = Callable[[int], Mapping[str, Any]]
"""Problem -> options of its request, with a draft's tokens in place of the draft model's."""


@dataclass(frozen=True, slots=True)
class HiddenStates:
    """What the server captures, and where it is stored; ``judge`` as in a trace."""

    judge: str
    layers: tuple[int, ...]
    hidden_size: int
    dtype: str
    folder: Path

    @classmethod
    def of(cls, collector: Collector, given: Given | None) -> HiddenStates:
        settings = collector.settings
        try:
            (answer,) = collector.ask([0], WITH_STATES, PROBE_TOKENS, options_of=given)
        except BenchError as error:
            if settings.remote is None:
                raise
            raise BenchError(
                f"{settings.remote.url} sends no hidden states: {error}; fix: start it with "
                "--parse-hidden-layers 8,12,14 (layers of its target) and --parse-max-prefixes 64"
            ) from error
        record = first_record(answer)
        found = record["hidden_states"]
        layers = tuple(found["layers"])
        return cls(
            judge=record["judge"],
            layers=layers,
            hidden_size=found["shape"][1] // len(layers),
            dtype=found["dtype"],
            folder=settings.output / f"drafts-layers-{'-'.join(map(str, layers))}",
        )

    def store(self, draft: GradedDraft, record: dict[str, Any]) -> dict[str, Any]:
        """Writes the hidden states of a draft's trace record; returns the rest as plain data, its
        log-probabilities and entropies in nats, up to the last prefix."""
        states = record["hidden_states"]
        raw = np.frombuffer(base64.b64decode(states["data"]), _DTYPES[states["dtype"]])
        self.folder.mkdir(parents=True, exist_ok=True)
        np.save(self._path(draft), raw.reshape(states["shape"]))
        num_tokens = draft.prefix_ends[-1]
        return {
            "draft": asdict(draft),
            "logprobs": record["draft_logprobs"][:num_tokens],
            "entropies": record["draft_entropies"][:num_tokens],
        }

    def load(self, draft: GradedDraft) -> np.ndarray:
        """fp32 [1 + n, len(layers) * hidden_size]."""
        path = self._path(draft)
        try:
            stored = np.load(path)[: 1 + draft.prefix_ends[-1]]
        except (OSError, ValueError) as error:
            raise BenchError(
                f"{path} cannot be read ({error}); fix: move {self.folder}.json away, so that "
                "drafts are requested again"
            ) from error
        if self.dtype == "bfloat16":
            return (stored.astype(np.uint32) << 16).view(np.float32)
        return stored.astype(np.float32)

    def _path(self, draft: GradedDraft) -> Path:
        return self.folder / f"{draft.problem}-{draft.round}.npy"


def gather(
    collector: Collector, indices: Sequence[int], states: HiddenStates, given: Given | None
) -> list[LabeledDraft]:
    """The first drafts of these problems, or the given ones, in their order; resumes from disk."""

    def read(answer: Answer) -> dict[str, Any]:
        return states.store(collector.grade_draft(answer), first_record(answer))

    limit = collector.served[0].draft_tokens + 2  # ends with the draft
    if given is None:
        limit = min(limit, collector.task.max_tokens)
    name = states.folder.name
    found = collector.collect(name, indices, WITH_STATES, read, limit, options_of=given)
    return labeled(found, collector, states)


def gather_later(
    collector: Collector, indices: Sequence[int], states: HiddenStates, segment: str
) -> list[LabeledDraft]:
    """The drafts behind the first ones of whole answers, which the server's judge serves: they make
    other errors. An answer's end with the first error; ``segment`` cuts them as first ones."""
    settings, judge = collector.settings, collector.served[0].judge
    tokenizer = AutoTokenizer.from_pretrained(settings.tokenizer)
    segments = Segmenter(tokenizer, SegmentRule.parse(segment))
    states = replace(states, judge=judge, folder=settings.output / f"later-drafts-{judge}")

    def read(answer: Answer) -> list[dict[str, Any]]:
        drafts = collector.grade_later_drafts(answer, partial(resegmented, segments=segments))
        return [states.store(draft, answer.parse["trace"][draft.round]) for draft in drafts]

    parse = {"trace": True, "hidden_states": True}
    found = collector.collect(states.folder.name, indices, parse, read, wants_tokens=True)
    return labeled([one for later in found for one in later], collector, states)


def resegmented(record: Mapping[str, Any], segments: Segmenter) -> dict[str, Any]:
    """A draft's trace record with other prefixes; the verdicts, of a head, go."""
    pieces = segments.pieces(record["draft_token_ids"][: record["prefix_ends"][-1]])
    is_whole = record["finished"] and len(pieces) == len(record["draft_token_ids"])
    ends = prefix_ends(pieces, segments.rule, finished=is_whole, max_prefixes=len(pieces))
    return {**record, "prefix_ends": ends, "verdicts": []}


def labeled(
    stored: Sequence[Mapping[str, Any]], collector: Collector, states: HiddenStates
) -> list[LabeledDraft]:
    """Labels drafts; leaves out those about which nothing is known."""
    task = collector.task
    prompts, is_located = prompt_numbers(task.items), task.locate is not None
    found = (label(one, prompts, states, is_located=is_located) for one in stored)
    return [one for one in found if one is not None]


def label(
    stored: Mapping[str, Any], prompts: Sequence[int], states: HiddenStates, *, is_located: bool
) -> LabeledDraft | None:
    """Labels a draft's prefixes; None where nothing is known about any. Where errors are not
    located only complete drafts have a label."""
    draft = GradedDraft(**stored["draft"])
    count = len(draft.prefix_ends)
    right: list[bool | None] = [*[None] * (count - 1), draft.is_answer_right]
    if is_located:
        right = labels_up_to(draft.first_wrong, count)
    if all(known is None for known in right):
        return None
    return LabeledDraft(
        prompt=prompts[draft.problem],
        prefix_ends=draft.prefix_ends,
        right=right,
        wrong_token=draft.first_wrong_token if is_located else None,
        logprobs=stored["logprobs"],
        entropies=stored["entropies"],
        load=partial(states.load, draft),
        asked=draft.verdicts if states.judge == QUESTION else (),
    )


def prompt_numbers(items: Sequence[Item]) -> list[int]:
    """The first item with the same prompt, by item."""
    first: dict[str, int] = {}
    prompts = (repr(item.messages or item.text) for item in items)
    return [first.setdefault(prompt, number) for number, prompt in enumerate(prompts)]
