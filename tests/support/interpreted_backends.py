"""The GPU backends' verify passes on the CPU, as far as a CPU can run them.

Triton: SGLang's real kernels, in Triton's interpreter. FlashInfer and FlashAttention 3: SGLang's
real planning and index kernels; only their last step, attention itself, is written out here as
their documentation says it. Run by ``test_attention_backends``, because Triton reads
``TRITON_INTERPRET`` when it is imported.
"""

from __future__ import annotations

import itertools
import sys
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any
from unittest import mock

import torch
import triton

assert triton.knobs.runtime.interpret, "run with TRITON_INTERPRET=1"

from sglang.kernels.ops.attention.extend_attention import extend_attention_fwd  # noqa: E402
from sglang.kernels.ops.attention.kv_indices import (  # noqa: E402
    create_flashinfer_kv_indices_triton,
)
from sglang.srt.layers.attention.flashinfer_backend import (  # noqa: E402
    FlashInferIndicesUpdaterPrefill,
    WrapperDispatch,
)
from sglang.srt.layers.attention.triton_backend import TritonAttnBackend  # noqa: E402
from sglang.srt.layers.radix_attention import AttentionType  # noqa: E402
from sglang.srt.mem_cache.kv_index_translator import KVIndexTranslator  # noqa: E402
from sglang.srt.model_executor.forward_batch_info import ForwardMode  # noqa: E402

from sglang_parse.attention.flashinfer import (  # noqa: E402
    ParseFlashInferBackend,
    ParseFlashInferMLABackend,
)
from sglang_parse.attention.support import MASK, SUPPORT  # noqa: E402
from sglang_parse.attention.triton import ParseTritonBackend  # noqa: E402
from sglang_parse.attention.triton_wide import WideTritonBackend  # noqa: E402
from sglang_parse.core.layout import RequestLayout  # noqa: E402
from sglang_parse.core.mask import qlen_only_mask  # noqa: E402
from support.paged_inputs import PagedInputs, attend  # noqa: E402
from support.paged_pass import (  # noqa: E402
    BLOCKS,
    CHAINS,
    DIM,
    HEADS,
    KV_HEADS,
    LAYOUT,
    ON_DEVICE,
    RAGGED,
    ROPE,
    WINDOW,
    PagedPass,
)

# SGLang's FlashAttention module wants the kernels' library, which wants a driver.
with mock.patch.dict(sys.modules, {"sgl_kernel": mock.MagicMock()}):
    from sglang.srt.layers.attention.flashattention_backend import (
        FlashAttentionBackend,
        FlashAttentionMetadata,
    )

    from sglang_parse.attention.flash_attention import ParseFlashAttentionBackend


def without_constructor(kind: type, given: PagedPass, **fields: Any) -> Any:
    """A backend with the fields that a prefill reads; the stock constructors need a GPU."""
    translator = KVIndexTranslator(
        req_to_token=given.table,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=given.pool,
        page_size=1,
        device="cpu",
    )
    translator.bind_own_plan(given.forward_batch)
    backend = object.__new__(kind)
    vars(backend).update(
        device="cpu",
        page_size=1,
        kv_index_translator=translator,
        req_to_token_pool=SimpleNamespace(req_to_token=given.table),
        token_to_kv_pool=given.pool,
        sliding_window_size=given.window,
        use_sliding_window_kv_pool=False,
        use_mla=given.is_latent,
        **fields,
    )
    return backend


def triton_backend(kind: type, given: PagedPass, **fields: Any) -> Any:
    return without_constructor(
        kind,
        given,
        dllm_attention=None,
        window_kv_indptr=None if given.window is None else torch.zeros(9, dtype=torch.int32),
        use_dense_fp8_chunked_prefill=False,
        use_verify_shared_kv=False,
        use_verify_splitkv=False,
        enable_deterministic=False,
        allow_bidirectional_attention_in_extend=False,
        dcp_size=1,
        max_context_len=64,
        kv_indptr=torch.zeros(9, dtype=torch.int32),
        qo_indptr=torch.zeros(9, dtype=torch.int64),
        extend_attention_fwd=extend_attention_fwd,
        **fields,
    )


def triton_pass(given: PagedPass) -> torch.Tensor:
    backend = triton_backend(ParseTritonBackend, given)
    backend.init_forward_metadata(given.forward_batch)
    return backend.forward_extend(given.q, given.k, given.v, given.layer, given.forward_batch)


