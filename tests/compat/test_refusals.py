"""The launcher refuses unsupported configurations: setting, value found, fix.

Runs SGLang's own ``prepare_server_args`` (what ``python -m sglang.launch_server`` calls first),
then resolves, before any process starts), so nothing here needs a server.
"""

from __future__ import annotations

import json
import re
from pathlib import Path

import pytest

from support.demo_pair import DEMO
from support.families import TINY
from support.launch import DSA, LATENT, V4, changed, launch, other_model
from support.models import load_tokenizer
from support.random_pair import PairShape, make_pair

pytestmark = [pytest.mark.compat, pytest.mark.usefixtures("clean_environment")]


@pytest.fixture(scope="module")
def pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    return make_pair(tmp_path_factory.mktemp("pair"), PairShape(num_layers=1, max_positions=512))


def test_a_good_configuration_is_accepted_and_completed(pair):
    from sglang.srt.arg_groups.overrides import resolved_view

    view = resolved_view(launch(pair, "--parse-draft-tokens", "40", "--parse-max-prefixes", "4"))
    assert view.speculative_num_draft_tokens > 41


ON_A_GPU = ("--device", "cuda", "--attention-backend", "triton")


@pytest.mark.parametrize(
    ("flags", "overlaps"),
    [
        ((), False),
        (("--parse-overlap", "on"), True),
        (ON_A_GPU, True),
        ((*ON_A_GPU, "--parse-overlap", "off"), False),
        ((*ON_A_GPU, "--disable-overlap-schedule"), False),
    ],
)
def test_overlap_schedule(pair, flags: tuple[str, ...], overlaps: bool):
    from sglang.srt.arg_groups.overrides import resolved_view

    assert resolved_view(launch(pair, *flags)).disable_overlap_schedule is not overlaps


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--speculative-draft-model-path", "/no/such/folder"), r"/no/such/folder.*Fix"),
        (("--attention-backend", "triton"), r"'triton' with --device cpu.*use torch_native"),
        (("--parse-threshold", "-0.1"), r"--parse-threshold is -0\.1; use a number"),
        (("--parse-threshold", "2.5"), r"--parse-threshold is 2\.5; use a number"),
        (("--parse-draft-tokens", "0"), r"--parse-draft-tokens is 0; use a whole number"),
        (("--parse-draft-chunk", "99999"), r"--parse-draft-chunk is 99999"),
        (("--parse-max-prefixes", "0"), r"--parse-max-prefixes is 0; use a whole number"),
        (("--parse-overlap", "on", "--disable-overlap-schedule"), "leave it out, or use --parse-o"),
        (("--parse-segment", "tokens:0"), r"--parse-segment: expected 'line'"),
        (("--speculative-adaptive",), "--speculative-adaptive is True.*leave it out"),
        (("--speculative-use-rejection-sampling",), "rejection-sampling is True.*leave it out"),
        (("--speculative-accept-threshold-acc", "0.5"), "threshold-acc is 0.5.*leave it out"),
        (("--parse-question", "/no/such/file"), r"'/no/such/file' cannot be read"),
        (("--is-embedding",), "--is-embedding is True.*start it without PARSE"),
        (("--attn-dp-size", "2", "--tp-size", "2"), "--attn-dp-size is 2.*leave it and"),
        (
            ("--enable-dp-attention", "--dp-size", "2", "--tp-size", "2"),
            "--attn-dp-size is 2.*leave it and --enable-dp-attention out: use --tp-size alone",
        ),
        (("--pp-size", "2"), "--pp-size is 2. Fix: use --tp-size over the same GPUs"),
        (("--speculative-num-steps", "3"), "num-steps is 3: a setting of an EAGLE-3 head.*leave"),
        (("--speculative-eagle-topk", "4"), "--speculative-eagle-topk is 4.*--parse-eagle3-path"),
        (("--speculative-num-draft-tokens", "16"), "--speculative-num-draft-tokens is 16.*leave"),
        (("--speculative-attention-mode", "decode"), "attention-mode is 'decode'.*own algorithms"),
        (("--speculative-ngram-capacity", "9"), "--speculative-ngram-capacity is 9.*leave it out"),
        (("--speculative-adaptive-config", "x"), "adaptive-config is 'x'. Fix: leave it out"),
        (("--spec-trace-dir", "/tmp"), "--spec-trace-dir is '/tmp'. Fix: leave it out"),
        (("--uno-lora-path", "x"), "--uno-lora-path is 'x'. Fix: leave it out"),
    ],
)
def test_bad_settings(pair, flags: tuple[str, ...], message: str):
    with pytest.raises(Exception, match=message):
        launch(pair, *flags)


