"""Start-up checks of targets that run on GPUs only and were only read, never run."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.arg_groups.model_override_base import attention_backends_of
from sglang.srt.configs.model_config import get_dsa_index_kpool

from sglang_parse.attention.support import OF_TARGET
from sglang_parse.core.config import flag
from sglang_parse.startup.families import family_of, is_unproved
from sglang_parse.startup.models import DRAFT, flag_of, require

logger = logging.getLogger(__name__)

_UNREAD = (
    *("enable_hierarchical_cache", "enable_hisparse", "enable_unified_memory"),
    *("enable_return_indexer_topk", "enable_streaming_session", "enable_lora"),
)
"""SGLang's settings that were not read with these targets."""


def check_unproved(args: Any, target: Any, draft: Any) -> None:
    """Warns of a target that was never seen to run; does nothing for others.

    Args:
        target: its ``ModelConfig``.
        draft: its draft model's, or None.

    Raises:
        AdmissionError: for a setting that was not read with it.
    """
    if not is_unproved(target):
        return
    family = family_of(target)
    why = f"the target has {family.attention}, and PARSE was never run with it"
    is_read = {*attention_backends_of(args)} == {family.backend}
    fix = f"use {OF_TARGET} {family.backend} alone"
    require(is_read, OF_TARGET, args.attention_backend, fix, why=why)
    path = args.speculative_draft_model_path
    require(draft is None, DRAFT, path, f"leave it out: use {flag('draft_url')}, or texts", why=why)
    for name in _UNREAD:
        value = getattr(args, name)
        require(not value, flag_of(name), value, "leave it out", why=why)
    num_pooled, path = get_dsa_index_kpool(target.hf_config), f"index_kpool of {args.model_path}"
    why = "keys of several tokens are indexed as one, which would keep those of rejected tokens"
    require(num_pooled == 1, path, num_pooled, "start it without PARSE", why=why)
    text = "PARSE: %s (%s) was read, never run: compare greedy answers with the plain server first"
    logger.warning(text, family.name, family.attention)
