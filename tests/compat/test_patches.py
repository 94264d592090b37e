"""Patches: their results, and that a patch that is not in force stops the server."""

import ctypes
import inspect
from dataclasses import replace
from types import SimpleNamespace

import pytest
import torch

from support.demo_pair import DEMO

pytestmark = pytest.mark.compat


def test_kv_copy_reads_everything_before_it_writes():
    from sglang_parse.patches.cpu.kv_copy_cpu import copy_all_layer_kv_cache

    buffers = [torch.arange(24, dtype=torch.float32).view(6, 4) * (i + 1) for i in range(3)]
    before = [b.clone() for b in buffers]
    pointers = torch.tensor([b.data_ptr() for b in buffers], dtype=torch.uint64)
    strides = torch.tensor([4 * ctypes.sizeof(ctypes.c_float)] * 3)
    target, source = torch.tensor([1, 2, 0, 5]), torch.tensor([0, 1, 2, 3])
    copy_all_layer_kv_cache(pointers, strides, target, source, 3, 256, {})
    for buffer, old in zip(buffers, before, strict=True):
        expected = old.clone()
        expected[[1, 2, 0]] = old[[0, 1, 2]]
        assert torch.equal(buffer, expected)


def test_every_needed_patch_is_in_force_after_sglang_loaded_its_plugins():
    from sglang.srt.plugins import load_plugins

    from sglang_parse import patches

    load_plugins()
    patches.assert_applied()


def test_a_patch_that_is_not_in_force_is_an_error(monkeypatch):
    from sglang_parse import patches
    from sglang_parse.patches.base import Value

    changes = {"sglang.srt.managers.scheduler.Scheduler": Value(None)}
    broken = replace(patches.PATCHES[0], name="broken", changes=changes)
    monkeypatch.setattr(patches, "PATCHES", (broken,))
    with pytest.raises(patches.PatchError, match="broken"):
        patches.assert_applied()


def test_a_slot_counts_in_every_pool_that_shares_it(monkeypatch):
    """The bytes per slot by which SGLang divides the memory, against the demo pair's pools."""
    import json
    from types import SimpleNamespace

    from sglang.srt.runtime_context import get_parallel
    from sglang.srt.server_args import ServerArgs
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_parse.algorithm import ParseAlgorithm
    from sglang_parse.core.config import ENV_VAR, ParseConfig
    from sglang_parse.patches.parse import draft_kv_pool
    from sglang_parse.patches.parse.draft_kv_pool import _add_drafts

    def slot_bytes(model: str) -> int:
        config = json.loads((DEMO / model / "config.json").read_text())
        width = config["num_key_value_heads"] * config["head_dim"]
        return 2 * 4 * config["num_hidden_layers"] * width

    model, spec = SimpleNamespace(kv_cache_dtype="auto"), SimpleNamespace()
    spec.speculative_draft_kv_cache_dtype = None
    monkeypatch.setattr(draft_kv_pool, "get_model", lambda: model)
    monkeypatch.setattr(draft_kv_pool, "get_spec", lambda: spec)
    kvc = SimpleNamespace(
        is_draft_worker=False,
        spec_algorithm=object.__new__(ParseAlgorithm),
        kv_cache_dtype=torch.float8_e4m3fn,  # the target's, by its checkpoint
        server_args=ServerArgs(
            model_path=str(DEMO / "target"),
            speculative_draft_model_path=str(DEMO / "draft"),
            speculative_algorithm="PARSE",
            dtype="float32",
        ),
    )
    with get_parallel().override(attn_tp_size=1):
        monkeypatch.setenv(ENV_VAR, "")
        assert _add_drafts(1000, None, kvc) == 1000 + slot_bytes("draft")
        for settings, name in (
            (model, "kv_cache_dtype"),
            (spec, "speculative_draft_kv_cache_dtype"),
        ):
            with monkeypatch.context() as patch:
                patch.setattr(settings, name, "fp8_e4m3")
                assert _add_drafts(1000, None, kvc) == 1000 + slot_bytes("draft") / 4
        environ: dict[str, str] = {}
        ParseConfig(eagle3_path=str(DEMO / "eagle3")).to_env(environ)
        monkeypatch.setenv(ENV_VAR, environ[ENV_VAR])
        both = slot_bytes("draft") + slot_bytes("eagle3")
        assert _add_drafts(1000, None, kvc) == 1000 + both
        settings = {"eagle3_path": str(DEMO / "eagle3"), "draft_eagle3_path": str(DEMO / "eagle3")}
        ParseConfig(**settings).to_env(environ)
        monkeypatch.setenv(ENV_VAR, environ[ENV_VAR])
        assert _add_drafts(1000, None, kvc) == 1000 + both + slot_bytes("eagle3")
        # What SGLang adds to a slot of the larger one of two pools.
        assert draft_kv_pool._with_drafts(0, kvc) == both + slot_bytes("eagle3")
        kvc.is_draft_worker = True
        assert _add_drafts(1000, None, kvc) == 1000
        kvc.is_draft_worker, kvc.spec_algorithm = False, SpeculativeAlgorithm.STANDALONE
        assert _add_drafts(1000, None, kvc) == 1000


