"""The command simulate: the program of a bundle or IR file, run against modelled times, links, NICs, cores and memory.

Times of computations come from the costs of passes/costs/prices.py, from the table of what was measured on this machine, or are measured now: each
rank of the bundle by itself (src/penstock/calibration/rehearse.py). Messages take the links of the cluster. Ranks on CPU devices of this machine share its
cores; of other hosts a cluster file does not say how many they have.
"""

from __future__ import annotations

import json
import math
from argparse import Namespace
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.inspection.subject import load_module
from penstock.ir.cluster.cluster import Cluster, usable_cores
from penstock.ir.graph import Module, summed_vars
from penstock.ir.memory.predict import Course, measure_memory, memory_course
from penstock.ir.schedule import Action
from penstock.passes.costs.prices import rank_seconds, shown_seconds
from penstock.passes.simulator.machine import Route, Seat, machine_of, with_messages
from penstock.passes.simulator.result import Simulated
from penstock.passes.simulator.simulate import Seconds, simulate
from penstock.support.errors import UsageError
from penstock.support.terminal import say, table
from penstock.support.words import counted, shown_bytes

LOCAL = "localhost"
# Batches that predictions simulate: enough for a steady state, also where unequal replicas and late updates take some to come to it.
BATCHES = 6


@dataclass(frozen=True)
class Forecast:
    """A simulated module. `drained` is the time of one batch from an empty pipeline to an empty pipeline."""

    module: Module
    found: Simulated
    devices: Mapping[int, str]
    drained: float

    @property
    def step(self) -> float:
        """Seconds of a batch in a long run."""
        return self.found.step_seconds or self.drained

    @property
    def samples(self) -> int:
        """Of one batch."""
        from penstock.ir.batch_shares import microbatch_size

        return microbatch_size(self.module) * self.found.schedule.microbatches

    def curves(self) -> dict[int, list[tuple[float, float]]]:
        """Live bytes of every rank over time."""
        found = {}
        for rank, row in measure_memory(self.module).items():
            always, line = (
                row.fixed + row.data,
                zip(self.found.lines[rank].finishes, self.courses[rank].held, strict=True),
            )
            found[rank] = [(time, float(always + saved + passing)) for time, (saved, passing, _) in line]
        return found

    @cached_property
    def courses(self) -> dict[int, Course]:
        """What the memory of every rank holds, action by action."""
        return {rank: memory_course(self.module, rank, self.found.batches) for rank in self.found.lines}


def _waits_for_others(module: Module) -> bool:
    """Whether a stage takes values that are no data: stages may also have nothing to do with each other."""
    graphs = [graph for stage in module.stages if (graph := module.stage_graph(stage.index, "F")) is not None]
    return len(module.stages) > 1 and any(value not in module.inputs for graph in graphs for value in graph.ins)


def forecast(
    module: Module, seconds: Seconds, batches: int, change: Callable[[Route], Route] = lambda route: route
) -> Forecast:
    """Simulate a module on its cluster; `change` stands in for other links."""
    schedule, cluster = module.schedule, module.cluster
    if schedule is None or (not module.edges and _waits_for_others(module)):
        raise UsageError(
            "has no schedule with sends and receives",
            where=f"@{module.name}",
            hint="simulate needs a bundle, or a dump after `communicate`",
        )
    if cluster is None:
        raise UsageError(
            "names no devices", where=f"@{module.name}", hint="simulate needs a bundle, or a dump after `partition`"
        )
    devices = dict(enumerate(module.rank_devices()))
    sizes = {(e.phase, e.src, e.dst): sum(v.type.nbytes for v in e.values) for e in module.edges}
    summed = {
        s.index: sum(module.vars[name].type.nbytes for name in summed_vars(module, s.index)) for s in module.stages
    }
    seats = {rank: seat for rank, name in devices.items() if (seat := seat_of(cluster, name)) is not None}
    plain = machine_of(cluster, devices, seats)
    machine = replace(plain, route=lambda a, b: change(plain.route(a, b)))

    def run(count: int) -> Simulated:
        return simulate(
            schedule,
            count,
            seconds,
            lambda phase, a, b: sizes[phase, a, b],
            machine,
            reduced=lambda stage: summed[stage],
        )

    return Forecast(module, run(batches), devices, run(1).finish)


