"""Public EAGLE-3 heads (docs/choosing.md) by their config files: the flags that a user types are
accepted, or refused with what to change, before anything is loaded.

The values are those of files that can be read without the Hugging Face hub:

    SpecForge   configs/*-eagle3.json of sgl-project/SpecForge at a6b6b02: what its heads are
                trained with
    AngelSlim   angelslim/compressor/speculative/train/configs/*-eagle3.json of Tencent/AngelSlim at
                67394ce: what its heads are trained with; of the published ones vLLM's pull request
                22333 says that they have SGLang's name
    SafeAILab   eagle/traineagle3/config.json of SafeAILab/EAGLE at cb7e084, whose heads yuhuili
                publishes
    Red Hat     what its heads look like, by vllm-project/speculators' pull request 53
"""

from __future__ import annotations

import json
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from safetensors.torch import save_file

from support.chat_families import FAMILIES
from support.launch import launch

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("clean_environment")]

ROOT = Path(__file__).resolve().parents[2]
SHAPES = ROOT / "sglang_parse/shapes/configs"
SGLANG_NAME = "LlamaForCausalLMEagle3"
LONGER = "SGLANG_ALLOW_OVERWRITE_LONGER_CONTEXT_LEN"
LLAMA_3_1_8B = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
}
LLAMA_3_3_70B = LLAMA_3_1_8B | {
    "hidden_size": 8192,
    "intermediate_size": 28672,
    "num_hidden_layers": 80,
    "num_attention_heads": 64,
}


def head(hidden: int, intermediate: int, heads: int, **more: object) -> dict[str, Any]:
    """Of Qwen3, as both publishers' files agree."""
    sizes = {"hidden_size": hidden, "intermediate_size": intermediate}
    return {
        "architectures": [SGLANG_NAME],
        "model_type": "llama",
        "num_hidden_layers": 1,
        "num_attention_heads": heads,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "vocab_size": 151936,
        "draft_vocab_size": 32000,
        "max_position_embeddings": 40960,
        "rope_theta": 1000000,
        "rms_norm_eps": 1e-06,
        "sliding_window": None,
        "tie_word_embeddings": False,
        "torch_dtype": "bfloat16",
        **sizes,
        **more,
    }


SPECFORGE = {
    "qwen3_4b": head(2560, 9728, 32),
    "qwen3_8b": head(4096, 12288, 32),
    "qwen3_32b": head(5120, 25600, 64),
    "qwen3_235b_a22b_fp8": head(
        *(4096, 24576, 64),
        num_key_value_heads=4,
        eagle_config={
            "eagle_aux_hidden_state_layer_ids": [1, 46, 90],
            "use_aux_hidden_state": True,
        },
    ),
}
ANGELSLIM_NAME = {"architectures": ["Eagle3LlamaForCausalLM"]}
ANGELSLIM = {
    "qwen3_0_6b": head(1024, 3072, 16, tie_word_embeddings=True),
    "qwen3_1_7b": head(2048, 6144, 16, tie_word_embeddings=True),
    "qwen3_4b": head(2560, 9728, 32, tie_word_embeddings=True),
    "qwen3_8b": head(4096, 12288, 32),
    "qwen3_14b": head(5120, 17408, 40),
}
LLAMA_HEAD = {
    "architectures": [SGLANG_NAME],
    "model_type": "llama",
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 1,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "vocab_size": 128256,
    "draft_vocab_size": 32000,
    "max_position_embeddings": 2048,
    "rms_norm_eps": 1e-05,
    "tie_word_embeddings": False,
    "torch_dtype": "float16",
}
SPECULATORS = {
    "architectures": ["Eagle3Speculator"],
    "draft_vocab_size": 32000,
    "speculators_model_type": "eagle3",
    "transformer_layer_config": {"model_type": "llama", "hidden_size": 4096},
}


def shape_of(name: str) -> dict[str, Any]:
    return json.loads((SHAPES / name / "config.json").read_text())


