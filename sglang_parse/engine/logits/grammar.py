"""Grammars: which tokens a constrained request's draft, and the target after it, may choose.

A fork of the request's matcher, the walk, goes ahead of it along the draft, and fills one row of
the vocabulary mask per token. The draft model samples under that row, and the verify pass uses it
again for the target's choice there: a draft is valid by construction, and so is what is output of
it, wherever it is cut. A token that the grammar refuses, in a proposal that was not drafted under
it, ends the rows: no choice of the target equals it.

A matcher is never asked for all of the text that it forces: a client's grammar may force a million
characters, or text without an end. What is forced is told from the rows, as far as the walk goes.

The request's own matcher is SGLang's: it accepts what is output when SGLang processes the result.
So walks do not depend on the overlap schedule. They start at a prefill.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from functools import cache
from typing import Any, TypeVar

import numpy as np
import torch
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

from sglang_parse.core.request import RequestState
from sglang_parse.engine.faults import contain_request
from sglang_parse.engine.sglang_types import Req
from sglang_parse.startup.fallback import can_fork_grammars

ITS_GRAMMAR = "its grammar"
MAX_SPELLINGS = 64
"""Tokens that may begin a forced text; more are not looked at."""
T = TypeVar("T")


class GrammarWalk:
    """A fork of a request's matcher, somewhere along its output and draft.

    Args:
        grammar: the request's matcher.
        num_output: output tokens that it has accepted.

    Attributes:
        matcher: the fork.
    """

    def __init__(self, grammar: Any, num_output: int, vocab_size: int, tokenizer: Any) -> None:
        self.matcher = fork(grammar)
        self._tokenizer, self._special = tokenizer, frozenset(tokenizer.all_special_ids)
        self._all_allowed = grammar.allocate_vocab_mask(vocab_size, 1, "cpu")
        self._start = num_output
        self._ids: list[int] = []  # accepted after the first ``_start`` output tokens
        self._rows: dict[int, torch.Tensor] = {}  # by the number of tokens before

    def rows(
        self, before: Sequence[int], after: Sequence[int], num_output: int
    ) -> list[torch.Tensor | None]:
        """Rows of the mask for the token after ``before``, and after each token of ``after``.

        Args:
            before, after: output, then draft tokens.
            num_output: how many of them are output, and so will stay.

        Returns:
            [1 + len(after)] int32 [vocab_size / 32] each; None where any token may follow: the
            grammar has ended, or it refused one of the draft's.
        """
        self._go_to([*before[self._start :], *after], num_output)
        found = [self._rows.get(len(before) + k) for k in range(1 + len(after))]
        self._forget(num_output)
        return found

    def forced(self, output: Sequence[int], limit: int) -> list[int]:
        """At most ``limit`` tokens that must follow ``output``; see ``forced_token``."""
        (row,) = self.rows(output, (), len(output))
        found: list[int] = []
        while len(found) < limit and (token := self.forced_token(row)) is not None:
            length = len(output) + len(found)
            self._go_to([*self._ids[: length - self._start], token], len(output))
            row = self._rows.get(length + 1)
            found.append(token)
        return found

    def ends_in_forced_text(self, output: Sequence[int]) -> bool:
        """Whether the last token of ``output`` and the next one are forced."""
        # As a draft's token: of output, no rows are filled.
        num_before = len(output) - 1
        self._go_to(output[self._start :], num_before)
        rows = [self._rows.get(num_before), self._rows.get(len(output))]
        self._forget(num_before)
        return all(self.forced_token(row) is not None for row in rows)

    def free_ends(
        self, output: Sequence[int], ids: Sequence[int], ends: Sequence[int]
    ) -> list[int]:
        """See the function; ``ends`` has one at least."""
        rows = self.rows(output, ids[: ends[-1]], len(output))
        is_forced = cache(lambda end: self.forced_token(rows[end]) is not None)
        return [end for end in ends if not (is_forced(end - 1) and is_forced(end))]

    def forced_token(self, row: torch.Tensor | None) -> int | None:
        """The token after which a forced text goes on; None where a row does not force one.

        A text has many spellings in tokens. So all that the row allows are beginnings of the
        longest one, in the vocabulary's own characters, which stand for bytes.
        """
        allowed = [] if row is None else _allowed(row)
        if not allowed or not self._special.isdisjoint(allowed):
            return None
        pieces = self._tokenizer.convert_ids_to_tokens(allowed)
        longest, token = max(zip(pieces, allowed, strict=True), key=lambda pair: len(pair[0]))
        return token if all(map(longest.startswith, pieces)) else None

    def _go_to(self, ids: Sequence[int], num_output: int) -> None:
        """Accepts tokens, up to the grammar's end or a draft's token that it refuses."""
        self._return_to(ids)
        for token in ids[len(self._ids) :]:
            length = self._start + len(self._ids)
            is_drafted = length >= num_output
            if self.matcher.is_terminated() or (
                is_drafted and not _allows(self._row(length), token)
            ):
                break
            self.matcher.accept_token(token)
            self._ids.append(token)
        self._row(self._start + len(self._ids))

    def _return_to(self, ids: Sequence[int]) -> None:
        """Rolls back what is not among the tokens any more; what goes on from them may stay."""
        pairs = enumerate(zip(self._ids, ids, strict=False))
        same = min(len(self._ids), len(ids))
        kept = next((k for k, (ours, theirs) in pairs if ours != theirs), same)
        is_ahead = kept == len(ids) and self._start + kept in self._rows
        if kept < len(self._ids) and not is_ahead:
            self.matcher.rollback(len(self._ids) - kept)
            del self._ids[kept:]
            self._rows = {k: row for k, row in self._rows.items() if k <= self._start + kept}

    def _row(self, length: int) -> torch.Tensor | None:
        """The row after ``length`` tokens, which the matcher has accepted; filled once."""
        if length not in self._rows and not self.matcher.is_terminated():
            row = self._all_allowed.clone()
            self.matcher.fill_vocab_mask(row, 0)
            self._rows[length] = row[0]
        return self._rows.get(length)

    def _forget(self, num_output: int) -> None:
        """Forgets what is before the output's end."""
        num_final = max(0, min(num_output - self._start, len(self._ids)))
        del self._ids[:num_final]
        self._start += num_final
        self._rows = {k: row for k, row in self._rows.items() if k >= num_output}


