"""The recipes in examples/serve_*.sh: shell syntax, flags, headers, and SGLang's own checks; and
what starts servers as they do: the container, and the page for SGLang's documentation.

A recipe is run with a stand-in for Python that prints its arguments; SGLang then parses them with
folders that have the models' shapes and their family's chat template, but no weights.
"""

from __future__ import annotations

import argparse
import json
import operator
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Iterable
from pathlib import Path, PurePosixPath
from typing import Any

import pytest
import yaml
from safetensors.torch import save_file

from sglang_parse.core.block import ONE_TOKEN
from sglang_parse.roofline.forwards import BLOCKS, Workload
from sglang_parse.roofline.settings import RooflineSettings
from sglang_parse.shapes.shape import Shape
from support.chat_families import FAMILIES

EXAMPLES = Path(__file__).resolve().parents[2] / "examples"
RECIPES = sorted(path.name for path in EXAMPLES.glob("serve_*.sh"))
pytestmark = pytest.mark.usefixtures("clean_environment")
KIB = 1024
BF16_BYTES = 2

QWEN3 = {
    "architectures": ["Qwen3ForCausalLM"],
    "model_type": "qwen3",
    "vocab_size": 151936,
    "max_position_embeddings": 40960,
    "rope_theta": 1000000,
    "torch_dtype": "bfloat16",
    "head_dim": 128,
    "num_key_value_heads": 8,
}
LLAMA3 = {
    "architectures": ["LlamaForCausalLM"],
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rope_theta": 500000.0,
    "torch_dtype": "bfloat16",
    "num_key_value_heads": 8,
}


def shape(hidden: int, layers: int, heads: int, intermediate: int, **more: object) -> dict:
    sizes = {"hidden_size": hidden, "num_hidden_layers": layers, "num_attention_heads": heads}
    return sizes | {"intermediate_size": intermediate, **more}


