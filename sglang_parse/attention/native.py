"""SGLang's ``torch_native`` attention for the CPU, with verify passes.

It takes FlashInfer's flat mask (row-major, query first, full KV length, requests concatenated) from
PARSE's verify pass and from SGLang's tree verify, or PARSE's pseudo-sequences without a mask. A
draft model's extends compute their new rows only. So do all forwards of a model with windows or
attention sinks: the stock backend knows neither sinks nor two KV pools. All other passes go to it.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.layers.attention.torch_native_backend import TorchNativeAttnBackend
from sglang.srt.mem_cache.memory_pool import KVWriteLoc
from torch.nn.functional import pad, scaled_dot_product_attention

from sglang_parse.attention.spec_input import ParseVerifyInput
from sglang_parse.core.layout import VerifyLayout
from sglang_parse.core.mask import split_flat_mask


class AttentionPart(NamedTuple):
    """Query rows that attend to the same keys.

    rows: the query rows; kv_slots: int [kv_len] slots of their keys, written before attending;
    bias: fp32 [rows, kv_len], 0 where a row attends to a key and -inf elsewhere; None if every row
    attends to every key.
    """

    rows: slice
    kv_slots: torch.Tensor
    bias: torch.Tensor | None = None

    def within(self, window: int, pool: Any = None) -> AttentionPart:
        """The part where a row attends to itself and at most ``window`` tokens before it.

        Its rows are the last of its keys. ``pool``: the two KV pools, if the keys are in that of
        windows: the slots of tokens before them are gone.
        """
        kv_len, num_rows = len(self.kv_slots), self.rows.stop - self.rows.start
        first = max(0, kv_len - num_rows - window)
        columns, slots = torch.arange(first, kv_len), self.kv_slots[first:]
        is_before = columns < torch.arange(kv_len - num_rows, kv_len).unsqueeze(1) - window
        if pool is not None:
            slots = pool.translate_loc_from_full_to_swa(slots)
        bias = self.whole_bias[:, first:].masked_fill(is_before, -torch.inf)
        return self._replace(kv_slots=slots, bias=bias)

    @property
    def whole_bias(self) -> torch.Tensor:
        """``bias``, also where every row attends to every key."""
        num_rows = self.rows.stop - self.rows.start
        return torch.zeros(num_rows, len(self.kv_slots)) if self.bias is None else self.bias


class MaskedTorchNativeBackend(TorchNativeAttnBackend):
    """``TorchNativeAttnBackend`` with masks for verify passes and draft extends.

    These are PARSE's verify passes (``ParseVerifyInput``) and SGLang's TARGET_VERIFY and
    DRAFT_EXTEND_V2.
    """

    def __init__(self, model_runner: Any) -> None:
        super().__init__(model_runner)
        has_sinks = model_runner.model_config.has_attention_sinks
        self._serves_all = has_sinks or model_runner.sliding_window_size is not None
        # The stock backend's extends compute all rows of a sequence and drop the old ones: almost
        # all of them in a draft model's or a head's extend by a few tokens.
        self._narrow_extends = model_runner.is_draft_worker or self._serves_all
        self.attend_in(())

    def init_forward_metadata(self, forward_batch: Any) -> None:
        super().init_forward_metadata(forward_batch)
        table = self.req_to_token_pool.req_to_token
        parts = _masked_parts(forward_batch, table, self._narrow_extends)
        if self._serves_all and forward_batch.forward_mode.is_decode():
            lengths = forward_batch.seq_lens.tolist()
            masks = _causal_masks([1] * len(lengths), lengths)
            parts = _parts_of(_slots_of(forward_batch, table), masks)
        is_masked = getattr(forward_batch.spec_info, "custom_mask", None) is not None
        self.attend_in(parts, in_order=not is_masked)

    def attend_in(self, parts: Sequence[AttentionPart], *, in_order: bool = False) -> None:
        """``in_order``: keys are in the order of their positions, and rows are the last ones."""
        self._parts, self._in_order = parts, in_order
        self._windowed: dict[int, Sequence[AttentionPart]] = {}

    def forward_extend(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        forward = self._forward_parts if self._parts else super().forward_extend
        return forward(*args, **kwargs)

    def forward_decode(self, *args: Any, **kwargs: Any) -> torch.Tensor:
        forward = self._forward_parts if self._parts else super().forward_decode
        return forward(*args, **kwargs)

    def _forward_parts(
        self,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        layer: Any,
        forward_batch: Any,
        save_kv_cache: bool = True,
        sinks: torch.Tensor | None = None,
    ) -> torch.Tensor:
        """``sinks``: [heads] scores of a token of the softmax that has no value."""
        if save_kv_cache and k is not None:
            loc = KVWriteLoc(forward_batch.out_cache_loc, self.swa_out_cache_loc)
            self.token_to_kv_pool.set_kv_buffer(layer, loc, k, v)
        keys = self.token_to_kv_pool.get_key_buffer(layer.layer_id)
        values = self.token_to_kv_pool.get_value_buffer(layer.layer_id)
        query = q.view(-1, layer.tp_q_head_num, layer.qk_head_dim)
        output = q.new_empty(query.shape[0], layer.tp_q_head_num, layer.v_head_dim)
        for part in self._seen_by(layer):
            seen_keys, seen_values = (
                buffer.index_select(0, part.kv_slots).transpose(0, 1).to(q.dtype)
                for buffer in (keys, values)
            )
            bias = part.bias
            if sinks is not None:
                seen_keys, seen_values = (
                    pad(one, (0, 0, 0, 1)) for one in (seen_keys, seen_values)
                )
                scores = part.whole_bias.expand(len(sinks), -1, -1)
                column = sinks.to(scores.dtype).view(-1, 1, 1).expand(-1, scores.shape[1], 1)
                bias = torch.cat((scores, column), -1)
            attended = scaled_dot_product_attention(
                query[part.rows].transpose(0, 1).unsqueeze(0),
                seen_keys.unsqueeze(0),
                seen_values.unsqueeze(0),
                attn_mask=None if bias is None else bias.to(q.dtype),
                scale=layer.scaling,
                enable_gqa=layer.tp_q_head_num != layer.tp_k_head_num,
            )
            output[part.rows] = attended.squeeze(0).transpose(0, 1)
        return output.view(query.shape[0], -1)

    def _seen_by(self, layer: Any) -> Sequence[AttentionPart]:
        window = getattr(layer, "sliding_window_size", None)
        if window in (None, -1):
            return self._parts
        if not self._in_order:
            raise NotImplementedError(
                f"speculation with sliding window {window} on torch_native; "
                "use models with full attention"
            )
        if window not in self._windowed:  # the same in every layer
            pool = self.token_to_kv_pool if self.use_sliding_window_kv_pool else None
            self._windowed[window] = [part.within(window, pool) for part in self._parts]
        return self._windowed[window]


def _masked_parts(
    forward_batch: Any, req_to_token: torch.Tensor, narrow_extends: bool
) -> list[AttentionPart]:
    """Returns the parts of a verify pass or, if asked, of an extend; none for other passes."""
    spec_info, mode = forward_batch.spec_info, forward_batch.forward_mode
    if isinstance(spec_info, ParseVerifyInput):
        layout, flat = spec_info.layout, spec_info.custom_mask
        if spec_info.starts is not None:  # on a CPU the host can read them
            layout = layout.at(spec_info.starts.tolist())
        if flat is None:
            return _alias_parts(layout, _slots_of(forward_batch, req_to_token))
        masks = split_flat_mask(flat[: layout.mask_size], layout)
    elif spec_info is not None and mode.is_target_verify():
        masks = _tree_masks(spec_info, forward_batch.seq_lens.tolist())
    elif (spec_info is not None and mode.is_draft_extend_v2()) or (
        narrow_extends and mode.is_extend()
    ):
        masks = _causal_masks(
            forward_batch.extend_seq_lens.tolist(), forward_batch.seq_lens.tolist()
        )
    else:
        return []
    return _parts_of(_slots_of(forward_batch, req_to_token), masks)


def _slots_of(forward_batch: Any, req_to_token: torch.Tensor) -> list[torch.Tensor]:
    """Returns the requests' rows of ``req_to_token``."""
    return [req_to_token[request] for request in forward_batch.req_pool_indices]


