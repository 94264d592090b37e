"""PARSE's worker: what one scheduler iteration does, stage by stage.

Every running request advances by one bounded step: drafters by one burst of the draft model,
all others together by one target forward in which drafts are judged and the rest continue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_parse import admission, patches
from sglang_parse.attention import registry
from sglang_parse.attention.support import MASK
from sglang_parse.commit import release_tail, server_config
from sglang_parse.config import RequestOptions
from sglang_parse.continuation import PlainTarget
from sglang_parse.decision import share_plain, share_tokens
from sglang_parse.draft import DraftModel
from sglang_parse.eagle3 import Eagle3Head
from sglang_parse.faults import DraftGuard, end_request, nan_rows
from sglang_parse.guarded_head import GuardedHead
from sglang_parse.metrics import process_tally
from sglang_parse.phases import Move, Phase, RequestState
from sglang_parse.readout import read_pass
from sglang_parse.results import padded_result, spread_logprobs
from sglang_parse.rounds import RoundJudge
from sglang_parse.sampling import RowSampler
from sglang_parse.spec_input import ParseDraftInput
from sglang_parse.switch import OffSwitch, Stage, Timed
from sglang_parse.verify import (
    PassOutput,
    VerifyRows,
    continuing_rows,
    joined,
    max_pass_rows,
    proposed_rows,
    run_passes,
    verifying_rows,
)

logger = logging.getLogger(__name__)


class ParseWorker(BaseSpecWorker):
    """Created by the scheduler in place of a built-in speculative worker."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        patches.assert_applied()
        registry.register_backends()
        self.config = server_config()
        layout, why = admission.pass_layout(server_args, self.config)
        self._is_masked = layout == MASK
        logger.info(
            "PARSE: verification passes run in the layout '%s' on %s: %s",
            *(layout, server_args.attention_backend, why),
        )
        self._target_worker = target_worker
        self._draft_worker = DraftModel(server_args, gpu_id, nccl_port, target_worker)
        self.target = PlainTarget(target_worker, capture=self.config.uses_eagle3)
        head = None
        if self.config.uses_eagle3:
            path = self.config.eagle3_path
            head = Eagle3Head(server_args, gpu_id, nccl_port, target_worker, path)
        self.switch = OffSwitch(self.config.drafting)
        self.judge = RoundJudge(self.config, *_tokenizer_and_question(target_worker), self.switch)
        self._draft_guard = DraftGuard(num_ranks=server_args.tp_size)
        self._head = GuardedHead(head, num_ranks=server_args.tp_size)
        self._running: dict[str, Any] = {}
        self._timed: list[Timed] = []
        self.tally = process_tally()

    # -- one iteration ----------------------------------------------------------

    def forward_batch_generation(
        self, batch: Any, on_publish: Any = None, **kwargs: Any
    ) -> GenerationBatchResult:
        """Advance every request of ``batch`` by one step.

        Args:
            batch: SGLang's ``ScheduleBatch``, isolated: what must outlive the call goes into
                the result or the requests' states.
            on_publish: the overlap relay; PARSE runs synchronously, so it is not called.
        """
        del on_publish
        self.tally.latest = batch.reqs
        if batch.forward_mode.is_extend():
            return self._prefill(batch, **kwargs)
        return self._decode(batch)

    def _prefill(self, batch: Any, **kwargs: Any) -> GenerationBatchResult:
        started = time.perf_counter()
        for req in batch.reqs:
            self._admit(req)
        result = self.target.prefill(batch, **kwargs)
        with self._draft_guard.contain(batch.reqs):
            self._draft_worker.prefill(batch)
        for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            req.parse_state.restart(length)
        self._head.prefill(batch, result)
        share = (time.perf_counter() - started) * 1e3 / len(batch.reqs)
        self.switch.num_running = len(self._running.keys() | {req.rid for req in batch.reqs})
        for req in batch.reqs:
            req.parse_state.stats.prefill_ms += share
            if req.inflight_middle_chunks <= 0:
                self.judge.start(req)
            self._end_if_faulty(req)
        result.next_draft_input = ParseDraftInput()
        result.new_seq_lens = batch.seq_lens
        return result

    def _admit(self, req: Any) -> None:
        """Decide once, at prefill, how a request is served."""
        if getattr(req, "parse_state", None) is not None:
            return
        options = RequestOptions.read(req.sampling_params.custom_params, self.config)
        req.parse_state = RequestState(
            phase=Phase.DRAFTING,
            threshold=options.threshold,
            keep_trace=options.trace,
            plain_reason=admission.plain_reason(req, options),
            continuation=admission.continuation(req, self.config),
        )

    def _decode(self, batch: Any) -> GenerationBatchResult:
        self._running = {req.rid: req for req in batch.reqs}
        self.switch.num_running = len(batch.reqs)
        self._timed = []
        self.tally.hold(batch.reqs)
        drafting, verifying, stepping, accelerated, ended = (
            [i for i, req in enumerate(batch.reqs) if req.parse_state.move is move]
            for move in (Move.BURST, Move.PASS, Move.STEP, Move.EAGLE, Move.JUDGE)
        )
        for row in ended:
            self.judge.plan(batch.reqs[row])
        emitted: list[list[int]] = [[] for _ in batch.reqs]
        output = LogitsProcessorOutput(next_token_logits=None)
        if drafting:
            self._draft(batch, drafting)
        started = time.perf_counter()
        proposals = self._head.propose(batch, accelerated)
        if verifying or proposals:
            output = self._verify(batch, verifying, proposals, stepping, emitted)
        elif stepping:
            output = self._step(batch, stepping, emitted)
        if not verifying and (writing := [*proposals, *stepping]):
            num_tokens = sum(len(emitted[row]) for row in writing)
            elapsed_ms = (time.perf_counter() - started) * 1e3
            self._timed.append(Timed(Stage.STEP, len(writing), num_tokens, elapsed_ms))
        self.switch.saw(share_plain(self._timed))
        self.tally.expected_speedup = self.switch.speedup
        for req, tokens in zip(batch.reqs, emitted, strict=True):
            if self._end_if_faulty(req):
                tokens.clear()
        return padded_result(batch, emitted, output)

    def _draft(self, batch: Any, rows: list[int]) -> None:
        reqs = [batch.reqs[row] for row in rows]
        unfinished = (req for req in reqs if req.parse_state.phase is Phase.DRAFTING)
        with self._draft_guard.contain(unfinished, is_burst=True):
            self._timed.append(self._draft_worker.burst(batch, rows, self.config.burst_tokens))
        if self.config.is_semantic:
            for row in rows:
                self.judge.plan(batch.reqs[row])

    def _step(self, batch: Any, rows: list[int], emitted: list[list[int]]) -> LogitsProcessorOutput:
        """No draft to judge: one ordinary decode step of the target."""
        started = time.perf_counter()
        decoded = self.target.decode(batch, rows)
        output = self._sample_steps(batch, rows, decoded.next_token_logits, emitted)
        self._head.follow(
            batch, [(row, i) for i, row in enumerate(rows)], decoded.hidden_states, emitted
        )
        share = (time.perf_counter() - started) * 1e3 / len(rows)
        for row in rows:
            batch.reqs[row].parse_state.stats.continuation_ms += share
        return output

    def _verify(
        self,
        batch: Any,
        verifying: list[int],
        proposals: dict[int, list[int]],
        stepping: list[int],
        emitted: list[list[int]],
    ) -> LogitsProcessorOutput:
        """One pass: drafts are judged, the others' next tokens ride along.

        But for requests with an adapter: SGLang's LoRA kernels know no ragged verification rows,
        so these take a decode step of their own.
        """
        started = time.perf_counter()
        parts = [
            verifying_rows(i, batch.reqs[i], semantic=self.config.is_semantic) for i in verifying
        ]
        parts += [proposed_rows(i, batch.reqs[i], tokens) for i, tokens in proposals.items()]
        riding = [i for i in stepping if not batch.reqs[i].lora_id]
        alone = [i for i in stepping if batch.reqs[i].lora_id]
        parts += [continuing_rows(i, batch.reqs[i]) for i in riding]
        passes = run_passes(
            self.target.runner,
            batch,
            parts,
            is_masked=self._is_masked,
            capture=self._head.captures,
            max_rows=max_pass_rows(),
        )
        passed = joined(passes)
        if verifying:
            self.tally.count("passes_total", len(passes))
        first = len(parts) - len(riding)
        self._settle(batch, parts[:first], proposals, passed, emitted)
        output = LogitsProcessorOutput(next_token_logits=None)
        if stepping:
            logits = passed.logits[passed.starts[first] :]
            if alone:
                logits = torch.cat([logits, self.target.decode(batch, alone).next_token_logits])
            output = self._sample_steps(batch, riding + alone, logits, emitted)
        places = [(part.row, start) for part, start in zip(parts, passed.row_starts, strict=False)]
        self._head.follow(batch, places, passed.hidden, emitted)
        for row in verifying:
            req = batch.reqs[row]
            release_tail(batch, req, req.kv.kv_committed_len + len(emitted[row]))
        elapsed_ms = (time.perf_counter() - started) * 1e3
        if verifying:
            self._timed.append(Timed(Stage.PASS, passed.row_starts[-1], 0, elapsed_ms))
        _share_time(batch, parts, set(verifying), elapsed_ms / passed.row_starts[-1])
        return output

    def _settle(
        self,
        batch: Any,
        parts: Sequence[VerifyRows],
        proposals: dict[int, list[int]],
        passed: PassOutput,
        emitted: list[list[int]],
    ) -> None:
        """Drafts, then the EAGLE-3 head's proposals: what is kept of them is emitted."""
        sampler = RowSampler(self.target.runner, batch)
        judged = parts[: len(parts) - len(proposals)]
        checked = parts[len(judged) :]
        middle, end = passed.starts[len(judged)], passed.starts[len(parts)]
        if judged:
            readouts = read_pass(judged, passed.logits[:middle], sampler, self.judge.question)
            for part, readout in zip(judged, readouts, strict=True):
                req = batch.reqs[part.row]
                emitted[part.row] = self.judge.settle_round(req, part, readout)
        if checked:
            readouts = read_pass(checked, passed.logits[middle:end], sampler, None)
            for part, readout in zip(checked, readouts, strict=True):
                req, proposed = batch.reqs[part.row], proposals[part.row]
                emitted[part.row] = self.judge.settle_proposal(req, proposed, readout)

    def _sample_steps(
        self,
        batch: Any,
        rows: Sequence[int],
        logits: torch.Tensor,
        emitted: list[list[int]],
    ) -> LogitsProcessorOutput:
        positions = batch.seq_lens[torch.tensor(rows)]  # of the input tokens
        is_bad = nan_rows(logits)
        want_logprob = batch.return_logprob and any(batch.reqs[i].return_logprob for i in rows)
        sampler = RowSampler(self.target.runner, batch)
        tokens, output = sampler.sample(logits, rows, positions, return_logprob=want_logprob)
        for row, token in zip(rows, share_tokens(tokens, is_bad), strict=True):
            if token is None:
                batch.reqs[row].parse_state.fault = "NaN in the target model's logits"
            else:
                emitted[row] = self.judge.after_steps(batch.reqs[row], [token])
        return spread_logprobs(output, rows, len(batch.reqs)) if want_logprob else output

    def _end_if_faulty(self, req: Any) -> bool:
        if req.parse_state.fault:
            end_request(req, req.parse_state.fault)
        return bool(req.parse_state.fault)

    # -- what else the scheduler asks for ---------------------------------------

    def alloc_memory_pool(
        self,
        memory_pool_config: Any = None,
        req_to_token_pool: Any = None,
        token_to_kv_pool_allocator: Any = None,
    ) -> None:
        pools = {
            "memory_pool_config": memory_pool_config,
            "req_to_token_pool": req_to_token_pool,
            "token_to_kv_pool_allocator": token_to_kv_pool_allocator,
        }
        super().alloc_memory_pool(**pools)
        self._head.alloc_memory_pool(**pools)

    def init_attention_backends(self) -> None:
        """After all models have theirs: a target that ignores the layout would judge wrongly."""
        super().init_attention_backends()
        self._head.init_attention_backends()
        registry.assert_used(self.target.runner)

    def init_cuda_graphs(self) -> None:
        super().init_cuda_graphs()
        self._head.init_cuda_graphs()

    def note_request_finished(self, *, rid: str, natural_stop: bool) -> None:
        """Complete the draft's KV before the radix cache takes a finished request's tokens.

        Without it the next turn drafts from garbage: right text, but nothing is accepted.
        """
        del natural_stop
        req = self._running.pop(rid, None)
        if req is not None and not req.parse_state.fault:
            with self._draft_guard.contain([req]):
                self._draft_worker.fill(req, req.owned_kv_len())


def _share_time(
    batch: Any, parts: Sequence[VerifyRows], verifying: set[int], ms_per_row: float
) -> None:
    """Charge a pass to its requests by their rows."""
    for part in parts:
        stats = batch.reqs[part.row].parse_state.stats
        share = ms_per_row * part.layout.num_rows
        if part.row in verifying:
            stats.verification_ms += share
        else:
            stats.continuation_ms += share


def _tokenizer_and_question(target_worker: TpModelWorker) -> tuple[Any, Any]:
    tokenizer = target_worker.tokenizer
    if tokenizer is None:
        tokenizer = get_tokenizer(target_worker.server_args.tokenizer_path)
    question = admission.question_for(target_worker.server_args, tokenizer, server_config())
    return tokenizer, question
