"""Values that ranks hand on to others of their stage: a product of two stages, one rank sends to three.

Ranks are processes with the NumPy back end, over shared memory, where each hands on what it has received, and over
sockets, where parcels go on as they come. The oracle is a training on one device. What the checker refuses are the same
plan with a link left out, one too soon, and one from a rank that has nothing.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
from acceptance.sharding.changed_schedules import wired_problems

import penstock as ps
from penstock.commands.parser import main
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.schedule import HANDS, Action
from penstock.ir.sharding.tile_messages import TileEnds, moved_bytes, tile_messages
from penstock.ir.text import parse_module, print_module
from penstock.models import write_mlp
from penstock.passes.communicate import senders
from penstock.passes.sharding.crossings import arrivals
from penstock.passes.simulator import machine
from penstock.planning.predict import predict
from penstock.runtime.transport.transport import RankTransport

ROWS, WIDTH, CLASSES, STEPS = 128, 2048, 12, 3
TRAINING = ps.Training("cross_entropy", ps.SGD(lr=1e-2), 4)


def _in_line(ends: TileEnds, cluster: Cluster | None, devices: object) -> senders.SenderChoice:
    team = ends.target.teams()[0]
    assert isinstance(devices, tuple)
    return senders.SenderChoice(ends, cluster, devices, dict(zip(team[1:], team, strict=False)))


@pytest.fixture
def plans(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> tuple[ps.Plan, ps.Plan]:
    """The plan of one rank that sends to the first of three, as if these were hosts, and that of one device."""
    monkeypatch.setattr(arrivals, "_is_worth_a_chain", lambda t, source, target, cluster: len(target.devices) > 1)
    monkeypatch.setattr(senders, "best_choice", _in_line)
    model = ps.from_onnx(write_mlp(tmp_path / "mlp.onnx", (16, WIDTH, CLASSES), batch=ROWS, seed=1))
    last = [op for op in model.module.graphs["main"].ops if op.kind == "matmul"][-1]
    plan = ps.plan(
        model,
        ps.Cluster.local(4),
        TRAINING,
        schedule="1f1b",
        stages=2,
        mesh="tp=1;tp=3",
        split_at=(last.outs[0].name,),
        shard=(f"{last.ins[1].name}=[_,/tp]",),
    )
    return plan, ps.plan(model, ps.Cluster.local(1), TRAINING, schedule="1f1b", stages=1)


def _losses(plan: ps.Plan, folder: Path) -> list[float]:
    rng = np.random.default_rng(5)
    x, labels = (value.name for value in plan.module.data_inputs)
    feed = [
        {x: rng.standard_normal((4 * ROWS, 16)).astype(np.float32), labels: rng.integers(0, CLASSES, 4 * ROWS)}
        for _ in range(STEPS)
    ]
    bundle = ps.compile(plan, folder / f"b{len(plan.module.stages)}", backend="numpy")
    with ps.open(bundle, timeout=60) as job:
        return list(job.run(iter(feed)))


@pytest.mark.parametrize("shared", ["0", "1"])
def test_training_is_that_of_one_device(
    shared: str, plans: tuple[ps.Plan, ps.Plan], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PENSTOCK_SHARED_MEMORY", shared)
    chain, alone = plans
    (edge,) = (messages for messages in tile_messages(chain.module).messages() if messages[1:3] == (1, 2))
    assert len(edge[3]) > 3
    assert _losses(chain, tmp_path) == pytest.approx(_losses(alone, tmp_path), rel=1e-6)


def test_verify_simulate_and_text_know_what_is_handed_on(
    plans: tuple[ps.Plan, ps.Plan], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    chain, _ = plans
    assert parse_module(print_module(chain.module)) == chain.module
    # Each of three links carries the whole value.
    edge = next(edge for edge in chain.module.edges if edge.phase == "F")
    assert sum(moved_bytes(chain.module, edge).values()) == 3 * ROWS * WIDTH * 4
    bundle = str(ps.compile(chain, tmp_path / "b", backend="numpy"))
    assert main(["verify", bundle, "--steps", "1"]) == 0
    assert main(["simulate", bundle]) == 0
    assert main(["inspect", bundle, "--links"]) == 0
    assert capsys.readouterr().out.count("handed on") == 2


def test_what_goes_whole_is_predicted_so(plans: tuple[ps.Plan, ps.Plan], monkeypatch: pytest.MonkeyPatch) -> None:
    """Ranks of one host hand on by shared memory, behind the receive of all."""
    whole = predict(plans[0].module).step
    monkeypatch.setattr(machine, "goes_in_parcels", lambda *names: True)
    assert predict(plans[0].module).step < whole * 0.999


def test_checker_refuses_links_left_out_too_soon_and_without_a_source(plans: tuple[ps.Plan, ps.Plan]) -> None:
    chain, _ = plans
    assert not wired_problems(chain, {})
    assert sum(a.kind in HANDS for a in chain.module.schedule.actions()) == 2 * 4
    assert "never sends this message" in wired_problems(chain, {"1 1HF4>2:0": ()})
    soon = {"1 1RF4<0": ("1HF4>2:0", "1RF4<0"), "1 1HF4>2:0": ()}
    assert "hands on what has not come" in wired_problems(chain, soon)
    assert "never receives this message" in wired_problems(chain, {"2 1HF4>3:0": ("1HF4>3:0", "1HF4>1:0")})
    for late in ("F", "B"):
        behind = {"1 1HF4>2:0": (), f"1 1{late}4@1": (f"1{late}4@1", "1HF4>2:0")}
        assert "comes behind 1F" in wired_problems(chain, behind)
    circle = {"1 1RF4<0": ("1RF4<3:0",), "0 0SF4>1": (), "3 1RF4<2:0": ("1RF4<2:0", "1HF4>1:0")}
    assert "waits" in wired_problems(chain, circle)


@pytest.mark.parametrize(
    ("action", "peer"),
    [("1RF4<1:0", "rank 1 (stage 1)"), ("1HF4>3:0", "rank 3 (stage 1)"), ("1RF4<0", "rank 0 (stage 0)")],
)
def test_errors_name_the_stage_of_the_peer(action: str, peer: str, plans: tuple[ps.Plan, ps.Plan]) -> None:
    """It is that of the rank itself, not the one where the chain begins."""
    module = plans[0].module
    transport = RankTransport(2, module.edges, module.rank_stages(), 1)
    transport.use_tiles({"": tile_messages(module)})
    assert peer in str(transport._lost(Action.parse(action), ConnectionError("closed")))


def test_the_critical_path_of_links_behind_a_computation_ends(plans: tuple[ps.Plan, ps.Plan]) -> None:
    """The checker refuses such a schedule. What is simulated of it is no reason to go on for ever."""
    module = plans[0].module
    assert module.schedule is not None

    def late(rank: int, action: Action) -> list[Action]:
        if rank == 1 and action.kind in HANDS:
            return []
        return [action, Action("HF", 1, action.mb, None, 2, 0)] if rank == 1 and action.kind == "F" else [action]

    changed = replace(plans[0], module=module.but(schedule=module.schedule.rewrite_ranks(late)))
    assert changed.as_dict()
