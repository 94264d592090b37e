"""LoRA adapters on a PARSE server (ledger: lora_admitted)."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

from sglang.srt.arg_groups.overrides import resolving_view
from sglang.srt.model_executor.forward_batch_info import ForwardMode

from sglang_parse.algorithm import names_parse
from sglang_parse.attention.spec_input import ParseVerifyInput
from sglang_parse.patches.base import Patch, around


def _check(original: Callable, server_args: Any) -> None:
    if not names_parse(resolving_view(server_args)):
        original(server_args)


def _prepare(original: Callable, self: Any, forward_batch: Any) -> None:
    if not isinstance(forward_batch.spec_info, ParseVerifyInput):
        original(self, forward_batch)
    elif any(forward_batch.lora_ids) or self.can_use_prefill_cuda_graph(forward_batch):
        rows = copy.copy(forward_batch)
        rows.forward_mode = ForwardMode.EXTEND
        # The last rows of each request from a start on go through the LM head: as many as do here.
        rows.return_logprob = True
        original(self, rows)
    else:
        self.reset_lora_batch()


PATCH = Patch(
    "lora_admitted",
    {
        "sglang.srt.arg_groups.lora_hook.check_lora_speculative_compatibility": around(_check),
        "sglang.srt.lora.lora_manager.LoRAManager.prepare_lora_batch": around(_prepare),
    },
    why="SGLang admits LoRA adapters only with the speculative algorithms on its own list, whose "
    "verify rows all have one width. Rows of a PARSE verify pass are ragged, other rows than a "
    "prefill's have logits, and a pass with questions has a forward mode, `DRAFT_EXTEND_V2`, that "
    "no adapter is prepared for.",
    how="skips the check for PARSE, and prepares a verify pass as a prefill of the same rows with "
    "log probabilities of as many rows as have logits; without adapters in the pass, the adapter "
    "layers take their plain path unless a graph that was captured with adapters may run it.",
    removed_when="an algorithm can state that it supports adapters, and "
    "`generate_sequence_lengths` and `get_lm_head_pruned_lens` know `DRAFT_EXTEND_V2`.",
)
