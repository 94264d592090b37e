"""The draft model: its worker, its KV on the target's slots, and its forwards.

Draft and target share slot numbers (one ``req_to_token`` row per request) with separate buffers.
The draft model sees every token of the context at its true position. It reads a sequence when it is
about to draft (``catch_up``); which tokens it writes, and when, is ``burst``'s.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
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

from sglang_parse.core.request import RequestState
from sglang_parse.device import on_device
from sglang_parse.engine.batch import max_forward_rows, sequence_slice
from sglang_parse.engine.chain import DraftChain
from sglang_parse.engine.draft_kv import DraftKv

PADDING_SLOT = 0
"""KV that SGLang writes there is never read (``ReqToTokenPool`` and its allocators)."""
SMALL_GAP = 3
"""Tokens without draft KV that are caught up with by replayed decode steps: so many cost less than
a forward that no graph was captured of (estimated for a 1.7B draft model: 1.3 ms a step, 4 to 7 ms
for the forward)."""
BURSTS_OWN = 32
"""Tokens without draft KV that a burst's first forward brings along. More are read before it, by a
forward that is timed by itself: a prompt says nothing about what drafts cost."""


@dataclass(frozen=True, slots=True)
class Places:
    """Where some requests' next decode steps stand: sent to the device once, taken step by step.

    Attributes:
        reqs: [n] the requests.
        rows: int64 [n] their rows of ``req_to_token``.
        seq_lens: int64 [steps, n] tokens each step sees, its own included.
        orig_seq_lens: the same in int32, as SGLang keeps it.
        seq_lens_cpu: the same on the host.
        seq_lens_sums: [steps] their sums.
        positions: int64 [steps, n] of each step's token.
        slots: int64 [steps, n] where its KV is written.
        num_owned: leading steps in which nobody is past its slots.
    """

    reqs: Sequence[Any]
    rows: torch.Tensor
    seq_lens: torch.Tensor
    orig_seq_lens: torch.Tensor
    seq_lens_cpu: torch.Tensor
    seq_lens_sums: Sequence[int]
    positions: torch.Tensor
    slots: torch.Tensor
    num_owned: int

    @classmethod
    def of(
        cls, table: torch.Tensor, reqs: Sequence[Any], lengths: Sequence[Sequence[int]]
    ) -> Places:
        """Of ``lengths`` [steps][n] of the sequences, each step's token included.

        A request past its slots writes to SGLang's padding slot and sees what is its own; its
        tokens mean nothing.

        Args:
            table: SGLang's ``req_to_token``, on the device.
        """
        device, owned = table.device, [req.kv.kv_allocated_len for req in reqs]
        seen = [[min(pair) for pair in zip(step, owned, strict=True)] for step in lengths]
        sent = on_device([[req.kv.req_pool_idx for req in reqs], *seen], device)
        rows, seq_lens = sent[0], sent[1:]
        positions = seq_lens - 1
        slots = table[rows, positions].to(torch.int64)
        is_past = [[*map(int.__lt__, *pair)] for pair in zip(seen, lengths, strict=True)]
        num_owned = sum(not any(step) for step in is_past)  # lengths only grow
        if num_owned < len(lengths):
            slots.masked_fill_(on_device(is_past, device, torch.bool), PADDING_SLOT)
        return cls(
            reqs=reqs,
            rows=rows,
            seq_lens=seq_lens,
            orig_seq_lens=seq_lens.to(torch.int32),
            seq_lens_cpu=torch.tensor(seen),
            seq_lens_sums=[*map(sum, seen)],
            positions=positions,
            slots=slots,
            num_owned=num_owned,
        )


class DraftModel(EagleDraftWorkerBase):
    """Runs the draft model. Base class: what SGLang expects a draft worker to answer."""

    def __init__(
        self,
        server_args: Any,
        gpu_id: int,
        nccl_port: int,
        target_worker: TpModelWorker,
        chain_steps: int = 0,
    ) -> None:
        """``chain_steps``: decode steps in one CUDA graph; 0: each has one of its own."""
        super().__init__()
        self._chain_steps = chain_steps
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
        self.runs_ahead = self.device != "cpu"
        """Whether the host is free while a forward runs; on a CPU it is over when it returns."""
        self.graph_reqs = 0
        """Requests of the largest decode step with a CUDA graph; 0 where none was captured."""
        self.chain: DraftChain | None = None
        """Runs several steps at once, if the settings say so."""
        self.replays = False
        """Whether the last forward replayed a CUDA graph."""
        self.kv: DraftKv
        """Which slots have its KV; made with the memory pool."""

    def draft(self) -> None:
        """Abstract upstream; PARSE drafts with ``burst.Burst``."""
        raise NotImplementedError

    def draft_extend(self) -> None:
        """Abstract upstream; PARSE fills the draft's KV with ``catch_up``."""
        raise NotImplementedError

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        self.req_to_token = req_to_token_pool.req_to_token
        allocator = token_to_kv_pool_allocator
        self.kv = DraftKv(self.req_to_token, allocator.size + allocator.page_size)
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
        self.graph_reqs = max(self.draft_runner.decode_cuda_graph_capture_bs, default=0)
        if self._chain_steps:
            self.chain = DraftChain(self.draft_runner, self._chain_steps)

    # -- forwards ---------------------------------------------------------------

    def catch_up(self, reqs: Sequence[Any]) -> list[int]:
        """Have the draft model read what it lacks of sequences it is to write on: by one forward at
        most. The last ``BURSTS_OWN`` tokens are left to the burst where nothing else is missing.

        Returns:
            How many tokens were read of each. Who is not caught up by them needs another forward.
        """
        unknown = [req for req in reqs if _is_unfound(req.parse_state)]
        if unknown:
            self.kv.find(unknown)
        room, num_read = max_forward_rows(), []
        for req in reqs:
            missing = _missing(req.parse_state)
            num_read.append(min(room, missing) if missing > BURSTS_OWN else 0)
            room -= num_read[-1]
        self.fill(
            [
                (req, req.parse_state.draft_kv_len + count)
                for req, count in zip(reqs, num_read, strict=True)
                if count
            ]
        )
        return num_read

    def fill(self, ends: Sequence[tuple[Any, int]]) -> None:
        """Complete the draft's KV of some requests, each up to so many tokens; by one forward."""
        if not ends:
            return
        self.write_up_to(*zip(*ends, strict=True))
        for req, end in ends:
            req.parse_state.fill_draft_kv(end)

    def write_up_to(self, reqs: Sequence[Any], ends: Sequence[int]) -> torch.Tensor:
        """Forward the tokens [draft_kv_len, end) of each request, at least one.

        Returns:
            logits [len(reqs), vocab] of the last ones.
        """
        starts = [req.parse_state.draft_kv_len for req in reqs]
        gap = max(end - start for start, end in zip(starts, ends, strict=True)) - 1
        if gap <= (SMALL_GAP if len(reqs) <= self.graph_reqs else 0):
            logits = self._step_up_to(reqs, starts, ends, gap)
        else:
            logits = self._extend(reqs, starts, ends)
        self.kv.mark_read([*zip(reqs, starts, ends, strict=True)])
        return logits

    def _step_up_to(
        self, reqs: Sequence[Any], starts: Sequence[int], ends: Sequence[int], gap: int
    ) -> torch.Tensor:
        """By decode steps. Who is behind by less writes its last token again, where it stands."""
        steps = [
            [min(start + step, end - 1) for start, end in zip(starts, ends, strict=True)]
            for step in range(gap + 1)
        ]
        known = [
            [_token_at(req, position) for req, position in zip(reqs, positions, strict=True)]
            for positions in steps
        ]
        ids = on_device(known, self.device)
        lengths = [[position + 1 for position in positions] for positions in steps]
        places = Places.of(self.req_to_token, reqs, lengths)
        for step in range(gap):
            self.step(places, step, ids[step])
        return self.step(places, gap, ids[gap])

    def _extend(
        self, reqs: Sequence[Any], starts: Sequence[int], ends: Sequence[int]
    ) -> torch.Tensor:
        """By one forward."""
        device = self.device
        lens = [end - start for start, end in zip(starts, ends, strict=True)]
        ids: list[int] = []
        positions: list[int] = []
        owners: list[int] = []
        for req, start, end in zip(reqs, starts, ends, strict=True):
            ids += sequence_slice(req, start, end, req.parse_state.draft.token_ids)
            positions += range(start, end)
            owners += [req.kv.req_pool_idx] * (end - start)
        forward_batch = self._hand_built(
            ForwardMode.EXTEND,
            rows=on_device([req.kv.req_pool_idx for req in reqs], device),
            ids=on_device(ids, device),
            positions=(flat := on_device(positions, device)),
            slots=self.req_to_token[on_device(owners, device), flat].to(torch.int64),
            seq_lens=(seq_lens := on_device(ends, device)),
            orig_seq_lens=seq_lens.to(torch.int32),
            seq_lens_cpu=torch.tensor(ends),
            seq_lens_sum=sum(ends),
        )
        row_starts = [sum(lens[:i]) for i in range(len(lens))]
        for name, values in (
            ("extend_prefix_lens", starts),
            ("extend_seq_lens", lens),
            ("extend_start_loc", row_starts),
        ):
            setattr(forward_batch, name, on_device(values, device, torch.int32))
        forward_batch.extend_prefix_lens_cpu = starts
        forward_batch.extend_seq_lens_cpu = lens
        forward_batch.extend_num_tokens = sum(lens)
        forward_batch.extend_logprob_start_lens_cpu = lens
        return self._run(forward_batch)

    def step(self, places: Places, step: int, ids: torch.Tensor) -> torch.Tensor:
        """A decode step.

        Args:
            places: where its requests stand.
            step: which of their steps.
            ids: int64 [n] its tokens, on the device.

        Returns:
            logits [n, vocab]; the next step may write to their memory.
        """
        return self._run(
            self._hand_built(
                ForwardMode.DECODE,
                rows=places.rows,
                ids=ids,
                positions=places.positions[step],
                slots=places.slots[step],
                seq_lens=places.seq_lens[step],
                orig_seq_lens=places.orig_seq_lens[step],
                seq_lens_cpu=places.seq_lens_cpu[step],
                seq_lens_sum=places.seq_lens_sums[step],
            )
        )

    @property
    def chain_len(self) -> int:
        """Steps that are run at once; 0 where there is no chain."""
        return self.chain.num_steps if self.chain else 0

    def chain_fits(self, places: Places, step: int) -> bool:
        """Whether a chain can be run from ``step`` of ``places`` on."""
        if self.chain is None or not self.chain.fits(len(places.reqs)):
            return False
        return step + self.chain.num_steps <= places.num_owned

    def run_chain(self, places: Places, step: int, ids: torch.Tensor) -> torch.Tensor:
        """int64 [n, chain_len] the best tokens of as many steps, ``NO_TOKEN`` as of a NaN's.

        Arguments: as for ``step``.
        """
        assert self.chain is not None
        tokens = self.chain.run(
            ids,
            rows=places.rows,
            positions=places.positions[step],
            positions_cpu=places.seq_lens_cpu[step] - 1,
            positions_sum=places.seq_lens_sums[step] - len(ids),
            slots=places.slots[step : step + self.chain.num_steps],
        )
        self.replays = self.chain.graphs is not None
        return tokens

    def _hand_built(
        self,
        mode: ForwardMode,
        *,
        rows: torch.Tensor,
        ids: torch.Tensor,
        positions: torch.Tensor,
        slots: torch.Tensor,
        seq_lens: torch.Tensor,
        orig_seq_lens: torch.Tensor,
        seq_lens_cpu: torch.Tensor,
        seq_lens_sum: int,
    ) -> ForwardBatch:
        """A ``ForwardBatch`` over some requests' new tokens; all but ``seq_lens_cpu`` lie on the
        device, int64 but for ``orig_seq_lens``.

        Args:
            rows: [n] the requests' rows of ``req_to_token``.
            ids, positions, slots: [new tokens] of the requests, in order.
            seq_lens, orig_seq_lens, seq_lens_cpu: [n] lengths, the new tokens included.
            seq_lens_sum: their sum.
        """
        return ForwardBatch(
            forward_mode=mode,
            batch_size=len(rows),
            input_ids=ids,
            req_pool_indices=rows,
            seq_lens=seq_lens,
            seq_lens_cpu=seq_lens_cpu,
            seq_lens_sum=seq_lens_sum,
            orig_seq_lens=orig_seq_lens,
            out_cache_loc=slots,
            positions=positions,
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


def _token_at(req: Any, position: int) -> int:
    draft = req.parse_state.draft.token_ids
    return sequence_slice(req, position, position + 1, draft)[0]


def is_caught_up(req: Any) -> bool:
    """Whether a burst may go on with it."""
    return _missing(req.parse_state) <= BURSTS_OWN


def _missing(state: RequestState) -> int:
    """Tokens with the target's KV that lack the draft's."""
    return state.committed_len - state.draft_kv_len


def _is_unfound(state: RequestState) -> bool:
    """Whether nobody knows for sure how far its draft KV goes. In the middle of a draft, too: since
    it began SGLang may have put others' slots, of the same tokens, in the place of the prompt's."""
    return not (state.draft_kv_found or state.num_draft_inflight)
