"""Tensor parallelism as a factor of the planner: beside all plans of small models, and trained as on one device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace
from itertools import combinations
from pathlib import Path

import pytest
from planning.beside_one_device import assert_trains_as_one_device

import penstock as ps
from penstock.commands import parser as cli
from penstock.inspection.reasons import _alternatives
from penstock.ir.cluster.cluster import SAME_HOST, Cluster, Device, LinkClass
from penstock.ir.ops import EXCHANGES
from penstock.ir.text import print_module
from penstock.models import write_cnn, write_gpt, write_mlp
from penstock.passes.planner import refine as refining
from penstock.passes.sharding.presets import PRESETS
from penstock.passes.simulator import forecast
from penstock.planning.choice import WORTH_OF_TEAMS
from penstock.planning.explain import argument
from penstock.planning.offloading.choose import needs_of
from penstock.planning.pipeline import before_partition
from penstock.planning.teams.choose import check_teams
from penstock.planning.teams.shares import rank_layouts, share_of
from penstock.planning.teams.teams import Teams, sizes_of_teams
from penstock.support.errors import DoesNotFit, PenstockError, UsageError

TRAINING = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.1))
SAMPLES = 8
WRITERS: dict[str, Callable[[Path, int], Path]] = {
    "mlp": lambda path, batch: write_mlp(path, [256, 2048, 256], batch),
    "gpt": lambda path, batch: write_gpt(path, layers=1, width=64, heads=4, vocab=64, positions=16, batch=batch),
    "gpts": lambda path, batch: write_gpt(path, layers=2, width=64, heads=4, vocab=64, positions=16, batch=batch),
    "one": lambda path, batch: write_mlp(path, [1024, 1024], batch),
    "cnn": lambda path, batch: write_cnn(path, batch, size=16),
}
NO_TEAMS = {"shard": "none"}
FAST, SLOW = (7e10, 1e-6), (1e6, 1e-2)
# A plan may be slower than the best of all by this part, beside what teams have to be faster by.
TOLERANCE = 0.05


def one_host(count: int, bandwidth: float, latency: float, memory: int | None = None) -> Cluster:
    spaces = () if memory is None else (("ram", memory),)
    rates = {"copy_bandwidth": bandwidth, "shared_overhead": latency, "socket_bandwidth": bandwidth}
    devices = tuple(Device(f"cpu:{i}", spaces=spaces, **rates) for i in range(count))
    return Cluster(devices, classes=(LinkClass(SAME_HOST, bandwidth, latency),))


def load_of(name: str, folder: Path) -> Callable[[int | None], ps.Model]:
    return lambda size: ps.from_onnx(WRITERS[name](folder / f"{name}{size}.onnx", size or SAMPLES))


def best(name: str, cluster: Cluster, folder: Path, **asked: object) -> ps.Plan:
    asked = {"sizes": (SAMPLES // 2, SAMPLES), "schedules": ("1f1b",), "batch": SAMPLES} | asked
    return ps.plan_best(load_of(name, folder), cluster, TRAINING, **asked)


def exchanges(plan: ps.Plan) -> int:
    return sum(op.kind in EXCHANGES for graph in plan.module.graphs.values() for op in graph.ops)


def enumerated(name: str, cluster: Cluster, folder: Path) -> Iterator[tuple[int, float]]:
    """Yield the ways of tensor parallelism and the seconds of all plans by 1f1b: sizes of microbatches, ways, layouts,
    replicas, and cuts at the operations of the forward graph."""
    for size in (SAMPLES // 2, SAMPLES):
        model, training = load_of(name, folder)(size), replace(TRAINING, microbatches=SAMPLES // size)
        names = [op.loc for op in model.module.graphs["main"].ops if op.loc and op.kind != "read"]
        starts = [*dict.fromkeys(names)][1:]
        count = len(cluster.devices)
        for ways in (n for n in (1, 2, 4) if n <= count):
            for shard in [f"preset:{preset}" for preset in PRESETS] if ways > 1 else ["none"]:
                for stages in range(1, count // ways + 1):
                    for replicas in range(1, count // ways // stages + 1):
                        for cuts in combinations(starts, stages - 1):
                            devices = [d.name for d in cluster.devices[: stages * replicas * ways]]
                            each = replicas * ways
                            try:
                                plan = ps.plan(
                                    model,
                                    cluster,
                                    training,
                                    split_at=cuts,
                                    devices=[devices[s * each : (s + 1) * each] for s in range(stages)],
                                    mesh=f"dp={replicas},tp={ways}",
                                    shard=shard,
                                )
                            except PenstockError:
                                # A preset that the model has not, or fewer microbatches than replicas.
                                continue
                            yield ways, plan.predicted.step


@pytest.mark.parametrize("link", [FAST, SLOW], ids=["fast", "slow"])
@pytest.mark.parametrize(("name", "count"), [("mlp", 2), ("cnn", 2), pytest.param("mlp", 4, marks=pytest.mark.slow)])
def test_no_plan_of_all_is_faster(name: str, count: int, link: tuple[float, float], tmp_path: Path) -> None:
    cluster = one_host(count, *link)
    rows = [*enumerated(name, cluster, tmp_path)]
    least = min(step for _, step in rows)
    chosen, single = (best(name, cluster, tmp_path, **asked) for asked in ({}, {"shard": "none"}))
    assert chosen.predicted.step <= least / (1 - WORTH_OF_TEAMS) * (1 + TOLERANCE)
    assert not exchanges(single)
    split = min(step for ways, step in rows if ways > 1)
    whole = min(step for ways, step in rows if ways == 1)
    if name == "mlp" and link == FAST:
        # Control: without tensor parallelism the plan is none of these.
        assert exchanges(chosen)
        assert single.predicted.step > least / (1 - WORTH_OF_TEAMS) * (1 + TOLERANCE)
        assert split < 0.8 * whole
    if link == SLOW:
        assert not exchanges(chosen)
        assert whole < split


@pytest.mark.parametrize("name", ["mlp", "gpt"])
def test_training_is_that_of_one_device(name: str, tmp_path: Path) -> None:
    plan = best(name, one_host(4, *FAST), tmp_path, sizes=(SAMPLES,))
    assert exchanges(plan)
    model = load_of(name, tmp_path)(SAMPLES)
    assert_trains_as_one_device(plan, model, TRAINING)


def test_the_plan_argues(tmp_path: Path) -> None:
    def said(**asked: object) -> list[str]:
        plan = best("mlp", one_host(2, *FAST), tmp_path, **asked)
        return [line for line in argument(plan.search) if "tensor parallelism" in line]

    alone, ways = said()
    assert alone.startswith("planner: no tensor parallelism: ")
    assert alone.endswith(" slower; not chosen")
    assert ways.startswith("planner: 2 ways of tensor parallelism, ")
    assert ways.endswith("; chosen")
    assert not said(shard="none")
    slow = best("mlp", one_host(2, *SLOW), tmp_path)
    alone, ways = (line for line in argument(slow.search) if "tensor parallelism" in line)
    assert alone.endswith("; chosen")
    assert ways.endswith("; not chosen") or "not tried" in ways
    facts = slow.as_dict()["planner"]["teams"]
    assert [(row["devices_of_a_team"], row["taken"]) for row in facts] == [(1, True), (2, False)]
    planned = slow.as_dict()
    alone, ways, *_ = (line for line in _alternatives(planned, planned["planner"]) if "tensor parallelism" in line)
    assert alone.endswith(" (taken)")
    assert ways.startswith("2 ways of tensor parallelism: ")


def test_progress_names_what_is_tried(tmp_path: Path) -> None:
    told: list[tuple[int, int, str]] = []

    def tell(done: int, total: int, what: str) -> None:
        told.append((done, total, what))

    best("mlp", one_host(2, *FAST), tmp_path, progress=tell)
    layouts = [row for row in told if row[2].startswith("layouts: ")]
    assert "layouts: preset:megatron (teams)" in {what for _, _, what in layouts}
    assert all(0 <= done < total for done, total, _ in layouts)
    assert any("(tp=2: " in what for _, _, what in told)
    told.clear()
    best("mlp", one_host(2, *FAST), tmp_path, progress=tell, shard="none")
    assert not any("teams" in what or "tp=2" in what for _, _, what in told)


def test_none_is_the_plan_without_meshes(tmp_path: Path) -> None:
    """Where teams do not pay, the program is that of no teams, and its plan says no more."""
    slow = one_host(2, *SLOW)
    none, default = (best("mlp", slow, tmp_path, **asked) for asked in ({"shard": "none"}, {}))
    assert print_module(none.module) == print_module(default.module)
    facts, more = none.as_dict(), default.as_dict()
    assert "teams" not in facts["planner"]
    del more["planner"]["teams"]
    assert facts == more
    # Control: teams make another program.
    fast = one_host(2, *FAST)
    assert print_module(best("mlp", fast, tmp_path).module) != print_module(
        best("mlp", fast, tmp_path, shard="none").module
    )


def test_memory_asks_for_teams(tmp_path: Path) -> None:
    """Links are so slow that teams do not pay, and the one matrix fits on no device."""
    ample = best("one", one_host(2, *SLOW), tmp_path)
    assert not exchanges(ample)
    held = max(needs_of(ample.module).values())
    tight = one_host(2, *SLOW, memory=round(0.8 * held))
    with pytest.raises(DoesNotFit):
        best("one", tight, tmp_path, shard="none")
    plan = best("one", tight, tmp_path)
    assert exchanges(plan)
    assert any("no tensor parallelism: no plan: " in line for line in argument(plan.search))
    # Where teams do not fit either, the error is that of single devices.
    least = one_host(2, *SLOW, memory=held // 8)
    errors = []
    for asked in ({}, {"shard": "none"}):
        with pytest.raises(DoesNotFit) as error:
            best("one", least, tmp_path, **asked)
        errors.append(str(error.value))
    assert errors[0] == errors[1]


def test_a_mesh_that_is_given(tmp_path: Path) -> None:
    path = WRITERS["mlp"](tmp_path / "model.onnx", SAMPLES)
    (tmp_path / "cluster.toml").write_text(one_host(4, *SLOW).to_toml())
    words = ["plan", str(path), "--cluster", str(tmp_path / "cluster.toml"), "--loss", "cross_entropy", "--batch"]
    words += [str(2 * SAMPLES), "--json", "--mesh"]
    plan = best("mlp", one_host(4, *SLOW), tmp_path, mesh="tp=2", shard="preset:megatron")
    assert plan.as_dict()["mesh"].endswith("tp=2")
    assert plan.as_dict()["shard"] == ["preset:megatron"]
    assert cli.main([*words, "tp=2"]) == 0
    assert cli.main([*words, "dp=2,tp=2"]) == 2
    assert cli.main([*words, "tp=2;tp=1"]) == 2
    assert cli.main([*words, "tp=8"]) == 2


def test_one_error_names_all_that_cannot_be() -> None:
    from penstock.planning.options import SearchOptions

    with pytest.raises(UsageError) as error:
        check_teams(SearchOptions(batch=8, mesh="dp=2,tp=2", shard=("widths",), offload="state"))
    for part in ("leave out dp", "--shard widths", "--mesh with --offload state"):
        assert part in str(error.value)
    check_teams(SearchOptions(batch=8, mesh="tp=2", shard=("auto",)))


def test_teams_are_of_devices_alike_on_one_host() -> None:
    slow, far = Device("slow", flops=1e9), Device("far:0", host="far")
    near = one_host(4, *FAST).devices
    cluster = Cluster((near[0], slow, *near[1:], far, replace(far, name="far:1")))
    assert sizes_of_teams(cluster) == [2, 4]
    assert [*Teams(cluster, {"tp": 2}).members.values()] == [
        ("cpu:0", "cpu:1"),
        ("cpu:2", "cpu:3"),
        ("far:0", "far:1"),
    ]
    assert [device.name for device in Teams(cluster, {"tp": 4}).cluster.devices] == ["cpu:0+cpu:1+cpu:2+cpu:3"]


def test_ranks_are_those_of_programs(tmp_path: Path) -> None:
    """The first layouts are the fastest by the simulation of whole programs; the last ones are not."""
    model, cluster = load_of("mlp", tmp_path)(SAMPLES), one_host(2, *FAST)
    teams = rank_layouts(before_partition(model, cluster, TRAINING), Teams(cluster, {"tp": 2}), 1)
    steps = [ps.plan(model, cluster, TRAINING, mesh="tp=2", shard=each.layouts).predicted.step for each in teams]
    assert steps[0] <= 1.02 * min(steps)
    assert steps[-1] > 1.1 * steps[0]


def test_what_a_device_has_is_what_the_program_gives_it(tmp_path: Path) -> None:
    model, cluster = load_of("mlp", tmp_path)(SAMPLES), one_host(2, *FAST)
    whole, teams = before_partition(model, cluster, TRAINING), Teams(cluster, {"tp": 2}, ("preset:megatron",))
    share, exchanged = share_of(whole, teams)
    plan = ps.plan(model, cluster, TRAINING, mesh="tp=2", shard="preset:megatron")
    for name, var in share.vars.items():
        assert var.type.nbytes == plan.module.local_type(plan.module.vars[name].type, 0).nbytes
    assert sum(seconds > 0 for seconds in exchanged["F"]) + sum(seconds > 0 for seconds in exchanged["B"]) == exchanges(
        plan
    )


def test_more_devices_than_cores_are_no_reason_for_a_slower_plan(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A team computes on all of its devices, so two teams of two are too many for two cores."""
    for module in (forecast, refining):
        monkeypatch.setattr(module, "usable_cores", lambda: 2)
    many, few = (best("mlp", one_host(count, *FAST), tmp_path, mesh="tp=2") for count in (4, 2))
    assert many.predicted.step <= 1.001 * few.predicted.step
    # Control: with cores for all, two teams are faster.
    for module in (forecast, refining):
        monkeypatch.setattr(module, "usable_cores", lambda: 4)
    assert best("mlp", one_host(4, *FAST), tmp_path, mesh="tp=2").predicted.step < 0.95 * few.predicted.step


