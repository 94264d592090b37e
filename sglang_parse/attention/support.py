"""Which attention backends can run a verification pass, in which layout, and why that one.

The one table of them. ``auto`` takes the first layout listed that is possible.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

import torch

MASK, ALIAS = "mask", "alias"


@dataclass(frozen=True, slots=True)
class Support:
    """What a backend can do.

    Attributes:
        factory: "module:name" of what SGLang's registry is given in the stock one's place.
        layouts: the layouts it can run, the preferred one first.
        why: the reason for the preference, for the log.
        alias_page_sizes: page sizes ``alias`` works with; None for all.
        reads_fp8: whether a pass can read KV of 8 bits.
        plans_on_device: whether it plans a pass from lengths that only the device knows.
    """

    factory: str
    layouts: tuple[str, ...]
    why: str
    alias_page_sizes: tuple[int, ...] | None = None
    reads_fp8: bool = True
    plans_on_device: bool = True


_ROOM = "sglang_parse.attention"
ON_CPU = "torch_native"
SUPPORT = {
    ON_CPU: Support(
        f"{_ROOM}.native:MaskedTorchNativeBackend",
        (MASK, ALIAS),
        "one attention call per request instead of one per question, which gathers the context's "
        "KV each time (tests/seams/layout_cost.py)",
    ),
    "flashinfer": Support(
        f"{_ROOM}.flashinfer:create_backend",
        (ALIAS, MASK),
        "its tiles of 128 rows of a KV head's group read KV, as many for questions of their own as "
        "for a request whole; and under a mask each reads every column and tests every entry",
        # Its plan, made on the host, divides the columns among the card's processors.
        plans_on_device=False,
    ),
    "triton": Support(
        f"{_ROOM}.triton:create_backend",
        (MASK, ALIAS),
        "its tiles hold rows of one head, so that questions of their own would fill half of each; "
        "its mask is read among the new rows alone",
    ),
    "fa3": Support(
        f"{_ROOM}.flash_attention:create_backend",
        (ALIAS,),
        "its kernels take no mask",
        alias_page_sizes=(1,),
        # SGLang hands it a scale per request, and a pass has more sequences than requests.
        reads_fp8=False,
    ),
}


class BackendError(ValueError):
    """An attention backend that cannot run PARSE's passes: setting, value found, fix."""


def check_backends(
    device: str | None, attention: str | None, others: Mapping[str, str | None]
) -> None:
    """Check what a server's models are to run on.

    Args:
        device: ``--device``.
        attention: ``--attention-backend``.
        others: by flag, the backends of single phases or models; None where unset.

    Raises:
        BackendError: one of them cannot run a verification pass, or they differ.
    """
    known = ", ".join(SUPPORT)
    if device == "cpu" and attention != ON_CPU:
        raise BackendError(
            f"PARSE: --attention-backend is {attention!r} with --device cpu. Fix: use {ON_CPU}, "
            "the only one that runs there"
        )
    if attention not in SUPPORT:
        raise BackendError(
            f"PARSE: --attention-backend is {attention!r}. "
            f"Fix: set it to one that can run PARSE's verification pass: {known}"
        )
    for setting, value in others.items():
        if value not in (None, attention):
            raise BackendError(
                f"PARSE: {setting} is {value!r} beside --attention-backend {attention}. "
                "Fix: leave it unset; PARSE uses one for everything"
            )


def check_kv(backend: str, dtype: torch.dtype, model: str = "target") -> None:
    """Check what a model's KV really is: ``--kv-cache-dtype auto`` leaves that to its checkpoint.

    Args:
        backend: a key of ``SUPPORT``.
        dtype: of a KV entry.
        model: whose.

    Raises:
        BackendError: ``backend`` cannot read it in a pass.
    """
    if dtype.itemsize < 2 and not SUPPORT[backend].reads_fp8:
        others = " or ".join(name for name in SUPPORT if name != ON_CPU and SUPPORT[name].reads_fp8)
        raise BackendError(
            f"PARSE: the {model}'s KV is {dtype}, as its checkpoint or --kv-cache-dtype says, with "
            f"--attention-backend {backend}. Fix: use {others}"
        )


def choose_layout(setting: str, backend: str, page_size: int) -> tuple[str, str]:
    """The layout of a server's passes that ask questions, and the reason in words.

    Args:
        setting: ``--parse-layout``: "auto", "mask" or "alias".
        backend: a key of ``SUPPORT``.
        page_size: KV slots per page.

    Raises:
        BackendError: ``backend`` cannot run it.
    """
    support = SUPPORT[backend]
    possible = [name for name in support.layouts if not _obstacle(support, name, page_size)]
    if setting in possible:
        return setting, "--parse-layout asks for it"
    if setting == "auto" and possible:
        return possible[0], support.why
    wanted = support.layouts[0] if setting == "auto" else setting
    obstacle = _obstacle(support, wanted, page_size) or support.why
    fix = f"use --parse-layout {possible[0]}" if possible else "use --page-size 1"
    raise BackendError(
        f"PARSE: --parse-layout is {setting!r} with --attention-backend {backend} and "
        f"--page-size {page_size}: {obstacle}. Fix: {fix}, or another --attention-backend"
    )


def _obstacle(support: Support, layout: str, page_size: int) -> str:
    """Why a layout the backend has cannot be run with these pages; "" when it can."""
    sizes = support.alias_page_sizes
    if layout == ALIAS and sizes is not None and page_size not in sizes:
        return "a question's context ends inside a page there, which its page table cannot say"
    return ""