@pytest.mark.parametrize(
    ("named", "flags", "message"),
    [
        (
            {},
            ("--parse-draft-parallel-tokens", "4"),
            r"draft-parallel-tokens is .4.*Fix: use 1, or .*pard_token",
        ),
        ({"pard_token": 384}, (), r"pard_token in .*config\.json is 384.*one of its 384 tokens"),
        (
            {"pard_token": "mask"},
            (),
            r"pard_token in .* is 'mask'.*use --parse-draft-parallel-tokens 1",
        ),
        (
            {},
            ("--parse-draft-parallel-tokens", "17"),
            r"--parse-draft-parallel-tokens: got '17'; use auto, or a whole",
        ),
    ],
)
def test_drafts_without_parallel_drafting(pair, tmp_path: Path, named: dict, flags, message: str):
    draft = changed(pair[1], tmp_path / "draft", **named)
    with pytest.raises(Exception, match=message):
        launch((pair[0], draft), *flags)


@pytest.mark.parametrize(
    ("named", "flags", "rows"),
    [
        ({}, (), 0),
        ({}, ("--parse-draft-parallel-tokens", "1"), 0),
        ({"pard_token": 7}, ("--parse-draft-parallel-tokens", "1"), 0),
        ({"pard_token": 7}, (), 63),
        ({"ptd_token_id": 7}, ("--parse-draft-parallel-tokens", "16"), 255),
    ],
)
def test_req_to_token_rows_hold_a_block(pair, tmp_path: Path, named: dict, flags, rows: int):
    """As wide as the longest draft and its lookahead rows, which are a block in token mode."""
    from sglang.srt.arg_groups.overrides import resolved_view

    draft = changed(pair[1], tmp_path / "draft", **named)
    flags = ("--parse-verification", "token", "--parse-draft-tokens", "40", *flags)
    view = resolved_view(launch((pair[0], draft), *flags))
    assert view.speculative_num_draft_tokens == 1 + 40 + rows


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("triton", "--enable-deterministic-inference"), "deterministic-inference with triton"),
        (("triton", "--decode-attention-backend", "fa3"), "'fa3' with --attention-backend tri"),
        (("fa3", "--kv-cache-dtype", "fp8_e4m3"), "--kv-cache-dtype with fa3 is 'fp8_e4m3'"),
        (("fa3", "--parse-layout", "mask"), "--parse-layout is 'mask' with .*fa3.*take no mask"),
        (("fa3", "--cuda-graph-backend-prefill", "full"), "prefill is 'full'.*use breakable"),
        (("fa3", "--page-size", "16"), "ends inside a page.*Fix: use --page-size 1"),
        (("triton", "--enable-pdmux"), "--enable-pdmux is True.*one after the other"),
        (("triton", "--enable-two-batch-overlap"), "two-batch-overlap is True.*not split in two"),
        (("triton", "--moe-a2a-backend", "deepep"), "--moe-a2a-backend is 'deepep'.*or use none"),
        (("triton", "--moe-dense-tp-size", "1"), "--moe-dense-tp-size is 1. Fix: leave it out"),
        (("triton", "--enable-waterfill"), "--enable-waterfill is True.*all-to-all backend"),
    ],
)
def test_bad_settings_on_a_gpu(pair, flags: tuple[str, ...], message: str):
    with pytest.raises(Exception, match=message):
        launch(pair, "--device", "cuda", "--attention-backend", *flags)


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("", "is not a JSON object"),
        (
            '{"partial": "Right?", "complete": "Right?"}',
            "accept: Field required, reject: Field required",
        ),
        (
            '{"partial": "a", "complete": "b", "accept": "certainly not one", "reject": "no"}',
            r"accept 'certainly not one' is \d+ tokens.*single token",
        ),
        (
            '{"partial": "a", "complete": "b", "accept": "no", "reject": "no"}',
            "are the same token",
        ),
    ],
)
def test_bad_question_files(pair, tmp_path: Path, content: str, message: str):
    path = tmp_path / "question.json"
    path.write_text(content)
    with pytest.raises(Exception, match=message):
        launch(pair, "--parse-question", str(path))


