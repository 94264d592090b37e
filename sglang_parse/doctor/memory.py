"""What PARSE adds to the memory of each GPU, before a server is started."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import suppress
from pathlib import Path
from typing import Any

from huggingface_hub import get_local_safetensors_metadata
from huggingface_hub.errors import NotASafetensorsRepoError
from sglang.srt.configs.hybrid_arch import mambaish_config
from sglang.srt.runtime_context import get_parallel
from sglang.srt.utils.common import get_device_memory_capacity

from sglang_parse.core.config import ParseConfig, flag
from sglang_parse.doctor.finding import Problem, warn_if
from sglang_parse.engine.graph_memory import GraphMemory
from sglang_parse.patches.parse.draft_kv_pool import kv_bytes_per_token
from sglang_parse.startup.certificates import local_folder
from sglang_parse.startup.models import slot_sharers
from sglang_parse.startup.states import copies_bytes

STATIC = "--mem-fraction-static"
MAX_SHARE = 0.5
"""Of what SGLang leaves beside weights and KV: it does not reckon with PARSE there, but with
1.5 MiB for each token of a prefill chunk, which is much."""


def check_memory(args: Any, config: ParseConfig, target: Any, draft: Any) -> str:
    """Returns what PARSE adds on each GPU, by SGLang's resolved settings.

    Raises:
        Problem: it does not fit.
    """
    memory, static = GraphMemory(args, config, target, draft), added_static(args, target)
    beside = {**memory.of_graphs(), "logits of a pass": memory.of_logits()}
    dtypes, ranks = (args.kv_cache_dtype, args.speculative_draft_kv_cache_dtype), args.tp_size
    kv = sum(kv_bytes_per_token(m, dtypes[0], ranks, dtypes[1]) for m in slot_sharers(args))
    found = f"{_shown(static)} and {kv / 1024:,.4g} KiB of each KV slot within {STATIC}"
    found = f"{found}; {_shown(beside)} beside it"
    capacity = get_device_memory_capacity(args.device)
    if capacity is None:
        return found
    total = capacity * 2**20
    within = args.mem_fraction_static * total
    needed = sum(static.values()) + weight_bytes(target) / ranks
    if needed >= within:
        fix = f"a larger {STATIC} or --tp-size, or smaller models"
        raise Problem(f"{found}; with the target's weights {_gib(needed)} of {_gib(within)}", fix)
    less = f"--max-running-requests, --chunked-prefill-size or {flag('draft_tokens')}"
    fix = f"a smaller {STATIC}, --context-length, {less}"
    is_much, left = sum(beside.values()) > MAX_SHARE * (total - within), _gib(total - within)
    return warn_if(is_much, f"{found}, where {left} are left for activations and graphs", fix)


def added_static(args: Any, target: Any) -> dict[str, float]:
    """Bytes of weights, where their files are on this machine, and of copied states."""
    found = {
        f"weights of {Path(model.model_path).name}": weight_bytes(model) / args.tp_size
        for model in slot_sharers(args)
        if model.model_path != args.model_path  # an MTP layer is in the target's files
    }
    if hybrid := mambaish_config(target):
        with get_parallel().override(tp_size=args.tp_size, attn_tp_size=args.tp_size):
            found["copies of states"] = copies_bytes(hybrid, args.max_running_requests)
    return found


def num_weights(model: Any) -> Mapping[str, int]:
    """Numbers of a ``ModelConfig``'s weights by dtype, as safetensors names it, in a folder or the
    local Hugging Face cache; empty where there are none."""
    folder = local_folder(model.model_path, model.revision)
    with suppress(OSError, ValueError, NotASafetensorsRepoError):
        if folder is not None:
            counts = get_local_safetensors_metadata(folder).parameter_count
            return {str(dtype): count for dtype, count in counts.items()}
    return {}


def weight_bytes(model: Any) -> int:
    """As they are loaded: in the model's dtype, if they are not quantized."""
    floats = dict.fromkeys(("F32", "F16", "BF16"), model.dtype.itemsize)
    sizes = floats | {"I64": 8, "I32": 4, "I16": 2}  # others are bytes
    return sum(count * sizes.get(dtype, 1) for dtype, count in num_weights(model).items())


def _shown(parts: Mapping[str, float]) -> str:
    """Their sum, and the largest first."""
    parts = dict(sorted(parts.items(), key=lambda part: -part[1]))
    each = ", ".join(f"{name} {_gib(size)}" for name, size in parts.items() if size)
    return f"{_gib(sum(parts.values()))} ({each})" if each else "no weights"


def _gib(size: float) -> str:
    return f"{size / 2**30:.2f} GiB"
