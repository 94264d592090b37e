"""What forwards and answers cost.

Times follow from bytes, operations and kernels: of shapes and data sheets, and of constants that
are fitted to one H100 and one H200 (docs/gpus.md).
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from sglang_parse.core.block import USUAL_BLOCK, BlockKind, Masks, block_kinds
from sglang_parse.roofline.settings import BF16_BYTES, GPUS, RooflineSettings
from sglang_parse.shapes.shape import EAGLE3_VOCAB, Shape

LAYER_KERNELS, OTHER_KERNELS = 12, 8
"""Of a layer: 4 matrix products, 2 norms, norms of q and k, rotary embedding, the write of KV, 2 of
attention, the activation. Others: embedding, norm, logits, sampling."""
KERNEL_MS = 3.5e-3
BANDWIDTH, COMPUTE = 0.86, 0.7
"""Fractions of the data sheet that are reached."""
LOGITS_BYTES = 12
"""Traffic of one logit: bf16 and fp32, written and read."""
LAYER_HOST_MS, PASS_HOST_MS = 0.36, 4.0
"""Host time of a forward in pieces, as prefills and verify passes are, and of a pass beyond it."""
EAGLE3_HOST_MS, EAGLE3_REQUEST_MS = 1.1, 0.32
"""Time of an iteration of stock EAGLE3 on Triton beyond its forwards, and for each further
request."""
REDUCE_MS = 0.01
"""Of a sum over GPUs, of which a layer has two; a guess, not fitted."""
BLOCK_KERNELS, ALL_LOGITS_ROWS = 50, 256
"""Of a block's state and acceptance; rows up to which all of a block's rows have logits
(``block_graphs.FEW_ROWS``)."""
MAX_PASS_ROWS, MAX_STEP_ROWS = 1024, 256
"""Of a verify pass as one graph (``pass_graphs.MAX_ROWS``), and as decode steps: SGLang's graphs of
these on a GPU of 80 GB (``step_graphs``)."""
DRAFT_LENGTHS = (4, 8, 16, 32, 64, 128)


@dataclass(frozen=True, slots=True)
class Forward:
    """A forward of ``rows`` tokens, ``num_logits`` of them with logits, which reads the KV of
    ``kv_tokens`` and ``num_states`` states of linear attention. ``host_ms``: the host's time where
    it is not one CUDA graph. With experts, those that its rows choose if each is as likely."""

    model: Shape
    gpu: str
    tp_size: int
    rows: int
    num_logits: int
    kv_tokens: int
    num_states: int = 0
    host_ms: float = 0.0
    more_kernels: int = 0

    @property
    def num_bytes(self) -> tuple[int, int]:
        """Bytes of weights; of KV, states and logits. All GPUs together."""
        model, logits = self.model, self.num_logits * self.model.vocab_size * LOGITS_BYTES
        unused = (1 - model.experts_per_token / model.num_experts) ** self.rows
        body = model.body_bytes(model.num_experts * (1 - unused), BF16_BYTES)
        weights = body + BF16_BYTES * model.lm_head
        copies = self.tp_size if model.mixer.is_latent else 1
        kv = copies * self.kv_tokens * BF16_BYTES * model.kv_per_token
        return int(weights), kv + 2 * self.num_states * model.state_bytes + logits

    @property
    def flops(self) -> int:
        body = int(sum(self.model.parts(self.model.experts_per_token)))
        return 2 * (body * self.rows + self.model.lm_head * self.num_logits)

    @property
    def kernels(self) -> int:
        of_model = LAYER_KERNELS * self.model.num_hidden_layers + OTHER_KERNELS
        return of_model + self.more_kernels

    @property
    def parts(self) -> dict[str, float]:
        """ms by what takes them."""
        bandwidth, compute, _ = (self.tp_size * number for number in GPUS[self.gpu])
        weights, others = (size / (BANDWIDTH * bandwidth * 1e9) for size in self.num_bytes)
        operations = self.flops / (COMPUTE * compute * 1e9)
        sums = 2 * self.model.num_hidden_layers * REDUCE_MS * (self.tp_size > 1)
        main = {"weights": weights} if weights > operations else {"FLOP": operations}
        return {"kernels": self.kernels * KERNEL_MS + sums, "KV and logits": others, **main}

    @property
    def ms(self) -> float:
        return max(sum(self.parts.values()), self.host_ms)

    @property
    def bound(self) -> str:
        """What takes most of the time."""
        parts = self.parts
        return "host" if self.ms == self.host_ms else max(parts, key=parts.__getitem__)


@dataclass(frozen=True, slots=True)
class Workload:
    """Requests of the settings' lengths, ``num_reqs`` at a time."""

    settings: RooflineSettings
    num_reqs: int

    def forward(self, model: Shape, rows: int, num_logits: int | None = None) -> Forward:
        """One CUDA graph of ``rows`` tokens per request, in the middle of the answers."""
        context = self.settings.input_len + self.settings.output_len // 2
        counts = (rows, rows if num_logits is None else num_logits, context, 1)
        place = self.settings.gpu, self.settings.tp_size
        return Forward(model, *place, *(self.num_reqs * count for count in counts))

    def prefill(self, model: Shape) -> Forward:
        host_ms = LAYER_HOST_MS * model.num_hidden_layers
        return replace(self.forward(model, self.settings.input_len, 1), host_ms=host_ms)

    def verify(self, draft_len: int) -> Forward:
        """A verify pass: one graph, where the attention has them and its rows are few. Rows as
        decode steps read the context each."""
        one = self.verify_in_pieces(draft_len)
        most, reads = MAX_PASS_ROWS, 1
        if one.model.mixer.is_latent:
            most, reads = MAX_STEP_ROWS, 1 + draft_len
        is_graph = not one.model.mixer.state_bytes and one.rows <= most
        return replace(one, host_ms=0.0, kv_tokens=reads * one.kv_tokens) if is_graph else one

    def verify_in_pieces(self, draft_len: int) -> Forward:
        model = self.settings.target
        host_ms = LAYER_HOST_MS * model.num_hidden_layers + PASS_HOST_MS
        return replace(self.forward(model, 1 + draft_len), host_ms=host_ms)

    def draft_forward(self, kind: BlockKind) -> Forward:
        """A step of the draft model, or a block; of many rows only 2N - 1 have logits."""
        rows = 1 + kind.lookahead_rows
        has_all = rows * self.num_reqs <= ALL_LOGITS_ROWS
        one = self.forward(self.settings.draft, rows, rows if has_all else 2 * kind.size - 1)
        return replace(one, more_kernels=BLOCK_KERNELS if kind.size > 1 else 0)

    def heads(self, model: Shape) -> float:
        """ms of all steps of an EAGLE-3 head of the model."""
        head = replace(model.layers(1), vocab_size=EAGLE3_VOCAB, num_experts=1, shared_size=0)
        head = replace(head, quantization="", experts_per_token=1)
        return self.settings.head_steps * self.forward(head, 1).ms

    def tokens_per_forward(self, kind: BlockKind) -> float:
        """Draft tokens of a forward. With masks after the last row, the block after a wrong
        proposal has none to accept."""
        chance = self.settings.block_acceptance
        tokens = sum(chance**depth for depth in range(kind.size))
        if kind.masks is not Masks.LAST:
            return tokens
        with_proposals = 1 / (2 - chance ** (kind.size - 1))
        return with_proposals * tokens + 1 - with_proposals

    # -- ms of an answer --------------------------------------------------------

    def plain(self) -> float:
        return self._answer(self.forward(self.settings.target, 1).ms, 1)

    def eagle3(self, accept_length: float, *, in_pieces: bool = False) -> float:
        """At a mean number of tokens per target forward: stock EAGLE3, or PARSE with the head where
        its verify passes are one graph, or run ``in_pieces``."""
        steps = self.settings.head_steps
        one = self.verify_in_pieces(steps) if in_pieces else self._stock_verify
        return self._proposed(self.heads(self.settings.target), accept_length, one)

    def mtp(self, accept_length: float, *, is_stock: bool = True) -> float:
        """As ``eagle3``, with the target's MTP layer, which has its experts and vocabulary, in the
        place of a head; in PARSE passes are those of ``verify``."""
        steps, layer = self.settings.head_steps, self.forward(self.settings.target.layers(1), 1)
        one = self._stock_verify if is_stock else self.verify(steps)
        return self._proposed(steps * layer.ms, accept_length, one)

    @property
    def _stock_verify(self) -> Forward:
        return self.forward(self.settings.target, 1 + self.settings.head_steps)

    def _proposed(self, proposal_ms: float, accept_length: float, verify: Forward) -> float:
        host_ms = EAGLE3_HOST_MS + EAGLE3_REQUEST_MS * (self.num_reqs - 1)
        return self._answer(verify.ms + proposal_ms + host_ms, accept_length)

    def parse(
        self, acceptance: float, kinds: Iterable[BlockKind], accept_length: float = 0.0
    ) -> tuple[float, int]:
        """With the best of some kinds and draft lengths, and that length; without kinds, drafts
        are texts. Every token is verified: behind a refused one the same pass yields the target's.

        Args:
            accept_length: mean tokens per forward of a draft model with an EAGLE-3 head of its own,
                whose steps are in the forward's graph; 0 without one.
        """
        drafting = [(self.draft_forward(one).ms, self.tokens_per_forward(one)) for one in kinds]
        if accept_length:
            draft = self.settings.draft
            one = self.forward(draft, 1 + self.settings.head_steps).ms + self.heads(draft)
            drafting.append((one, accept_length))
        prompt = self.prefill(self.settings.draft).ms if drafting else 0.0

        def answer(length: int, ms: float, tokens: float) -> float:
            num_forwards = 1 + max(0, length - 1) / tokens  # a draft's first one adds one token
            round_ms = num_forwards * ms + self.verify(length).ms
            return prompt + self._answer(round_ms, sum(acceptance**i for i in range(length + 1)))

        lengths = [length for length in DRAFT_LENGTHS if length < self.settings.output_len]
        return min(
            (answer(length, *forward), length)
            for forward in drafting or [(0.0, 1.0)]
            for length in lengths
        )

    def _answer(self, round_ms: float, tokens: float) -> float:
        rounds = max(1, (self.settings.output_len - 1) / tokens)
        return self.prefill(self.settings.target).ms + rounds * round_ms


BLOCKS = block_kinds(USUAL_BLOCK, allow_one_token=False)
