"""The draft model's attention backend: its own where the target's plans on the host."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from support.launch import changed, launch
from support.random_pair import PairShape, make_pair

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("clean_environment")]

FLAG = "--speculative-draft-attention-backend"
TOKEN = ("--parse-verification", "token")


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), PairShape(num_layers=1, max_positions=512))


def resolved(pair: tuple[Path, Path], backend: str, *flags: str) -> Any:
    from sglang.srt.arg_groups.overrides import resolved_view

    on_a_gpu = ("--device", "cuda", "--attention-backend", backend)
    return resolved_view(launch(pair, *on_a_gpu, *flags, ask=False))


@pytest.mark.parametrize(
    ("flags", "chosen"),
    [
        (("flashinfer", *TOKEN), "triton"),
        (("triton", "--decode-attention-backend", "flashinfer", *TOKEN), "triton"),
        (("flashinfer", *TOKEN, FLAG, "flashinfer"), "flashinfer"),
        (("flashinfer", *TOKEN, "--enable-deterministic-inference"), None),
        (("triton", *TOKEN, "--parse-layout", "alias"), None),
        (("flashinfer", *TOKEN, "--parse-layout", "alias", FLAG, "triton"), "triton"),
    ],
)
def test_the_drafts_backend(
    pair, flags: tuple[str, ...], chosen: str | None, monkeypatch: pytest.MonkeyPatch
):
    """SGLang's draft runner takes it, and its KV budgeting, which reads the published setting."""
    from sglang.srt.mem_cache import kv_cache_configurator
    from sglang.srt.model_executor import model_runner

    from sglang_parse.startup import checks

    logged: list[str] = []
    monkeypatch.setattr(checks.logger, "info", lambda text, *args: logged.append(text % args))
    args = resolved(pair, *flags)
    assert args.speculative_draft_attention_backend == chosen
    found = [message for message in logged if FLAG in message]
    assert bool(found) is (chosen == "triton" and FLAG not in flags)
    assert all("flashinfer would plan each step" in message for message in found)
    for module in (model_runner, kv_cache_configurator):
        monkeypatch.setattr(module, "get_spec", lambda: args)
    takes = model_runner.resolve_draft_attention_backend
    assert takes(draft_attention_backend=None, is_draft_worker=True) == chosen
    if chosen:
        budgets = kv_cache_configurator.KVCacheConfigurator._draft_attention_backends
        assert budgets(object()) == (chosen,)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("fa3", FLAG, "fa4"), f"{FLAG} is 'fa4'. Fix: set it to one .*triton, fa3"),
        (("triton", FLAG, "fa3", "--page-size", "16"), f"page-size 1, or another {FLAG}"),
        (("flashinfer", FLAG, "triton", "--enable-deterministic-inference"), "with triton is True"),
    ],
)
def test_blocks_need_a_backend_that_runs_them(pair, tmp_path: Path, flags, message: str):
    draft = changed(pair[1], tmp_path / "draft", pard_token=7)
    with pytest.raises(Exception, match=message):
        resolved((pair[0], draft), *flags, *TOKEN)


@pytest.mark.parametrize(
    ("backend", "own", "layout", "blocks"),
    [
        ("flashinfer", "triton", "alias", "mask"),
        ("flashinfer", None, "mask", "mask"),
        ("flashinfer", "fa3", "mask", "alias"),
        ("triton", None, "alias", "alias"),
    ],
)
def test_the_layout_of_blocks_follows_the_drafts_backend(backend, own, layout, blocks):
    """``--parse-layout`` is about the target's passes, unless both models have one backend."""
    from sglang_parse.core.config import ParseConfig
    from sglang_parse.startup.checks import block_layout

    args = SimpleNamespace(
        attention_backend=backend, speculative_draft_attention_backend=own, page_size=1
    )
    assert block_layout(args, ParseConfig(layout=layout)) == blocks
