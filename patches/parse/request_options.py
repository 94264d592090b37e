"""Bad ``custom_params["parse"]`` is a 400 that names the key (ledger: request_options)."""

from __future__ import annotations

from typing import Any

from sglang.srt.plugins.hook_registry import HookType

from sglang_parse.core.config import ParseConfig, RequestOptions
from sglang_parse.patches.base import Hook, hook_patch


def _check_options(_result: None, params: Any, *_: Any, **__: Any) -> None:
    # ValueErrors raised here become a 400 in every API of SGLang's.
    RequestOptions.read(params.custom_params, ParseConfig.from_env())


PATCH = hook_patch(
    "request_options",
    {
        "sglang.srt.sampling.sampling_params.SamplingParams.verify": Hook(
            _check_options, HookType.AFTER, ("self", "vocab_size")
        ),
    },
    why='a bad `custom_params["parse"]` must be refused with a 400 before the request reaches '
    "the scheduler.",
    how="after SGLang's own checks, reads the options once; what is wrong is raised as a "
    "`ValueError`, which every API of SGLang's turns into a 400.",
    removed_when="an algorithm can check a request's parameters.",
)
