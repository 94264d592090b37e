"""The sources of one server's drafts, asked in order."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Sequence

from sglang_parse.core.options import RequestOptions
from sglang_parse.core.round import Round
from sglang_parse.engine.broadcast import broadcast_object
from sglang_parse.engine.faults import contain_request
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.source import News, Source

logger = logging.getLogger(__name__)

NOTHING = "no draft model, and no text that may draft"


class SourceChain:
    """Asks a server's sources for drafts, in their order (``Source.rank``)."""

    def __init__(self, sources: Sequence[Source]) -> None:
        self._sources = sources
        self._by_name = {source.name: source for source in sources}

    def receive(self, req: Req, options: RequestOptions) -> None:
        """See ``Source``, as of the next four."""
        req.parse_incoming = {}
        for source in self._sources:
            source.receive(req, options)

    def begin(self, req: Req) -> None:
        for source in self._sources:
            source.begin(req)

    def retract(self, req: Req) -> None:
        for source in self._sources:
            source.retract(req)

    def finish(self, req: Req) -> None:
        for source in self._sources:
            source.finish(req)

    def flush(self) -> None:
        for source in self._sources:
            source.flush()

    def poll(self, reqs: Sequence[Req], *, after_prefill: bool = False) -> None:
        """Takes what has arrived for the requests, on all ranks alike; see ``Source.wait``."""
        for source in self._sources:
            source.wait(reqs, after_prefill=after_prefill)
        pending = [(req, one) for req in reqs for one in self._sources if one.awaits(req)]
        if not pending:
            return
        found = broadcast_object([_take(req, source) for req, source in pending])
        for (req, source), news in zip(pending, found, strict=True):
            if news is not None:
                with contain_request(req.parse_state, f"taking its {source.name}"):
                    source.arrive(req, news)

    def start(self, req: Req) -> str:
        """Starts the request's next draft, of the first source that has one which is expected to
        pay; see ``Source.start``."""
        return self._start(req, self._sources, NOTHING)

    def resume(self, req: Req) -> str:
        """Starts a draft of a request that waits for one, or waits on; see ``Source.resume``."""
        waited = self._by_name[req.parse_state.draft.source]
        if not (reason := waited.resume(req)):
            return ""
        return self._start(req, self._sources[self._sources.index(waited) + 1 :], reason)

    def extend(self, req: Req, limit: int) -> None:
        """Lets a text go on where the request's complete draft ends, in the same verify pass, by at
        most ``limit`` tokens: there are KV slots for these."""
        draft = req.parse_state.draft
        for source in () if draft.finished or draft.is_truncated else self._extending(req):
            if tail := source.tail(req, limit):
                req.parse_state.extend_draft(tail, source.name, is_exact=source.is_exact)
                return

    def candidates_pay(self, req: Req, count: int) -> bool:
        """See ``Source.candidates_pay``, of the request's draft."""
        return self._by_name[req.parse_state.draft.source].candidates_pay(req, count)

    def _extending(self, req: Req) -> Sequence[Source]:
        """Those that may extend the request's draft, in order. All of a draft is verified alike."""
        draft, own = req.parse_state.draft, self._by_name.get(req.parse_state.draft.source)
        if own is None or not own.takes_tails:
            return ()
        keeps_judge = draft.judge is not None and not own.yields_to_copies
        return [s for s in _serving(req, self._sources) if not (s.is_exact and keeps_judge)]

    def observe(self, req: Req, one: Round) -> None:
        """Tells the sources of the request's draft how it was verified."""
        source = self._by_name.get(one.draft.source)
        if source is None:  # the tokens that a client gave
            return
        source.observe(req, one.parts[0])
        if one.draft.tail_source:
            tail = one.parts[1] if len(one.parts) > 1 else None
            self._by_name[one.draft.tail_source].observe_tail(req, tail)

    def _start(self, req: Req, sources: Iterable[Source], reason: str) -> str:
        for source in _serving(req, sources):
            if not (found := source.start(req)):
                rooms = [other.room(req) for other in self._extending(req)]
                req.parse_state.make_room(max(rooms, default=0))
                return ""
            reason = found if source.explains else reason
        return reason


def _serving(req: Req, sources: Iterable[Source]) -> Sequence[Source]:
    """Those that may draft for the request, in order."""
    return sorted((s for s in sources if s.serves(req)), key=lambda source: source.rank(req))


def _take(req: Req, source: Source) -> News | None:
    """What has arrived. Only rank 0 knows, so an exception there is a text's end."""
    try:
        return source.take(req)
    except Exception as error:  # noqa: BLE001 - a text must not end the server
        logger.error("PARSE: a %s is lost: %s", source.name, type(error).__name__)
        return News(fault=type(error).__name__)
