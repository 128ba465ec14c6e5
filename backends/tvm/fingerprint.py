"""What the machine code of a kernel depends on besides its text: the sources of the generators and of the IR, the builds of TVM and its
LLVM, and the target. Each is in the keys of the cache, so an entry is found only where compiling again would give the same bytes.

TVM's part is the list of its installed files with their hashes, which pip keeps: it says more than a version and costs no import.
"""

from __future__ import annotations

import hashlib
import sys
from functools import cache
from importlib import metadata
from pathlib import Path

_PACKAGES = ("apache-tvm", "apache-tvm-ffi")
# What tells processors apart for a compiler; the rest of the list, such as clock rates, changes from minute to minute.
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")


@cache
def source_fingerprint() -> str:
    """A hash over everything that turns the text of a group into code, but the target."""
    here = Path(__file__).parent
    digest = hashlib.sha256(sys.implementation.cache_tag.encode() if sys.implementation.cache_tag else b"")
    for root in (here, here.parents[1] / "ir"):
        for path in sorted(root.rglob("*.py")):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    for name in _PACKAGES:
        installed = metadata.distribution(name)
        digest.update(f"{name} {installed.version}\0{installed.read_text('RECORD')}\0".encode())
    return digest.hexdigest()


def key_of(*parts: str) -> str:
    """The name of something in the cache: what it is made from, by the sources as they are now."""
    digest = hashlib.sha256(source_fingerprint().encode())
    for part in parts:
        digest.update(b"\0" + part.encode())
    return digest.hexdigest()


@cache
def processor() -> str:
    """What this machine says of its processor; empty where it says nothing."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    first = text.partition("\n\n")[0]
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in _CPU_FIELDS)
