"""The keys of compiled code: hashes of everything that the machine code of a kernel depends on besides its text.

That is the sources of the generators and of the IR, the builds of TVM and its LLVM, and the target. An entry of the
cache is found only where compiling again would give the same bytes. TVM's part is the list of its installed files with
their hashes, which pip keeps: it says more than a version and costs no import.
"""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from importlib import metadata
from importlib.util import find_spec
from pathlib import Path

_PACKAGES = ("apache-tvm", "apache-tvm-ffi")
# Folders of the package that hold the generators and the IR.
_SOURCES = ("backends/tvm", "ir")


def package_folder() -> Path:
    """Return the folder of the package, wherever the interpreter has found it."""
    spec = find_spec(__name__.partition(".")[0])
    assert spec is not None
    assert spec.origin is not None
    return Path(spec.origin).absolute().parent


@cache
def source_fingerprint() -> str:
    """Hash everything that turns the text of a group into code, but the target."""
    digest = hashlib.sha256(sys.implementation.cache_tag.encode() if sys.implementation.cache_tag else b"")
    for root in map(package_folder().joinpath, _SOURCES):
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    for name in _PACKAGES:
        installed = metadata.distribution(name)
        digest.update(f"{name} {installed.version}\0{installed.read_text('RECORD')}\0".encode())
    return digest.hexdigest()


def key_of(*parts: str) -> str:
    """Return the key of an entry: a hash of what it is made from, and of the sources that make it."""
    digest = hashlib.sha256(source_fingerprint().encode())
    for part in parts:
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()
