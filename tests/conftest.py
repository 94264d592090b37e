"""Marks tests by their folder, and skips GPU tests with a reason where there is no GPU.

Fixtures here import what they need when they are asked for: some tests run without SGLang.
"""

import os
from collections.abc import Iterator
from itertools import chain
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
SAME_SERVERS = {
    "random pair": (
        *("test_sampling", "test_radix", "test_blocks", "test_exact", "test_fallbacks"),
        *("test_lengths", "test_requests", "test_aborts", "test_malformed", "test_overlap"),
        *("test_multi_turn", "test_stops", "test_logprobs", "test_adjusted"),
    ),
    "demo pair": (
        *("test_documents", "test_compare", "test_load", "test_public_benchmark"),
        *("test_demo_programs", "test_demo_pair", "test_security", "test_as_on_a_gpu", "test_soak"),
    ),
}
"""Files that use the same servers run one after another in one process of tests, in an order that
starts each server once."""
LONG = ("test_eagle3_continuation", "test_stock_speculative", "test_weight_updates")
ORDER = (*chain(*SAME_SERVERS.values()), *LONG)
"""Files that take minutes come first, so that neither process of tests works alone at the end."""


@pytest.hookimpl(optionalhook=True)
def pytest_xdist_make_scheduler(config: pytest.Config, log: Any) -> Any:
    """By files, as ``--dist loadfile``, and by ``SAME_SERVERS``."""
    from xdist.scheduler import LoadFileScheduling

    group_of = {stem: group for group, stems in SAME_SERVERS.items() for stem in stems}

    class ByServers(LoadFileScheduling):
        def _split_scope(self, nodeid: str) -> str:
            file = super()._split_scope(nodeid)
            return group_of.get(Path(file).stem, file)

    return ByServers(config, log)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    ranks = {stem: rank for rank, stem in enumerate(ORDER)}
    items.sort(key=lambda item: ranks.get(Path(item.path).stem, len(ranks)))
    for item in items:
        folder = Path(item.path).parent.name
        if folder in KINDS:
            item.add_marker(getattr(pytest.mark, folder))
        if folder == "gpu" and not torch.cuda.is_available():
            item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; none is here"))


@pytest.fixture(autouse=True)
def restored_environment() -> Iterator[None]:
    """Restores variables that SGLang sets when it reads flags (the doctor's, in tests): servers of
    another environment than the nursery's start without it, and take 1.5 GB more each."""
    before = dict(os.environ)
    yield
    os.environ.clear()
    os.environ.update(before)


@pytest.fixture(scope="session")
def problems() -> list:
    """Held-out problems of the question pair, as prompts through its chat template."""
    from support.demo_pair import held_out

    return held_out(100)


@pytest.fixture(scope="session")
def tokenizer() -> Any:
    """The question pair's tokenizer."""
    from support.demo_pair import DEMO
    from support.models import load_tokenizer

    return load_tokenizer(DEMO / "target")
