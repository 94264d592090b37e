"""Bytes that SGLang's attention backends keep for a target: their own code on tensors without
numbers.

Run by ``test_graph_memory`` in a process of its own, because SGLang's FlashAttention module wants
the kernels' library, which is stood in for. Takes a JSON list of sizes and prints one of objects:
backend -> bytes by the settings as they are, and bytes under PARSE; "blocks": bytes of the graphs
of blocks with masks after every row, and of those of passes; "kept" and "computed": bytes of all
graphs of blocks, and of passes, with hidden states.
"""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch

for name in ("sgl_kernel", "sgl_kernel.utils", "sgl_kernel.flash_attn"):
    sys.modules[name] = mock.MagicMock()

from sglang.srt.layers.attention import flashattention_backend, triton_backend  # noqa: E402
from sglang.srt.runtime_context import _ConfigBag, get_parallel  # noqa: E402

from sglang_parse.algorithm import ParseAlgorithm  # noqa: E402
from sglang_parse.attention.support import Attention  # noqa: E402
from sglang_parse.attention.triton_wide import WideTritonBackend  # noqa: E402
from sglang_parse.core.block import BlockKind, Masks  # noqa: E402
from sglang_parse.core.config import ParseConfig  # noqa: E402
from sglang_parse.core.layout import RequestLayout  # noqa: E402
from sglang_parse.engine import pass_graphs  # noqa: E402
from sglang_parse.engine.graph_memory import GraphMemory  # noqa: E402
from sglang_parse.patches.parse import decode_graphs  # noqa: E402

MODULES = (triton_backend, flashattention_backend)
HEADS, KV_HEADS, DIM = 64, 8, 128
BLOCK_MASKS = (Masks.EVERY, Masks.LAST)


def settings(longest_pass: int) -> Any:
    """The speculative settings, as the start-up checks set them."""
    spec = _ConfigBag("spec")
    for name, value in {
        "speculative_algorithm": "PARSE",
        "speculative_num_draft_tokens": longest_pass,
        "max_speculative_num_draft_tokens": longest_pass,
        "speculative_num_steps": 1,
        "speculative_eagle_topk": 1,
    }.items():
        spec._set(name, value)
    return spec


def target(context: int, max_bs: int) -> Any:
    """A target's model runner with the fields that a backend's constructor reads."""
    model = mock.MagicMock(
        context_len=context,
        head_dim=DIM,
        v_head_dim=DIM,
        swa_v_head_dim=DIM,
        is_encoder_decoder=False,
        is_local_attention_model=False,
        hf_text_config=SimpleNamespace(num_attention_heads=HEADS),
        hf_config=SimpleNamespace(pard_token=7),
        num_attention_heads=HEADS,
        hidden_size=HEADS * DIM,
        vocab_size=1000,
        dtype=torch.bfloat16,
        model_is_mrope=False,
    )
    model.get_num_kv_heads.return_value = KV_HEADS
    model.get_max_num_attention_heads.return_value = HEADS
    pool = mock.MagicMock()
    pool.get_value_buffer.return_value = torch.empty(1, KV_HEADS, DIM, device="meta")
    return SimpleNamespace(
        spec_algorithm=object.__new__(ParseAlgorithm),
        is_draft_worker=False,
        model_config=model,
        token_to_kv_pool=pool,
        token_to_kv_pool_allocator=None,
        req_to_token_pool=SimpleNamespace(size=max_bs, req_to_token=None),
        kv_index_translator=None,
        kv_cache_dtype=torch.bfloat16,
        kv_cache_dtype_str="auto",
        sliding_window_size=None,
        page_size=1,
        device="meta",
        model=torch.nn.Module(),
        dtype=torch.bfloat16,
        gpu_id=0,
        decode_num_tokens_per_req=lambda **_: 1,
    )


def tensors(value: Any) -> Iterator[torch.Tensor]:
    """Returns all tensors of a backend."""
    if isinstance(value, torch.Tensor):
        yield value
    elif isinstance(value, dict):
        for part in value.values():
            yield from tensors(part)
    elif type(value).__name__ == "VerifyMask":
        yield value.buffer


