"""The table of families, and what start-up makes of the models in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from sglang_parse import cli
from support.families import TINY
from support.launch import launch

TOKEN = ("--parse-verification", "token")
pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("clean_environment")]
DEEPSEEK = "DeepSeek V2, V2.5, Coder V2"


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return TINY["deepseek-v2"].pair(tmp_path_factory.mktemp("latent"))


def test_a_served_family_is_one_that_servers_of_tests_have():
    """Nobody writes that a family was seen which no test of ``test_families`` (e2e) serves."""
    from sglang_parse.attention.support import Attention
    from sglang_parse.startup.families import FAMILIES

    tested = {f"{tiny.name}ForCausalLM" for tiny in TINY.values()}
    served = {
        name
        for family in FAMILIES
        if family.seen and family.attention is not Attention.FULL
        for name in family.architectures
    }
    assert served == tested


def test_latent_kv(latent: tuple[Path, Path]):
    """One latent entry a layer on every rank: rank 32, rotary 16, 3 layers, 4 bytes."""
    from sglang.srt.arg_groups.overrides import resolved_view

    from sglang_parse.patches.parse.draft_kv_pool import kv_bytes_per_token
    from sglang_parse.startup.families import family_of
    from sglang_parse.startup.models import read_pair

    target, draft = read_pair(resolved_view(launch(latent, *TOKEN, ask=False)))
    assert family_of(target).name == DEEPSEEK
    assert kv_bytes_per_token(draft, "auto", 2) == (32 + 16) * 3 * 4


def test_questions_about_latent_kv(latent: tuple[Path, Path]):
    with pytest.raises(Exception, match="questions, .*with a target of latent attention.*Fix: use"):
        launch(latent)


def test_layers_of_latent_attention(latent: tuple[Path, Path]):
    with pytest.raises(Exception, match="DeepseekV2ForCausalLM': with latent attention.*Fix: use"):
        launch(latent, "--parse-judge", "likelihood", "--parse-hidden-layers", "0", ask=False)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return TINY["qwen3.5"].pair(tmp_path_factory.mktemp("hybrid"))


def test_settings_of_a_hybrid_target(hybrid: tuple[Path, Path]):
    from sglang.srt.arg_groups.overrides import resolved_view

    args = resolved_view(launch(hybrid, *TOKEN, ask=False))
    assert args.mamba_radix_cache_strategy == "no_buffer"
    assert args.disable_overlap_schedule


@pytest.mark.parametrize(
    ("flags", "fix"),
    [
        (("--page-size", "16"), "page-size is 16.*leave it out"),
        (("--mamba-radix-cache-strategy", "extra_buffer"), "'extra_buffer'.*leave it out"),
        (("--enable-streaming-session",), "streaming-session is True.*leave it out"),
        (("--parse-overlap", "on"), "overlap is 'on'.*Fix: use auto"),
    ],
)
def test_settings_without_a_hybrid_target(hybrid: tuple[Path, Path], flags: tuple, fix: str):
    with pytest.raises(Exception, match=fix):
        launch(hybrid, *TOKEN, *flags, ask=False)


def test_questions_to_a_hybrid_target(hybrid: tuple[Path, Path]):
    with pytest.raises(Exception, match="questions, .*with a target of linear att.*Fix: use"):
        launch(hybrid)


def test_a_hybrid_draft(hybrid: tuple[Path, Path]):
    target, draft = hybrid
    with pytest.raises(Exception, match="Qwen3_5ForCausalLM with linear.*--parse-draft-url"):
        launch((draft, target), *TOKEN, ask=False)


def test_the_command(latent: tuple[Path, Path], monkeypatch, capsys, tmp_path: Path):
    monkeypatch.setattr(cli, "end_on_sigterm", lambda: None)
    monkeypatch.setattr("sglang_parse.client.program.Console", lambda **_: Console(width=400))
    assert cli.main(["models", str(latent[0])]) == 0
    assert capsys.readouterr().out == "as target: served\nas draft: served\n"
    assert cli.main(["models", "coder v2"]) == 0
    assert DEEPSEEK in (shown := capsys.readouterr().out)
    assert "Gemma" not in shown
    assert cli.main(["models", str(tmp_path / "none")]) == 1
    assert "cannot be read as a model" in capsys.readouterr().err
