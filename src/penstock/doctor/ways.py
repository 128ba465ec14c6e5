"""The way to a disk: for `penstock doctor`, and for plans without a cluster file, measured once and kept.

In: the folder where what `--offload` moves will be. Out: the bandwidth of its disk, or the cluster with a space there
that has it. One thread reads a file and another writes one, by the same code as a run. So the bandwidth of each
direction is that beside the other. It takes about a second.

What plans measured lies in the user's cache folder, by host and file system. As for local.py, PENSTOCK_RATES=assumed
and PENSTOCK_CACHE=off measure nothing. Limit: a disk that is slower later, or for others at once, is not seen.
"""

from __future__ import annotations

import json
import math
import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace

from penstock.backends.tvm.fingerprint import key_of
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import Space
from penstock.runtime.state.home_files import FileHome, memory_for
from penstock.runtime.state.home_folders import folder_of
from penstock.support.cache import Cache, cache_folder
from penstock.support.errors import PenstockError

from .local import Say, is_wanted

# The bytes that each thread moves, and how often: the quickest counts, as other work is no part of the way.
_MOVED, _ROUNDS = 64 << 20, 3


def with_measured_way(cluster: Cluster, space: Space, say: Say = lambda text: None) -> Cluster:
    """Return the cluster with a space that has the measured bandwidth of its folder, in front of others. A measurement
    that fails is told, and the bandwidth stays as assumed."""
    if is_wanted():
        bandwidth = _bandwidth(space, say)
        space = space if bandwidth is None else replace(space, bandwidth=bandwidth)
    return replace(cluster, spaces=(space, *cluster.spaces))


def _bandwidth(space: Space, say: Say) -> float | None:
    """Return the bytes per second of each direction."""
    folder, store = folder_of(space), Cache(cache_folder(), 1 << 20, part="rates")
    try:
        key = key_of("way", socket.gethostname(), str(os.stat(folder).st_dev))
        if (known := _kept(store.get(key))) is not None:
            return known
        say(f"measuring the way to {folder}, once (PENSTOCK_RATES=assumed: never)")
        bandwidth = measured_bandwidth(space)
    except (PenstockError, OSError) as error:
        say(f"the way to {folder} could not be measured, so its bandwidth is assumed: {error}")
        return None
    store.put(key, json.dumps(bandwidth).encode())
    return bandwidth


def measured_bandwidth(space: Space) -> float:
    """Return the bytes per second of each direction, to three digits."""
    return float(f"{_MOVED / _seconds(space):.3g}")


def _kept(content: bytes | None) -> float | None:
    """Return a bandwidth that was kept; None where there is none, or what is there is damaged."""
    if content is None:
        return None
    try:
        bandwidth = json.loads(content)
    except ValueError:
        return None
    return bandwidth if isinstance(bandwidth, float) and math.isfinite(bandwidth) and bandwidth > 0 else None


def _seconds(space: Space) -> float:
    """Return how long it takes at least to read a file and to write another meanwhile."""
    homes, memory = [FileHome(space, _MOVED) for _ in range(2)], [memory_for(_MOVED) for _ in range(2)]
    # A file that was never written is read without the disk.
    for home, block in zip(homes, memory, strict=True):
        home.write(block)
    seconds = list[float]()
    with ThreadPoolExecutor(2) as threads:
        for _ in range(_ROUNDS):
            begun = time.perf_counter()
            for moved in [threads.submit(homes[0].read, memory[0]), threads.submit(homes[1].write, memory[1])]:
                moved.result()
            seconds.append(time.perf_counter() - begun)
    return min(seconds)
