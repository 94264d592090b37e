"""Patches: what they compute, and that a patch which is not in force stops the server."""

import ctypes

import pytest
import torch

pytestmark = pytest.mark.seams


def test_kv_copy_reads_everything_before_it_writes():
    from sglang_parse.patches.kv_copy_cpu import copy_all_layer_kv_cache

    buffers = [torch.arange(24, dtype=torch.float32).view(6, 4) * (i + 1) for i in range(3)]
    before = [b.clone() for b in buffers]
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    strides = torch.tensor([4 * ctypes.sizeof(ctypes.c_float)] * 3)
    target, source = torch.tensor([1, 2, 0, 5]), torch.tensor([0, 1, 2, 3])
    copy_all_layer_kv_cache(pointers, strides, target, source, 3, 256, {})
    for buffer, old in zip(buffers, before, strict=True):
        expected = old.clone()
        expected[[1, 2, 0]] = old[[0, 1, 2]]
        assert torch.equal(buffer, expected)


def test_every_needed_patch_is_in_force_after_sglang_loaded_its_plugins():
    from sglang.srt.plugins import load_plugins

    from sglang_parse import patches

    load_plugins()
    patches.assert_applied()


def test_a_patch_that_is_not_in_force_is_an_error(monkeypatch):
    from sglang_parse import patches
    from sglang_parse.patches.base import Patch

    broken = Patch("broken", register=lambda: None, is_applied=lambda: False)
    monkeypatch.setattr(patches, "PATCHES", (broken,))
    with pytest.raises(patches.PatchError, match="broken"):
        patches.assert_applied()


def test_register_is_idempotent():
    from sglang_parse.algorithm import register_algorithm
    from sglang_parse.plugin import register

    register()
    assert register_algorithm() is False


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator can pin memory")
def test_adapter_layers_can_be_built_without_an_accelerator():
    from sglang.srt.lora.layers import ColumnParallelLinearWithLoRA

    from sglang_parse.patches import lora_cpu

    lora_cpu.PATCH.register()
    layer = torch.nn.Linear(4, 4)
    layer.output_partition_sizes = [4]
    built = ColumnParallelLinearWithLoRA(layer, None)
    assert built.output_offset_cpu.tolist() == [0, 4]