def test_no_draft_model(pair):
    message = r"--speculative-draft-model-path is .*small model.*\(for Qwen3: Qwen3-0.6B, Qwen3-1"
    with pytest.raises(Exception, match=message):
        launch(pair, "--speculative-draft-model-path", "")


@pytest.mark.parametrize(
    ("family", "usual"),
    [
        ("qwen3", "for Qwen3: Qwen3-0.6B, Qwen3-1.7B"),
        ("glm-4.7-flash", "for GLM-4.7-Flash: texts, earlier answers, `--parse-draft-url`"),
    ],
)
def test_the_usual_drafts_of_a_target(
    pair, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, family: str, usual: str
):
    """Named where there is no draft model, and where a setting needs one."""
    from sglang_parse.startup import checks

    shown: list[str] = []
    monkeypatch.setattr(checks.logger, "info", lambda text, *words: shown.append(text % words))
    target = pair[0] if family == "qwen3" else TINY[family].pair(tmp_path)[0]
    launch((target, None), "--parse-verification", "token", ask=False)
    assert any(
        line.endswith(f"drafts are texts and copies of the prompt only. What can draft {usual}")
        for line in shown
    )
    message = rf"tokens is 4. Fix.*give a draft model with --spec.*\({re.escape(usual)}\)"
    flags = ("--parse-verification", "token", "--parse-draft-parallel-tokens", "4")
    with pytest.raises(Exception, match=message):
        launch((target, None), *flags, ask=False)


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("", "a folder that has no config.json. Fix: give the folder of a model, or its name on"),
        ("config.json", "'.*config.json': a file. Fix: give the folder of a model"),
        ("../drafft", "'.*drafft': it does not exist. Fix: give the folder of a model"),
    ],
)
def test_a_draft_path_without_a_model(pair, tmp_path: Path, path: str, message: str):
    (tmp_path / "config.json").write_text("{}")
    folder = tmp_path if path else pair[0].parent
    with pytest.raises(Exception, match=message):
        launch(pair, "--speculative-draft-model-path", str(folder / path))


@pytest.mark.parametrize(
    ("path", "message"),
    [
        ("examples/demo_pair/drafft", "'examples/demo_pair/drafft': it does not exist. Fix: give"),
        ("demo_pair/drafft", "'demo_pair/drafft': there is no such folder, and it cannot be read"),
    ],
)
def test_a_relative_draft_path_with_a_typing_error(
    pair, monkeypatch: pytest.MonkeyPatch, path: str, message: str
):
    from huggingface_hub import constants

    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    with pytest.raises(Exception, match=message):
        launch(pair, "--speculative-draft-model-path", path)


def test_a_draft_without_a_tokenizer(pair, tmp_path: Path):
    draft = changed(pair[1], tmp_path / "draft")
    for file in draft.glob("*token*"):
        file.unlink()
    with pytest.raises(Exception, match=r"draft': without tokenizer files. Fix: put the draft's"):
        launch(pair, "--speculative-draft-model-path", str(draft))


def test_a_draft_with_a_damaged_file(pair, tmp_path: Path):
    draft = changed(pair[1], tmp_path / "draft")
    file = draft / "model.safetensors"
    file.write_bytes(file.read_bytes()[:-100])
    with pytest.raises(Exception, match=r"draft': model.safetensors cannot be read \(.*copy it"):
        launch(pair, "--speculative-draft-model-path", str(draft))
    file.unlink()
    with pytest.raises(Exception, match=r"draft': the folder has no weights. Fix: copy it"):
        launch(pair, "--speculative-draft-model-path", str(draft))
    launch((pair[0], draft), "--speculative-draft-load-format", "dummy")


def test_without_tokenizers(pair):
    """SGLang's processes have none then; its settings, as a scheduler gets them, name no path."""
    from sglang_parse.startup.models import tokenizer_of

    args = launch(pair, "--skip-tokenizer-init")
    assert args.tokenizer_path is None
    assert tokenizer_of(args).get_vocab() == load_tokenizer(pair[0]).get_vocab()


def test_a_target_that_generates_no_text(pair, tmp_path: Path):
    """By its checkpoint; ``--is-embedding`` is not given."""
    target = changed(pair[0], tmp_path / "target", architectures=["LlamaEmbeddingModel"])
    with pytest.raises(Exception, match="--model-path is .*target': a model that generates no te"):
        launch((target, pair[1]))


