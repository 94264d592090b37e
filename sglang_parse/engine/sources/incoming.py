"""Texts on their way: tokenized by another thread, on rank 0.

Tokenizing a text of a megabyte takes a second. The scheduler does not wait for it: the text joins
its request when it is ready, on all ranks in the same iteration.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from concurrent.futures import TimeoutError as NotReady
from dataclasses import dataclass
from typing import Any

from sglang_parse.core.counters import Counters

logger = logging.getLogger(__name__)

CHARS_PER_TOKEN = 16
"""Characters of a text that are tokenized, per token of the context: more would be white space."""
CONTEXT_CHARS = 64
"""Characters before a text that are tokenized with it."""
WAIT_S = 0.02
"""Most seconds that the scheduler waits for a text, at the end of its request's prefill."""


@dataclass(frozen=True, slots=True)
class News:
    """What has become of a text.

    Attributes:
        token_ids: the target's tokens of it, or of what has been added to it.
        num_unused: its characters that were left out.
        is_complete: nothing will be added; ``ends_answer``: because the answer ends there.
        fault: why there is no more.
        waited_ms: how long its request has waited for it.
    """

    token_ids: Sequence[int] = ()
    num_unused: int = 0
    is_complete: bool = True
    ends_answer: bool = True
    fault: str = ""
    waited_ms: float = 0.0


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
        used = text[: CHARS_PER_TOKEN * self._max_tokens]
        ids = self._tokens(used)
        place = next((i for i, token in enumerate(ids) if token in self._control), len(ids))
        kept = ids[: min(place, self._max_tokens)]
        if len(kept) < len(ids):
            used = self._tokenizer.decode(kept)
        return News(kept, len(text) - len(used))

    def encode_after(self, before: str, text: str) -> Sequence[int]:
        """Tokens of a text that continues another: some tokenizers put a space before a text."""
        start = before[-CONTEXT_CHARS:]
        known, ids = self._tokens(start), self._tokens(start + text)
        if ids[: len(known)] != known:  # the two are not apart in tokens
            known, ids = [], self._tokens(text)
        new = ids[len(known) :]
        return new[: next((i for i, token in enumerate(new) if token in self._control), len(new))]

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
        counters: the process's counters.
    """

    def __init__(self, encoder: TextEncoder | None, counters: Counters) -> None:
        self._encoder, self._counters = encoder, counters
        self._thread = ThreadPoolExecutor(1, thread_name_prefix="parse-texts")

    def prepare(self, text: str) -> Future[News] | None:
        """Starts to tokenize a text; None on other ranks."""
        return self._thread.submit(self._encoder.encode, text) if self._encoder else None

    def take(self, future: Future[News], source: str, *, may_wait: bool) -> News | None:
        """What has become of a text; None if that is not known yet.

        Args:
            may_wait: wait a moment for it.
        """
        try:
            return future.result(WAIT_S if may_wait else 0)
        except NotReady:
            return None
        except Exception as error:  # noqa: BLE001 - a text must not end the server
            self._counters.count("source_faults_total", label_value=source)
            # Not the error's text, which may quote the text.
            logger.error("PARSE: a %s cannot be tokenized: %s", source, type(error).__name__)
            return News()