def test_graphs_capture_plain_decode_steps():
    """While a PARSE model captures, SGLang sees no speculation and one row per request."""
    from types import SimpleNamespace

    from sglang.srt.model_executor.model_runner import ModelRunner
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_parse.algorithm import ParseAlgorithm
    from sglang_parse.patches.parse.decode_graphs import _capture_plain_steps

    seen = []

    def capture(runner, *, fails: bool) -> None:
        is_speculative = runner.spec_algorithm.is_speculative()
        width = None if is_speculative else ModelRunner.decode_num_tokens_per_req(runner)
        seen.append((is_speculative, width))
        if fails:
            raise RuntimeError

    dense = SimpleNamespace(dllm_algorithm=None)
    for algorithm in (object.__new__(ParseAlgorithm), SpeculativeAlgorithm.EAGLE):
        runner = SimpleNamespace(spec_algorithm=algorithm, server_args=dense, is_draft_worker=False)
        _capture_plain_steps(capture, runner, fails=False)
        with pytest.raises(RuntimeError):
            _capture_plain_steps(capture, runner, fails=True)
        assert runner.spec_algorithm is algorithm
    assert seen == [(False, 1)] * 2 + [(True, None)] * 2


@pytest.mark.parametrize("is_draft_worker", [True, False])
@pytest.mark.parametrize("kind", ["breakable", "disabled"])
def test_a_draft_model_captures_prefill_graphs(
    monkeypatch: pytest.MonkeyPatch, kind: str, is_draft_worker: bool
):
    """By SGLang's method for draft models, if prefill graphs are enabled; the target keeps its
    sizes."""
    from types import SimpleNamespace

    from sglang.srt.model_executor import cuda_graph_config
    from sglang.srt.model_executor.model_runner import ModelRunner

    from sglang_parse.algorithm import ParseAlgorithm
    from sglang_parse.core.config import ENV_VAR
    from sglang_parse.patches.parse import decode_graphs

    monkeypatch.setenv(ENV_VAR, "")
    prefill = SimpleNamespace(backend=kind, bs=[4, 8, 12, 16])
    graphs = SimpleNamespace(cuda_graph_config=SimpleNamespace(prefill=prefill))
    for module in (cuda_graph_config, decode_graphs):
        monkeypatch.setattr(module, "get_exec", lambda: SimpleNamespace(graph=graphs))
    captured = []

    def capture(*args: object, **kwargs: object) -> None:
        bound = inspect.signature(ModelRunner.init_prefill_cuda_graph).bind(None, *args, **kwargs)
        captured.append((bound.arguments["force_for_draft_worker"], prefill.bs))

    runner = SimpleNamespace(
        spec_algorithm=object.__new__(ParseAlgorithm),
        is_draft_worker=is_draft_worker,
        init_prefill_cuda_graph=capture,
    )
    decode_graphs._capture_plain_steps(lambda _: None, runner)
    assert captured == [(True, [4, 8, 16])] * (kind == "breakable" and is_draft_worker)
    assert prefill.bs == [4, 8, 12, 16]


