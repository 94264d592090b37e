"""SGLang's FlashInfer attention with PARSE's verify pass: a flat custom mask over the full KV
length, or pseudo-sequences without a mask.

SGLang plans FlashInfer over single slots whatever the page size, so both layouts work with any.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers.attention.flashinfer_backend import FlashInferAttnBackend, PrefillMetadata
from sglang.srt.layers.attention.flashinfer_mla_backend import FlashInferMLAAttnBackend
from sglang.srt.layers.attention.flashinfer_mla_backend import PrefillMetadata as LatentMetadata

from sglang_parse.attention.alias import indptr, paged_rows
from sglang_parse.attention.spec_input import ParseVerifyInput


class ParseFlashInferBackend(FlashInferAttnBackend):
    """``FlashInferAttnBackend`` that plans verify passes in PARSE's layouts.

    FlashInfer writes every plan into one pinned buffer and queues the copy to the device. The host
    does not wait between the decode steps of a draft chunk, so a plan waits for the previous copy:
    the host is at most one step ahead of the device.

    With deterministic inference KV is split as in SGLang's prefills, whatever else is in the batch
    (``prefill_split_tile_size``; None otherwise).
    """

    _planned: Any = None

    def init_forward_metadata(self, forward_batch: Any) -> None:
        with self._planning(forward_batch.seq_lens.device):
            self._plan(forward_batch)

    def init_forward_metadata_out_graph(self, forward_batch: Any, in_capture: bool = False) -> None:
        if in_capture:  # an event would break the capture
            super().init_forward_metadata_out_graph(forward_batch, in_capture)
            return
        with self._planning(forward_batch.seq_lens.device):
            super().init_forward_metadata_out_graph(forward_batch, in_capture)

    @contextmanager
    def _planning(self, device: torch.device) -> Iterator[None]:
        if self._planned is None:
            self._planned = torch.get_device_module(device).Event()
        self._planned.synchronize()  # returns at once before the first record
        yield
        self._planned.record()

    def _plan(self, forward_batch: Any) -> None:
        spec_info = forward_batch.spec_info
        is_ours = isinstance(spec_info, ParseVerifyInput)
        # Windows need a plan of their own, as the stock backend makes it for prefills.
        if not is_ours or (spec_info.is_stock and self.num_wrappers > 1):
            super().init_forward_metadata(forward_batch)
            return
        if spec_info.custom_mask is None:
            self._plan_alias(spec_info, forward_batch)
        else:
            self._plan_mask(spec_info, forward_batch)
        # Paged, not ragged: the new rows' KV is written before attention reads it.
        self.forward_metadata = PrefillMetadata(
            self.prefill_wrappers_verify, use_ragged=False, extend_no_prefix=False
        )

    def _plan_mask(self, spec_info: ParseVerifyInput, forward_batch: Any) -> None:
        """Plans as SGLang does for its tree verify, but splits KV as in its prefills."""
        self.indices_updater_prefill.update(
            forward_batch.req_pool_indices,
            forward_batch.seq_lens,
            forward_batch.seq_lens_cpu,
            forward_batch.seq_lens_sum,
            prefix_lens=None,
            prefill_wrappers=self.prefill_wrappers_verify,
            use_ragged=False,
            encoder_lens=None,
            spec_info=spec_info,
            fixed_split_size=self.prefill_split_tile_size,
            plan=forward_batch.kv_loc_plan,
        )

    def _plan_alias(self, spec_info: ParseVerifyInput, forward_batch: Any) -> None:
        """Plans directly: there are more sequences than SGLang's per-request buffers hold.

        The offsets are on the host, because FlashInfer would wait for the device to copy them.
        """
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
        sequences = spec_info.layout.pseudo_sequences()
        rows = paged_rows(sequences, slots, with_own=True)
        host = torch.device("cpu")
        updater = self.indices_updater_prefill
        windows = (updater.sliding_window_size, -1) if self.num_wrappers > 1 else (-1,)
        for wrapper, window in zip(self.prefill_wrappers_verify, windows, strict=True):
            wrapper.begin_forward(
                indptr([sequence.num_rows for sequence in sequences], host),
                indptr([sequence.kv_len for sequence in sequences], host),
                rows.kv_slots,
                torch.ones(len(sequences), dtype=torch.int32),
                updater.num_qo_heads,
                updater.num_kv_heads,
                updater.head_dim,
                1,
                q_data_type=updater.q_data_type,
                kv_data_type=updater.data_type,
                non_blocking=True,
                fixed_split_size=self.prefill_split_tile_size,
                window_left=window,  # chooses the kernel, which a window at run time would not
            )


class ParseFlashInferMLABackend(FlashInferMLAAttnBackend):
    """``FlashInferMLAAttnBackend`` that asks questions about latent KV, without a mask."""

    def init_forward_metadata(self, forward_batch: Any) -> None:
        spec_info = forward_batch.spec_info
        if not isinstance(spec_info, ParseVerifyInput) or spec_info.is_stock:
            super().init_forward_metadata(forward_batch)
            return
        slots = self.req_to_token_pool.req_to_token[forward_batch.req_pool_indices]
        sequences = spec_info.layout.pseudo_sequences()
        kv_lens = [sequence.kv_len for sequence in sequences]
        host, updater = torch.device("cpu"), self.indices_updater_prefill
        self.prefill_wrapper_paged.plan(
            qo_indptr=indptr([sequence.num_rows for sequence in sequences], host),
            kv_indptr=indptr(kv_lens, host),
            kv_indices=paged_rows(sequences, slots, with_own=True).kv_slots,
            kv_len_arr=torch.tensor(kv_lens, dtype=torch.int32),
            num_heads=updater.num_local_heads,
            head_dim_ckv=updater.kv_lora_rank,
            head_dim_kpe=updater.qk_rope_head_dim,
            page_size=1,
            causal=True,
            sm_scale=updater.scaling,
            q_data_type=updater.q_data_type,
            kv_data_type=updater.data_type,
        )
        self.forward_metadata = LatentMetadata(self.prefill_wrapper_paged, use_ragged=False)


def create_backend(runner: Any) -> Any:
    """Like ``attention_registry.create_flashinfer_backend``."""
    if runner.use_mla_backend:
        return ParseFlashInferMLABackend(runner)
    return ParseFlashInferBackend(runner, init_new_workspace=runner.init_new_workspace)
