"""Where processes of the runtime begin and end, but those that are forked.

    python -P -m penstock.support.processes MODULE ARGUMENTS...

In: the module of the runtime whose `main` is the work, and what that is told. Out: its exit code. Like a rank that forkserver.py forked,
the process looks for no garbage among what it imports, and ends at once when the work is done: taking the libraries apart again, object
by object, would take as long as loading one of them.
"""

from __future__ import annotations

import gc
import importlib
import os
import sys


def command_of(module: str) -> list[str]:
    """The command of a process whose work is `main` of a module of the runtime; the arguments are to follow."""
    return [sys.executable, "-P", "-m", __name__, module]


def main() -> None:
    module, *arguments = sys.argv[1:]
    gc.disable()
    work = importlib.import_module(f"{__package__}.{module}")
    gc.freeze()
    gc.enable()
    work.main(arguments)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by whoever started this
            stream.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
