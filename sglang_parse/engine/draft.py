"""The draft model: its worker, its KV on the target's slots, and its bursts.

Draft and target share slot numbers (one ``req_to_token`` row per request) with separate buffers.
The draft model sees every token of the context at its true position.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from itertools import takewhile
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

from sglang_parse.core.phases import Phase
from sglang_parse.device import HostCopy, on_device
from sglang_parse.engine.batch import draft_budget, is_gone, sequence_slice
from sglang_parse.engine.faults import nan_rows
from sglang_parse.engine.ranks import NO_TOKEN, share_choices
from sglang_parse.engine.sampling import RowSampler

PADDING_SLOT = 0
"""KV that SGLang writes there is never read (``ReqToTokenPool`` and its allocators)."""


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
        self.steps_unseen = 1 if self.device == "cpu" else None
        """Steps of a burst between two looks at its tokens; None: the whole burst."""
        self.replays = False
        """Whether the last forward replayed a CUDA graph."""

    def draft(self) -> None:
        """Abstract upstream; PARSE drafts with ``Burst``."""
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
        """Bursts are plain decode steps: unlike SGLang's own draft models, this one wants them."""
        self.draft_worker.init_cuda_graphs()

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
        state.fill_draft_kv(end)

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
            reqs,
            ForwardMode.EXTEND,
            ids=on_device(ids, self.device),
            positions=positions,
            counts=lens,
            seq_lens=ends,
        )
        row_starts = [sum(lens[:i]) for i in range(len(lens))]
        for name, values in (
            ("extend_prefix_lens", starts),
            ("extend_seq_lens", lens),
            ("extend_start_loc", row_starts),
        ):
            setattr(forward_batch, name, on_device(values, self.device, torch.int32))
        forward_batch.extend_prefix_lens_cpu = starts
        forward_batch.extend_seq_lens_cpu = lens
        forward_batch.extend_num_tokens = sum(lens)
        forward_batch.extend_logprob_start_lens_cpu = lens
        return self._run(forward_batch)

    def _hand_built(
        self,
        reqs: Sequence[Any],
        mode: ForwardMode,
        *,
        ids: torch.Tensor,
        positions: Sequence[int],
        counts: Sequence[int],
        seq_lens: Sequence[int],
    ) -> ForwardBatch:
        """A ``ForwardBatch`` over some requests, writing KV at ``positions`` of their rows.

        Args:
            ids: int64 [sum(counts)] on the device, the requests' new tokens in order.
            positions: [sum(counts)] where they stand.
            counts: [len(reqs)] new tokens per request.
            seq_lens: [len(reqs)] lengths, the new tokens included.
        """
        device = self.device
        rows = [req.kv.req_pool_idx for req in reqs]
        owners = [row for row, count in zip(rows, counts, strict=True) for _ in range(count)]
        flat_positions = on_device(positions, device)
        slots = self.req_to_token[on_device(owners, device), flat_positions]
        lens = on_device(seq_lens, device)
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(reqs),
            input_ids=ids,
            req_pool_indices=on_device(rows, device),
            seq_lens=lens,
            seq_lens_cpu=torch.tensor(seq_lens),
            seq_lens_sum=sum(seq_lens),
            orig_seq_lens=lens.to(torch.int32),
            out_cache_loc=slots.to(torch.int64),
            positions=flat_positions,
            spec_algorithm=self.draft_runner.spec_algorithm,
            capture_hidden_mode=CaptureHiddenMode.NULL,
            return_logprob=False,
            # Where a graph's rows are more than these, attention leaves out the rest.
            global_num_token_non_padded_cpu=len(positions),
        )

    def _run(self, forward_batch: ForwardBatch) -> torch.Tensor:
        self.draft_runner.kv_index_translator.bind_own_plan(forward_batch)
        done = self.draft_runner.forward(forward_batch)
        self.replays = done.can_run_graph
        return done.logits_output.next_token_logits


