"""Seeds for modules of torch."""

from __future__ import annotations

import pytest
import torch


@pytest.fixture
def seeded() -> None:
    """The weights that modules of torch draw, and the examples, are the same in every run."""
    torch.manual_seed(0)
