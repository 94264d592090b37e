"""A source of drafts: one file, and one line in ``build``.

Sources differ in where tokens come from, and so in what they may cost:

    known      a prediction, earlier answers, what a grammar forces. ``start`` takes them at once,
               and the next iteration verifies them: a draft costs its rows in the pass
    arriving   another server's draft. ``start`` asks for it and the request waits, for a time that
               is bounded; the scheduler does not. Rank 0 knows what has arrived, and all ranks
               take it in the same iteration
    made       the draft model's, chunk by chunk over the next iterations; a head's, in the
               iteration that verifies it. Each costs forwards

Whatever the source, its draft is the target's tokens, and the same pass verifies it. Known tokens
are asked for first, because they cost least, and heads last, because they always have a draft. A
source drafts if that pays beside what the next ones would bring, which ``core.policy`` knows.

A source sees of a round what was accepted (``observe``), and of an answer its tokens
(``RequestState.output_ids``). It starts drafts by ``RequestState.give_draft`` and its like; what it
keeps for a request lies in ``Notes.texts`` or ``Req.parse_incoming``. Where a draft that was made
ends in a text, the text may extend it (``tail``): the same pass verifies both. All ranks must
decide alike: nothing here may read a clock, or anything else that only one rank knows, outside of
``take``.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Sequence
from dataclasses import dataclass

from sglang_parse.core.options import RequestOptions
from sglang_parse.core.round import Round
from sglang_parse.engine.sglang_types import Req


@dataclass(frozen=True, slots=True)
class News:
    """What has become of a text.

    Attributes:
        token_ids: the target's tokens of it, or of what has been added to it.
        num_unused: its characters that were left out.
        is_complete: nothing will be added; ``ends_answer``: because the answer ends there.
        fault: why there is no more; ``pauses``: because nothing comes for other requests, either.
        waited_ms: how long its request has waited for it.
    """

    token_ids: Sequence[int] = ()
    num_unused: int = 0
    is_complete: bool = True
    ends_answer: bool = True
    fault: str = ""
    pauses: bool = False
    waited_ms: float = 0.0


class Source(ABC):
    """Where drafts come from. Only ``start`` has to be written.

    Attributes:
        name: in ``Draft.source``, ``meta_info`` and metrics.
        explains: its reason is the request's if nothing drafts.
        takes_tails: a text may extend its drafts; ``yields_to_copies``: one that is exact under
            every judge, too, which makes all of the draft so.
        is_exact: its drafts are compared with the target's choices, whatever the judge is.
    """

    name: str
    explains = True
    takes_tails = yields_to_copies = is_exact = False

    # -- a request's life ---------------------------------------------------------

    def receive(self, req: Req, options: RequestOptions) -> None:  # noqa: B027
        """The request has arrived; its policy is decided, and its prompt not looked up yet."""

    def begin(self, req: Req) -> None:  # noqa: B027
        """The request's state has been made, for its first prefill."""

    def retract(self, req: Req) -> None:  # noqa: B027
        """The request waits in the queue again, where it may be aborted without notice."""

    def finish(self, req: Req) -> None:  # noqa: B027
        """The request is finished."""

    def flush(self) -> None:  # noqa: B027
        """The prefix cache is flushed: what requests have written is to be forgotten."""

    # -- drafts -------------------------------------------------------------------

    def serves(self, req: Req) -> bool:
        """Whether it may have drafts for the request."""
        del req
        return True

    def rank(self, req: Req) -> float:
        """Those with the smallest are asked first; of equal ones, in the order of ``build``."""
        del req
        return 0.0

    @abstractmethod
    def start(self, req: Req) -> str:
        """Starts the request's next draft, behind its output.

        Returns:
            "" if a draft has started, or is waited for; else why not.
        """

    def observe(self, req: Req, one: Round) -> None:  # noqa: B027
        """Learns how the request's draft, which is of this source, was verified."""

    def candidates_pay(self, req: Req, count: int) -> bool:
        """Whether so many candidates behind its draft are worth their rows of the verify pass."""
        del req, count
        return False

    # -- tails of others' drafts --------------------------------------------------

    def room(self, req: Req) -> int:
        """Tokens by which it may extend the draft that has started."""
        del req
        return 0

    def tail(self, req: Req, limit: int) -> Sequence[int]:
        """What follows the request's draft in it, at most ``limit`` tokens; none if that is not
        expected to pay."""
        del req, limit
        return ()

    def observe_tail(self, req: Req, one: Round | None) -> None:  # noqa: B027
        """Learns how its tail of a draft was verified; None if what is before it was refused."""

    # -- tokens that arrive -------------------------------------------------------

    def awaits(self, req: Req) -> bool:
        """Whether something for the request is on its way; alike on all ranks."""
        del req
        return False

    def wait(self, reqs: Sequence[Req], *, after_prefill: bool) -> None:  # noqa: B027
        """May wait a moment for what is about to arrive; ``after_prefill``: the requests' prompts
        have just been prefilled."""

    def take(self, req: Req) -> News | None:
        """What has arrived for the request, on rank 0; None if that is not known yet."""
        del req
        return None

    def arrive(self, req: Req, news: News) -> None:  # noqa: B027
        """Takes what rank 0 has found, on all ranks."""

    def resume(self, req: Req) -> str:
        """Starts the draft that the request waits for, or waits on; returns as ``start``."""
        return self.start(req)
