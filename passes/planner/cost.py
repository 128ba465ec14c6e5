"""The cost model: seconds per batch and bytes per device of a plan. Every planner here minimises these formulas.

Notation: m microbatches per batch, of b samples. Stage s lies on r_s replicas; replica j runs n_j of the m. t_j are the
seconds of a microbatch there, U_j those of an update. t_j = forward + backward (+ forward again) + calls of graphs +
ends of messages (their bytes, too, on a CPU). E_s devices run earlier stages. c_s is the round trip of a message over
the boundary behind stage s: latency + bytes / bandwidth, forward and back, on the slowest path between the two stages.
Stages with equally many, equal replicas send from the j-th to the j-th, other stages from each to each; those that go
through one NIC at once share it. A_s is the all-reduce of the stage's gradients, a ring over its replicas in the plan's
order: 2(r-1) steps of latency + part / bandwidth of the slowest link, where a NIC is shared by the steps that use it.

    warm-up      w_s = ceil((w' + 1) r' / r_s) forwards before the first backward of a replica, w' and r' being those of
                 the stage behind; 0 on the last stage, so d-1-s without replicas; eager-2bw: twice that
    in flight    1f1b min(n_j, w_s + 1)    2bw, eager-2bw w_s + 1    gpipe n_j
                 zb-1f1b min(n_j, w_s + 1 + ceil(E_s / r_s))
    legal        every n_j >= 1; 2bw, eager-2bw: n_j >= w_s; zb-1f1b: n_j >= w_s + 1 (m >= d without replicas)

2bw, eager-2bw, which never drain; x_s = max_j n_j t_j + max_j U_j:

    step = max over  x_s,  A_s,  m l_s,
           and for all stages p <= q   (sum_{p..q} r_s x_s + m sum_{p..q-1} c_s) / (r_p + k sum_{p+1..q} r_s)

where k is 1 for 2bw, 2 for eager-2bw, and l_s the seconds of a microbatch on the busiest link or NIC of the boundary.
The last term is the mean round trip that a schedule with so many forwards in hand waits for: without latency it is
never more than the slowest stage.

1f1b, gpipe, zb-1f1b, which fill and drain; a_s = A_s + max_j U_j:

    step = sum_s (max_j t_j + c_s)
           + max over s of  max_j (n_j - 1) t_j + (ceil(m / r_s) - 1) c_s + a_s  and  (m - 1) l_s

gpipe's messages overlap: no c_s inside the maximum. zb-1f1b: max_j max(t_j - 2 g_j, 0) in the sum, and 2 max_j g_j more
in the maximum, with g_j the seconds of weight gradients. The schedule forward, for inference,
is gpipe without backwards and updates: with m = 1 its step is the time of one microbatch from input to output.

The simulator agrees with these formulas for 2bw and eager-2bw, and for 1f1b where stages are equal and messages take no
time; otherwise they are a little high for 1f1b, and within some percent for gpipe and zb-1f1b (docs/planner.md).

Bytes of a replica: parameters * versions + gradients + optimiser state + activations + workspace + transport buffers +
batches that wait (on CPUs; with forward, microbatches) + base. On a GPU CUDA's own memory and workspaces of libraries
come on top, and in place of batches two buffers for inputs and for each direction of a boundary. There are 2 versions
when delayed. Where updates run on other devices, the weights that come are then held beside these, but for replicas,
whose gradients count twice. Sums of gradients on CPUs take up to 4 MiB of gloo. With level 1 of zero they do not, and a
replica has its part of the optimiser state and of the update; bytes between replicas stay the same. It holds two blocks
of each size that its parts of weights have, and in the update a whole weight and a part of it. Where its replicas are
on several hosts it has blocks of what comes from the others, too: for each of these one of each size, and two as large
as its part of all gradients. Gradients count twice when delayed and replicated: those of a batch wait for other
replicas while the next one adds up. Activations are saved * in flight. With recomputation they are inputs * in flight +
saved of one. With recomputation in parts they are (inputs + values over the cuts between parts) * in flight + saved of
the largest part. The cuts are those that take least. Seconds are those of computing all of it again. Buffers are POSTED
receives and one send of every boundary; of small messages the runtime holds up to 1 MiB a channel more.

`step` also holds the sums of the boundaries and rings of different stages on one NIC. For schedules that drain, it
holds the rings of all stages there, one after another, behind the pipeline. `pipe` leaves that out, because a search
over stages cannot see it.

Known limits: microbatches are spread evenly for the load of links; a sum overlaps with computation under 2bw at no
cost, also where its bytes hold up messages on a NIC. With unequal shares a stage in front of a slow replica has more
forwards in hand than is counted here; the passes count what a plan really holds.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, replace
from itertools import pairwise

from penstock.ir.cluster.cluster import Device, Path
from penstock.ir.memory.walk import POSTED
from penstock.passes.schedules.kind import ScheduleKind
from penstock.passes.schedules.schedule import SCHEDULES
from penstock.support.words import counted, exact_bytes

from .chain import Ints, Sums, Table
from .fleet import Fleet, Hop, Ring
from .plan import Bytes, Judged, PipelinePlan, StagePlan


def forwards_ahead(replicas: int, behind: int, ahead: int) -> int:
    """Return the forwards that a replica has in hand, when the stage behind it has `behind` replicas with `ahead`
    forwards each (passes/schedules/dealing.py)."""
    return -(-(ahead + 1) * behind // replicas)


def warm_ups(plan: PipelinePlan) -> list[int]:
    """Return the warm-up of every stage's replicas."""
    counts = [len(stage.devices) for stage in plan.stages]
    forwards = [0]
    for replicas, behind in zip(counts[-2::-1], counts[:0:-1], strict=True):
        forwards.append(forwards_ahead(replicas, behind, forwards[-1]))
    return [SCHEDULES[plan.schedule].warm_up(ahead) for ahead in reversed(forwards)]