# recipe -> family, target's config, draft's config
QWEN3_PAIR = (
    "qwen3-thinking",
    QWEN3 | shape(5120, 64, 64, 25600, tie_word_embeddings=False),
    QWEN3 | shape(2048, 28, 16, 6144, tie_word_embeddings=True),
)
LLAMA3_PAIR = (
    "llama3",
    LLAMA3 | shape(8192, 80, 64, 28672, head_dim=128),
    LLAMA3 | shape(2048, 16, 32, 8192, head_dim=64, tie_word_embeddings=True),
)
# As published: 128 experts of which 8 work, weights in FP8 blocks of 128 x 128.
QWEN3_MOE = (
    QWEN3
    | shape(4096, 94, 64, 12288, tie_word_embeddings=False)
    | {
        "architectures": ["Qwen3MoeForCausalLM"],
        "model_type": "qwen3_moe",
        "num_key_value_heads": 4,
        "num_experts": 128,
        "num_experts_per_tok": 8,
        "moe_intermediate_size": 1536,
        "norm_topk_prob": True,
        "quantization_config": {
            "activation_scheme": "dynamic",
            "fmt": "e4m3",
            "quant_method": "fp8",
            "weight_block_size": [128, 128],
        },
    }
)
QWEN3_30B = (
    QWEN3
    | shape(2048, 48, 32, 6144, tie_word_embeddings=False)
    | {name: QWEN3_MOE[name] for name in ("architectures", "model_type", "num_key_value_heads")}
    | {"num_experts": 128, "num_experts_per_tok": 8, "moe_intermediate_size": 768}
    | {"norm_topk_prob": True}
)
GEMMA3 = {
    "architectures": ["Gemma3ForConditionalGeneration"],
    "model_type": "gemma3",
    "torch_dtype": "bfloat16",
    "vision_config": {
        "model_type": "siglip_vision_model",
        "hidden_size": 1152,
        "image_size": 896,
        "intermediate_size": 4304,
        "num_attention_heads": 16,
        "num_hidden_layers": 27,
        "patch_size": 14,
    },
    "text_config": {
        "model_type": "gemma3_text",
        "vocab_size": 262208,
        "max_position_embeddings": 131072,
        "head_dim": 128,
        "num_key_value_heads": 16,
        "query_pre_attn_scalar": 168,
        "sliding_window": 1024,
        "rope_scaling": {"factor": 8.0, "rope_type": "linear"},
        **shape(5376, 62, 32, 21504),
    },
}
GEMMA3_1B = {
    "architectures": ["Gemma3ForCausalLM"],
    "model_type": "gemma3_text",
    "torch_dtype": "bfloat16",
    "vocab_size": 262144,
    "max_position_embeddings": 32768,
    "head_dim": 256,
    "num_key_value_heads": 1,
    "query_pre_attn_scalar": 256,
    "sliding_window": 512,
    **shape(1152, 26, 4, 6912, tie_word_embeddings=True),
}
GPT_OSS = {
    "architectures": ["GptOssForCausalLM"],
    "model_type": "gpt_oss",
    "vocab_size": 201088,
    "max_position_embeddings": 131072,
    "torch_dtype": "bfloat16",
    "head_dim": 64,
    "num_key_value_heads": 8,
    "num_experts_per_tok": 4,
    "sliding_window": 128,
    "tie_word_embeddings": False,  # and MXFP4, which SGLang does not know without a GPU
}
GPT_OSS_120B = GPT_OSS | shape(2880, 36, 64, 2880, num_local_experts=128)
GPT_OSS_20B = GPT_OSS | shape(2880, 24, 64, 2880, num_local_experts=32)
DEEPSEEK_V3 = {
    **shape(7168, 61, 128, 18432),
    "architectures": ["DeepseekV3ForCausalLM"],
    "model_type": "deepseek_v3",
    "vocab_size": 129280,
    "max_position_embeddings": 163840,
    "torch_dtype": "bfloat16",
    "num_key_value_heads": 128,
    "q_lora_rank": 1536,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 128,
    "qk_rope_head_dim": 64,
    "v_head_dim": 128,
    "moe_intermediate_size": 2048,
    "moe_layer_freq": 1,
    "n_routed_experts": 256,
    "n_shared_experts": 1,
    "num_experts_per_tok": 8,
    "n_group": 8,
    "topk_group": 4,
    "topk_method": "noaux_tc",
    "scoring_func": "sigmoid",
    "norm_topk_prob": True,
    "first_k_dense_replace": 3,
    "routed_scaling_factor": 2.5,
    "num_nextn_predict_layers": 1,
    "rope_theta": 10000,
    "rope_scaling": {
        "type": "yarn",
        "factor": 40,
        "original_max_position_embeddings": 4096,
        "beta_fast": 32,
        "beta_slow": 1,
        "mscale": 1.0,
        "mscale_all_dim": 1.0,
    },
    "quantization_config": QWEN3_MOE["quantization_config"],
}
QWEN3_5 = {
    "architectures": ["Qwen3_5ForConditionalGeneration"],
    "model_type": "qwen3_5",
    "torch_dtype": "bfloat16",
    "vision_config": {"model_type": "qwen3_5", "out_hidden_size": 5120},
    "text_config": {
        "model_type": "qwen3_5_text",
        "vocab_size": 248320,
        "max_position_embeddings": 262144,
        "head_dim": 256,
        "num_key_value_heads": 4,
        "full_attention_interval": 4,
        "linear_num_key_heads": 16,
        "linear_num_value_heads": 48,
        "linear_key_head_dim": 128,
        "linear_value_head_dim": 128,
        "linear_conv_kernel_dim": 4,
        **shape(5120, 64, 24, 17408),
    },
}
GLM_FLASH = {
    **shape(2048, 47, 20, 10240),
    "architectures": ["Glm4MoeLiteForCausalLM"],
    "model_type": "glm4_moe_lite",
    "vocab_size": 154880,
    "max_position_embeddings": 202752,
    "torch_dtype": "bfloat16",
    "num_key_value_heads": 20,
    "q_lora_rank": 768,
    "kv_lora_rank": 512,
    "qk_nope_head_dim": 192,
    "qk_rope_head_dim": 64,
    "v_head_dim": 256,
    "moe_intermediate_size": 1536,
    "n_routed_experts": 64,
    "n_shared_experts": 1,
    "num_experts_per_tok": 4,
    "n_group": 1,
    "topk_group": 1,
    "first_k_dense_replace": 1,
    "routed_scaling_factor": 1.8,
    "num_nextn_predict_layers": 1,
    "rope_theta": 1000000,
}
# Some id: what a PARD checkpoint adds to the config.json of the model it was made of.
PARD = {"pard_token": 128000}
QWEN3_PARD = QWEN3 | shape(1024, 28, 16, 3072, tie_word_embeddings=True) | PARD
PAIRS: dict[str, tuple[str, dict, dict | None]] = {
    "serve_qwen3_32b.sh": QWEN3_PAIR,
    "serve_qwen3_32b_pard.sh": (*QWEN3_PAIR[:2], QWEN3_PARD),
    "serve_llama3_70b_pard.sh": (*LLAMA3_PAIR[:2], LLAMA3_PAIR[2] | PARD),
    "serve_qwen3_235b.sh": ("qwen3-thinking", QWEN3_MOE, QWEN3_PAIR[2]),
    "serve_llama3_70b.sh": LLAMA3_PAIR,
    "serve_llama3_70b_eagle3.sh": LLAMA3_PAIR,
    "serve_qwen3_235b_30b.sh": ("qwen3-thinking", QWEN3_MOE, QWEN3_30B),
    "serve_gemma3_27b.sh": ("gemma", GEMMA3, GEMMA3_1B),
    "serve_gpt_oss_120b_texts.sh": ("chatml", GPT_OSS_120B, None),
    "serve_gpt_oss_120b.sh": ("chatml", GPT_OSS_120B, GPT_OSS_20B),
    "serve_deepseek_v3.sh": ("deepseek-r1", DEEPSEEK_V3, None),
    "serve_deepseek_v3_mtp.sh": ("deepseek-r1", DEEPSEEK_V3, None),
    "serve_glm_4_7_flash.sh": ("chatml", GLM_FLASH, None),
    "serve_qwen3_5_27b.sh": ("qwen3", QWEN3_5, None),
}
# This one runs another recipe.
WITH_HEAD = "serve_llama3_70b_eagle3.sh"
GPU_COUNTS = {"an": 1, "four": 4, "eight": 8}
SOURCES = {"--parse-eagle3-path", "--parse-mtp", "--parse-draft-url", "--parse-reuse-answers"}
EXACT = {"serve_gpt_oss_120b_texts.sh": {"--parse-verification"}}
"""Recipe -> its flags of PARSE besides those that name where drafts come from."""
DRAFT_URL = "http://127.0.0.1:9"
# The head of the EAGLE-3 recipe: one layer of the target's width, its own small vocabulary, and
# fewer positions than the models.
HEAD = (
    LLAMA3
    | shape(8192, 1, 64, 28672, head_dim=128)
    | {"architectures": ["LlamaForCausalLMEagle3"], "draft_vocab_size": 32000}
    | {"max_position_embeddings": 2048}
)


