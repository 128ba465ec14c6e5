"""A secret, and certificates as docs/security.md makes them."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest

TOKEN, SECRET = "of this start", b"s" * 32


needs_openssl = pytest.mark.skipif(shutil.which("openssl") is None, reason="openssl makes the certificates")


def make_certificate(folder: Path) -> Path:
    """As docs/security.md says it."""
    folder.mkdir()
    words = "req -x509 -newkey ec -pkeyopt ec_paramgen_curve:prime256v1 -nodes -days 30 -subj /CN=penstock -keyout key.pem -out cert.pem"
    subprocess.run(["openssl", *words.split()], cwd=folder, check=True, capture_output=True, timeout=60)
    return folder
