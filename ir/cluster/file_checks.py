"""Checks of what the tables of a cluster file say of each other.

In: devices, hosts, links, spaces and ways, each read from its table. Out: problems in plain words.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from .device import Device, quota_problem
from .links import Host, Link
from .spaces import FILE, SPACE_KINDS, Space, SpaceWay


def name_problems(hosts: Sequence[Host], devices: Sequence[Device], links: Sequence[Link]) -> Iterator[str]:
    """List names that stand twice or are not there, devices that are no GPU of their own, and links between these."""
    names = {d.name for d in devices}
    for what, listed in (("device", [d.name for d in devices]), ("host", [h.name for h in hosts])):
        yield from (f"{what} {n!r} is listed twice" for n in sorted({n for n in listed if n and listed.count(n) > 1}))
    known = {h.name for h in hosts}
    for device in devices:
        if known and device.host not in known:
            yield f"device {device.name!r}: no host {device.host!r}, there are {', '.join(sorted(known))}"
    yield from _gpu_problems(devices)
    pairs: set[frozenset[str]] = set()
    for i, link in enumerate(links):
        pair = frozenset((link.a, link.b))
        missing = [end for end in (link.a, link.b) if end and end not in names]
        yield from (f"link {i}: no device {end!r}" for end in dict.fromkeys(missing))
        if link.a and link.a == link.b:
            yield f"link {i}: {link.a!r} is linked to itself"
        elif link.a and link.b and pair in pairs:
            yield f"link {i}: {link.a!r} and {link.b!r} are linked twice"
        pairs.add(pair)
    if not devices:
        yield "there is no [[device]]"


def space_problems(spaces: Sequence[Space], hosts: Sequence[Host]) -> Iterator[str]:
    """List spaces of unknown kinds and hosts, and two of one name on a host."""
    known, seen = {h.name for h in hosts}, set[tuple[str, str]]()
    for space in spaces:
        where = f"space {space.name!r}"
        if space.kind not in SPACE_KINDS:
            yield f"{where}: kind must be one of {', '.join(SPACE_KINDS)}, got {space.kind!r}"
        elif space.kind == FILE and not space.bandwidth:
            yield f"{where}: bandwidth must be positive"
        elif space.kind != FILE and space.path:
            yield f"{where}: a path is for files, and this is memory of the host"
        if known and space.host and space.host not in known:
            yield f"{where}: no host {space.host!r}, there are {', '.join(sorted(known))}"
        if (space.name, space.host) in seen:
            yield f"{where} is listed twice"
        seen.add((space.name, space.host))


def way_problems(ways: Sequence[SpaceWay], devices: Sequence[Device], spaces: Sequence[Space]) -> Iterator[str]:
    """List ways between what is not there, or has no way."""
    hosts, seen = {device.name: device for device in devices}, set[tuple[str, str]]()
    for i, way in enumerate(ways):
        where, device = f"way {i}", hosts.get(way.device)
        reached = [s for s in spaces if s.name == way.space and device and s.host in ("", device.host)]
        if device is None and way.device:
            yield f"{where}: no device {way.device!r}"
        elif device is not None and way.space and not reached:
            yield f"{where}: no space {way.space!r} on the host of {way.device!r}"
        elif (
            device is not None and reached and all(SPACE_KINDS.get(s.kind, device.kind) != device.kind for s in reached)
        ):
            yield f"{where}: {way.device!r} has no use for a space of kind {reached[0].kind!r}"
        if way.device and way.space and (way.device, way.space) in seen:
            yield f"{where}: {way.device!r} and {way.space!r} have two ways"
        seen.add((way.device, way.space))


def _gpu_problems(devices: Sequence[Device]) -> Iterator[str]:
    """List devices that are one GPU without saying so, and processors that name one."""
    for device in devices:
        if device.kind == "cpu" and device.gpu:
            yield f"device {device.name!r}: gpu is for cuda devices"
        if problem := quota_problem(device.kind, device.quota, device.quota_period):
            yield f"device {device.name!r}: {problem}"
    homes: dict[tuple[str, str], list[Device]] = {}
    for device in devices:
        if device.kind == "cuda":
            homes.setdefault((device.host, device.gpu_on_host), []).append(device)
    for (host, gpu), together in homes.items():
        if len(together) > 1 and not all(device.gpu for device in together):
            names = ", ".join(device.name for device in together)
            yield f"{names} are all GPU {gpu} of {host} by their names: each needs gpu = ..."
