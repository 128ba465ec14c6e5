"""The measurement of equal devices of this machine, for local.py.

    python -m penstock.support.processes "local rates" FOLDER --threads N --devices D --part P

In: a folder in which yardsticks are compiled meanwhile: they are there when the input ends. Out: `LocalRates` as JSON.

This process imports the libraries and forks one for each device, as imports take longer than the measurements.

    devices    all at once, each with the yardsticks `QUICK`
    messages   between the first two, through memory, when all devices are measured
"""

from __future__ import annotations

import argparse
import os
import sys
import traceback
from collections.abc import Callable, Sequence
from pathlib import Path

import msgspec

from penstock.backends.registry import backend_of
from penstock.runtime.group.group import RankGroup, host_store, join_store
from penstock.runtime.group.neighbours import identity
from penstock.support.entry_points import ENTRY_POINTS
from penstock.support.errors import PenstockError

from .kernels import QUICK, measure
from .links import ends, fit, trips
from .local import LocalRates

_TIMEOUT = 30.0
# Sizes of messages, and the most of each size that go there and back, and whose ends are timed.
_SIZES, _TRIPS, _MESSAGES = (64, 64 << 10, 512 << 10, 4 << 20), 60, 12


class _Child:
    """A forked process, with pipes that carry the port of the meeting point to it and its results back."""

    def __init__(self, work: Callable[[int], bytes]) -> None:
        port_from, self._port_to = os.pipe()
        self._result_from, result_to = os.pipe()
        self.pid = os.fork()
        if self.pid:
            os.close(port_from)
            os.close(result_to)
            return
        code = 1
        try:
            os.close(self._port_to)
            with open(port_from, "rb") as pipe:
                port = int(pipe.readline())
            with open(result_to, "wb") as pipe:
                pipe.write(work(port))
            code = 0
        except BaseException:
            # Nothing of the parent may run here.
            traceback.print_exc()
        finally:
            os._exit(code)

    def begin(self, port: int) -> None:
        with open(self._port_to, "wb") as pipe:
            pipe.write(b"%d\n" % port)

    def result(self) -> bytes:
        with open(self._result_from, "rb") as pipe:
            content = pipe.read()
        if os.waitpid(self.pid, 0)[1]:
            raise PenstockError("a process of the measurement failed", where="rates")
        return content


def _of_rank(rank: int, world: int, port: int, wanted: argparse.Namespace) -> LocalRates:
    """Measure one device, and messages if it is one of the first two."""
    rates = [measure(wanted.folder, wanted.threads, wanted.part, QUICK)]
    if world < 2:
        return LocalRates(rates)
    # The others wait, too, so that messages are measured without them.
    RankGroup(join_store(port, world, _TIMEOUT), rank, world, _TIMEOUT).gather("rates/devices", b"")
    if rank > 1:
        return LocalRates(rates)
    pair = RankGroup(join_store(port, world, _TIMEOUT), rank, 2, _TIMEOUT)
    pair.connect()
    try:
        if not (host_key := identity()):
            return LocalRates(rates)
        # Under a quota an end takes a rank longer, by the wait for its part of the time.
        part = min(1.0, wanted.part * wanted.threads)
        times = ends(pair, host_key, _SIZES, _MESSAGES)
        return LocalRates(
            rates,
            _rounded(fit(trips(pair, host_key, _SIZES, _TRIPS))),
            _rounded(fit([(size, seconds / part) for size, seconds in times])),
        )
    finally:
        pair.leave()


def _rounded(wire: tuple[float, float]) -> tuple[float, float]:
    return float(f"{wire[0]:.3g}"), float(f"{wire[1]:.3g}")


def main(argv: Sequence[str]) -> None:
    parser = argparse.ArgumentParser(
        prog=f"{ENTRY_POINTS['begin']} 'local rates'", description="Rates of this machine's devices, as JSON."
    )
    parser.add_argument("folder", type=Path)
    for name in ("threads", "devices"):
        parser.add_argument(f"--{name}", type=int, required=True)
    parser.add_argument("--part", type=float, default=1.0)
    wanted = parser.parse_args(argv)
    backend_of("tvm").prepare()
    sys.stdin.read()
    world = wanted.devices

    def work_of(rank: int) -> Callable[[int], bytes]:
        return lambda port: msgspec.json.encode(_of_rank(rank, world, port, wanted))

    # Forked before there is a meeting point, whose threads no fork has.
    children = [_Child(work_of(rank)) for rank in range(world)]
    store = host_store(world, _TIMEOUT) if world > 1 else None
    for child in children:
        child.begin(0 if store is None else store.port)
    parts = [msgspec.json.decode(child.result(), type=LocalRates) for child in children]
    print(msgspec.json.encode(LocalRates([p.devices[0] for p in parts], parts[0].link, parts[0].end)).decode())