class Server:
    """Folders without weights, and the launcher's checks of a server of them on a GPU."""

    def __init__(self, folder: Path, family: str) -> None:
        self._folder, self._family = folder, family

    def folder(self, config: dict[str, Any]) -> Path:
        path = self._folder / f"model-{len(list(self._folder.iterdir()))}"
        path.mkdir()
        (path / "config.json").write_text(json.dumps(config))
        save_file({}, path / "model.safetensors")
        FAMILIES[self._family].tokenizer().save_pretrained(path)
        return path

    def start(self, target: dict, draft: dict | None, *flags: str, **heads: dict) -> None:
        """``heads``: by their flags."""
        given = [
            word
            for name, config in heads.items()
            for word in (f"--parse-{name.replace('_', '-')}", str(self.folder(config)))
        ]
        pair = self.folder(target), self.folder(draft) if draft else ""
        device = ("--device", "cuda", "--attention-backend", "triton", "--dtype", "bfloat16")
        token = ("--parse-verification", "token")
        launch(pair, *device, *token, *flags, *given, ask=False)


@pytest.fixture
def qwen3(tmp_path: Path) -> Server:
    return Server(tmp_path, "qwen3")


@pytest.fixture
def llama3(tmp_path: Path) -> Server:
    return Server(tmp_path, "llama3")


# -- heads that SGLang runs as they are ---------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_4b", "qwen3_8b"])
def test_a_head_of_the_draft_model(qwen3: Server, name: str):
    qwen3.start(shape_of("qwen3_32b"), shape_of(name), draft_eagle3_path=SPECFORGE[name])


@pytest.mark.parametrize("name", ["qwen3_8b", "qwen3_32b", "qwen3_235b_a22b_fp8"])
def test_a_head_of_the_target(qwen3: Server, name: str):
    flags = ("--tp-size", "4") if "235b" in name else ()
    qwen3.start(shape_of(name), None, *flags, eagle3_path=SPECFORGE[name])


def test_heads_of_both_models(qwen3: Server):
    heads = {"eagle3_path": SPECFORGE["qwen3_32b"], "draft_eagle3_path": ANGELSLIM["qwen3_8b"]}
    qwen3.start(shape_of("qwen3_32b"), shape_of("qwen3_8b"), **heads)


def test_a_head_of_another_size(qwen3: Server):
    with pytest.raises(Exception, match="hidden size of --parse-draft-eagle3-path .* has 2560"):
        qwen3.start(
            *map(shape_of, ("qwen3_32b", "qwen3_4b")), draft_eagle3_path=SPECFORGE["qwen3_8b"]
        )


# -- heads that it runs after a change ----------------------------------------------------


@pytest.mark.parametrize("name", ["qwen3_8b", "qwen3_14b"])
def test_another_name(qwen3: Server, name: str):
    target, config = shape_of(name), ANGELSLIM[name]
    with pytest.raises(Exception, match=rf"Eagle3LlamaForCausalLM.*write {SGLANG_NAME} there"):
        qwen3.start(target, None, eagle3_path=config | ANGELSLIM_NAME)
    qwen3.start(target, None, eagle3_path=config)


@pytest.mark.parametrize("name", ["qwen3_0_6b", "qwen3_1_7b", "qwen3_4b"])
def test_tied_embeddings(qwen3: Server, name: str):
    pair, config = (shape_of("qwen3_14b"), shape_of(name)), ANGELSLIM[name]
    with pytest.raises(Exception, match="tie_word_embeddings of .* True.*write false.*32000 rows"):
        qwen3.start(*pair, draft_eagle3_path=config)
    qwen3.start(*pair, draft_eagle3_path=config | {"tie_word_embeddings": False})


def test_a_short_context(llama3: Server, monkeypatch: pytest.MonkeyPatch):
    """Llama's heads have 2,048 positions. A draft model's runs as far as the target does."""
    target, one = LLAMA_3_3_70B, {"draft_eagle3_path": LLAMA_HEAD}
    refused = pytest.raises(Exception, match=f"context length .* 2048.*-length 2048, or.*{LONGER}")
    with refused:
        llama3.start(LLAMA_3_1_8B, None, eagle3_path=LLAMA_HEAD)
    llama3.start(LLAMA_3_1_8B, None, "--context-length", "2048", eagle3_path=LLAMA_HEAD)
    with refused:
        llama3.start(target, LLAMA_3_1_8B, "--context-length", "8192", **one)
    llama3.start(target, LLAMA_3_1_8B, "--context-length", "2048", **one)
    monkeypatch.setenv(LONGER, "1")
    llama3.start(target, LLAMA_3_1_8B, **one)


