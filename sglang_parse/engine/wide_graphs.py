"""CUDA graphs of forwards with so many rows of each request, or of all requests together.

SGLang captures forwards of one width for its verify passes. The same runner captures others here,
with an attention backend and inputs of their own. A graph ends with the rows' hidden states.

Source: ``sglang.srt.speculative.uno_cuda_graph_runner``, a second runner with a width of its own.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.model_executor.forward_batch_info import CaptureHiddenMode, ForwardBatch
from sglang.srt.model_executor.runner.decode_cuda_graph_runner import DecodeCudaGraphRunner
from sglang.srt.runtime_context import get_exec, get_spec
from sglang.srt.speculative.spec_info import SpecInput, SpecInputType

from sglang_parse.attention.triton_wide import WideTritonBackend
from sglang_parse.core.layout import RequestLayout

logger = logging.getLogger(__name__)

SIZES = (1, 2, 4, 8, 12, 16, 24, 32, 48, 64, 96, 128)
"""Requests of the graphs, at most."""
MAX_DRAFT_ROWS = 2048
"""Rows of a draft model's largest graph: above, one of 0.6B is bound by its operations."""


class WideInputs:
    """What a graph reads, on tensors that stay where they are.

    Args:
        width: rows of each request.
        max_size: requests of the largest graph.
        max_reqs: requests, where they have any rows, of a graph of ``size * width``; 0 where each
            has ``width``.

    Attributes:
        ids, positions, slots: int64 [max_size * width] of the rows.
        pools, starts: int64 [requests] the requests' rows of ``req_to_token``, and their tokens
            before these rows.
        lens: int64 [max_reqs] their rows; None where each has ``width``.
    """

    def __init__(self, width: int, max_size: int, device: Any, max_reqs: int = 0) -> None:
        self.width, max_rows = width, max_size * width
        with torch.device(device):
            self.ids, self.positions, self.slots = torch.zeros(3, max_rows, dtype=torch.int64)
            self.pools, self.starts = torch.zeros(2, max_reqs or max_size, dtype=torch.int64)
            self.lens = torch.zeros(max_reqs, dtype=torch.int64) if max_reqs else None

    def num_reqs(self, size: int) -> int:
        """Requests that a graph of ``size`` has room for."""
        return size if self.lens is None else min(1 + size * self.width, len(self.pools))


class WideInput(SpecInput):
    """What attention and the logits processor read: a verify pass of ``width`` rows per request;
    the mask is the attention backend's own. ``hidden_states`` [rows, ...] are for a head."""

    capture_hidden_mode = CaptureHiddenMode.NULL

    def __init__(self, width: int, hidden_states: torch.Tensor | None = None) -> None:
        super().__init__(SpecInputType.EAGLE_VERIFY)
        self.num_tokens_per_req = self.num_tokens_for_logprob_per_req = width
        self.draft_token_num, self.hidden_states = width, hidden_states

    def get_spec_adjust_token_coefficient(self) -> tuple[int, int]:
        return self.num_tokens_per_req, self.num_tokens_for_logprob_per_req


