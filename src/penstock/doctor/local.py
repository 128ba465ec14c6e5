"""The rates of this machine for plans without a cluster file: measured once, in a few seconds, and kept.

In: a cluster of equal CPU devices, as `Cluster.local` guesses them. Out: the same devices with measured rates, marked
as such (`Device.source`), and the class of links between them. What is measured (local_rates.py) is a part of what
`penstock doctor` measures, by the same yardsticks; all else stays as guessed.

The result lies in the user's cache folder, by processor, host, cores, quota, threads, yardsticks and sources. One by
fewer yardsticks is not read: the machine is measured anew.
PENSTOCK_RATES=assumed measures nothing, and neither does PENSTOCK_CACHE=off, which keeps nothing. Devices then have
the usual rates.

Limits: equal devices of this host only. The load of other programs meanwhile changes little where a device has one
thread.
"""

from __future__ import annotations

import os
import socket
import statistics
import subprocess
import tempfile
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path

import msgspec

from penstock.backends.tvm.fingerprint import key_of
from penstock.ir.cluster.cluster import MEASURED, SAME_HOST, Cluster, LinkClass
from penstock.runtime.launch.local import loopback_name, thread_environment
from penstock.support import hardware as machine
from penstock.support.cache import Cache, cache_folder
from penstock.support.errors import PenstockError, UsageError
from penstock.support.helper_processes import end, failure, outputs, start
from penstock.support.processes import command_of
from penstock.support.processor import processor

from .kernels import BUSY, QUICK, Rates, compile_yardsticks, granted, with_rates, within

Say = Callable[[str], None]
ASSUMED = "assumed"
_TIMEOUT = 60.0
# Equal devices that are measured at once, at most.
_MOST = 8


class LocalRates(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The measurements of equal devices of this machine: rates of each that was measured. `link` and `end` are bytes
    per second and seconds of messages through memory, and of their two ends; None where there are none."""

    devices: list[Rates]
    link: tuple[float, float] | None = None
    end: tuple[float, float] | None = None


def measured_cluster(cluster: Cluster, say: Say = lambda text: None) -> Cluster:
    """Return the cluster with measured rates of its CPU devices, if they are those that `Cluster.local` guesses. A
    measurement that fails is told, and the guesses stay."""
    guesses = [device for device in cluster.devices if device.kind == "cpu"]
    if not is_wanted() or not guesses or guesses != list(Cluster.local(len(guesses)).devices):
        return cluster
    threads, count = guesses[0].threads, min(len(guesses), machine.usable_cores(), _MOST)
    store = Cache(cache_folder(), 1 << 20, part="rates")
    quota = machine.core_quota()
    key = _key(quota, threads, count)
    rates = _kept(store, key)
    if rates is None:
        say("measuring this machine, once (PENSTOCK_RATES=assumed: never)")
        try:
            rates = _measured(threads, count, granted(quota, threads * count))
        except (PenstockError, ImportError, OSError) as error:
            say(f"this machine could not be measured, so rates are assumed: {error}")
            return cluster
        _keep(store, key, rates, threads, say)
    # More devices than were measured at once share the quota anew, and then take turns as whole threads do.
    quota = quota if count == len(guesses) else None
    devices = tuple(within(quota, threads * count, d) if d.kind == "cpu" else d for d in cluster.devices)
    return _with_measured(replace(cluster, devices=devices), rates)


def _key(quota: machine.CoreQuota | None, threads: int, count: int) -> str:
    """Return the key of a measurement of so many devices of so many threads, by what is measured."""
    what = repr((machine.usable_cores(), quota, threads, count, QUICK))
    return key_of("rates", processor(), socket.gethostname(), what)


def is_wanted() -> bool:
    """Return whether this machine shall be measured, and there is a place to keep the result."""
    choice = os.environ.get("PENSTOCK_RATES") or MEASURED
    if choice not in (MEASURED, ASSUMED):
        raise UsageError(f"bad PENSTOCK_RATES {choice!r}", hint=f"{MEASURED} or {ASSUMED}")
    return choice == MEASURED and cache_folder() is not None


def _kept(store: Cache, key: str) -> LocalRates | None:
    content = store.get(key)
    try:
        return None if content is None else msgspec.json.decode(content, type=LocalRates)
    except msgspec.DecodeError:
        return None


def _keep(store: Cache, key: str, rates: LocalRates, threads: int, say: Say) -> None:
    """Keep a measurement. Of several threads the clock counts, so other programs spoil it: it is then made again."""
    busy = machine.load()
    if threads > 1 and busy > BUSY * machine.usable_cores():
        say(f"other programs keep {busy:.1f} cores busy: this machine will be measured again")
        return
    store.put(key, msgspec.json.encode(rates))
    if store.trouble:
        say(store.trouble)


def _measured(threads: int, count: int, part: float) -> LocalRates:
    """Measure devices in helper processes. Yardsticks are compiled while these import libraries."""
    with tempfile.TemporaryDirectory(prefix="penstock-rates-") as folder:
        environment = os.environ | thread_environment(threads) | {"GLOO_SOCKET_IFNAME": loopback_name()}
        command = [*command_of("local rates"), folder, "--threads", str(threads), "--devices", str(count)]
        # It goes on when its input ends.
        running = [start([*command, "--part", repr(part)], environment, stdin=subprocess.PIPE)]
        try:
            compile_yardsticks(Path(folder), QUICK, jobs=1)
        except BaseException:
            end(running[0])
            raise
        written = outputs(running, _TIMEOUT)
        if written is None:
            raise PenstockError(f"measuring did not end within {_TIMEOUT:g} s", where="rates")
        if (problem := failure(running, written)) is not None:
            last = problem.splitlines()[-1:] or [f"ended with exit code {running[0].returncode}"]
            raise PenstockError(last[0], where="rates")
        try:
            return msgspec.json.decode(written[0][0], type=LocalRates)
        except msgspec.DecodeError as error:
            raise PenstockError(f"it answered with no rates: {error}", where="rates") from error


def _with_measured(cluster: Cluster, rates: LocalRates) -> Cluster:
    """Return the cluster with the medians of what was measured, so that equal devices stay equal."""
    middle, classes = _median(rates.devices), cluster.classes
    ends: dict[str, float] = {}
    if rates.end is not None and rates.link is not None:
        # One of the two ends copies.
        ends = {"copy_bandwidth": rates.end[0] / 2, "shared_overhead": rates.end[1]}
        classes = (*(c for c in classes if c.kind != SAME_HOST), LinkClass(SAME_HOST, *rates.link))
    devices = tuple(
        replace(with_rates(device, middle), **ends) if device.kind == "cpu" else device  # type: ignore[arg-type]
        for device in cluster.devices
    )
    return replace(cluster, devices=devices, classes=classes)


def _median(rates: Sequence[Rates]) -> Rates:
    def middle(numbers: Sequence[float]) -> float:
        return float(f"{statistics.median(numbers):.3g}")

    names = ("flops", "bandwidth", "cache_bandwidth", "overhead", "call_overhead")
    return msgspec.structs.replace(
        rates[0],
        cache=max(r.cache for r in rates),
        efficiency={key: middle([r.efficiency[key] for r in rates]) for key in rates[0].efficiency},
        **{name: middle([getattr(r, name) for r in rates]) for name in names},
    )
