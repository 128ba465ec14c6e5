"""The time of collectives inside graphs by hand, and teams that wait for each other."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace

import pytest
import torch
from tests.oracles.sharding.local_modules import local_mlp

import penstock as ps
from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.collective_calls import meeting_ranks
from penstock.ir.graph import Graph, Mesh, Module, Op, Stage, Value
from penstock.ir.ops import make
from penstock.ir.schedule import Action
from penstock.ir.types import TensorType
from penstock.passes.costs.prices import cost
from penstock.passes.simulator.exchanges import collective_times, exchange_seconds
from penstock.passes.simulator.forecast import forecast
from penstock.passes.simulator.machine import Route, SimulatedMachine
from penstock.passes.simulator.simulate import simulate

LATENCY, SPEED = 0.5, 100.0


def _apart(source: int, target: int) -> Route:
    """Return a link of its own."""
    return Route(((f"{source}>{target}", SPEED),), LATENCY)


def _from_one_card(source: int, target: int) -> Route:
    """Return a link behind the network card of the sender."""
    return Route(((f"{source}>{target}", 10 * SPEED), (f"card {source}", SPEED)), LATENCY)


def _module(op: Op, tp: int, dp: int = 1) -> Module:
    mesh = Mesh("m", (("dp", dp), ("tp", tp)), tuple(f"cpu:{i}" for i in range(dp * tp)))
    graph = Graph("s0.F", op.ins, op.outs, (op,))
    return Module("m", stages=(Stage(0, "m"),), meshes=(mesh,), graphs={"s0.F": graph}, facts=("staged", "local"))


def _op(kind: str, elements: int, **attrs: int | str) -> Op:
    x, y = (Value(name, TensorType("f32", (elements,))) for name in "xy")
    return Op(kind, (x,), (y,), {"over": "tp", **attrs})


@pytest.mark.parametrize("tp", [2, 3, 4])
@pytest.mark.parametrize(
    ("op", "rounds", "sent"),
    [
        (_op("all_reduce", 12), 2, lambda k: 2 * 48 / k),
        (_op("reduce_scatter", 12, axis=0, parts=3), 1, lambda k: 48 / k),
        (_op("all_gather", 12, axis=0, size=36), 1, lambda k: 48),
        (_op("all_to_all", 12, split=0, join=0, parts=3, size=12), 1, lambda k: 48 / k),
    ],
    ids=lambda x: x.kind if isinstance(x, Op) else None,
)
def test_seconds_are_those_of_a_direct_exchange(op: Op, rounds: int, sent: Callable[[int], float], tp: int) -> None:
    module = _module(op, tp)
    apart = exchange_seconds(module, _apart)
    assert apart == {(r, "F"): pytest.approx(rounds * LATENCY + sent(tp) / SPEED) for r in range(tp)}
    shared = exchange_seconds(module, _from_one_card)
    assert shared == {(r, "F"): pytest.approx(rounds * LATENCY + (tp - 1) * sent(tp) / SPEED) for r in range(tp)}


def test_a_shift_goes_to_one_rank_and_a_group_of_one_exchanges_nothing() -> None:
    assert exchange_seconds(_module(_op("shift", 12, by=1), 4), _from_one_card)[0, "F"] == LATENCY + 48 / SPEED
    assert exchange_seconds(_module(_op("shift", 12, by=4), 4), _from_one_card)[0, "F"] == 0
    alone = _module(_op("all_reduce", 12), 1)
    assert exchange_seconds(alone, _apart) == {(0, "F"): 0}
    assert meeting_ranks(alone) == {}


def _hiding(order: Sequence[str], names: Sequence[str] = ("cpu:0", "cpu:1")) -> Module:
    """Return a module of one graph: `x` is summed, `y` is a product beside it, and `z` a product of the sum."""
    a, b, x, y, z = (Value(name, TensorType("f32", (256, 256))) for name in "abxyz")
    ops = {
        "x": make("all_reduce", [a], ["x"], over="tp"),
        "y": make("matmul", [a, b], ["y"]),
        "z": make("matmul", [x, b], ["z"]),
    }
    graph = Graph("s0.F", (a, b), (y, z), tuple(ops[name] for name in order))
    devices = tuple(Device(name, flops=1e9, overhead=0.0) for name in names)
    mesh = Mesh("m", (("tp", 2),), tuple(names))
    return Module(
        "m", cluster=Cluster(devices), stages=(Stage(0, "m"),), meshes=(mesh,), graphs={"s0.F": graph},
        facts=("staged", "local"),
    )  # fmt: skip


PRODUCT = cost(make("matmul", _hiding("xyz").graphs["s0.F"].ins, ["y"]), Device("d", flops=1e9, overhead=0.0)).seconds


@pytest.mark.parametrize("latency", [PRODUCT / 8, 4 * PRODUCT])
def test_kernels_before_the_first_reader_hide_what_is_beside_the_processor(latency: float) -> None:
    """An all_reduce takes two latencies. A product hides them where it stands behind it, and in front of its reader."""
    times = {
        order: collective_times(_hiding(order), lambda a, b: Route((), latency), 0, "F")["x"]
        for order in ("xyz", "xzy", "yxz")
    }
    assert times["xyz"].exposed == pytest.approx(max(0.0, 2 * latency - PRODUCT))
    assert [times[order].exposed for order in ("xzy", "yxz")] == pytest.approx([2 * latency] * 2)
    assert {time.copying for time in times.values()} == {0.0}


def test_a_rank_moves_bytes_itself_where_memory_is_shared() -> None:
    link = (("link", 1e6),)
    near, far = (
        collective_times(_hiding("xyz"), lambda a, b, shared=shared: Route(link, 0.0, shared), 0, "F")["x"]
        for shared in (True, False)
    )
    moved = 2 * 256 * 256 * 4 / 1e6  # two ranks send half of it twice, over one link
    assert (near.copying, near.exposed) == (pytest.approx(moved), 0.0)
    assert (far.copying, far.exposed) == (0.0, pytest.approx(moved - PRODUCT))


def test_teams_meet_apart_unless_a_collective_goes_over_them() -> None:
    assert set(meeting_ranks(_module(_op("all_reduce", 12), 2, 2)).values()) == {(0, 1), (2, 3)}
    over_dp = Op("all_reduce", *(lambda op: (op.ins, op.outs))(_op("all_reduce", 12)), {"over": "dp"})
    assert set(meeting_ranks(_module(over_dp, 2, 2)).values()) == {(0, 1, 2, 3)}


def _far_apart(module: Module) -> Module:
    """Put every device on a host of its own, so that none share cores."""
    assert module.cluster is not None
    devices = (replace(d, host=f"host{i}") for i, d in enumerate(module.cluster.devices))
    return module.but(cluster=Cluster(tuple(devices)))


def _seconds(rank: int, action: Action) -> float:
    return {"F": 1.0, "B": 2.0, "U": 0.5}.get(action.kind, 0.0)


@pytest.mark.parametrize("kind", ["1f1b", "2bw"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("dp", "tp"), [(1, 2), (2, 2), (1, 3)])
def test_a_module_of_teams_takes_its_parts_and_its_exchanges(kind: str, stages: int, dp: int, tp: int) -> None:
    """Without exchanges a team takes as long as one device that takes as long; they are added to each action."""
    module = _far_apart(local_mlp(kind, stages, dp, tp).local)
    small = _far_apart(local_mlp(kind, stages, dp, 1).local)
    free = forecast(module, _seconds, 5, lambda route: Route())
    assert free.step == pytest.approx(forecast(small, _seconds, 5, lambda route: Route()).step)
    there = forecast(module, _seconds, 5, lambda route: Route(route.shares, 1.0)).simulated
    extra = exchange_seconds(module, lambda a, b: Route((), 1.0))
    # Kernels hide next to nothing of latencies of a second.
    assert extra[0, "B"] == pytest.approx(2 * 2 / stages, rel=1e-4)
    assert there.step_seconds > free.step
    # All ranks of a team do an action with collectives at the same time.
    for (rank, _, kind), ranks in meeting_ranks(module).items():
        starts = [[start for a, start, _ in there.timed(r) if a.kind == kind] for r in (rank, ranks[0])]
        assert starts[0] == starts[1]


def test_a_slow_rank_holds_its_team_back() -> None:
    schedule = local_mlp("1f1b", 1, 2, 2, last="communicate").local.schedule
    assert schedule is not None
    together = {(rank, 0, kind): team for team in ((0, 1), (2, 3)) for rank in team for kind in "FB"}

    def seconds(rank: int, action: Action) -> float:
        slow = rank == 1 and action.kind == "B"
        return {"F": 1.0, "B": 3.0 if slow else 2.0}.get(action.kind, 0.0)

    free = simulate(schedule, 4, seconds, lambda *_: 0.0)
    met = simulate(schedule, 4, seconds, lambda *_: 0.0, SimulatedMachine(together=together))
    rank = {r: list(met.timed(r)) for r in range(4)}
    bars = [[(a, start) for a, start, _ in rank[r] if a.kind in "FB"] for r in range(2)]
    assert bars[0] == bars[1]
    # Rank 0 waits in front of what follows B, although it is done with B itself.
    assert [(a, f) for a, _, f in rank[0]] != [(a, f) for a, _, f in free.timed(0)]
    assert next(u for u in met.ranks if u.rank == 0).waiting > next(u for u in met.ranks if u.rank == 1).waiting
    path = met.critical_path
    assert path.get("computing on rank 1", 0.0) > path.get("computing on rank 0", 0.0)


def test_sums_go_round_the_ranks_at_one_place_of_all_teams() -> None:
    module = local_mlp("1f1b", 1, 2, 2, last="communicate").local
    schedule = module.schedule
    assert schedule is not None
    asked: list[tuple[int, int]] = []

    def route(source: int, target: int) -> Route:
        asked.append((source, target))
        return Route(((f"{source}>{target}", 1.0),))

    used = simulate(
        schedule, 2, lambda rank, a: 1.0, lambda *_: 0.0, SimulatedMachine(route), reduced=lambda stage: 10.0
    )
    assert set(asked) == {(0, 2), (2, 0), (1, 3), (3, 1)}
    # A ring of two sends all bytes once each way, twice in two batches.
    assert {link.name: link.nbytes for link in used.links} == {f"{a}>{b}": 20.0 for a, b in asked}


@pytest.mark.parametrize("kind", ["1f1b", "2bw"])
def test_replicas_with_unequal_shares_meet_in_the_update(kind: str) -> None:
    """They are at other places of their programs there. The update of a batch begins when the slowest rank has come."""
    training = ps.Training("cross_entropy", ps.SGD(lr=0.1), 4)
    layers = torch.nn.Sequential(torch.nn.Linear(8, 16), torch.nn.GELU(), torch.nn.Linear(16, 4))
    model = ps.from_torch(layers, (torch.randn(4, 8),))
    plan = ps.plan(model, ps.Cluster.local(3), training, mesh="dp=3", stages=1, schedule=kind, zero=1)
    there = forecast(_far_apart(plan.module), _seconds, 5, lambda route: Route()).simulated
    rows = [[(start, end) for a, start, end in there.timed(rank) if a.kind == "U"] for rank in range(3)]
    # Two microbatches of one rank, one of each other one, and the update.
    assert rows[0] == rows[1] == rows[2]
    assert there.step_seconds == pytest.approx(2 * 3.0 + 0.5)
    meetings = meeting_ranks(plan.module)
    assert set(meetings.values()) == {(0, 1, 2)}
    assert {kind for _, _, kind in meetings} == {"U"}
