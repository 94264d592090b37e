"""Drafts from a text of a request: its predicted output, an earlier answer.

They need no forward of a draft model: a draft starts with the verify pass in the next iteration.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import partial
from itertools import takewhile

from sglang_parse.core.config import ParseConfig
from sglang_parse.core.copies import MATCHES, CopyStats
from sglang_parse.core.loss import Budget
from sglang_parse.core.policy.controller import DRAFTING_OFF, Controller
from sglang_parse.core.policy.texts import TextLength, TextSourceStats
from sglang_parse.core.request_text import RequestText
from sglang_parse.core.round import Round
from sglang_parse.core.segment import Segmenter
from sglang_parse.core.stage import Stage
from sglang_parse.core.text_match import TextMatch
from sglang_parse.engine.logits.grammar import num_allowed
from sglang_parse.engine.requests import stop_id_of, tokens_left
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.incoming import IncomingTexts
from sglang_parse.engine.sources.source import News, Source

SEARCH_MS_PER_TOKEN = 4e-6
"""Time to look for an answer's place, per token of the text: a constant, because the ranks' clocks
differ. A prompt, which has no index, takes a quarter of it."""
MAX_TAIL = 32
"""Tokens by which a text extends another source's draft at most; it drafts alone behind them."""
MAX_PREFIXES = 4
"""Prefixes that a pass verifies by questions: where a text stops to fit is not known."""


@dataclass(frozen=True, slots=True)
class TextParts:
    """What all sources of texts work with.

    Attributes:
        controller: knows the costs of verify passes.
        incoming: prepares texts.
        segments: cuts drafts into segments; None in token mode, and where tokens are counted.
        question_rows: rows of a question; 0 where verdicts need none.
    """

    config: ParseConfig
    controller: Controller
    incoming: IncomingTexts
    segments: Segmenter | None = None
    question_rows: int = 0