def test_the_heads_of_its_authors(llama3: Server):
    config = LLAMA_HEAD | {"architectures": ["LlamaForCausalLM"]}
    with pytest.raises(Exception, match=rf"LlamaForCausalLM'.*write {SGLANG_NAME} there"):
        llama3.start(LLAMA_3_1_8B, None, "--context-length", "2048", eagle3_path=config)


# -- heads that it does not run -----------------------------------------------------------


def test_another_format(llama3: Server):
    with pytest.raises(Exception, match="--parse-eagle3-path is .*cannot be read as a model"):
        llama3.start(LLAMA_3_1_8B, None, eagle3_path=SPECULATORS)


# -- why ----------------------------------------------------------------------------------


def test_sglang_has_one_name_for_such_heads():
    from sglang.srt.models import llama_eagle3

    from sglang_parse.startup.heads import HEAD_KIND

    assert [kind.__name__ for kind in llama_eagle3.EntryClass] == [HEAD_KIND] == [SGLANG_NAME]


@pytest.mark.parametrize("is_tied", [True, False])
def test_sglang_takes_the_models_embeddings_for_a_tied_head(
    monkeypatch: pytest.MonkeyPatch, is_tied: bool
):
    """So its logits are of the model's first tokens, and are read as the head's own."""
    from sglang.srt.models import llama_eagle3

    class Body(torch.nn.Module):
        def __init__(self, *_: Any, **__: Any) -> None:
            super().__init__()
            self.embed_tokens = torch.nn.Embedding(9, 2)

    nothing = SimpleNamespace(pp_group=None, speculative_draft_window_size=None)
    for name, value in (
        ("get_spec", lambda: nothing),
        ("get_parallel", lambda: nothing),
        ("LlamaModel", Body),
        ("ParallelLMHead", lambda rows, size, **_: torch.nn.Embedding(rows, size)),
        ("LogitsProcessor", lambda config: config.vocab_size),
    ):
        monkeypatch.setattr(llama_eagle3, name, value)
    config = SimpleNamespace(
        tie_word_embeddings=is_tied, vocab_size=9, draft_vocab_size=4, hidden_size=2
    )
    made = llama_eagle3.LlamaForCausalLMEagle3(config)
    assert made.logits_processor == 4
    assert made.lm_head.num_embeddings == (9 if is_tied else 4)


def test_sglang_refuses_a_short_context_after_it_has_loaded_the_model(
    llama3: Server, monkeypatch: pytest.MonkeyPatch
):
    from sglang.srt.configs.model_config import ModelConfig

    path = str(llama3.folder(LLAMA_HEAD))
    for name in ("CI", "SGLANG_IS_IN_CI", "GITHUB_ACTIONS"):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(ValueError, match=rf"\(8192\) is greater than .*\(2048\).*{LONGER}=1"):
        ModelConfig(path, is_draft_model=True, context_length=8192)


def test_the_page_says_what_to_change():
    """A head whose file needs a change is named with it."""
    page = (ROOT / "docs/choosing.md").read_text()
    found = re.findall(r"^\| (\S+) \| `\S+/.*?` \| (.*) \|$", page, re.MULTILINE)
    rows = dict(found)
    assert len(found) == len(rows) == 6
    for model in ("Qwen3-1.7B", "Qwen3-4B"):
        assert "`tie_word_embeddings`" in rows[model]
    for model in ("Llama-3.1-8B-Instruct", "DeepSeek-R1-Distill-Llama-8B"):
        assert "2,048 positions" in rows[model]
    assert SGLANG_NAME in rows["DeepSeek-R1-Distill-Llama-8B"]
    assert LONGER in page
