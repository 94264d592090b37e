"""The target's EAGLE-3 head or MTP layer: SGLang's own EAGLE draft worker under PARSE.

The head's KV at position p comes from the target's hidden states there and the token at p + 1; it
lies in the slot of the target's token p:

    target tokens      t0   t1   t2   t3          t3 is the anchor: no KV yet
    target KV          t0   t1   t2
    head KV           (t0,t1) (t1,t2) (t2,t3)     complete whenever a token has been chosen

So every forward that chooses tokens (prefill, verify pass, decode step) captures the hidden states
of the head's draft extend; no second target forward is needed. If all requests verified a
proposal, the draft extend covers the rows of a whole one, as in SGLang's EAGLE worker: one shape,
so one CUDA graph. KV after the accepted tokens is overwritten. Otherwise it runs as after a
prefill.

The head then proposes a chain of tokens, the draft that the next target forward verifies
(``engine.commit``). Weights, graphs, attention and steps of the head are SGLang's; only SGLang's
tree of alternatives is not built.

Radix cache hits end one token before the first differing one: the head's KV has seen the next one
(patch ``head_prefixes``).
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker_common import prepare_for_draft
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.phases import MTP, PROPOSERS, Action
from sglang_parse.device import on_device
from sglang_parse.engine.batch import select_requests, slots_of
from sglang_parse.engine.broadcast import broadcast
from sglang_parse.engine.eagle_head import EagleHead
from sglang_parse.engine.faults import EAGLE_HEAD, MTP_LAYER, DraftGuard
from sglang_parse.engine.requests import proposal_len
from sglang_parse.engine.sglang_types import Req, ScheduleBatch
from sglang_parse.engine.verify import TargetResult

logger = logging.getLogger(__name__)

Models = tuple[Any, int, int, TpModelWorker]
Rows = Mapping[int, torch.Tensor]
"""Index of a request in the scheduler's batch -> [>= n, width] the target's hidden states of its
rows; the first n led to its n output tokens."""


class EagleDecoder(EagleHead):
    """The target's EAGLE-3 head or MTP layer.

    Args:
        guard: contains exceptions of its forwards.
        models: the first arguments of ``EagleHead``.

    Attributes:
        name: in logs.
        columns: what it reads of the captured hidden states; None for all.
    """

    columns: torch.Tensor | None = None

    def __init__(self, config: ParseConfig, guard: DraftGuard, models: Models) -> None:
        is_mtp = config.proposer == MTP
        path, kind = (config.mtp_path, "EAGLE") if is_mtp else (config.eagle3_path, "EAGLE3")
        super().__init__(*models, path, SpeculativeAlgorithm.from_string(kind))
        self._guard, self.name = guard, MTP_LAYER if is_mtp else EAGLE_HEAD

    @property
    def layers(self) -> list[int]:
        """The target's layers that the head reads, until others are captured, too."""
        runner = self.worker.target_worker.model_runner
        ids = runner.spec_aux_config.eagle_aux_hidden_state_layer_ids
        if ids is not None:
            return ids
        num_layers = runner.model_config.num_hidden_layers
        return [1, num_layers // 2 - 1, num_layers - 4]  # as in ``set_eagle3_layers_to_capture``

    @property
    def _chain_rows(self) -> int:
        """Rows of a request that verifies the longest one of the latest proposals."""
        return self.num_run + 1

    def alloc_memory_pool(self, **pools: Any) -> None:
        super().alloc_memory_pool(**pools)
        pool, kind = self.runner.token_to_kv_pool, type(self.runner.model).__name__
        slot_bytes = round(pool.mem_usage * 2**30 / (pool.size + pool.page_size))
        text = "PARSE: %s (%s) proposes up to %d tokens; its KV takes %d bytes of each slot"
        logger.info(text, self.name, kind, self.num_steps, slot_bytes)

    def init_attention_backends(self) -> None:
        with self.as_stock():
            self.worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        with self.as_stock():
            self.worker.init_cuda_graphs()

    def prefill(self, batch: ScheduleBatch, result: GenerationBatchResult) -> int:
        """Writes the head's KV for a prefill, if the head runs for any of its requests.

        Takes the captured hidden states out of ``result``, because no client asked for them.

        Returns:
            Number of tokens, 0 if the head did not run.
        """
        reqs = [req for req in batch.reqs if req.parse_state.policy.uses_eagle]
        if not reqs:
            return 0
        output = result.logits_output
        hidden = output.last_hidden_states  # an MTP layer's, beside captured layers
        hidden = self._columns_of(output.hidden_states) if hidden is None else hidden
        output.hidden_states = output.last_hidden_states = None
        view = copy.copy(batch)
        view.spec_algorithm = self.algorithm
        view.return_logprob = False
        view.sampling_info = None
        view.input_embeds, view.multimodal_inputs = None, [None] * len(batch.reqs)
        assert view.input_ids is not None
        # Requests that it does not run for may have SGLang's placeholders of images.
        view.input_ids = view.input_ids.clamp(max=self.runner.model_config.vocab_size - 1)
        with self._guard.contain(reqs, model=self.name):
            self._store(view.reqs, self._extend(view, hidden, result.next_token_ids))
        return len(hidden)

    def draft_extend(
        self,
        batch: ScheduleBatch,
        results: Sequence[TargetResult],
        emitted: Sequence[Sequence[int]],
    ) -> None:
        """Writes the head's KV for the output tokens of a decode iteration.

        Args:
            results: of the target forward.
            emitted: per request of the batch its output tokens.
        """
        rows = {
            result.index: self._rows_of(result, result.hidden, len(emitted[result.index]))
            for result in results
            if result.hidden is not None
            and emitted[result.index]
            and batch.reqs[result.index].parse_state.policy.uses_eagle
        }
        if not rows:
            return
        reqs, lens = [batch.reqs[i] for i in rows], [len(emitted[i]) for i in rows]
        for req in reqs:
            req.parse_state.notes.eagle = None  # until the forward below has succeeded
        with self._guard.contain(reqs, model=self.name):
            is_fixed = all(len(hidden) == self._chain_rows for hidden in rows.values())
            extend = self._extend_fixed if is_fixed else self._extend_ragged
            self._store(reqs, extend(batch, rows, lens))

    def _columns_of(self, hidden: torch.Tensor) -> torch.Tensor:
        return hidden if self.columns is None else hidden[:, self.columns]

    def _rows_of(self, result: TargetResult, hidden: torch.Tensor, num_output: int) -> torch.Tensor:
        """A request's rows. A proposal has slots for the longest one: rows after a shorter one make
        it one shape, and so does what is left of a text's tail that is not output."""
        num_rows = self._chain_rows
        if result.part.action is not Action.PROPOSE or num_output > num_rows:
            return hidden
        hidden = hidden[:num_rows]
        return torch.nn.functional.pad(hidden, (0, 0, 0, num_rows - len(hidden)))

    def _extend_fixed(self, batch: ScheduleBatch, rows: Rows, lens: Sequence[int]) -> Any:
        """Covers all rows of whole proposals: the same number per request, all with slots, of which
        the first ``lens`` led to the requests' output tokens."""
        num_rows, reqs = self._chain_rows, [batch.reqs[i] for i in rows]
        starts = [req.parse_state.committed_len - n for req, n in zip(reqs, lens, strict=True)]
        tokens = [req.parse_state.output_ids[-n:] for req, n in zip(reqs, lens, strict=True)]
        ids = [token for some in tokens for token in (*some, *[0] * (num_rows - len(some)))]
        last_rows = [i * num_rows + length - 1 for i, length in enumerate(lens)]
        view = select_requests(batch, [*rows], starts, None)
        spans = [(at, at + num_rows) for at in starts]
        view.out_cache_loc = slots_of(batch.req_to_token_pool, reqs, spans)
        view.spec_algorithm = self.algorithm
        num_kept = on_device(lens, batch.device, torch.int32)
        hidden = self._columns_of(torch.cat([*rows.values()]))
        output = EagleDraftInput()
        result = GenerationBatchResult(
            logits_output=LogitsProcessorOutput(next_token_logits=None, hidden_states=hidden),
            accept_lens=num_kept,
            prepared_draft_extend_inputs=(
                num_kept - 1,
                on_device(last_rows, batch.device),
                on_device(ids, batch.device),
            ),
            next_draft_input=output,
        )
        with self.forward_contexts(), self.running_steps(self.num_run):
            self.worker._draft_extend_for_decode(view, result)
        # The next replay of SGLang's CUDA graph writes to the same memory.
        output.hidden_states = output.hidden_states.clone()
        return output

    def _extend_ragged(self, batch: ScheduleBatch, rows: Rows, lens: Sequence[int]) -> Any:
        """Covers the output tokens only, any number per request."""
        reqs = [batch.reqs[i] for i in rows]
        ends = [req.parse_state.committed_len for req in reqs]
        starts = [end - length for end, length in zip(ends, lens, strict=True)]
        # The tokens at these positions; SGLang shifts them by one for the head.
        tokens = [req.parse_state.output_ids[-n - 1 :] for req, n in zip(reqs, lens, strict=True)]
        ids = [token for some in tokens for token in some[:-1]]
        view = select_requests(batch, [*rows], ends, ids)
        spans = zip(starts, ends, strict=True)
        view.out_cache_loc = slots_of(batch.req_to_token_pool, reqs, spans)
        view.spec_algorithm = self.algorithm
        view.forward_mode = ForwardMode.EXTEND
        view.prefix_lens, view.extend_lens = starts, lens
        view.extend_num_tokens = sum(lens)
        view.extend_logprob_start_lens = lens
        view.chunked_req_next_prompt_token = None
        last = on_device([some[-1] for some in tokens], batch.device)
        hidden = torch.cat([part[:n] for part, n in zip(rows.values(), lens, strict=True)])
        return self._extend(view, self._columns_of(hidden), last)

    def _extend(
        self, view: ScheduleBatch, hidden: torch.Tensor, last_token_ids: torch.Tensor
    ) -> Any:
        with self.forward_contexts():
            return self.worker._draft_extend_for_prefill(view, hidden, last_token_ids)

    def _store(self, reqs: Sequence[Req], output: Any) -> None:
        """Stores the head's output with the requests that it proposes for: at the last position
        with KV, where the next proposal starts."""
        for i, req in enumerate(reqs):
            if req.parse_state.policy.proposer in PROPOSERS:
                place = slice(i, i + 1)
                req.parse_state.notes.eagle = EagleDraftInput(
                    topk_p=output.topk_p[place],
                    topk_index=output.topk_index[place],
                    hidden_states=output.hidden_states[place],
                )

    def propose(self, batch: ScheduleBatch, indices: Sequence[int]) -> Sequence[Sequence[int]]:
        """Proposes the target's next tokens, at most as many as were planned, and as the request
        may still output.

        Returns:
            [indices] token ids; none where the head failed.
        """
        reqs = [batch.reqs[i] for i in indices]
        with self._guard.contain(reqs, model=self.name, ends_failures=True):
            lens = [proposal_len(req, self.num_steps) for req in reqs]
            self.num_run = self.steps_for(max(lens))
            tokens = broadcast(self._propose(batch, indices).to(torch.int64)).tolist()
            return [chain[:length] for length, chain in zip(lens, tokens, strict=True)]
        return [()] * len(reqs)

    def _propose(self, batch: ScheduleBatch, indices: Sequence[int]) -> torch.Tensor:
        reqs = [batch.reqs[i] for i in indices]
        committed = [req.parse_state.committed_len for req in reqs]
        view = select_requests(batch, indices, committed, None)
        view.spec_algorithm = self.algorithm
        view.forward_mode = ForwardMode.DECODE
        states: list[Any] = [req.parse_state.notes.eagle for req in reqs]
        view.spec_info = EagleDraftInput(
            topk_p=torch.cat([state.topk_p for state in states]),
            topk_index=torch.cat([state.topk_index for state in states]),
            hidden_states=torch.cat([state.hidden_states for state in states]),
            bonus_tokens=on_device(
                [req.parse_state.output_ids[-1] for req in reqs], batch.device, torch.int32
            ),
        )
        with self.forward_contexts(), self.running_steps(self.num_run):
            return self._run_chains(view)

    def _run_chains(self, view: ScheduleBatch) -> torch.Tensor:
        """[n, num_run] proposed tokens. Source: ``EagleDraftWorker.draft`` without its trees and
        masks."""
        worker = self.worker
        forward_batch, replays, _ = prepare_for_draft(
            view.spec_info,
            worker.req_to_token_pool,
            view,
            worker.cuda_graph_runner,
            worker.draft_runner,
            topk=1,
            num_steps=worker.speculative_num_steps,
            target_translator=worker.target_worker.model_runner.kv_index_translator,
            num_draft_tokens=self._chain_rows,
        )
        if replays:
            *_, tokens, _ = worker.cuda_graph_runner.execute(forward_batch)
            return tokens
        if worker.speculative_num_steps > 1:
            worker.draft_attn_backend.init_forward_metadata(forward_batch)
            forward_batch.mark_forward_metadata_ready()
        *_, tokens, _ = worker.draft_forward(forward_batch)
        return tokens
