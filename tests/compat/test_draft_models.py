"""A draft model is served as the class of its checkpoint, with all of its layers."""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace

import pytest

from support.demo_pair import DEMO
from support.launch import changed

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("clean_environment")]

ENTRY = re.compile(r"^EntryClass = (\[.*?\]|\w+)", re.MULTILINE | re.DOTALL)
RENAMED = {"Qwen3MoeForCausalLM", "Glm4MoeForCausalLM", "Ernie4_5_MoeForCausalLM"}
RENAMED |= {"MiMoForCausalLM", "BailingMoeV2ForCausalLM", "HYV3ForCausalLM"}
"""Some of those that SGLang takes for checkpoints with an MTP head."""


def architectures() -> set[str]:
    """Every model class of SGLang, by its source: importing them all takes a minute."""
    import sglang.srt.models as models

    files = Path(models.__path__[0]).glob("*.py")
    entries = (match for file in files for match in ENTRY.findall(file.read_text()))
    return {name for entry in entries for name in re.findall(r"\w+", entry)}


def server(draft: Path, algorithm: str = "PARSE", **overrides: object):
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    return ServerArgs(
        model_path=str(DEMO / "target"),
        speculative_draft_model_path=str(draft),
        speculative_algorithm=algorithm,
        json_model_override_args=json.dumps(overrides),
        device="cpu",
    )


def served(args: object):
    """What SGLang's draft worker loads (``TpModelWorker._init_model_config``)."""
    from sglang.srt.configs.model_config import ModelConfig

    path = args.speculative_draft_model_path
    return ModelConfig.from_server_args(args, model_path=path, is_draft_model=True)


def test_every_family_that_startup_accepts_is_served_as_itself():
    from sglang.srt.arg_groups.overrides import resolving_view
    from sglang.srt.model_executor.model_runner_components.layer_setup import resolve_layer_indices

    from sglang_parse.startup.models import check_attention, read_pair

    accepted = set()
    for name in sorted(architectures()):
        args = server(DEMO / "draft", architectures=[name], num_nextn_predict_layers=1)
        view = resolving_view(args)
        try:
            target, draft = read_pair(view)
            check_attention(view, target, draft)
        except Exception:  # noqa: BLE001 - refused, or its config.json has other keys
            continue
        accepted.add(name)
        for model in (draft, served(args)):
            assert model.hf_config.architectures == [name]
            layers = resolve_layer_indices(model=None, model_config=model, is_draft_worker=True)
            assert layers.num_effective_layers >= model.num_hidden_layers > 1
    assert accepted > RENAMED | {"Qwen3ForCausalLM", "LlamaForCausalLM"}
    assert len(accepted) > 150


@pytest.mark.parametrize("rows", [300, 384, 448])
def test_a_draft_has_as_many_tokens_as_its_target(rows: int, monkeypatch: pytest.MonkeyPatch):
    """Its checkpoint has 384: what is behind those of the target is left out, or are zeros."""
    import torch

    from sglang_parse import context
    from sglang_parse.patches.parse.draft_models import _fit_shard, _fit_whole

    one = context.Context(target_rows=rows)
    monkeypatch.setattr("sglang_parse.patches.parse.draft_models.process_context", lambda: one)
    # SGLang caches what it reads of config.json, and other tests read it, too.
    model = served(server(DEMO / "draft", vocab_size=384, marker=rows))
    assert model.vocab_size == model.hf_text_config.vocab_size == rows
    assert one.draft_rows == (384 if rows != 384 else 0)
    weight, loaded = torch.randn(384, 8), []
    for size in (rows, 99):
        embedding, param = SimpleNamespace(org_vocab_size=size), torch.empty(size, 8)
        param.output_dim = 0
        _fit_shard(lambda *given: loaded.append(given[-1]), embedding, param, weight)
        # Of Gemma's embedding, which SGLang does not shard.
        _fit_whole(lambda *given: loaded.append(given[-1]), param, weight)
    for fitted in loaded[:2]:
        assert len(fitted) == rows
        assert torch.equal(fitted[:384], weight[:rows])
        assert not fitted[384:].any()
    assert all(other is weight for other in loaded[2:])


def test_an_mtp_head_of_sglangs_own_algorithms_stays_one(tmp_path: Path):
    draft = changed(DEMO / "draft", tmp_path / "moe", architectures=["Qwen3MoeForCausalLM"])
    model = served(server(draft, "EAGLE"))
    assert model.hf_config.architectures == ["Qwen3MoeForCausalLMMTP"]
    assert model.num_nextn_predict_layers == 1
