"""A causal verify pass: a chunk of a prefill to SGLang, but for its logits."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from sglang_parse.core.layout import RequestLayout, VerifyLayout
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
