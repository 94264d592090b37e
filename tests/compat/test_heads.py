"""The launcher refuses verdict heads that do not fit: setting, value found, fix."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
import torch
from safetensors.numpy import load_file, save_file

from support.heads import HeadShape, write_head
from support.launch import changed, launch
from support.random_pair import PairShape, make_pair

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("clean_environment")]
SHAPE = HeadShape("worst-token", (0, 1), 64)
NO_QUESTION = ("--parse-question", "")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), PairShape(num_layers=3, max_positions=512))


@pytest.fixture
def head(pair: tuple[Path, Path], tmp_path: Path) -> Path:
    return write_head(tmp_path / "judge", pair, SHAPE, 1.0)


def rows_of_a_pass(pair: tuple[Path, Path], *flags: str) -> int:
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(launch(pair, *flags)).speculative_num_draft_tokens


def test_a_head_needs_no_rows_for_questions(pair: tuple[Path, Path], head: Path):
    flags = ("--parse-draft-tokens", "40", "--parse-draft-parallel-tokens", "1")
    judge = ("--parse-judge", str(head))
    alone, asked, both = (
        rows_of_a_pass(pair, *flags, *more) for more in ((*judge, *NO_QUESTION), (), judge)
    )
    assert alone == 41
    assert asked - alone == 16 * (both - alone) > 0


def test_another_targets_head(pair: tuple[Path, Path], head: Path, tmp_path: Path):
    other = changed(pair[0], tmp_path / "other", rope_theta=12345.0)
    words = r"--parse-judge is .*trained for target .*Fix: run sglang-parse train-judge for"
    with pytest.raises(ValueError, match=words):
        launch((other, pair[1]), "--parse-judge", str(head))


def test_another_drafts_head_is_warned_about(
    pair: tuple[Path, Path], head: Path, tmp_path: Path, capfd: pytest.CaptureFixture
):
    other = changed(pair[1], tmp_path / "other", rope_theta=12345.0)
    launch((pair[0], other), "--parse-judge", str(head))
    assert "trained on drafts of another draft model" in capfd.readouterr().err


def test_layers_that_sglang_cannot_capture(pair: tuple[Path, Path], tmp_path: Path):
    last = write_head(tmp_path / "last", pair, HeadShape("worst-token", (2,), 64), 1.0)
    for flags in (("--parse-judge", str(last)), ("--parse-hidden-layers", "1,2")):
        with pytest.raises(ValueError, match=r"layers of .*use layers 0\.\.1: SGLang captures"):
            launch(pair, *flags)


def test_weights_of_another_shape(pair: tuple[Path, Path], head: Path):
    path = head / "judge.json"
    path.write_text(json.dumps({**json.loads(path.read_text()), "pooling": "running-mean"}))
    with pytest.raises(ValueError, match=r"judge.safetensors of --parse-judge .*\[3, 128\]"):
        launch(pair, "--parse-judge", str(head))
    (head / "judge.safetensors").write_bytes(b"none")
    with pytest.raises(ValueError, match="cannot be read"):
        launch(pair, "--parse-judge", str(head))


@pytest.mark.parametrize("name", ["weights", "scalars", "bias"])
@pytest.mark.parametrize("value", [float("nan"), float("inf")])
def test_weights_that_are_no_numbers(pair: tuple[Path, Path], head: Path, name: str, value: float):
    """Each request would be a 500 that blames the target."""
    path = head / "judge.safetensors"
    tensors = load_file(path)
    tensors[name].reshape(-1)[-1] = value
    save_file(tensors, path)
    words = rf"{name} in judge.safetensors of --parse-judge .*is \[{value}\].*train-judge again"
    with pytest.raises(ValueError, match=words):
        launch(pair, "--parse-judge", str(head))


def test_a_target_without_capture(
    pair: tuple[Path, Path], head: Path, monkeypatch: pytest.MonkeyPatch
):
    from sglang.srt.models.qwen3 import Qwen3ForCausalLM

    for name in ("eagle3", "dflash"):
        monkeypatch.delattr(Qwen3ForCausalLM, f"set_{name}_layers_to_capture")
    with pytest.raises(ValueError, match="use --parse-judge question or likelihood"):
        launch(pair, "--parse-judge", str(head))
    launch(pair, "--parse-judge", "likelihood")


@pytest.mark.parametrize("rows_per_piece", [1, 3, 100])
def test_likelihoods_in_pieces(monkeypatch: pytest.MonkeyPatch, rows_per_piece: int):
    from sglang_parse.engine.judge import scorer

    monkeypatch.setattr("sglang_parse.engine.logits.rows.PIECE_BYTES", 4 * 11 * rows_per_piece)
    logits, ids = torch.randn(8, 11) * 3, [3, 0, 10, 4, 5]
    rows = torch.tensor([0, 2, 3, 6, 7])
    logprobs = logits[rows].log_softmax(-1)
    found = scorer.next_likelihoods(logits, rows, torch.tensor(ids))
    torch.testing.assert_close(found[:, 0], logprobs[range(5), ids])
    torch.testing.assert_close(found[:, 1], -(logprobs.exp() * logprobs).sum(-1))
