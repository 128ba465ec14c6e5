"""The place of this process in a group, and the network interface it talks through.

In: the environment, a bundle's hosts. Out: a ProcessPlace, an Interface, and errors for what does not fit.

    torchrun   RANK WORLD_SIZE MASTER_ADDR MASTER_PORT, and LOCAL_RANK; anything else that sets these four will do
    srun       SLURM_PROCID SLURM_NTASKS, and where the group meets: MASTER_ADDR, else the first of SLURM_STEP_NODELIST,
               SLURM_JOB_NODELIST or SLURM_NODELIST; MASTER_PORT, else a port that follows from SLURM_JOB_ID

The interface is the one that GLOO_SOCKET_IFNAME names, else that of the rank's host in the bundle's cluster file.
Without these it is the one through which the meeting point is reached. A rank listens on that interface alone.

Limits: IPv4; interfaces are asked of Linux.
"""

from __future__ import annotations

import array
import fcntl
import ipaddress
import os
import re
import socket
import struct
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import msgspec

from penstock.backends.bundle.format import Bundle, RankEntry
from penstock.support.errors import UsageError
from penstock.support.words import counted, itemised

INTERFACE_VARIABLE = "GLOO_SOCKET_IFNAME"
_GROUP = ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT")
# Ports for jobs of Slurm that name none: above the services, below those that systems give out.
_FIRST_PORT, _PORTS = 20000, 10000
_GET_ADDRESS = 0x8915  # SIOCGIFADDR


@dataclass(frozen=True)
class ProcessPlace:
    """One process of a group. `served` says that the launcher itself keeps the store where the group meets."""

    rank: int
    world: int
    local_rank: int
    address: str
    port: int
    host: str
    launcher: str
    served: bool = False


@dataclass(frozen=True)
class Interface:
    """A network interface. `why` is for people: how it was chosen."""

    name: str
    address: str
    why: str


