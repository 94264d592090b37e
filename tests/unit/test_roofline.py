"""What ``sglang-parse roofline`` computes, against what two GPUs took."""

import argparse
import json
import re
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from sglang_parse import cli
from sglang_parse.client.records import BenchError
from sglang_parse.core.block import ONE_TOKEN, BlockKind, Masks
from sglang_parse.roofline.forwards import BLOCKS, Workload
from sglang_parse.roofline.rounds import LOSSES, THIS, best_rate
from sglang_parse.roofline.rounds import MEASURED as MEASURED_BUILD
from sglang_parse.roofline.run import costs, losses, speedups
from sglang_parse.roofline.settings import RooflineSettings
from sglang_parse.shapes.mixer import Mixer
from sglang_parse.shapes.shape import Shape

pytestmark = pytest.mark.unit

SHAPES = Path(__file__).resolve().parents[2] / "sglang_parse" / "shapes" / "configs"
EVERY, LAST = BLOCKS


def settings(*words: str) -> RooflineSettings:
    parser = argparse.ArgumentParser()
    RooflineSettings.add_arguments(parser)
    return RooflineSettings.read(parser.parse_args(words))


H100, H200 = settings(), settings("--target", "32b", "--gpu", "h200")


def rate(load: Workload, ms: float) -> float:
    return 1e3 * load.num_reqs * load.settings.output_len / ms


def step(chosen: RooflineSettings, num_reqs: int, model: str = "target") -> float:
    return Workload(chosen, num_reqs).forward(getattr(chosen, model), 1).ms


def plain(chosen: RooflineSettings, num_reqs: int) -> float:
    load = Workload(chosen, num_reqs)
    return rate(load, load.plain())


def eagle3(num_reqs: int) -> float:
    load = Workload(H100, num_reqs)
    return rate(load, load.eagle3(3.0))


# On 26 November 2026, 128 tokens in, 257 out: 14B + 0.6B on an H100, 32B + 0.6B on an H200.
MEASURED = {
    "H100: ms of a draft step, 1 request": (1.61, step(H100, 1, "draft")),
    "H100: ms of a draft step, 8 requests": (1.94, step(H100, 8, "draft")),
    "H100: ms of a decode step": (11.5, step(H100, 1)),
    "H100: ms of a verify pass of 129 rows": (18.9, Workload(H100, 1).verify_in_pieces(128).ms),
    "H100: ms of a prefill of 128": (14.7, Workload(H100, 1).prefill(H100.target).ms),
    "H100: plain tokens/s, 1 request": (85.9, plain(H100, 1)),
    "H100: plain tokens/s, 8 requests": (654, plain(H100, 8)),
    "H100: plain tokens/s, 16 requests": (1263, plain(H100, 16)),
    "H100: EAGLE-3 on Triton, 1 request": (210, eagle3(1)),
    "H100: EAGLE-3 on Triton, 8 requests": (1390, eagle3(8)),
    "H100: EAGLE-3 on Triton, 16 requests": (2381, eagle3(16)),
    "H100: one token per forward, all accepted": (
        533,
        rate(Workload(H100, 1), Workload(H100, 1).parse(1.0, (ONE_TOKEN,))[0]),
    ),
    "H200: ms of a draft step": (1.8, step(H200, 1, "draft")),
    "H200: ms of a decode step": (18.8, step(H200, 1)),
    "H200: ms of a verify pass of 961 rows": (97.8, Workload(H200, 1).verify_in_pieces(960).ms),
    "H200: plain tokens/s, 1 request": (53.3, plain(H200, 1)),
    "H200: plain tokens/s, 8 requests": (403, plain(H200, 8)),
}


@pytest.mark.parametrize("name", MEASURED)
def test_computed_is_measured(name: str):
    measured, computed = MEASURED[name]
    assert computed == pytest.approx(measured, rel=0.18)


H200_14B = settings("--gpu", "h200")
# Mean tokens/s of three H200, 27 and 28 November 2026 (docs/gpus.md): all accepted, and refused
# every 32, at 1, 8 and 16; Triton, 4.9 tokens a block.
RATES = {1: (1258, 521), 8: (5065, 2373), 16: (6455, 3303)}
STOCK = {1: (121, 279), 8: (923, 1770), 16: (1743, 2886)}
"""The same GPUs: plain, and EAGLE3 at accept length 3."""


