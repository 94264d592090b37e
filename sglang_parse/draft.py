"""The draft model: its worker, its KV on the target's slots, and its bursts.

Draft and target share slot numbers (one ``req_to_token`` row per request) with separate buffers.
The draft model sees every token of the context at its true position.
"""

from __future__ import annotations

import copy
import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import (
    CaptureHiddenMode,
    ForwardBatch,
    ForwardMode,
)
from sglang.srt.speculative.base_spec_worker import EagleDraftWorkerBase
from sglang.srt.speculative.draft_parallel import resolve_draft_parallel_layout
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context

from sglang_parse.commit import draft_budget, is_stop_token, sequence_slice
from sglang_parse.decision import share_tokens
from sglang_parse.faults import nan_rows
from sglang_parse.phases import Phase
from sglang_parse.sampling import RowSampler
from sglang_parse.switch import Stage, Timed


class DraftModel(EagleDraftWorkerBase):
    """Runs the draft model. Base class: what SGLang expects a draft worker to answer."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        self.parallel_layout = resolve_draft_parallel_layout(
            DraftParallelSpec(tp_execution=DraftTPExecution.TARGET_LAYOUT)
        )
        with (
            draft_tp_context(self.parallel_layout),
            draft_pp_context(),
            draft_model_build_scope(),
        ):
            self.draft_worker = TpModelWorker(
                server_args=server_args,
                gpu_id=gpu_id,
                nccl_port=nccl_port,
                is_draft_worker=True,
                context_length=target_worker.model_runner.model_config.context_len,
            )
        self.draft_runner = self.draft_worker.model_runner
        self.device = self.draft_runner.device

    def draft(self) -> None:
        """Abstract upstream; PARSE drafts with ``burst``."""
        raise NotImplementedError

    def draft_extend(self) -> None:
        """Abstract upstream; PARSE fills the draft's KV with ``prefill`` and ``fill``."""
        raise NotImplementedError

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        self.req_to_token = req_to_token_pool.req_to_token
        self.draft_worker.alloc_memory_pool(
            memory_pool_config=memory_pool_config,
            req_to_token_pool=req_to_token_pool,
            token_to_kv_pool_allocator=token_to_kv_pool_allocator,
        )

    def init_attention_backends(self) -> None:
        self.draft_worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        self.draft_worker.init_cuda_graphs(capture_decode_cuda_graph=False)

    # -- forwards ---------------------------------------------------------------

    def prefill(self, batch: Any) -> None:
        """Write the draft's KV for a prefill batch: same slots, positions and ids as the target."""
        view = copy.copy(batch)
        view.return_logprob = False
        view.sampling_info = None
        view.input_embeds = view.multimodal_inputs = None
        forward_batch = ForwardBatch.init_new(
            view,
            self.draft_runner,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_hidden_states_before_norm=False,
        )
        self.draft_runner.forward(forward_batch)

    def fill(self, req: Any, end: int) -> None:
        """Complete the draft's KV of one request up to ``end`` tokens."""
        state = req.parse_state
        if state.draft_kv_len >= end:
            return
        self._extend([req], [end])
        state.draft_kv_len = end

    def burst(self, batch: Any, rows: Sequence[int], num_steps: int) -> Timed:
        """Let the requests ``rows`` of ``batch`` draft up to ``num_steps`` more tokens each.

        A request leaves the burst at its budget or a stop token; its phase becomes VERIFYING
        then. NaN logits end the request (``faults``).
        """
        started = time.perf_counter()
        num_done = _Burst(self, batch, list(rows)).run(num_steps)
        elapsed_ms = (time.perf_counter() - started) * 1e3
        for row in rows:
            batch.reqs[row].parse_state.stats.draft_ms += elapsed_ms / len(rows)
        return Timed(Stage.BURST, len(rows), num_done, elapsed_ms)

    def _extend(self, reqs: Sequence[Any], ends: Sequence[int]) -> torch.Tensor:
        """Forward [draft_kv_len, end) of each request; logits [len(reqs), vocab] of the last."""
        starts = [req.parse_state.draft_kv_len for req in reqs]
        lens = [end - start for start, end in zip(starts, ends, strict=True)]
        ids: list[int] = []
        positions: list[int] = []
        for req, start, end in zip(reqs, starts, ends, strict=True):
            ids += sequence_slice(req, start, end, req.parse_state.draft.token_ids)
            positions += range(start, end)
        forward_batch = self._hand_built(
            reqs, ForwardMode.EXTEND, ids=ids, positions=positions, counts=lens, seq_lens=ends
        )
        device = self.device
        forward_batch.extend_prefix_lens = torch.tensor(starts, dtype=torch.int32, device=device)
        forward_batch.extend_seq_lens = torch.tensor(lens, dtype=torch.int32, device=device)
        forward_batch.extend_prefix_lens_cpu = starts
        forward_batch.extend_seq_lens_cpu = lens
        forward_batch.extend_num_tokens = sum(lens)
        forward_batch.extend_start_loc = torch.tensor(
            [sum(lens[:i]) for i in range(len(lens))], dtype=torch.int32, device=device
        )
        forward_batch.extend_logprob_start_lens_cpu = lens
        return self._run(forward_batch)

    def _hand_built(
        self,
        reqs: Sequence[Any],
        mode: ForwardMode,
        *,
        ids: Sequence[int],
        positions: Sequence[int],
        counts: Sequence[int],
        seq_lens: Sequence[int],
    ) -> ForwardBatch:
        """A ``ForwardBatch`` over some requests, writing KV at ``positions`` of their rows.

        Args:
            ids, positions: [sum(counts)], the requests' new tokens concatenated in order.
            counts: [len(reqs)] new tokens per request.
            seq_lens: [len(reqs)] lengths, the new tokens included.
        """
        device = self.device
        pool_indices = torch.tensor([req.kv.req_pool_idx for req in reqs], device=device)
        lens_cpu = torch.tensor(seq_lens)
        flat_positions = torch.tensor(positions, device=device)
        owners = torch.repeat_interleave(pool_indices, torch.tensor(counts, device=device))
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(reqs),
            input_ids=torch.tensor(ids, device=device),
            req_pool_indices=pool_indices,
            seq_lens=lens_cpu.to(device),
            seq_lens_cpu=lens_cpu,
            seq_lens_sum=sum(seq_lens),
            orig_seq_lens=lens_cpu.to(device=device, dtype=torch.int32),
            out_cache_loc=self.req_to_token[owners, flat_positions].to(torch.int64),
            positions=flat_positions,
            spec_algorithm=self.draft_runner.spec_algorithm,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_logprob=False,
        )

    def _run(self, forward_batch: ForwardBatch) -> torch.Tensor:
        self.draft_runner.kv_index_translator.bind_own_plan(forward_batch)
        output = self.draft_runner.forward(forward_batch).logits_output
        return output.next_token_logits


