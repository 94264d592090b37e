"""What PARSE's models capture CUDA graphs of, and take memory for (ledger: decode_graphs)."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import (
    Backend,
    Phase,
    check_cuda_graph_backend,
)
from sglang.srt.plugins.hook_registry import HookType
from sglang.srt.runtime_context import get_exec, get_spec

from sglang_parse.algorithm import is_parse
from sglang_parse.core.config import ParseConfig
from sglang_parse.patches.base import Hook, hook_patch
from sglang_parse.startup.models import parallel_draft


def _capture_plain_steps(original: Callable, runner: Any, *args: Any, **kwargs: Any) -> None:
    from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

    algorithm = runner.spec_algorithm
    if not is_parse(algorithm):
        original(runner, *args, **kwargs)
        return
    runner.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        with _states_for_a_head(runner):
            original(runner, *args, **kwargs)
            if runner.is_draft_worker:
                _capture_blocks(runner)
    finally:
        runner.spec_algorithm = algorithm


def _capture_blocks(runner: Any) -> None:
    """As ``EagleDraftWorker.init_cuda_graphs`` does for its draft model."""
    if not check_cuda_graph_backend(Phase.PREFILL, Backend.BREAKABLE):
        return
    if parallel_draft(ParseConfig.from_env(), runner.model_config).size > 1:
        runner.init_prefill_cuda_graph(force_for_draft_worker=True)


@contextmanager
def _states_for_a_head(runner: Any) -> Iterator[None]:
    """A step that asks a graph for more hidden states than it was captured with ends the server."""
    if runner.is_draft_worker or not ParseConfig.from_env().uses_eagle3:
        yield
        return
    with get_exec().features.override(return_hidden_states_mode="full"):
        yield


def _size_for_plain_steps(original: Callable, runner: Any) -> None:
    """The setting stays what it is elsewhere: rows of slot numbers are as wide as it says."""
    if not is_parse(runner.spec_algorithm):
        original(runner)
        return
    nothing = {"speculative_num_draft_tokens": None, "max_speculative_num_draft_tokens": None}
    with get_spec().override(**nothing):
        original(runner)


_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
PATCH = hook_patch(
    "decode_graphs",
    {
        f"{_RUNNER}.init_cuda_graphs": Hook(_capture_plain_steps, HookType.AROUND, ("self",)),
        f"{_RUNNER}.init_attention_backends": Hook(
            _size_for_plain_steps, HookType.AROUND, ("self",)
        ),
        f"{_RUNNER}.init_lora_manager": Hook(_size_for_plain_steps, HookType.AROUND, ("self",)),
    },
    why="for every speculative algorithm SGLang captures the target's decode graphs as "
    "verification steps, as wide as the longest pass of all, and none for a draft model. "
    "PARSE's passes are ragged and use those of prefills; what recurs in the same shape "
    "are the draft's and the target's plain decode steps. Blocks of a draft run as passes do, "
    "but SGLang captures graphs of prefills for a draft model only where its worker asks. And "
    "an EAGLE-3 head reads the target's hidden states of every forward, which SGLang's graphs "
    "keep only on servers that return them to clients: a step that asks a graph for more than "
    "was captured ends the server. Attention backends, and LoRA for mixtures of experts, take "
    "memory for these steps by `speculative_num_draft_tokens` when they are made, not by the "
    "algorithm: Triton a mask of graph batch * n * (context + n) bytes, 9.9 GiB with "
    "n = 1,217 at 32k; FA3 page tables. The number has to be the longest pass all the same: "
    "`get_req_to_token_extra_context_len` widens the rows of slot numbers by it, and "
    "`meta_info`'s `spec_accept_rate` divides by it.",
    how="while a PARSE server's target or draft captures its graphs, its `spec_algorithm` is "
    "`NONE`; for the target beside a head, SGLang's setting for the hidden states that "
    "are kept is `full` meanwhile, as it is for its own EAGLE-3. A draft that writes several "
    "tokens a forward then captures those of prefills. While their attention "
    "backends and LoRA are made, the number of draft tokens is `None`, as without "
    "speculation. Other servers call the original.",
    removed_when="an algorithm can say which steps are captured, and with which hidden states, "
    "and how wide a request's row of slot numbers is apart from how many tokens a step verifies.",
)