@pytest.mark.parametrize("max_rows", [32, 2048, 8192])
def test_few_sizes_of_prefills_replay_as_much_as_all(max_rows: int):
    """By SGLang's rule: none that more than doubles a forward's rows."""
    from sglang.srt.arg_groups.cuda_graph_hook import generate_prefill_cuda_graph_batch_sizes
    from sglang.srt.model_executor.runner import prefill_cuda_graph_runner as sglang_runner

    from sglang_parse.patches.parse.decode_graphs import few_sizes

    def replays(sizes: list[int], rows: int) -> bool:
        fitting = [size for size in sizes if size >= rows]
        factor = sglang_runner._MAX_PREFILL_CUDA_GRAPH_PADDING_FACTOR
        return bool(fitting) and fitting[0] <= factor * rows

    sizes = generate_prefill_cuda_graph_batch_sizes(max_rows)
    few = few_sizes(sizes)
    assert len(few) <= 12
    for rows in range(1, max_rows + 100):
        assert replays(few, rows) is replays(sizes, rows)
    assert few_sizes([144, 272, 528, 1040]) == [144, 272, 528, 1040]


def test_buffers_are_sized_for_plain_decode_steps(monkeypatch: pytest.MonkeyPatch):
    """With PARSE only, and only while they are created."""
    from types import SimpleNamespace

    from sglang.srt.runtime_context import _ConfigBag
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_parse.algorithm import ParseAlgorithm
    from sglang_parse.patches.parse import decode_graphs

    names = ("speculative_num_draft_tokens", "max_speculative_num_draft_tokens")
    spec = _ConfigBag("spec")
    for name in names:
        spec._set(name, 1217)
    monkeypatch.setattr(decode_graphs, "get_spec", lambda: spec)
    seen = []
    for algorithm in (object.__new__(ParseAlgorithm), SpeculativeAlgorithm.EAGLE3):
        runner = SimpleNamespace(spec_algorithm=algorithm)
        decode_graphs._size_for_plain_steps(
            lambda _: seen.append([getattr(spec, name) for name in names]), runner
        )
        assert [getattr(spec, name) for name in names] == [1217, 1217]
    assert seen == [[None, None], [1217, 1217]]


def test_a_window_pool_holds_two_passes_per_request(monkeypatch: pytest.MonkeyPatch):
    """Not the eviction interval times the tokens of a pass, as with other algorithms."""
    from sglang.srt.runtime_context import _ConfigBag

    from sglang_parse.patches.parse import draft_kv_pool

    spec = _ConfigBag("spec")
    for name in ("speculative_num_draft_tokens", "max_speculative_num_draft_tokens"):
        spec._set(name, 1217)
    monkeypatch.setattr(draft_kv_pool, "get_spec", lambda: spec)
    schedule = SimpleNamespace(max_running_requests=8)
    monkeypatch.setattr(draft_kv_pool, "get_schedule", lambda: schedule)
    found = {}
    for algorithm in ("PARSE", "EAGLE3"):
        spec._set("speculative_algorithm", algorithm)
        found[algorithm] = draft_kv_pool._count_passes(
            lambda *, window: 128 * spec.speculative_num_draft_tokens + window, window=127
        )
    assert found == {"PARSE": 128 + 127 + 2 * 1217 * 8, "EAGLE3": 128 * 1217 + 127}


def test_graphs_capture_hidden_states_for_an_eagle3_head(monkeypatch: pytest.MonkeyPatch):
    """SGLang's mode during capture, and after it."""
    from types import SimpleNamespace

    from sglang.srt.model_executor import forward_batch_info
    from sglang.srt.runtime_context import _ConfigBag
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    from sglang_parse.algorithm import ParseAlgorithm
    from sglang_parse.core.config import ENV_VAR, ParseConfig
    from sglang_parse.patches.parse import decode_graphs

    features = _ConfigBag("exec.features")
    features._set("return_hidden_states_mode", None)
    features._set("enable_return_hidden_states", False)
    for module in (decode_graphs, forward_batch_info):
        monkeypatch.setattr(module, "get_exec", lambda: SimpleNamespace(features=features))
    kept = forward_batch_info.get_server_return_hidden_states_mode
    parse = object.__new__(ParseAlgorithm)

    def captured(algorithm: object = parse, *, is_draft_worker: bool = False) -> str:
        modes = []
        runner = SimpleNamespace(spec_algorithm=algorithm, is_draft_worker=is_draft_worker)
        decode_graphs._capture_plain_steps(lambda _: modes.append(kept()), runner)
        assert kept().name == "NULL"
        return modes[0].name

    monkeypatch.setenv(ENV_VAR, "")
    assert captured() == "NULL"
    environ: dict[str, str] = {}
    ParseConfig(eagle3_path="head").to_env(environ)
    monkeypatch.setenv(ENV_VAR, environ[ENV_VAR])
    assert captured() == "FULL"
    assert captured(is_draft_worker=True) == "NULL"
    assert captured(SpeculativeAlgorithm.EAGLE3) == "NULL"
    ParseConfig(draft_eagle3_path="head").to_env(environ)
    monkeypatch.setenv(ENV_VAR, environ[ENV_VAR])
    assert captured() == "NULL"
    assert captured(is_draft_worker=True) == "FULL"


