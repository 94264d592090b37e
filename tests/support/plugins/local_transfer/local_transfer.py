"""Test-only SGLang plugin: its Mooncake backend without a GPU.

The package ``mooncake`` beside this file takes the place of Mooncake's engine.
"""

from __future__ import annotations


def register() -> None:
    from sglang.srt.disaggregation.mooncake.conn import MooncakeKVSender

    # SGLang then copies the numbers of pages before it hands them over, as for other backends;
    # with this it would pin memory, which CUDA does.
    MooncakeKVSender.supports_host_tensor_indices = False