# ------------------------------------------------------------------------------------------------ transfers


def hop_of(fleet: Fleet, source: tuple[int, ...], target: tuple[int, ...]) -> Hop:
    """Return the boundary from the replicas of one stage to those of the next."""
    if (source, target) not in fleet.hops:
        fleet.hops[source, target] = _hop(fleet, fleet.kinds(), source, target)
    return fleet.hops[source, target]


def _hop(fleet: Fleet, kinds: Sequence[int], source: Sequence[int], target: Sequence[int]) -> Hop:
    aligned = len(source) == len(target) and len({kinds[i] for i in source}) == len({kinds[i] for i in target}) == 1
    pairs = list(zip(source, target, strict=True)) if aligned else [(a, b) for a in source for b in target]
    part = 1.0 / len(pairs)
    if (alone := fleet.ways_apart(pairs)) is not None:
        # Each pair has links of its own: which pairs these are makes no difference.
        key = frozenset(alone), len(pairs)
        if key not in fleet.apart:
            each = {row for a, b in alone for row in ((part, 0.0, a.bandwidth), (0.0, part, b.bandwidth))}
            trips = {(a.latency, a.bandwidth, b.latency, b.bandwidth) for a, b in alone}
            fleet.apart[key] = Hop(tuple(sorted(trips)), tuple(sorted(each)), ())
        return fleet.apart[key]
    ways = set()
    forward: dict[tuple[str, float], float] = {}
    back: dict[tuple[str, float], float] = {}
    # Replicas keep pace with each other, so all that send over one NIC do it at once.
    senders = _senders(fleet, pairs), _senders(fleet, [(b, a) for a, b in pairs])
    for a, b in pairs:
        outward, homeward = fleet.path(a, b), fleet.path(b, a)
        ways.add((outward.latency, _speed(outward, senders[0]), homeward.latency, _speed(homeward, senders[1])))
        for load, way, name in ((forward, outward, f"link {a}>{b}"), (back, homeward, f"link {b}>{a}")):
            for share in ((name, way.bandwidth), *((f"NIC {nic}", speed) for nic, speed in way.shares)):
                load[share] = load.get(share, 0.0) + part
    loads = [
        (name, forward.get((name, speed), 0.0), back.get((name, speed), 0.0), speed)
        for name, speed in sorted({*forward, *back})
    ]
    busy = tuple(sorted({(outward, homeward, speed) for _, outward, homeward, speed in loads}))
    return Hop(tuple(sorted(ways)), busy, tuple(load for load in loads if load[0].startswith("NIC ")))