def seat_of(cluster: Cluster, name: str) -> Seat | None:
    """CPU devices take cores of their host, for messages, too; a GPU has itself, and its host's part in messages is not modelled."""
    device = cluster.device(name)
    if device.kind != "cpu":
        return None
    return with_messages(
        Seat(device.host, usable_cores() if device.host == LOCAL else math.inf, device.threads), device
    )


def times_of(module: Module, source: Path, costs: str) -> Seconds:
    """How long actions take: `analytic`, passes/costs/prices.py with the rates of the cluster; `table`, what was measured on this machine before,
    where it was; `measured`, every rank of a bundle now, one after another, which also goes into the table."""
    return seconds_of(module, _computations(module, source, costs))


def seconds_of(module: Module, computations: Mapping[tuple[int, str], float]) -> Seconds:
    """Times of all actions, from those of computations by rank and kind; ends of messages take what the devices of the ranks say."""
    cluster, devices = module.cluster, module.rank_devices()

    def seconds(rank: int, action: Action) -> float:
        if cluster is not None and action.peer is not None:
            return cluster.message_overhead(devices[rank], devices[action.peer])
        return computations.get((rank, action.kind), 0.0)

    return seconds


def _computations(module: Module, source: Path, costs: str) -> dict[tuple[int, str], float]:
    if costs == "measured":
        from penstock.backends.bundle.format import Bundle, open_bundle
        from penstock.calibration.measured import profile
        from penstock.calibration.rehearse import rehearse

        def told(bundle: Bundle, ranks: list[int]) -> list[dict[str, float]]:
            for rank in ranks:
                say(f"measuring rank {rank} of {bundle.world_size} by itself, threads: {bundle.rank(rank).threads}")
            return rehearse(bundle, ranks)

        return profile(open_bundle(source), told, anew=True)
    if costs == "table":
        from penstock.backends.bundle.format import open_bundle
        from penstock.calibration.measured import Measured, stage_times

        backend = open_bundle(source).manifest.backend if source.is_dir() else "tvm"
        found, estimates = stage_times(module, Measured(backend))
        if estimates:
            say(f"{estimates} of {len(found)} times are not in the table and are estimated")
        return found
    return rank_seconds(module)


# ------------------------------------------------------------------------------------------------ the command


def simulate_command(arguments: Namespace) -> None:
    module = load_module(arguments.file)
    if arguments.cluster:
        module = module.but(cluster=_other_cluster(module, Cluster.load(arguments.cluster)))
    if arguments.costs == "measured" and not Path(arguments.file).is_dir():
        raise UsageError(
            "only a bundle can be measured", where=arguments.file, hint="compile it, or use --costs analytic"
        )
    if arguments.bandwidth is not None and not (math.isfinite(arguments.bandwidth) and arguments.bandwidth > 0):
        raise UsageError(f"--bandwidth must be a positive number, got {arguments.bandwidth:g}")
    if arguments.latency is not None and not (math.isfinite(arguments.latency) and arguments.latency >= 0):
        raise UsageError(f"--latency must be a number of 0 or more, got {arguments.latency:g}")

    def change(route: Route) -> Route:
        speed, latency = arguments.bandwidth, arguments.latency
        shares = route.shares if speed is None else tuple((name, speed) for name, _ in route.shares)
        return Route(shares, route.latency if latency is None else latency)

    if module.schedule is None:
        raise UsageError(
            "has no schedule", where=arguments.file, hint="simulate needs a bundle, or a dump after `communicate`"
        )
    made = forecast(module, times_of(module, Path(arguments.file), arguments.costs), arguments.batches, change)
    if arguments.gantt:
        from penstock.inspection.views.gantt import svg_gantt

        Path(arguments.gantt).write_text(
            svg_gantt(made.found, f"{module.name}, {module.schedule.name}", made.curves()), encoding="utf-8"
        )
        say(f"wrote {arguments.gantt}")
    if arguments.trace:
        from penstock.runtime.telemetry.trace import write_trace

        write_trace(
            Path(arguments.trace),
            [[(str(a), start, end) for a, start, end in made.found.timed(rank)] for rank in made.found.lines],
        )
        say(f"wrote {arguments.trace}")
    if arguments.json:
        print(json.dumps(as_dict(made), indent=2))
    else:
        print_forecast(made)


