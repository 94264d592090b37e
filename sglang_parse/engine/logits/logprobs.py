"""Log probabilities of output tokens: the target's own, from the rows that chose or verified them.

Which of a row's two tokens becomes output, the target's choice or the draft token that follows, is
known only after the verdicts. So a row yields the log probabilities of both, beside its top tokens
and the requested ids, in one record. The logits are adjusted and divided by the temperature, as
SGLang's sampler does for plain decoding.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from sglang.srt.layers.logits_processor import LogitsProcessorOutput
from sglang.srt.layers.sampler import SGLANG_RETURN_ORIGINAL_LOGPROB

from sglang_parse.device import on_device
from sglang_parse.engine.logits.rows import LogitsRows, pieces
from sglang_parse.engine.requests import is_greedy
from sglang_parse.engine.sglang_types import Req

Record = Sequence[float]
"""Of one row: the choice's log probability, the draft token's, then ``_top`` values, as many ids,
and the values of the requested ids."""


TokenLogprobs = tuple[float, Record]
"""Of an output token: its log probability, and the record of its row."""


class LogprobRows:
    """Rows of one forward's logits whose records requests ask for.

    Args:
        parts: the rows; each is followed by a token of ``after``, if there is one left.
        reqs: all requests of the iteration, whose records have one width.
    """

    def __init__(
        self, parts: Sequence[LogitsRows], reqs: Sequence[Req], device: torch.device
    ) -> None:
        self._num_top, num_ids = _widths(reqs)
        rows: list[int] = []
        drafted: list[int] = []
        ids: list[list[int]] = []
        temperatures: list[float] = []
        for part in parts:
            count = part.count
            rows += range(part.start, part.start + count)
            drafted += [*part.after, *[0] * count][:count]
            requested = part.req.logprob.token_ids_logprob or []
            ids += [[*requested, *[0] * (num_ids - len(requested))]] * count
            temperatures += [_temperature(part.req)] * count
        self._rows, self._drafted = on_device([rows, drafted], device).unbind()
        self._ids = on_device(ids, device) if num_ids else None
        is_scaled = any(temperature != 1 for temperature in temperatures)
        self._temperatures = on_device(temperatures, device, torch.float32) if is_scaled else None
        self._copy: torch.Tensor | None = None

    def keep(self, logits: torch.Tensor) -> None:
        """Copies the rows before a sampler overwrites them."""
        self._copy = logits[self._rows]

    def records(self, logits: torch.Tensor, choices: torch.Tensor) -> torch.Tensor:
        """float64 [rows, width] ``Record``s, computed in pieces of bounded memory.

        Args:
            logits: [n, vocab], as they were before sampling, unless ``keep`` has the rows.
            choices: [n] the target's choice in every row of the logits.
        """
        chosen = choices[self._rows].to(torch.int64)
        found = []
        for piece in pieces(len(self._rows), logits.shape[1]):
            rows = logits[self._rows[piece]] if self._copy is None else self._copy[piece]
            values = rows.float()
            if self._temperatures is not None:
                values = values / self._temperatures[piece, None]
            values = values.log_softmax(dim=-1)
            values.clamp_(min=torch.finfo(values.dtype).min)  # JSON knows no infinity
            tokens = torch.stack([chosen[piece], self._drafted[piece]], dim=1)
            if self._ids is not None:
                tokens = torch.cat([tokens, self._ids[piece]], dim=1)
            picked = values.gather(1, tokens).double()
            top = values.topk(self._num_top, dim=-1)
            parts = (picked[:, :2], top.values.double(), top.indices.double(), picked[:, 2:])
            found.append(torch.cat(parts, dim=1))
        self._copy = None
        return torch.cat(found)


def _widths(reqs: Sequence[Req]) -> tuple[int, int]:
    """Top tokens, and requested ids, of a record."""
    asking = [req.logprob for req in reqs if req.return_logprob]
    num_ids = max((len(asked.token_ids_logprob or ()) for asked in asking), default=0)
    # A negative number asks for none, as in SGLang's sampler.
    return max([0, *(asked.top_logprobs_num for asked in asking)]), num_ids


def _temperature(req: Req) -> float:
    is_scaled = not is_greedy(req) and not SGLANG_RETURN_ORIGINAL_LOGPROB
    return req.sampling_params.temperature if is_scaled else 1.0


def write_logprobs(
    output: LogitsProcessorOutput,
    reqs: Sequence[Req],
    emitted: Mapping[int, Sequence[TokenLogprobs]],
    stride: int,
) -> None:
    """Fills in what SGLang's result processor slices, as its own ``compute_spec_logprobs`` does.

    Args:
        reqs: the batch's requests.
        emitted: by index of each request that asks and outputs something.
        stride: output tokens per request, padded.
    """
    num_top, num_ids = _widths(reqs)
    nothing, num_places = torch.empty(0), len(reqs) * stride
    logprobs = torch.zeros(num_places)
    top_values, top_ids, requested = ([nothing] * num_places for _ in range(3))
    requested_ids: list[Sequence[int]] = [[]] * num_places
    for i, tokens in emitted.items():
        asked = reqs[i].logprob
        ids, count = asked.token_ids_logprob or [], max(0, asked.top_logprobs_num)
        for place, (logprob, record) in enumerate(tokens, start=i * stride):
            logprobs[place] = logprob
            values = torch.tensor(record[2:], dtype=torch.float64)
            top_values[place] = values[:count]
            top_ids[place] = values[num_top : num_top + count].to(torch.int64)
            requested[place], requested_ids[place] = values[2 * num_top :][: len(ids)], ids
    output.next_token_logprobs = logprobs.view(-1, stride)
    if num_top:
        output.next_token_top_logprobs_val = top_values
        output.next_token_top_logprobs_idx = top_ids
    if any(req.return_logprob and req.logprob.token_ids_logprob is not None for req in reqs):
        output.next_token_token_ids_logprobs_val = requested
        output.next_token_token_ids_logprobs_idx = requested_ids