@pytest.mark.parametrize("num_reqs", RATES)
def test_rounds_are_as_measured(num_reqs: int):
    """Of the build that was measured; what stock SGLang did beside it, too."""
    load = Workload(H200_14B, num_reqs)
    found = [best_rate(load, MEASURED_BUILD, every)[0] for every in (0, 32)]
    assert found == pytest.approx(RATES[num_reqs], rel=0.1)
    found = [rate(load, ms) for ms in (load.plain(), load.eagle3(3.0))]
    assert found == pytest.approx(STOCK[num_reqs], rel=0.1)


def test_every_loss_costs_something():
    """And masks after every row, graphs of any rows and a counted first block bring something."""
    load = Workload(H200_14B, 1)
    rate, length = best_rate(load, THIS, 32)
    assert rate > 1.1 * best_rate(load, MEASURED_BUILD, 32)[0]
    for name, build in LOSSES.items():
        faster = best_rate(load, build, 0)[0] / best_rate(load, THIS, 0)[0]
        assert 1 <= faster < 1.25, name
        assert best_rate(load, build, 32, [length])[0] > 0.98 * rate, name


@pytest.mark.parametrize(
    ("name", "sizes"),
    [
        ("1.7b", (28, 2048, 6144, 16, True)),
        ("4b", (36, 2560, 9728, 32, True)),
        ("8b", (36, 4096, 12288, 32, False)),
        ("32b", (64, 5120, 25600, 64, False)),
    ],
)
def test_a_config_gives_the_shape_of_its_name(name: str, sizes: tuple):
    folder = SHAPES / f"qwen3_{name.replace('.', '_')}"
    layers, hidden, intermediate, heads, is_tied = sizes
    mixer = Mixer(weights=2 * hidden * 128 * (heads + 8), kv=2 * 8 * 128)
    shape = Shape(layers, hidden, intermediate, mixer, 151936, is_tied, dense_size=intermediate)
    assert Shape.read(name) == shape
    assert Shape.read(str(folder)) == Shape.read(str(folder / "config.json")) == shape


def test_named_shapes_have_as_many_weights_as_their_names_say():
    for name in ("0.6b", "1.7b", "4b", "8b", "14b", "32b", "235b-a22b-fp8"):
        billions = float(name.partition("b")[0])
        assert Shape.read(name).num_bytes(1) / 1e9 == pytest.approx(billions, rel=0.25)
    assert Shape.read("14b").kv_per_token == 80 * 1024


def test_heads_that_a_config_leaves_out(tmp_path: Path):
    names = ("num_hidden_layers", "hidden_size", "intermediate_size", "num_attention_heads")
    config = {**dict(zip(names, (2, 64, 128, 4), strict=True)), "vocab_size": 100}
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = Shape.read(str(tmp_path))
    assert shape.mixer.kv == 2 * 4 * 16
    assert shape.num_bytes(1) == 2 * (4 * 64 * 64 + 3 * 64 * 128) + 2 * 64 * 100


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("--target", "15b"), "'15b' gives no shape .*No such file.*; use qwen3_0_6b, qwen3_14b, "),
        (("--target", "235b-a22b-fp8"), "take 239 GB and --gpu h100 has 80"),
        (("--accept-length", "5"), "--accept-length is 5; use 1 to 4, or more --head-steps"),
        (("--head-steps", "17"), "--head-steps is 17; use 1 to 16"),
        (("--draft", str(SHAPES.parent / "shape.py")), "gives no shape .*JSONDecodeError"),
        (("--gpu", "rtx4090"), "take 32 GB and --gpu rtx4090 has 24; use a larger one"),
        (("--concurrency", "1,999"), "take 138 GB and --gpu h100 has 80; use .* fewer requests"),
        (("--acceptance", ""), "--concurrency and --acceptance need numbers"),
    ],
)
def test_bad_settings_are_refused(words: tuple[str, ...], message: str):
    with pytest.raises(BenchError, match=message):
        settings(*words)


def test_tokens_of_a_block():
    """The demo draft's 4.9 and 3.1 (docs/choosing.md)."""
    load = Workload(H100, 1)
    assert load.tokens_per_forward(ONE_TOKEN) == 1
    assert load.tokens_per_forward(EVERY) == pytest.approx(4.9, rel=0.07)
    assert load.tokens_per_forward(LAST) == pytest.approx(3.1, rel=0.07)
    for chance, tokens in (("0", 1), ("1", 8)):
        sure = Workload(settings("--block-acceptance", chance), 1)
        assert [sure.tokens_per_forward(layout) for layout in BLOCKS] == [tokens, tokens]


