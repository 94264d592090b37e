"""A bad ``custom_params["parse"]`` is a 400 that names the key (ledger: request_options)."""

from __future__ import annotations

from typing import Any

from sglang.srt.runtime_context import get_disagg, get_serving, get_spec

from sglang_parse.algorithm import names_parse
from sglang_parse.core.config import ParseConfig
from sglang_parse.core.options import RequestOptions
from sglang_parse.patches.base import Patch, after


def _check_options(tokenized: Any, self: Any, *_: Any, **__: Any) -> None:
    # A ValueError raised here becomes a 400 in every API of SGLang.
    if names_parse(get_spec()):
        RequestOptions.of_request(
            *(tokenized.sampling_params.custom_params, ParseConfig.from_env()),
            host=get_serving().host,
            vocab_size=self.model_config.vocab_size,
            returns_logprobs=getattr(tokenized, "return_logprob", False),
            prefills=get_disagg().disaggregation_mode == "null",
        )


PATCH = Patch(
    "request_options",
    {
        "sglang.srt.managers.tokenizer_manager.TokenizerManager._create_tokenized_object": after(
            _check_options
        )
    },
    why='a bad `custom_params["parse"]` must be rejected with a 400 before the request reaches '
    "the scheduler.",
    how="on PARSE servers, parses the options after SGLang's own checks; an error, also an option "
    "that the server refuses, is raised as a `ValueError`, which every API of SGLang turns into a "
    "400.",
    removed_when="an algorithm can check a request's parameters.",
)
