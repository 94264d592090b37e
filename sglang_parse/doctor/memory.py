"""Estimates the memory of a server's models, from weight files and KV shapes; loads nothing.

A backend may pad or repack weights. Activations are not counted: they use the memory that
``--mem-fraction-static`` leaves free.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import psutil
import torch
from huggingface_hub import get_local_safetensors_metadata
from huggingface_hub.errors import NotASafetensorsRepoError

from sglang_parse.doctor.finding import Problem, warn_if
from sglang_parse.startup.certificates import local_folder
from sglang_parse.startup.models import kv_bytes_per_token, slot_sharers

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes that are cast to the model's dtype; others are kept."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights: their number, and their bytes once loaded."""

    count: int
    num_bytes: int


def weights_of(path: str, dtype: torch.dtype, revision: str | None = None) -> Weights | None:
    """Weights of a folder, or of a model in the local Hugging Face cache, once they are cast to
    this dtype; None if there are no safetensors files."""
    if (folder := local_folder(path, revision)) is None:
        return None
    try:
        files = get_local_safetensors_metadata(folder).files_metadata.values()
    except (OSError, ValueError, NotASafetensorsRepoError):
        return None
    weights = [weight for file in files for weight in file.tensors.values()]
    num_bytes = 0
    for weight in weights:
        start, end = weight.data_offsets
        is_cast = weight.dtype in FLOATS
        num_bytes += weight.parameter_count * dtype.itemsize if is_cast else end - start
    return Weights(sum(weight.parameter_count for weight in weights), num_bytes)


def device_bytes(device: str) -> int:
    """Memory of the smallest device of that kind; a CPU's is the machine's."""
    if device == "cpu":
        return psutil.virtual_memory().total
    module = torch.get_device_module(device)
    return min(module.mem_get_info(index)[1] for index in range(module.device_count()))


def fits(args: Any, target: Any, weights: Sequence[Weights]) -> str:
    """Checks that all models' weights and KV fit, and a request as long as the context of the
    target (a ``ModelConfig``)."""
    dtypes, ranks = (args.kv_cache_dtype, args.tp_size), args.tp_size
    drafts, draft_dtype = slot_sharers(args), args.speculative_draft_kv_cache_dtype
    per_token = [
        kv_bytes_per_token(target, *dtypes),
        *(kv_bytes_per_token(draft, *dtypes, draft_dtype) for draft in drafts),
    ]
    total, fraction = device_bytes(args.device), args.mem_fraction_static
    left = total * fraction - sum(one.num_bytes for one in weights) / ranks
    free = int(left / sum(per_token))
    pool = min(free, args.max_total_tokens or free)
    found = (
        f"weights {' + '.join(_shown(one.num_bytes) for one in weights)}; "
        f"KV {' + '.join(map(_shown, per_token))} per token, "
        f"{_shown(sum(per_token) * target.context_len)} for a context of {target.context_len:,}; "
        f"about {max(0, pool):,} tokens of KV are left of {_shown(total)} x {fraction:.2f} per rank"
    )
    if free <= 0:
        raise Problem(found, "a larger --tp-size, quantized weights, or smaller models")
    fix = "a smaller --context-length, a larger pool, or shorter requests than the context"
    return warn_if(pool < target.context_len, found, fix)


def _shown(num_bytes: float) -> str:
    units = {"GiB": 2**30, "MiB": 2**20, "KiB": 2**10}
    unit = next((unit for unit, size in units.items() if num_bytes >= size), "KiB")
    return f"{num_bytes / units[unit]:.1f} {unit}"
