"""The target accelerated by an EAGLE-3 head: SGLang's own EAGLE-3 draft worker beside PARSE's.

The head reads the hidden states of some of the target's layers. Its KV at position p comes from
the target's states there and the token at p + 1, in the slot of the target's token p:

    target tokens      t0   t1   t2   t3          t3 is the anchor: no KV yet
    target KV          t0   t1   t2
    head KV           (t0,t1) (t1,t2) (t2,t3)     complete whenever a request's token is chosen

So whoever writes tokens (a prefill, a verification pass, a step), the forward that chose them has
captured what the head needs to follow; no second target forward is made. Behind a step whose
requests all had a whole chain in it, the head follows all of its rows, as SGLang's own speculation
does: that is one shape, and so one CUDA graph. What it writes behind what was kept is overwritten.
Behind all else it follows as behind a prefill.

The head then proposes a chain of tokens, which ride in the next target forward and are kept as far
as they are the target's own choices. Everything of the head itself (weights, graphs, attention,
steps) is SGLang's; only the tree of alternatives that SGLang puts around a chain is not made.

The radix cache hands out prefixes that end one token before the first that differs: the head's KV
has seen the next one (patch ``head_prefixes``).
"""

from __future__ import annotations

import copy
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.moe.utils import (
    speculative_moe_a2a_backend_context,
    speculative_moe_backend_context,
)
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.model_executor.forward_batch_info import ForwardMode
from sglang.srt.model_executor.model_runner_components.spec_aux_hidden_state import (
    resolve_spec_aux_hidden_state_config,
)
from sglang.srt.runtime_context import get_spec
from sglang.srt.speculative.eagle_info import EagleDraftInput
from sglang.srt.speculative.eagle_worker_common import prepare_for_draft
from sglang.srt.speculative.eagle_worker_v2 import EagleDraftWorker
from sglang.srt.speculative.spec_info import SpeculativeAlgorithm
from sglang.srt.speculative.spec_utils import draft_tp_context

from sglang_parse.device import on_device
from sglang_parse.engine.batch import select_requests, slots_of, tokens_left
from sglang_parse.engine.broadcast import share
from sglang_parse.engine.faults import DraftGuard


@dataclass(frozen=True, slots=True)
class HeadState:
    """What the head goes on from: its output at a request's last position with KV.

    Attributes:
        topk_p, topk_index: [1, 1] its first proposal, in its own vocabulary.
        hidden: [1, hidden size] its state there.
    """

    topk_p: torch.Tensor
    topk_index: torch.Tensor
    hidden: torch.Tensor


@dataclass(frozen=True, slots=True)
class Written:
    """Tokens the target has just chosen or kept for one request.

    Attributes:
        row: index of the request in the scheduler's batch.
        token_ids: [n >= 1] the tokens.
        hidden: [n or more, width] the target's states of all rows it had, in order, the first n
            those that led to the tokens.
    """

    row: int
    token_ids: Sequence[int]
    hidden: torch.Tensor


