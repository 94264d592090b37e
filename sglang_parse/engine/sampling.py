"""Sample some rows of a batch, each with its own request's parameters, by SGLang's sampler."""

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

from sglang_parse.device import on_device


def select_sampling_info(
    info: SamplingBatchInfo, reqs: Sequence[Any], rows: Sequence[int]
) -> SamplingBatchInfo:
    """``info`` for ``rows`` of the batch; a row may be named several times.

    Args:
        info: the batch's sampling info, as the worker gets it (no penalizer orchestrator:
            accumulated penalties are plain tensors by then).
        reqs: the batch's requests.
        rows: indices into ``reqs``.
    """
    index = on_device(rows, info.device)
    changes: dict[str, Any] = {
        f.name: _select(getattr(info, f.name), len(reqs), rows, index)
        for f in dataclasses.fields(info)
    }
    selected = copy.copy(info)
    for name, value in changes.items():
        setattr(selected, name, value)
    params = [reqs[row].sampling_params for row in rows]
    selected.is_all_greedy = all(p.top_k <= 1 for p in params)
    selected.is_any_greedy = any(p.top_k <= 1 for p in params)
    selected.need_top_p_sampling = any(p.top_p != 1.0 for p in params)
    selected.need_top_k_sampling = any(p.top_k != TOP_K_ALL for p in params)
    selected.need_min_p_sampling = any(p.min_p > 0 for p in params)
    grammars = [reqs[row].grammar for row in rows]
    selected.grammars = grammars if any(grammars) else None
    _select_custom_processors(selected, rows)
    _select_sampling_masks(selected)
    return selected


def _select(value: Any, num_reqs: int, rows: Sequence[int], index: torch.Tensor) -> Any:
    if isinstance(value, torch.Tensor) and value.dim() and value.shape[0] == num_reqs:
        return value[index]
    if isinstance(value, list) and len(value) == num_reqs:
        return [value[row] for row in rows]
    return value


def _select_custom_processors(selected: SamplingBatchInfo, rows: Sequence[int]) -> None:
    if not selected.has_custom_logit_processor:
        return
    entries: dict[int, ProcessorEntry] = {}
    for key, entry in selected.custom_logit_processor.items():
        kept = [place for place, row in enumerate(rows) if row in entry.rows]
        if kept:
            indices = on_device(kept, selected.device)
            entries[key] = ProcessorEntry(entry.processor, kept, indices)
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


@dataclasses.dataclass(slots=True)
class RowSampler:
    """Samples rows of one batch's requests.

    Attributes:
        runner: the model runner whose sampler is used.
        batch: the scheduler's batch (its ``sampling_info`` is the forward-only copy).
    """

    runner: Any
    batch: Any

    def sample(
        self,
        logits: torch.Tensor,
        rows: Sequence[int],
        positions: torch.Tensor,
        *,
        return_logprob: bool = False,
    ) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        """Choose one token per row.

        Args:
            logits: [n, vocab]; overwritten.
            rows: [n] index of each row's request in the batch.
            positions: int64 [n] position of the token each row stands for; seeds use it.
            return_logprob: also compute what the requests asked for.

        Returns:
            int64 [n] token ids, and the output record with log probabilities, if any.
        """
        return self.prepare(rows, return_logprob=return_logprob).sample(logits, positions)

    def prepare(self, rows: Sequence[int], *, return_logprob: bool = False) -> PreparedRows:
        """The parameters of ``rows``, gathered once for any number of samplings of these rows.

        Arguments: as for ``sample``.
        """
        drawn = [
            place for place, row in enumerate(rows) if return_logprob or not self.is_argmax(row)
        ]
        if not drawn:
            return PreparedRows(self.runner, None, None)
        is_some = len(drawn) < len(rows)
        index = on_device(drawn, self.batch.device) if is_some else None
        view = self._view([rows[place] for place in drawn], return_logprob)
        return PreparedRows(self.runner, index, view)

    def _view(self, rows: Sequence[int], return_logprob: bool) -> _SamplingView:
        batch = self.batch
        return _SamplingView(
            sampling_info=select_sampling_info(batch.sampling_info, batch.reqs, rows),
            req_pool_indices=batch.req_pool_indices[on_device(rows, batch.device)],
            return_logprob=return_logprob,
            top_logprobs_nums=_pick(batch.top_logprobs_nums, rows),
            token_ids_logprobs=_pick(batch.token_ids_logprobs, rows),
        )

    def is_argmax(self, row: int) -> bool:
        """Greedy and nothing that edits logits: argmax is all SGLang's sampler would do."""
        req = self.batch.reqs[row]
        policy = req.parse_state.policy
        is_supported = not policy.is_plain or policy.decode_accelerator == "eagle3"
        return req.sampling_params.top_k <= 1 and is_supported


def _pick(values: list | None, rows: Sequence[int]) -> list | None:
    return None if values is None else [values[row] for row in rows]


@dataclasses.dataclass(frozen=True, slots=True)
class PreparedRows:
    """Some rows of a batch, ready to be sampled again and again.

    Attributes:
        runner: the model runner whose sampler is used.
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
        """Arguments and result: as ``RowSampler.sample``'s."""
        if self.view is None:  # is_argmax
            return logits.argmax(dim=-1), LogitsProcessorOutput(next_token_logits=logits)
        if self.drawn is None:
            return self._draw(self.view, logits, positions)
        tokens = logits.argmax(dim=-1)
        tokens[self.drawn], _ = self._draw(self.view, logits[self.drawn], positions[self.drawn])
        return tokens, LogitsProcessorOutput(next_token_logits=logits)

    def _draw(
        self, view: _SamplingView, logits: torch.Tensor, positions: torch.Tensor
    ) -> tuple[torch.Tensor, LogitsProcessorOutput]:
        """By SGLang's sampler, all of the rows."""
        output = LogitsProcessorOutput(next_token_logits=logits)
        view = dataclasses.replace(view, positions=positions, seq_lens=positions + 1)
        # Sampled tokens are int32, greedy ones int64: one dtype, as both may share a batch.
        return self.runner.sample(output, view).to(torch.int64), output


@dataclasses.dataclass(slots=True)
class _SamplingView:
    """The fields of a ``ForwardBatch`` that ``ModelRunner.sample`` reads."""

    sampling_info: SamplingBatchInfo
    req_pool_indices: torch.Tensor
    return_logprob: bool
    top_logprobs_nums: list | None
    token_ids_logprobs: list | None
    positions: torch.Tensor | None = None  # these two: ``PreparedRows`` fills them in
    seq_lens: torch.Tensor | None = None
    forward_mode: ForwardMode = ForwardMode.DECODE
    watermark_prompt_tail_ids: Any = None
    watermark_context_hash_history: Any = None
    ngram_embedding_info: Any = None
