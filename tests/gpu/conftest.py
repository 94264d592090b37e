"""Real servers on the GPU, through the end-to-end tests' own machinery.

Imported piece by piece: ``test_kernels`` runs where neither SGLang nor an HTTP client is.
"""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType, SimpleNamespace
from typing import Any

import pytest

TESTS = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(TESTS), str(TESTS / "e2e")]


@pytest.fixture(scope="session")
def e2e() -> ModuleType:
    """``tests/e2e/conftest.py``, for its fixtures' insides."""
    spec = importlib.util.spec_from_file_location("e2e_conftest", TESTS / "e2e" / "conftest.py")
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.fixture(scope="session")
def start_server(e2e: ModuleType, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """``start(name, *flags)``: a server of that name, ready and suspended; all end here.

    Each starts anew: a process that has looked for a GPU cannot be forked into one that uses it.
    """
    from sglang_parse.bench.demo import servers

    with pytest.MonkeyPatch.context() as patch:
        # Set for a CPU; on a GPU SGLang compiles what it always compiles.
        patch.delitem(servers.ENVIRONMENT, "TORCHDYNAMO_DISABLE")
        nursery = SimpleNamespace(start=servers.start_process)
        shared = e2e.SharedServers(tmp_path_factory.mktemp("logs"), nursery)
        yield shared.start
        shared.stop()


@pytest.fixture(scope="session")
def problems() -> list:
    """Held-out problems of the demo pair, as prompts through its chat template."""
    from demo_problems import held_out

    return held_out(100)


@pytest.fixture(scope="session")
def random_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """With heads of a size every backend has kernels for, FlashInfer's among those built ahead."""
    from random_pair import PairShape, make_pair

    return make_pair(tmp_path_factory.mktemp("pair"), PairShape(seed=1, head_dim=128))
