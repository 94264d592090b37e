"""PARSE in SGLang's registry of speculative algorithms."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_registry import CustomSpecAlgo, get_spec

from sglang_parse.context import process_context

NAME = "PARSE"


class ParseAlgorithm(CustomSpecAlgo):
    """``CustomSpecAlgo`` with the methods of the built-in algorithms that it lacks in 0.5.23."""

    def carries_draft_hidden_states(self) -> bool:
        """Returns False: a draft is tokens only."""
        return False

    def supports_grammar_overlap(self) -> bool:
        """Returns True: the worker walks grammars itself (``engine.logits.grammar``), and takes the
        barrier where it does not."""
        return True

    def need_topk(self) -> bool:
        """Returns False: a draft is a chain."""
        return False

    def supports_target_verify_for_draft(self) -> bool:
        """Returns True: a draft's blocks are captured as verify passes (``block_graphs``)."""
        return True

    def create_future_map(self, device: Any, req_to_token_pool: Any, **kwargs: Any) -> Any:
        """Creates the future map, as ``SpeculativeAlgorithm.create_future_map``."""
        from sglang_parse.engine.overlap import NoOpFutureMap

        return NoOpFutureMap(device, self, req_to_token_pool, **kwargs)

    def build_disagg_draft_input(self, batch: Any, _last_ids: Any, _future_map: Any) -> Any:
        """Begins what another server has prefilled; no draft input came with it."""
        from sglang_parse.attention.spec_input import ParseDraftInput

        process_context().running_pipeline().take_prefilled(batch)
        return ParseDraftInput()


def is_parse(algorithm: object) -> bool:
    """Returns whether a ``spec_algorithm`` is PARSE."""
    return isinstance(algorithm, ParseAlgorithm)


def names_parse(settings: Any) -> bool:
    """Returns whether the ``speculative_algorithm`` of settings is PARSE, as given or resolved."""
    return (settings.speculative_algorithm or "").upper() == NAME


def register_algorithm(
    create_worker: Callable[[Any], type], validate_server_args: Callable[[Any], None]
) -> bool:
    """Registers PARSE; returns False if it is registered already.

    Args:
        create_worker: returns the worker's class; called in scheduler processes.
        validate_server_args: the start-up checks; their exceptions end the launcher.
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
