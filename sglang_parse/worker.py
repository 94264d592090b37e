"""PARSE's worker: what one scheduler iteration does, stage by stage.

Every running request advances by one bounded step: drafters by one burst of the draft model,
all others together by one target forward in which drafts are judged and the rest continue.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Iterable, Sequence
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.managers.tp_worker import TpModelWorker
from sglang.srt.managers.utils import GenerationBatchResult
from sglang.srt.speculative.base_spec_worker import BaseSpecWorker
from sglang.srt.utils.hf_transformers_utils import get_tokenizer

from sglang_parse import admission, patches
from sglang_parse.commit import release_tail, server_config
from sglang_parse.config import RequestOptions
from sglang_parse.continuation import PlainTarget
from sglang_parse.decision import share_tokens
from sglang_parse.draft import DraftModel
from sglang_parse.faults import DraftGuard, end_request, nan_rows
from sglang_parse.metrics import process_tally
from sglang_parse.phases import Move, Phase, RequestState
from sglang_parse.readout import read_pass
from sglang_parse.rounds import RoundJudge
from sglang_parse.sampling import RowSampler
from sglang_parse.spec_input import ParseDraftInput
from sglang_parse.verify import VerifyRows, continuing_rows, run_pass, verifying_rows

logger = logging.getLogger(__name__)


class ParseWorker(BaseSpecWorker):
    """Created by the scheduler in place of a built-in speculative worker."""

    def __init__(
        self, server_args: Any, gpu_id: int, nccl_port: int, target_worker: TpModelWorker
    ) -> None:
        super().__init__()
        patches.assert_applied()
        admission.assert_backend_registered()
        self.config = server_config()
        self._target_worker = target_worker
        self._draft_worker = DraftModel(server_args, gpu_id, nccl_port, target_worker)
        self.target = PlainTarget(target_worker)
        self.judge = RoundJudge(self.config, *_tokenizer_and_question(target_worker))
        self._draft_guard = DraftGuard(num_ranks=server_args.tp_size)
        self._running: dict[str, Any] = {}
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
        share = (time.perf_counter() - started) * 1e3 / len(batch.reqs)
        for req, length in zip(batch.reqs, batch.seq_lens_cpu.tolist(), strict=True):
            req.parse_state.restart(length)
            req.parse_state.stats.prefill_ms += share
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
        )

    def _decode(self, batch: Any) -> GenerationBatchResult:
        self._running = {req.rid: req for req in batch.reqs}
        self.tally.hold(batch.reqs)
        drafting, verifying, stepping, ended = (
            [i for i, req in enumerate(batch.reqs) if req.parse_state.move is move]
            for move in (Move.BURST, Move.PASS, Move.STEP, Move.JUDGE)
        )
        for row in ended:
            self.judge.plan(batch.reqs[row])
        emitted: list[list[int]] = [[] for _ in batch.reqs]
        output = LogitsProcessorOutput(next_token_logits=None)
        if drafting:
            self._draft(batch, drafting)
        if verifying:
            output = self._verify(batch, verifying, stepping, emitted)
        elif stepping:
            output = self._step(batch, stepping, emitted)
        for req, tokens in zip(batch.reqs, emitted, strict=True):
            if self._end_if_faulty(req):
                tokens.clear()
        return _result(batch, emitted, output)

    def _draft(self, batch: Any, rows: list[int]) -> None:
        reqs = [batch.reqs[row] for row in rows]
        unfinished = (req for req in reqs if req.parse_state.phase is Phase.DRAFTING)
        with self._draft_guard.contain(unfinished, is_burst=True):
            self._draft_worker.burst(batch, rows, self.config.burst_tokens)
        if self.config.is_semantic:
            for row in rows:
                self.judge.plan(batch.reqs[row])

    def _step(self, batch: Any, rows: list[int], emitted: list[list[int]]) -> LogitsProcessorOutput:
        """No draft to judge: one ordinary decode step of the target."""
        started = time.perf_counter()
        logits = self.target.decode_logits(batch, rows)
        output = self._sample_steps(batch, rows, logits, emitted)
        share = (time.perf_counter() - started) * 1e3 / len(rows)
        for row in rows:
            batch.reqs[row].parse_state.stats.continuation_ms += share
        return output

    def _verify(
        self, batch: Any, verifying: list[int], stepping: list[int], emitted: list[list[int]]
    ) -> LogitsProcessorOutput:
        """One pass: drafts are judged, the others' next tokens ride along.

        But for requests with an adapter: SGLang's LoRA kernels know no ragged verification rows,
        so these take a decode step of their own.
        """
        started = time.perf_counter()
        parts = [
            verifying_rows(i, batch.reqs[i], semantic=self.config.is_semantic) for i in verifying
        ]
        riding = [i for i in stepping if not batch.reqs[i].lora_id]
        alone = [i for i in stepping if batch.reqs[i].lora_id]
        parts += [continuing_rows(i, batch.reqs[i]) for i in riding]
        passed = run_pass(self.target.runner, batch, parts)
        self.tally.count("passes_total")
        sampler = RowSampler(self.target.runner, batch)
        judged = parts[: len(verifying)]
        first = passed.starts[len(verifying)] if riding else len(passed.logits)
        readouts = read_pass(judged, passed.logits[:first], sampler, self.judge.question)
        for part, readout in zip(judged, readouts, strict=True):
            emitted[part.row] = self.judge.settle_round(batch.reqs[part.row], part, readout)
        output = LogitsProcessorOutput(next_token_logits=None)
        if stepping:
            logits = passed.logits[first:]
            if alone:
                logits = torch.cat([logits, self.target.decode_logits(batch, alone)])
            output = self._sample_steps(batch, riding + alone, logits, emitted)
        for row in verifying:
            req = batch.reqs[row]
            release_tail(batch, req, req.kv.kv_committed_len + len(emitted[row]))
        _share_time(batch, parts, set(stepping), (time.perf_counter() - started) * 1e3)
        return output

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
                emitted[row] = [token]
                self.judge.after_step(batch.reqs[row], token)
        return _spread_logprobs(output, rows, len(batch.reqs)) if want_logprob else output

    def _end_if_faulty(self, req: Any) -> bool:
        if req.parse_state.fault:
            end_request(req, req.parse_state.fault)
        return bool(req.parse_state.fault)

    # -- what else the scheduler asks for ---------------------------------------

    def init_attention_backends(self) -> None:
        """After both models have theirs: a target without the mask would judge wrongly."""
        super().init_attention_backends()
        admission.assert_masked(self.target.runner.attn_backend)

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
    batch: Any, parts: Sequence[VerifyRows], stepping: set[int], elapsed_ms: float
) -> None:
    """Charge a pass to its requests by their rows."""
    total_rows = sum(part.layout.num_rows for part in parts)
    for part in parts:
        stats = batch.reqs[part.row].parse_state.stats
        share = elapsed_ms * part.layout.num_rows / total_rows
        if part.row in stepping:
            stats.continuation_ms += share
        else:
            stats.verification_ms += share


def _tokenizer_and_question(target_worker: TpModelWorker) -> tuple[Any, Any]:
    tokenizer = target_worker.tokenizer
    if tokenizer is None:
        tokenizer = get_tokenizer(target_worker.server_args.tokenizer_path)
    question = admission.question_for(target_worker.server_args, tokenizer, server_config())
    return tokenizer, question


def _result(
    batch: Any, emitted: Sequence[Sequence[int]], output: LogitsProcessorOutput
) -> GenerationBatchResult:
    """Pad the emitted runs to one stride, as SGLang's result processor slices them."""
    stride = max(1, *(len(tokens) for tokens in emitted))
    flat: list[int] = []
    for tokens in emitted:
        flat.extend(tokens)
        flat.extend([0] * (stride - len(tokens)))
    accept_lens = torch.tensor([len(tokens) for tokens in emitted], dtype=torch.int32)
    return GenerationBatchResult(
        logits_output=output,
        next_token_ids=torch.tensor(flat),
        accept_lens=accept_lens,
        new_seq_lens=batch.seq_lens + accept_lens.to(batch.seq_lens.device),
        next_draft_input=ParseDraftInput(),
        speculative_num_draft_tokens=stride,
        speculative_output_stride=stride,
        # 1, the default, makes the first iteration that emits nothing crash the scheduler.
        num_non_draft_tokens_per_req=0,
    )


