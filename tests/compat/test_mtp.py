"""What start-up says of a checkpoint's own MTP layer, and how SGLang reads it."""

from __future__ import annotations

import inspect
import json
import re
from pathlib import Path
from typing import Any

import pytest
from safetensors.torch import load_file, save_file

from sglang_parse.attention.support import ON_CPU, STEPPING, Attention, BackendError
from sglang_parse.core.config import ParseConfig
from sglang_parse.core.setting import ConfigError
from support.demo_pair import DEMO
from support.launch import changed, launch
from support.mtp import HYBRIDS, MTP
from support.published import WEIGHTS

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("clean_environment")]
OWN = ("--parse-mtp", "own")
HEAD = str(DEMO / "eagle3")


@pytest.fixture(scope="module")
def glm(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return MTP["glm-4.5"].target(tmp_path_factory.mktemp("glm"))


@pytest.fixture
def logged(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """What the checks log, whatever SGLang makes of logging."""
    from sglang_parse.startup import checks

    lines: list[str] = []
    monkeypatch.setattr(checks.logger, "info", lambda text, *args: lines.append(text % args))
    return lines


def without_layer(target: Path, folder: Path, begin: str = "model.layers.3.") -> Path:
    """A copy whose weights lack the layer, as some quantized ones do."""
    copy = changed(target, folder)
    weights = load_file(copy / WEIGHTS)
    kept = {name: w for name, w in weights.items() if not name.startswith(begin)}
    save_file(kept, copy / WEIGHTS, {"format": "pt"})
    return copy


def indexed(target: Path, folder: Path) -> Path:
    """The same, whose index says so."""
    copy = without_layer(target, folder)
    names = dict.fromkeys(load_file(copy / WEIGHTS), WEIGHTS)
    (copy / "model.safetensors.index.json").write_text(json.dumps({"weight_map": names}))
    return copy


def resolved(target: Path, *flags: str, **more: object) -> Any:
    """A server's resolved settings, and more."""
    from sglang.srt.arg_groups.model_override_base import ResolvedView
    from sglang.srt.arg_groups.overrides import resolved_view

    return ResolvedView(resolved_view(launch((target, None), *flags, ask=False)), more)


def test_steps(glm: Path, logged: list[str]):
    """By default 3 where a CUDA graph has all of them; without graphs more are there to choose."""
    on_a_gpu = ("--device", "cuda", "--attention-backend", "triton")
    for flags, steps in (
        (("--speculative-num-steps", "2"), 2),
        ((), 7),
        (on_a_gpu, 3),
        ((*on_a_gpu, "--disable-cuda-graph"), 7),
    ):
        assert resolved(glm, *OWN, *flags).speculative_num_steps == steps
    assert any("copies of the prompt and of the MTP layer" in line for line in logged)


def test_start_up_says_where_a_layer_could_draft(glm: Path, tmp_path: Path, logged: list[str]):
    hint = "the checkpoint has an MTP layer (Glm4MoeForCausalLMNextN), which can draft"
    for flags, target, is_said in (
        ((), glm, True),
        (OWN, glm, False),
        ((), without_layer(glm, tmp_path / "none"), False),
        ((), DEMO / "target", False),
    ):
        logged.clear()
        launch((target, None), *flags, ask=False)
        assert any(hint in line for line in logged) is is_said


@pytest.mark.parametrize("make", [without_layer, indexed])
def test_absent_weights(glm: Path, tmp_path: Path, make):
    """SGLang would leave the layer as it is made: random."""
    target = make(glm, tmp_path / "none")
    with pytest.raises(ValueError, match=r"no weights named model\.layers\.3\.\*, and the layer"):
        launch((target, None), *OWN, ask=False)


@pytest.mark.parametrize(
    ("flags", "error"),
    [
        (("--enable-hierarchical-cache",), "hierarchical-cache is True. Fix: leave it out with"),
        (("--speculative-num-steps", "17"), "--speculative-num-steps is 17"),
        (("--speculative-eagle-topk", "4"), "--speculative-eagle-topk is 4"),
        (("--parse-mtp", "/no/such"), "--parse-mtp is '/no/such': it does not exist"),
        (("--parse-mtp", HEAD), "architecture of --parse-mtp .*LlamaForCausalLMEagle3"),
        (("--parse-mtp", str(DEMO / "target")), "architecture of --parse-mtp .*Qwen3ForCausalLM"),
    ],
)
def test_refusals(glm: Path, flags: tuple[str, ...], error: str):
    with pytest.raises(ValueError, match=error):
        launch((glm, None), *OWN, *flags, ask=False)


def test_other_layers(glm: Path, tmp_path: Path):
    more = changed(glm, tmp_path / "more", num_nextn_predict_layers=2)
    with pytest.raises(ValueError, match="num_nextn_predict_layers of --parse-mtp own is 2"):
        launch((more, None), *OWN, ask=False)
    with pytest.raises(ValueError, match=r"hidden size and vocabulary of .* is \(64, 384\)"):
        launch((DEMO / "target", None), "--parse-mtp", str(glm), ask=False)
    with pytest.raises(ValueError, match="which PARSE was not seen|PARSE was not seen to draft"):
        launch((DEMO / "target", None), *OWN, ask=False)


def test_no_two_proposers():
    error = "--parse-eagle3-path is 'head' with --parse-mtp own: they propose both; leave one out"
    with pytest.raises(ConfigError, match=error):
        ParseConfig(mtp="own", eagle3_path="head")


def test_backends_with_steps():
    """SGLang's error for another one comes behind the weights."""
    from sglang.srt.speculative.draft_utils import DraftBackendFactory

    source = inspect.getsource(DraftBackendFactory.create_decode_backend)
    known = {*re.findall(r'^ +"(\w+)": self', source, re.MULTILINE)}
    of_families = {"dsa", "nsa", "dsv4", "hybrid_linear_attn"}
    assert {*STEPPING} - {ON_CPU} == known - of_families


def test_how_sglang_reads_the_layer(tmp_path: Path):
    """One layer of its class and KV, though config.json has the target's; a draft model of such a
    family beside it keeps its own."""
    from sglang.srt.configs.model_config import ModelConfig
    from sglang.srt.plugins import load_plugins
    from sglang.srt.server_args import ServerArgs

    from sglang_parse.context import process_context
    from sglang_parse.patches.parse.draft_kv_pool import kv_bytes_per_token
    from sglang_parse.startup.families import attention_of
    from sglang_parse.startup.models import slot_sharers

    load_plugins()
    target = MTP["deepseek-v3"].target(tmp_path / "deepseek")
    args = ServerArgs(model_path=str(target), speculative_algorithm="PARSE", dtype="float32")
    ParseConfig(mtp="own").to_env()
    [layer] = slot_sharers(args)
    assert layer.hf_config.architectures == ["DeepseekV3ForCausalLMNextN"]
    assert (layer.num_nextn_predict_layers, attention_of(layer)) == (1, Attention.LATENT)
    assert kv_bytes_per_token(layer, "auto", 1) == (32 + 16) * 4
    kinds = []
    for loads_mtp in (False, True):
        process_context().loads_mtp = loads_mtp
        one = ModelConfig.from_server_args(args, model_path=str(target), is_draft_model=True)
        kinds.append((one.hf_config.architectures[0], one.num_nextn_predict_layers))
    process_context().loads_mtp = False
    assert kinds == [("DeepseekV3ForCausalLM", None), ("DeepseekV3ForCausalLMNextN", 1)]


@pytest.mark.parametrize(
    ("name", "kind"),
    [
        ("qwen3.5", "Qwen3_5ForCausalLMMTP"),
        ("qwen3.5-moe", "Qwen3_5ForCausalLMMTP"),
        ("qwen3-next", "Qwen3NextForCausalLMMTP"),
        ("nemotron-3", "NemotronHForCausalLMMTP"),
    ],
)
def test_hybrids(name: str, kind: str, tmp_path: Path, logged: list[str]):
    """KV of one layer's two heads, of keys and of values; a copy of each request's state."""
    from sglang_parse.patches.parse.draft_kv_pool import kv_bytes_per_token
    from sglang_parse.startup.models import slot_sharers
    from sglang_parse.startup.states import MAX_COPIES, num_copies

    target, flags = MTP[name].target(tmp_path / name), HYBRIDS[name].flags
    launch((target, None), *flags, ask=False)
    assert any(f"has an MTP layer ({kind}), which can draft" in line for line in logged)
    assert num_copies(48) == MAX_COPIES
    args = launch((target, None), *OWN, *flags, ask=False)
    assert num_copies(48) == 48
    [layer] = slot_sharers(args)
    assert layer.hf_config.architectures == [kind]
    assert kv_bytes_per_token(layer, "auto", 1) == 2 * 2 * 16 * 4
    copy = without_layer(target, tmp_path / "none", "mtp.")
    with pytest.raises(ValueError, match=r"no weights named mtp\.\*, and the layer"):
        launch((copy, None), *OWN, *flags, ask=False)


def test_unserved_backends(glm: Path):
    from sglang_parse.startup.heads import check_head
    from sglang_parse.startup.models import read_pair

    changes = {"attention_backend": "flex_attention", "speculative_num_draft_tokens": None}
    args = resolved(glm, *OWN, **changes)
    with pytest.raises(BackendError, match="'flex_attention' with --parse-mtp own: SGLang runs no"):
        check_head(args, ParseConfig.from_env(), read_pair(args)[0])
