"""A causal verify pass: a chunk of a prefill to SGLang, but for its logits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.core.layout import RequestLayout, VerifyLayout
from support.families import TINY
from support.launch import launch
from support.random_pair import PairShape, make_pair

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("clean_environment")]
DRAFTED = RequestLayout(prefix_len=3, num_draft_rows=3)
ASKED = RequestLayout(prefix_len=2, num_draft_rows=2, visible_lens=(1,), question_lens=(2,))


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), PairShape(num_layers=1, max_positions=512))


@pytest.mark.parametrize(
    ("layouts", "mode"), [((DRAFTED, DRAFTED), "EXTEND"), ((DRAFTED, ASKED), "DRAFT_EXTEND_V2")]
)
def test_the_selected_rows_have_logits(layouts: tuple[RequestLayout, ...], mode: str):
    """Rows of their own width in each request; hidden states stay those of all rows."""
    from sglang.srt.layers.logits_processor import LogitsMetadata, LogitsProcessor
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
    from sglang.srt.plugins import load_plugins

    from sglang_parse.attention.spec_input import ParseVerifyInput, forward_mode_of

    load_plugins()
    layout, rows = VerifyLayout.of(layouts), torch.tensor([0, 2, 4])
    sizes = torch.tensor([part.num_rows for part in layouts])
    batch = ForwardBatch(
        forward_mode=forward_mode_of(layout),
        batch_size=len(layouts),
        input_ids=torch.zeros(layout.num_rows, dtype=torch.int64),
        req_pool_indices=torch.arange(2),
        seq_lens=sizes,
        seq_lens_sum=int(sizes.sum()),
        out_cache_loc=torch.zeros(layout.num_rows, dtype=torch.int64),
        extend_seq_lens=sizes,
        return_logprob=False,
        spec_info=ParseVerifyInput(layout=layout, custom_mask=None, select_index=rows),
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    assert batch.forward_mode.name == mode
    states = torch.randn(layout.num_rows, 8)
    metadata = LogitsMetadata.from_forward_batch(batch)
    processor = object.__new__(LogitsProcessor)
    pruned, *_ = processor._get_pruned_states(states, None, None, metadata)
    assert torch.equal(pruned, states[rows])
    batch.spec_info = SimpleNamespace(select_index=rows)
    if mode == "EXTEND":  # a prefill's stay those of each request's last row
        metadata = LogitsMetadata.from_forward_batch(batch)
        pruned, *_ = processor._get_pruned_states(states, None, None, metadata)
        assert torch.equal(pruned, states[sizes.cumsum(0) - 1])


@pytest.mark.parametrize("layouts", [(DRAFTED, DRAFTED), (DRAFTED, ASKED)], ids=["causal", "asks"])
@pytest.mark.parametrize(("buckets", "replays"), [([8], True), ([16], False), ([4], False)])
def test_passes_replay_sglangs_prefill_graphs(layouts: tuple, buckets: list[int], replays: bool):
    """Also with hidden states of all rows, which a head reads; if a graph has at most twice the
    rows. Of the rest, a prefill runs without one, too."""
    from sglang.srt.model_executor.cuda_graph_config import Backend
    from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
    from sglang.srt.model_executor.runner.prefill_cuda_graph_runner import PrefillCudaGraphRunner

    from sglang_parse.attention.spec_input import ParseVerifyInput, forward_mode_of

    layout = VerifyLayout.of(layouts)
    assert 4 < layout.num_rows < 8
    sizes = torch.tensor([part.num_rows for part in layouts])
    batch = ForwardBatch(
        forward_mode=forward_mode_of(layout),
        batch_size=2,
        input_ids=torch.zeros(layout.num_rows, dtype=torch.int64),
        req_pool_indices=torch.arange(2),
        seq_lens=sizes,
        seq_lens_sum=int(sizes.sum()),
        out_cache_loc=torch.zeros(layout.num_rows, dtype=torch.int64),
        extend_prefix_lens_cpu=[part.prefix_len for part in layouts],
        return_logprob=False,
        spec_info=ParseVerifyInput(layout=layout, custom_mask=None, select_index=sizes),
        capture_hidden_mode=CaptureHiddenMode.FULL,
    )
    runner = object.__new__(PrefillCudaGraphRunner)
    vars(runner).update(
        prefill_backend_name=Backend.BREAKABLE,
        capture_num_tokens=buckets,
        max_num_tokens=buckets[-1],
        capture_hidden_mode=CaptureHiddenMode.FULL,
        enable_lora=False,
        has_mha_companion_layers=False,
        max_context_size=None,
        max_seq_len=None,
        _capture_chunked_prefix=False,
        _captured_attn_metadata_max_bs=None,
        _is_full_backend=False,
        _backend_can_run_prefill_cuda_graph=None,
    )
    assert runner.can_run_graph(batch) is replays


@pytest.mark.parametrize(
    ("backends", "flags", "layout"),
    [
        (
            ("triton", "--decode-attention-backend", "fa3"),
            ("--parse-judge", "likelihood"),
            "causal",
        ),
        (("flashmla",), ("--parse-judge", "likelihood"), "causal"),
        (("triton",), ("--parse-verification", "token", "--parse-layout", "alias"), "alias"),
    ],
)
def test_any_attention_backend_where_no_question_is_asked(
    pair: tuple[Path, Path], backends: tuple[str, ...], flags: tuple[str, ...], layout: str
):
    from sglang.srt.arg_groups.overrides import resolved_view

    from sglang_parse.core.config import ParseConfig
    from sglang_parse.startup.checks import pass_layout
    from sglang_parse.startup.models import read_pair

    args = launch(pair, "--device", "cuda", *flags, "--attention-backend", *backends, ask=False)
    view = resolved_view(args)
    chosen, _ = pass_layout(view, ParseConfig.from_env(), read_pair(view)[0], 1)
    assert chosen == layout


LONG = 131_072
"""Tokens before a pass: above the 8,192 from which SGLang expands their latent KV."""


def expanded(rows: int, backend: str, *, is_pass: bool) -> int:
    """Latent entries whose keys and values a layer computes in a forward of so many rows."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers

    from sglang_parse.attention.spec_input import ParseVerifyInput, forward_mode_of

    part = RequestLayout(prefix_len=LONG, num_draft_rows=rows)
    layout = VerifyLayout.of([part])
    given = ParseVerifyInput(layout=layout, custom_mask=None, select_index=torch.tensor([0]))
    batch = SimpleNamespace(
        forward_mode=forward_mode_of(layout),
        extend_prefix_lens_cpu=[LONG],
        seq_lens_cpu=[part.kv_len],
        spec_info=given if is_pass else None,
        attn_cp_metadata=None,
        get_max_chunk_capacity=lambda: 131_072,
    )
    layer = SimpleNamespace(
        flashinfer_mla_disable_ragged=False,
        qk_rope_head_dim=64,
        chunked_prefix_cache_threshold=8192,
        disable_chunked_prefix_cache=False,
        kv_cache_dtype="auto",
    )
    method = handlers.AttentionBackendRegistry.get_handler(backend)(layer, batch)
    return part.kv_len if method.name.startswith("MHA") else 0


