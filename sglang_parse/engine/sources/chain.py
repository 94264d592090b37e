"""The sources of one server's drafts, asked in order."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

from sglang_parse.core.answers import Scope
from sglang_parse.core.phases import ANSWERS, ENDPOINT, PREDICTION, Phase, VerifyOutcome
from sglang_parse.core.request import RequestState
from sglang_parse.engine.broadcast import broadcast_object
from sglang_parse.engine.faults import contain_request
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.answers import AnswerSource
from sglang_parse.engine.sources.draft_model import DraftModelSource
from sglang_parse.engine.sources.eagle import EagleSource
from sglang_parse.engine.sources.endpoint import EndpointSource
from sglang_parse.engine.sources.forced import ForcedSource
from sglang_parse.engine.sources.incoming import IncomingTexts, News
from sglang_parse.engine.sources.source import DraftSource
from sglang_parse.engine.sources.text import TextSource

logger = logging.getLogger(__name__)

NOTHING = "no draft model, and no text that may draft"


class SourceChain:
    """Asks a server's sources for drafts: texts first, which cost a verify pass and no drafting, in
    the order of what they have brought to the answer. Each is weighed against what the next ones
    would bring in the same time.

    Args:
        predictions: drafts from predicted outputs.
        answers: drafts from earlier answers; None if none are kept.
        endpoint: drafts of another server; None without one.
        model: drafts of the draft model; None without one.
        forced: drafts of text that a request's grammar forces.
        eagle: drafts of the target's EAGLE-3 head; None without one.
        incoming: prepares texts.
    """

    def __init__(
        self,
        predictions: TextSource,
        answers: AnswerSource | None,
        endpoint: EndpointSource | None,
        model: DraftModelSource | None,
        forced: ForcedSource,
        eagle: EagleSource | None,
        incoming: IncomingTexts,
    ) -> None:
        self._texts: dict[str, TextSource] = {PREDICTION: predictions}
        if answers is not None:
            self._texts[ANSWERS] = answers
        if endpoint is not None:
            self._texts[ENDPOINT] = endpoint
        self._answers, self._endpoint = answers, endpoint
        self._model, self._forced, self._eagle = model, forced, eagle
        self._incoming = incoming
        self._by_name: dict[str, DraftSource] = {**self._texts, forced.name: forced}
        for source in (model, eagle):
            if source is not None:
                self._by_name[source.name] = source

    def receive(self, req: Req, prediction: str) -> None:
        """Prepares the texts of a request that has arrived, in the background."""
        incoming = {PREDICTION: self._incoming.prepare(prediction, req)} if prediction else {}
        req.parse_incoming = incoming

    def begin(self, req: Req) -> None:
        """The request's state has been made, for its first prefill."""
        texts, policy = req.parse_state.texts, req.parse_state.policy
        for name in req.parse_incoming:
            texts[name] = self._texts[name].new_text(is_complete=False)
        if self._answers is not None and policy.reuse_scope is not None:
            texts[ANSWERS] = self._answers.new_text()
        if self._endpoint is not None and not policy.is_plain:
            texts[ENDPOINT] = self._endpoint.new_text()

    def scope_of(self, req: Req) -> Scope | None:
        """See ``AnswerSource.scope_of``."""
        return self._answers.scope_of(req) if self._answers else None

    def finish(self, req: Req) -> None:
        """The request is finished."""
        if self._answers is not None:
            self._answers.finish(req)
        if self._endpoint is not None:
            self._endpoint.close(req)

    def retract(self, req: Req) -> None:
        """The request joins the waiting queue again, where it may be aborted without notice."""
        if self._endpoint is not None:
            self._endpoint.drop(req)

    def flush(self) -> None:
        """Forgets what requests have written, with the prefix cache."""
        if self._answers is not None:
            self._answers.flush()

    def poll(self, reqs: Sequence[Req], *, after_prefill: bool = False) -> None:
        """Adds what has become ready to the requests' texts, on all ranks alike.

        Args:
            after_prefill: their prompts are complete, and may wait a moment for their predictions.
        """
        if not after_prefill:
            self._incoming.end_prefills()
        pending = [
            (req, name)
            for req in reqs
            for name, text in req.parse_state.texts.items()
            if not text.is_complete
        ]
        if not pending:
            return
        if self._endpoint is not None and all(_waits(req) for req in reqs):
            self._endpoint.wait()
        if after_prefill:
            incoming = (req.parse_incoming.get(PREDICTION) for req, _ in pending)
            self._incoming.wait([text for text in incoming if text is not None])
        found = [self._take(req, name) for req, name in pending]
        for (req, name), news in zip(pending, broadcast_object(found), strict=True):
            if news is not None:
                with contain_request(req.parse_state, f"taking its {name}"):
                    self._texts[name].receive(req, news)

    def _take(self, req: Req, name: str) -> News | None:
        """What has become of a text. Only rank 0 knows, so an exception there is a text's end."""
        try:
            return self._texts[name].take(req)
        except Exception as error:  # noqa: BLE001 - a text must not end the server
            logger.error("PARSE: a %s is lost: %s", name, type(error).__name__)
            return News(fault=type(error).__name__)

    def resume(self, req: Req) -> str:
        """Starts a draft of a request that waits for one, or waits on; see
        ``DraftSource.start``."""
        reason = self._endpoint.resume(req) if self._endpoint else NOTHING
        for source in (self._model, self._eagle):
            if reason and source is not None:
                reason = source.start(req)
        return reason

    def start(self, req: Req) -> str:
        """Starts the request's next draft, of the first source that has one which is expected to
        pay; see ``DraftSource.start``."""
        reason = NOTHING
        for source in self._of(req.parse_state):
            if not (reason := source.start(req)):
                return ""
        if not self._forced.start(req):
            return ""
        return self._eagle.start(req) if self._eagle else reason

    def observe(self, req: Req, outcome: VerifyOutcome) -> None:
        """Tells the source of the request's draft how it was verified."""
        source = self._by_name.get(req.parse_state.draft.source)
        if source is not None:  # not for the tokens that a client gave
            source.observe(req, outcome)

    def _of(self, state: RequestState) -> Iterator[DraftSource]:
        texts = [name for name in self._texts if name in state.texts]
        for name in sorted(texts, key=lambda name: min(0.0, state.texts[name].length.net_loss)):
            yield self._texts[name]
        if self._model is not None:
            yield self._model


def _waits(req: Req) -> bool:
    return req.parse_state.phase is Phase.WAITING
