"""Measured times, kept between runs: of kernels, and of whole stage graphs as a worker runs them.

    kernels   seconds of one call, from `penstock inspect --kernels --measure`; `Measured` is a source of prices for
              passes/costs/prices.py
    stages    seconds of each kind of action of a rank that is alone, from calibration/profile.py

An entry is looked up by what was timed (the kernel whatever its names, the graph by its text) and by what timed it:
back end, threads, processor, and the sources that made the code. Entries lie in the user's cache folder, each in a file
of its own. It has a hash that is checked when it is read, and is written under a temporary name and renamed. An entry
that is damaged or is no time counts as absent. With PENSTOCK_CACHE=off nothing is kept.

Limits: times are of this machine. A CPU of the cluster counts as this machine if its host is localhost or has this
machine's name. A quota that only some ranks have is not seen.
"""

from __future__ import annotations

import hashlib
import json
import math
import socket
from collections.abc import Mapping

from penstock.backends.tvm.fingerprint import key_of
from penstock.ir.cluster.cluster import Device
from penstock.ir.graph import Module
from penstock.ir.schedule import COMPUTE
from penstock.ir.text import print_graph
from penstock.passes.costs.prices import ROOFLINE, Prices, rank_seconds, timed_kind
from penstock.passes.kernels.divide import Kernel
from penstock.support.cache import Cache, cache_bound, cache_folder
from penstock.support.processor import processor

# Annotations that change the code of a kernel.
_CODE = ("packed", "library")


def table_of_user() -> Cache:
    """Open the table of times in the cache of the user."""
    return Cache(cache_folder(), cache_bound(), part="times")


def is_here(device: Device) -> bool:
    """Return whether times of this machine's processor are those of the device."""
    return device.kind == "cpu" and device.host in ("localhost", socket.gethostname())


class Measured:
    """Prices of kernels that were timed on this machine; None for all others."""

    def __init__(self, backend: str = "tvm", store: Cache | None = None) -> None:
        self.backend, self.store = backend, store if store is not None else table_of_user()

    def seconds(self, kernel: Kernel, device: Device) -> float | None:
        return self._get(_kernel_key(kernel, self.backend, device.threads)) if is_here(device) else None

    def keep(self, kernel: Kernel, threads: int, seconds: float) -> None:
        """Write down what one call of a kernel took on this machine."""
        self._put(
            _kernel_key(kernel, self.backend, threads),
            seconds,
            f"{kernel.body.name}: {' '.join(op.kind for op in kernel.ops)}",
        )

    def stage(self, module: Module, stage: int, device: Device) -> dict[str, float]:
        """Return seconds by kind of graph, as far as they were measured."""
        if not is_here(device):
            return {}
        times = {kind: self._get(key) for kind, key in self._stage_keys(module, stage, device.threads).items()}
        return {kind: seconds for kind, seconds in times.items() if seconds is not None}

    def keep_stage(self, module: Module, stage: int, threads: int, seconds: Mapping[str, float]) -> None:
        for kind, key in self._stage_keys(module, stage, threads).items():
            if kind in seconds:
                self._put(key, seconds[kind], f"s{stage}.{kind}")

    def _stage_keys(self, module: Module, stage: int, threads: int) -> dict[str, str]:
        """Return the key of each kind of graph. A graph's time depends on the other graphs of its stage, by what they
        leave in the caches."""
        texts = {kind: print_graph(graph) for kind in COMPUTE if (graph := module.stage_graph(stage, kind)) is not None}
        stage_hash = hashlib.sha256("\n".join(texts.values()).encode()).hexdigest()
        return {kind: key_of("stage", stage_hash, kind, self.backend, str(threads), processor()) for kind in texts}

    def _get(self, key: str) -> float | None:
        content = self.store.get(key)
        if content is None:
            return None
        try:
            seconds = json.loads(content)["seconds"]
        except (ValueError, KeyError, TypeError):
            return None
        return seconds if isinstance(seconds, float) and math.isfinite(seconds) and seconds > 0 else None

    def _put(self, key: str, seconds: float, what: str) -> None:
        self.store.put(key, json.dumps({"seconds": float(seconds), "what": what}).encode())


def _kernel_key(kernel: Kernel, backend: str, threads: int) -> str:
    code = repr([[op.attrs.get(name) for name in _CODE] for op in kernel.body.ops])
    return key_of("kernel", kernel.key, code, backend, str(threads), processor())


def stage_times(
    module: Module, table: Measured | None = None, prices: Prices = ROOFLINE
) -> tuple[dict[tuple[int, str], float], int]:
    """Return seconds of the graphs of every rank: as measured where they were, else as estimated; and how many are
    estimates."""
    table = table or Measured()
    times = rank_seconds(module, prices)
    assert module.cluster is not None
    estimated = set(times)
    ranks = zip(module.rank_packs(), module.rank_devices(), strict=True)
    for rank, stage, name in [(r, s, n) for r, (stages, n) in enumerate(ranks) for s in stages]:
        known = table.stage(module, stage, module.cluster.device(name))
        named = {(rank, timed_kind(module, stage, kind)): seconds for kind, seconds in known.items()}
        times |= named
        estimated -= set(named)
    return times, len(estimated)
