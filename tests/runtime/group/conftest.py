"""Fixtures of groups with a secret."""

from __future__ import annotations

from datetime import timedelta
from pathlib import Path

import pytest
from torch.distributed import TCPStore

from .secrets_and_certificates import make_certificate


@pytest.fixture(scope="module")
def tls(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_certificate(tmp_path_factory.mktemp("tls") / "own")


@pytest.fixture
def store():
    return TCPStore("127.0.0.1", 0, None, True, timedelta(seconds=5), wait_for_workers=False)
