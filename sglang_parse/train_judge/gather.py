"""Requests drafts with the target's hidden states, and stores both on disk.

Hidden states are one file per draft, as the server sends them: training reads one at a time.
"""

from __future__ import annotations

import base64
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import numpy as np

from sglang_parse.client.records import Answer, BenchError
from sglang_parse.core.segment import Segmenter, prefix_ends
from sglang_parse.tasks.collect import (
    ACCEPT_ALL,
    PROBE_TOKENS,
    Collector,
    GradedDraft,
    first_record,
    first_wrong_prefix,
)

WITH_STATES = {**ACCEPT_ALL, "hidden_states": True}
_DTYPES = {"float32": "<f4", "float16": "<f2", "bfloat16": "<u2"}
"""Stored as; NumPy has no bfloat16."""
Given = Callable[[int], Mapping[str, Any]]
"""Problem -> options of its request, with a draft's tokens in place of the draft model's."""


@dataclass(frozen=True, slots=True)
class SeenDraft:
    """A draft as the target reads it.

    Attributes:
        draft: graded, with the verdicts of the server's judge.
        token_ids: [1 + n] the anchor and the verified tokens.
        logprobs, entropies: [n], in nats.
    """

    draft: GradedDraft
    token_ids: Sequence[int]
    logprobs: Sequence[float]
    entropies: Sequence[float]


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
        """Writes the hidden states of a draft's trace record; returns the rest as plain data."""
        states = record["hidden_states"]
        raw = np.frombuffer(base64.b64decode(states["data"]), _DTYPES[states["dtype"]])
        self.folder.mkdir(parents=True, exist_ok=True)
        np.save(self._path(draft), raw.reshape(states["shape"]))
        num_tokens = record["prefix_ends"][-1]
        return {
            "draft": asdict(draft),
            "token_ids": [record["anchor_token_id"], *record["draft_token_ids"][:num_tokens]],
            "logprobs": record["draft_logprobs"],
            "entropies": record["draft_entropies"],
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
) -> list[SeenDraft]:
    """The first drafts of these problems, or the given ones, in their order; resumes from disk."""

    def read(answer: Answer) -> dict[str, Any]:
        return states.store(collector.grade_draft(answer), first_record(answer))

    limit = collector.served[0].draft_tokens + 2  # ends with the draft
    if given is None:
        limit = min(limit, collector.task.max_tokens)
    name = states.folder.name
    found = collector.collect(name, indices, WITH_STATES, read, limit, options_of=given)
    return [_seen(one) for one in found]


def gather_later(
    collector: Collector, indices: Sequence[int], states: HiddenStates, segments: Segmenter
) -> list[SeenDraft]:
    """The drafts behind the first ones of whole answers, which the server's judge serves: they make
    other errors. An answer's end with the first error; ``segments`` cuts them as first ones."""

    def read(answer: Answer) -> list[dict[str, Any]]:
        records = answer.parse["trace"]
        drafts = collector.grade_later_drafts(answer)
        return [states.store(draft, records[draft.round]) for draft in drafts]

    parse = {"trace": True, "hidden_states": True}
    found = collector.collect(states.folder.name, indices, parse, read, wants_tokens=True)
    return [resegmented(_seen(one), segments) for later in found for one in later]


def resegmented(seen: SeenDraft, segments: Segmenter) -> SeenDraft:
    """The same draft with other prefixes; the verdicts, of a head, go."""
    draft = seen.draft
    pieces = segments.pieces(seen.token_ids[1:])
    is_whole = draft.finished and len(pieces) == draft.num_drafted
    ends = prefix_ends(pieces, segments.rule, finished=is_whole, max_prefixes=len(pieces))
    first_wrong, wrong = first_wrong_prefix(ends, draft.first_wrong_token)
    draft = replace(draft, first_wrong=first_wrong, first_wrong_token=wrong)
    num_tokens = ends[-1] if ends else 0  # what no prefix holds is left out
    return SeenDraft(
        replace(draft, verdicts=(), prefix_ends=ends),
        seen.token_ids[: 1 + num_tokens],
        seen.logprobs[:num_tokens],
        seen.entropies[:num_tokens],
    )


def _seen(stored: dict[str, Any]) -> SeenDraft:
    return SeenDraft(**{**stored, "draft": GradedDraft(**stored["draft"])})
