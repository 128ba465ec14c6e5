"""The first and the last code of the runtime's processes, but for those that are forked.

    python -P -m penstock.support.processes NAME ARGUMENTS...

In: the entry point (entry_points.py) whose `main` is the work, and its arguments. Out: its exit code.

Like a rank that runtime/launch/forkserver.py forked, the process looks for no garbage among its imports, and ends at
once when the work is done. Taking the libraries apart again, object by object, would take as long as loading one of
them.
"""

from __future__ import annotations

import gc
import os
import sys

from .entry_points import command_line, load


def command_of(name: str) -> list[str]:
    """Return the command of a process whose work is the `main` of an entry point; the arguments are to follow."""
    return [*command_line("begin"), name]


def main() -> None:
    name, *arguments = sys.argv[1:]
    gc.disable()
    work = load(name)
    gc.freeze()
    gc.enable()
    work.main(arguments)
    for stream in (sys.stdout, sys.stderr):
        if stream is not None:  # closed by the parent
            stream.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