def graph_pass(given: PagedPass, splits: bool) -> torch.Tensor:
    """As in a CUDA graph of one width, or of so many rows: planned from lengths on the device, in
    buffers that an earlier replay has used. ``splits``: no call is SGLang's kernel's."""
    rows, lens = given.layout.requests[0], None
    if given.layout is RAGGED:
        rows = RequestLayout(0, given.layout.num_rows)
        lens = torch.tensor([part.num_rows for part in given.layout.requests] + [0] * 4)
    width = rows.num_rows
    backend = triton_backend(
        WideTritonBackend,
        given,
        mask_indptr=torch.zeros(9, dtype=torch.int64),
        num_head=HEADS,
        num_kv_head=KV_HEADS,
        v_head_dim=DIM,
        _verify_mask=None,
        _width=width,
        _mask=None,
        _tail=None if rows.is_causal else qlen_only_mask(rows).to(torch.uint8),
        _lens=lens,
        _slots=None,
        _can_split=splits,
        splits=splits,
    )
    if splits:
        backend.extend_attention_fwd = None
    if given.window is not None:
        backend.cuda_graph_window_kv_indices = torch.ones(512, dtype=torch.int64)
        backend.cuda_graph_window_num_kv_splits = torch.ones(8, dtype=torch.int32)
        backend.cuda_graph_window_kv_offsets = torch.zeros(8, dtype=torch.int32)

    def stock(self: Any, max_bs: int, max_num_tokens: int, kv_indices_buf: torch.Tensor) -> None:
        assert max_bs == max_num_tokens == 8
        self.cuda_graph_kv_indices = kv_indices_buf.fill_(1)

    with mock.patch.object(TritonAttnBackend, "init_cuda_graph_state", stock):
        backend.init_cuda_graph_state(8, width if lens is not None else 8 * width)
    if backend._mask is not None and not splits:
        backend._mask.fill_(1)
    batch = given.forward_batch
    batch.forward_mode, batch.seq_lens = ForwardMode.TARGET_VERIFY, batch.extend_prefix_lens
    batch.spec_info = SimpleNamespace(num_tokens_per_req=width, custom_mask=None)
    batch.seq_lens_cpu = batch.extend_prefix_lens = batch.extend_seq_lens = None
    backend.init_forward_metadata_out_graph(batch, in_capture=True)
    backend.init_forward_metadata_in_graph(batch)
    return backend.forward_extend(given.q, given.k, given.v, given.layer, batch)


class Wrapper:
    """``BatchPrefillWithPagedKVCacheWrapper`` of FlashInfer, as documented, page size 1.

    A window at run time is cut by kernels that were chosen for one when they were planned.
    """

    def begin_forward(
        self,
        qo_indptr: torch.Tensor,
        kv_indptr: torch.Tensor,
        kv_indices: torch.Tensor,
        last_page_len: torch.Tensor,
        *sizes: int,
        custom_mask: torch.Tensor | None = None,
        window_left: int = -1,
        **_: object,
    ) -> None:
        self.window = window_left
        assert sizes == (HEADS, KV_HEADS, DIM, 1)
        assert len(qo_indptr) == len(kv_indptr) == len(last_page_len) + 1
        assert all(t.dtype == torch.int32 for t in (qo_indptr, kv_indptr, kv_indices))
        assert (last_page_len == 1).all()
        self.known = (qo_indptr, kv_indptr, kv_indices, last_page_len, custom_mask)

    is_cuda_graph_enabled = False

    def forward(
        self, q: torch.Tensor, kv: Any, *, causal: bool, window_left: int | None, **_: object
    ) -> torch.Tensor:
        assert causal
        assert self.window == (-1 if window_left is None else window_left)
        return attend(paged(q, kv, *self.known), None if self.window < 0 else self.window)


def paged(q: torch.Tensor, kv: Any, *known: Any) -> PagedInputs:
    """Attention by the kernel's arguments, with page size 1; scores are scaled for ``DIM``."""
    q, (keys, values) = q * (q.shape[-1] / DIM) ** 0.5, (cache.unsqueeze(1) for cache in kv)
    return PagedInputs(q, keys, values, *known)


class LatentWrapper:
    """``BatchMLAPagedAttentionWrapper`` of FlashInfer, as documented, page size 1."""

    def plan(self, kv_len_arr: torch.Tensor, **known: Any) -> None:
        sizes = [known[f"head_dim_{name}"] for name in ("ckv", "kpe")]
        assert [known["num_heads"], *sizes, known["page_size"]] == [HEADS, DIM, ROPE, 1]
        assert known["causal"]
        assert torch.equal(kv_len_arr, torch.diff(known["kv_indptr"]))
        offsets = [known[name] for name in ("qo_indptr", "kv_indptr", "kv_indices")]
        assert all(t.dtype == torch.int32 for t in (*offsets, kv_len_arr))
        self.known = (*offsets, torch.ones_like(kv_len_arr))

    def run(
        self, q: torch.Tensor, q_rope: torch.Tensor, ckv: torch.Tensor, kpe: torch.Tensor, out: Any
    ) -> torch.Tensor:
        keys = torch.cat((ckv, kpe), -1)
        return out.copy_(attend(paged(torch.cat((q, q_rope), -1), (keys, ckv), *self.known)))


