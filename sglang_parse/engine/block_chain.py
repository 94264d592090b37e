"""Blocks launched one behind another: what each kept stays on the device, where the next one needs
it.

Every forward has the same rows behind the last kept token (``core.block_accept``), so that its shape is
known before anybody knows where it stands. The host knows how far at most: K tokens a block. With
that it takes memory; the lengths themselves reach attention on the device
(``ParseVerifyInput.starts``). Where a backend plans on the host, blocks are read one by one
(``blocks``).
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch

from sglang_parse.attention.spec_input import VERIFY_MODE, ParseVerifyInput
from sglang_parse.core.block import DraftLayout, block_of
from sglang_parse.core.block_accept import ChainState, accept_blocks
from sglang_parse.core.layout import RequestLayout, VerifyLayout
from sglang_parse.core.mask import flat_mask_at, qlen_only_mask
from sglang_parse.device import on_device
from sglang_parse.engine.batch import max_forward_rows, spans_within
from sglang_parse.engine.broadcast import broadcast_tokens
from sglang_parse.engine.draft import DraftModel
from sglang_parse.engine.faults import nan_rows
from sglang_parse.engine.forward import max_logits_rows
from sglang_parse.engine.sampling import PreparedRows, RowSampler


class BlockChain:
    """The next blocks of some requests.

    Args:
        model: the draft model.
        plan: how the blocks are laid out.
        mask_id: the draft's mask token.
        is_masked: with masks behind every row in the layout ``mask``, otherwise in ``alias``.
        sampler: the draft's, over the batch.
        rows: [n] the requests' rows of the batch.
    """

    def __init__(
        self,
        model: DraftModel,
        plan: DraftLayout,
        mask_id: int,
        *,
        is_masked: bool,
        sampler: RowSampler,
        rows: Sequence[int],
    ) -> None:
        self.plan, self._model, self._mask_id = plan, model, mask_id
        self._layout, device = wide_layout(plan), sampler.batch.device
        has_mask = is_masked and not self._layout.is_causal
        self._tail = qlen_only_mask(self._layout, device) if has_mask else None
        width = self._layout.num_rows
        reqs = [sampler.batch.reqs[row] for row in rows]
        self._limits_cpu = [req.kv.kv_allocated_len - width for req in reqs]
        pools = [req.kv.req_pool_idx for req in reqs]
        sent = on_device([pools, self._limits_cpu], device)
        self._pools, self._limits = sent.unbind()
        self._offsets = on_device(self._layout.positions(), device)
        self._columns = torch.arange(width, device=device)
        sizes = [(width, width)] * len(rows)
        limits = (max_forward_rows(), max_logits_rows(model.draft_runner))
        self._spans = [
            _Span(span, sampler, rows[span], plan.size, self._columns)
            for span in spans_within(sizes, limits)
        ]

    def launch(self, ahead: ChainState, starts: Sequence[int]) -> tuple[ChainState, torch.Tensor]:
        """One block of each request.

        Args:
            ahead: where they stand.
            starts: [n] the most that ``ahead.starts`` can be.

        Returns:
            as ``accept_blocks``.
        """
        # Past its slots nobody goes: the draft is over there, and nobody reads what follows.
        ahead = ahead._replace(starts=torch.minimum(ahead.starts, self._limits))
        choices = [self._forward(span, ahead.pick(span.place), starts) for span in self._spans]
        return self.keep(ahead, torch.cat(choices))

    def keep(self, ahead: ChainState, choices: torch.Tensor) -> tuple[ChainState, torch.Tensor]:
        """``accept_blocks`` of choices [n, width]."""
        return accept_blocks(self.plan.masks, ahead, choices, self._mask_id)

    def _forward(self, span: _Span, ahead: ChainState, starts: Sequence[int]) -> torch.Tensor:
        """int64 [requests of the span, width] what their rows choose, or ``NO_TOKEN``."""
        runner = self._model.draft_runner
        last = runner.model_config.context_len - 1
        positions = (ahead.starts[:, None] + self._offsets).clamp_(max=last).view(-1)
        forward_batch = self._batch(span, ahead, positions, starts)
        runner.kv_index_translator.bind_own_plan(forward_batch)
        done = runner.forward(forward_batch)
        self._model.replays = done.can_run_graph
        logits = done.logits_output.next_token_logits
        is_bad = nan_rows(logits)
        tokens = span.choose(logits, positions, ahead.num_candidates)
        return broadcast_tokens(tokens, is_bad).view(len(ahead.last), -1)

    def _batch(
        self, span: _Span, ahead: ChainState, positions: torch.Tensor, starts: Sequence[int]
    ) -> ForwardBatch:
        pools, width = self._pools[span.place], len(self._columns)
        num_reqs, num_rows = len(pools), len(positions)
        limits = self._limits_cpu[span.place]
        longest = [min(pair) for pair in zip(starts[span.place], limits, strict=True)]
        columns = ahead.starts[:, None] + self._columns
        slots = self._model.req_to_token[pools[:, None], columns]
        seq_lens = ahead.starts + width
        known = [start + width for start in longest]
        forward_batch = ForwardBatch(
            forward_mode=VERIFY_MODE,
            batch_size=num_reqs,
            input_ids=self._input_ids(ahead),
            req_pool_indices=pools,
            seq_lens=seq_lens,
            seq_lens_cpu=torch.tensor(known),
            seq_lens_sum=sum(known),
            orig_seq_lens=seq_lens.to(torch.int32),
            out_cache_loc=slots.view(-1).to(torch.int64),
            positions=positions,
            spec_algorithm=self._model.draft_runner.spec_algorithm,
            spec_info=self._spec_info(ahead, longest, span.every_row),
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_logprob=False,
            global_num_token_non_padded_cpu=num_rows,
        )
        forward_batch.extend_prefix_lens = ahead.starts.to(torch.int32)
        forward_batch.extend_seq_lens, forward_batch.extend_start_loc = span.widths, span.first_rows
        forward_batch.extend_prefix_lens_cpu = longest
        forward_batch.extend_seq_lens_cpu = [width] * num_reqs
        forward_batch.extend_num_tokens = num_rows
        forward_batch.extend_logprob_start_lens_cpu = [width] * num_reqs
        return forward_batch

    def _input_ids(self, ahead: ChainState) -> torch.Tensor:
        real = torch.cat((ahead.last[:, None], ahead.candidates), 1)
        num_masks = len(self._columns) - real.shape[1]
        return torch.nn.functional.pad(real, (0, num_masks), value=self._mask_id).view(-1)

    def _spec_info(
        self, ahead: ChainState, longest: Sequence[int], every_row: torch.Tensor
    ) -> ParseVerifyInput:
        layout = VerifyLayout.of([self._layout.at(start) for start in longest])
        mask = None if self._tail is None else flat_mask_at(layout, ahead.starts, self._tail)
        return ParseVerifyInput(
            layout=layout, custom_mask=mask, select_index=every_row, starts=ahead.starts
        )


def wide_layout(plan: DraftLayout) -> RequestLayout:
    """The rows of a block with as many candidates as there can be, behind no context."""
    candidates, room = range(plan.size - 1), 2 * plan.size
    return block_of(plan, written=0, known=1, candidates=candidates, room=room).layout


class _Span:
    """Requests whose blocks share a forward.

    Args:
        place: which of the chain's.
        sampler: the draft's.
        rows: [n] their rows of the batch.
        size: K.
        columns: [rows of a block] counted from 0.

    Attributes:
        every_row: int64 [rows of the forward], counted from 0.
        widths, first_rows: int32 [n] rows of each request, and the first of them.
    """

    def __init__(
        self,
        place: slice,
        sampler: RowSampler,
        rows: Sequence[int],
        size: int,
        columns: torch.Tensor,
    ) -> None:
        self.place, self._size, self._width = place, size, (width := len(columns))
        self.every_row = torch.arange(len(rows) * width, device=columns.device)
        self.first_rows = self.every_row[::width].to(torch.int32)
        self.widths = torch.full_like(self.first_rows, width)
        self._has_seeds = sampler.batch.sampling_info.sampling_seed is not None
        count = width if self._has_seeds else size
        self._sampled: PreparedRows = sampler.prepare([row for row in rows for _ in range(count)])

    def choose(
        self, logits: torch.Tensor, positions: torch.Tensor, num_candidates: torch.Tensor
    ) -> torch.Tensor:
        """int64 [n * width]; as ``blocks.BlockBurst`` lets rows choose."""
        if self._sampled.is_argmax:
            return logits.argmax(dim=-1)
        if self._has_seeds:
            return self._sampled.sample(logits, positions)[0]
        tokens = logits.argmax(dim=-1).view(-1, self._width)
        real = logits.view(len(tokens), self._width, -1)[:, : self._size].flatten(0, 1)
        at = positions.view(-1, self._width)[:, : self._size].flatten()
        drawn = self._sampled.sample(real, at)[0].view(-1, self._size)
        place = torch.arange(self._size, device=logits.device)
        is_real = place <= num_candidates[:, None]
        tokens[:, : self._size] = torch.where(is_real, drawn, tokens[:, : self._size])
        return tokens.flatten()