def test_settings_are_checked_as_sglang_resolves_them(pair, monkeypatch: pytest.MonkeyPatch):
    """Also those that it changes after it has called ``validate_server_args``."""
    from sglang.srt.arg_groups import dllm_hook
    from sglang.srt.arg_groups.overrides import declare_resolution

    def late(server_args: object) -> None:
        declare_resolution(server_args, "late", attention_backend="triton")

    late.__name__ = "handle_dllm_inference"
    monkeypatch.setattr(dllm_hook, "handle_dllm_inference", late)
    with pytest.raises(Exception, match="--attention-backend is 'triton' with --device cpu"):
        launch(pair)


def test_revisions_of_models_on_a_hub(pair, monkeypatch: pytest.MonkeyPatch):
    """The start-up checks read those that the server loads, the draft's "main" unless it is set."""
    from sglang.srt.configs import model_config
    from sglang.srt.utils import hf_transformers_utils as readers

    read = set()

    def recorded(original):
        def wrapper(path, *args, revision=None, **kwargs):
            read.add((original.__name__, Path(path).name, revision))
            return original(path, *args, revision=revision, **kwargs)

        return wrapper

    monkeypatch.setattr(model_config, "get_config", recorded(model_config.get_config))
    monkeypatch.setattr(readers, "get_tokenizer", recorded(readers.get_tokenizer))
    for flags, draft in (((), "main"), (("--speculative-draft-model-revision", "two"), "two")):
        read.clear()
        launch(pair, "--revision", "one", *flags)
        expected = {
            (reader, model, revision)
            for reader in ("get_config", "get_tokenizer")
            for model, revision in (("target", "one"), ("draft", draft))
        }
        assert read == expected


GRANITE = {"layer_types": ["mamba", "attention"] * 2, "mamba_n_heads": 8, "mamba_d_head": 16}
HYBRID, SPARSE = "linear attention or Mamba layers", "sparse attention"
CHUNKS = "attention in chunks, which PARSE was not seen to serve: SGLang runs it on GPUs only"
LLAMA4 = {"text_config": {"attention_chunk_size": 64}}
EAGLE = "this one with SGLang's own --speculative-algorithm EAGLE, which drafts with its MTP layer"
ONLY_TARGETS = (
    ("qwen3_next", "Qwen3NextForCausalLM", {"full_attention_interval": 4}, HYBRID),
    ("qwen3_5_text", "Qwen3_5ForCausalLM", {}, HYBRID),
    ("qwen3_5_moe_text", "Qwen3_5MoeForCausalLM", {}, HYBRID),
    ("falcon_h1", "FalconH1ForCausalLM", {}, HYBRID),
    ("granitemoehybrid", "GraniteMoeHybridForCausalLM", GRANITE, HYBRID),
    ("nemotron_h", "NemotronHForCausalLM", {"hybrid_override_pattern": "M-*-"}, HYBRID),
)
REFUSED = (
    ("jamba", "JambaForCausalLM", {}, HYBRID),
    ("minimax", "MiniMaxText01ForCausalLM", {}, HYBRID),
    ("llama", "MiniMaxM3SparseForCausalLM", {}, SPARSE),
    ("deepseek_v32", "DeepseekV32ForCausalLM", DSA, SPARSE),
    ("glm_moe_dsa", "GlmMoeDsaForCausalLM", DSA, SPARSE),
    ("deepseek_v4", "DeepseekV4ForCausalLM", V4, SPARSE),
    ("llama4", "Llama4ForConditionalGeneration", LLAMA4, CHUNKS),
    ("longcat_flash", "LongcatFlashForCausalLM", LATENT, "latent attention"),
)


