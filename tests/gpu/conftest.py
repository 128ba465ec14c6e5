"""Every test in this folder needs a GPU, and nvcc to compile for it; without either, it is skipped. Those in straw/ need none."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest
import torch

_HERE = Path(__file__).parent


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    reason = ""
    if not torch.cuda.is_available():
        reason = "no CUDA device on this host"
    elif shutil.which("nvcc") is None:
        reason = "nvcc is not on the PATH"
    for item in items:
        if item.path.parent == _HERE:
            item.add_marker("gpu")
            if reason:
                item.add_marker(pytest.mark.skip(reason=reason))


@pytest.fixture(scope="session")
def architecture() -> str:
    """That of the first GPU of this host."""
    major, minor = torch.cuda.get_device_capability(0)
    return f"sm_{major}{minor}"
