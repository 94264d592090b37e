"""Forwards of the draft model and of its EAGLE-3 head, as batches of SGLang's."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)

from sglang_parse.attention.spec_input import LAID_OUT, ParseVerifyInput
from sglang_parse.core.layout import VerifyLayout


def new_batch(
    runner: Any,
    mode: ForwardMode,
    *,
    pools: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    seq_lens: torch.Tensor,
    seq_lens_cpu: Sequence[int],
    orig_seq_lens: torch.Tensor | None = None,
    spec_info: Any = None,
    capture: bool = False,
) -> ForwardBatch:
    """Builds a forward of some requests' new tokens; tensors are int64 on the device.

    Args:
        pools: [n] the requests' rows of ``req_to_token``.
        ids, positions, slots: [new tokens] of the requests, in order.
        seq_lens, seq_lens_cpu: [n] lengths with the new tokens.
        orig_seq_lens: the same in int32, if at hand.
        spec_info: for attention backends and the logits processor.
        capture: whether it returns hidden states.
    """
    return ForwardBatch(
        forward_mode=mode,
        batch_size=len(pools),
        input_ids=ids,
        req_pool_indices=pools,
        seq_lens=seq_lens,
        seq_lens_cpu=torch.tensor(seq_lens_cpu),
        seq_lens_sum=sum(seq_lens_cpu),
        orig_seq_lens=seq_lens.to(torch.int32) if orig_seq_lens is None else orig_seq_lens,
        out_cache_loc=slots,
        positions=positions,
        spec_algorithm=runner.spec_algorithm,
        spec_info=spec_info,
        capture_hidden_mode=CaptureHiddenMode.FULL if capture else CaptureHiddenMode.NULL,
        return_logprob=False,
        # A graph may have more rows than these; attention leaves out the rest.
        global_num_token_non_padded_cpu=len(positions),
    )


def extend_batch(
    forward_batch: ForwardBatch,
    numbers: torch.Tensor,
    prefix_lens: Sequence[int],
    lens: Sequence[int],
) -> ForwardBatch:
    """Completes a forward of several new tokens per request.

    Args:
        numbers: int32 [3, n] on the device: tokens with KV, new tokens, first rows.
        prefix_lens: the first of these on the host, or upper bounds of them.
        lens: the second of these on the host.
    """
    forward_batch.extend_prefix_lens, forward_batch.extend_seq_lens = numbers[0], numbers[1]
    forward_batch.extend_start_loc = numbers[2]
    forward_batch.extend_prefix_lens_cpu = [*prefix_lens]
    forward_batch.extend_seq_lens_cpu = [*lens]
    forward_batch.extend_num_tokens = sum(lens)
    forward_batch.extend_logprob_start_lens_cpu = [*lens]
    return forward_batch


def block_batch(
    runner: Any,
    *,
    pools: torch.Tensor,
    ids: torch.Tensor,
    positions: torch.Tensor,
    slots: torch.Tensor,
    starts: torch.Tensor,
    layout: VerifyLayout,
    mask: torch.Tensor | None = None,
    hidden: torch.Tensor | None = None,
    capture: bool = False,
) -> ForwardBatch:
    """Builds a forward with the same rows of each request, which start where the device knows.

    Args:
        ids, positions, slots: [n, width] of the rows.
        starts: int64 [n] tokens before them; ``layout`` has upper bounds.
        mask: see ``ParseVerifyInput.custom_mask``.
        hidden: [n, width, ...] hidden states that a head reads.
    """
    num_reqs, width = ids.shape
    every_row = torch.arange(ids.numel(), device=ids.device)
    numbers = torch.stack((starts, torch.full_like(starts, width), every_row[::width]))
    spec_info = ParseVerifyInput(
        layout=layout,
        custom_mask=mask,
        select_index=every_row,
        starts=starts,
        hidden_states=None if hidden is None else hidden.flatten(0, 1),
    )
    forward_batch = new_batch(
        runner,
        LAID_OUT,
        pools=pools,
        ids=ids.flatten(),
        positions=positions.flatten(),
        slots=slots.flatten(),
        seq_lens=starts + width,
        seq_lens_cpu=[part.kv_len for part in layout.requests],
        spec_info=spec_info,
        capture=capture,
    )
    longest = [part.prefix_len for part in layout.requests]
    return extend_batch(forward_batch, numbers.to(torch.int32), longest, [width] * num_reqs)