class Eagle3Head:
    """SGLang's ``EagleDraftWorker`` on the target's slot numbers, driven by PARSE's phases."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker, path: str
    ) -> None:
        self._path = path
        target_runner = target_worker.model_runner
        with self._as_eagle3():
            # Before the target's attention backends are made: that is where SGLang tells the
            # model which layers' states to keep.
            target_runner.spec_aux_config = resolve_spec_aux_hidden_state_config(
                server_args=server_args,
                model_config=target_runner.model_config,
                spec_algorithm=SpeculativeAlgorithm.EAGLE3,
                is_draft_worker=False,
            )
            self.worker = EagleDraftWorker(server_args, gpu_id, nccl_port, target_worker)

    @property
    def _chain_rows(self) -> int:
        """Rows a request has in a pass that checks a whole chain."""
        return self.worker.speculative_num_draft_tokens

    @contextmanager
    def _as_eagle3(self) -> Iterator[None]:
        """SGLang's settings as its EAGLE-3 worker wants to find them when it is made.

        It takes memory for as many tokens at once as these say: not those of a draft and its
        questions, but what the head proposes, and one.
        """
        proposed = get_spec().speculative_num_steps + 1
        with get_spec().override(
            speculative_algorithm=SpeculativeAlgorithm.EAGLE3.name,
            speculative_draft_model_path=self._path,
            speculative_draft_model_revision="main",
            speculative_num_draft_tokens=proposed,
            max_speculative_num_draft_tokens=proposed,
        ):
            yield

    @contextmanager
    def _forward(self) -> Iterator[None]:
        """Around the head's forwards, as ``EAGLEWorkerV2.forward_batch_generation`` has it."""
        with (
            draft_tp_context(self.worker.parallel_layout),
            speculative_moe_backend_context(),
            speculative_moe_a2a_backend_context(),
        ):
            yield

    def alloc_memory_pool(self, **pools: Any) -> None:
        with self._as_eagle3():
            self.worker.alloc_memory_pool(**pools)

    def init_attention_backends(self) -> None:
        with self._as_eagle3():
            self.worker.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        with self._as_eagle3():
            self.worker.init_cuda_graphs()

    def prefill(self, batch: Any, hidden: torch.Tensor, next_token_ids: torch.Tensor) -> None:
        """Write the head's KV for a prefill batch.

        Args:
            batch: the scheduler's batch, in an extend mode.
            hidden: [tokens of the batch, width] captured by the target's prefill.
            next_token_ids: [requests] tokens it chose.
        """
        view = copy.copy(batch)
        view.spec_algorithm = SpeculativeAlgorithm.EAGLE3
        view.return_logprob = False
        view.sampling_info = None
        view.input_embeds = view.multimodal_inputs = None
        self._go_on(view.reqs, self._extend(view, hidden, next_token_ids))

    def follow(self, batch: Any, written: Sequence[Written]) -> None:
        """Write the head's KV for tokens of a decode iteration; their requests go on from there."""
        if not written:
            return
        reqs = [batch.reqs[part.row] for part in written]
        for req in reqs:
            req.parse_state.set_head(None)  # until the forward below has succeeded
        if all(len(part.hidden) == self._chain_rows for part in written):
            output = self._follow_chains(batch, reqs, written)
        else:
            output = self._follow_runs(batch, reqs, written)
        self._go_on(reqs, output)

    def _follow_chains(self, batch: Any, reqs: Sequence[Any], written: Sequence[Written]) -> Any:
        """All rows of what was checked: the same number for everyone, and their slots are held."""
        starts = [req.parse_state.committed_len for req in reqs]
        num_rows, lens = self._chain_rows, [len(part.token_ids) for part in written]
        ids = [
            token
            for part, length in zip(written, lens, strict=True)
            for token in (*part.token_ids, *[0] * (num_rows - length))
        ]
        last_rows = [i * num_rows + length - 1 for i, length in enumerate(lens)]
        view = select_requests(batch, [part.row for part in written], starts, None)
        view.out_cache_loc = slots_of(batch, reqs, [(at, at + num_rows) for at in starts])
        view.spec_algorithm = SpeculativeAlgorithm.EAGLE3
        num_kept = on_device(lens, batch.device, torch.int32)
        output = EagleDraftInput()
        result = GenerationBatchResult(
            logits_output=LogitsProcessorOutput(
                next_token_logits=None, hidden_states=torch.cat([part.hidden for part in written])
            ),
            accept_lens=num_kept,
            prepared_draft_extend_inputs=(
                num_kept - 1,
                on_device(last_rows, batch.device),
                on_device(ids, batch.device),
            ),
            next_draft_input=output,
        )
        with self._forward():
            self.worker._draft_extend_for_decode(view, result)
        # The next replay of SGLang's graph writes there, for whoever is in it.
        output.hidden_states = output.hidden_states.clone()
        return output

    def _follow_runs(self, batch: Any, reqs: Sequence[Any], written: Sequence[Written]) -> Any:
        """Just what was written: any number of tokens for each."""
        starts = [req.parse_state.committed_len for req in reqs]
        lens = [len(part.token_ids) for part in written]
        ends = [start + length for start, length in zip(starts, lens, strict=True)]
        # The tokens at these positions; SGLang moves them on by one for the head.
        ids = [
            token
            for req, part in zip(reqs, written, strict=True)
            for token in (req.parse_state.output_ids[-1], *part.token_ids[:-1])
        ]
        view = select_requests(batch, [part.row for part in written], ends, ids)
        view.out_cache_loc = slots_of(batch, reqs, zip(starts, ends, strict=True))
        view.spec_algorithm = SpeculativeAlgorithm.EAGLE3
        view.forward_mode = ForwardMode.EXTEND
        view.prefix_lens, view.extend_lens = starts, lens
        view.extend_num_tokens = sum(lens)
        view.extend_logprob_start_lens = lens
        view.chunked_req_next_prompt_token = None
        last = on_device([part.token_ids[-1] for part in written], batch.device)
        hidden = torch.cat([part.hidden[: len(part.token_ids)] for part in written])
        return self._extend(view, hidden, last)

    def _extend(self, view: Any, hidden: torch.Tensor, last_token_ids: torch.Tensor) -> Any:
        with self._forward():
            return self.worker._draft_extend_for_prefill(view, hidden, last_token_ids)

    def _go_on(self, reqs: Sequence[Any], output: Any) -> None:
        """Those that continue with the head keep what it said last."""
        for i, req in enumerate(reqs):
            if req.parse_state.policy.decode_accelerator == "eagle3":
                place = slice(i, i + 1)
                req.parse_state.set_head(
                    HeadState(
                        output.topk_p[place], output.topk_index[place], output.hidden_states[place]
                    )
                )

    def propose(self, batch: Any, rows: Sequence[int]) -> list[list[int]]:
        """What the head thinks the target writes next, per request of ``rows`` of the batch.

        Never more than could be emitted together with the target's own next token.
        """
        started = time.perf_counter()
        reqs = [batch.reqs[row] for row in rows]
        committed = [req.parse_state.committed_len for req in reqs]
        view = select_requests(batch, rows, committed, None)
        view.spec_algorithm = SpeculativeAlgorithm.EAGLE3
        view.forward_mode = ForwardMode.DECODE
        states = [req.parse_state.head for req in reqs]
        view.spec_info = EagleDraftInput(
            topk_p=torch.cat([state.topk_p for state in states]),
            topk_index=torch.cat([state.topk_index for state in states]),
            hidden_states=torch.cat([state.hidden for state in states]),
            bonus_tokens=on_device(
                [req.parse_state.output_ids[-1] for req in reqs], batch.device, torch.int32
            ),
        )
        with self._forward():
            chains = self._run_chains(view)
        tokens = share(chains.to(torch.int64)).tolist()
        elapsed_ms = (time.perf_counter() - started) * 1e3 / len(rows)
        for req in reqs:
            req.parse_state.charge(decode=elapsed_ms)
        return [chain[: tokens_left(req) - 1] for req, chain in zip(reqs, tokens, strict=True)]

    def _run_chains(self, view: Any) -> torch.Tensor:
        """[n, num_steps] the head's steps. Source: ``EagleDraftWorker.draft``, whose trees and
        masks the target's pass does not need."""
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


