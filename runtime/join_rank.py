"""Where the process of a rank of a group begins and ends; in between it is join.py.

    python -P -m penstock.runtime.join_rank OPTIONS

In: what join.py is told, started by a keeper. Out: its exit code. Like a rank that forkserver.py forked, the process looks for no garbage
among what it imports, and ends at once: taking the libraries apart again, object by object, would take as long as loading one of them.
"""

from __future__ import annotations

import gc
import os
import sys


def main() -> None:
    gc.disable()
    from . import join

    gc.freeze()
    gc.enable()
    join.main(sys.argv[1:])
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


if __name__ == "__main__":
    main()
