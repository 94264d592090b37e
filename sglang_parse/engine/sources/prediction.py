"""Drafts from predicted outputs: the text that a client expects as the answer."""

from __future__ import annotations

from collections.abc import Sequence

from sglang_parse.core.options import RequestOptions
from sglang_parse.core.phases import PREDICTION
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.source import News
from sglang_parse.engine.sources.text import TextParts, TextSource


class PredictionSource(TextSource):
    """Drafts from the text of ``RequestOptions.draft``, tokenized in the background."""

    def __init__(self, parts: TextParts) -> None:
        super().__init__(PREDICTION, parts)
        self._incoming = parts.incoming

    def receive(self, req: Req, options: RequestOptions) -> None:
        if options.draft and not req.parse_policy.is_plain:
            req.parse_incoming[self.name] = self._incoming.prepare(options.draft, req)

    def begin(self, req: Req) -> None:
        if self.name in req.parse_incoming:
            text = req.parse_state.notes.texts[self.name] = self.new_text(req)
            text.is_complete = False

    def wait(self, reqs: Sequence[Req], *, after_prefill: bool) -> None:
        """Prompts that are complete may wait a moment for their predictions."""
        if not after_prefill:
            self._incoming.end_prefills()
            return
        texts = (req.parse_incoming.get(self.name) for req in reqs if self.awaits(req))
        if found := [text for text in texts if text is not None]:
            self._incoming.wait(found)

    def take(self, req: Req) -> News | None:
        incoming = req.parse_incoming.get(self.name)
        return incoming and self._incoming.take(incoming, self.name)
