"""Real servers on the GPU, shared as those of the end-to-end tests are.

Imported piece by piece: ``test_kernels`` runs where neither SGLang nor an HTTP client is.
"""

from __future__ import annotations

import importlib.util
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest


@pytest.fixture(scope="session")
def start_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Any]:
    """``start(name, *flags)``: a server of that name, ready and suspended; all end here.

    Each starts anew: a process that has looked for a GPU cannot be forked into one that uses it.
    """
    from sglang_parse.client import servers
    from support.servers import shared_servers
    from support.warm import CHECKS

    with pytest.MonkeyPatch.context() as patch:
        for name, value in CHECKS.items():
            patch.setenv(name, value)
        # Set for a CPU; on a GPU SGLang compiles what it always compiles.
        patch.setenv("TORCHDYNAMO_DISABLE", "0")
        with shared_servers(tmp_path_factory.mktemp("logs"), servers.start_process) as start:
            yield start


@pytest.fixture(scope="session")
def random_pair(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path]:
    """With heads of a size every backend has kernels for, FlashInfer's among those built ahead."""
    from support.random_pair import PairShape, make_pair

    return make_pair(
        tmp_path_factory.mktemp("pair"), PairShape(seed=1, head_dim=128, max_positions=40960)
    )


def has_fa3() -> bool:
    """Whether SGLang runs FlashAttention 3 here: on a Hopper GPU, by a library of sglang-kernel's
    that smaller builds leave out."""
    import torch

    if not torch.cuda.is_available() or torch.cuda.get_device_capability()[0] != 9:
        return False
    spec = importlib.util.find_spec("sgl_kernel")
    folders = (spec.submodule_search_locations or ()) if spec else ()
    return any(any(Path(folder).glob("flash_ops*.so")) for folder in folders)


@pytest.fixture
def setup(request: pytest.FixtureRequest) -> Any:
    """The way to run PARSE that a test asks for (``support.gpu_setups.Setup``)."""
    if request.param.backend == "fa3" and not has_fa3():
        pytest.skip("fa3 wants a Hopper GPU and sglang-kernel's build of it (flash_ops)")
    return request.param
