"""The attention backends of verify passes, with their layouts.

A pass without questions is ``causal``: a chunk of a prefill, which every backend of SGLang runs.
Questions, and the masks of a parallel draft, need one of the backends and layouts below.
``--parse-layout auto`` takes the first possible layout of the backend.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from enum import StrEnum

import torch

CAUSAL, MASK, ALIAS = "causal", "mask", "alias"
OF_TARGET, OF_DRAFT = "--attention-backend", "--speculative-draft-attention-backend"
ALL_CAUSAL = "no pass asks a question: each is a chunk of a prefill to the attention backend"


class Attention(StrEnum):
    """How a model's layers attend, and where their KV is."""

    FULL = "full attention"
    LATENT = "latent attention (MLA)"
    WINDOWS = "sliding windows"
    POOLS = "sliding windows, two KV pools"
    CHUNKS = "attention in chunks"
    SPARSE = "sparse attention"
    STATES = "linear attention or Mamba layers"


@dataclass(frozen=True, slots=True)
class Support:
    """An attention backend.

    Attributes:
        factory: "module:name" of the replacement in SGLang's registry.
        layouts: supported layouts, the preferred one first.
        why: the reason for the preference, for the log.
        alias_page_sizes: page sizes that ``alias`` supports; None for all.
        reads_fp8: whether a verify pass can read 8-bit KV.
        plans_on_device: whether it plans a pass from lengths that only the device knows.
        latent_layouts: those with latent KV; None for all.
    """

    factory: str
    layouts: tuple[str, ...]
    why: str
    alias_page_sizes: tuple[int, ...] | None = None
    reads_fp8: bool = True
    plans_on_device: bool = True
    latent_layouts: tuple[str, ...] | None = None


_PACKAGE = "sglang_parse.attention"
ON_CPU = "torch_native"
FOR_DRAFTS = "triton"
"""What a draft model gets whose target's backend plans steps on the host."""
SUPPORT = {
    ON_CPU: Support(
        f"{_PACKAGE}.native:MaskedTorchNativeBackend",
        (MASK, ALIAS),
        "one attention call per request instead of one per question, which gathers the context's "
        "KV each time (tests/compat/layout_cost.py)",
    ),
    "flashinfer": Support(
        f"{_PACKAGE}.flashinfer:create_backend",
        (ALIAS, MASK),
        "its tiles hold 128 rows of a KV head's group, and separate questions take as many tiles "
        "as the whole request; under a mask each tile reads every column and tests every entry",
        # The plan is made on the host and divides the columns among the SMs.
        plans_on_device=False,
        latent_layouts=(ALIAS,),
    ),
    "triton": Support(
        f"{_PACKAGE}.triton:ParseTritonBackend",
        (MASK, ALIAS),
        "its tiles hold rows of one head, so separate questions would fill half of each; its mask "
        "covers the new rows only",
    ),
    "fa3": Support(
        f"{_PACKAGE}.flash_attention:create_backend",
        (ALIAS,),
        "its kernels take no mask",
        alias_page_sizes=(1,),
        # SGLang passes one scale per request, and a pass has more sequences than requests.
        reads_fp8=False,
    ),
}

STEPPING = (
    *("flashinfer", "triton", "fa3", "fa4", ON_CPU, "flashmla", "trtllm_mha", "trtllm_mla"),
    *("cutedsl_mla", "intel_amx", "intel_xpu", "aiter", "ascend"),
)
"""Backends that run the steps of SGLang's EAGLE draft worker (``DraftBackendFactory``)."""

EXPANDING = ("trtllm_mla", "aiter", "fa4")
"""Backends on which each pass over latent KV computes keys and values of its whole context (FA4:
but on SM100)."""


class BackendError(ValueError):
    """An attention backend that cannot run verify passes."""

    def __init__(self, found: str, fix: str) -> None:
        super().__init__(f"PARSE: {found}. Fix: {fix}")


