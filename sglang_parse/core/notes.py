"""What modules keep for one request, beside its phase and KV (``core.request``)."""

from __future__ import annotations

from dataclasses import dataclass, field

from sglang_parse.core.arming import Arming
from sglang_parse.core.loss import Budget
from sglang_parse.core.markdown import CodeBlocks
from sglang_parse.core.request_telemetry import RequestTelemetry
from sglang_parse.core.request_text import RequestText


@dataclass(slots=True)
class Notes:
    """Notes about one request. Each is written by the module that it names.

    Attributes:
        eagle: what the EAGLE-3 head or MTP layer continues from (SGLang's ``EagleDraftInput``).
        grammar: what a constrained request may choose (``engine.logits.grammar.GrammarWalk``).
        output_counts: how often each token is in its output, if that is penalized, and in how many
            of its tokens (``engine.logits.adjust``).
        is_thinking, num_scanned: a think block is open after the first ``num_scanned`` tokens
            (``engine.judge``).
        code: whether its output is in a block of code, as far as a strict class asked
            (``core.strict``).
        texts: by source, a text that drafts for it (``engine.sources``); ``budget``: what they may
            lose together, None before the first.
        arming: whether decode steps wait for one another, for the sake of a text's drafts.
        telemetry: what is told about it.
    """

    eagle: object | None = None
    grammar: object | None = None
    output_counts: object | None = None
    is_thinking: bool = False
    num_scanned: int = 0
    code: CodeBlocks = field(default_factory=CodeBlocks)
    texts: dict[str, RequestText] = field(default_factory=dict)
    budget: Budget | None = None
    arming: Arming = field(default_factory=Arming)
    telemetry: RequestTelemetry = field(default_factory=RequestTelemetry)

    def restart(self, num_lost: int, num_output: int) -> None:
        """A prefill starts the request again, without the last ``num_lost`` of ``num_output``
        tokens."""
        self.telemetry.take_back(num_lost, num_output)
        self.eagle = self.telemetry.last_decode_at = None
        self.num_scanned, self.code, self.arming = 0, CodeBlocks(), Arming()
        for text in self.texts.values():
            text.match.reset()

    def end_wait(self, source: str) -> float:
        """Counts the time that the request has waited for a draft; returns it, in ms."""
        text = self.texts[source]
        waited_ms, text.waited_ms = text.waited_ms, 0.0
        if waited_ms:
            self.telemetry.source(source).wait_ms += waited_ms
        return waited_ms
