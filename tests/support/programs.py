"""Command-line programs in the process of a test, whose servers and clients are forked."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path

import pytest

from sglang_parse import cli
from sglang_parse.client import servers
from sglang_parse.client.servers import Endpoint
from sglang_parse.compare import serving
from support.warm import Nursery


@contextmanager
def forked(nursery: Nursery) -> Iterator[None]:
    """Within this, programs start nothing that imports SGLang again: neither servers nor
    ``bench_serving``. tests/unit/test_compare_serving.py runs that as programs do."""

    def run(words: Sequence[str], _: Endpoint, log: Path) -> None:
        log.write_text(nursery.run("-m", serving.PROGRAM, *words))

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(servers, "start_process", nursery.start)
        patch.setattr(serving, "_run", run)
        patch.setattr(cli, "end_on_sigterm", lambda: None)
        yield