class _CharTokenizer:
    """Token ids are code points."""

    eos_token_id = 0
    additional_stop_token_ids = None

    def decode(self, ids) -> str:
        return "".join(map(chr, ids))


def _finished(text: str, run_len: int, **params):
    """A request whose last ``run_len`` tokens were accepted at once."""
    from array import array

    from sglang.srt.managers.schedule_batch import Req
    from sglang.srt.plugins import load_plugins
    from sglang.srt.sampling.sampling_params import SamplingParams

    load_plugins()
    params = SamplingParams(max_new_tokens=100, **params)
    params.normalize(_Lengths())
    req = Req("r", "", array("q", [1]), params, vocab_size=128, eos_token_ids={0})
    req.tokenizer = _CharTokenizer()
    req.output_ids.extend(map(ord, text))
    req.update_finish_state(run_len)
    return req


class _Lengths:
    """A tokenizer for the length of a stop string in tokens."""

    def encode(self, text: str, **_) -> list[int]:
        return [ord(c) for c in text]


@pytest.mark.parametrize(
    ("stops", "matched"),
    [(["efg", "cd"], "cd"), (["cd", "efg"], "cd"), (["x", "efg"], "efg"), (["bc", "abcd"], "bc")],
)
def test_the_first_stop_in_the_accepted_tokens_ends_the_request(stops: list[str], matched: str):
    req = _finished("abcdefgh", 8, stop=stops)
    text = "abcdefgh"
    assert req.finished_reason.matched == matched
    assert req.finished_len == text.index(matched) + len(matched)
    assert list(req.output_ids) == list(map(ord, text))


def test_a_stop_that_began_before_the_accepted_tokens_is_found():
    assert _finished("abcdefgh", 4, stop=["h", "def"]).finished_len == 6


def test_accepted_tokens_without_a_stop():
    assert not _finished("abcdefgh", 8, stop=["x", "y"]).finished()


def test_a_stop_token_before_a_stop_string_ends_the_request():
    req = _finished("ab\0defg", 7, stop=["ef"])
    assert (req.finished_reason.matched, req.finished_len) == (0, 3)


def test_a_length_limit_before_a_stop_string_ends_the_request():
    from sglang.srt.managers.schedule_batch import FINISH_LENGTH

    req = _finished("a" * 100 + "stop", 30, stop=["stop", "zz"])
    assert isinstance(req.finished_reason, FINISH_LENGTH)
    assert req.finished_len == 100


def test_register_is_idempotent():
    from sglang_parse.algorithm import register_algorithm
    from sglang_parse.plugin import create_worker, register, validate_server_args

    register()
    assert register_algorithm(create_worker, validate_server_args) is False


@pytest.mark.skipif(torch.accelerator.is_available(), reason="an accelerator can pin memory")
def test_adapter_layers_can_be_built_without_an_accelerator():
    from sglang.srt.lora.layers import ColumnParallelLinearWithLoRA

    from sglang_parse.patches.cpu import lora_cpu

    lora_cpu.PATCH.register()
    layer = torch.nn.Linear(4, 4)
    layer.output_partition_sizes = [4]
    built = ColumnParallelLinearWithLoRA(layer, None)
    assert built.output_offset_cpu.tolist() == [0, 4]


def test_a_grammar_ends_a_request_after_its_last_token():
    """Its matcher has accepted all tokens when they are searched for stops one by one."""
    from sglang_parse.patches.parse.stops import _finish_token_by_token

    seen = []
    params = SimpleNamespace(stop_strs=["x"], stop_regex_strs=[])
    req = SimpleNamespace(
        sampling_params=params, to_finish=None, output_ids=[5, 6, 7], grammar="matcher"
    )
    req.finished = lambda: False
    _finish_token_by_token(lambda r, n: seen.append(([*r.output_ids], r.grammar, n)), req, 2)
    assert seen == [([5, 6], None, 1), ([5, 6, 7], "matcher", 1)]
    assert (req.output_ids, req.grammar) == ([5, 6, 7], "matcher")