class Burst:
    """Some requests draft on, in stretches.

    Within a stretch nothing is read from the device: each step's tokens are the next one's input
    there. Between stretches requests leave that have finished. On a CPU a stretch is one step, so
    nobody drafts past an end; on a GPU it is the whole burst, because waiting for it at every
    token costs more than a few tokens nobody needs.

    A request leaves the burst at its budget or a stop token; its phase becomes VERIFYING then.
    NaN logits end the request (``faults``).

    Attributes:
        rows: the requests' rows of the batch.
        draft_tokens: most tokens of any draft.
        num_done: steps made.
    """

    def __init__(
        self, model: DraftModel, batch: Any, rows: Sequence[int], draft_tokens: int
    ) -> None:
        self.model = model
        self.batch = batch
        self.draft_tokens = draft_tokens
        self.sampler = RowSampler(model.draft_runner, batch)
        self.rows = tuple(rows)
        self.num_done = 0
        self._going_on = list(rows)
        self._unread: HostCopy | None = None

    def launch(self, num_steps: int) -> None:
        """Up to ``num_steps`` more tokens for each request; the last stretch stays unread."""
        while self.num_done < num_steps:
            self.read()
            if not self._going_on:
                return
            wanted = max(self._budget(req) - req.parse_state.num_drafted for req in self._reqs())
            stretch = min(num_steps - self.num_done, wanted, self.model.steps_unseen or num_steps)
            self._unread = HostCopy(self._stretch(stretch))
            self.num_done += stretch

    def read(self) -> None:
        """Wait for the last stretch; its tokens join their requests' drafts."""
        unread, self._unread = self._unread, None
        if unread is not None:
            self._append(unread.tolist())

    def _reqs(self) -> list[Any]:
        return [self.batch.reqs[row] for row in self._going_on]

    def _budget(self, req: Any) -> int:
        return draft_budget(req, self.draft_tokens)

    def _stretch(self, num_steps: int) -> torch.Tensor:
        """int64 [requests, num_steps]: next tokens, ``NO_TOKEN`` where logits held a NaN."""
        logits = self._first_step()
        chosen = [self._choose(logits, 0)]
        for step in range(1, num_steps):
            logits = self._step(chosen[-1].clamp(min=0), step)
            chosen.append(self._choose(logits, step))
        return torch.stack(chosen, dim=1)

    def _lengths(self, step: int) -> list[int]:
        """Tokens of each sequence before its ``step``-th token of this stretch is chosen."""
        return [
            req.parse_state.committed_len + 1 + req.parse_state.num_drafted + step
            for req in self._reqs()
        ]

    def _first_step(self) -> torch.Tensor:
        reqs, ends = self._reqs(), self._lengths(0)
        if any(req.parse_state.draft_kv_len + 1 < end for req, end in zip(reqs, ends, strict=True)):
            return self.model._extend(reqs, ends)
        last_ids = [_last_id(req) for req in reqs]
        return self._step(on_device(last_ids, self.model.device), 0)

    def _step(self, last_ids: torch.Tensor, step: int) -> torch.Tensor:
        """A decode step. A request past its budget has no slots left: it writes to SGLang's
        padding slot, sees what is its own, and its tokens are dropped."""
        reqs, lengths = self._reqs(), self._lengths(step)
        owned = [min(n, req.kv.kv_allocated_len) for n, req in zip(lengths, reqs, strict=True)]
        forward_batch = self.model._hand_built(
            reqs,
            ForwardMode.DECODE,
            ids=last_ids,
            positions=[length - 1 for length in owned],
            counts=[1] * len(reqs),
            seq_lens=owned,
        )
        is_past = [own < n for own, n in zip(owned, lengths, strict=True)]
        if any(is_past):
            past = on_device(is_past, self.model.device, torch.bool)
            forward_batch.out_cache_loc.masked_fill_(past, PADDING_SLOT)
        return self.model._run(forward_batch)

    def _choose(self, logits: torch.Tensor, step: int) -> torch.Tensor:
        """int64 [rows] the draft's next token."""
        is_bad = nan_rows(logits)
        positions = on_device([n - 1 for n in self._lengths(step)], logits.device)
        tokens, _ = self.sampler.sample(logits, self._going_on, positions)
        return share_choices(tokens, is_bad)

    def _append(self, stretches: Sequence[Sequence[int]]) -> None:
        """Keep each request's tokens up to its end; those that are done leave."""
        staying = []
        for row, tokens in zip(self._going_on, stretches, strict=True):
            req = self.batch.reqs[row]
            if is_gone(req):
                continue
            self._keep(req, tokens)
            if req.parse_state.phase is Phase.DRAFTING and not req.parse_state.fault:
                staying.append(row)
        self._going_on = staying

    def _keep(self, req: Any, tokens: Sequence[int]) -> None:
        """Add tokens to the request's draft until it is over, or one could not be computed."""
        state = req.parse_state
        sound = list(takewhile(lambda token: token != NO_TOKEN, tokens))
        state.extend_draft(sound, self._budget(req))
        if len(sound) < len(tokens) and state.phase is Phase.DRAFTING:
            state.fail("NaN in the draft model's logits")


def _last_id(req: Any) -> int:
    state = req.parse_state
    return (state.draft.token_ids or state.output_ids)[-1]