class _NoTokens(list[int]):
    """In place of the tokens that an xgrammar matcher has accepted, which it lists in errors and
    copies at each rollback."""

    def append(self, _: int) -> None:
        """Keeps nothing."""

    def __getitem__(self, _: Any) -> Any:
        return self


def fork(grammar: Any) -> Any:
    """Another matcher in the same state."""
    twin = grammar.copy()  # of xgrammar's, without its state
    if isinstance(grammar, ReasonerGrammarObject):
        twin.grammar = grammar.grammar and fork(grammar.grammar)
    elif isinstance(grammar, XGrammarGrammar):
        twin.matcher, twin.accepted_tokens = grammar.matcher.fork(), _NoTokens()
    else:
        twin.finished = grammar.finished
    return twin


def is_constrained(req: Req) -> bool:
    """Whether PARSE masks what is chosen for the request; SGLang's sampler does where it cannot."""
    return req.grammar is not None and can_fork_grammars()


def needs_matchers(reqs: Iterable[Req]) -> bool:
    """Whether SGLang's sampler will read a request's own matcher."""
    return any(req.grammar is not None and not is_constrained(req) for req in reqs)


def start_walk(req: Req, vocab_size: int) -> None:
    """Starts the walk of a request at its prefill, if it is constrained."""
    state = req.parse_state
    if is_constrained(req):
        with contain_request(state, ITS_GRAMMAR):
            num_output = len(req.output_ids)
            walk = GrammarWalk(req.grammar, num_output, vocab_size, req.tokenizer)
            state.notes.grammar = walk


def _asked(state: RequestState, ask: Callable[[Any], T], otherwise: T) -> T:
    """What the walk of a request says; ``otherwise`` without one. A matcher's error ends the
    request."""
    if state.notes.grammar is not None and not state.fault:
        with contain_request(state, ITS_GRAMMAR):
            return ask(state.notes.grammar)
    return otherwise


def rows_of(
    state: RequestState, before: Sequence[int], after: Sequence[int]
) -> list[torch.Tensor | None]:
    """``GrammarWalk.rows`` of a request."""
    none: list[torch.Tensor | None] = [None] * (1 + len(after))
    return _asked(state, lambda walk: walk.rows(before, after, len(state.output_ids)), none)


def free_ends(state: RequestState, ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Those of some ends of a draft that do not lie inside text that the grammar forces, such as a
    tool call's prelude: nothing is decided there.

    Args:
        ids: tokens after the output.
        ends: ascending offsets in it.
    """
    if not ends:
        return []
    return _asked(state, lambda walk: walk.free_ends(state.output_ids, ids, ends), [*ends])


def ends_in_forced_text(state: RequestState) -> bool:
    """Whether the output ends inside text that the grammar forces: no draft begins there."""
    return _asked(state, lambda walk: walk.ends_in_forced_text(state.output_ids), False)


def forced_after(state: RequestState, limit: int) -> list[int]:
    """``GrammarWalk.forced`` of a constrained request, after its output."""
    return _asked(state, lambda walk: walk.forced(state.output_ids, limit), [])


def num_allowed(req: Req, ids: Sequence[int]) -> int:
    """Leading tokens of a draft from elsewhere that the request's grammar allows, if it has one,
    after its output."""
    if not is_constrained(req):
        return len(ids)
    rows = rows_of(req.parse_state, req.parse_state.output_ids, ids)
    refused = (k for k, token in enumerate(ids) if not _allows(rows[k], token))
    return next(refused, len(ids))


def _allows(row: torch.Tensor | None, token: int) -> bool:
    if row is None:
        return False
    word, bit = divmod(token, 32)
    return 0 <= word < len(row) and bool(int(row[word]) >> bit & 1)


def _allowed(row: torch.Tensor) -> list[int]:
    """The tokens that a row allows; none if they are too many to be one text's beginnings."""
    words = row.numpy()
    if np.count_nonzero(words) > MAX_SPELLINGS:
        return []
    found = np.unpackbits(words.view(np.uint8), bitorder="little").nonzero()[0].tolist()
    return found if len(found) <= MAX_SPELLINGS else []