def flashinfer_latent_pass(given: PagedPass) -> torch.Tensor:
    sizes = {"num_local_heads": HEADS, "kv_lora_rank": DIM, "qk_rope_head_dim": ROPE}
    sizes |= {"scaling": given.layer.scaling, "q_data_type": None, "data_type": None}
    fields = {"prefill_wrapper_paged": LatentWrapper()}
    fields["indices_updater_prefill"] = SimpleNamespace(**sizes)
    backend = without_constructor(ParseFlashInferMLABackend, given, **fields)
    backend.init_forward_metadata(given.forward_batch)
    return backend.forward_extend(given.q, given.k, given.v, given.layer, given.forward_batch)


def flashinfer_pass(given: PagedPass) -> torch.Tensor:
    if given.is_latent:
        return flashinfer_latent_pass(given)
    buffers = {
        "kv_indptr": [torch.zeros(9, dtype=torch.int32)],
        "qo_indptr": [torch.zeros(9, dtype=torch.int32)],
        "kv_last_page_len": torch.ones(8, dtype=torch.int32),
        "num_wrappers": 1 if given.window is None else 2,
        "dispatch_reason": None if given.window is None else WrapperDispatch.SLIDING_WINDOW,
        "_swa_kv_pool": None,
        "prefill_wrapper_ragged": None,
        "prefill_wrappers_verify": [Wrapper() for _ in range(1 if given.window is None else 2)],
        "flashinfer_kv_cache_dtype": torch.float32,
        "prefill_uses_dequant_workspace": False,
        "prefill_split_tile_size": None,
        "kv_cache_quant_method": SimpleNamespace(needs_global_scale=lambda: False),
    }
    backend = without_constructor(ParseFlashInferBackend, given, **buffers)
    sizes = {
        "num_qo_heads": HEADS,
        "num_kv_heads": KV_HEADS,
        "head_dim": DIM,
        "data_type": torch.float32,
        "q_data_type": torch.float32,
        "sliding_window_size": given.window,
        "attn_backend": backend,
        **{name: buffers[name] for name in ("kv_indptr", "qo_indptr", "kv_last_page_len")},
        "prefill_wrapper_ragged": None,
    }
    updater = object.__new__(FlashInferIndicesUpdaterPrefill)
    vars(updater).update(sizes, update=updater.update_single_wrapper)
    backend.indices_updater_prefill = updater
    backend.init_forward_metadata(given.forward_batch)
    output = backend.forward_extend(given.q, given.k, given.v, given.layer, given.forward_batch)
    return output.view(len(given.q), -1)


def fa3_pass(given: PagedPass) -> torch.Tensor:
    """SGLang's real extend; its kernel's arguments are read as FlashAttention documents them."""
    fields = {"fa_skip_kv_cache": False, "kv_cache_is_mxfp8": False, "local_attn_builder": None}
    fields |= {"kv_cache_dtype_str": "auto", "topk": 1, "fa_impl_ver": 3, "num_splits": 0}
    backend = without_constructor(ParseFlashAttentionBackend, given, **fields)

    def stock(self: Any, _forward_batch: Any) -> None:
        self.forward_metadata = FlashAttentionMetadata()

    with mock.patch.object(FlashAttentionBackend, "init_forward_metadata", stock):
        backend.init_forward_metadata(given.forward_batch)
    known, q, k = backend.forward_metadata, given.q, given.k
    rope: dict[str, torch.Tensor] = {}
    if given.is_latent:
        q, rope["q_rope"] = q.view(-1, HEADS, DIM + ROPE).split((DIM, ROPE), -1)
        k, rope["k_rope"] = k.split((DIM, ROPE), -1)
    lengths = known.cache_seqlens_int32.tolist()
    assert known.cu_seqlens_k.tolist() == [0, *torch.tensor(lengths).cumsum(0).tolist()]
    assert known.page_table.shape == (len(lengths), known.max_seq_len_k)
    kernel = "sglang.srt.layers.attention.flashattention_backend.flash_attn_with_kvcache"
    with mock.patch(kernel, flash_attention):
        batch = given.forward_batch
        return backend.forward_extend(q, k, given.v, given.layer, batch, **rope)