def _parts_of(slots: Iterable[torch.Tensor], masks: Iterable[torch.Tensor]) -> list[AttentionPart]:
    """Returns a part per mask, bool [rows, kv_len], of the next rows; ``slots`` begin with those of
    its keys."""
    parts, start = [], 0
    for own_slots, mask in zip(slots, masks, strict=True):
        num_rows, kv_len = mask.shape
        # Every layer would convert the mask again.
        bias = torch.zeros(mask.shape).masked_fill_(~mask, -torch.inf)
        parts.append(AttentionPart(slice(start, start + num_rows), own_slots[:kv_len], bias))
        start += num_rows
    return parts


def _alias_parts(layout: VerifyLayout, slots: Sequence[torch.Tensor]) -> list[AttentionPart]:
    """Returns one part per pseudo-sequence; ``slots``: see ``_slots_of``."""
    kv_slots, masks = [], []
    for one in layout.pseudo_sequences():
        row, own = slots[one.request], slice(one.start_column, one.start_column + one.num_rows)
        kv_slots.append(torch.cat((row[: one.context_len], row[own])))
        masks.extend(_causal_masks([one.num_rows], [one.kv_len]))
    return _parts_of(kv_slots, masks)


def _tree_masks(verify_input: Any, seq_lens: Sequence[int]) -> list[torch.Tensor]:
    """Returns each request's tree mask, bool [num_draft_tokens, seq_len + num_draft_tokens].

    Raises:
        ValueError: the mask is not a FULL_MASK over committed and draft tokens.
    """
    width = verify_input.draft_token_num
    sizes = [width * (length + width) for length in seq_lens]
    flat = verify_input.custom_mask
    if flat.numel() != sum(sizes):
        raise ValueError(
            f"tree mask has {flat.numel()} entries, expected {sum(sizes)} for {width} draft "
            f"tokens after {list(seq_lens)} committed tokens"
        )
    return [part.view(width, -1) for part in flat.split(sizes)]


def _causal_masks(num_rows: Sequence[int], kv_lens: Sequence[int]) -> list[torch.Tensor]:
    """Returns bool [rows, kv_len] per request; the rows are its last tokens."""
    return [
        torch.ones(rows, kv_len, dtype=torch.bool).tril(kv_len - rows)
        for rows, kv_len in zip(num_rows, kv_lens, strict=True)
    ]
