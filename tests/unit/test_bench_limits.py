"""Bytes and arithmetic of the stages: counted by hand, and against the mask and real modules."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from sglang_parse.client.records import BenchError
from sglang_parse.core.layout import RequestLayout
from sglang_parse.core.mask import dense_mask
from sglang_parse.limit import device
from sglang_parse.limit.device import Card, Work
from sglang_parse.limit.shape import Shape, shape_names

pytestmark = pytest.mark.unit

LAYOUT = RequestLayout(prefix_len=7, num_draft_rows=5, visible_lens=(3, 5), question_lens=(2, 4))


def test_the_pair_has_the_sizes_in_its_names():
    assert Shape.read("qwen3_32b").num_weights == pytest.approx(32.8e9, rel=0.01)
    assert Shape.read("qwen3_1_7b").num_weights == pytest.approx(1.72e9, rel=0.01)
    target, draft = Shape.read("qwen3_32b"), Shape.read("qwen3_1_7b")
    assert target.vocab == draft.vocab == 151_936


def test_every_shape_is_one():
    dense = {"qwen3_32b", "qwen3_1_7b", "tiny_target", "tiny_draft"}
    assert dense | {"qwen3_235b_a22b_fp8"} == set(shape_names())
    assert all(Shape.read(name).num_weights > 0 for name in shape_names())


@pytest.mark.parametrize("name", ["tiny_target", "tiny_draft"])
def test_weights_are_those_of_the_real_model(name: str):
    transformers = pytest.importorskip("transformers")
    shape = Shape.read(name)
    with torch.device("meta"):
        config = transformers.AutoConfig.from_pretrained(shape.config.parent)
        model = transformers.AutoModelForCausalLM.from_config(config)
    matrices = {p for p in model.parameters() if p.dim() == 2}
    assert shape.num_weights == sum(p.numel() for p in matrices)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        (None, "is no shape; use qwen3_1_7b, .*, or a folder with a config.json"),
        ({"hidden_size": 8}, "has no 'num_attention_heads'"),
        ({"num_experts": 8, "mlp_only_layers": [0]}, "mixes experts with other MLPs"),
        ({"num_experts": 8}, "has no 'moe_intermediate_size'; use the config of a decoder"),
        ({"quantization_config": {"quant_method": "awq"}}, "weights in 'awq'; use fp8"),
    ],
)
def test_other_files_are_refused_as_shapes(tmp_path: Path, content: dict | None, message: str):
    if content is not None:
        if "hidden_size" not in content:
            content |= json.loads(Shape.read("tiny_draft").config.read_text())
        (tmp_path / "config.json").write_text(json.dumps(content))
    with pytest.raises(BenchError, match=message):
        Shape.read(str(tmp_path))


def test_attended_pairs_are_the_ones_of_the_mask():
    assert device.attended_pairs(LAYOUT) == int(dense_mask(LAYOUT).sum())


def test_the_mixture_of_experts_has_the_sizes_in_its_name():
    """A step of one token loads the 22 billion weights it multiplies, many tokens load all."""
    shape = Shape.read("qwen3_235b_a22b_fp8")
    active = shape.token_weights + shape.num_weights - shape.layer_weights
    assert shape.num_weights == pytest.approx(235e9, rel=0.01)
    assert active == pytest.approx(22e9, rel=0.02)
    assert shape.vocab == Shape.read("qwen3_1_7b").vocab
    assert shape.touched_weights(1) == pytest.approx(shape.token_weights)
    assert shape.touched_weights(1000) == pytest.approx(shape.layer_weights)
    step = device.step_work(shape, num_requests=1, context_len=0, item_bytes=2)
    assert step.bytes == pytest.approx(shape.token_weights + 2 * shape.head_weights)
    assert step.flops == 2 * (shape.token_weights + shape.head_weights)


def test_experts_by_hand():
    """Half of four experts idle for one token, a quarter for two."""
    dense = replace(small(), intermediate=5)
    mixed = replace(dense, experts=4, experts_per_token=2)
    others = dense.layer_weights - 30 + 2 * 4  # and the router
    assert mixed.layer_weights == others + 4 * 30
    assert (mixed.token_weights, mixed.touched_weights(2)) == (others + 2 * 30, others + 3 * 30)


def small() -> Shape:
    """A layer of 2 x 4 numbers in each projection, an MLP of 3 x 2 x 5, 7 words."""
    return Shape("small", Path(), 1, 2, 2, 1, 2, 5, 7, tied=False)


def test_a_decode_step_by_hand():
    # Queries and output 2 x 4 each, keys and values 2 x 2 each; MLP 3 x 2 x 5; head 2 x 7.
    assert small().layer_weights == 8 + 8 + 4 + 4 + 30
    work = device.step_work(small(), num_requests=3, context_len=10, item_bytes=2)
    assert work.bytes == 2 * (54 + 14 + 3 * 10 * 4)
    assert work.flops == 2 * (54 + 14) * 3 + 4 * 2 * 2 * 10 * 3


def test_a_verify_pass_loads_the_weights_once_and_multiplies_them_with_every_row():
    one, three = (device.verify_work(small(), LAYOUT, n, 5, item_bytes=2) for n in (1, 3))
    assert one.bytes == 2 * (54 + 14 + 18 * 4)
    assert three.bytes - one.bytes == 2 * 2 * 18 * 4
    pairs = int(dense_mask(LAYOUT).sum())
    assert one.flops == 2 * (54 * 11 + 14 * 5) + 4 * 2 * 2 * pairs
    assert three.flops == 3 * one.flops


def test_the_longer_of_the_two_is_the_bound():
    card = Card(bandwidth=100.0, rate=1000.0)
    memory = device.bound("step", 1, Work(bytes=10, flops=50), card, measured_ms=200)
    assert (memory.by, memory.floor_ms, memory.fraction) == ("memory", 100, 0.5)
    arithmetic = device.bound("pass", 1, Work(bytes=10, flops=500), card, measured_ms=500)
    assert (arithmetic.by, arithmetic.floor_ms, arithmetic.fraction) == ("arithmetic", 500, 1)


def test_the_card_of_this_machine(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(device, "MIN_SECONDS", 0.01)
    card = device.measure_card("cpu", torch.float32)
    assert 1e8 < card.bandwidth < 1e13
    assert 1e8 < card.rate < 1e15
