"""Families that only a GPU runs, behind ``--parse-unproved-families``: what was read of them.

No GPU: what starts, and what SGLang's own code plans for a pass.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from sglang_parse.core.layout import RequestLayout, VerifyLayout
from support.launch import DSA, V4, launch, other_model
from support.random_pair import PairShape, make_pair

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("clean_environment")]
SERVE = ("--parse-unproved-families", "serve")
TOKEN = ("--parse-verification", "token")
BACKENDS = {"sparse": "dsa", "glm": "dsa", "chunks": "fa3"}
CHUNK = 8
PASS = VerifyLayout.of([RequestLayout(13, 9), RequestLayout(3, 2), RequestLayout(30, 1)])
"""One of its drafts crosses the end of a chunk; the last request only decodes."""


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), PairShape(num_layers=1, max_positions=512))


@pytest.fixture(scope="module")
def models(
    pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory
) -> dict[str, Path]:
    """By a short name; without weights of their classes."""
    folder = tmp_path_factory.mktemp("models")
    text = json.loads((pair[0] / "config.json").read_text())
    del text["architectures"], text["model_type"]
    tower = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = transformers.Llama4Config(text_config=text, vision_config=tower).to_dict()
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "sparse": (("deepseek_v32", "DeepseekV32ForCausalLM"), DSA),
        "glm": (("glm_moe_dsa", "GlmMoeDsaForCausalLM"), DSA),
        "pooled": (("glm_moe_dsa", "GlmMoeDsaForCausalLM"), DSA | {"index_kpool": 4}),
        "v4": (("deepseek_v4", "DeepseekV4ForCausalLM"), V4),
        "chunks": (("llama4", "Llama4ForConditionalGeneration"), llama),
    }
    return {
        name: other_model(pair[0], folder / name, kind, **config | named(*kind))
        for name, (kind, config) in kinds.items()
    }


def named(model_type: str, architecture: str) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture]}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang asks for the device's capability while it resolves settings of sparse attention."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))


def start(target: Path, *flags: str, draft: Path | None = None, ask: bool = False) -> Any:
    """The settings that a server on a GPU would have."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(launch((target, draft), "--device", "cuda", *flags, ask=ask))


@pytest.mark.parametrize("name", BACKENDS)
def test_refused_without_the_flag(models: dict[str, Path], name: str):
    match = "which PARSE was not seen to serve.*Fix: .*to try it, --parse-unproved-families serve"
    with pytest.raises(Exception, match=match):
        start(models[name], *TOKEN, "--attention-backend", BACKENDS[name])


@pytest.mark.parametrize("judge", [TOKEN, ("--parse-judge", "likelihood")], ids="-".join)
@pytest.mark.parametrize("name", BACKENDS)
def test_started_with_the_flag(
    models: dict[str, Path], name: str, judge: tuple[str, ...], caplog: pytest.LogCaptureFixture
):
    from sglang_parse.core.config import ParseConfig
    from sglang_parse.startup.checks import pass_layout
    from sglang_parse.startup.models import read_pair

    with caplog.at_level(logging.WARNING):
        view = start(models[name], *SERVE, *judge, "--attention-backend", BACKENDS[name])
    target, _ = read_pair(view)
    assert pass_layout(view, ParseConfig.from_env(), target, 1)[0] == "causal"
    assert view.page_size == (64 if BACKENDS[name] == "dsa" else 1)
    assert target.is_hybrid_swa == (name == "chunks")
    warnings = [record.getMessage() for record in caplog.records]
    assert sum("never run: compare greedy answers" in text for text in warnings) == 1


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("chunks", ("--attention-backend", "triton"), "'triton': .*in chunks.*Fix: use.* fa3"),
        ("sparse", ("--attention-backend", "flashmla"), "'flashmla': .*Fix: use.* dsa alone"),
        (
            "chunks",
            ("--attention-backend", "fa3", "--decode-attention-backend", "triton"),
            "Fix: use --attention-backend fa3 alone",
        ),
        ("sparse", ("--attention-backend", "dsa", "--enable-hisparse"), "hisparse is True.*leave"),
        ("pooled", ("--attention-backend", "dsa"), "index_kpool of .* is 4: .*start it without"),
        ("v4", (), "DeepSeek V4.*whose compressed KV.*Fix: use a model that"),
    ],
)
def test_refused_also_with_the_flag(
    models: dict[str, Path], name: str, flags: tuple[str, ...], message: str
):
    with pytest.raises(Exception, match=message):
        start(models[name], *SERVE, *TOKEN, *flags)


def test_neither_questions_nor_drafts(models: dict[str, Path], pair: tuple[Path, Path]):
    backend = ("--attention-backend", "fa3")
    with pytest.raises(Exception, match="questions, .*with a target of attention in chunks"):
        start(models["chunks"], *SERVE, *backend, ask=True)
    with pytest.raises(Exception, match="--speculative-draft-model-path.*never run.*draft-url"):
        start(models["chunks"], *SERVE, *TOKEN, *backend, draft=pair[1])
    with pytest.raises(Exception, match="--speculative-draft-model-path.*in chunks, which PARSE"):
        start(pair[0], *SERVE, *TOKEN, *backend, draft=models["chunks"])


