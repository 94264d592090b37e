"""Start-up settings of hybrid targets, which have a recurrent state per request."""

from __future__ import annotations

import logging
from typing import Any

from sglang.srt.arg_groups.model_override_base import (
    attention_backends_of,
    is_attention_backend_not_set,
)
from sglang.srt.arg_groups.overrides import declare_resolution, resolving_view
from sglang.srt.runtime_context import get_platform

from sglang_parse.attention.support import OF_TARGET
from sglang_parse.core.config import ParseConfig, flag
from sglang_parse.startup.families import Attention, attention_of
from sglang_parse.startup.models import flag_of, require

logger = logging.getLogger(__name__)

MAX_COPIES = 8
"""States copied at once, one per verified draft, unless an MTP layer proposes one for each request:
Qwen3.5-27B's take 1.2 GB."""
MAX_RUNNING_REQUESTS = 48
"""As SGLang sets it for its own algorithms, where ``--max-running-requests`` does not: it sizes the
pool of states."""
_PAGED, _ON_BLACKWELL = "trtllm_mha", "triton"
"""The attention backend that SGLang chooses there for its own algorithms, which has no pages of one
token; what it chooses without one, but for some classes, which do not run on it."""
_NOT_ON_TRITON = {"Lfm2ForCausalLM", "Lfm2MoeForCausalLM"}
_ALLOWED: dict[str, tuple[Any, ...]] = {
    "page_size": (None, 1),
    "mamba_radix_cache_strategy": ("auto", "no_buffer"),
    "enable_linear_replayssm": (False,),
    "enable_linear_replayssm_spec": (False,),
    "enable_int8_mamba_checkpoint": (False,),
    "enable_page_major_kv_layout": (False,),
    "enable_unified_memory": (False,),
    "enable_hierarchical_cache": (False,),
    "enable_streaming_session": (False,),
    "enable_lora": (None, False),
    "lora_paths": (None,),
}
"""SGLang's settings -> the values that PARSE was seen to serve recurrent states with."""


def num_copies(num_reqs: int) -> int:
    """How many states are copied at once, where so many requests run at most."""
    return num_reqs if ParseConfig.from_env().mtp else min(num_reqs, MAX_COPIES)


def copies_bytes(hybrid: Any, num_reqs: int) -> int:
    """Of these copies on one rank; ``hybrid``: SGLang's configuration of layers with states."""
    return num_copies(num_reqs) * hybrid.mamba2_cache_params.mamba_cache_per_req


def resolve_states(server_args: Any, target: Any) -> None:
    """Checks the settings of a hybrid target's server and sets those that PARSE determines; does
    nothing for another target.

    Args:
        server_args: SGLang's ``ServerArgs``, whose models SGLang has not configured yet.
        target: the target's ``ModelConfig``.

    Raises:
        AdmissionError: with setting, value and fix.
    """
    if attention_of(target) is not Attention.STATES:
        return
    args, overlap = resolving_view(server_args), ParseConfig.from_env().overlap
    check_states(args, target)
    why = f"the target has {Attention.STATES}"
    fix = "use auto: what is kept of a draft decides from which state the next step starts"
    require(overlap != "on", flag("overlap"), overlap, fix, why=why)
    settings: dict[str, Any] = {"disable_overlap_schedule": True}
    if args.max_running_requests is None:
        settings["max_running_requests"] = MAX_RUNNING_REQUESTS
    runs_on_triton = _NOT_ON_TRITON.isdisjoint(target.hf_config.architectures)
    if get_platform().is_blackwell and runs_on_triton and is_attention_backend_not_set(args):
        settings |= {"attention_backend": _ON_BLACKWELL, "page_size": 1}
    if not args.disable_radix_cache:
        settings["mamba_radix_cache_strategy"] = "no_buffer"
    declare_resolution(server_args, "sglang_parse", **settings)
    text = "PARSE: %s: no overlap schedule, and no state in the prefix cache but behind prompts and"
    logger.info(f"{text} answers; further settings: %s", why, settings)


def check_states(args: Any, target: Any) -> None:
    """Raises AdmissionError for a setting that a hybrid target was not seen to be served with;
    before SGLang resolves them, and after."""
    if attention_of(target) is not Attention.STATES:
        return
    why = f"the target has {Attention.STATES}"
    for name, values in _ALLOWED.items():
        value = getattr(args, name)
        require(value in values, flag_of(name), value, "leave it out", why=why)
    fix = "leave it out, or use a backend that has pages of one token"
    require(_PAGED not in attention_backends_of(args), OF_TARGET, _PAGED, fix, why=why)