class GuardedHead:
    """A server's EAGLE-3 head, or the lack of one: every call is allowed, and then does nothing.

    Args:
        head: the head; None where the target goes on alone.
        num_ranks: see ``DraftGuard``.
    """

    def __init__(self, head: Eagle3Head | None, num_ranks: int) -> None:
        self.head = head
        self._guard = DraftGuard(num_ranks, model="the EAGLE-3 head")

    @property
    def is_there(self) -> bool:
        return self.head is not None

    def prefill(self, batch: Any, result: GenerationBatchResult) -> int:
        """Follow the target's prefill, if it has a request that the head is to read; takes the
        captured states out of ``result``.

        Returns:
            How many tokens were read.
        """
        if self.head is None:
            return 0
        readers = [req for req in batch.reqs if req.parse_state.policy.uses_eagle]
        if not readers:
            return 0
        output = result.logits_output
        hidden, output.hidden_states = output.hidden_states, None  # nobody asked for them
        with self._guard.contain(readers):
            self.head.prefill(batch, hidden, result.next_token_ids)
        return len(hidden)

    def propose(self, batch: Any, rows: Sequence[int]) -> dict[int, list[int]]:
        """Row -> what the head proposes; nothing where it failed."""
        proposals: dict[int, list[int]] = {row: [] for row in rows}
        if self.head is not None and rows:
            with self._guard.contain([batch.reqs[row] for row in rows], is_burst=True):
                proposals.update(zip(rows, self.head.propose(batch, rows), strict=True))
        return proposals

    def follow(
        self,
        batch: Any,
        places: Sequence[tuple[int, slice]],
        hidden: torch.Tensor | None,
        emitted: Sequence[Sequence[int]],
    ) -> None:
        """Follow what has been written.

        Args:
            places: (row in the batch, its rows of ``hidden``) of the requests.
            hidden: the target's captured states; None without a head.
            emitted: per row of the batch its new tokens.
        """
        if self.head is None or hidden is None:
            return
        written = [
            Written(row, emitted[row], hidden[place])
            for row, place in places
            if emitted[row] and batch.reqs[row].parse_state.policy.uses_eagle
        ]
        with self._guard.contain([batch.reqs[part.row] for part in written]):
            self.head.follow(batch, written)

    def alloc_memory_pool(self, **pools: Any) -> None:
        if self.head is not None:
            self.head.alloc_memory_pool(**pools)

    def init_attention_backends(self) -> None:
        if self.head is not None:
            self.head.init_attention_backends()

    def init_cuda_graphs(self) -> None:
        if self.head is not None:
            self.head.init_cuda_graphs()