class _Burst:
    """One burst over some requests; rows drop out as they finish."""

    def __init__(self, model: DraftModel, batch: Any, rows: list[int]) -> None:
        self.model = model
        self.batch = batch
        self.sampler = RowSampler(model.draft_runner, batch)
        self.rows = rows

    def run(self, num_steps: int) -> int:
        """How many steps were made."""
        logits = self._first_step()
        for step in range(1, num_steps + 1):
            self._append(self._choose(logits))
            if not self.rows or step == num_steps:
                break
            logits = self._next_step()
        return step

    def _reqs(self) -> list[Any]:
        return [self.batch.reqs[row] for row in self.rows]

    def _length(self, req: Any) -> int:
        """Tokens of the sequence so far, the draft included."""
        return req.kv.kv_committed_len + 1 + len(req.parse_state.draft.token_ids)

    def _first_step(self) -> torch.Tensor:
        reqs = self._reqs()
        ends = [self._length(req) for req in reqs]
        if all(
            req.parse_state.draft_kv_len + 1 == end for req, end in zip(reqs, ends, strict=True)
        ):
            return self._next_step()
        logits = self.model._extend(reqs, ends)
        for req, end in zip(reqs, ends, strict=True):
            req.parse_state.draft_kv_len = end
        return logits

    def _next_step(self) -> torch.Tensor:
        reqs = self._reqs()
        lengths = [self._length(req) for req in reqs]
        last_ids = [(req.parse_state.draft.token_ids or req.output_ids)[-1] for req in reqs]
        forward_batch = self.model._hand_built(
            reqs,
            ForwardMode.DECODE,
            ids=last_ids,
            positions=[length - 1 for length in lengths],
            counts=[1] * len(reqs),
            seq_lens=lengths,
        )
        logits = self.model._run(forward_batch)
        for req, length in zip(reqs, lengths, strict=True):
            req.parse_state.draft_kv_len = length
        return logits

    def _choose(self, logits: torch.Tensor) -> list[int | None]:
        """The draft's next token per row; None where its logits hold a NaN."""
        is_bad = nan_rows(logits)
        positions = torch.tensor(
            [self._length(req) - 1 for req in self._reqs()], device=logits.device
        )
        tokens, _ = self.sampler.sample(logits, self.rows, positions)
        return share_tokens(tokens, is_bad)

    def _append(self, tokens: Sequence[int | None]) -> None:
        staying = []
        for row, token in zip(self.rows, tokens, strict=True):
            req = self.batch.reqs[row]
            if token is None:
                req.parse_state.fault = "NaN in the draft model's logits"
                continue
            draft = req.parse_state.draft
            draft.token_ids.append(token)
            req.parse_state.stats.drafted_tokens += 1
            draft.finished = is_stop_token(req, token)
            if draft.finished or len(draft.token_ids) >= draft_budget(req):
                req.parse_state.phase = Phase.VERIFYING
            else:
                staying.append(row)
        self.rows = staying
