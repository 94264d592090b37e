"""The slow truth: every prefix judged by an ordinary prompt of its own, with plain torch.

``separate_verdicts`` runs context + draft[:end] + question as one causal sequence per prefix.
``packed_verdicts`` computes the same from ONE forward over the product's own rows (``layout``,
``mask``). Neither keeps a KV cache, so both see the context's rows as well.

Notation: K prefixes, V the vocabulary, n a request's tokens in the packed pass, N the longest n.
A *cut* is 0 (the empty prefix) or a prefix end: K + 1 of them.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.mask import dense_mask


@dataclass(frozen=True, slots=True)
class Case:
    """One request to judge.

    Attributes:
        context_ids: prompt + output so far, at least one token.
        draft_ids: what the draft model wrote behind the context.
        prefix_ends: [K] offsets into ``draft_ids``.
        question_ids: [K] token suffixes, each of at least one token.
        accept_id, reject_id: the two verdict tokens.
    """

    context_ids: tuple[int, ...]
    draft_ids: tuple[int, ...]
    prefix_ends: tuple[int, ...]
    question_ids: tuple[tuple[int, ...], ...]
    accept_id: int
    reject_id: int

    @property
    def cuts(self) -> tuple[int, ...]:
        return (0, *self.prefix_ends)

    @property
    def layout(self) -> RequestLayout:
        """The server's rows: the last context token is the first draft row, its KV is missing."""
        return RequestLayout(
            prefix_len=len(self.context_ids) - 1,
            num_draft_rows=1 + len(self.draft_ids),
            visible_lens=tuple(1 + end for end in self.prefix_ends),
            question_lens=tuple(map(len, self.question_ids)),
        )

    @property
    def packed_ids(self) -> list[int]:
        """[layout.kv_len] context, draft, then the questions in order."""
        return list(chain(self.context_ids, self.draft_ids, *self.question_ids))


@dataclass(frozen=True, slots=True)
class Judged:
    """What the target said about one ``Case``.

    Attributes:
        verdicts: [K] p(accept) / (p(accept) + p(reject)) at each question's last token.
        mass: [K] p(accept) + p(reject).
        verdict_logits: [K, 2] the logits of accept and reject there.
        next_token_ids: [K + 1] the target's own greedy token at each cut.
        next_token_logits: [K + 1, V] the logits it was chosen from.
    """

    verdicts: torch.Tensor
    mass: torch.Tensor
    verdict_logits: torch.Tensor
    next_token_ids: torch.Tensor
    next_token_logits: torch.Tensor

    @classmethod
    def of(cls, case: Case, question_logits: torch.Tensor, cut_logits: torch.Tensor) -> Judged:
        """From the logits of the verdict rows, [K, V], and of the cuts' rows, [K + 1, V]."""
        pair = [case.accept_id, case.reject_id]
        accept, reject = question_logits.softmax(dim=-1)[:, pair].unbind(dim=-1)
        return cls(
            verdicts=accept / (accept + reject),
            mass=accept + reject,
            verdict_logits=question_logits[:, pair],
            next_token_ids=cut_logits.argmax(dim=-1),
            next_token_logits=cut_logits,
        )


@torch.no_grad()
def separate_verdicts(model: Any, case: Case) -> Judged:
    """One ordinary forward per prefix and one per cut.

    Args:
        model: a causal LM called the Hugging Face way; its answer has ``.logits`` [1, n, V].
    """
    prefixes = [(*case.context_ids, *case.draft_ids[:cut]) for cut in case.cuts]
    cut_rows = [_last_logits(model, prefix) for prefix in prefixes]
    question_rows = [
        _last_logits(model, (*prefix, *question))
        for prefix, question in zip(prefixes[1:], case.question_ids, strict=True)
    ]
    cut_logits = torch.stack(cut_rows)
    question_logits = torch.stack(question_rows) if question_rows else cut_logits[:0]
    return Judged.of(case, question_logits, cut_logits)


def _last_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([token_ids], device=model.device)).logits[0, -1].float()


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """One forward over several cases, each padded on the right to N tokens.

    Attributes:
        input_ids: int64 [len(cases), N].
        position_ids: int64 [len(cases), N].
        allowed: bool [len(cases), N, N], query first. A padding row sees only itself.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    allowed: torch.Tensor


def pack(cases: Sequence[Case], device: torch.device | str = "cpu") -> PackedInputs:
    """Lay out all rows of all cases; the context's own rows are plainly causal."""
    layouts = [case.layout for case in cases]
    shape = len(cases), max(layout.kv_len for layout in layouts)
    input_ids = torch.zeros(shape, dtype=torch.long, device=device)
    position_ids = torch.zeros_like(input_ids)
    allowed = torch.eye(shape[1], dtype=torch.bool, device=device).repeat(len(cases), 1, 1)
    for index, (case, layout) in enumerate(zip(cases, layouts, strict=True)):
        start, size = layout.prefix_len, layout.kv_len
        input_ids[index, :size] = torch.tensor(case.packed_ids)
        position_ids[index, :size] = torch.tensor([*range(start), *layout.positions()])
        context = torch.ones(start, size, dtype=torch.bool, device=device).tril()
        allowed[index, :size, :size] = torch.cat((context, dense_mask(layout, device)))
    return PackedInputs(input_ids, position_ids, allowed)


@torch.no_grad()
def judge_packed(model: Any, cases: Sequence[Case], inputs: PackedInputs) -> list[Judged]:
    """Run one forward and read each case's verdict rows and cut rows.

    Args:
        model: as for ``separate_verdicts``, taking an additive 4D ``attention_mask`` (attention
            implementation "sdpa" or "eager").
        cases: what ``inputs`` was packed from.
    """
    hidden = torch.finfo(model.dtype).min
    mask = torch.zeros_like(inputs.allowed, dtype=model.dtype).masked_fill_(~inputs.allowed, hidden)
    logits = model(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        attention_mask=mask[:, None],
    ).logits.float()
    return [_read(case, rows) for case, rows in zip(cases, logits, strict=True)]


def _read(case: Case, logits: torch.Tensor) -> Judged:
    start = case.layout.prefix_len
    verdict_rows = [start + row for row in case.layout.verdict_rows]
    return Judged.of(case, logits[verdict_rows], logits[[start + cut for cut in case.cuts]])


def packed_verdicts(model: Any, cases: Sequence[Case]) -> list[Judged]:
    """What ``separate_verdicts`` answers for each case, from one forward for all of them."""
    return judge_packed(model, cases, pack(cases, model.device))
