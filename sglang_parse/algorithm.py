"""PARSE as SGLang sees it: its name, its answers to SGLang's questions, its start-up checks."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

NAME = "PARSE"


class ParseAlgorithm(CustomSpecAlgo):
    """``CustomSpecAlgo`` plus the methods the scheduler calls that it lacks in 0.5.23."""

    def carries_draft_hidden_states(self) -> bool:
        """No: drafts are tokens; nothing but tokens moves between prefill and decode servers."""
        return False

    def need_topk(self) -> bool:
        """No: a draft is a chain."""
        return False

    def create_future_map(self, device: Any, req_to_token_pool: Any, **kwargs: Any) -> Any:
        """``SpeculativeAlgorithm.create_future_map`` of the built-in enum."""
        from sglang_parse.engine.overlap import HostRelay

        return HostRelay(device, self, req_to_token_pool, **kwargs)


def is_parse(algorithm: object) -> bool:
    """Whether a batch's or server's ``spec_algorithm`` is PARSE."""
    return isinstance(algorithm, ParseAlgorithm)


def register_algorithm(
    create_worker: Callable[[Any], type], validate_server_args: Callable[[Any], None]
) -> bool:
    """Register the name. False when it was registered before.

    Args:
        create_worker: the worker's class, from ``ServerArgs``; called in scheduler processes.
        validate_server_args: the checks at start; what they raise ends the launcher.
    """
    if get_spec(NAME) is not None:
        return False

    register = SpeculativeAlgorithm.register(
        NAME,
        supports_overlap=True,
        validate_server_args=validate_server_args,
        spec_class=ParseAlgorithm,
    )
    register(create_worker)
    return True