def kv_kib(config: dict) -> int:
    """Returns the KiB of KV per token in bf16."""
    config = config.get("text_config", config)
    layers = config["num_hidden_layers"] // config.get("full_attention_interval", 1)
    if rank := config.get("kv_lora_rank"):
        return layers * (rank + config["qk_rope_head_dim"]) * BF16_BYTES // KIB
    width = config["num_key_value_heads"] * config["head_dim"]
    return 2 * layers * width * BF16_BYTES // KIB


def write_models(folder: Path, recipe: str) -> dict[str, str]:
    """Model folders with an empty file of weights, as a recipe's environment variables."""
    family, target, draft = PAIRS[recipe]
    for name, config in (("TARGET", target), ("DRAFT", draft), ("HEAD", HEAD)):
        if config is None:
            continue
        (folder / name).mkdir()
        (folder / name / "config.json").write_text(json.dumps(config))
        save_file({}, folder / name / "model.safetensors")
        FAMILIES[family].tokenizer().save_pretrained(folder / name)
    models = {path.name: str(path) for path in folder.iterdir()}
    return {**models, "DRAFT_URL": DRAFT_URL}


def run_recipe(recipe: str, folder: Path, models: dict[str, str], *flags: str) -> list[str]:
    """Returns the arguments that a recipe passes to Python."""
    python = folder / "python"
    python.write_text('#!/bin/sh\nprintf "%s\\n" "$@"\n')
    python.chmod(0o755)
    environment = {"PATH": os.environ["PATH"], "PYTHON": str(python), **models}
    done = subprocess.run(
        [EXAMPLES / recipe, *flags], env=environment, capture_output=True, text=True, check=False
    )
    assert done.returncode == 0, done.stderr
    return done.stdout.splitlines()