def _other_cluster(module: Module, cluster: Cluster) -> Cluster:
    known = {device.name for device in cluster.devices}
    missing = sorted({*module.rank_devices()} - known)
    if missing:
        raise UsageError(
            f"the cluster has no device {', '.join(missing)}, on which stages are",
            hint=f"it has {', '.join(sorted(known))}",
        )
    return cluster


def as_dict(made: Forecast) -> dict[str, Any]:
    """All that the table says, in seconds and bytes."""
    found, memory = made.found, measure_memory(made.module)
    start, end, count = found.window
    return {
        "module": made.module.name,
        "schedule": found.schedule.name,
        "batches": found.batches,
        "step_s": found.step_seconds,
        "drained_s": made.drained,
        "finish_s": found.finish,
        "samples_per_s": made.samples / found.step_seconds if found.step_seconds else None,
        "window": {"from_s": start, "to_s": end, "batches": count},
        "ranks": [
            {**use._asdict(), "device": made.devices[use.rank], "peak_bytes": memory[use.rank].peak}
            for use in found.ranks
        ],
        "links": [
            {
                "name": use.name,
                "bandwidth": use.bandwidth,
                "bytes": use.nbytes,
                "busy_s": use.busy,
                "busy": _share(use.busy, found.finish),
            }
            for use in found.links
        ],
        "critical_path": found.critical_path,
        "bound_by": binding(made),
    }


def _share(part: float, whole: float) -> float:
    return part / whole if whole else 0.0


def binding(made: Forecast) -> str:
    """What a faster one of would help: a rank or a link that is busy nearly all the time, else the largest part of the critical path."""
    found = made.found
    start, end, _ = found.window
    rank = max(found.ranks, key=lambda use: use.busy, default=None)
    link = max(found.links, key=lambda use: use.busy, default=None)
    busy = _share(rank.busy, end - start) if rank is not None else 0.0
    moving = _share(link.busy, found.finish) if link is not None else 0.0
    if link is not None and moving >= 0.9 and moving > busy:
        return f"link {link.name}: busy {moving:.0%} of the time"
    if rank is not None and busy >= 0.9:
        return f"rank {rank.rank} (stage {rank.stage} on {made.devices[rank.rank]}): busy {busy:.0%} of the time"
    path = found.critical_path
    computing = _share(sum(s for what, s in path.items() if what.startswith("computing")), sum(path.values()))
    told = f"nobody is busy all the time (at most {busy:.0%}): the critical path is {computing:.0%} computing"
    if computing < 1:
        worst = next(what for what in path if not what.startswith("computing"))
        told += f", then {worst} with {_share(path[worst], sum(path.values())):.0%}"
    return told


def print_forecast(made: Forecast) -> None:
    from penstock.inspection.views.gantt import text_gantt

    found, memory = made.found, measure_memory(made.module)
    schedule = found.schedule
    print(
        f"{made.module.name}: schedule {schedule.name}, {counted(schedule.microbatches, 'microbatch')} per batch, "
        f"{counted(found.batches, 'batch')} simulated"
    )
    step = found.step_seconds
    rows = [
        [
            u.rank,
            u.stage,
            made.devices[u.rank],
            *(f"{_share(s, u.busy + u.waiting + u.idle):.1%}" for s in (u.busy, u.waiting, u.idle)),
            shown_bytes(memory[u.rank].peak),
        ]
        for u in found.ranks
    ]
    print(table(["rank", "stage", "device", "busy", "waiting", "idle", "peak memory"], rows))
    if found.links:
        links = [
            [u.name, f"{u.nbytes / found.batches / 1e6:.3f}", f"{_share(u.busy, found.finish):.1%}"]
            for u in found.links
        ]
        print(table(["link", "MB per batch", "busy"], links))
    print(
        text_gantt(found, until=found.ends[min(1, found.batches - 1)])
        if len(found.lines) <= 64
        else f"{len(found.lines)} ranks: --gantt draws them"
    )
    print(
        f"one batch takes {shown_seconds(step)} in steady state, {shown_seconds(made.drained)} by itself; {made.samples / step:.1f} "
        "samples/s"
        if step
        else "takes no time"
    )
    print(f"bound by: {binding(made)}")
    total = sum(found.critical_path.values())
    parts = [f"{what} {_share(spent, total):.0%}" for what, spent in list(found.critical_path.items())[:5]]
    print(f"critical path: {', '.join(parts)}")
