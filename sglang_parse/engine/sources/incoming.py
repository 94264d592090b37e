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
WAIT_S = 0.02
"""Most seconds that the scheduler waits for a text, at the end of its request's prefill."""


@dataclass(frozen=True, slots=True)
class News:
    """What has become of a text.

    Attributes:
        token_ids: the target's tokens of it.
        num_unused: its characters that were left out.
    """

    token_ids: Sequence[int] = ()
    num_unused: int = 0


class TextEncoder:
    """Tokenizes texts that clients or other servers wrote; no text becomes a control token.

    Args:
        tokenizer: the target's; a copy is used, because other threads use it, too.
        context_len: the target's; longer texts are cut off.
    """

    def __init__(self, tokenizer: Any, context_len: int) -> None:
        self._tokenizer = copy.deepcopy(tokenizer)
        self._max_tokens = context_len
        self._control = frozenset(tokenizer.all_special_ids)

    def encode(self, text: str) -> News:
        """Tokens of a text, which may be longer than any answer."""
        used = text[: CHARS_PER_TOKEN * self._max_tokens]
        # A special token's text is split into ordinary tokens. Tokenizers that cannot do that
        # return the special token: the text ends before it.
        ids = self._tokenizer.encode(used, add_special_tokens=False, split_special_tokens=True)
        place = next((i for i, token in enumerate(ids) if token in self._control), len(ids))
        kept = ids[: min(place, self._max_tokens)]
        if len(kept) < len(ids):
            used = self._tokenizer.decode(kept)
        return News(kept, len(text) - len(used))


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