@pytest.mark.parametrize(
    ("role", "model_type", "architecture", "config", "kind"),
    [
        *(("draft", *model) for model in (*ONLY_TARGETS, *REFUSED)),
        *(("target", *model) for model in REFUSED),
    ],
)
def test_models_that_are_refused_by_their_attention(
    pair, tmp_path: Path, role: str, model_type: str, architecture: str, config: dict, kind: str
):
    """By config.json alone, before SGLang looks for what such a model needs of the device."""
    folder = other_model(pair[0], tmp_path / "other", (model_type, architecture), **config)
    models = (folder, pair[1]) if role == "target" else (pair[0], folder)
    setting = "--model-path" if role == "target" else "--speculative-draft-model-path"
    fix = "a model that" if role == "target" else "it on another server, by --parse-draft-url"
    with pytest.raises(
        Exception, match=rf"{setting} is '.*': a {architecture} .*with {kind}.*Fix: use {fix}"
    ) as error:
        launch(models)
    if role == "draft":
        assert "(for Qwen3: Qwen3-0.6B, Qwen3-1.7B)" in str(error.value)
    elif kind == SPARSE and "MiniMax" not in architecture:
        assert re.search(rf"\((DeepSeek V4|DeepSeek V3.2, GLM-5)\) .*{EAGLE}", str(error.value))


def test_kv_sizing_after_capture(pair, monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setenv("SGLANG_ENABLE_POST_CAPTURE_KV_SIZING", "1")
    with pytest.raises(Exception, match="POST_CAPTURE_KV_SIZING is True. Fix: set it to 0"):
        launch(pair)


def test_other_vocabulary_size(pair, tmp_path: Path):
    """Behind the tokenizer's tokens there is padding: more or less of it is another size only."""
    for place, (target, rows) in enumerate(((384, 999), (999, 384), (999, 500))):
        padded = changed(pair[0], tmp_path / f"target-{place}", vocab_size=target)
        launch((padded, changed(pair[1], tmp_path / f"draft-{place}", vocab_size=rows)))
    draft = changed(pair[1], tmp_path / "draft", vocab_size=383)
    message = r"draft': 383 tokens, its tokenizer has 384. Fix: use .*\(for Qwen3: Qwen3-0.6B"
    with pytest.raises(Exception, match=message):
        launch(pair, "--speculative-draft-model-path", str(draft))


def test_a_mask_token_that_the_target_lacks(pair, tmp_path: Path):
    draft = changed(pair[1], tmp_path / "draft", vocab_size=999, pard_token=384)
    with pytest.raises(Exception, match="pard_token in .* is 384.* one of its 384 tokens"):
        launch((pair[0], draft))


def test_other_tokenizer(pair, tmp_path: Path):
    draft = changed(pair[1], tmp_path / "draft")
    path = draft / "tokenizer.json"
    content = json.loads(path.read_text())
    vocab = content["model"]["vocab"]
    first, second = sorted(vocab, key=vocab.get)[100:102]
    vocab[first], vocab[second] = vocab[second], vocab[first]
    path.write_text(json.dumps(content))
    with pytest.raises(Exception, match=r"tokenizer differs from the target's in \d+ entries"):
        launch(pair, "--speculative-draft-model-path", str(draft))


def test_draft_heads_not_divisible_by_tp_size(pair, tmp_path: Path):
    draft = changed(pair[1], tmp_path / "draft", num_attention_heads=3, num_key_value_heads=3)
    with pytest.raises(Exception, match=r"--tp-size is 2.*the draft model's 3 attention heads"):
        launch(pair, "--speculative-draft-model-path", str(draft), "--tp-size", "2")


def test_draft_context_shorter_than_the_targets(pair, tmp_path: Path):
    draft = changed(pair[1], tmp_path / "draft", max_position_embeddings=128)
    with pytest.raises(Exception, match=r"draft': context length 128, the target's 512.*longer"):
        launch(pair, "--speculative-draft-model-path", str(draft))


def test_sliding_window_target(pair, tmp_path: Path):
    target = changed(
        pair[0],
        tmp_path / "target",
        use_sliding_window=True,
        sliding_window=64,
        max_window_layers=0,
        layer_types=["sliding_attention"],
    )
    with pytest.raises(
        Exception,
        match="target': a Qwen3ForCausalLM with sliding windows, which PARSE.*Fix: use a model",
    ):
        launch((target, pair[1]))


DECODE = ("--disaggregation-mode", "decode", "--parse-verification", "token")


def test_a_decode_server(pair):
    from sglang.srt.arg_groups.overrides import resolved_view

    view = resolved_view(launch(pair, *DECODE))
    assert view.disaggregation_decode_retraction_backup == "cpu_tensor"


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (("--disaggregation-mode", "prefill"), "mode is 'prefill'. Fix: start it without PARSE"),
        (
            (*DECODE, "--disaggregation-decode-retraction-backup", "host_pool"),
            "retraction-backup is 'host_pool'. Fix: use cpu_tensor",
        ),
        (
            (*DECODE, "--disaggregation-decode-enable-offload-kvcache"),
            "offload-kvcache is True",
        ),
        (
            (*DECODE, "--disaggregation-decode-allocation-policy", "prefill_complete"),
            "allocation-policy is 'prefill_complete'. Fix: leave it out",
        ),
        ((*DECODE, "--enable-lora", "--max-lora-rank", "8"), "--enable-lora is True.*leave it out"),
    ],
)
def test_settings_of_disaggregation(pair, flags: tuple[str, ...], message: str):
    with pytest.raises(Exception, match=message):
        launch(pair, *flags)


