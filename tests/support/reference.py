"""Reference implementation of the verify pass in plain PyTorch.

``separate_verdicts`` runs context + draft[:end] + question as one causal sequence per prefix.
``packed_verdicts`` computes the same in one forward with the rows of ``layout`` and ``mask``.
Neither uses a KV cache.

Notation: K prefixes, V the vocabulary size, N the tokens of the longest packed case.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any

import torch

from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.mask import qlen_only_mask


def dense_mask(layout: RequestLayout, device: torch.device | str = "cpu") -> torch.Tensor:
    """Returns the mask of one request: bool [num_rows, kv_len]."""
    context = torch.ones(layout.num_rows, layout.prefix_len, dtype=torch.bool, device=device)
    return torch.cat((context, qlen_only_mask(layout, device)), dim=1)


@dataclass(frozen=True, slots=True)
class Case:
    """One draft to verify.

    Attributes:
        context_ids: prompt and output so far, at least one token.
        draft_ids: draft tokens.
        prefix_ends: [K] offsets into ``draft_ids``.
        question_ids: [K] questions, each at least one token.
        accept_id, reject_id: verdict tokens.
    """

    context_ids: tuple[int, ...]
    draft_ids: tuple[int, ...]
    prefix_ends: tuple[int, ...]
    question_ids: tuple[tuple[int, ...], ...]
    accept_id: int
    reject_id: int

    @property
    def prefix_lens(self) -> tuple[int, ...]:
        """[K + 1] 0 for the empty prefix, then ``prefix_ends``."""
        return (0, *self.prefix_ends)

    @property
    def layout(self) -> RequestLayout:
        """As in a server, the last context token is the first draft row."""
        return RequestLayout(
            prefix_len=len(self.context_ids) - 1,
            num_draft_rows=1 + len(self.draft_ids),
            visible_lens=tuple(1 + end for end in self.prefix_ends),
            question_lens=tuple(map(len, self.question_ids)),
        )

    @property
    def packed_ids(self) -> list[int]:
        """[layout.kv_len] context, draft, questions."""
        return list(chain(self.context_ids, self.draft_ids, *self.question_ids))


@dataclass(frozen=True, slots=True)
class VerifyResult:
    """The target's output for one ``Case``.

    Attributes:
        verdicts: [K] p(accept) / (p(accept) + p(reject)) at each question's last token.
        mass: [K] p(accept) + p(reject).
        verdict_logits: [K, 2] logits of accept and reject there.
        next_token_ids: [K + 1] the target's greedy choice after each prefix.
        next_token_logits: [K + 1, V] its logits.
    """

    verdicts: torch.Tensor
    mass: torch.Tensor
    verdict_logits: torch.Tensor
    next_token_ids: torch.Tensor
    next_token_logits: torch.Tensor

    @classmethod
    def of(
        cls, case: Case, question_logits: torch.Tensor, prefix_logits: torch.Tensor
    ) -> VerifyResult:
        """Computes it from the logits of the verdict rows, [K, V], and prefix ends, [K + 1, V]."""
        pair = [case.accept_id, case.reject_id]
        accept, reject = question_logits.softmax(dim=-1)[:, pair].unbind(dim=-1)
        return cls(
            verdicts=accept / (accept + reject),
            mass=accept + reject,
            verdict_logits=question_logits[:, pair],
            next_token_ids=prefix_logits.argmax(dim=-1),
            next_token_logits=prefix_logits,
        )


@torch.no_grad()
def separate_verdicts(model: Any, case: Case) -> VerifyResult:
    """Runs one forward per question and one per prefix.

    Args:
        model: a Hugging Face causal LM; its output has ``.logits`` [1, n, V].
    """
    prefixes = [(*case.context_ids, *case.draft_ids[:length]) for length in case.prefix_lens]
    prefix_logits = torch.stack([_last_logits(model, prefix) for prefix in prefixes])
    question_rows = [
        _last_logits(model, (*prefix, *question))
        for prefix, question in zip(prefixes[1:], case.question_ids, strict=True)
    ]
    question_logits = torch.stack(question_rows) if question_rows else prefix_logits[:0]
    return VerifyResult.of(case, question_logits, prefix_logits)


def _last_logits(model: Any, token_ids: Sequence[int]) -> torch.Tensor:
    return model(input_ids=torch.tensor([token_ids], device=model.device)).logits[0, -1].float()


@dataclass(frozen=True, slots=True)
class PackedInputs:
    """Inputs of one forward over several cases, right-padded to N tokens.

    Attributes:
        input_ids: int64 [len(cases), N].
        position_ids: int64 [len(cases), N].
        allowed: bool [len(cases), N, N] attention mask; a padding row attends to itself.
    """

    input_ids: torch.Tensor
    position_ids: torch.Tensor
    allowed: torch.Tensor


def pack(cases: Sequence[Case], device: torch.device | str = "cpu") -> PackedInputs:
    """Packs context, draft and questions of all cases."""
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
def verify_packed(model: Any, cases: Sequence[Case], inputs: PackedInputs) -> list[VerifyResult]:
    """Runs one forward over all cases.

    Args:
        model: as for ``separate_verdicts``, taking an additive 4D ``attention_mask`` (attention
            implementation "sdpa" or "eager").
        cases: the cases in ``inputs``.
    """
    hidden = torch.finfo(model.dtype).min
    mask = torch.zeros_like(inputs.allowed, dtype=model.dtype).masked_fill_(~inputs.allowed, hidden)
    logits = model(
        input_ids=inputs.input_ids,
        position_ids=inputs.position_ids,
        attention_mask=mask[:, None],
    ).logits.float()
    results = []
    for case, case_logits in zip(cases, logits, strict=True):
        rows = case_logits[case.layout.prefix_len :]
        verdict_rows, prefix_rows = list(case.layout.verdict_rows), list(case.prefix_lens)
        results.append(VerifyResult.of(case, rows[verdict_rows], rows[prefix_rows]))
    return results


def packed_verdicts(model: Any, cases: Sequence[Case]) -> list[VerifyResult]:
    """Computes ``separate_verdicts`` of all cases in one forward."""
    return verify_packed(model, cases, pack(cases, model.device))