class Present(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """A rank's description of itself for the other ranks when the group meets. `watch` is the port of its keeper."""

    host: str
    address: str
    interface: str
    process: int
    watch: int = 0


# ------------------------------------------------------------------------------------------------ the place


def in_group(environment: Mapping[str, str] = os.environ) -> bool:
    """Return whether a launcher started this process as one of several."""
    return ("RANK" in environment and "WORLD_SIZE" in environment) or _under_srun(environment)


def _under_srun(environment: Mapping[str, str]) -> bool:
    # A batch script has the variables of its tasks, too, but is none of them: only steps have a number.
    batch = "SLURM_JOB_ID" in environment and "SLURM_STEP_ID" not in environment
    return "SLURM_PROCID" in environment and _slurm_tasks(environment) not in ("", "1") and not batch


def _slurm_tasks(environment: Mapping[str, str]) -> str:
    return environment.get("SLURM_STEP_NUM_TASKS") or environment.get("SLURM_NTASKS") or ""


def place_of(environment: Mapping[str, str] = os.environ) -> ProcessPlace:
    """Return the place that the launcher gave this process; all that is missing or wrong is one error."""
    if "RANK" in environment and "WORLD_SIZE" in environment:
        variables = {name: environment.get(name, "") for name in _GROUP}
        launcher = "torchrun" if "TORCHELASTIC_RUN_ID" in environment else "the environment"
        local, host = environment.get("LOCAL_RANK", "0"), socket.gethostname()
        hint = "start it with torchrun, or set all four"
    else:
        nodes = next(
            (
                environment[n]
                for n in ("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST", "SLURM_NODELIST")
                if environment.get(n)
            ),
            "",
        )
        first = environment.get("MASTER_ADDR") or (expand_nodes(nodes)[:1] or [""])[0]
        job = environment.get("SLURM_JOB_ID", "")
        port = environment.get("MASTER_PORT") or (str(_FIRST_PORT + int(job) % _PORTS) if job.isdecimal() else "")
        values = (environment["SLURM_PROCID"], _slurm_tasks(environment), first, port)
        variables = dict(zip(_GROUP, values, strict=True))
        launcher, local = "srun", environment.get("SLURM_LOCALID", "0")
        host = environment.get("SLURMD_NODENAME") or socket.gethostname()
        hint = "SLURM_NODELIST and SLURM_JOB_ID say where the group meets, else MASTER_ADDR and MASTER_PORT have to"
    problems = [f"{name} is not set" for name, text in variables.items() if not text]
    numbers = {
        name: text for name, text in {**variables, "LOCAL_RANK": local}.items() if name != "MASTER_ADDR" and text
    }
    problems += [
        f"{name} is {text[:40]!r}, expected a number"
        for name, text in numbers.items()
        if not re.fullmatch("[0-9]{1,18}", text)
    ]
    rank, world, port_number = (
        (0, 1, 1) if problems else (int(variables[name]) for name in ("RANK", "WORLD_SIZE", "MASTER_PORT"))
    )
    if not problems:
        if rank >= world:
            problems.append(f"RANK is {rank}, but WORLD_SIZE is {world}")
        if not 0 < port_number < 2**16:
            problems.append(f"MASTER_PORT is {port_number}, expected 1 to 65535")
    if problems:
        raise UsageError(
            f"{launcher} started this process as one of a group, but: {'; '.join(problems)}",
            where="environment",
            hint=hint,
        )
    served = environment.get("TORCHELASTIC_USE_AGENT_STORE") == "True"
    return ProcessPlace(rank, world, int(local), variables["MASTER_ADDR"], port_number, host, launcher, served)


def expand_nodes(text: str) -> list[str]:
    """Return the nodes of a Slurm list: `a[1-2,07],b` -> a1 a2 a07 b."""
    nodes = []
    for item in re.findall(r"[^,\[\]]*(?:\[[^\]]*\][^,\[\]]*)*", text):
        parts = re.split(r"\[([^\]]*)\]", item)
        names = [parts[0]]
        for ranges, suffix in zip(parts[1::2], parts[2::2], strict=True):
            names = [name + number + suffix for name in names for number in _numbers(ranges)]
        nodes += [name for name in names if name]
    return nodes


def _numbers(ranges: str) -> list[str]:
    numbers = []
    for part in ranges.split(","):
        first, _, last = part.partition("-")
        if not (first.isdecimal() and (last or first).isdecimal()):
            raise UsageError(f"cannot read the list of nodes: {part!r}", where="environment", hint="set MASTER_ADDR")
        numbers += [str(number).zfill(len(first)) for number in range(int(first), int(last or first) + 1)]
    return numbers


# ------------------------------------------------------------------------------------------------ the interface


def interfaces() -> dict[str, str]:
    """Return the interfaces of this machine that have an IPv4 address."""
    addresses = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        for _, name in socket.if_nameindex():
            request = array.array("B", struct.pack("256s", name.encode()))
            try:
                fcntl.ioctl(probe.fileno(), _GET_ADDRESS, request)
            except OSError:
                continue  # it has none
            addresses[name] = socket.inet_ntoa(request.tobytes()[20:24])
    return addresses


def choose_interface(place: ProcessPlace, planned: str = "", environment: Mapping[str, str] = os.environ) -> Interface:
    """Choose where this rank talks to the other ranks. `planned` is the interface of its host in the bundle's
    cluster."""
    present = interfaces()
    listed = ", ".join(f"{name} ({address})" for name, address in present.items()) or "none"
    wanted = environment.get(INTERFACE_VARIABLE, "").split(",")[0]
    for name, why in ((wanted, f"by {INTERFACE_VARIABLE}"), (planned, "by the cluster file")):
        if name and name not in present:
            what = f"interface {name}, chosen {why}, is not on this host or has no IPv4 address; there are: {listed}"
            raise UsageError(
                what, where=f"rank {place.rank} on {place.host}", hint=f"set {INTERFACE_VARIABLE} to one of these"
            )
        if name:
            return Interface(name, present[name], why)
    address, why = _way_to(place)
    name = next((name for name, local in present.items() if local == address), "")
    # The whole of 127.0.0.0/8 is this machine.
    name = name or next((name for name, local in present.items() if _is_loopback(address) and _is_loopback(local)), "")
    if not name:
        what = f"no interface has the address {address} through which {place.address} is reached; there are: {listed}"
        raise UsageError(
            what, where=f"rank {place.rank} on {place.host}", hint=f"set {INTERFACE_VARIABLE} to one of these"
        )
    return Interface(name, present[name], why)


def _way_to(place: ProcessPlace) -> tuple[str, str]:
    """Return our own address on the way to the meeting point."""
    target = resolve(place.address, place)
    if _is_loopback(target) and place.address not in ("localhost", target):
        # Some systems give their own name an address on loopback, which is of no use to other hosts.
        others = [address for address in interfaces().values() if not _is_loopback(address)]
        if len(others) == 1:
            return others[0], "the only one to other hosts"
        if others:
            what = f"{place.address} is {target} here, and there are several interfaces to other hosts"
            raise UsageError(what, where=f"rank {place.rank} on {place.host}", hint=f"set {INTERFACE_VARIABLE}")
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((target, place.port))  # sends nothing
        except OSError as error:
            what = f"there is no way to {place.address}, where the group meets: {error.strerror or error}"
            raise UsageError(what, where=f"rank {place.rank} on {place.host}", hint="see MASTER_ADDR") from error
        return str(probe.getsockname()[0]), f"on the way to {place.address}"


def resolve(address: str, place: ProcessPlace) -> str:
    """Return the IPv4 address of a name."""
    try:
        return str(socket.getaddrinfo(address, place.port, socket.AF_INET, socket.SOCK_STREAM)[0][4][0])
    except OSError as error:
        what = f"{address}, where the group meets, has no IPv4 address: {error.strerror or error}"
        raise UsageError(what, where=f"rank {place.rank} on {place.host}", hint="see MASTER_ADDR") from error


def _is_loopback(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


# ------------------------------------------------------------------------------------------------ the bundle's hosts


def check_world(path: str, ranks: Sequence[RankEntry], place: ProcessPlace, elastic: bool = False) -> None:
    """Refuse another number of processes than there are ranks in the bundle at `path`; fewer are well where it may be
    planned anew."""
    if len(ranks) == place.world or (elastic and place.world < len(ranks)):
        return
    listed = itemised(f"rank {r.rank}: stage {r.stage} on {r.device} of host {r.host}" for r in ranks[:16])
    more = f"\n  - and {len(ranks) - 16} more" if len(ranks) > 16 else ""
    raise UsageError(
        f"the bundle is for {len(ranks)} ranks, {place.world} were started by {place.launcher}:{listed}{more}",
        where=path,
        hint=f"start {len(ranks)} processes, one for each"
        + ("; or fewer with --elastic, which plans anew" if place.world < len(ranks) else ""),
    )


def check_hosts(bundle: Bundle, present: Sequence[Present]) -> list[str]:
    """Refuse ranks on hosts that the bundle has for other ranks, as far as names tell. Return what is odd and may be
    meant."""
    planned = [_short(entry.host) for entry in bundle.manifest.ranks]
    started = [_short(member.host) for member in present]
    wrong = [
        rank
        for rank, name in enumerate(started)
        if name != planned[rank] and (name in planned or planned[rank] in started)
    ]
    if wrong:
        listed = itemised(f"rank {r}: the bundle has it on {planned[r]}, it was started on {started[r]}" for r in wrong)
        order = list(dict.fromkeys(planned))
        hint = (
            f"start the hosts in the order {', '.join(order)} (torchrun --node-rank without --rdzv-backend; srun "
            "--nodelist with "
            "--distribution=block)"
        )
        raise UsageError(
            f"ranks are on hosts that the bundle has for others:{listed}", where=str(bundle.path), hint=hint
        )
    machines = [(member.host, member.address) for member in present]
    if [planned.index(name) for name in planned] != [machines.index(machine) for machine in machines]:
        planned_for, started_on = (counted(len(set(hosts)), "host") for hosts in (planned, machines))
        return [
            f"the bundle was planned for {planned_for}, the ranks are on {started_on}: times will be other than planned"
        ]
    return []


def describe_hosts(present: Sequence[Present]) -> str:
    """Describe in one line which rank is on which host."""
    ranks: dict[tuple[str, str, str], list[str]] = {}
    for rank, member in enumerate(present):
        ranks.setdefault((member.host, member.interface, member.address), []).append(str(rank))
    listed = "; ".join(
        f"{host} {interface} {address}: {' '.join(of)}" for (host, interface, address), of in ranks.items()
    )
    return f"{len(present)} ranks on {counted(len(ranks), 'host')}: {listed}"


def same_host(a: str, b: str) -> bool:
    """Return whether two names are of one host, with or without a domain behind them."""
    return _short(a) == _short(b)


def _short(name: str) -> str:
    return name.partition(".")[0]
