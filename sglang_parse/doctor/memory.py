"""Estimates the memory of a server's models, from weight files and KV shapes; loads nothing.

A backend may pad or repack weights. Activations are not counted: they use the memory that
``--mem-fraction-static`` leaves free.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil
import torch
from huggingface_hub import snapshot_download
from safetensors import safe_open

from sglang_parse.core.config import ParseConfig
from sglang_parse.doctor.finding import WARNING, Problem
from sglang_parse.startup.models import kv_bytes_per_token, slot_sharers

FLOATS = ("F64", "F32", "F16", "BF16")
"""Dtypes that are cast to the model's dtype; others are kept."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights: their number, and their bytes once loaded."""

    count: int
    num_bytes: int


def weights_of(path: str, dtype: torch.dtype) -> Weights | None:
    """Reads the sizes of a folder's weights, or of a model's in the local Hugging Face cache.

    Args:
        dtype: of the model's computation.

    Returns:
        None if there are no safetensors files.
    """
    folder = _folder(path)
    files = sorted(folder.glob("*.safetensors")) if folder else []
    total = num_bytes = 0
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                part = tensors.get_slice(name)
                count, kind = math.prod(part.get_shape()), part.get_dtype()
                total += count
                num_bytes += count * (dtype.itemsize if kind in FLOATS else _item_bytes(kind))
    return Weights(total, num_bytes) if files else None


def _folder(path: str) -> Path | None:
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (OSError, ValueError):
        return None


def _item_bytes(kind: str) -> float:
    """Bytes per element of a safetensors dtype such as F8_E4M3, I32 or BOOL."""
    bits = "".join(letter for letter in kind.partition("_")[0] if letter.isdigit())
    return int(bits) / 8 if bits else 1


def device_bytes(device: str) -> int:
    """Memory of the smallest device of that kind; a CPU's is the machine's."""
    if device == "cpu":
        return psutil.virtual_memory().total
    module = torch.get_device_module(device)
    return min(module.mem_get_info(index)[1] for index in range(module.device_count()))


def fits(
    args: Any, config: ParseConfig, models: tuple[Any, Any], weights: tuple[Weights, Weights]
) -> str:
    """Checks that weights and KV fit.

    Args:
        args: ``ServerArgs``.
        models: ``ModelConfig`` of target and draft.
        weights: of target and draft.

    Returns:
        A description with the KV slots left.

    Raises:
        Problem: they do not fit, or a request as long as the context does not.
    """
    dtypes, ranks = (args.kv_cache_dtype, args.tp_size), args.tp_size
    target, draft = models
    others = slot_sharers(args) if config.uses_eagle3 else [draft]
    per_token = [
        kv_bytes_per_token(target, *dtypes),
        *(kv_bytes_per_token(m, *dtypes, args.speculative_draft_kv_cache_dtype) for m in others),
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
    if pool < target.context_len:
        fix = "a smaller --context-length, a larger pool, or shorter requests than the context"
        raise Problem(found, fix, WARNING)
    return found


def _shown(num_bytes: float) -> str:
    for unit in ("GiB", "MiB"):
        size = 2**30 if unit == "GiB" else 2**20
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"