def test_a_decode_server_with_another_kind_of_kv(pair, monkeypatch: pytest.MonkeyPatch):
    from sglang_parse.startup import disaggregation

    states = disaggregation.Attention.STATES
    monkeypatch.setattr(disaggregation, "attention_of", lambda _: states)
    with pytest.raises(Exception, match="is 'decode': not seen to run with a target of linear att"):
        launch(pair, *DECODE)


HEAD = DEMO / "eagle3"
EAGLE3 = ("--parse-eagle3-path",)
DEMO_PAIR = (DEMO / "target", DEMO / "draft")


@pytest.mark.parametrize(
    ("flags", "steps"), [((), 7), *((("--speculative-num-steps", f"{n}"), n) for n in (1, 5, 16))]
)
def test_num_steps_of_an_eagle3_head(flags: tuple[str, ...], steps: int):
    from sglang.srt.arg_groups.overrides import resolved_view

    view = resolved_view(launch(DEMO_PAIR, *EAGLE3, str(HEAD), *flags))
    assert (view.speculative_num_steps, view.speculative_eagle_topk) == (steps, 1)


@pytest.mark.parametrize(
    ("flags", "message"),
    [
        (
            (*EAGLE3, str(HEAD), *DECODE[:2]),
            "is 'decode': a head reads .*leave --parse-eagle",
        ),
        ((*EAGLE3, "/no/such/head"), "--parse-eagle3-path is '/no/such/head': it do"),
        ((*EAGLE3, str(DEMO)), "--parse-eagle3-path is .*no config.json"),
        ((*EAGLE3, str(DEMO / "draft")), "architectures of .*draft is .*give an EAGLE-3 head"),
        ((*EAGLE3, str(HEAD), "--speculative-eagle-topk", "4"), "--speculative-eagle-topk is 4"),
        ((*EAGLE3, str(HEAD), "--speculative-num-steps", "0"), "--speculative-num-steps is 0"),
        ((*EAGLE3, str(HEAD), "--speculative-num-steps", "17"), "num-steps is 17.*use 1 to 16"),
        (
            (*EAGLE3, str(HEAD), "--speculative-num-draft-tokens", "9"),
            "--speculative-num-draft-tokens is 9.*use 8",
        ),
        (
            (*EAGLE3, str(HEAD), "--speculative-draft-window-size", "64"),
            "--speculative-draft-window-size is 64.*leave it out",
        ),
    ],
)
def test_bad_heads(flags: tuple[str, ...], message: str):
    with pytest.raises(Exception, match=message):
        launch(DEMO_PAIR, *flags)


@pytest.mark.parametrize(
    ("change", "message"),
    [
        ({"hidden_size": 256}, "hidden size of .* is 256.*made for this target.*128"),
        ({"target_hidden_size": 64}, "hidden size of .* is 64"),
        ({"vocab_size": 999}, "vocabulary of .* is 999"),
        (
            {"eagle_config": {"eagle_aux_hidden_state_layer_ids": [1, 4, 16]}},
            r"layer_ids of .* is \[1, 4, 16\].*16 layers",
        ),
    ],
)
def test_a_head_for_another_target(tmp_path: Path, change: dict, message: str):
    head = changed(HEAD, tmp_path / "head", **change)
    with pytest.raises(Exception, match=message):
        launch(DEMO_PAIR, *EAGLE3, str(head))


def test_eagle3_heads_not_divisible_by_tp_size(tmp_path: Path):
    head = changed(HEAD, tmp_path / "head", num_attention_heads=1, num_key_value_heads=1)
    with pytest.raises(Exception, match=r"--tp-size is 2.*the head's 1 attention heads"):
        launch(DEMO_PAIR, *EAGLE3, str(head), "--tp-size", "2")