def header(recipe: str) -> str:
    lines = (EXAMPLES / recipe).read_text().splitlines()
    return "\n".join(line for line in lines if line.startswith("#"))


def test_every_recipe_is_tested():
    assert sorted(PAIRS) == RECIPES


@pytest.mark.parametrize("recipe", RECIPES)
@pytest.mark.parametrize("shell", ["sh", "bash"])
def test_shell_syntax(recipe: str, shell: str):
    done = subprocess.run([shell, "-n", EXAMPLES / recipe], capture_output=True, check=False)
    assert done.returncode == 0, done.stderr
    assert os.access(EXAMPLES / recipe, os.X_OK)


@pytest.mark.parametrize("recipe", RECIPES)
def test_a_missing_path_is_named(recipe: str):
    """With TARGET unset nothing is started; the shell names the variable and its meaning."""
    done = subprocess.run(
        ["sh", EXAMPLES / recipe],
        env={"PATH": os.environ["PATH"], "HEAD": "head", "PYTHON": "false"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode
    assert "TARGET: set TARGET to " in done.stderr


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_header_states_the_requirements(recipe: str):
    text = header(recipe)
    assert "NOT RUN YET" in text
    assert "ardware" in text
    assert "Memory:" in text
    command = (EXAMPLES / recipe).read_text().partition("\nexec ")[2]
    for name in re.findall(r"--[a-z0-9-]+", command):
        assert name in text, f"the header does not say why {name}"
    _, target, draft = PAIRS[recipe]
    for config in (HEAD,) if recipe == WITH_HEAD else filter(None, (target, draft)):
        assert f"{kv_kib(config)} KiB" in text


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_header_says_what_the_table_of_families_says(recipe: str, tmp_path: Path):
    """Of judges; the recipe with a head runs another one."""
    from sglang.srt.configs.model_config import ModelConfig

    from sglang_parse.startup.families import family_of

    text, command = header(recipe), (EXAMPLES / recipe).read_text().partition("\nexec ")[2]
    said = re.findall(r"Judges of this target, by docs/models.md: (.*)\. Here: (\w+)\.", text)
    runs_another = recipe == WITH_HEAD
    if not runs_another:
        family = family_of(ModelConfig(write_models(tmp_path, recipe)["TARGET"]))
        is_exact = "--parse-verification token" in command
        assert said == [(family.judges, "none" if is_exact else "likelihood")]
    assert "refused with" not in text
    assert bool(said) is not runs_another


@pytest.mark.parametrize("recipe", sorted(PAIRS.keys() - {WITH_HEAD}))
def test_the_header_says_what_the_roofline_computes(recipe: str, tmp_path: Path):
    """At 1, 8 and 16 requests: over plain decoding, the best draft lengths, what stock SGLang has
    for the model, and the model's own layer in PARSE."""
    text = re.sub(r"\n# *", " ", header(recipe))
    pattern = r"Roofline, (an|four|eight) (H\d+), .*computed: (.*?) with (drafts|texts) of (.*?) "
    pattern += r"where 0\.92 .*?stock (EAGLE3?)\b.*? 3 tokens a pass (.*?)\.(?!\d)"
    pattern += r"(?: In PARSE the layer alone has (.*?)\.(?!\d))?"
    count, gpu, own, ways, lengths, stock, of_stock, layer = re.search(pattern, text).groups()
    words = ["--gpu", gpu.lower(), "--tp-size", str(GPU_COUNTS[count])]
    for name, config in zip(("target", "draft"), PAIRS[recipe][1:], strict=True):
        if config is not None:
            published = {"quantization_config": {"quant_method": "mxfp4"}}  # not for SGLang's CPU
            more = published if config["model_type"] == "gpt_oss" else {}
            (tmp_path / name).write_text(json.dumps({**config, **more}))
            words += [f"--{name}", str(tmp_path / name)]
    parser = argparse.ArgumentParser()
    RooflineSettings.add_arguments(parser)
    settings = RooflineSettings.read(parser.parse_args(words))
    kinds = BLOCKS if recipe.endswith("pard.sh") else (ONE_TOKEN,)
    loads = [Workload(settings, num_reqs) for num_reqs in (1, 8, 16)]
    plain = [load.plain() for load in loads]

    def speedups(found: Iterable[float]) -> str:
        return "{:.1f}x, {:.1f}x and {:.1f}x".format(*map(operator.truediv, plain, found))

    found = [load.parse(0.92, () if ways == "texts" else kinds) for load in loads]
    computed = [
        speedups(ms for ms, _ in found),
        "{}, {} and {}".format(*(length for _, length in found)),
        speedups(load.eagle3(3) if stock == "EAGLE3" else load.mtp(3) for load in loads),
        speedups(load.mtp(3, is_stock=False) for load in loads) if layer else None,
    ]
    assert [own, lengths, of_stock, layer] == computed
    assert bool(layer) is ("--parse-mtp own" in text)


@pytest.mark.parametrize(
    ("config", "billions", "state_mib"),
    [(DEEPSEEK_V3, 671, 0), (GLM_FLASH, 30, 0), (QWEN3_5, 27, 144), (QWEN3_MOE, 235, 0)],
)
def test_shapes_have_as_many_weights_as_the_models_names_say(
    config: dict, billions: int, state_mib: int, tmp_path: Path
):
    """Of all kinds of layers: latent attention, gated delta nets, dense layers before experts."""
    (tmp_path / "config.json").write_text(json.dumps(config))
    shape = Shape.read(str(tmp_path))
    assert shape.num_bytes(1) / 1e9 == pytest.approx(billions, rel=0.01)
    assert shape.kv_per_token * BF16_BYTES // KIB == kv_kib(config)
    assert shape.state_bytes / KIB**2 == state_mib


def test_the_recipe_with_a_head_repeats_the_other_ones_figures():
    """As fast as stock EAGLE3 where only the head drafts: the same figures."""
    own, other = (header(name).replace("\n# ", " ") for name in (WITH_HEAD, "serve_llama3_70b.sh"))
    found = re.search(r"has what stock EAGLE3 has, (.*?)\.(?!\d)", own)
    assert f"3 tokens a pass {found[1]}." in other


def parse_like_the_launcher(argv: list[str]):
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import prepare_server_args

    args = prepare_server_args(argv)
    args.resolve_once()
    return args


@pytest.fixture(scope="module")
def known_flags() -> set[str]:
    """Option strings of ``python -m sglang.launch_server --help``, PARSE's among them."""
    from sglang.srt.plugins import load_plugins

    load_plugins()
    from sglang.srt.server_args import ServerArgs

    parser = argparse.ArgumentParser()
    ServerArgs.add_cli_args(parser)
    return set(re.findall(r"--[a-z0-9-]+", parser.format_help()))


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_servers_checks_pass(
    recipe: str, tmp_path: Path, known_flags: set[str], monkeypatch: pytest.MonkeyPatch
):
    """Every flag exists, and the checks of SGLang and PARSE pass on the models' shapes."""
    from sglang.srt.arg_groups.overrides import resolved_view

    from sglang_parse.core.config import ParseConfig

    models = write_models(tmp_path, recipe)
    module, *argv = run_recipe(recipe, tmp_path, models, "--device", "cuda")[1:]
    for export in re.findall(
        r"^export (\w+)=(\w+)$", (EXAMPLES / recipe).read_text(), re.MULTILINE
    ):
        monkeypatch.setenv(*export)
    assert module == "sglang.launch_server"
    flags = [word for word in argv if word.startswith("--")]
    assert set(flags) <= known_flags
    assert len(flags) == len(set(flags))
    view = resolved_view(parse_like_the_launcher(argv))
    assert view.speculative_draft_model_path == models.get("DRAFT")
    config = ParseConfig.from_env()
    assert config.draft_url == (DRAFT_URL if "--parse-draft-url" in flags else "")
    # No rows of a question; of a block of 8 tokens, which the draft's files ask for, 63 more.
    masks = 63 if recipe.endswith("pard.sh") else 0
    assert view.speculative_num_draft_tokens == 1 + config.draft_tokens + masks
    proposers = {"--parse-eagle3-path": "eagle3", "--parse-mtp": "mtp"}
    assert config.proposer == "".join(proposers.get(flag, "") for flag in flags)
    # All else is PARSE's default.
    own = {flag for flag in flags if flag.startswith("--parse-")}
    assert own <= {*SOURCES, *EXACT.get(recipe, ())}


@pytest.mark.parametrize(("tp_size", "fits"), [(4, True), (8, False)])
def test_experts_in_fp8_blocks_on_the_ranks(tp_size: int, fits: bool):
    """SGLang's check when it creates the experts' weights."""
    import torch
    from sglang.srt.layers.moe.moe_runner import MoeRunnerConfig
    from sglang.srt.layers.quantization.fp8 import Fp8Config, Fp8MoEMethod

    layer = torch.nn.Module()
    layer.moe_tp_size, layer.moe_runner_config = tp_size, MoeRunnerConfig()
    blocks = QWEN3_MOE["quantization_config"]["weight_block_size"]

    def make() -> None:
        with torch.device("meta"):
            Fp8MoEMethod.create_fp8_moe_weight_(
                layer,
                num_experts=QWEN3_MOE["num_experts"],
                hidden_size=QWEN3_MOE["hidden_size"],
                intermediate_size_per_partition=QWEN3_MOE["moe_intermediate_size"] // tp_size,
                block_quant=True,
                quant_config=Fp8Config(
                    is_checkpoint_fp8_serialized=True,
                    activation_scheme="dynamic",
                    weight_block_size=blocks,
                ),
                use_mxfp8=False,
                is_checkpoint_fp8_serialized=True,
                is_fp4_expert=False,
                params_dtype=torch.bfloat16,
            )

    if fits:
        make()
        assert f"--tp-size {tp_size} " in (EXAMPLES / "serve_qwen3_235b.sh").read_text()
        return
    with pytest.raises(ValueError, match=r"192 is not divisible by .* block_n = 128"):
        make()


def test_flags_after_a_recipe_override_it(tmp_path: Path):
    models = {"TARGET": "target", "DRAFT": "draft"}
    arguments = run_recipe("serve_qwen3_32b.sh", tmp_path, models, "--tp-size", "2")
    assert arguments[-2:] == ["--tp-size", "2"]
    assert arguments[arguments.index("--model-path") + 1] == "target"


# -- the container ----------------------------------------------------------------

DOCKER = EXAMPLES / "docker"
COMPOSE = yaml.safe_load((DOCKER / "compose.yaml").read_text())
DOCKERFILE = (DOCKER / "Dockerfile").read_text()


def copied() -> list[tuple[list[str], str]]:
    """Returns sources and destination of each COPY."""
    lines = [line.split()[1:] for line in DOCKERFILE.splitlines() if line.startswith("COPY ")]
    return [(words[:-1], words[-1]) for words in lines]


def inline(name: str) -> Any:
    return yaml.safe_load(COMPOSE["configs"][name]["content"])


def mounted(service: str) -> dict[str, PurePosixPath]:
    """Config -> where the service reads it."""
    configs = COMPOSE["services"][service]["configs"]
    return {config["source"]: PurePosixPath(config["target"]) for config in configs}


def test_the_image_is_of_the_supported_version():
    from sglang_parse.startup.compat import pinned_version

    assert f"\nARG SGLANG_IMAGE=lmsysorg/sglang:v{pinned_version()}\nFROM " in DOCKERFILE
    assert DOCKERFILE.count("HEALTHCHECK") + ("healthcheck" in str(COMPOSE)) == 1


def test_the_wheel_builds_from_what_the_image_copies(tmp_path: Path):
    for sources, target in copied()[:-1]:
        folder = tmp_path / PurePosixPath(target).relative_to("/tmp/parse")
        for name in sources:
            source = EXAMPLES.parent / name
            if source.is_dir():
                shutil.copytree(source, folder, symlinks=True)
            else:
                shutil.copy(source, folder)
    command = [sys.executable, "-m", "build", "--wheel", "--no-isolation", tmp_path]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    names = subprocess.check_output(
        [sys.executable, "-m", "zipfile", "-l", *(tmp_path / "dist").glob("*.whl")], text=True
    )
    assert "sglang_parse/patches/parse/" in names
    assert "sglang_parse/core/questions/llama3.json" in names


@pytest.mark.parametrize("recipe", RECIPES)
def test_the_container_starts_a_recipe(recipe: str, tmp_path: Path, known_flags: set[str]):
    server = COMPOSE["services"]["parse"]
    variables = {"RECIPE": recipe, "FLAGS": "--tp-size 2", "HEAD": "head"}
    variables["DRAFT_URL"] = DRAFT_URL

    def value(text: str) -> str:
        return re.sub(r"\$\{(\w+):-(.*?)\}", lambda found: variables.get(*found.groups()), text)

    program, *flags = shlex.split(value(server["command"]))
    assert copied()[-1] == (["examples/serve_*.sh"], "/opt/parse/")
    assert program == f"/opt/parse/{recipe}"
    names = ("TARGET", "DRAFT", "HEAD", "DRAFT_URL")
    models = {name: value(server["environment"][name]) for name in names}
    arguments = run_recipe(recipe, tmp_path, models, *flags)
    assert {word for word in arguments if word.startswith("--")} <= known_flags
    assert [*arguments[arguments.index("--host") :]] == [
        *("--host", "0.0.0.0", "--enable-metrics", "--tp-size", "2")
    ]
    assert arguments[arguments.index("--port") + 1] == "30000"
    assert server["ports"] == ["127.0.0.1:30000:30000"]


def test_the_default_recipe_is_one():
    command = COMPOSE["services"]["parse"]["command"]
    assert re.search(r"\{RECIPE:-(.*?)\}", command)[1] in RECIPES


def test_the_files_of_the_container_exist():
    build = COMPOSE["services"]["parse"]["build"]
    context = (DOCKER / build["context"]).resolve()
    assert (context / build["dockerfile"]).samefile(DOCKER / "Dockerfile")
    for sources, _ in copied():
        assert all(list(context.glob(name)) for name in sources)
    assert (DOCKER / COMPOSE["configs"]["dashboard"]["file"]).is_file()


def test_prometheus_and_grafana_are_provisioned():
    for service in ("prometheus", "grafana"):
        assert COMPOSE["services"][service]["profiles"] == ["metrics"]
        assert set(mounted(service)) <= set(COMPOSE["configs"])
    scraped = inline("prometheus")
    (job,) = scraped["scrape_configs"]
    assert job["static_configs"] == [{"targets": ["parse:30000"]}]
    (source,) = inline("datasource")["datasources"]
    assert source["url"] == "http://prometheus:9090"
    # $__rate_interval is made of it.
    assert source["jsonData"]["timeInterval"] == scraped["global"]["scrape_interval"]
    (provider,) = inline("dashboards")["providers"]
    assert provider["options"]["path"] == str(mounted("grafana")["dashboard"].parent)


# -- servers of the documents that are not started there ---------------------------------


@pytest.mark.parametrize("page", ["README.md", "docs/drafts.md", "docs/getting-started.md"])
def test_the_first_server_needs_no_draft_model(page: str, tmp_path: Path):
    """Two flags; what drafts then is the prompt (tests/e2e/test_prompt.py serves so)."""
    from sglang.srt.arg_groups.overrides import resolved_view

    from sglang_parse.core.config import ParseConfig

    text = (EXAMPLES.parent / page).read_text()
    pattern = r"^```\n(python -m sglang.launch_server .*?)^```$"
    block = re.findall(pattern, text, re.MULTILINE | re.DOTALL)[0]
    argv = shlex.split(block)[3:]
    assert argv[::2] == ["--model-path", "--speculative-algorithm"]
    argv[1] = write_models(tmp_path, "serve_qwen3_32b.sh")["TARGET"]
    view = resolved_view(parse_like_the_launcher([*argv, "--device", "cuda"]))
    assert view.speculative_algorithm == "PARSE"
    assert view.speculative_draft_model_path is None
    assert ParseConfig.from_env().prompt_drafts == "on"


# -- the page for SGLang's documentation ----------------------------------------------


def test_the_page_for_sglangs_documentation(tmp_path: Path, known_flags: set[str]):
    """Its only block starts a server; its names exist, with the defaults that it says."""
    from sglang.srt.arg_groups.overrides import resolved_view

    from sglang_parse.core.config import ParseConfig, flag
    from sglang_parse.core.setting import settings_of
    from sglang_parse.telemetry.metrics import METRICS

    page = (EXAMPLES.parent / "docs/parse.mdx").read_text()
    (block,) = re.findall(r"^```bash\n(.*?)^```$", page, re.MULTILINE | re.DOTALL)
    assert page.count("```") == 2
    _, _, module, *argv = shlex.split(block.replace("\\\n", " "))
    assert module == "sglang.launch_server"
    models = write_models(tmp_path, "serve_qwen3_32b.sh")
    for name, word in (("TARGET", "--model-path"), ("DRAFT", "--speculative-draft-model-path")):
        argv[argv.index(word) + 1] = models[name]
    view = resolved_view(parse_like_the_launcher([*argv, "--device", "cuda"]))
    assert view.speculative_draft_model_path == models["DRAFT"]
    assert set(re.findall(r"--[a-z0-9]+(?:-[a-z0-9]+)+", page)) <= known_flags
    metrics = {metric.name for metric in METRICS}
    assert set(re.findall(r"sglang:parse_(\w+)", page)) <= metrics
    defaults = {flag(setting.name): str(setting.default) for setting in settings_of(ParseConfig)}
    rows = re.findall(r"^\| `(--parse-[a-z-]+)` \| `(.*?)` \|", page, re.MULTILINE)
    assert len(rows) == 6
    assert all(defaults[name] == default for name, default in rows)
