"""Sample some rows of a batch, each with its own request's parameters, by SGLang's sampler; and how
sure a model is of what it chose."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.sampling.sampling_batch_info import ProcessorEntry, SamplingBatchInfo
from sglang.srt.sampling.sampling_params import TOP_K_ALL
from torch.nn.functional import cross_entropy

from sglang_parse.core.block import NO_TOKEN
from sglang_parse.core.doubt import UNITS
from sglang_parse.core.phases import PROPOSERS
from sglang_parse.device import on_device
from sglang_parse.engine.logits.adjust import CustomProcessors
from sglang_parse.engine.logits.grammar import is_constrained
from sglang_parse.engine.requests import is_greedy
from sglang_parse.engine.sglang_types import Req, ScheduleBatch

MAX_LOGIT = 1e30
"""A temperature divides logits: a sampler raises on the infinite."""


def select_sampling_info(
    info: SamplingBatchInfo, reqs: Sequence[Req], indices: Sequence[int]
) -> SamplingBatchInfo:
    """``info`` for ``indices`` of the batch; an index may be named several times."""
    index = on_device(indices, info.device)
    selected = copy.copy(info)
    for field in dataclasses.fields(info):
        value = _select(getattr(info, field.name), len(reqs), indices, index)
        setattr(selected, field.name, value)
    params = [reqs[i].sampling_params for i in indices]
    selected.is_all_greedy = all(p.top_k <= 1 for p in params)
    selected.is_any_greedy = any(p.top_k <= 1 for p in params)
    selected.need_top_p_sampling = any(p.top_p != 1.0 for p in params)
    selected.need_top_k_sampling = any(p.top_k != TOP_K_ALL for p in params)
    selected.need_min_p_sampling = any(p.min_p > 0 for p in params)
    grammars = [None if is_constrained(reqs[i]) else reqs[i].grammar for i in indices]
    selected.grammars = grammars if any(grammars) else None
    _select_custom_processors(selected, indices)
    _select_sampling_masks(selected)
    return without_adjustments(selected, [reqs[i] for i in indices])


def without_adjustments(info: SamplingBatchInfo, reqs: Sequence[Req]) -> SamplingBatchInfo:
    """``info`` for logits that ``adjust`` has adjusted; ``reqs`` are its rows' requests."""
    rest = copy.copy(info)
    rest.penalizer_orchestrator = rest.logit_bias = None
    rest.acc_additive_penalties = rest.acc_scaling_penalties = None
    left = [None if CustomProcessors.adjusts(req) else row for row, req in enumerate(reqs)]
    _select_custom_processors(rest, left)
    return rest


