"""The interface of a source of drafts."""

from __future__ import annotations

from typing import Protocol

from sglang_parse.core.phases import VerifyOutcome
from sglang_parse.engine.sglang_types import Req


class DraftSource(Protocol):
    """Where drafts come from.

    Attributes:
        name: in ``Draft.source``, ``meta_info`` and metrics.
    """

    name: str

    def start(self, req: Req) -> str:
        """Starts the request's next draft, behind its output.

        Returns:
            "" if a draft has started; else why not.
        """

    def observe(self, req: Req, outcome: VerifyOutcome) -> None:
        """Learns how the request's draft, which is of this source, was verified."""
