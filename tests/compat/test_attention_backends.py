"""The attention backends' verify passes in both layouts, against reference attention."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch

from sglang_parse.core.layout import RequestLayout, VerifyLayout
from support.paged_pass import BLOCKS, LAYOUT, ON_DEVICE, WINDOW, PagedPass

pytestmark = pytest.mark.compat

TESTS = Path(__file__).resolve().parents[1]


def torch_native(given: PagedPass, *, is_draft_worker: bool, window: int | None = None) -> Any:
    """The backend of a CPU, which has planned a pass."""
    from sglang_parse.attention.native import MaskedTorchNativeBackend

    runner = SimpleNamespace(
        device="cpu",
        is_draft_worker=is_draft_worker,
        sliding_window_size=window,
        model_config=SimpleNamespace(has_attention_sinks=False),
        req_to_token_pool=SimpleNamespace(req_to_token=given.table),
        token_to_kv_pool=given.pool,
    )
    backend = MaskedTorchNativeBackend(runner)
    backend.init_forward_metadata(given.forward_batch)
    return backend


@pytest.mark.parametrize("layout", [LAYOUT, BLOCKS, ON_DEVICE], ids=["pass", "blocks", "on-device"])
@pytest.mark.parametrize("is_masked", [True, False], ids=["mask", "alias"])
def test_torch_native(is_masked: bool, layout: VerifyLayout):
    given = PagedPass(is_masked, layout)
    backend = torch_native(given, is_draft_worker=False)
    given.check(backend.forward_extend(given.q, given.k, given.v, given.layer, given.forward_batch))


@pytest.mark.parametrize("is_masked", [True, False], ids=["mask", "alias"])
def test_torch_native_of_latent_kv(is_masked: bool):
    given = PagedPass(is_masked, is_latent=True)
    backend = torch_native(given, is_draft_worker=False)
    given.check(backend.forward_extend(given.q, given.k, given.v, given.layer, given.forward_batch))


CAUSAL = VerifyLayout.of([RequestLayout(length, 3) for length in (5, 3, 0, 9)])


@pytest.mark.parametrize("layout", [LAYOUT, CAUSAL], ids=["pass", "causal"])
def test_torch_native_with_windows(layout: VerifyLayout):
    given = PagedPass(is_masked=False, layout=layout, window=WINDOW)
    backend = torch_native(given, is_draft_worker=False, window=WINDOW)
    given.check(backend.forward_extend(given.q, given.k, given.v, given.layer, given.forward_batch))


def test_a_causal_pass_is_planned_as_a_prefill(monkeypatch: pytest.MonkeyPatch):
    """By the stock backend, which knows windows and pages."""
    from sglang.srt.layers.attention.triton_backend import TritonAttnBackend

    from sglang_parse.attention.triton import ParseTritonBackend

    def plan(backend: object, _batch: object) -> None:
        backend.forward_metadata = "stock"

    monkeypatch.setattr(TritonAttnBackend, "init_forward_metadata", plan)
    backend = object.__new__(ParseTritonBackend)
    backend.init_forward_metadata(PagedPass(is_masked=False, layout=CAUSAL).forward_batch)
    assert backend.forward_metadata == "stock"


@pytest.mark.nightly("tests/compat/test_attention_backends.py::test_torch_native")
def test_backends_of_gpus():
    """Triton's kernels in its interpreter, FlashInfer's and FlashAttention's plans."""
    done = subprocess.run(
        [sys.executable, "-m", "support.interpreted_backends"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert [line for line in done.stdout.splitlines() if line.endswith(" right")] == [
        "triton mask right",
        "triton mask of latent KV right",
        "triton alias right",
        "triton alias of latent KV right",
        "triton alias with windows right",
        "flashinfer mask right",
        "flashinfer alias right",
        "flashinfer alias of latent KV right",
        "flashinfer alias with windows right",
        "fa3 alias right",
        "fa3 alias of latent KV right",
        "fa3 alias with windows right",
        "triton graphs right",
        "triton graphs with windows right",
        "slots of long contexts right",
    ]


@pytest.mark.nightly("tests/compat/test_attention_backends.py::test_torch_native")
def test_split_kv_of_graphs():
    """Its kernels in Triton's interpreter: layouts, lengths, groups and head_dims."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "gpu" / "split_kv_cost.py"), "--tiny", "--check"],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right to") == 12
    assert "parts of contexts grow" in done.stdout
    assert "SGLang's kernel does the rest" in done.stdout


@pytest.mark.weekly("tests/compat/test_attention_backends.py::test_torch_native")
def test_split_kv_over_a_grid():
    """Head dimensions 64 to 256, groups 1 to 16, pages, 8-bit KV, 32k of context, two dtypes: each
    dimension and each group in both."""
    done = subprocess.run(
        [sys.executable, str(TESTS / "gpu" / "split_kv_cost.py"), *("--tiny", "--check", "--grid")],
        env=os.environ | {"TRITON_INTERPRET": "1", "PYTHONPATH": str(TESTS.parent)},
        capture_output=True,
        text=True,
        timeout=1500,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert done.stdout.count("right to") == 12 + 42


def test_parses_backends_replace_the_stock_ones():
    from sglang.srt.layers.attention.attention_registry import ATTENTION_BACKENDS

    from sglang_parse.attention import registry
    from sglang_parse.attention.support import SUPPORT, BackendError

    stock = dict(ATTENTION_BACKENDS)
    try:
        registry.register_backends()
        assert all(map(registry.is_registered, SUPPORT))
        registry.register_backends()
        assert all(map(registry.is_registered, SUPPORT))
        ATTENTION_BACKENDS["triton"] = stock["fa4"]
        assert not registry.is_registered("triton")
    finally:
        ATTENTION_BACKENDS.update(stock)
    runner = SimpleNamespace(attn_backend=SimpleNamespace())
    with pytest.raises(BackendError, match="attention backend is SimpleNamespace.*Fix"):
        registry.assert_used(runner, "mask")
    runner.kv_index_translator = SimpleNamespace(reads_are_translated=False)
    registry.assert_used(runner, "causal")
    runner.kv_index_translator.reads_are_translated = True
    with pytest.raises(BackendError, match="unified memory pool"):
        registry.assert_used(runner, "causal")


def test_a_target_whose_checkpoint_has_fp8_kv(monkeypatch: pytest.MonkeyPatch):
    """Refused when its backend is created; a draft may have it: it runs no verify passes."""
    from sglang_parse.attention import registry
    from sglang_parse.attention.support import BackendError

    make = registry._FACTORIES["fa3"]
    monkeypatch.setattr(registry.pkgutil, "resolve_name", lambda _: lambda runner: runner)
    runner = SimpleNamespace(is_draft_worker=False, kv_cache_dtype=torch.float8_e4m3fn)
    with pytest.raises(BackendError, match="--attention-backend fa3. Fix: use flashinfer"):
        make(runner)
    runner.is_draft_worker = True
    assert make(runner) is runner


@pytest.mark.parametrize("is_masked", [True, False], ids=["mask", "alias"])
@pytest.mark.parametrize("tile", [4096, None], ids=["deterministic", "usual"])
def test_flashinfer_splits_kv_as_in_prefills(is_masked: bool, tile: int | None):
    """With deterministic inference; otherwise a verdict depends on the rest of the batch."""
    from unittest import mock

    from sglang_parse.attention.flashinfer import ParseFlashInferBackend

    given = PagedPass(is_masked)
    updater, wrapper = mock.MagicMock(), mock.MagicMock()
    backend = object.__new__(ParseFlashInferBackend)
    vars(backend).update(
        indices_updater_prefill=updater,
        prefill_wrappers_verify=[wrapper],
        num_wrappers=1,
        prefill_split_tile_size=tile,
        req_to_token_pool=SimpleNamespace(req_to_token=given.table),
    )
    backend._plan(given.forward_batch)
    (call,) = [*updater.update.mock_calls, *wrapper.begin_forward.mock_calls]
    assert call.kwargs["fixed_split_size"] == tile


def test_a_mask_for_other_lengths_is_refused():
    from sglang_parse.attention.spec_input import ParseVerifyInput

    layout = VerifyLayout.of([RequestLayout(2, 2)])
    with pytest.raises(ValueError, match="mask has 3 entries, the layout needs 8"):
        ParseVerifyInput(
            layout=layout,
            custom_mask=torch.ones(3, dtype=torch.bool),
            select_index=torch.tensor([0]),
        )
