"""Targets with latent attention (MLA): where verify passes take the time of their contexts."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.utils import is_sm100_supported

from sglang_parse.attention.support import EXPANDING, OF_TARGET, Attention
from sglang_parse.startup.families import attention_of

logger = logging.getLogger(__name__)


def warn_of_expansion(args: Any, target: Any) -> None:
    """Names the attention backend if each pass expands latent KV (ledger: latent_passes).

    Args:
        target: its ``ModelConfig``.
    """
    backend = args.prefill_attention_backend or args.attention_backend
    # Then these two attend over latent KV themselves.
    absorbs = {"trtllm_mla": args.disable_chunked_prefix_cache, "fa4": is_sm100_supported()}
    is_latent = attention_of(target) is Attention.LATENT
    if is_latent and backend in EXPANDING and not absorbs.get(backend):
        more = ", or --disable-chunked-prefix-cache" if backend == "trtllm_mla" else ""
        text = "PARSE: %s is %r: each verify pass expands the latent KV of its contexts, as its "
        text += "prefills do, and gets slower with them. Fix: use flashinfer%s"
        logger.warning(text, OF_TARGET, backend, more)
