"""Marks tests by their folder, and skips GPU tests with a reason where there is no GPU."""

from pathlib import Path

import pytest

KINDS = ("unit", "seams", "e2e", "gpu")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    for item in items:
        folder = Path(item.path).parent.name
        if folder in KINDS:
            item.add_marker(getattr(pytest.mark, folder))
        if folder == "gpu":
            import torch

            if not torch.cuda.is_available():
                item.add_marker(pytest.mark.skip(reason="needs a CUDA GPU; none is here"))