def _senders(fleet: Fleet, pairs: Sequence[tuple[int, int]]) -> dict[str, set[int]]:
    """Return the devices that send through each NIC."""
    senders: dict[str, set[int]] = {}
    for a, b in pairs:
        for name, _ in fleet.path(a, b).shares:
            senders.setdefault(name, set()).add(a)
    return senders


def _speed(path: Path, senders: dict[str, set[int]]) -> float:
    return min([path.bandwidth, *(speed / len(senders[name]) for name, speed in path.shares)])


def ring_of(fleet: Fleet, devices: tuple[int, ...]) -> Ring:
    """Return the all-reduce over the replicas of a stage, in this order."""
    if devices not in fleet.rings:
        fleet.rings[devices] = _ring(fleet, devices) if fleet.trains and len(devices) > 1 else Ring()
    return fleet.rings[devices]


def _ring(fleet: Fleet, devices: Sequence[int]) -> Ring:
    count = len(devices)
    used: Counter[tuple[str, float]] = Counter()
    latency = 0.0
    for a, b in pairwise((*devices, devices[0])):
        path = fleet.path(a, b)
        latency = max(latency, path.latency)
        used.update(
            [
                (f"link {a}>{b}", min(path.bandwidth, path.summing)),
                *((f"NIC {nic}", speed) for nic, speed in path.shares),
            ]
        )
    steps = 2 * (count - 1)
    return Ring(
        steps * latency,
        steps / count * max(times / speed for (_, speed), times in used.items()),
        tuple(
            (name, steps / count * times / speed)
            for (name, speed), times in sorted(used.items())
            if name.startswith("NIC ")
        ),
    )


# ------------------------------------------------------------------------------------------------ memory