def test_formulas_of_other_schedules_rule_out_no_packs(tmp_path: Path) -> None:
    """With replicas single devices are faster by 1f1b. Packs have none, and are faster on teams."""
    cluster, asked = one_host(4, *FAST), {"sizes": (SAMPLES,), "batch": 4 * SAMPLES, "explained": False}
    cluster = replace(cluster, devices=tuple(replace(device, host="far") for device in cluster.devices))
    packed = asked | {"schedules": ("interleaved",)}
    chosen, single, split = (
        best("gpt", cluster, tmp_path, **packed, **more) for more in ({}, NO_TEAMS, {"mesh": "tp=2"})
    )
    assert split.predicted.step < (1 - WORTH_OF_TEAMS) * single.predicted.step
    assert chosen.predicted.step == split.predicted.step
    # Control: by 1f1b teams are slower.
    assert not exchanges(best("gpt", cluster, tmp_path, **asked))


def test_teams_are_tried_where_formulas_find_no_plan(tmp_path: Path) -> None:
    """The exact count of the passes is less than the formulas have, so a plan over single devices fits after all."""
    cluster = one_host(2, *FAST, memory=926_471)
    chosen, single, split = (
        best("gpts", cluster, tmp_path, explained=False, **more) for more in ({}, NO_TEAMS, {"mesh": "tp=2"})
    )
    assert single.search.more_memory > 1
    assert split.predicted.step < (1 - WORTH_OF_TEAMS) * single.predicted.step
    assert chosen.predicted.step == split.predicted.step


