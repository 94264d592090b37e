"""Drafts that another server writes, with any model and vocabulary.

A request asks for a draft and waits, at most ``--parse-draft-timeout``; the scheduler does not. The
draft arrives in parts, and what has arrived is verified while the other server writes on. After a
divergence a new draft is asked for. Rank 0 asks; what has arrived reaches all ranks in the same
iteration.
"""

from __future__ import annotations

import logging
import math
import time
import weakref
from collections.abc import Sequence
from urllib.parse import urlsplit

from sglang_parse.core.counters import Counters
from sglang_parse.core.loss import Budget
from sglang_parse.core.phases import ENDPOINT, Phase
from sglang_parse.core.round import Round
from sglang_parse.core.text_match import TextMatch
from sglang_parse.engine.requests import is_greedy, tokens_left
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.endpoint_client import DraftRequest, EndpointClient, Stream
from sglang_parse.engine.sources.source import News
from sglang_parse.engine.sources.text import TextParts, TextSource

logger = logging.getLogger(__name__)

MAX_DRAFTS = 8
"""Draft lengths that one question to the endpoint asks for."""
FIRST_PAUSE, MAX_PAUSE = 8, 8192
"""Drafts that are not asked for after a fault of the server; four times as many after each further
one."""
MAX_LATE = 4
"""Requests in a row whose text comes too late, or never, before it is not asked for a while."""
MAX_LOSS, MAX_GAIN = 8.0, 32.0
"""Of its ``TextLength``s: each question costs the wait for the first words."""
IDLE_S = 0.005
"""Most seconds that an iteration waits for text if all requests do."""