def batch_of(layout: VerifyLayout, mode: str, slots: torch.Tensor) -> Any:
    """A pass in SGLang's terms. ``slots``: [requests, columns]."""
    from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode

    from sglang_parse.attention.spec_input import ParseVerifyInput

    rows = torch.tensor([request.num_rows for request in layout.requests])
    lengths = torch.tensor([request.kv_len for request in layout.requests])
    prefixes = [request.prefix_len for request in layout.requests]
    return ForwardBatch(
        forward_mode=ForwardMode[mode],
        batch_size=len(rows),
        input_ids=torch.zeros(layout.num_rows, dtype=torch.int64),
        req_pool_indices=torch.arange(len(slots)),
        seq_lens=lengths,
        seq_lens_cpu=lengths,
        seq_lens_sum=int(lengths.sum()),
        out_cache_loc=torch.zeros(layout.num_rows, dtype=torch.int64),
        extend_seq_lens=rows,
        extend_seq_lens_cpu=rows.tolist(),
        extend_prefix_lens=torch.tensor(prefixes),
        extend_prefix_lens_cpu=prefixes,
        spec_info=ParseVerifyInput(layout=layout, custom_mask=None, select_index=rows),
    )


def planned_chunks(mode: str) -> Any:
    """What SGLang's FA3 plans for layers with attention in chunks, and the pass's slots."""
    from sglang.srt.layers.attention.local_attention import LocalAttentionMetadataBuilder

    from sglang_parse.attention.flash_attention import ParseFlashAttentionBackend

    slots = torch.randperm(3 * 64, generator=torch.Generator().manual_seed(0)).view(3, 64).int()
    backend = object.__new__(ParseFlashAttentionBackend)
    builder = LocalAttentionMetadataBuilder(
        attention_chunk_size=CHUNK,
        page_size=1,
        max_context_len=64,
        device=torch.device("cpu"),
        swa_translate=None,
    )
    vars(backend).update(
        **{"device": "cpu", "page_size": 1, "topk": 1, "is_prefill_aware_swa": False},
        **{"use_sliding_window_kv_pool": False, "_kv_shard_pool": None, "max_context_len": 64},
        local_attn_builder=builder,
        req_to_token_pool=SimpleNamespace(req_to_token=slots),
        kv_index_translator=SimpleNamespace(is_translating=False),
    )
    backend.init_forward_metadata(batch_of(PASS, mode, slots))
    return backend.forward_metadata.local_attn_metadata, slots


def test_a_row_sees_its_chunk():
    """Under the mode of a causal pass, and under no other."""
    from sglang_parse.attention.spec_input import forward_mode_of

    plan, slots = planned_chunks(forward_mode_of(PASS).name)
    starts, lengths = plan.local_query_start_loc.tolist(), plan.local_seqused_k.tolist()
    seen = []
    for chunk, (first, end) in enumerate(zip(starts[:-1], starts[1:], strict=True)):
        for row in range(first, end):  # causal: the last row sees all columns
            num_seen = lengths[chunk] - (end - 1 - row)
            seen.append(plan.local_block_table[chunk, :num_seen].tolist())
    expected = [
        slots[index, position // CHUNK * CHUNK : position + 1].tolist()
        for index, request in enumerate(PASS.requests)
        for position in range(request.prefix_len, request.kv_len)
    ]
    assert seen == expected
    assert planned_chunks("DRAFT_EXTEND_V2")[0] is None


def test_the_indexer_of_sparse_attention_scores_what_a_row_may_see():
    """Under the mode of a causal pass, and under no other; nothing of an MTP head is looked for."""
    from sglang.srt.layers.attention.dsa_backend import DeepseekSparseAttnBackend
    from sglang.srt.layers.attention.index_topk_share import IndexTopKShareState

    from sglang_parse.attention.spec_input import forward_mode_of

    slots = torch.zeros(3, 64, dtype=torch.int32)
    backend = object.__new__(DeepseekSparseAttnBackend)
    backend.device, backend.speculative_num_draft_tokens = "cpu", None
    batch = batch_of(PASS, forward_mode_of(PASS).name, slots)
    (starts, ends), requests = backend._cal_indexer_k_start_end(batch)
    offsets = [0, *torch.tensor([one.kv_len for one in PASS.requests]).cumsum(0).tolist()]
    places = [
        (index, offsets[index], offsets[index] + position + 1)
        for index, request in enumerate(PASS.requests)
        for position in range(request.prefix_len, request.kv_len)
    ]
    found = zip(requests.tolist(), starts.tolist(), ends.tolist(), strict=True)
    assert list(found) == places
    share = IndexTopKShareState(batch, None)
    assert not share.should_publish
    assert backend._cal_indexer_k_start_end(batch_of(PASS, "DRAFT_EXTEND_V2", slots)) == (None, None)
