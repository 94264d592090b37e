"""Shapes of the speed benchmark: their sizes, and files that are no shape."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from sglang_parse.client.records import BenchError
from sglang_parse.shapes.shape import Shape, shape_names

pytestmark = pytest.mark.unit


def test_shapes_have_the_sizes_in_their_names():
    assert Shape.read("qwen3_32b").num_bytes(1) == pytest.approx(32.8e9, rel=0.01)
    assert Shape.read("qwen3_1_7b").num_bytes(1) == pytest.approx(1.72e9, rel=0.01)
    assert Shape.read("qwen3_235b_a22b_fp8").num_bytes(1) == pytest.approx(235e9, rel=0.01)
    assert Shape.read("qwen3_14b").num_bytes(1) == pytest.approx(14.8e9, rel=0.01)
    assert Shape.read("qwen3_8b").num_bytes(1) == pytest.approx(8.19e9, rel=0.01)
    assert Shape.read("qwen3_4b").num_bytes(1) == pytest.approx(4.02e9, rel=0.01)
    assert Shape.read("qwen3_0_6b").num_bytes(1) == pytest.approx(0.6e9, rel=0.01)
    vocabularies = {
        Shape.read(name).vocab_size for name in shape_names() if name.startswith("qwen3")
    }
    assert vocabularies == {151_936}


def test_every_shape_is_one():
    others = {"qwen3_32b", "qwen3_14b", "qwen3_0_6b", "qwen3_1_7b", "tiny_target", "tiny_draft"}
    others |= {"qwen3_4b", "qwen3_8b"}
    assert others | {"qwen3_235b_a22b_fp8"} == set(shape_names())
    assert all(Shape.read(name).num_bytes(1) > 0 for name in shape_names())


def test_bytes_by_hand():
    """A quantized weight is a byte, whatever the dtype; embedding and LM head are not quantized. KV
    is 94 layers of 4 heads."""
    dense, quantized = Shape.read("tiny_draft"), Shape.read("qwen3_235b_a22b_fp8")
    assert dense.num_bytes(4) == 4 * (4 * 64 * 64 + 3 * 64 * 128 + 64 * 1024)
    assert quantized.num_bytes(2) == quantized.num_bytes(1) + 2 * 4096 * 151936
    assert quantized.kv_per_token == 2 * 94 * 4 * 128


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "gives no shape .*No such file.*; use qwen3_0_6b, .*, or a decoder's config.json"),
        ({"hidden_size": 8}, "gives no shape .*; use qwen3_0_6b"),
        ({"model_type": "bert"}, "gives no shape .*intermediate_size.*; use qwen3_0_6b"),
    ],
)
def test_other_files_are_refused_as_shapes(tmp_path: Path, content: dict | None, message: str):
    if content is not None:
        (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(BenchError, match=message):
        Shape.read(str(tmp_path))