def check_device(
    device: str | None, attention: str | None, others: Mapping[str, str | None]
) -> None:
    """Raises BackendError for a backend that does not run on a CPU; see ``check_backends``."""
    for setting, value in {OF_TARGET: attention or "unset", **others}.items():
        if device == "cpu" and value not in (None, ON_CPU):
            found = f"{setting} is {value!r} with --device cpu"
            raise BackendError(found, f"use {ON_CPU}, the only one that runs there")


def check_backends(
    attention: str | None, others: Mapping[str, str | None], flag: str = OF_TARGET
) -> None:
    """Checks the attention backends of a model whose passes are not all causal.

    Args:
        attention: the model's.
        others: flag -> backend of a single phase; None if unset.
        flag: the setting that names ``attention``.

    Raises:
        BackendError: one of them cannot run these passes, or they differ.
    """
    found, known = f"{flag} is {attention!r}", ", ".join(SUPPORT)
    if attention not in SUPPORT:
        fix = f"set it to one that can run questions and drafts in blocks ({known}), or use neither"
        raise BackendError(found, fix)
    for setting, value in others.items():
        if value not in (None, attention):
            found = f"{setting} is {value!r} with {flag} {attention}"
            fix = "leave it unset: questions and drafts in blocks need one backend for all phases"
            raise BackendError(found, fix)


def check_kv(backend: str, dtype: torch.dtype, model: str = "target") -> None:
    """Checks a model's KV dtype, which ``--kv-cache-dtype auto`` takes from its checkpoint.

    Raises:
        BackendError: ``backend`` cannot read it in a verify pass.
    """
    if dtype.itemsize < 2 and not SUPPORT[backend].reads_fp8:
        others = " or ".join(name for name in SUPPORT if name != ON_CPU and SUPPORT[name].reads_fp8)
        found = f"the {model}'s KV is {dtype} (by its checkpoint or --kv-cache-dtype)"
        raise BackendError(f"{found} with --attention-backend {backend}", f"use {others}")


def choose_layout(
    setting: str,
    backend: str,
    page_size: int,
    flag: str = OF_TARGET,
    attention: Attention = Attention.FULL,
) -> tuple[str, str]:
    """Returns the layout of a model's passes that are not causal, and the reason.

    Args:
        setting: ``--parse-layout``: "auto", "mask" or "alias".
        backend: a key of ``SUPPORT``.
        page_size: KV slots per page.
        flag: the setting that names ``backend``.
        attention: the model's.

    Raises:
        BackendError: ``backend`` cannot run it.
    """
    support = SUPPORT[backend]
    obstacles = {name: _obstacle(support, name, page_size, attention) for name in support.layouts}
    possible = [name for name, obstacle in obstacles.items() if not obstacle]
    if setting in possible:
        return setting, "--parse-layout asks for it"
    if setting == "auto" and possible:
        return possible[0], support.why
    wanted = support.layouts[0] if setting == "auto" else setting
    found = f"--parse-layout is {setting!r} with {flag} {backend}"
    found = f"{found} and --page-size {page_size}: {obstacles.get(wanted) or support.why}"
    if possible:
        fix = f"use --parse-layout {possible[0]}, or"
    else:
        fix = "use --page-size 1, or" if support.alias_page_sizes else "use"
    raise BackendError(found, f"{fix} another {flag}")


def _obstacle(support: Support, layout: str, page_size: int, attention: Attention) -> str:
    """Describes why a layout does not support this page size or attention; "" if it does."""
    sizes = support.alias_page_sizes
    latent = support.latent_layouts
    if attention is Attention.LATENT and latent is not None and layout not in latent:
        return "its kernel of latent attention takes no mask"
    if attention is Attention.WINDOWS and layout == MASK:
        return "a window counts columns, and those of a question are not its positions"
    if layout == ALIAS and sizes is not None and page_size not in sizes:
        return "a question's context ends inside a page, which its page table cannot express"
    return ""
