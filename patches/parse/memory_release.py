"""PARSE refuses to release GPU memory (ledger: memory_release)."""

from __future__ import annotations

from typing import Any

from sglang_parse.algorithm import names_parse
from sglang_parse.patches.base import Patch, before

_MANAGER = "sglang.srt.managers.tokenizer_control_mixin.TokenizerControlMixin"


def _refuse(self: Any, *_: Any, **__: Any) -> None:
    """Raises ValueError, which SGLang's HTTP server turns into an error response."""
    if names_parse(self.server_args):
        raise ValueError(
            "PARSE: memory cannot be released and resumed: SGLang would restore the target's "
            "state only, and the draft would write garbage. Fix: end the server and start it "
            "again, or serve without --speculative-algorithm PARSE"
        )


PATCH = Patch(
    "memory_release",
    {
        f"{_MANAGER}.release_memory_occupation": before(_refuse),
        f"{_MANAGER}.resume_memory_occupation": before(_refuse),
    },
    why="SGLang saves and restores the buffers of the target only; the draft would write "
    "garbage afterwards.",
    how="on PARSE servers, both calls return an error with the reason.",
    removed_when="SGLang restores the state of draft models, too.",
)
