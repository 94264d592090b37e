"""PD disaggregation: settings of a server that decodes what stock servers prefill."""

from __future__ import annotations

from typing import Any

from sglang_parse.attention.support import Attention
from sglang_parse.core.config import ParseConfig, flag
from sglang_parse.startup.families import attention_of
from sglang_parse.startup.heads import PROPOSED_BY
from sglang_parse.startup.models import flag_of, refuse, require

DECODE = "decode"
_UNSEEN = "leave it out: PARSE was not seen to decode with it"
_ALLOWED: dict[str, tuple[tuple[Any, ...], str]] = {
    "disaggregation_decode_enable_radix_cache": ((False,), _UNSEEN),
    "disaggregation_decode_enable_offload_kvcache": ((False,), _UNSEEN),
    "disaggregation_decode_retraction_backup": (("cpu_tensor",), "use cpu_tensor"),
    "disaggregation_decode_host_receive_threshold": ((1,), _UNSEEN),
    "disaggregation_decode_allocation_policy": (("early",), _UNSEEN),
    "enable_hierarchical_cache": ((False,), _UNSEEN),
    "enable_lora": ((False, None), _UNSEEN),
}
"""SGLang's settings -> (the supported values, the fix for others)."""
_ONE_POOL = (Attention.FULL, Attention.LATENT, Attention.WINDOWS)
"""Of targets that were seen to run so."""


def check_decode_server(args: Any, config: ParseConfig, target: Any) -> None:
    """Raises AdmissionError for a setting that does not suit; sets where retracted KV is kept.

    Args:
        target: its ``ModelConfig``.
    """
    if args.disaggregation_decode_retraction_backup is None:  # SGLang's own choice needs CUDA
        args.disaggregation_decode_retraction_backup = "cpu_tensor"
    for name, (allowed, fix) in _ALLOWED.items():
        value = getattr(args, name)
        require(value in allowed, flag_of(name), value, fix)
    mode = flag_of("disaggregation_mode")
    if config.proposer:
        fix = f"leave {flag(PROPOSED_BY[config.proposer][0])} out with it"
        why = "a head reads the target's hidden states of the prompt, which are not transferred"
        refuse(mode, DECODE, fix, why=why)
    attention, fix = attention_of(target), "leave it out for this target"
    why = f"not seen to run with a target of {attention}"
    require(attention in _ONE_POOL and not target.is_hybrid_swa, mode, DECODE, fix, why=why)