def test_a_block_costs_little_more_than_a_step_until_its_rows_count():
    def ratio(num_reqs: int, layout: BlockKind) -> float:
        load = Workload(H100, num_reqs)
        return load.draft_forward(layout).ms / load.draft_forward(ONE_TOKEN).ms

    assert LAST.masks is Masks.LAST
    assert 1 < ratio(1, LAST) < ratio(1, EVERY) < 1.25
    assert ratio(32, EVERY) > 2 > 1.5 > ratio(32, LAST)


def test_drafts_are_as_long_as_they_are_good():
    load = Workload(H100, 1)
    lengths = [load.parse(chance, BLOCKS)[1] for chance in (0.5, 0.9, 0.97, 1.0)]
    assert lengths == sorted(lengths)
    assert (lengths[0], lengths[-1]) == (4, 128)
    # Nothing accepted: each token costs a draft and a pass.
    ms, length = load.parse(0.0, ())
    assert (length, ms) == (4, pytest.approx(256 * load.verify(4).ms, rel=0.01))


def test_a_mixture_reads_the_experts_that_its_rows_choose():
    """235B in FP8, 22B of them for a token; on four GPUs."""
    load = Workload(settings("--target", "235b-a22b-fp8", "--gpu", "h200", "--tp-size", "4"), 1)
    target = load.settings.target
    step, prefill = (load.forward(target, count) for count in (1, 256))
    assert step.num_bytes[0] / 1e9 == pytest.approx(22, rel=0.05)
    assert prefill.num_bytes[0] / 1e9 == pytest.approx(235, rel=0.02)
    assert step.flops == prefill.flops / 256
    alone = replace(step, tp_size=1)
    assert alone.parts["weights"] == pytest.approx(4 * step.parts["weights"])
    assert step.parts["kernels"] > alone.parts["kernels"]


def test_heads_of_target_and_draft():
    """A pass in pieces costs what keeps PARSE below stock EAGLE3; a head of the draft lies between
    one token per forward and blocks."""
    for num_reqs in (1, 16):
        load = Workload(H100, num_reqs)
        assert load.eagle3(3.0) < load.eagle3(3.0, in_pieces=True) < load.plain()
        one, head, blocks = (
            load.parse(0.97, *way)[0] for way in (((ONE_TOKEN,),), ((), 3.0), (BLOCKS,))
        )
        assert blocks < head < one
    # More steps cost more, and pay where a judge accepts more of them.
    longer = Workload(replace(H100, head_steps=7), 1)
    assert longer.eagle3(4.5) < Workload(H100, 1).eagle3(3.0) < longer.eagle3(3.0)
    # Its steps read one layer and the head's own words.
    assert load.heads(H100.draft) < load.draft_forward(ONE_TOKEN).ms


def test_the_tables():
    forwards, found = (grid.rows for (grid,) in (*costs(H100).values(), *speedups(H100).values()))
    assert [row[:2] for row in forwards[:2]] == [
        ["target step", "1"],
        ["target prefill", "128"],
    ]
    assert [row[5] for row in forwards] == ["weights", "host", "weights"] + 3 * ["kernels"]
    assert len(found) == 3 * 4
    for row in found:
        figures = (float(re.match(r"[\d.]+", cell)[0]) for cell in row[3:])
        one, blocks, text, head, in_pieces, one_graph, mtp = figures
        assert one < head < blocks < text
        assert in_pieces < mtp <= one_graph  # its steps read the target's whole vocabulary


def test_what_each_loss_costs():
    """The last two concurrencies share a table with the first."""
    ((grid,),) = losses(settings("--gpu", "h200", "--concurrency", "1")).values()
    assert grid.headings == ["without", "all accepted, 1", "every 32, 1"]
    (name, *built), *rest = grid.rows
    assert name == "as it is"
    assert all(re.fullmatch(r"[\d.]+x, [\d.]+x", cell) for cell in built)
    assert [row[0] for row in rest] == [*LOSSES]
    assert all(re.fullmatch(r"[+-]\d+%", cell) for row in rest for cell in row[1:])


def test_the_command_needs_no_sglang_and_no_pytorch():
    code = "import sglang_parse.roofline.run, sys; print({'sglang', 'torch'} & {*sys.modules})"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"


def test_the_command(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]):
    monkeypatch.setattr(cli, "end_on_sigterm", lambda: None)
    assert cli.main(["roofline", "--target", "8b", "--gpu", "l40s", "--concurrency", "4"]) == 0
    assert "Forwards, 4 at a time" in capsys.readouterr().out
    assert cli.main(["roofline", "--target", "32b", "--gpu", "l40s"]) == 1
    assert "--gpu l40s has 48" in capsys.readouterr().err
