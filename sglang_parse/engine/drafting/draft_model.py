"""The draft model: its SGLang worker and its forwards.

Draft and target share slot numbers (one ``req_to_token`` row per request) with separate buffers.
The draft model sees every token of the context at its true position.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from sglang.srt.configs.draft_parallel import DraftParallelSpec, DraftTPExecution
from sglang.srt.layers.logits_processor import LogitsProcessor, LogitsProcessorOutput
from sglang.srt.layers.moe.utils import draft_model_build_scope
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.model_executor.forward_batch_info import ForwardBatch, ForwardMode
from sglang.srt.speculative.base_spec_worker import EagleDraftWorkerBase
from sglang.srt.speculative.draft_parallel import resolve_draft_parallel_layout
from sglang.srt.speculative.spec_utils import draft_pp_context, draft_tp_context

from sglang_parse.context import process_context
from sglang_parse.core.block import BlockKind, Masks
from sglang_parse.core.simulation import SimulatedAcceptance
from sglang_parse.device import on_device
from sglang_parse.engine.drafting.batches import extend_batch, new_batch
from sglang_parse.engine.drafting.block_graphs import BlockGraphs
from sglang_parse.engine.drafting.draft_head import DraftHead
from sglang_parse.engine.drafting.kv_marks import DraftKvMarks
from sglang_parse.engine.pass_graphs import MAX_PREFILL_ROWS, PassGraphs, capture
from sglang_parse.engine.requests import sequence_slice
from sglang_parse.engine.sglang_types import Req

logger = logging.getLogger(__name__)

PADDING_SLOT = 0
"""KV that SGLang writes there is never read (``ReqToTokenPool`` and its allocators)."""


@dataclass(frozen=True, slots=True)
class DecodeInputs:
    """Inputs of some requests' next decode steps but for the tokens, sent to the device at once.

    Attributes:
        pools: int64 [n] the requests' rows of ``req_to_token``.
        seq_lens: int64 [steps, n] tokens that each step sees, its own included.
        orig_seq_lens: the same in int32.
        seq_lens_cpu: the same on the host.
        positions: int64 [steps, n] of each step's token.
        slots: int64 [steps, n] where its KV is written.
    """

    pools: torch.Tensor
    seq_lens: torch.Tensor
    orig_seq_lens: torch.Tensor
    seq_lens_cpu: Sequence[Sequence[int]]
    positions: torch.Tensor
    slots: torch.Tensor

    @classmethod
    def of(
        cls, table: torch.Tensor, reqs: Sequence[Req], lengths: Sequence[Sequence[int]]
    ) -> DecodeInputs:
        """Inputs of steps at ``lengths`` [steps][n] of the sequences, each step's token included.

        A request past its slots writes to SGLang's padding slot and sees its own slots only; its
        tokens are to be ignored.

        Args:
            table: SGLang's ``req_to_token``, on the device.
        """
        device, owned = table.device, [req.kv.kv_allocated_len for req in reqs]
        seen = [[min(pair) for pair in zip(step, owned, strict=True)] for step in lengths]
        sent = on_device([[req.kv.req_pool_idx for req in reqs], *seen], device)
        pools, seq_lens = sent[0], sent[1:]
        positions = seq_lens - 1
        slots = table[pools, positions].to(torch.int64)
        is_past = [[*map(int.__lt__, *pair)] for pair in zip(seen, lengths, strict=True)]
        if any(map(any, is_past)):
            slots.masked_fill_(on_device(is_past, device, torch.bool), PADDING_SLOT)
        return cls(pools, seq_lens, seq_lens.to(torch.int32), seen, positions, slots)


class DraftModel(EagleDraftWorkerBase):
    """Runs the draft model, as the draft worker that SGLang expects.

    Attributes:
        runs_ahead: whether the host is free while a forward runs; on a CPU it is not.
        graph_reqs: requests of the largest decode step with a CUDA graph; 0 without graphs.
        replays: whether the last forward replayed a CUDA graph.
        kv: marks of the slots with draft KV; made with the memory pool.
        block_kinds, mask_id: the kinds of its blocks, and the mask token; set before
            ``init_cuda_graphs``.
        is_masked: blocks run masks after every row in the layout ``mask``, otherwise in ``alias``.
        plans_on_device: whether attention plans a block from lengths on the device.
        simulated: says how sure it is of its tokens, if acceptance is simulated.
        prefill_graphs, block_graphs: CUDA graphs, smallest first, and by kind.
        head: the EAGLE-3 head that proposes its blocks' candidates; every forward that writes the
            draft model's KV writes the head's, too.
    """

    kv: DraftKvMarks
    head: DraftHead | None = None
    simulated: SimulatedAcceptance | None = None
    block_kinds: Sequence[BlockKind] = ()
    prefill_graphs: Sequence[PassGraphs] = ()
    graph_reqs = mask_id = 0
    replays = is_masked = plans_on_device = False

    def __init__(
        self,
        server_args: Any,
        gpu_id: int,
        nccl_port: int,
        target_worker: TpModelWorker,
        head_path: str = "",
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
        if head_path:
            self.head = DraftHead(server_args, gpu_id, nccl_port, self.draft_worker, head_path)
        self.draft_runner = self.draft_worker.model_runner
        self.device = self.draft_runner.device
        self.runs_ahead = self.device != "cpu"
        self.block_graphs: dict[BlockKind, BlockGraphs] = {}

    def keep_within(self, num_ids: int) -> None:
        """Proposes no token from ``num_ids`` on: padding of embeddings, of which the target's has
        other rows."""
        for module in self.draft_runner.model.modules():
            if isinstance(module, LogitsProcessor):
                module.register_forward_hook(partial(_mask_from, num_ids))
        if self.head is not None:
            self.head.last_id = num_ids - 1
        text = "PARSE: the draft model has %d tokens, the target %d: drafts have the first %d"
        rows = process_context()
        logger.info(text, rows.draft_rows, rows.target_rows, num_ids)

    def draft(self) -> None:
        """Abstract upstream; PARSE drafts by ``drafter.Drafter``."""
        raise NotImplementedError

    def draft_extend(self) -> None:
        """Abstract upstream; PARSE computes missing draft KV by ``draft_prefill``."""
        raise NotImplementedError

    def alloc_memory_pool(self, **pools: Any) -> None:
        self.req_to_token = pools["req_to_token_pool"].req_to_token
        allocator = pools["token_to_kv_pool_allocator"]
        # Of two pools, the one with numbers.
        allocator = getattr(allocator, "full_attn_allocator", allocator)
        self.kv = DraftKvMarks(self.req_to_token, allocator.size + allocator.page_size)
        self.kv.allocator = allocator
        self.draft_worker.alloc_memory_pool(**pools)
        if self.head is not None:
            self.head.alloc_memory_pool(**pools)

    def init_attention_backends(self) -> None:
        self.draft_worker.init_attention_backends()
        if self.head is not None:
            self.head.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        """Captures plain decode steps, which SGLang's own draft models do not run, prefills and
        blocks."""
        self.draft_worker.init_cuda_graphs()
        if self.head is not None:
            self.head.init_cuda_graphs()
        self.graph_reqs = max(self.draft_runner.decode_cuda_graph_capture_bs, default=0)
        if not self.graph_reqs:
            return
        self.prefill_graphs = capture(self.draft_runner, MAX_PREFILL_ROWS)
        for kind in self.block_kinds:
            if kind.masks is not Masks.NONE:
                one = BlockGraphs(self.draft_runner, kind, self.mask_id, self.head)
                self.block_graphs[kind] = one

    def graphs_of(self, kind: BlockKind, num_reqs: int) -> BlockGraphs | None:
        """The graphs of a kind of block, if one holds so many requests."""
        graphs = self.block_graphs.get(kind)
        return graphs if graphs is not None and num_reqs <= graphs.max_bs else None

    def has_graph(self, kind: BlockKind, num_reqs: int) -> bool:
        """Whether a forward of so many requests of this kind is a replay."""
        if kind.masks is Masks.NONE:
            return num_reqs <= self.graph_reqs
        return self.graphs_of(kind, num_reqs) is not None

    # -- forwards ---------------------------------------------------------------

    def decode(self, inputs: DecodeInputs, step: int, ids: torch.Tensor) -> torch.Tensor:
        """Runs one of the decode steps of ``inputs``.

        Args:
            ids: int64 [n] its tokens, on the device.

        Returns:
            Logits [n, vocab]; the next step may overwrite their memory.
        """
        return self.run(
            new_batch(
                self.draft_runner,
                ForwardMode.DECODE,
                pools=inputs.pools,
                ids=ids,
                positions=inputs.positions[step],
                slots=inputs.slots[step],
                seq_lens=inputs.seq_lens[step],
                orig_seq_lens=inputs.orig_seq_lens[step],
                seq_lens_cpu=inputs.seq_lens_cpu[step],
            )
        ).next_token_logits

    def extend(
        self, reqs: Sequence[Req], starts: Sequence[int], ends: Sequence[int]
    ) -> torch.Tensor:
        """Runs one forward over the tokens [start, end) of each request.

        Returns:
            Logits [len(reqs), vocab] of the last ones.
        """
        spans = [*zip(reqs, starts, ends, strict=True)]
        ids, positions, owners, lens = list[int](), list[int](), list[int](), list[int]()
        for req, start, end in spans:
            ids += tokens_of(req, start, end)
            positions += range(start, end)
            owners += [req.kv.req_pool_idx] * (end - start)
            lens.append(end - start)
        tokens = on_device([ids, positions, owners], self.device)
        pools = [req.kv.req_pool_idx for req in reqs]
        first_rows = [sum(lens[:i]) for i in range(len(lens))]
        numbers = on_device([pools, ends, starts, lens, first_rows], self.device)
        forward_batch = new_batch(
            self.draft_runner,
            ForwardMode.EXTEND,
            pools=numbers[0],
            ids=tokens[0],
            positions=tokens[1],
            slots=self.req_to_token[tokens[2], tokens[1]].to(torch.int64),
            seq_lens=numbers[1],
            seq_lens_cpu=ends,
            capture=self.head is not None,
        )
        extend_batch(forward_batch, numbers[2:].to(torch.int32), starts, lens)
        before = copy.copy(forward_batch) if self.head else None
        output = self._run_prefill(forward_batch)
        if self.head is not None:
            following = on_device(_following(spans), self.device)
            self.head.extend(before, following, output.hidden_states)
        return output.next_token_logits

    def _run_prefill(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        graphs = next((one for one in self.prefill_graphs if one.fits(forward_batch)), None)
        if graphs is None:
            return self.run(forward_batch)
        self.replays = True
        return graphs.run(forward_batch)[0]

    def run(self, forward_batch: ForwardBatch) -> LogitsProcessorOutput:
        self.draft_runner.kv_index_translator.bind_own_plan(forward_batch)
        output = self.draft_runner.forward(forward_batch)
        self.replays = output.can_run_graph
        return output.logits_output


def _mask_from(num_ids: int, _: Any, __: Any, output: LogitsProcessorOutput) -> None:
    if output.next_token_logits is not None:
        output.next_token_logits[:, num_ids:] = float("-inf")


def tokens_of(req: Req, start: int, end: int) -> list[int]:
    """Token ids [start, end) of its prompt, output and draft."""
    return sequence_slice(req, start, end, req.parse_state.draft.token_ids)


def _following(spans: Sequence[tuple[Req, int, int]]) -> list[int]:
    """The token after each of the tokens [start, end) of each request; 0 after a prompt whose
    answer has not begun."""
    found: list[int] = []
    for req, start, end in spans:
        known = tokens_of(req, start + 1, end + 1)
        found += [*known, *[0] * (end - start - len(known))]
    return found
