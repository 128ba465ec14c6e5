"""Going on with fewer devices (`--elastic`): which are left, and a bundle for them. In: a bundle, and who
is there. Out: the bundle to go on with.

The planning is done by a process of its own (penstock/replanning.py), into the directory of checkpoints, which all ranks see:

    DIR/replanned-<hash>     a bundle like any other; the hash is of the first one's module and of the devices, so a plan is made once

Where hosts are known by name, devices are those of the hosts that are there; else hosts are alike, and devices count in the order of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.backends.bundle.format import Bundle
from penstock.runtime.group.hosts import same_host
from penstock.support import errors
from penstock.support.errors import PenstockError, UsageError

_SHOWN_LINES = 12


class Replanned(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The bundle to go on with, and what is said of it."""

    bundle: str
    told: str


def devices_on(bundle: Bundle, hosts: Sequence[str]) -> list[str]:
    """The device of each rank that is there, by the hosts of these ranks; UsageError when there are more ranks on a host than devices."""
    left = list(bundle.manifest.ranks)
    if not any(same_host(entry.host, host) for entry in left for host in hosts):
        return [entry.device for entry in left[: len(hosts)]]
    found = []
    for rank, host in enumerate(hosts):
        entry = next((entry for entry in left if same_host(entry.host, host)), None)
        if entry is None:
            what = f"there is no device of the bundle for rank {rank} on {host}"
            raise UsageError(what, where=str(bundle.path), hint="start one process for each device that is left")
        left.remove(entry)
        found.append(entry.device)
    return found


def replan(bundle: Bundle, devices: Sequence[str], directory: Path) -> Replanned:
    """A bundle for some of the devices of a bundle, one rank on each, in this order."""
    key = hashlib.sha256("\n".join([bundle.module_hash, *devices]).encode()).hexdigest()[:12]
    out = directory / f"replanned-{key}"
    asked = json.dumps({"bundle": str(bundle.path), "devices": list(devices), "out": str(out), "parent": os.getpid()})
    done = subprocess.run(
        [sys.executable, "-P", "-m", "penstock.replanning", asked],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        found = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        tail = "\n".join(done.stderr.splitlines()[-_SHOWN_LINES:])
        raise PenstockError(
            f"planning anew ended with exit code {done.returncode}:\n{tail}", where=str(bundle.path)
        ) from error
    if "error" in found:
        kind = getattr(errors, found["error"], PenstockError)
        raise kind(
            f"cannot be planned anew for {' '.join(devices)}: {found['what']}", where=found["where"], hint=found["hint"]
        )
    return Replanned(found["bundle"], found["told"])


def lost_devices(bundle: Bundle, devices: Sequence[str]) -> str:
    """Those that a plan had and that are not left, in words."""
    lost = [f"{entry.device} of rank {entry.rank}" for entry in bundle.manifest.ranks if entry.device not in devices]
    return f"device{'s' * (len(lost) != 1)} {', '.join(lost[:16])}{' and more' * (len(lost) > 16)}"
