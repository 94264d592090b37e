"""The sources of one server's drafts, asked in order."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from sglang_parse.core.phases import PREDICTION
from sglang_parse.core.policy.acceptance import VerifyOutcome
from sglang_parse.core.request import RequestState
from sglang_parse.engine.broadcast import broadcast_object
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.draft_model import DraftModelSource
from sglang_parse.engine.sources.incoming import IncomingTexts, News
from sglang_parse.engine.sources.source import DraftSource
from sglang_parse.engine.sources.text import TextSource

NOTHING = "no draft model, and the request has no prediction"


class SourceChain:
    """Asks a server's sources for drafts: texts first, which cost a verify pass and no drafting.

    Args:
        predictions: drafts from predicted outputs.
        model: drafts of the draft model; None without one.
        incoming: prepares texts.
    """

    def __init__(
        self,
        predictions: TextSource,
        model: DraftModelSource | None,
        incoming: IncomingTexts,
    ) -> None:
        self._texts, self._model, self._incoming = {PREDICTION: predictions}, model, incoming
        self._by_name: dict[str, DraftSource] = {**self._texts}
        if model is not None:
            self._by_name[model.name] = model

    def receive(self, req: Req, prediction: str) -> None:
        """Prepares the texts of a request that has arrived, in the background."""
        req.parse_incoming = {PREDICTION: self._incoming.prepare(prediction)} if prediction else {}

    def begin(self, req: Req) -> None:
        """The request's state has been made, for its first prefill."""
        for name in req.parse_incoming:
            req.parse_state.add_text(name, self._texts[name].new_text())

    def poll(self, reqs: Sequence[Req], *, may_wait: bool = False) -> None:
        """Adds what has become ready to the requests' texts, on all ranks alike.

        Args:
            may_wait: wait a moment for it.
        """
        pending = [
            (req, name)
            for req in reqs
            for name, text in req.parse_state.texts.items()
            if not text.is_complete
        ]
        if not pending:
            return
        found = [self._take(req, name, may_wait) for req, name in pending]
        for (req, name), news in zip(pending, broadcast_object(found), strict=True):
            if news is not None:
                req.parse_state.extend_text(name, news.token_ids, news.num_unused)

    def _take(self, req: Req, name: str, may_wait: bool) -> News | None:
        future = req.parse_incoming[name]
        return future and self._incoming.take(future, name, may_wait=may_wait)

    def start(self, req: Req, new_ids: Sequence[int]) -> str:
        """Starts the request's next draft, of the first source that has one which is expected to
        pay; see ``DraftSource.start``."""
        reason = NOTHING
        for source in self._of(req.parse_state):
            reason = source.start(req, new_ids)
            if not reason:
                break
        return reason

    def observe(self, req: Req, outcome: VerifyOutcome) -> None:
        """Tells the source of the request's draft how it was verified."""
        source = self._by_name.get(req.parse_state.draft.source)
        if source is not None:  # not for the tokens that a client gave
            source.observe(req, outcome)

    def _of(self, state: RequestState) -> Iterator[DraftSource]:
        for name, source in self._texts.items():
            if name in state.texts:
                yield source
        if self._model is not None:
            yield self._model
