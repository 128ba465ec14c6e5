"""An nvcc of straw: `nvcc --cubin ... -o OUT SOURCE` makes a shared library of a CUDA source with g++.

In: the options that the compiler of stages passes. Out: the library in place of machine code for a GPU; the driver of straw (driver.cpp) loads it. It
is started as a program of its own, with tests/ on its path.
"""

from __future__ import annotations

import os
import re
import subprocess
import sys
import tempfile
from pathlib import Path

from oracles.cuda.threads import FLAGS, translated

_ARCHITECTURES = ("sm_80", "sm_90")


def _unguarded(source: str) -> str:
    """Return the source without the bounds of kernels that have a word in them; tests ask for this fault."""
    word = os.environ.get("STRAW_UNGUARDED")
    if not word:
        return source
    head, *kernels = source.split('extern "C"')
    return 'extern "C"'.join([head, *(re.sub(r"if \(.*\) \{", "{", k) if word in k else k for k in kernels)])


def main(arguments: list[str]) -> int:
    """Answer one call of nvcc; return the exit code."""
    if arguments == ["--version"]:
        print("nvcc of straw, for tests: kernels run on the processor")
    elif arguments == ["--list-gpu-code"]:
        print("\n".join(_ARCHITECTURES))
    elif arguments[:1] == ["--cubin"]:
        out, source = arguments[arguments.index("-o") + 1 :]
        with tempfile.TemporaryDirectory() as folder:
            path = Path(folder) / "kernels.cpp"
            path.write_text(translated(_unguarded(Path(source).read_text())))
            return subprocess.run(["g++", *FLAGS, "-o", out, str(path)], check=False).returncode
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