def flash_attention(
    q: torch.Tensor,
    k_cache: torch.Tensor,
    v_cache: torch.Tensor,
    page_table: torch.Tensor,
    cache_seqlens: torch.Tensor,
    cu_seqlens_q: torch.Tensor,
    max_seqlen_q: int,
    causal: bool,
    window_size: tuple[int, int] = (-1, -1),
    qv: torch.Tensor | None = None,
    **_: object,
) -> torch.Tensor:
    """``flash_attn_with_kvcache`` with pages of one slot; ``qv``: more entries of the queries, for
    those of the values."""
    assert causal
    assert window_size[1] == (0 if window_size[0] > -1 else -1)
    assert page_table.dtype == cache_seqlens.dtype == torch.int32
    assert max_seqlen_q == torch.diff(cu_seqlens_q).max()
    keys, values = k_cache[:, 0], v_cache[:, 0]
    if qv is not None:
        q, keys = torch.cat((qv, q), -1), torch.cat((values, keys), -1)
    lengths = cache_seqlens.tolist()
    pages = [row[:length] for row, length in zip(page_table, lengths, strict=True)]
    offsets = cu_seqlens_q, torch.tensor([0, *lengths]).cumsum(0).to(torch.int32)
    ones = torch.ones(len(lengths), dtype=torch.int32)
    window = window_size[0] if window_size[0] > -1 else None
    return attend(paged(q, (keys, values), *offsets, torch.cat(pages), ones), window)


def packed_slots(max_context: int, contexts: tuple[int, ...]) -> int:
    """Checks the slots that a graph packs; returns how many programs pack a request's."""
    table = torch.randperm(len(contexts) * max_context).view(-1, max_context).to(torch.int32)
    translator = KVIndexTranslator(
        req_to_token=table,
        token_to_kv_pool_allocator=None,
        token_to_kv_pool=None,
        page_size=1,
        device="cpu",
    )
    backend, num_reqs = object.__new__(WideTritonBackend), len(contexts)
    vars(backend).update(
        kv_index_translator=translator,
        max_context_len=max_context,
        kv_indptr=torch.zeros(num_reqs + 2, dtype=torch.int32),
    )
    lens, pools = torch.tensor(contexts), torch.arange(num_reqs).flip(0)
    found = torch.full((sum(contexts) + 9,), -1)
    name = "sglang.srt.mem_cache.kv_index_translator.create_flashinfer_kv_indices_triton"
    with mock.patch(name, mock.MagicMock()) as kernel:
        kernel.__getitem__.side_effect = create_flashinfer_kv_indices_triton.__getitem__
        indptr = backend._fill_kv_indptr_and_indices(None, num_reqs, lens, pools, found)
    expected = [table[pool, :length] for pool, length in zip(pools, contexts, strict=True)]
    assert indptr.tolist() == [0, *itertools.accumulate(contexts)]
    assert torch.equal(found[:-9], torch.cat(expected).to(torch.int64))
    assert (found[-9:] == -1).all()
    ((_, num_programs),) = kernel.__getitem__.call_args.args
    return num_programs


PASSES: dict[str, tuple[Callable[[PagedPass], torch.Tensor], tuple[bool, ...]]] = {
    "triton": (triton_pass, (True, False)),
    "flashinfer": (flashinfer_pass, (True, False)),
    "fa3": (fa3_pass, (False,)),
}


LAYER = {
    "is_cross_attention": False,
    "attn_type": AttentionType.DECODER,
    "k_scale": None,
    "v_scale": None,
    "k_scale_float": None,
    "v_scale_float": None,
    "logit_cap": 0.0,
    "logit_capping_method": "tanh",
    "xai_temperature_len": -1,
}


def main() -> None:
    for name, (run, layouts) in PASSES.items():
        for is_masked in layouts:
            on_device = (ON_DEVICE,) if SUPPORT[name].plans_on_device else ()
            for layout in (LAYOUT, BLOCKS, *on_device):
                given = PagedPass(is_masked, layout)
                vars(given.layer).update(LAYER)
                given.check(run(given))
            print(name, "mask" if is_masked else "alias", "right")
            if not (is_masked and MASK not in (SUPPORT[name].latent_layouts or (MASK,))):
                given = PagedPass(is_masked, is_latent=True)
                vars(given.layer).update(LAYER)
                given.check(run(given))
                print(name, "mask" if is_masked else "alias", "of latent KV right")
        given = PagedPass(is_masked=False, window=WINDOW)
        vars(given.layer).update(LAYER)
        given.check(run(given))
        print(name, "alias with windows right")
    for layout, splits in itertools.product((ON_DEVICE, CHAINS, RAGGED), (True, False)):
        given = PagedPass(is_masked=True, layout=layout)
        vars(given.layer).update(LAYER)
        given.check(graph_pass(given, splits))
    print("triton graphs right")
    given = PagedPass(is_masked=False, layout=RAGGED, window=WINDOW)
    vars(given.layer).update(LAYER)
    given.check(graph_pass(given, splits=False))
    print("triton graphs with windows right")
    assert packed_slots(4096, (4096, 0, 700)) == 1
    assert packed_slots(40_960, (32_773, 0, 700, 40_960)) == 10
    print("slots of long contexts right")


if __name__ == "__main__":
    main()
