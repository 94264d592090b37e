"""Every SGLang symbol that PARSE uses.

``tests/compat/test_compat.py`` checks that it exists and accepts PARSE's calls.

The list is generated from PARSE's own source (``symbols_in``): imports, attributes, calls, and
calls through ``super()``. ``METHODS`` adds what an import does not show: methods that PARSE
overrides, and methods of objects that SGLang creates. Patches have their targets
(``Patch.symbols``).
"""

from __future__ import annotations

import ast
from collections.abc import Iterable, Mapping
from pathlib import Path

import sglang_parse
from sglang_parse.attention.support import SUPPORT
from sglang_parse.startup.compat import Symbol

PACKAGE = Path(sglang_parse.__file__).resolve().parent
BACKEND_FILES = {
    name: PACKAGE / "attention" / f"{support.factory.partition(':')[0].rpartition('.')[2]}.py"
    for name, support in SUPPORT.items()
}
"""Each attention backend's own file. Their SGLang modules may need a GPU's libraries."""

_MANAGERS, _SPEC = "sglang.srt.managers", "sglang.srt.speculative"
_EAGLE = f"{_SPEC}.eagle_worker_v2.EagleDraftWorker"
_METRICS = "sglang.srt.observability.metrics_collector"
METHODS: Mapping[str, tuple[str, ...]] = {
    # Overridden: SGLang calls them.
    f"{_SPEC}.base_spec_worker.BaseSpecWorker.alloc_memory_pool": (
        *("memory_pool_config", "req_to_token_pool", "token_to_kv_pool_allocator"),
    ),
    f"{_SPEC}.base_spec_worker.BaseSpecWorker.note_request_finished": ("rid", "natural_stop"),
    f"{_MANAGERS}.overlap_utils.FutureMap.resolve_seq_lens_cpu": ("batch", "stream_ordered"),
    f"{_MANAGERS}.utils.GenerationBatchResult.copy_to_cpu": (
        *("return_logprob", "return_hidden_states"),
    ),
    f"{_METRICS}.SchedulerMetricsCollector.increment_realtime_tokens": (),
    f"{_METRICS}.SchedulerMetricsCollector.log_stats": ("stats",),
    f"{_METRICS}.resolve_collector_class": ("role", "default_cls"),
    # Methods and attributes of objects that SGLang makes.
    f"{_MANAGERS}.schedule_batch.Req.output_ids_through_stop": (),
    f"{_MANAGERS}.schedule_batch.Req.set_finish_with_abort": ("error_msg",),
    f"{_MANAGERS}.tp_worker.TpModelWorker.forward_batch_generation": ("batch",),
    "sglang.srt.model_executor.model_runner.ModelRunner.sample": (
        *("logits_output", "forward_batch"),
    ),
    "sglang.srt.distributed.parallel_state.GroupCoordinator.broadcast": ("input_", "src"),
    "sglang.srt.mem_cache.kv_index_translator.KVIndexTranslator.bind_own_plan": ("forward_batch",),
    "sglang.srt.lora.lora_manager.LoRAManager.reset_lora_batch": (),
    f"{_EAGLE}.draft_forward": ("forward_batch",),
    f"{_EAGLE}._draft_extend_for_decode": ("batch", "batch_result"),
    f"{_EAGLE}._draft_extend_for_prefill": ("batch", "target_hidden_states", "next_token_ids"),
}
"""SGLang's methods -> the parameters they must have."""

_ATTENTION = "sglang.srt.layers.attention"
BACKEND_METHODS: Mapping[str, Mapping[str, tuple[str, ...]]] = {
    "flashinfer": {
        f"{_ATTENTION}.flashinfer_backend.FlashInferIndicesUpdaterPrefill.update_single_wrapper": (
            *("req_pool_indices", "seq_lens", "prefill_wrappers"),
            *("use_ragged", "spec_info", "plan"),
        ),
        f"{_ATTENTION}.flashinfer_backend.FlashInferAttnBackend.init_forward_metadata_out_graph": (
            *("forward_batch", "in_capture"),
        ),
    },
    "triton": {
        f"{_ATTENTION}.triton_backend.ForwardMetadata": (
            *("custom_mask", "mask_indptr", "qo_indptr", "kv_indptr", "kv_indices"),
            "max_extend_len",
        ),
    },
    "fa3": {
        f"{_ATTENTION}.flashattention_backend.FlashAttentionMetadata": (
            *("cu_seqlens_q", "cu_seqlens_k", "cache_seqlens_int32", "page_table"),
            *("max_seq_len_q", "max_seq_len_k"),
        ),
    },
}
"""The same for one attention backend, checked where it is used."""