def test_an_interrupt_ends_the_search_over_teams(tmp_path: Path) -> None:
    """One search keeps what it has seen, and no other size of teams follows."""

    def searched(interrupted: bool) -> tuple[ps.Plan, list[str]]:
        told: list[str] = []

        def tell(done: int, total: int, what: str) -> None:
            told.append(what)
            # The second search over teams of two, which then has a plan.
            begun = [row for row in told if "planner: " in row and "tp=2" in row]
            if interrupted and len(begun) == 2 and what == begun[1]:
                raise KeyboardInterrupt

        schedules = ("1f1b", "gpipe")
        plan = best("mlp", one_host(4, *FAST), tmp_path, sizes=(SAMPLES,), schedules=schedules, progress=tell)
        return plan, told

    plan, told = searched(interrupted=True)
    assert not any("tp=4" in row for row in told)
    assert [way.size for way in plan.search.ways] == [1, 2]
    assert plan.as_dict()["planner"]["stopped"]
    assert any("stopped by an interrupt" in line for line in argument(plan.search))
    # Control: without it teams of four are tried.
    plan, told = searched(interrupted=False)
    assert any("tp=4" in row for row in told)
    assert "stopped" not in plan.as_dict()["planner"]


def test_layouts_that_cannot_be_are_refused(tmp_path: Path) -> None:
    """They are also where single devices are as fast, and nothing would be tried."""
    for cluster in (one_host(2, *FAST), one_host(2, *SLOW)):
        for shard, said in (("preset:foo", "no preset 'foo'"), ("nothing.weight=[_,/tp]", "fits no name")):
            with pytest.raises(UsageError) as error:
                best("mlp", cluster, tmp_path, shard=shard)
            assert said in str(error.value)
    with pytest.raises(UsageError, match="there are none"):
        best("mlp", one_host(1, *FAST), tmp_path, shard="preset:megatron")
    # Control: others are followed.
    assert exchanges(best("mlp", one_host(2, *FAST), tmp_path, shard="preset:megatron"))


def test_layouts_for_one_size_of_microbatches_keep_no_other_out(tmp_path: Path) -> None:
    """Layouts are ranked with microbatches of 16 samples, and with those of 4 the program of the best has other
    operations. So plans of two replicas would be none of its search, and two of four teams idle."""

    def load(size: int | None) -> ps.Model:
        path = tmp_path / f"gpt{size}.onnx"
        return ps.from_onnx(write_gpt(path, layers=4, width=256, heads=8, vocab=512, positions=32, batch=size))

    cluster = one_host(4, *FAST)
    cluster = replace(cluster, devices=tuple(replace(device, host="far") for device in cluster.devices))

    def step(**asked: object) -> float:
        asked = {"sizes": (4, 16), "schedules": ("1f1b",), "explained": False, "mesh": "tp=2"} | asked
        return ps.plan_best(load, cluster, TRAINING, batch=16, **asked).predicted.step

    both = step()
    assert both <= 1.02 * min(step(sizes=(4,)), step(shard="preset:megatron"))
    # Control: with microbatches of 16 samples there are no replicas.
    assert step(sizes=(16,)) > 1.5 * both
