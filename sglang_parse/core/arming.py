"""When a request's next step waits for its last token, under the overlap schedule.

A decode step is launched before the host has the last one's token. A draft that starts behind that
token drops the step: it has decoded the same place. So a text that would draft arms the request:
the step in flight ends, the next one is planned behind its token, and if that continues the copy,
the draft starts there. While drafts pay, the request stays synchronous: the next one is near.
"""

from __future__ import annotations

from dataclasses import dataclass

KEEP = 0.9
"""What is kept of the share with each token."""
STAYS = 0.15
"""Share of drafted tokens in the latest output from which on a request stays synchronous."""


@dataclass(slots=True)
class Arming:
    """One request's.

    >>> arming = Arming()
    >>> arming.may_start(num_inflight=1), arming.waits
    (False, True)
    >>> arming.may_start(num_inflight=0), arming.waits
    (True, False)

    Attributes:
        is_armed: a draft was held back at the last token.
        share: of drafted tokens in the latest output.
    """

    is_armed: bool = False
    share: float = 0.0

    @property
    def waits(self) -> bool:
        """Whether the next step is planned only when the last one's token is known."""
        return self.is_armed or self.stays

    @property
    def stays(self) -> bool:
        """Whether drafts pay: a step that waits for another one costs nothing more."""
        return self.share > STAYS

    def may_start(self, num_inflight: int) -> bool:
        """Whether a draft may start now: none may that would drop a step in flight."""
        self.is_armed = num_inflight > 0
        return not self.is_armed

    def observe(self, num_drafted: int, num_tokens: int) -> None:
        """Records output: so many tokens, drafted ones before the target's own."""
        self.is_armed = False
        kept = KEEP**num_drafted
        self.share = (self.share * kept + 1 - kept) * KEEP ** (num_tokens - num_drafted)
