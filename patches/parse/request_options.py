"""Bad ``custom_params["parse"]`` is a 400 that names the key (ledger: request_options)."""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.core.config import ParseConfig, RequestOptions
from sglang_parse.patches.base import hook_patch


def _check_options(_result: None, params: Any, *_: Any, **__: Any) -> None:
    # ValueErrors raised here become a 400 in every API of SGLang's.
    RequestOptions.read(params.custom_params, ParseConfig.from_env())


PATCH = hook_patch(
    "request_options",
    {
        "sglang.srt.sampling.sampling_params.SamplingParams.verify": (
            _check_options,
            HookType.AFTER,
        )
    },
)