class EndpointSource(TextSource):
    """Drafts of another server.

    Args:
        client: asks it; None on ranks that are told by rank 0.
    """

    def __init__(self, client: EndpointClient | None, counters: Counters, parts: TextParts) -> None:
        super().__init__(ENDPOINT, parts)
        self._client, self._counters = client, counters
        # Without a password, if the URL has one.
        self._host = urlsplit(self._config.draft_url).netloc.rpartition("@")[2]
        self._pause = self._num_faults = self._num_late = 0
        self._reported: set[str] = set()

    def _budget_of(self, req: Req) -> Budget:
        del req  # each question costs a wait, which other texts need not pay for
        return Budget(MAX_LOSS, self._controller.config.text_loss_rate, MAX_GAIN)

    def begin(self, req: Req) -> None:
        if not req.parse_policy.is_plain:
            req.parse_state.notes.texts[self.name] = self.new_text(req)

    def start(self, req: Req) -> str:
        if reason := self.follow(req):
            return reason
        text = req.parse_state.notes.texts[self.name]
        if tokens_left(req) < 2:
            return f"{self.name}: the answer is at its limit"
        if text.match.follows and (len(text.match) or not text.is_complete):
            reason = self._give(req)
            if not reason or text.match.rest(1):
                return reason
        return self._begin(req)

    def _begin(self, req: Req) -> str:
        """Asks for a draft; returns why not, if so."""
        state = req.parse_state
        if self._pause:
            self._pause -= 1
            return f"{self.name}: it failed before"
        if state.notes.texts[self.name].length.left(len(state.output_ids)) <= 0:
            return f"{self.name}: its drafts do not pay"
        self._ask(req)
        state.wait_for_text(self.name)
        return ""

    def resume(self, req: Req) -> str:
        """A request that waits: starts a draft of what has arrived, or waits on."""
        text = req.parse_state.notes.texts[self.name]
        if text.is_complete and not text.match.rest(1):
            text.length.lose(self._end_wait(req))
            return f"{self.name}: no draft came"
        if not text.match.follows:  # the target's newest token, which came before the text's
            text.length.lose(self._end_wait(req))
            return self._begin(req)
        return self._give(req)

    def observe(self, req: Req, one: Round) -> None:
        super().observe(req, one)
        if one.accepted_len + one.num_matched < one.num_verified:
            self.retract(req)  # what it writes now continues another answer

    def _give(self, req: Req) -> str:
        """Starts a draft of what has arrived if it is enough, else waits for more."""
        state = req.parse_state
        text = state.notes.texts[self.name]
        arrived = text.match.rest(self._config.draft_tokens)
        if not text.is_complete and not self._is_enough(arrived):
            state.wait_for_text(self.name)
            return ""
        reason = super().start(req)
        text.cost += self._end_wait(req)
        return reason

    def _end_wait(self, req: Req) -> float:
        """The request waits no longer; returns the decode steps that it has missed."""
        return self._controller.steps_in(req.parse_state.notes.end_wait(self.name))

    def _is_enough(self, token_ids: Sequence[int]) -> bool:
        if self._segments is None or len(token_ids) >= self._config.draft_tokens:
            return len(token_ids) >= min(
                self._controller.config.probe_tokens, self._config.draft_tokens
            )
        return bool(self._segments.ends(token_ids))

    def _ask(self, req: Req) -> None:
        state = req.parse_state
        match = TextMatch.entered((), 0, len(state.output_ids), grows=True)
        state.notes.texts[self.name].replace(match, is_complete=False)
        if self._client is None:
            return
        self.finish(req)
        num_tokens = min(tokens_left(req), MAX_DRAFTS * self._config.draft_tokens)
        wanted = DraftRequest(
            messages=req.parse_messages,
            prompt_ids=req.origin_input_ids,
            answer_ids=[*state.output_ids],
            max_tokens=num_tokens,
            temperature=0.0 if is_greedy(req) else req.sampling_params.temperature,
        )
        stream = req.parse_incoming[self.name] = self._client.ask(wanted)
        # For requests that end without notice, such as in their prefill.
        weakref.finalize(req, stream.close).atexit = False

    # -- what has arrived -------------------------------------------------------

    def take(self, req: Req) -> News | None:
        stream: Stream | None = req.parse_incoming.get(self.name)
        if stream is None:
            return None
        is_complete = stream.is_complete  # before its tokens
        waits, now = req.parse_state.phase is Phase.WAITING, time.monotonic()
        stream.waits_since = (stream.waits_since or now) if waits else 0.0
        waited_s = now - stream.waits_since if waits else 0.0
        token_ids, changed = stream.take()
        fault, is_late = (stream.fault, stream.is_late) if is_complete else ("", False)
        if not token_ids and not is_complete and waited_s > self._config.draft_timeout:
            fault, is_late = f"no text within {self._config.draft_timeout:g} s", True
        self._num_late = 0 if token_ids else self._num_late + is_late
        pauses = not stream.is_refused and (not is_late or self._num_late >= MAX_LATE)
        return News(
            token_ids,
            is_complete=is_complete or changed or bool(fault),
            ends_answer=stream.ends_answer and not changed,
            fault=fault,
            pauses=bool(fault) and pauses,
            waited_ms=1e3 * waited_s,
        )

    def arrive(self, req: Req, news: News) -> None:
        super().arrive(req, news)
        text = req.parse_state.notes.texts[self.name]
        text.waited_ms = news.waited_ms
        if news.fault:
            self._count_fault(news)
            self.finish(req)
            text.length.lose(math.inf)  # it is not asked again for this answer
        elif news.token_ids and not self._pause:
            self._recover()

    def finish(self, req: Req) -> None:
        """Ends the request's draft on its way."""
        stream = req.parse_incoming.pop(self.name, None)
        if stream is not None:
            stream.close()

    def retract(self, req: Req) -> None:
        """Ends the request's draft on its way, and forgets what has arrived of it."""
        self.finish(req)
        if text := req.parse_state.notes.texts.get(self.name):
            text.replace(TextMatch())

    def wait(self, reqs: Sequence[Req], *, after_prefill: bool) -> None:
        """If all requests wait for text: a moment, for some."""
        del after_prefill
        all_wait = bool(reqs) and all(req.parse_state.phase is Phase.WAITING for req in reqs)
        if all_wait and self._client is not None and self._client.arrived.wait(IDLE_S):
            self._client.arrived.clear()

    def _count_fault(self, news: News) -> None:
        self._counters.count("source_faults_total", label_value=self.name)
        if not news.pauses:
            self._report(news.fault)
            return
        if not self._num_faults and self._client is not None:
            logger.warning(
                "PARSE: no drafts from %s: %s. The target writes without them, and asks again "
                "from time to time. Fix: see that the server of --parse-draft-url runs and "
                "answers, or raise --parse-draft-timeout",
                self._host,
                news.fault,
            )
        if not self._pause:  # else it was asked before the fault that paused it
            self._pause = min(MAX_PAUSE, FIRST_PAUSE * 4**self._num_faults)
            self._num_faults += 1

    def _report(self, fault: str) -> None:
        """Logs a fault of one request; each kind once."""
        if fault not in self._reported and self._client is not None:
            self._reported.add(fault)
            logger.warning(
                "PARSE: a draft from %s is lost: %s. The target writes that answer without it; "
                "other requests are not affected. More of these are only counted, in "
                "sglang:parse_source_faults_total",
                self._host,
                fault,
            )

    def _recover(self) -> None:
        if self._num_faults and self._client is not None:
            logger.info("PARSE: drafts from %s come again", self._host)
        self._num_faults = self._pause = 0
