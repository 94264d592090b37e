"""The overlap schedule's relay: what SGLang carries from one iteration to the next.

For its own algorithms that is device tensors, because the host is behind. PARSE's worker knows
every length on the host (``overlap``), and its tokens and drafts stay with the requests.
"""

from __future__ import annotations

from typing import Any

import torch
from sglang.srt.managers.overlap_utils import FutureMap

from sglang_parse.device import on_device
from sglang_parse.engine.overlap import pipeline


class HostRelay(FutureMap):
    """Relays nothing; fills in the lengths of the requests' sequences.

    Arguments: as ``FutureMap``; the host always has the lengths.
    """

    def __init__(self, *args: Any, needs_cpu_seq_lens: bool = True, **kwargs: Any) -> None:
        del needs_cpu_seq_lens
        super().__init__(*args, needs_cpu_seq_lens=True, **kwargs)

    def resolve_seq_lens_cpu(self, batch: Any, stream_ordered: bool = False) -> None:
        """Set ``batch.seq_lens``, before the batch is launched and outside the forward stream.

        A prefill's batch knows its own; what is under way is read before it, because it will be
        read at once.
        """
        del stream_ordered
        if batch.forward_mode.is_extend():
            pipeline().settle()
            return
        lengths = [req.parse_state.committed_len for req in batch.reqs]
        batch.seq_lens_cpu = torch.tensor(lengths)
        batch.seq_lens = on_device(lengths, batch.device)
        batch.seq_lens_sum = sum(lengths)

    def publish(self, *_: Any, **__: Any) -> None:
        """Nothing: lengths come from the requests."""

    def stash(self, *_: Any, **__: Any) -> None:
        """Nothing: tokens stay with the requests."""

    def _resolve_spec_extras(self, batch: Any) -> None:
        """Nothing: there are none."""
