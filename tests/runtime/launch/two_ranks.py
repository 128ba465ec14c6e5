"""Two ranks of a group on this host, each started by its own command, as a launcher of several hosts would."""

from __future__ import annotations

import os
import socket
import subprocess
import sys


def start(path, folder, steps, *, heartbeat=3, timeout=60, more=()):
    """Two ranks as a launcher would start them, without one that helps."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        port = probe.getsockname()[1]
    command = [
        sys.executable,
        "-m",
        "penstock",
        "run",
        str(path),
        "--steps",
        str(steps),
        "--metrics",
        str(folder / "m.jsonl"),
    ]
    command += ["--heartbeat", str(heartbeat), "--timeout", str(timeout)]
    # The same for all, or a list of what each of them gets.
    own = more if isinstance(more, list) and more and isinstance(more[0], tuple) else [more, more]
    group = {"WORLD_SIZE": "2", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(port), "PENSTOCK_RUN_ID": "test"}
    return [
        subprocess.Popen(
            [*command, *words],
            env=os.environ | group | {"RANK": str(rank), "LOCAL_RANK": str(rank)},
            stderr=subprocess.PIPE,
            text=True,
        )
        for rank, words in enumerate(own)
    ]


def finish(running, seconds=60):
    """What each rank said; nobody is left."""
    try:
        return [process.communicate(timeout=seconds)[1] for process in running]
    finally:
        for process in running:
            process.kill()
            process.wait()
