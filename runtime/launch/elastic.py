"""Going on with fewer devices (`--elastic`).

In: a bundle, and the hosts of the ranks that are there. Out: the devices that are left, and a bundle for them.

The planning is done by a process of its own (src/penstock/planning/replan.py), into the directory of checkpoints, which
all ranks see:

    DIR/replanned-<hash>     a bundle like any other; the hash is of the first one's module and of the devices, so a
                             plan is made once

Where hosts are known by name, devices are those of the hosts that are there. Else hosts are alike, and devices count in
the order of ranks.
"""

from __future__ import annotations

import hashlib
import json
import os
import subprocess
from collections.abc import Sequence
from pathlib import Path

import msgspec

from penstock.backends.bundle.format import Bundle
from penstock.runtime.group.hosts import same_host
from penstock.support import errors
from penstock.support.entry_points import command_line
from penstock.support.errors import PenstockError, UsageError

_SHOWN_LINES = 12


class Replanned(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The bundle to go on with, and its description."""

    bundle: str
    summary: str = msgspec.field(name="told")


def devices_on(bundle: Bundle, hosts: Sequence[str]) -> list[str]:
    """Return the device of each rank that is there, by the hosts of these ranks. UsageError when there are more ranks
    on a host than devices."""
    left = list(bundle.manifest.ranks)
    if not any(same_host(entry.host, host) for entry in left for host in hosts):
        return [entry.device for entry in left[: len(hosts)]]
    devices = []
    for rank, host in enumerate(hosts):
        entry = next((entry for entry in left if same_host(entry.host, host)), None)
        if entry is None:
            what = f"there is no device of the bundle for rank {rank} on {host}"
            raise UsageError(what, where=str(bundle.path), hint="start one process for each device that is left")
        left.remove(entry)
        devices.append(entry.device)
    return devices


def replan(bundle: Bundle, devices: Sequence[str], directory: Path) -> Replanned:
    """Return a bundle for some of the devices of a bundle, one rank on each, in this order."""
    key = hashlib.sha256("\n".join([bundle.module_hash, *devices]).encode()).hexdigest()[:12]
    out = directory / f"replanned-{key}"
    question = json.dumps(
        {"bundle": str(bundle.path), "devices": list(devices), "out": str(out), "parent": os.getpid()}
    )
    done = subprocess.run(
        [*command_line("replan"), question],
        stdin=subprocess.DEVNULL,
        capture_output=True,
        text=True,
        check=False,
    )
    try:
        answer = json.loads(done.stdout.splitlines()[-1])
    except (IndexError, ValueError) as error:
        tail = "\n".join(done.stderr.splitlines()[-_SHOWN_LINES:])
        raise PenstockError(
            f"planning anew ended with exit code {done.returncode}:\n{tail}", where=str(bundle.path)
        ) from error
    if "error" in answer:
        kind = getattr(errors, answer["error"], PenstockError)
        raise kind(
            f"cannot be planned anew for {' '.join(devices)}: {answer['what']}",
            where=answer["where"],
            hint=answer["hint"],
        )
    return Replanned(answer["bundle"], answer["told"])


def lost_devices(bundle: Bundle, devices: Sequence[str]) -> str:
    """Return in words the devices that a plan had and that are not left."""
    lost = [f"{entry.device} of rank {entry.rank}" for entry in bundle.manifest.ranks if entry.device not in devices]
    return f"device{'s' * (len(lost) != 1)} {', '.join(lost[:16])}{' and more' * (len(lost) > 16)}"
