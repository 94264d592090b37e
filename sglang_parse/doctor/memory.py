"""What a server's models take: weights from their files, KV from their shapes. Nothing is loaded.

An estimate: a backend may pad or repack weights, and activations are left out; they live in what
``--mem-fraction-static`` leaves.
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
from sglang_parse.doctor.finding import FAILS, WARNING, Trouble
from sglang_parse.startup.models import kv_bytes_per_token, slot_sharers

FLOATS = ("F64", "F32", "F16", "BF16")
"""Kinds of numbers that are cast to what a model computes in; others stay as they are."""


@dataclass(frozen=True, slots=True)
class Weights:
    """A model's weights.

    Attributes:
        numbers: how many.
        num_bytes: as they are loaded.
    """

    numbers: int
    num_bytes: int


def weights_of(path: str, dtype: torch.dtype) -> Weights | None:
    """Of a folder, or of a name in this machine's Hugging Face cache; None where they are not.

    Args:
        dtype: what the model computes in.
    """
    folder = _folder(path)
    files = sorted(folder.glob("*.safetensors")) if folder else []
    numbers = num_bytes = 0
    for file in files:
        with safe_open(file, "pt") as tensors:
            for name in tensors.keys():  # noqa: SIM118 - it is no mapping
                part = tensors.get_slice(name)
                count, kind = math.prod(part.get_shape()), part.get_dtype()
                numbers += count
                num_bytes += count * (dtype.itemsize if kind in FLOATS else _item_bytes(kind))
    return Weights(numbers, num_bytes) if files else None


def _folder(path: str) -> Path | None:
    if Path(path).is_dir():
        return Path(path)
    try:
        return Path(snapshot_download(path, local_files_only=True))
    except (OSError, ValueError):
        return None


def _item_bytes(kind: str) -> float:
    """Bytes of a number of a safetensors kind such as F8_E4M3, I32 or BOOL."""
    bits = "".join(letter for letter in kind.partition("_")[0] if letter.isdigit())
    return int(bits) / 8 if bits else 1


def device_bytes(device: str) -> int:
    """Memory of one device of that kind, the smallest; a CPU's is the machine's."""
    if device == "cpu":
        return psutil.virtual_memory().total
    kind = torch.get_device_module(device)
    return min(kind.mem_get_info(index)[1] for index in range(kind.device_count()))


def fits(
    args: Any, config: ParseConfig, models: tuple[Any, Any], weights: tuple[Weights, Weights]
) -> str:
    """Whether weights and KV fit, and how many tokens are left for KV.

    Args:
        args: a server's settings.
        models: ``ModelConfig`` of target and draft.
        weights: theirs.

    Raises:
        Trouble: they do not, or one request as long as the context does not.
    """
    dtypes, ranks = (args.kv_cache_dtype, args.tp_size), args.tp_size
    target, draft = models
    others = slot_sharers(args) if config.uses_eagle3 else [draft]
    per_token = [
        kv_bytes_per_token(target, *dtypes),
        *(kv_bytes_per_token(m, *dtypes, args.speculative_draft_kv_cache_dtype) for m in others),
    ]
    have, share = device_bytes(args.device), args.mem_fraction_static
    left = have * share - sum(one.num_bytes for one in weights) / ranks
    room = int(left / sum(per_token))
    pool = min(room, args.max_total_tokens or room)
    found = (
        f"weights {' + '.join(_shown(one.num_bytes) for one in weights)}; "
        f"KV {' + '.join(map(_shown, per_token))} a token, "
        f"{_shown(sum(per_token) * target.context_len)} for a context of {target.context_len:,}; "
        f"about {max(0, pool):,} tokens of KV are left of {_shown(have)} x {share:.2f} a rank"
    )
    if room <= 0:
        raise Trouble(found, "a larger --tp-size, quantized weights, or smaller models", FAILS)
    if pool < target.context_len:
        fix = "a smaller --context-length, a larger pool, or shorter requests than the context"
        raise Trouble(found, fix, WARNING)
    return found


def _shown(num_bytes: float) -> str:
    """Bytes for people."""
    for unit in ("GiB", "MiB"):
        size = 2**30 if unit == "GiB" else 2**20
        if num_bytes >= size:
            return f"{num_bytes / size:.1f} {unit}"
    return f"{num_bytes / 1024:.1f} KiB"
