"""Grammars: which tokens a constrained request's draft, and the target after it, may choose.

A fork of the request's matcher, the walk, goes ahead of it along the draft, and fills one row of
the vocabulary mask per token. The draft model samples under that row, and the verify pass uses it
again for the target's choice there: a draft is valid by construction, and so is what is output of
it, wherever it is cut. A token that the grammar refuses, in a proposal that was not drafted under
it, ends the rows: no choice of the target equals it.

The request's own matcher is SGLang's: it accepts what is output when SGLang processes the result.
So walks do not depend on the overlap schedule. They start at a prefill.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable, Sequence
from typing import Any, NamedTuple

import torch
from sglang.srt.constrained.reasoner_grammar_backend import ReasonerGrammarObject
from sglang.srt.constrained.xgrammar_backend import XGrammarGrammar

from sglang_parse.core.request import RequestState
from sglang_parse.device import on_device
from sglang_parse.engine.sglang_types import Req
from sglang_parse.startup.fallback import can_fork_grammars


class GrammarRows(NamedTuple):
    """Consecutive rows of logits of one request.

    Attributes:
        req: the request.
        start: the first row.
        before: output and draft tokens in front of what it predicts.
        after: every further row has one more of these in front.
    """

    req: Req
    start: int
    before: Sequence[int]
    after: Sequence[int]


class GrammarWalk:
    """A fork of a request's matcher, somewhere along its output and draft.

    Args:
        grammar: the request's matcher.
        num_output: output tokens that it has accepted.
        vocab_size: the target's.

    Attributes:
        matcher: the fork.
    """

    def __init__(self, grammar: Any, num_output: int, vocab_size: int) -> None:
        self.matcher = fork(grammar)
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
        ids = [*before[self._start :], *after]
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
        found = [self._rows.get(len(before) + k) for k in range(1 + len(after))]
        self._forget(num_output)
        return found

    def forced_at(self, lengths: Collection[int]) -> set[int]:
        """Which of some lengths, of what it has accepted, are followed by text that is forced."""
        scout, last = fork(self.matcher), self._start + len(self._ids)
        found: set[int] = set()
        for length in range(last, max(self._start, min(lengths)) - 1, -1):
            if length < last:
                scout.rollback(1)
            if length in lengths and not scout.is_terminated() and scout.try_jump_forward(None):
                found.add(length)
        return found

    def forced_after(self, before: Sequence[int], num_output: int) -> tuple[list[int], str]:
        """What must follow ``before``, as tokens (llguidance) or as a text (xgrammar)."""
        self.rows(before, (), num_output)
        if self._start + len(self._ids) < len(before) or self.matcher.is_terminated():
            return [], ""
        return fork(self.matcher).try_jump_forward(None) or ([], "")

    def _return_to(self, ids: Sequence[int]) -> None:
        """Rolls back what is not among the tokens any more."""
        pairs = enumerate(zip(self._ids, ids, strict=False))
        same = min(len(self._ids), len(ids))
        kept = next((k for k, (ours, theirs) in pairs if ours != theirs), same)
        if kept < len(self._ids):
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


def fork(grammar: Any) -> Any:
    """Another matcher in the same state."""
    twin = grammar.copy()  # of xgrammar's, without its state
    if isinstance(grammar, ReasonerGrammarObject):
        twin.grammar = grammar.grammar and fork(grammar.grammar)
    elif isinstance(grammar, XGrammarGrammar):
        twin.matcher = grammar.matcher.fork()
        twin.accepted_tokens = [*grammar.accepted_tokens]
    else:
        twin.finished = grammar.finished
    return twin


def is_constrained(req: Req) -> bool:
    """Whether PARSE masks what is chosen for the request; SGLang's sampler does where it cannot."""
    return req.grammar is not None and can_fork_grammars()


def needs_matchers(reqs: Iterable[Req]) -> bool:
    """Whether SGLang's sampler will read a request's own matcher."""
    return any(req.grammar is not None and not is_constrained(req) for req in reqs)


def start_walk(req: Req, vocab_size: int) -> GrammarWalk | None:
    """The walk of a request at its prefill, if it is constrained."""
    if not is_constrained(req):
        return None
    return GrammarWalk(req.grammar, len(req.output_ids), vocab_size)


def rows_of(
    state: RequestState, before: Sequence[int], after: Sequence[int]
) -> list[torch.Tensor | None]:
    """``GrammarWalk.rows`` of a request. A matcher's error ends the request."""
    walk: Any = state.grammar
    if walk is not None and not state.fault:
        try:
            return walk.rows(before, after, len(state.output_ids))
        except ValueError as error:
            state.fail(f"its grammar failed: {error}")
    return [None] * (1 + len(after))


def free_ends(state: RequestState, ids: Sequence[int], ends: Sequence[int]) -> list[int]:
    """Those of some ends of a draft, or of what is output, that do not lie inside text that the
    grammar forces, such as a tool call's prelude: nothing is decided there.

    Args:
        ids: tokens after the output.
        ends: ascending offsets in it.
    """
    if state.grammar is None or not ends:
        return [*ends]
    walk: Any = state.grammar
    rows_of(state, state.output_ids, ids[: ends[-1]])
    num_output = len(state.output_ids)
    forced = walk.forced_at({num_output + end - back for end in ends for back in (0, 1)})
    return [end for end in ends if not {num_output + end - 1, num_output + end} <= forced]


def forced_after(state: RequestState, before: Sequence[int]) -> tuple[list[int], str]:
    """``GrammarWalk.forced_after`` of a constrained request."""
    walk: Any = state.grammar
    rows_of(state, before, ())
    return ([], "") if state.fault else walk.forced_after(before, len(state.output_ids))


def num_allowed(req: Req, ids: Sequence[int], new_ids: Sequence[int] = ()) -> int:
    """Leading tokens of a draft from elsewhere that the request's grammar allows, if it has one,
    after its output and ``new_ids``."""
    if not is_constrained(req):
        return len(ids)
    rows = rows_of(req.parse_state, [*req.parse_state.output_ids, *new_ids], ids)
    refused = (k for k, token in enumerate(ids) if not _allows(rows[k], token))
    return next(refused, len(ids))


def constrain(logits: torch.Tensor, parts: Iterable[GrammarRows]) -> None:
    """Masks rows of constrained requests in logits [n, vocab], in place."""
    places: list[int] = []
    rows: list[torch.Tensor] = []
    walk: Any = None
    for part in parts:
        found = rows_of(part.req.parse_state, part.before, part.after)
        for place, row in enumerate(found, start=part.start):
            if row is not None:
                walk = part.req.parse_state.grammar
                places.append(place)
                rows.append(row)
    if not rows:
        return
    mask = walk.matcher.move_vocab_mask(torch.stack(rows), logits.device)
    if len(rows) == len(logits):
        walk.matcher.apply_vocab_mask(logits=logits, vocab_mask=mask)
        return
    index = on_device(places, logits.device)
    chosen = logits[index]
    walk.matcher.apply_vocab_mask(logits=chosen, vocab_mask=mask)
    logits[index] = chosen


def _allows(row: torch.Tensor | None, token: int) -> bool:
    if row is None:
        return False
    word, bit = divmod(token, 32)
    return 0 <= word < len(row) and bool(int(row[word]) >> bit & 1)