class WideGraphs(DecodeCudaGraphRunner):
    """The graphs of one width, for several numbers of requests; or of several numbers of rows,
    ``width`` of them for each of SGLang's "requests".

    Args:
        runner: the model's runner; its decode graphs exist.
        rows: what the rows of a request attend to among themselves.
        what: of the model's forwards these are, for the log and metrics.
        slots: see ``WideTritonBackend``.

    Attributes:
        states: [rows of the largest graph, ...] what the last replay left: the rows' hidden states,
            and those of other layers that the model captures.
        head: the model's logits processor, for hidden states; and a batch and other layers' hidden
            states, where they are not the graph's.
    """

    head: Callable[..., LogitsProcessorOutput]

    def __init__(
        self,
        runner: Any,
        rows: RequestLayout,
        inputs: WideInputs,
        sizes: Sequence[int],
        what: str,
        slots: torch.Tensor | None = None,
    ) -> None:
        self.inputs, self.states = inputs, list[torch.Tensor]()
        self.name = f"{model_name(runner)}: {what}"
        with _capturing(runner, self, sizes):
            super().__init__(
                runner,
                attn_backend=WideTritonBackend(runner, rows, inputs.lens, slots),
                speculative_num_steps=1,
                speculative_num_draft_tokens=inputs.width,
            )
        text = "PARSE: CUDA graphs of the %s, %d rows x %s"
        logger.info(text, self.name, inputs.width, self.capture_bs)

    def padded(self, num_reqs: int) -> int:
        """Requests of the smallest graph that holds so many."""
        return self._pad_to_bucket(num_reqs, self.capture_bs)

    def replay(self, size: int) -> None:
        """Replays the graph of ``size`` requests."""
        with torch.no_grad(), self.model_context(), self.backend.replay_session():
            self.backend.replay(self._make_graph_key(size), None)
            self._publish_read_done(in_graph=False)

    # -- in a graph -------------------------------------------------------------

    def load(self, _: Any, forward_batch: ForwardBatch) -> None:
        """Begins a graph, as one of SGLang's capture hooks."""

    def end(self, hidden: torch.Tensor) -> None:
        """Ends a graph: [rows, ...] the rows' hidden states."""

    def keep(self, states: Sequence[torch.Tensor]) -> None:
        """Writes ``self.states``, whose memory no other graph uses."""
        if not self.states:  # in the first warm-up, of the largest graph
            self.states = [torch.zeros_like(part) for part in states]
        for rows, part in zip(self.states, states, strict=True):
            rows[: len(part)] = part

    # -- capture ----------------------------------------------------------------

    def get_spec_info(self, num_tokens: int) -> SpecInput:
        return WideInput(self.inputs.width if self.inputs.lens is None else num_tokens)

    def _next_token_logits_buffer_capacity_rows(self, max_num_tokens: int) -> int:
        # The buffer that SGLang's runners share holds one row per request; no logits leave a graph.
        return max_num_tokens // self.inputs.width

    def capture_prepare(self, size: int, *args: Any, **kwargs: Any) -> tuple[Any, Any, Any]:
        """The batch reads tensors that only these graphs read: SGLang's runners share theirs."""
        forward_batch, backend, proxy = super().capture_prepare(size, *args, **kwargs)
        inputs, rows = self.inputs, slice(size * self.inputs.width)
        num_reqs = forward_batch.batch_size = inputs.num_reqs(size)
        forward_batch.input_ids = inputs.ids[rows]
        forward_batch.positions = inputs.positions[rows]
        forward_batch.out_cache_loc = inputs.slots[rows]
        forward_batch.req_pool_indices = inputs.pools[:num_reqs]
        forward_batch.seq_lens = forward_batch.orig_seq_lens = inputs.starts[:num_reqs]
        forward_batch.next_token_logits_buffer = None
        self.model_runner.kv_index_translator.bind_runner_slots(forward_batch)
        return forward_batch, backend, proxy


class _EndingHead(torch.nn.Module):
    """Stands in for the model's logits processor while its graphs are captured."""

    def __init__(self, graphs: WideGraphs, processor: torch.nn.Module) -> None:
        super().__init__()
        self._graphs, self._processor = (graphs,), (processor,)  # not submodules

    def forward(
        self, ids: Any, hidden: Any, lm_head: Any, batch: Any, aux: Any = None, *_: Any
    ) -> LogitsProcessorOutput:
        (graphs,), (processor,) = self._graphs, self._processor

        def head(hidden: torch.Tensor, other: Any = batch, *aux: Any) -> LogitsProcessorOutput:
            return processor(ids, hidden, lm_head, other, *aux)

        graphs.head = head
        graphs.keep((hidden, *(aux or ())))
        graphs.end(hidden)
        return LogitsProcessorOutput(next_token_logits=None)


def graph_sizes_of(width: int, max_rows: int, captured: Sequence[int]) -> list[int]:
    """Numbers of requests whose forwards of ``width`` rows are captured.

    Args:
        max_rows: rows of the largest graph.
        captured: numbers of requests of SGLang's decode graphs.
    """
    return [n for n in SIZES if n * width <= max_rows and n <= max(captured)]


def model_name(runner: Any) -> str:
    return "draft model" if runner.is_draft_worker else "target"


@contextmanager
def _capturing(runner: Any, graphs: WideGraphs, sizes: Sequence[int]) -> Iterator[None]:
    """While it lasts, captures of the runner are those of ``graphs``."""
    decode, model, inputs = get_exec().graph.cuda_graph_config.decode, runner.model, graphs.inputs
    processor, bs = model.logits_processor, decode.bs
    decode.bs = [*sizes]
    model.logits_processor = _EndingHead(graphs, processor)
    runner.capture_head_hooks.append(graphs.load)
    try:
        with get_spec().override(
            speculative_num_draft_tokens=inputs.width,
            speculative_num_steps=1,
            speculative_eagle_topk=1,
        ):
            yield
    finally:
        runner.capture_head_hooks.remove(graphs.load)
        decode.bs, model.logits_processor = bs, processor
