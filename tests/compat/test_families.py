"""The table of families, and what start-up makes of the models in it."""

from __future__ import annotations

from pathlib import Path

import pytest
from rich.console import Console

from sglang_parse import cli
from support.families import TINY
from support.launch import changed, launch

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

    tested = {tiny.architecture for tiny in TINY.values()}
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
def pools(tmp_path_factory: pytest.TempPathFactory) -> dict[str, tuple[Path, Path]]:
    """By family with two pools, its pair."""
    names = ("gpt-oss", "gemma-4")
    return {name: TINY[name].pair(tmp_path_factory.mktemp(name)) for name in names}


@pytest.mark.parametrize(("name", "has_pools"), [("gpt-oss", False), ("gemma-4", True)])
def test_two_pools(pools: dict, name: str, has_pools: bool):
    """A draft's KV is in one pool unless its windows have other heads.

    4 layers with keys and values of 2 heads of 16; half of Gemma 4's have 1 head of 32.
    """
    from sglang.srt.arg_groups.overrides import resolved_view

    from sglang_parse.patches.parse.draft_kv_pool import kv_bytes_per_token
    from sglang_parse.startup.models import read_pair

    args = launch(pools[name], *TOKEN, *TINY[name].flags, ask=False)
    target, draft = read_pair(resolved_view(args))
    assert (target.is_hybrid_swa, draft.is_hybrid_swa) == (True, has_pools)
    assert kv_bytes_per_token(draft, "auto", 1) == 4 * 2 * (16 + 16) * 4


ONE_POOL = "--disable-hybrid-swa-memory"


def test_one_pool_where_there_could_be_two(pools: dict):
    from sglang.srt.arg_groups.overrides import resolved_view

    from sglang_parse.startup.families import attention_of, family_of
    from sglang_parse.startup.models import read_pair

    args = launch(pools["gpt-oss"], *TOKEN, *TINY["gpt-oss"].flags, ONE_POOL, ask=False)
    target, _ = read_pair(resolved_view(args))
    assert attention_of(target) == "sliding windows"
    assert family_of(target).name == "gpt-oss"


def test_one_pool_where_there_must_be_two(pools: dict):
    """Windows of Gemma 4 have other heads than its other layers."""
    with pytest.raises(Exception, match=f"{ONE_POOL} is True: the target's windows.*Fix: leave"):
        launch(pools["gemma-4"], *TOKEN, *TINY["gemma-4"].flags, ONE_POOL, ask=False)
    pair = pools["gpt-oss"][0], pools["gemma-4"][1]
    match = "draft': its windows have other heads.*Fix: use a draft model with the same heads"
    with pytest.raises(Exception, match=match):
        launch(pair, *TOKEN, *TINY["gpt-oss"].flags, ONE_POOL, ask=False)


@pytest.mark.parametrize("flag", ["--enable-hierarchical-cache", "--enable-streaming-session"])
def test_settings_refused_with_two_pools(pools: dict, flag: str):
    with pytest.raises(Exception, match=f"{flag} is True: .*two KV pools.*or use {ONE_POOL}"):
        launch(pools["gpt-oss"], *TOKEN, *TINY["gpt-oss"].flags, flag, ask=False)


def test_locks_of_windows_are_not_released_by_iterations(pools: dict, monkeypatch):
    monkeypatch.setenv("SGLANG_OPT_RELEASE_PREFILL_SWA", "1")
    with pytest.raises(Exception, match="RELEASE_PREFILL_SWA is True: it counts.*Fix: leave it"):
        launch(pools["gpt-oss"], *TOKEN, *TINY["gpt-oss"].flags, ask=False)


def test_questions_with_two_pools(pools: dict):
    with pytest.raises(Exception, match="questions, .*target of sliding windows, two KV pools"):
        launch(pools["gpt-oss"], *TINY["gpt-oss"].flags)


def test_attention_in_chunks_is_refused(pools: dict, tmp_path: Path):
    """Llama 4's, also in one pool, and as draft."""
    chunked = changed(pools["gpt-oss"][0], tmp_path / "chunked", attention_chunk_size=8192)
    match = "model-path is '.*': a GptOssForCausalLM with attention in chunks, which PARSE was not"
    with pytest.raises(Exception, match=f"--{match}"):
        launch((chunked, pools["gpt-oss"][1]), *TOKEN, *TINY["gpt-oss"].flags, ask=False)
    with pytest.raises(Exception, match=f"--speculative-draft-{match}"):
        launch((pools["gpt-oss"][0], chunked), *TOKEN, *TINY["gpt-oss"].flags, ask=False)


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
