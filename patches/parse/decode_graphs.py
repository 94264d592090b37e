"""CUDA graphs and attention buffers for PARSE's decode steps (ledger: decode_graphs)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from typing import Any

from sglang.srt.model_executor.cuda_graph_config import Backend, Phase, check_cuda_graph_backend
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_parse.algorithm import is_parse
from sglang_parse.core.config import ParseConfig
from sglang_parse.patches.base import Patch, around


def _capture_plain_steps(original: Callable, self: Any, *args: Any, **kwargs: Any) -> None:
    algorithm, config = self.spec_algorithm, ParseConfig.from_env()
    if not is_parse(algorithm):
        original(self, *args, **kwargs)
        return
    self.spec_algorithm = SpeculativeAlgorithm.NONE
    try:
        with ExitStack() as stack:
            has_head = config.draft_eagle3_path
            if has_head if self.is_draft_worker else config.captures_hidden_states:
                features = get_exec().features
                stack.enter_context(features.override(return_hidden_states_mode="full"))
            original(self, *args, **kwargs)
            if self.is_draft_worker and check_cuda_graph_backend(Phase.PREFILL, Backend.BREAKABLE):
                _capture_prefills(self)
    finally:
        self.spec_algorithm = algorithm


def _capture_prefills(runner: Any) -> None:
    """As ``EagleDraftWorker.init_cuda_graphs`` for its draft model, in fewer sizes."""
    prefill = get_exec().graph.cuda_graph_config.prefill
    sizes = prefill.bs
    prefill.bs = few_sizes(sizes or ())
    try:
        runner.init_prefill_cuda_graph(force_for_draft_worker=True)
    finally:
        prefill.bs = sizes


def few_sizes(sizes: Sequence[int]) -> list[int]:
    """Returns as few of the ascending sizes as hold what all of them hold: SGLang pads a forward to
    twice its rows at most."""
    kept: list[int] = []
    for size in sizes:
        if len(kept) > 1 and size <= 2 * kept[-2]:
            kept.pop()
        kept.append(size)
    return kept


def _size_for_plain_steps(original: Callable, self: Any) -> None:
    if not is_parse(self.spec_algorithm):
        original(self)
        return
    unset = {"speculative_num_draft_tokens": None, "max_speculative_num_draft_tokens": None}
    with get_spec().override(**unset):
        original(self)


_RUNNER = "sglang.srt.model_executor.model_runner.ModelRunner"
PATCH = Patch(
    "decode_graphs",
    {
        f"{_RUNNER}.init_cuda_graphs": around(_capture_plain_steps),
        f"{_RUNNER}.init_attention_backends": around(_size_for_plain_steps),
        f"{_RUNNER}.init_lora_manager": around(_size_for_plain_steps),
    },
    why="for every speculative algorithm SGLang captures the target's decode graphs as target "
    "verify steps of `speculative_num_draft_tokens` tokens a request, and captures none for a "
    "draft model. PARSE's verify passes are ragged and use prefill graphs; the steps that recur "
    "in one shape are the decode steps of draft and target. A draft model's prefills need graphs, "
    "too, which SGLang captures for a draft model only if its worker asks. An "
    "EAGLE-3 head needs the target's hidden states of every forward, a verdict head those of "
    "verify passes, but SGLang's graphs capture them only on servers that return them to clients, "
    "and replaying a graph for more hidden states than it captured ends the server. Attention "
    "backends, and LoRA for MoE models, size their buffers by `speculative_num_draft_tokens`, "
    "whatever the algorithm: Triton a mask of graph batch * n * (context + n) bytes, 9.9 GiB with "
    "n = 1,217 at 32k; FA3 page tables. The setting must still be the longest verify pass: "
    "`get_req_to_token_extra_context_len` widens the rows of `req_to_token` by it, and "
    "`meta_info`'s `spec_accept_rate` divides by it.",
    how="while a PARSE server's target or draft captures graphs, its `spec_algorithm` is `NONE`; "
    "for the model of an EAGLE-3 or verdict head, `return_hidden_states_mode` is `full`, as with "
    "SGLang's own EAGLE-3. A draft then captures prefill graphs, of sizes that double. While "
    "attention backends and LoRA are created, the number of draft tokens is `None`, as without "
    "speculation. Other servers call the original.",
    removed_when="an algorithm can state which steps to capture, with which hidden states, and "
    "how wide a `req_to_token` row is apart from how many tokens a step verifies.",
)
