"""The table of families, and what start-up makes of the models in it."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest
from rich.console import Console

from sglang_parse import cli
from sglang_parse.startup.states import MAX_RUNNING_REQUESTS
from support.demo_pair import DEMO
from support.families import ON_GPUS, TINY
from support.launch import changed, launch

TOKEN = ("--parse-verification", "token")
pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("clean_environment")]
DEEPSEEK = "DeepSeek V2, V2.5, Coder V2"


@pytest.fixture(scope="module")
def latent(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return TINY["deepseek-v2"].pair(tmp_path_factory.mktemp("latent"))


@pytest.fixture(scope="module")
def windows(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return TINY["gemma-3"].pair(tmp_path_factory.mktemp("windows"))


def test_a_served_family_is_one_that_servers_of_tests_have():
    """Nobody writes that a family was seen which no test of ``test_families`` (e2e) serves."""
    from sglang_parse.attention.support import Attention
    from sglang_parse.startup.families import FAMILIES

    tested = {tiny.served_as or tiny.model for tiny in TINY.values()}
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


def layout_of(pair: tuple[Path, Path], *flags: str, ask: bool = True) -> str:
    """Of a server's verify passes on a GPU."""
    from sglang.srt.arg_groups.overrides import resolved_view

    from sglang_parse.core.config import ParseConfig
    from sglang_parse.startup.checks import pass_layout
    from sglang_parse.startup.models import read_pair

    view = resolved_view(launch(pair, "--device", "cuda", *flags, ask=ask))
    return pass_layout(view, ParseConfig.from_env(), read_pair(view)[0], 1)[0]


@pytest.mark.parametrize(
    ("backend", "layout"), [("triton", "mask"), ("fa3", "alias"), ("flashinfer", "alias")]
)
def test_questions_about_latent_kv(latent: tuple[Path, Path], backend: str, layout: str):
    assert layout_of(latent, "--attention-backend", backend) == layout


def test_questions_about_latent_kv_that_no_kernel_answers(latent: tuple[Path, Path]):
    backend = ("--attention-backend", "flashinfer")
    words = "'mask' with --attention-backend flashinfer.*latent.*Fix: use --parse-layout alias"
    with pytest.raises(Exception, match=words):
        layout_of(latent, *backend, "--parse-layout", "mask")
    assert layout_of(latent, *TOKEN, *backend, ask=False) == "causal"


def test_questions_behind_windows(windows: tuple[Path, Path]):
    """Under a mask a window would count a question's columns instead of its positions."""
    for backend in ("triton", "flashinfer", "fa3"):
        assert layout_of(windows, "--attention-backend", backend) == "alias"
    with pytest.raises(Exception, match="'mask'.*a window counts columns.*--parse-layout alias"):
        launch(windows, "--parse-layout", "mask")


def test_passes_that_other_attention_was_not_seen_with(latent: tuple[Path, Path]):
    head = ("--parse-eagle3-path", str(latent[1]), "--parse-judge", "likelihood")
    with pytest.raises(Exception, match="an EAGLE-3 head with a target of latent.*Fix: leave"):
        launch(latent, *head, ask=False)


def test_layers_that_no_head_reads(latent: tuple[Path, Path], windows: tuple[Path, Path]):
    layers = ("--parse-judge", "likelihood", "--parse-hidden-layers", "0")
    launch(latent, *layers, ask=False)
    with pytest.raises(Exception, match="Gemma3ForCausalLM': with sliding windows.*Fix: use"):
        launch(windows, *layers, ask=False)


def attention(folder: Path, **config: object) -> object:
    """Of a model with these values in its config.json."""
    from sglang.srt.configs.model_config import ModelConfig

    from sglang_parse.startup.families import attention_of

    return attention_of(ModelConfig(str(changed(DEMO / "target", folder, **config))))


WINDOW = {"sliding_window": 16}


@pytest.mark.parametrize(
    ("config", "is_windowed"),
    [
        ({"architectures": ["MistralForCausalLM"], "model_type": "mistral", **WINDOW}, False),
        ({"architectures": ["Phi3ForCausalLM"], "model_type": "phi3", **WINDOW}, False),
        ({"use_sliding_window": True, **WINDOW}, True),
        ({"use_sliding_window": False, **WINDOW}, False),
        ({"loop_window_size": 16}, True),
    ],
)
def test_windows_that_sglang_applies(tmp_path: Path, config: dict[str, object], is_windowed: bool):
    from sglang_parse.attention.support import Attention

    expected = Attention.WINDOWS if is_windowed else Attention.FULL
    assert attention(tmp_path / "model", **config) is expected


