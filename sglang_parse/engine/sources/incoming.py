"""Texts on their way: tokenized by other threads, on rank 0.

Tokenizing a text of a megabyte takes a second. The scheduler does not wait for it: the text joins
its request when it is ready, on all ranks in the same iteration. Short texts have a thread of their
own, so that they are ready when their prompts are prefilled; the scheduler waits a moment for them.
"""

from __future__ import annotations

import copy
import logging
import time
import weakref
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor, wait
from typing import Any, NamedTuple

from sglang_parse.core.counters import Counters
from sglang_parse.engine.sources.source import News

logger = logging.getLogger(__name__)

CHARS_PER_TOKEN = 16
"""Characters of a text that are tokenized, per token of the context: more would be white space."""
CONTEXT_CHARS = 64
"""Characters before a text that are tokenized with it."""
PIECE_CHARS = 8192
"""Characters that are tokenized at a time: for a moment after each piece no other thread runs.
Texts of one piece are the short ones."""
WAIT_S = 0.02
"""Most seconds that prefills wait for short texts between two decode iterations."""


class Incoming(NamedTuple):
    """A text on its way; ``is_short`` ones are waited for."""

    future: Future[News]
    is_short: bool


class TextEncoder:
    """Tokenizes texts that clients or other servers wrote; no text becomes a control token.

    Args:
        tokenizer: the target's; a copy is used, because other threads use it, too.
        context_len: the target's; longer texts are cut off.
    """

    def __init__(self, tokenizer: Any, context_len: int) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._max_tokens = context_len
        added: dict[int, Any] = getattr(tokenizer, "added_tokens_decoder", {})
        special = (token_id for token_id, token in added.items() if token.special)
        self._control = frozenset((*tokenizer.all_special_ids, *special))
        self._split = {"split_special_tokens": True}
        try:
            self._tokens("")
        except TypeError:  # a tokenizer of the model's own
            self._split = {}

    def encode(self, text: str) -> News:
        """Tokens of a text, which may be longer than any answer."""
        ids: list[int] = []
        num_used, num_chars = 0, min(len(text), CHARS_PER_TOKEN * self._max_tokens)
        while num_used < num_chars and len(ids) < self._max_tokens:
            end = min(num_chars, num_used + PIECE_CHARS)
            if end < num_chars:  # at a line's end if it has one, so that few words are cut
                end = text.rfind("\n", num_used, end) + 1 or end
            piece = text[num_used:end]
            before = text[max(0, num_used - CONTEXT_CHARS) : num_used]
            new = self._tokens_after(before, piece)
            kept = self._before_control(new)[: self._max_tokens - len(ids)]
            ids += kept
            num_used += len(piece)
            if len(kept) < len(new):
                num_used += len(self._tokenizer.decode(kept)) - len(piece)
                break
        return News(ids, len(text) - num_used)

    def encode_after(self, before: str, text: str) -> Sequence[int]:
        """Tokens of a text that continues another: some tokenizers put a space before a text."""
        return self._before_control(self._tokens_after(before[-CONTEXT_CHARS:], text))

    def _tokens_after(self, before: str, text: str) -> list[int]:
        known, ids = self._tokens(before) if before else [], self._tokens(before + text)
        if ids[: len(known)] == known:
            return ids[len(known) :]
        return self._tokens(text)  # the two are not apart in tokens

    def _before_control(self, ids: list[int]) -> list[int]:
        return ids[: next((i for i, token in enumerate(ids) if token in self._control), len(ids))]

    def decode(self, token_ids: Sequence[int]) -> str:
        return self._tokenizer.decode(token_ids)

    def _tokens(self, text: str) -> list[int]:
        """A special token's text is split into ordinary tokens. Tokenizers that cannot do that
        return the special token, and the text ends before it."""
        ids: list[int] = self._tokenizer.encode(text, add_special_tokens=False, **self._split)
        return ids


class IncomingTexts:
    """Prepares texts in the background.

    Args:
        encoder: tokenizes them; None on ranks that are told by rank 0.
    """

    def __init__(self, encoder: TextEncoder | None, counters: Counters) -> None:
        self._encoder, self._counters = encoder, counters
        self._short = ThreadPoolExecutor(1, thread_name_prefix="parse-short-texts")
        self._long = ThreadPoolExecutor(1, thread_name_prefix="parse-texts")
        self._wait_left_s = WAIT_S

    def prepare(self, text: str, owner: object) -> Incoming | None:
        """Starts to tokenize a text; None on other ranks.

        Args:
            owner: its request; once that is gone, aborted in the queue or elsewhere, a text that
                has not been begun is left.
        """
        if self._encoder is None:
            return None
        is_short = len(text) <= PIECE_CHARS
        future = (self._short if is_short else self._long).submit(self._encoder.encode, text)
        weakref.finalize(owner, future.cancel)
        return Incoming(future, is_short)

    def wait(self, texts: Sequence[Incoming]) -> None:
        """At the end of a prefill: waits a moment for the short texts, for all together."""
        started = time.monotonic()
        wait([text.future for text in texts if text.is_short], self._wait_left_s)
        self._wait_left_s = max(0.0, self._wait_left_s - (time.monotonic() - started))

    def end_prefills(self) -> None:
        """A decode iteration has run: the next prefills may wait again."""
        self._wait_left_s = WAIT_S

    def take(self, text: Incoming, source: str) -> News | None:
        """What has become of a text; None if that is not known yet."""
        if not text.future.done():
            return None
        try:
            return text.future.result()
        except Exception as error:  # noqa: BLE001 - a text must not end the server
            self._counters.count("source_faults_total", label_value=source)
            # Not the error's text, which may quote the text.
            logger.error("PARSE: a %s cannot be tokenized: %s", source, type(error).__name__)
            return News()
