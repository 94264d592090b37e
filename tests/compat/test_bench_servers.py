"""The servers of ``sglang-parse bench`` at real shapes: SGLang's checks and PARSE's pass."""

from __future__ import annotations

import argparse
from pathlib import Path

import pytest

pytestmark = pytest.mark.compat


MOE = ("--target", "qwen3_235b_a22b_fp8", "--flags", "--tp-size 4")


@pytest.mark.nightly("tests/unit/test_bench_speed.py")
@pytest.mark.parametrize(
    ("words", "tp_size"), [(("--device", "cpu"), 1), (MOE, 4)], ids=["dense", "experts"]
)
def test_sglang_takes_every_server_at_real_shapes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, words: tuple[str, ...], tp_size: int
):
    """A small tokenizer beneath large embeddings; heads of shapes that fit."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.server_args import prepare_server_args

    from sglang_parse.bench.settings import BenchSettings, add_arguments
    from sglang_parse.core.block import BlockKind, Masks
    from sglang_parse.core.config import ENV_VAR, ParseConfig

    monkeypatch.setenv(ENV_VAR, "")
    parser = argparse.ArgumentParser()
    add_arguments(parser)
    names = "plain,draft,eagle3@3,standalone@3,parse-eagle3@0.5,parse-head@every:32"
    words = (*words, "--servers", names, "--block-tokens", "4.9", "--output", str(tmp_path))
    settings = BenchSettings.read(parser.parse_args(words))
    specs = {spec.name: spec for spec in settings.specs()}
    for spec in specs.values():
        for name, value in spec.environment.items():
            monkeypatch.setenv(name, value)
        args = prepare_server_args([*spec.common, *spec.flags])
        args.resolve_once()
        view = resolved_view(args)
        found = view.load_format, view.max_running_requests, view.tp_size
        assert found == ("dummy", 16, tp_size)
    config = ParseConfig.from_env()  # the last server's
    assert (config.draft_tokens, config.segment, config.drafting) == (128, "tokens:1", "auto")
    assert config.judge_file.layers == [settings.target.num_hidden_layers // 2]
    assert (
        view.speculative_num_draft_tokens
        == settings.rows + BlockKind(8, Masks.EVERY).lookahead_rows
    )
