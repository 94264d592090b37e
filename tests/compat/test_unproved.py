"""Families that only a GPU runs, behind ``--parse-unproved-families``: what was read of them.

No GPU: what starts, and what SGLang's own code plans for a pass.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from support.launch import DSA, V4, launch, other_model
from support.random_pair import PairShape, make_pair

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("clean_environment")]
SERVE = ("--parse-unproved-families", "serve")
TOKEN = ("--parse-verification", "token")
BACKENDS = {"sparse": "dsa", "glm": "dsa", "chunks": "fa3"}
TESTS = Path(__file__).resolve().parents[1]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), PairShape(num_layers=1, max_positions=512))


@pytest.fixture(scope="module")
def models(pair: tuple[Path, Path], tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """By a short name; without weights of their classes."""
    folder = tmp_path_factory.mktemp("models")
    text = json.loads((pair[0] / "config.json").read_text())
    del text["architectures"], text["model_type"]
    tower = {"hidden_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
    llama = transformers.Llama4Config(text_config=text, vision_config=tower).to_dict()
    kinds: dict[str, tuple[str, dict[str, Any]]] = {
        "sparse": (("deepseek_v32", "DeepseekV32ForCausalLM"), DSA),
        "glm": (("glm_moe_dsa", "GlmMoeDsaForCausalLM"), DSA),
        "pooled": (("glm_moe_dsa", "GlmMoeDsaForCausalLM"), DSA | {"index_kpool": 4}),
        "v4": (("deepseek_v4", "DeepseekV4ForCausalLM"), V4),
        "chunks": (("llama4", "Llama4ForConditionalGeneration"), llama),
    }
    return {
        name: other_model(pair[0], folder / name, kind, **config | named(*kind))
        for name, (kind, config) in kinds.items()
    }


def named(model_type: str, architecture: str) -> dict[str, Any]:
    return {"model_type": model_type, "architectures": [architecture]}


@pytest.fixture(autouse=True)
def hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    """SGLang asks for the device's capability while it resolves settings of sparse attention."""
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda *_: (9, 0))
    monkeypatch.setenv("SGLANG_DSA_PREFILL_DENSE_ATTN_KV_LEN_THRESHOLD", "64")  # SGLang sets it


def start(target: Path, *flags: str, draft: Path | None = None, ask: bool = False) -> Any:
    """The settings that a server on a GPU would have."""
    from sglang.srt.arg_groups.overrides import resolved_view

    return resolved_view(launch((target, draft), "--device", "cuda", *flags, ask=ask))


@pytest.mark.parametrize("name", BACKENDS)
def test_refused_without_the_flag(models: dict[str, Path], name: str):
    match = "which PARSE was not seen to serve.*Fix: .*to try it, --parse-unproved-families serve"
    with pytest.raises(Exception, match=match):
        start(models[name], *TOKEN, "--attention-backend", BACKENDS[name])


@pytest.mark.parametrize("judge", [TOKEN, ("--parse-judge", "likelihood")], ids="-".join)
@pytest.mark.parametrize("name", BACKENDS)
def test_started_with_the_flag(
    models: dict[str, Path], name: str, judge: tuple[str, ...], monkeypatch: pytest.MonkeyPatch
):
    from sglang_parse.core.config import ParseConfig
    from sglang_parse.startup import unproved
    from sglang_parse.startup.checks import pass_layout
    from sglang_parse.startup.models import read_pair

    warnings = []  # SGLang has taken pytest's handler off where it has configured its own
    monkeypatch.setattr(unproved.logger, "warning", lambda *words: warnings.append(words[0]))
    view = start(models[name], *SERVE, *judge, "--attention-backend", BACKENDS[name])
    target, _ = read_pair(view)
    assert pass_layout(view, ParseConfig.from_env(), target, 1)[0] == "causal"
    assert view.page_size == (64 if BACKENDS[name] == "dsa" else 1)
    assert target.is_hybrid_swa == (name == "chunks")
    assert ["never run: compare greedy answers" in text for text in warnings] == [True]


@pytest.mark.parametrize(
    ("name", "flags", "message"),
    [
        ("chunks", ("--attention-backend", "triton"), "'triton': .*in chunks.*Fix: use.* fa3"),
        ("sparse", ("--attention-backend", "flashmla"), "'flashmla': .*Fix: use.* dsa alone"),
        (
            "chunks",
            ("--attention-backend", "fa3", "--decode-attention-backend", "triton"),
            "Fix: use --attention-backend fa3 alone",
        ),
        ("sparse", ("--attention-backend", "dsa", "--enable-hisparse"), "hisparse is True.*leave"),
        ("pooled", ("--attention-backend", "dsa"), "index_kpool of .* is 4: .*start it without"),
        ("v4", (), "DeepSeek V4.*whose compressed KV.*Fix: use a model that"),
    ],
)
def test_refused_also_with_the_flag(
    models: dict[str, Path], name: str, flags: tuple[str, ...], message: str
):
    with pytest.raises(Exception, match=message):
        start(models[name], *SERVE, *TOKEN, *flags)


def test_neither_questions_nor_drafts(models: dict[str, Path], pair: tuple[Path, Path]):
    backend = ("--attention-backend", "fa3")
    with pytest.raises(Exception, match="questions, .*with a target of attention in chunks"):
        start(models["chunks"], *SERVE, *backend, ask=True)
    with pytest.raises(Exception, match="--speculative-draft-model-path.*never run.*draft-url"):
        start(models["chunks"], *SERVE, *TOKEN, *backend, draft=pair[1])
    with pytest.raises(Exception, match="--speculative-draft-model-path.*in chunks, which PARSE"):
        start(pair[0], *SERVE, *TOKEN, *backend, draft=models["chunks"])


@pytest.mark.nightly("tests/compat/test_unproved.py::test_started_with_the_flag")
def test_what_sglang_plans_for_a_pass():
    """Of the chunks, and of the columns that the indexer scores."""
    done = subprocess.run(
        [sys.executable, "-m", "support.unproved_passes"],
        env=os.environ | {"PYTHONPATH": os.pathsep.join((str(TESTS.parent), str(TESTS)))},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    found = [line for line in done.stdout.splitlines() if line.endswith(" right")]
    assert found == ["chunks right", "indexer right"]