def fixed_bytes(
    table: Table, first: int, last: int, kind: ScheduleKind, replicas: int, data: int, base: int, zero: int = 0
) -> Bytes:
    """Return the bytes of a replica that do not depend on the microbatches in flight."""

    def part(sums: Ints) -> int:
        return int(sums[last]) - int(sums[first])

    copies = kind.gradient_copies(replicas)
    received = table.out[first] + table.back[last]
    sent = table.out[last] + table.back[first]
    return Bytes(
        weights=part(table.params) * kind.versions,
        gradients=part(table.grads) * copies,
        state=-(-part(table.state) // (replicas if zero else 1)) + part(table.late) * (kind.versions - copies),
        activations=0,
        workspace=int(table.workspace[first, last]),
        buffers=int(POSTED * received + sent),
        data=data,
        base=base,
    )


def base_of(device: Device, base: int) -> int:
    """Return the bytes that the runtime takes on a device; on a GPU those of CUDA and its libraries, too."""
    return base + device.taken


def activation_bytes(table: Table, part: StagePlan, held: int) -> int:
    """Return the activation bytes of a replica for so many microbatches in flight, and for the one that it computes
    again."""
    saved, entry = int(table.saved[part.last] - table.saved[part.first]), int(table.entry[part.first])
    if not part.recompute:
        return held * saved
    if not part.in_parts:
        return held * entry + saved
    at = part.first, part.last
    return min(held * (entry + int(way.kept[at])) + int(way.most[at]) for way in table.parts())


def memory_of(table: Table, fleet: Fleet, plan: PipelinePlan, base: int) -> dict[int, Bytes]:
    """Return the memory of every device of a plan."""
    kind, kinds, memory, earlier = SCHEDULES[plan.schedule], fleet.kinds(), dict[int, Bytes](), 0
    for part, warm in zip(plan.stages, warm_ups(plan), strict=True):
        replicas = len(part.devices)
        # Replicas that are alike and run as many microbatches hold as much.
        alike: dict[tuple[int, int], Bytes] = {}
        for i, share in zip(part.devices, part.shares, strict=True):
            if (kinds[i], share) not in alike:
                device = fleet.devices[i]
                held = kind.in_flight(share, warm, earlier, replicas)
                data = table.data(part.first, part.last, device, plan.size * kind.waiting(plan.count))
                fixed = fixed_bytes(
                    table, part.first, part.last, kind, replicas, data, base_of(device, base), plan.zero
                )
                sums = Sums(replicas, plan.zero > 0, fleet.is_apart(part.devices), device.kind != "cuda")
                kept, workspace = table.exchanged(part.first, part.last, sums)
                alike[kinds[i], share] = replace(
                    fixed,
                    activations=activation_bytes(table, part, held),
                    workspace=int(workspace),
                    data=data + int(kept),
                )
            memory[i] = alike[kinds[i], share]
        earlier += replicas
    return memory


# ------------------------------------------------------------------------------------------------ time


@dataclass(frozen=True, slots=True)
class StageTimes:
    """The seconds of a stage, per replica: of a microbatch, of its weight gradients, of an update.

    `ring` is the all-reduce, `trip` and `load` are those of the boundary behind.
    """

    each: tuple[float, ...]
    weight: tuple[float, ...]
    update: tuple[float, ...]
    ring: float
    trip: float
    load: float


def _device_times(table: Table, device: Device, part: StagePlan, holders: int) -> tuple[float, float, float]:
    """Return the seconds of a stage on a device: of a microbatch, of its weight gradients, of an update that so many
    replicas share out."""
    forward, backward, weight, again, update = (
        float(column[part.last] - column[part.first]) for column in table.times(device)
    )
    calls = table.chain.calls(device)
    overhead = calls.microbatch + float(table.boundaries(calls)[[part.first, part.last]].sum())
    return overhead + forward + backward + (again if part.recompute else 0.0), weight, calls.update + update / holders


def stage_times(table: Table, fleet: Fleet, plan: PipelinePlan, stage: int) -> StageTimes:
    """Return the seconds of a stage of a plan."""
    part, kinds = plan.stages[stage], fleet.kinds()
    holders = len(part.devices) if plan.zero else 1
    alike = {
        kind: _device_times(table, fleet.devices[kind], part, holders) for kind in {kinds[i]: 0 for i in part.devices}
    }
    each, weight, update = zip(*(alike[kinds[i]] for i in part.devices), strict=True)
    ring = ring_of(fleet, part.devices)
    trip = load = 0.0
    if stage + 1 < len(plan.stages):
        hop = hop_of(fleet, part.devices, plan.stages[stage + 1].devices)
        out, back = float(table.out[part.last]), float(table.back[part.last])
        trip, load = hop.round_trip(out, back), hop.load(out, back)
    return StageTimes(
        each,
        weight,
        update,
        ring.fixed + ring.each * float(table.grads[part.last] - table.grads[part.first])
        if len(part.devices) > 1
        else 0.0,
        trip,
        load,
    )


def judge(table: Table, fleet: Fleet, plan: PipelinePlan, base: int = 0) -> Judged:
    """Evaluate the cost model on a plan, legal or not."""
    delayed = bool(SCHEDULES[plan.schedule].delay)
    times = [stage_times(table, fleet, plan, s) for s in range(len(plan.stages))]
    limits = (_delayed if delayed else _flushed)(plan, times)
    pipe = max(limits.values())
    limits |= _shared(table, fleet, plan)
    if not delayed:
        # All stages sum their gradients at the end of the batch.
        alone = max(limits[f"stage {s}"] - x.ring for s, x in enumerate(times))
        limits |= {f"sums of gradients on {name}": alone + x for name, x in ring_loads(table, fleet, plan).items()}
    memory = memory_of(table, fleet, plan, base)
    return Judged(max(limits.values()), pipe, limits, memory, tuple(_against(table, fleet, plan, memory)))


def _delayed(plan: PipelinePlan, times: Sequence[StageTimes]) -> dict[str, float]:
    m, limits = plan.count, dict[str, float]()
    busy = [
        max(n * t for n, t in zip(part.shares, x.each, strict=True)) + max(x.update)
        for part, x in zip(plan.stages, times, strict=True)
    ]
    eagerness = SCHEDULES[plan.schedule].eagerness
    for s, x in enumerate(times):
        limits[f"stage {s}"] = busy[s]
        if len(plan.stages[s].devices) > 1:
            limits[f"sum of gradients over stage {s}"] = x.ring
        if s + 1 < len(times):
            limits[f"link behind stage {s}"] = m * x.load
        total, window = len(plan.stages[s].devices) * busy[s], len(plan.stages[s].devices)
        for q in range(s + 1, len(times)):
            total += m * times[q - 1].trip + len(plan.stages[q].devices) * busy[q]
            window += eagerness * len(plan.stages[q].devices)
            limits[f"round trip from stage {s} to {q}"] = total / window
    return limits


def _flushed(plan: PipelinePlan, times: Sequence[StageTimes]) -> dict[str, float]:
    m, limits, kind = plan.count, dict[str, float](), SCHEDULES[plan.schedule]
    fill = sum(
        max(max(t - 2 * w, 0.0) if kind.splits else t for t, w in zip(x.each, x.weight, strict=True)) + x.trip
        for x in times
    )
    for s, (part, x) in enumerate(zip(plan.stages, times, strict=True)):
        steady = max((n - 1) * t for n, t in zip(part.shares, x.each, strict=True)) + x.ring + max(x.update)
        if kind.bounded:
            steady += (-(-m // len(part.devices)) - 1) * x.trip
        limits[f"stage {s}"] = fill + steady + (2 * max(x.weight) if kind.splits else 0.0)
        if s + 1 < len(times):
            limits[f"link behind stage {s}"] = fill + (m - 1) * x.load
    return limits


def _shared(table: Table, fleet: Fleet, plan: PipelinePlan) -> dict[str, float]:
    """Return the seconds per batch of each NIC, over all stages."""
    used = ring_loads(table, fleet, plan)
    for s, part in enumerate(plan.stages[:-1]):
        out, back = float(table.out[part.last]), float(table.back[part.last])
        for name, forward, backward, speed in hop_of(fleet, part.devices, plan.stages[s + 1].devices).nics:
            used[name] = used.get(name, 0.0) + plan.count * (out * forward + back * backward) / speed
    return used


def ring_loads(table: Table, fleet: Fleet, plan: PipelinePlan) -> dict[str, float]:
    """Return the seconds per batch that sums of gradients alone take on each NIC, over all stages."""
    used: dict[str, float] = {}
    for part in plan.stages:
        moved = float(table.grads[part.last] - table.grads[part.first])
        for name, each in ring_of(fleet, part.devices).nics:
            used[name] = used.get(name, 0.0) + each * moved
    return used


def _against(table: Table, fleet: Fleet, plan: PipelinePlan, memory: dict[int, Bytes]) -> list[str]:
    problems = []
    for s, (part, warm) in enumerate(zip(plan.stages, warm_ups(plan), strict=True)):
        least = SCHEDULES[plan.schedule].least_share(warm)
        if min(part.shares) < least:
            problems.append(
                f"stage {s}: {plan.schedule} needs {counted(least, 'microbatch')} per replica, "
                f"one has {min(part.shares)}"
            )
        if len(part.devices) > 1 and table.alone[part.last] > table.alone[part.first]:
            problems.append(f"stage {s}: changes variables with every microbatch, and has {len(part.devices)} devices")
    for device, held in memory.items():
        limit = fleet.devices[device].memory
        if limit is not None and held.total > limit:
            problems.append(
                f"{fleet.devices[device].name} needs {exact_bytes(held.total)}, it has {exact_bytes(limit)}"
            )
    return problems