def test_passes_over_latent_kv_do_not_expand_it(monkeypatch: pytest.MonkeyPatch):
    """On every backend that SGLang chooses a way of latent attention for, but those that the start
    names; a prefill's chunk still does where SGLang wants it."""
    from sglang.srt.models.deepseek_common import attention_backend_handler as handlers
    from sglang.srt.plugins import load_plugins

    from sglang_parse.attention.support import EXPANDING

    load_plugins()
    others = {"ascend", "dsa", "nsa", "torch_native"}  # NPUs, sparse attention, the CPU's
    names = handlers.AttentionBackendRegistry._handlers.keys() - others
    assert {*EXPANDING} < names
    deterministic = SimpleNamespace(enable_deterministic_inference=False)
    for name, value in (
        ("get_exec", SimpleNamespace(deterministic=deterministic)),
        ("get_platform", SimpleNamespace(is_sm100_or_sm110=False)),
        ("get_parallel", SimpleNamespace(dcp_enabled=False)),
        ("is_cp_active", False),
    ):
        monkeypatch.setattr(handlers, name, lambda *_, value=value: value)
    for name in names:
        assert bool(expanded(100, name, is_pass=True)) is (name in EXPANDING), name
        assert bool(expanded(4096, name, is_pass=False)) is (name != "triton"), name


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return TINY["deepseek-v2"].pair(tmp_path_factory.mktemp("latent"))[0]


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        (("flashinfer",), ""),
        (("fa4",), "Fix: use flashinfer"),
        (("trtllm_mla",), "Fix: use flashinfer, or --disable-chunked-prefix-cache"),
        (("trtllm_mla", "--disable-chunked-prefix-cache"), ""),
    ],
)
def test_the_start_says_which_backend_expands(
    latent: Path, flags: tuple[str, ...], fix: str, monkeypatch: pytest.MonkeyPatch
):
    from sglang.srt.arg_groups.overrides import resolved_view

    from sglang_parse.startup import latent as start
    from sglang_parse.startup.models import read_pair

    shown: list[str] = []
    view = resolved_view(launch((latent, None), "--parse-verification", "token", ask=False))
    monkeypatch.setattr(start.logger, "warning", lambda text, *words: shown.append(text % words))
    args = SimpleNamespace(
        attention_backend=flags[0],
        prefill_attention_backend=None,
        disable_chunked_prefix_cache=len(flags) > 1,
    )
    start.warn_of_expansion(args, read_pair(view)[0])
    assert len(shown) == bool(fix)
    assert all(line.endswith(fix) for line in shown)
