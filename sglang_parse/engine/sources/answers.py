"""Drafts from earlier answers of the same scope."""

from __future__ import annotations

from sglang.srt.managers.schedule_batch import FINISH_ABORT

from sglang_parse.core.answers import GRAM, AnswerIndex
from sglang_parse.core.options import RequestOptions
from sglang_parse.core.phases import ANSWERS
from sglang_parse.core.text_match import TextMatch
from sglang_parse.engine.sglang_types import Req
from sglang_parse.engine.sources.text import TextParts, TextSource


class AnswerSource(TextSource):
    """Drafts from the last answers, at first to the same prompt, then those with the same words."""

    def __init__(self, parts: TextParts) -> None:
        super().__init__(ANSWERS, parts)
        self._index = AnswerIndex(parts.config.max_reused_answers)  # of all scopes together

    def receive(self, req: Req, options: RequestOptions) -> None:
        """Decides whose answers the request shares, before PARSE changes its ``extra_key``. What it
        accepts beyond what the server does is its client's own."""
        names = (req.extra_key, req.cache_salt)
        is_strict = not any(options.looser_than(self._config).values())
        is_shared = any(names) or self._config.shares_unscoped
        if is_shared and is_strict and not req.parse_policy.is_plain:
            req.parse_incoming[self.name] = (*names, req.lora_id)

    def begin(self, req: Req) -> None:
        if self.name in req.parse_incoming:
            req.parse_state.notes.texts[self.name] = self.new_text(req)

    def start(self, req: Req) -> str:
        state = req.parse_state
        scope, text = req.parse_incoming[self.name], state.notes.texts[self.name]
        num_output = len(state.output_ids)
        if num_output <= 1 and not len(text.match):
            text.match.extend(self._index.find_by_prompt(scope, req.origin_input_ids))
        reason = super().start(req)
        if reason and not text.match.follows and num_output >= GRAM:
            token_ids, place = self._index.find(scope, state.output_ids[-GRAM:])
            if len(token_ids):
                text.replace(TextMatch.entered(token_ids, place, num_output))
                reason = super().start(req)
        return reason

    def finish(self, req: Req) -> None:
        """Keeps the request's answer, unless it was aborted."""
        scope = req.parse_incoming.get(self.name)
        if scope is not None and not isinstance(req.finished_reason, FINISH_ABORT):
            self._index.add(scope, req.origin_input_ids, req.output_ids_through_stop)

    def flush(self) -> None:
        """Forgets all answers."""
        self._index.clear()
