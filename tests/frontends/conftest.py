"""What all tests of frontends share: operators of torch are looked up once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
from torch._export import utils as torch_export


@pytest.fixture(scope="module", autouse=True)
def _operators_looked_up_once() -> Iterator[None]:
    """torch.export looks all operators up for each of two dozen namespaces, twice per program: a third of the time of small programs. Tests
    here register none."""
    torch_export._materialize_cpp_cia_ops()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch_export, "_materialize_cpp_cia_ops", lambda: None)
        yield