def bytes_of(make: Callable[[Any], Any], runner: Any) -> tuple[int, int]:
    """Returns a backend's bytes after capture: with stock SGLang, and with PARSE."""
    made: list[Any] = [make(runner)]
    decode_graphs._size_for_plain_steps(lambda runner: made.append(make(runner)), runner)
    stock, parse = map(_kept, made)
    return stock, parse


def _kept(backend: Any) -> int:
    max_bs = backend.req_to_token_pool.size
    backend.init_cuda_graph_state(max_bs, max_bs)
    kept = {id(tensor): tensor for tensor in tensors(vars(backend))}
    return sum(tensor.nbytes for tensor in kept.values())


def wide_bytes(runner: Any, rows: RequestLayout, lens: torch.Tensor | None = None) -> int:
    """Of graphs of 16 requests with these rows each, or of so many rows of 128 requests."""
    backend = WideTritonBackend(runner, rows, lens)
    backend.init_cuda_graph_state(16, rows.num_rows * (16 if lens is None else 1))
    kept = {id(tensor): tensor for tensor in tensors(vars(backend) | vars(backend._split))}
    return sum(tensor.nbytes for tensor in kept.values())


def all_graphs(runner: Any) -> dict[str, tuple[int, int]]:
    """As they are allocated, and as ``GraphMemory`` says."""
    model, blocks = runner.model_config, [BlockKind(8, masks).rows(0) for masks in BLOCK_MASKS]
    passes, lens = [RequestLayout(0, rows) for rows in (128, 1024)], torch.empty(129, device="meta")
    shared = 8 * len(lens) * model.context_len
    num_rows = 16 * sum(rows.num_rows for rows in blocks), sum(rows.num_rows for rows in passes)
    kept = (
        sum(wide_bytes(runner, rows) for rows in blocks),
        sum(wide_bytes(runner, rows, lens) for rows in passes) - shared,
    )
    args = SimpleNamespace(
        device="cuda",
        tp_size=1,
        cuda_graph_config=SimpleNamespace(decode=SimpleNamespace(backend="full", bs=[8, 16])),
        max_running_requests=None,
        enable_deterministic_inference=False,
        enable_lora=False,
    )
    with mock.patch.object(pass_graphs, "attention_of", return_value=Attention.FULL):
        found = GraphMemory(args, ParseConfig(), model, model).of_graphs()
    hidden = [rows * model.hidden_size * 2 for rows in num_rows]
    return {
        "kept": tuple(map(sum, zip(kept, hidden, strict=True))),
        "computed": (found["graphs of blocks"], found["graphs of passes"]),
    }


def stand_in_for_a_server(spec: Any) -> None:
    """Stand-ins for a server's settings and for its GPU's capability."""
    nothing = mock.MagicMock()
    nothing.kernel.triton_attention_num_kv_splits = 8
    nothing.kernel.triton_attention_split_tile_size = None
    nothing.dllm.dllm_algorithm = None
    nothing.deterministic.enable_deterministic_inference = False
    for module in (*MODULES, decode_graphs):
        module.get_spec = lambda: spec
    for module in MODULES:
        for name in ("get_exec", "get_schedule", "get_model", "get_memory"):
            setattr(module, name, lambda: nothing)
    triton_backend.mambaish_config = triton_backend.cuda_graph_fully_disabled = lambda *_: None
    triton_backend.check_cuda_graph_backend = lambda *_: False
    flashattention_backend.get_kv_shard_pool = lambda _: None
    flashattention_backend._should_disable_scheduler_metadata_precompute = lambda: False


def measure(longest_pass: int, context: int, max_bs: int) -> dict[str, tuple[int, int]]:
    stand_in_for_a_server(settings(longest_pass))
    ranks = {"attn_tp_size": 1, "attn_dcp_size": 1, "attn_dcp_rank": 0, "attn_cp_size": 1}
    with get_parallel().override(**ranks):
        runner = target(context, max_bs)
        return {
            "blocks": (
                wide_bytes(runner, BlockKind(8, Masks.EVERY).rows(0)),
                wide_bytes(runner, RequestLayout(0, 1024), torch.empty(129, device="meta")),
            ),
            **all_graphs(runner),
            "triton": bytes_of(triton_backend.TritonAttnBackend, runner),
            "fa3": bytes_of(flashattention_backend.FlashAttentionBackend, runner),
        }


if __name__ == "__main__":
    print(json.dumps([measure(*sizes) for sizes in json.loads(sys.argv[1])]))
