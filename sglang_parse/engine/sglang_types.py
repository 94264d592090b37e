"""Fields of SGLang's scheduler objects that PARSE relies on.

SGLang ships no type stubs. These protocols are what mypy checks PARSE against, and what to compare
with a new SGLang version: ``Req`` and ``ScheduleBatch`` of ``sglang.srt.managers.schedule_batch``.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol

import torch

from sglang_parse.core.phases import RequestPolicy
from sglang_parse.core.request import RequestState


class KvRecord(Protocol):
    """A request's KV: slots [0, kv_committed_len) are final, [.., kv_allocated_len) allocated."""

    req_pool_idx: int
    kv_committed_len: int
    kv_allocated_len: int


class Req(Protocol):
    """One request.

    Attributes:
        parse_policy, parse_state: PARSE's own, set at admission and at the first prefill;
            parse_incoming: texts that are on their way; parse_messages: (role, text) of a chat's.
        output_ids: tokens of processed results; PARSE's ``RequestState.output_ids`` is ahead.
        extra_key, cache_salt: namespace of the radix cache.
        to_finish: finish reason that SGLang applies when it processes the result.
    """

    rid: str
    parse_policy: RequestPolicy
    parse_state: RequestState
    parse_incoming: dict[str, Any]
    parse_messages: Sequence[tuple[str, str]]
    origin_input_ids: Sequence[int]
    vocab_size: int
    output_ids: Sequence[int]
    sampling_params: Any
    custom_logit_processor: str | None
    kv: KvRecord
    tokenizer: Any
    eos_token_ids: Sequence[int] | None
    grammar: Any
    lora_id: str | None
    multimodal_inputs: Any
    session: Any
    extra_key: str | None
    cache_salt: str | None
    finished_reason: Any
    output_ids_through_stop: Sequence[int]
    cached_tokens: int
    decode_batch_idx: int
    is_retracted: bool
    return_logprob: bool
    logprob: Any
    return_sampling_mask: bool
    skip_radix_cache_insert: bool
    to_finish: Any

    def finished(self) -> bool: ...

    def set_finish_with_abort(self, error_msg: str) -> None: ...

    def owned_kv_len(self) -> int: ...


class ScheduleBatch(Protocol):
    """The running batch; ``reqs`` and all [n] tensors are in the same order.

    Attributes:
        req_pool_indices: int64 [n] rows of ``req_to_token_pool.req_to_token``, on the device.
        seq_lens, seq_lens_cpu: int64 [n] committed lengths.
        sampling_info: SGLang's forward-only copy; no penalizer orchestrator inside the worker.
    """

    reqs: list[Any]
    device: Any
    forward_mode: Any
    spec_info: Any
    spec_algorithm: Any
    enable_overlap: bool
    req_pool_indices: torch.Tensor
    req_to_token_pool: Any
    token_to_kv_pool_allocator: Any
    tree_cache: Any
    seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    seq_lens_sum: int
    orig_seq_lens: torch.Tensor
    input_ids: torch.Tensor | None
    out_cache_loc: torch.Tensor
    sampling_info: Any
    return_logprob: bool
    multimodal_inputs: Any
    input_embeds: Any
    chunked_req: Any
    hicache_consumer_index: int
    prefix_lens: Sequence[int]
    extend_lens: Sequence[int]
    extend_num_tokens: int
    extend_logprob_start_lens: Sequence[int]
    chunked_req_next_prompt_token: Any

    def maybe_evict_swa(self) -> None: ...
