"""The forecast of a module: its program run against modelled times, links, NICs, cores and memory.

In: a module with a schedule, and the seconds of its computations. Messages take the links of the cluster. Out: a
`Forecast`: the simulated run, the seconds of a step, and what limits it. Ranks on CPU devices of this machine share its
cores; of other hosts a cluster file does not say how many they have.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property

from penstock.ir.batch_shares import microbatch_size
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.collective_calls import kept_parts, meeting_ranks
from penstock.ir.graph import Module, Value, summed_vars
from penstock.ir.memory.predict import Course, memory_course
from penstock.ir.memory.update_parts import share_of_update
from penstock.ir.messages import parcels
from penstock.ir.schedule import Action
from penstock.ir.sharding.tile_messages import tile_messages
from penstock.passes.costs.prices import timed_kind
from penstock.support.errors import UsageError
from penstock.support.hardware import usable_cores
from penstock.support.words import numbered

from .copies import copies_of
from .exchanges import exchange_seconds
from .machine import Route, Seat, machine_of, with_messages
from .result import Simulated
from .simulate import Seconds, simulate

LOCAL = "localhost"
# Batches that predictions simulate: enough for a steady state, also where unequal replicas and late updates take some
# to come to it.
BATCHES = 6


@dataclass(frozen=True)
class Forecast:
    """A simulated module. `drained` is the time of one batch from an empty pipeline to an empty pipeline."""

    module: Module
    simulated: Simulated
    devices: Mapping[int, str]
    drained: float

    @property
    def step(self) -> float:
        """Seconds of a batch in a long run."""
        return self.simulated.step_seconds or self.drained

    @property
    def samples(self) -> int:
        """The samples of one batch."""
        return microbatch_size(self.module) * self.simulated.schedule.microbatches

    def curves(self) -> dict[int, list[tuple[float, float]]]:
        """Return the live bytes of every rank over time."""
        points = {}
        for rank, course in self.courses.items():
            line = zip(self.simulated.lines[rank].finishes, course.held, course.always, strict=True)
            points[rank] = [(time, float(always + saved + passing)) for time, (saved, passing, _), always in line]
        return points

    @cached_property
    def courses(self) -> dict[int, Course]:
        """Return the memory that every rank holds, action by action."""
        return {rank: memory_course(self.module, rank, self.simulated.batches) for rank in self.simulated.lines}


def _waits_for_others(module: Module) -> bool:
    """Return whether a stage takes values that are no data: stages may also have nothing to do with each other."""
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
    sizes = {
        (e.phase, e.src, e.dst): sum(v.type.nbytes for v in module.local_values(e.values, e.src)) for e in module.edges
    }
    # Where ranks keep parts, a ring goes round once instead of twice.
    summed = {
        s.index: sum(module.local_type(module.vars[n].type, s.index).nbytes for n in summed_vars(module, s.index))
        - sum(call.op.ins[0].type.nbytes for call in kept_parts(module, s.index)) // 2
        for s in module.stages
    }
    seats = {rank: seat for rank, name in devices.items() if (seat := seat_of(cluster, name)) is not None}
    plain = machine_of(cluster, devices, seats)
    machine = replace(plain, route=lambda a, b: change(plain.route(a, b)))

    exchanges = exchange_seconds(module, machine.route)
    tiles = {
        (phase, sender, taker, src, dst): _parcelled(values)
        for (src, dst, phase), sender, taker, values in tile_messages(module).messages()
    }
    machine = replace(
        machine,
        together=meeting_ranks(module),
        exchanged=lambda rank, action: exchanges.get((rank, timed_kind(module, action.stage, action.kind)), 0.0),
        copied=copies_of(module),
        tiles=tiles,
    )

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
    """Return the seat of a device. CPU devices take cores of their host, for messages, too. A GPU needs no seat; its
    host's part in messages is not modelled."""
    device = cluster.device(name)
    if device.kind != "cpu":
        return None
    cores = usable_cores() if device.host == LOCAL else math.inf
    return with_messages(Seat(device.host, cores, device.threads, device.quota, device.quota_period), device)


def seconds_of(module: Module, computations: Mapping[tuple[int, str], float]) -> Seconds:
    """Return the times of all actions, from those of computations by rank and kind. Ends of messages take the times of
    the ranks' devices."""
    cluster, devices = module.cluster, module.rank_devices()

    def seconds(rank: int, action: Action) -> float:
        if cluster is not None and action.peer is not None:
            return cluster.message_overhead(devices[rank], devices[action.peer])
        kind = timed_kind(module, action.stage, action.kind)
        return computations.get((rank, kind), 0.0) * share_of_update(module, action)

    return seconds


def share_of(part: float, total: float) -> float:
    """Divide, where there is something to divide by."""
    return part / total if total else 0.0


def binding(forecast: Forecast) -> str:
    """Name what limits the pace: a rank or a link that is busy nearly all the time, else the largest part of the
    critical path."""
    run = forecast.simulated
    start, end, _ = run.window
    rank = max(run.ranks, key=lambda use: use.busy, default=None)
    link = max(run.links, key=lambda use: use.busy, default=None)
    busy = share_of(rank.busy, end - start) if rank is not None else 0.0
    moving = share_of(link.busy, run.finish) if link is not None else 0.0
    if link is not None and moving >= 0.9 and moving > busy:
        return f"link {link.name}: busy {moving:.0%} of the time"
    if rank is not None and busy >= 0.9:
        stages = numbered("stage", forecast.module.rank_packs()[rank.rank])
        return f"rank {rank.rank} ({stages} on {forecast.devices[rank.rank]}): busy {busy:.0%} of the time"
    path = run.critical_path
    computing = share_of(sum(s for what, s in path.items() if what.startswith("computing")), sum(path.values()))
    text = f"nobody is busy all the time (at most {busy:.0%}): the critical path is {computing:.0%} computing"
    if computing < 1:
        worst = next(what for what in path if not what.startswith("computing"))
        text += f", then {worst} with {share_of(path[worst], sum(path.values())):.0%}"
    return text


def _parcelled(values: Sequence[Value]) -> tuple[float, float]:
    """Return the bytes of values that travel together, and those of the largest message that they are."""
    whole = float(sum(value.type.nbytes for value in values))
    return whole, min(whole, float(max((message.nbytes for message in parcels(values)), default=0)))