DRAFT_HEAD = ("--parse-draft-eagle3-path", str(HEAD))
HEADED = (DEMO / "draft", DEMO / "target")
"""A draft model with a head."""


@pytest.mark.parametrize(("size", "lookahead"), [("auto", 5), ("6", 9)])
def test_a_head_of_the_draft_model(size: str, lookahead: int):
    """Rows are as long as its last step: no mask tokens follow a block."""
    from sglang.srt.arg_groups.overrides import resolved_view

    flags = ("--parse-draft-parallel-tokens", size, "--parse-draft-tokens", "40")
    flags = (*flags, "--parse-verification", "token")
    view = resolved_view(launch(HEADED, *DRAFT_HEAD, *flags, ask=False))
    assert view.speculative_num_draft_tokens == 1 + 40 + lookahead


@pytest.mark.parametrize(
    ("pair", "flags", "message"),
    [
        (HEADED, (DRAFT_HEAD[0], "/no/such"), "--parse-draft-eagle3-path is '/no/such': it do"),
        (HEADED, (DRAFT_HEAD[0], str(DEMO / "draft")), "architectures of .*give an EAGLE-3 head"),
        (DEMO_PAIR, DRAFT_HEAD, "the draft model fills mask tokens .*pard_token.*leave it out"),
        (
            HEADED,
            (*DRAFT_HEAD, "--parse-draft-parallel-tokens", "1"),
            "--parse-draft-parallel-tokens is 1: .*use 2 or more, or leave --parse-draft-eagle3-p",
        ),
        (
            HEADED,
            (*DRAFT_HEAD, "--speculative-num-steps", "3"),
            "--speculative-num-steps is 3.*leave it out",
        ),
        (
            HEADED,
            (
                *(*DRAFT_HEAD, "--device", "cuda", "--attention-backend", "triton"),
                *("--speculative-draft-attention-backend", "flashinfer"),
            ),
            "backend.* is 'flashinfer', which plans on the host.*use .*triton.*leave --parse-draft",
        ),
    ],
)
def test_bad_heads_of_the_draft_model(pair: tuple[Path, Path], flags: tuple, message: str):
    with pytest.raises(Exception, match=message):
        launch(pair, *flags)


def test_a_head_for_another_draft_model(tmp_path: Path):
    head = changed(HEAD, tmp_path / "head", hidden_size=64)
    with pytest.raises(Exception, match="hidden size of .* is 64.*made for this draft model.*128"):
        launch(HEADED, DRAFT_HEAD[0], str(head))


def test_a_head_without_its_draft_model():
    from sglang_parse.core.config import ParseConfig
    from sglang_parse.startup.models import AdmissionError
    from sglang_parse.startup.parallel import parallel_draft

    with pytest.raises(AdmissionError, match="is 'head': .*there is none.*give the draft model of"):
        parallel_draft(ParseConfig(draft_eagle3_path="head"), None)


def test_unknown_setting_in_the_environment(monkeypatch: pytest.MonkeyPatch):
    from sglang_parse.core.config import ENV_VAR, ParseConfig

    monkeypatch.setenv(ENV_VAR, '{"treshold": 0.5}')
    with pytest.raises(ValueError, match=r"unknown PARSE settings \['treshold'\]"):
        ParseConfig.from_env()


@pytest.mark.parametrize(
    ("value", "flags", "message"),
    [
        ("2", (), r"SGLANG_PARSE_SIMULATE_ACCEPTANCE is '2'; use a number from 0"),
        ("0.5", ("--parse-verification", "token"), r"is '0.5', but --parse-verification tok"),
    ],
)
def test_simulated_acceptance(pair, monkeypatch: pytest.MonkeyPatch, value, flags, message):
    from sglang_parse.core.simulation import ENV_VAR

    monkeypatch.setenv(ENV_VAR, value)
    with pytest.raises(Exception, match=message):
        launch(pair, *flags)


def test_flags_are_in_help(capsys: pytest.CaptureFixture[str], pair):
    with pytest.raises(SystemExit):
        launch(pair, "--help")
    shown = capsys.readouterr().out
    from sglang_parse.core.config import ParseConfig, flag

    assert all(flag(name) in shown for name in ParseConfig.model_fields)