def _spread_logprobs(
    output: LogitsProcessorOutput, rows: Sequence[int], num_reqs: int
) -> LogitsProcessorOutput:
    """Put the sampled rows' log probabilities at their requests' places, width 1.

    Requests under PARSE never ask for log probabilities; their places stay empty.
    """
    logprobs = torch.zeros(num_reqs, 1)
    logprobs[torch.tensor(rows), 0] = output.next_token_logprobs.float().cpu()
    output.next_token_logprobs = logprobs
    # SGLang calls .tolist() on all of these but the requested ids, which it hands on as they are.
    for name in (
        "next_token_top_logprobs_val",
        "next_token_top_logprobs_idx",
        "next_token_token_ids_logprobs_val",
    ):
        values = getattr(output, name)
        setattr(output, name, _spread(map(torch.as_tensor, values or ()), rows, num_reqs))
    requested_ids = output.next_token_token_ids_logprobs_idx
    output.next_token_token_ids_logprobs_idx = _spread(requested_ids or (), rows, num_reqs)
    return output


def _spread(values: Iterable[Any], rows: Sequence[int], num_reqs: int) -> list[Any] | None:
    """``values`` of ``rows`` in a list with a place for every request; None if there are none."""
    places = dict(zip(rows, values, strict=False))
    return [places.get(i, torch.empty(0)) for i in range(num_reqs)] if places else None
