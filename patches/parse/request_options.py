"""A bad ``custom_params["parse"]`` is a 400 that names the key (ledger: request_options)."""

from __future__ import annotations

from typing import Any

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.options import RequestOptions
from sglang_parse.patches.base import Patch, after


def _check_options(_result: None, self: Any, *_: Any, **__: Any) -> None:
    # A ValueError raised here becomes a 400 in every API of SGLang.
    RequestOptions.read(self.custom_params, ParseConfig.from_env())


PATCH = Patch(
    "request_options",
    {"sglang.srt.sampling.sampling_params.SamplingParams.verify": after(_check_options)},
    why='a bad `custom_params["parse"]` must be rejected with a 400 before the request reaches '
    "the scheduler.",
    how="parses the options after SGLang's own checks; an error is raised as a `ValueError`, "
    "which every API of SGLang turns into a 400.",
    removed_when="an algorithm can check a request's parameters.",
)