def _select(value: Any, num_reqs: int, indices: Sequence[int], index: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == num_reqs:
        return value[index]
    if isinstance(value, list) and len(value) == num_reqs:
        return [value[i] for i in indices]
    return value


def _select_custom_processors(selected: SamplingBatchInfo, indices: Sequence[int | None]) -> None:
    """Leaves the custom processors of ``indices``, by their places now; None has none any more."""
    if not selected.has_custom_logit_processor:
        return
    entries: dict[int, ProcessorEntry] = {}
    for key, entry in selected.custom_logit_processor.items():
        kept = [place for place, i in enumerate(indices) if i in entry.rows]
        if kept:
            places = on_device(kept, selected.device)
            entries[key] = ProcessorEntry(entry.processor, kept, places)
    selected.custom_logit_processor = entries
    selected.has_custom_logit_processor = bool(entries)


def _select_sampling_masks(selected: SamplingBatchInfo) -> None:
    if selected.return_sampling_masks is None:
        return
    selected.sampling_mask_batch_indices = selected._make_sampling_mask_batch_indices(
        selected.return_sampling_masks, selected.device
    )
    selected.sampling_support_logprobs_capture_indices = (
        selected._make_sampling_support_logprobs_capture_indices(
            selected.return_sampling_masks,
            selected.return_sampling_support_logprobs,
            selected.device,
        )
    )


def surprisals_of(logits: torch.Tensor, tokens: torch.Tensor) -> torch.Tensor:
    """int64 [n] surprisals (``core.doubt``) of chosen tokens; without meaning beside a NaN.

    Args:
        logits: [n, vocab] as adjusted, before any temperature.
        tokens: int64 [n]; ``NO_TOKEN`` for none.
    """
    # One call of a library's: each small operation is one more in every forward of a draft.
    nats = cross_entropy(logits.float(), tokens, ignore_index=NO_TOKEN, reduction="none")
    return (nats * UNITS).to(torch.int64)


def prepare_rows(runner: Any, batch: ScheduleBatch, indices: Sequence[int]) -> PreparedRows:
    """Gathers the parameters of some rows, for any number of samplings of them.

    Args:
        runner: the model runner whose sampler is used.
        batch: the scheduler's batch (its ``sampling_info`` is the forward-only copy).
        indices: [n] index of each row's request in the batch.
    """
    reqs = batch.reqs
    argmax = {i for i in {*indices} if _is_argmax(reqs[i])}
    places = [place for place, i in enumerate(indices) if i not in argmax]
    if not places:
        return PreparedRows(runner, None, None)
    drawn = [indices[place] for place in places]
    view = _SamplingView(
        sampling_info=select_sampling_info(batch.sampling_info, reqs, drawn),
        req_pool_indices=batch.req_pool_indices[on_device(drawn, batch.device)],
    )
    is_some = len(places) < len(indices)
    return PreparedRows(runner, on_device(places, batch.device) if is_some else None, view)


def _is_argmax(req: Req) -> bool:
    """Greedy and nothing that edits logits: argmax is all SGLang's sampler would do."""
    policy = req.parse_state.policy
    is_supported = not policy.is_plain or policy.proposer in PROPOSERS
    return is_greedy(req) and is_supported


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedRows:
    """Some rows of a batch, ready to be sampled again and again.

    Attributes:
        drawn: int64 [m] which of the rows SGLang's sampler draws, the others being argmax; None
            where it draws all or none of them.
        view: what SGLang's sampler reads about those; None where there are none.
    """

    runner: Any
    drawn: torch.Tensor | None
    view: _SamplingView | None

    @property
    def is_argmax(self) -> bool:
        """Whether the best token is all that is asked for, of every row."""
        return self.view is None

    def sample(
        self, logits: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        """Chooses one token per row.

        Args:
            logits: [n, vocab]; overwritten.
            positions: int64 [n] position of the token each row stands for; seeds use it.

        Returns:
            int64 [n] token ids, and the output record with sampling masks, if any.
        """
        if self.view is None:  # is_argmax
            return logits.argmax(dim=-1), LogitsProcessorOutput(next_token_logits=logits)
        if self.drawn is None:
            return self._draw(self.view, logits, positions)
        tokens = logits.argmax(dim=-1)
        drawn = self._draw(self.view, logits[self.drawn], positions[self.drawn])
        tokens[self.drawn], output = drawn
        return tokens, output

    def _draw(
        self, view: _SamplingView, logits: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        """By SGLang's sampler, all of the rows."""
        logits.clamp_(max=MAX_LOGIT)
        output = LogitsProcessorOutput(next_token_logits=logits)
        view = dataclasses.replace(view, positions=positions, seq_lens=positions + 1)
        # Sampled tokens are int32, greedy ones int64: one dtype, as both may share a batch.
        return self.runner.sample(output, view).to(torch.int64), output


@dataclasses.dataclass(slots=True)
class _SamplingView:
    """The fields of a ``ForwardBatch`` that ``ModelRunner.sample`` reads."""

    sampling_info: SamplingBatchInfo
    req_pool_indices: torch.Tensor
    positions: torch.Tensor | None = None  # these two: ``PreparedRows`` fills them in
    seq_lens: torch.Tensor | None = None
    return_logprob: bool = False  # ``logprobs``
    top_logprobs_nums: None = None
    token_ids_logprobs: None = None
    forward_mode: ForwardMode = ForwardMode.DECODE
    watermark_prompt_tail_ids: Any = None
    watermark_context_hash_history: Any = None
    ngram_embedding_info: Any = None
