"""PARSE's options for programs in SGLang's frontend language.

    backend = ParseEndpoint("http://127.0.0.1:30000", threshold=0.9)
    state = program.run(backend=backend)
    state = program.run(backend=backend.with_options(enabled=False))

SGLang's ``RuntimeEndpoint`` sends no ``custom_params``; ``ParseEndpoint`` adds them.
"""

from __future__ import annotations

import copy
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any, Self

from sglang.lang.backend.runtime_endpoint import RuntimeEndpoint
from sglang.lang.ir import SglSamplingParams

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.options import RequestOptions


@dataclass
class _Sampling(SglSamplingParams):
    """A ``gen``'s parameters with PARSE's options."""

    parse_options: dict[str, Any] = field(default_factory=dict)

    def to_srt_kwargs(self) -> dict[str, Any]:
        return {**super().to_srt_kwargs(), "custom_params": {"parse": self.parse_options}}


class ParseEndpoint(RuntimeEndpoint):
    """A running PARSE server as the backend of frontend programs.

    ``gen`` is served with these options; ``select`` is served by plain decoding, whatever the
    options.

    Args:
        api_key, verify, chat_template_name: as of ``sglang.RuntimeEndpoint``.
        options: keys of ``custom_params["parse"]``: ``enabled``, ``threshold``, ``strict``,
            ``trace``, ``drafting``, ``draft``; the others are the server's.

    Raises:
        ConfigError: an unknown option, or a value of the wrong type or range.
    """

    def __init__(
        self,
        url: str,
        api_key: str | None = None,
        verify: str | None = None,
        chat_template_name: str | None = None,
        **options: Any,
    ) -> None:
        self.options = _checked(options)
        super().__init__(url, api_key, verify, chat_template_name)

    def with_options(self, **options: Any) -> Self:
        """Returns the same server with these options changed, for one program."""
        other = copy.copy(self)
        other.options = _checked({**self.options, **options})
        return other

    def generate(self, s: Any, sampling_params: SglSamplingParams) -> Any:
        return super().generate(s, self._with_parse(sampling_params))

    def generate_stream(self, s: Any, sampling_params: SglSamplingParams) -> Iterator[Any]:
        return super().generate_stream(s, self._with_parse(sampling_params))

    def _with_parse(self, sampling_params: SglSamplingParams) -> _Sampling:
        return _Sampling(**vars(sampling_params), parse_options=self.options)


def _checked(options: dict[str, Any]) -> dict[str, Any]:
    """Checks options by the server's rules, before a program would get a 400."""
    RequestOptions.read({"parse": options}, ParseConfig())
    return options
