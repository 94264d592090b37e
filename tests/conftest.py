"""Marks tests by their folder, and skips GPU tests with a reason where there is no GPU.

Fixtures here import what they need when they are asked for: some tests run without SGLang.
"""

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, settings

# How long an example takes says nothing of the code: machines are busy.
settings.register_profile("busy", deadline=None, suppress_health_check=[HealthCheck.too_slow])
settings.load_profile("busy")
# Two threads that wait for each other are slower than one when a server runs beside them.
torch.set_num_threads(1)
KINDS = ("unit", "compat", "e2e", "gpu")
LONG = (
    "test_eagle3_continuation",
    "test_documents",
    "test_compare",
    "test_sampling",
    "test_stock_speculative",
    "test_weight_updates",
)
"""Files that take minutes come first: with two at a time, none is left alone in the end."""


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    items.sort(key=lambda item: Path(item.path).stem not in LONG)
    for item in items:
        folder = Path(item.path).parent.name
        if folder in KINDS:
            item.add_marker(getattr(pytest.mark, folder))
        if folder == "gpu" and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; none is here"))


@pytest.fixture(autouse=True)
def own_environment() -> Iterator[None]:
    """What SGLang sets for itself when it reads flags (the doctor's, in tests) ends with the test:
    servers of another environment than the nursery's start without it, with 1.5 GB more each."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def problems() -> list:
    """Held-out problems of the demo pair, as prompts through its chat template."""
    from support.demo_pair import held_out

    return held_out(100)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The demo pair's tokenizer."""
    from support.demo_pair import DEMO
    from support.models import load_tokenizer

    return load_tokenizer(DEMO / "target")