def test_classes_that_give_no_layer_a_window():
    """By their source, and that of what they derive from."""
    from sglang.srt.models.registry import ModelRegistry

    from sglang_parse.startup.families import WINDOWLESS

    for name in WINDOWLESS:
        kind, _ = ModelRegistry.resolve_model_cls([name])
        modules = {
            base.__module__ for base in kind.__mro__ if "sglang.srt.models" in base.__module__
        }
        assert modules
        for module in modules:
            source = Path(sys.modules[module].__file__).read_text()
            assert "sliding_window_size" not in source, (name, module)


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


GPUS = "which SGLang runs on GPUs"


@pytest.mark.parametrize("name", ["deepseek-v2", "qwen3.5", "gemma-2", "gpt-oss", "exaone-4"])
def test_a_cpu_without_the_tests_kernels(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
):
    """What a user sees there, before anything is loaded; on a GPU the same models start."""
    from sglang_parse.startup import families

    target, draft = TINY[name].pair(tmp_path)
    fix = "Fix: start it on a GPU, or use a model with full attention"
    launch((target, None), *TOKEN, *TINY[name].flags, ask=False)
    with monkeypatch.context() as patch:
        patch.setattr(families, "NOT_ON_CPU", ON_GPUS)
        with pytest.raises(Exception, match=f"--model-path is .*{GPUS}. {fix}"):
            launch((target, None), *TOKEN, *TINY[name].flags, ask=False)
        if name != "qwen3.5":  # a hybrid is no draft anywhere
            full = changed(DEMO / "target", tmp_path / "full")
            with pytest.raises(Exception, match=f"draft-model-path is .*{GPUS}. Fix: use it on an"):
                launch((full, draft), *TOKEN, ask=False)


def test_every_patch_of_the_tests_kernels_is_in_force():
    import cpu_families
    from sglang.srt.plugins import load_plugins

    from sglang_parse.startup.compat import check_symbols

    load_plugins()
    assert [one.name for one in cpu_families.PATCHES if not one.is_applied()] == []
    check_symbols([symbol for one in cpu_families.PATCHES for symbol in one.symbols])


def test_attention_in_chunks_is_refused(pools: dict, tmp_path: Path):
    """Llama 4's, also in one pool, and as draft."""
    chunked = changed(pools["gpt-oss"][0], tmp_path / "chunked", attention_chunk_size=8192)
    match = "model-path is '.*': a GptOssForCausalLM with attention in chunks, which PARSE was not"
    with pytest.raises(Exception, match=f"--{match}"):
        launch((chunked, pools["gpt-oss"][1]), *TOKEN, *TINY["gpt-oss"].flags, ask=False)
    with pytest.raises(Exception, match=f"--speculative-draft-{match}"):
        launch((pools["gpt-oss"][0], chunked), *TOKEN, *TINY["gpt-oss"].flags, ask=False)


@pytest.fixture(scope="module")
def hybrid(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return TINY["qwen3.5"].pair(tmp_path_factory.mktemp("hybrid"))


def test_settings_of_a_hybrid_target(hybrid: tuple[Path, Path]):
    from sglang.srt.arg_groups.overrides import resolved_view

    args = resolved_view(launch(hybrid, *TOKEN, ask=False))
    assert args.mamba_radix_cache_strategy == "no_buffer"
    assert args.disable_overlap_schedule
    assert args.max_running_requests == MAX_RUNNING_REQUESTS
    given = resolved_view(launch(hybrid, *TOKEN, "--max-running-requests", "7", ask=False))
    assert given.max_running_requests == 7


@pytest.mark.parametrize(
    "name", ["qwen3.5", "qwen3-next", "nemotron-h", "lfm2", "granite-4", "falcon-h1", "kimi-linear"]
)
@pytest.mark.parametrize("flags", [(), ("--disable-radix-cache",)])
def test_hybrids_on_blackwell(name: str, flags: tuple, tmp_path: Path):
    """SGLang chooses trtllm_mha and pages of 64 tokens there for any algorithm: no pages of one."""
    from sglang.srt.arg_groups.overrides import resolved_view
    from sglang.srt.plugins import load_plugins
    from sglang.srt.runtime_context import override_platform

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    target, _ = TINY[name].pair(tmp_path)
    start = ["--model-path", str(target), "--device", "cuda", "--speculative-algorithm", "PARSE"]
    with override_platform(is_cuda=True, is_blackwell=True, is_sm100=True):
        args = prepare_server_args([*start, *TOKEN, *flags])
        args.resolve_once()
        view = resolved_view(args)
        backend = "flashinfer" if name == "lfm2" else "triton"
        assert (view.attention_backend, view.page_size) == (backend, 1)
        other = prepare_server_args([*start, *TOKEN, *flags, "--attention-backend", "trtllm_mha"])
        with pytest.raises(Exception, match="attention-backend is 'trtllm_mha'.*Fix: leave it"):
            other.resolve_once()


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
    with pytest.raises(Exception, match="Qwen3_5ForCausalLM .*with linear.*--parse-draft-url"):
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