class TextSource(Source):
    """Drafts from the texts of one kind, ``name`` among ``Notes.texts``.

    Attributes:
        search_ms: see ``SEARCH_MS_PER_TOKEN``.
    """

    search_ms = SEARCH_MS_PER_TOKEN

    def __init__(self, name: str, parts: TextParts) -> None:
        self.name, self._config, self._controller = name, parts.config, parts.controller
        self._segments, self._question_rows = parts.segments, parts.question_rows
        self._max_prefixes = min(MAX_PREFIXES, parts.config.max_prefixes)
        self._stats = TextSourceStats(parts.controller.config)
        self._kept = CopyStats()  # drafts that a text went on from, by their end's match

    def new_text(self, req: Req) -> RequestText:
        """A text of the request, without tokens."""
        return RequestText(TextMatch(), TextLength(self._stats, self._budget_of(req)))

    def _budget_of(self, req: Req) -> Budget:
        """What all texts of the request may lose."""
        notes, config = req.parse_state.notes, self._controller.config
        if notes.budget is None:
            notes.budget = Budget(config.text_loss, config.text_loss_rate, config.text_gain)
        return notes.budget

    def serves(self, req: Req) -> bool:
        return self.name in req.parse_state.notes.texts

    def rank(self, req: Req) -> float:
        """Those that have brought tokens to the answer first."""
        return min(0.0, req.parse_state.notes.texts[self.name].length.net_loss)

    def awaits(self, req: Req) -> bool:
        text = req.parse_state.notes.texts.get(self.name)
        return text is not None and not text.is_complete

    def start(self, req: Req) -> str:
        if reason := self.follow(req):
            return reason
        state, text = req.parse_state, req.parse_state.notes.texts[self.name]
        match, num_output = text.match, len(state.output_ids)
        if self._controller.is_step_due() and not state.policy.always_drafts:
            return f"{self.name}: a decode step is timed again"
        if not match.follows and self._is_spent(req, text):
            return f"{self.name}: it did not fit"  # a search would cost, too
        limit = min(self._config.draft_tokens, tokens_left(req))
        rest = self._rest(text, match, limit) if limit > 1 else ()
        cost = partial(self._cost, always=state.policy.always_drafts)
        ends = self._ends(text, rest, limit)
        length = text.length.choose(
            match.match_len, len(rest), num_output, cost, ends, self._rival(req)
        )
        if not length:
            return f"{self.name}: {'does not fit here' if len(match) else 'no text yet'}"
        if not state.notes.arming.may_start(state.num_inflight):
            text.length.lose(self._controller.steps_in(self._controller.ms(Stage.SCHEDULER)))
            return f"{self.name}: the step in flight ends first"
        draft_ids = [*rest[:length]]
        if self._ends_answer(text, length, len(rest), limit) and (stop := stop_id_of(req)):
            draft_ids.append(stop)
        draft_ids = draft_ids[: num_allowed(req, draft_ids)]
        if not draft_ids:
            return f"the request's grammar refuses the {self.name}"
        text.cost, text.match_len = cost(length), match.match_len
        state.give_draft(draft_ids, self._max_prefixes, self.name, is_exact=self.is_exact)
        return ""

    def room(self, req: Req) -> int:
        text = req.parse_state.notes.texts.get(self.name)
        if text is None or self._is_off(req) or self._is_spent(req, text):
            return 0
        return max(0, min(MAX_TAIL, tokens_left(req) - 1))

    def tail(self, req: Req, limit: int) -> Sequence[int]:
        """The answer's end is left to the target, which chooses it in the row before it."""
        state, draft = req.parse_state, req.parse_state.draft
        most = min(self._config.draft_tokens, tokens_left(req) - 1) - state.num_drafted
        limit = min(limit, most, self.room(req))
        if limit < 1:
            return ()
        text = state.notes.texts[self.name]
        match = text.match.after([*state.output_ids[text.match.num_seen :], *draft.token_ids])
        rest = self._rest(text, match, limit)
        rest = [*takewhile(lambda token: token not in state.policy.stop_ids, rest)]
        ends = self._segments.ends(rest) if self._segments and draft.judge else ()
        chance = self._kept.chance(match.match_len or MATCHES[-1])  # else its rows are for nothing
        always, num_output = state.policy.always_drafts, len(state.output_ids)
        cost = partial(self._controller.tail_cost, state.num_drafted, always=always)
        length = text.length.choose(
            match.match_len, len(rest), num_output, lambda n: cost(n) / chance, ends
        )
        ids = [*draft.token_ids, *rest[:length]]
        tail = ids[state.num_drafted : num_allowed(req, ids)]
        text.cost, text.match_len = cost(len(tail)), match.match_len
        return tail

    def _rest(self, text: RequestText, match: TextMatch, limit: int) -> Sequence[int]:
        """The next tokens at ``match``, the answer's place in the text or that of a draft's end;
        charges what looking for it has cost all."""
        before = match.num_searched
        rest = match.rest(limit)
        if num_searched := match.num_searched - before:
            self._pay(text, self.search_ms * num_searched)
        return rest

    def _is_spent(self, req: Req, text: RequestText) -> bool:
        """Whether the text may cost nothing more, not even a search."""
        return text.length.left(len(req.parse_state.output_ids)) <= 0

    def _pay(self, text: RequestText, search_ms: float) -> None:
        """Charges a search of the text."""
        text.length.lose(self._controller.tokens_in(search_ms))

    def _ends(self, text: RequestText, rest: Sequence[int], limit: int) -> Sequence[int]:
        """Where segments end in the part of ``rest`` that the next draft may have."""
        if self._segments is None or self.is_exact:
            return ()
        near = rest[: 2 * text.length.longest]
        ends = self._segments.ends(near)
        # The text's end, or the answer's limit.
        is_last = text.is_complete if len(rest) < limit else limit < self._config.draft_tokens
        return [*ends, len(rest)] if is_last and len(near) == len(rest) else ends

    def follow(self, req: Req) -> str:
        """The text's answer goes on; returns why nothing drafts, if so."""
        state = req.parse_state
        state.notes.texts[self.name].follow(state.output_ids)
        return DRAFTING_OFF if self._is_off(req) else ""

    def _is_off(self, req: Req) -> bool:
        return self._config.drafting == "never" and not req.parse_state.policy.always_drafts

    def arrive(self, req: Req, news: News) -> None:
        req.parse_state.notes.texts[self.name].extend(
            news.token_ids,
            is_complete=news.is_complete,
            ends_answer=news.ends_answer,
            num_unused=news.num_unused,
        )

    def observe_tail(self, req: Req, one: Round | None) -> None:
        text = req.parse_state.notes.texts[self.name]
        self._kept.see(text.match_len or MATCHES[-1], goes_on=one is not None)
        if one is None:
            text.length.lose(text.cost)
        else:
            self.observe(req, one)

    def observe(self, req: Req, one: Round) -> None:
        text = req.parse_state.notes.texts[self.name]
        text.length.observe(text.match_len, one, text.cost)
        text.is_verified = True
        if one.num_output == one.num_verified:
            text.match.follow_draft()

    def _ends_answer(self, text: RequestText, length: int, num_left: int, limit: int) -> bool:
        """Whether the answer would end behind the draft, as its text does. The target says so
        itself in token mode; a verdict on the complete answer needs the stop token."""
        is_end = text.ends_answer and length == num_left < limit
        return self._config.is_semantic and is_end

    def _cost(self, num_tokens: int, *, always: bool) -> float:
        questions = 0 if self.is_exact else self._max_prefixes * self._question_rows
        rows = 1 + num_tokens + questions
        return self._controller.extra_cost(rows, always=always)

    def _rival(self, req: Req) -> float:
        """See ``TextLength.choose``: of the draft model, if this request's drafts were of use."""
        state, controller = req.parse_state, self._controller
        if state.policy.always_drafts or controller.rests(state.draft_key, state.num_failed):
            return 1.0
        return controller.drafted_tokens(state.draft_key)