def server_symbols() -> list[Symbol]:
    """Returns what every server uses, whatever its attention backend."""
    folders = ("attention", "engine", "patches", "startup", "telemetry")
    inner = (path for name in folders for path in sorted((PACKAGE / name).rglob("*.py")))
    files = [*PACKAGE.glob("*.py"), *inner]
    others = {PACKAGE / "cli.py", PACKAGE / "frontend.py", *BACKEND_FILES.values()}
    return [*symbols_in(path for path in files if path not in others), *_methods(METHODS)]


def backend_symbols(attention_backend: str) -> list[Symbol]:
    """Returns what one attention backend uses beyond ``server_symbols``: a stock one, nothing."""
    files = [file for name, file in BACKEND_FILES.items() if name == attention_backend]
    return [*symbols_in(files), *_methods(BACKEND_METHODS.get(attention_backend, {}))]


def symbols_in(files: Iterable[Path]) -> list[Symbol]:
    """Returns the SGLang symbols that these source files use."""
    found = []
    for path in files:
        source = path.read_text(encoding="utf-8")
        if "sglang." in source:
            scanner = _Scanner(str(path).removeprefix(f"{PACKAGE.parent}/"))
            scanner.visit(ast.parse(source))
            found += scanner.symbols
    return found


def _methods(methods: Mapping[str, tuple[str, ...]]) -> list[Symbol]:
    return [Symbol(path, "METHODS in " + __name__, names) for path, names in methods.items()]


class _Scanner(ast.NodeVisitor):
    """Collects the uses of SGLang's symbols in one file, in source order."""

    def __init__(self, file: str) -> None:
        self.symbols: list[Symbol] = []
        self._file = file
        self._paths: dict[str, str] = {}  # local name -> SGLang's dotted path
        self._base = ""  # the SGLang class that the current class derives from

    def visit_ImportFrom(self, node: ast.ImportFrom) -> None:
        for alias in node.names if (node.module or "").startswith("sglang.") else ():
            path = f"{node.module}.{alias.name}"
            self._paths[alias.asname or alias.name] = path
            self._add(path, node)

    def visit_ClassDef(self, node: ast.ClassDef) -> None:
        outer, self._base = self._base, "".join([p for p in map(self._path, node.bases) if p][:1])
        self.generic_visit(node)
        self._base = outer

    def visit_Attribute(self, node: ast.Attribute) -> None:
        self._add(self._path(node), node)
        self.generic_visit(node)

    def visit_Call(self, node: ast.Call) -> None:
        names = tuple(keyword.arg for keyword in node.keywords if keyword.arg)
        is_whole = len(names) == len(node.keywords)
        is_whole &= not any(isinstance(argument, ast.Starred) for argument in node.args)
        num_positional = len(node.args) + _is_super(node.func)  # and self
        self._add(self._path(node.func), node, names, num_positional if is_whole else None)
        self.generic_visit(node)

    def _path(self, node: ast.expr) -> str:
        """The SGLang path that an expression names; "" for everything else."""
        if isinstance(node, ast.Name):
            return self._paths.get(node.id, "")
        if not isinstance(node, ast.Attribute):
            return ""
        owner = self._base if _is_super(node) else self._path(node.value)
        return owner and f"{owner}.{node.attr}"

    def _add(
        self,
        path: str,
        node: ast.stmt | ast.expr,
        keywords: tuple[str, ...] = (),
        num_positional: int | None = None,
    ) -> None:
        if path:
            user = f"{self._file}:{node.lineno}"
            self.symbols.append(Symbol(path, user, keywords, num_positional))


def _is_super(node: ast.expr) -> bool:
    """Whether an expression is ``super().name``."""
    call = node.value if isinstance(node, ast.Attribute) else None
    return isinstance(call, ast.Call) and getattr(call.func, "id", "") == "super"
