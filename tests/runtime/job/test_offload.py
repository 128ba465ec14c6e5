"""Optimiser state that is elsewhere between updates, in real worker processes: the same numbers, checkpoints both ways,
what a trace says, and training that would not fit."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections import Counter
from dataclasses import replace

import numpy as np
import pytest
from tests.passes.memory.test_offload import let_sets_go
from tests.runtime.job.test_packs import M, compiled, same, trained
from tests.runtime.job.test_replicas import batches_of

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.inspection.memory.curves import memory_curves
from penstock.inspection.views.text import show_memory
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import Space
from penstock.ir.memory.account import first_difference
from penstock.ir.memory.predict import measure_memory
from penstock.ir.schedule import Action
from penstock.ir.verify.verifier import verify
from penstock.models import write_mlp
from penstock.passes.memory.offload import with_homes
from penstock.runtime.job.job import Job
from penstock.runtime.messages.control import DataSpec
from penstock.runtime.telemetry.memory_trace import measured_account, planned_beside, read_trace
from penstock.runtime.telemetry.trace import write_trace
from penstock.support.errors import PenstockError, UsageError


@pytest.fixture(scope="module")
def mlp(tmp_path_factory):
    return write_mlp(tmp_path_factory.mktemp("offload") / "mlp.onnx", [8, 8, 8, 8, 8, 8], batch=4)


@pytest.fixture(scope="module")
def packs(mlp, tmp_path_factory):
    """A bundle of packs as it is, and one whose state is elsewhere."""
    place = tmp_path_factory.mktemp("packs")
    whole = compiled(mlp, place / "whole", "interleaved", 2, 2, "tvm")
    return whole, compiled(mlp, place / "away", "interleaved", 2, 2, "tvm", offload="state", spill=str(place))


def away_everywhere(path, out, schedule):
    """A bundle of one stage per rank whose state is elsewhere, which the pass would not do: nothing is gained."""
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=M, clip=0.5)
    cluster = replace(Cluster.local(2), spaces=(Space("disk"),))
    plan = ps.plan(ps.from_onnx(path), cluster, training, schedule=schedule, split_at=["fc3.product"])
    module = with_homes(plan.module, [0, 1])
    verify(module)
    return [
        ps.compile(one, out / name, backend="numpy") for name, one in (("a", plan), ("b", replace(plan, module=module)))
    ]


def test_packs_train_bit_for_bit_the_same(mlp, packs, tmp_path):
    """By compiled code, which is called with memory of another place each time, and in a V."""
    whole, away = packs
    assert {"CI", "CO"} <= {action.kind for action in open_bundle(away).module.schedule.actions()}
    expected = trained(whole)
    same(trained(away), expected)
    folded = [compiled(mlp, tmp_path / kind, "zb-v", 2, 2, offload=kind) for kind in ("none", "state")]
    same(*map(trained, folded))
    # The control: an optimiser that forgets its state after every batch.
    training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.01), microbatches=M, clip=0.5)
    names = [f"fc{i}.product" for i in range(2, 5)]
    plan = ps.plan(ps.from_onnx(mlp), Cluster.local(2), training, schedule="interleaved", packs=2, split_at=names)
    assert trained(ps.compile(plan, tmp_path / "sgd", backend="numpy"))[0] != expected[0]


def traced(bundle, file):
    """Run three batches with a trace in a file, and return the module with the copies of each rank."""
    # Ranks know at once how many batches there are: what is posted ahead does not depend on when one comes.
    with Job(open_bundle(bundle), timeout=60, trace=True, data=DataSpec()) as job:
        list(job.steps_from_data(3))
        write_trace(file, job.traces, module=job.module, held=job.held, copies=job.copies)
        return job.module, job.copies


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_a_stage_per_rank_trains_the_same_and_holds_what_was_planned(mlp, tmp_path, schedule):
    """Block by block after every action, with updates of one batch in the list of the next."""
    whole, away = away_everywhere(mlp, tmp_path, schedule)
    same(trained(away), trained(whole))
    module, copies = traced(away, tmp_path / "trace.json")
    for rank, trace in enumerate(read_trace(tmp_path / "trace.json")):
        planned, measured = planned_beside(module, rank, trace), measured_account(module, rank, trace)
        assert first_difference(planned, measured) is None
        assert any(action.kind == "CI" for action in planned.actions)
        moved = sum(copy.nbytes for copy in copies[rank])
        curve = memory_curves(module)[rank]
        (home,) = curve.homes
        assert moved == 3 * home.moved_per_batch == 6 * home.bytes
        # The control: an account that does not know that state was let go of.
        assert first_difference(replace(planned, lives=planned.lives[1:]), measured) is not None
    rows = [e for e in json.loads((tmp_path / "trace.json").read_text())["traceEvents"] if e.get("cat") == "copy"]
    assert {e["name"][1:3] for e in rows} == {"CI", "CO"}


@pytest.fixture(scope="module")
def chunks(mlp, tmp_path_factory):
    """A bundle of one stage per rank as it is, and one whose state is elsewhere in chunks."""
    place = tmp_path_factory.mktemp("chunks")
    path = write_mlp(place / "deep.onnx", [8] * 9, batch=4)
    whole = in_chunks(path, place / "whole", "none")
    return whole, in_chunks(path, place / "away", "state")


def in_chunks(path, out, offload, schedule="1f1b", backend="tvm"):
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=M, clip=0.5)
    options = {"schedule": schedule, "split_at": ["fc5.product"], "offload": offload}
    return ps.compile(ps.plan(ps.from_onnx(path), Cluster.local(2), training, **options), out, backend=backend)


@pytest.mark.parametrize("schedule", ["1f1b", "2bw"])
def test_chunks_train_the_same_and_are_held_as_planned(chunks, tmp_path, schedule):
    """Parts of an update by compiled code, block by block after every action."""
    path = chunks[0].parent / "deep.onnx"
    bundles = (
        chunks
        if schedule == "1f1b"
        else [in_chunks(path, tmp_path / kind, kind, schedule, "numpy") for kind in ("none", "state")]
    )
    whole, away = bundles
    same(trained(away), trained(whole))
    module, copies = traced(away, tmp_path / "trace.json")
    for rank, trace in enumerate(read_trace(tmp_path / "trace.json")):
        planned, measured = planned_beside(module, rank, trace), measured_account(module, rank, trace)
        assert first_difference(planned, measured) is None
        assert {action.item for action in planned.actions} >= {"c0", "c1", "c2", "c3"}
        curve = memory_curves(module)[rank]
        (home,) = curve.homes
        assert sum(copy.nbytes for copy in copies[rank]) == 3 * home.moved_per_batch == 6 * home.bytes
        assert home.on_device < home.bytes


def planned_lanes(module, left_out=""):
    """The bytes that each rank moves in three batches in either direction, by space. Variables and saved values are laid
    out anew: each begins at a multiple of 64."""
    schedule, lanes, here = module.schedule, Counter(), Counter()
    for rank in schedule.ranks:
        for action in schedule.expand(rank, 3):
            if action.item == "w" and action.kind in ("CI", "L"):
                here[rank, action.stage] += 1 if action.kind == "CI" else -1
            if action.kind not in ("CI", "CO") or action.item == left_out:
                continue
            stage = action.stage
            if action.item == "w" and action.kind == "CI" and here[rank, stage] > 1:
                # What the batch before left is there.
                continue
            if action.item == "a0":
                saved = module.stage_graph(stage, "F").saved
                given = {v.name for v in (*module.stage_graph(stage, "F").ins, *module.stage_graph(stage, "F").outs)}
                parts, space = [v.type for v in saved if v.name not in given], module.stages[stage].home
            else:
                parts = [v for v in module.vars.values() if v.stage == stage and item_letter(v) == action.item]
                space, parts = parts[0].home, [v.type for v in parts if v.role != "grad"]
            lanes[rank, space, action.kind] += sum(-(-part.nbytes // 64) * 64 for part in parts)
    return +lanes


def item_letter(var):
    if not var.home:
        return ""
    return {"param": "w", "grad": "g"}.get(var.role) or ("o" if var.chunk is None else f"c{var.chunk}")


def moved_lanes(module, copies):
    """The same of a run, from what its threads counted as they copied."""
    lanes = Counter()
    for rank, listed in enumerate(copies):
        for copy in listed:
            action = Action.parse(copy.text)
            homes = {v.home for v in module.vars.values() if v.stage == action.stage and item_letter(v) == action.item}
            (space,) = homes or {module.stages[action.stage].home}
            lanes[rank, space, action.kind] += copy.nbytes
    return +lanes


def test_lanes_move_what_is_planned_to_the_byte(mlp, chunks, tmp_path, monkeypatch):
    """Of each rank, direction and space. The control: a plan with one chunk, or one kind of item, left out."""
    let_sets_go(monkeypatch)
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=M, clip=0.5)
    cluster = replace(Cluster.local(2), spaces=(Space("disk"), Space("ssd", path=str(tmp_path))))
    plan = ps.plan(ps.from_onnx(mlp), cluster, training, split_at=["fc3.product"])
    module = with_homes(with_homes(plan.module, [0], "disk"), [1], "ssd")
    two = ps.compile(replace(plan, module=module), tmp_path / "two", backend="numpy")
    deep = write_mlp(tmp_path / "deep.onnx", [8] * 8, batch=4)
    packed = compiled(deep, tmp_path / "packed", "interleaved", 2, 3, offload="weights", spill=str(tmp_path))
    plan = ps.plan(ps.from_onnx(mlp), Cluster.local(2), training, schedule="gpipe", offload="activations")
    sets = ps.compile(plan, tmp_path / "sets", backend="numpy")
    cases = ((chunks[1], {"c1"}, 1), (two, {"o"}, 2), (packed, {"o", "w"}, 1), (sets, {"a0"}, 1))
    for bundle, items, spaces in cases:
        module, copies = traced(bundle, tmp_path / "trace.json")
        moved = moved_lanes(module, copies)
        assert moved == planned_lanes(module)
        assert {kind for _, _, kind in moved} == {"CI", "CO"}
        assert len({space for _, space, _ in moved}) == spaces
        for item in items:
            assert moved != planned_lanes(module, left_out=item)


def test_weights_stay_where_there_is_room(tmp_path):
    """Numbers, copies and checkpoints are those of training without, and as planned."""
    model = ps.from_onnx(write_mlp(tmp_path / "deep.onnx", [16] * 8, batch=4))
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=M)

    def planned(offload, memory=0):
        (device,) = Cluster.local(1).devices
        device = replace(device, spaces=(("ram", memory),) if memory else ())
        cuts = [f"fc{i}.product" for i in range(2, 7)]
        cluster = Cluster((device,), spaces=(Space("disk", path=str(tmp_path)),))
        settings = {"schedule": "interleaved", "packs": 6, "split_at": cuts, "offload": offload, "recompute": "none"}
        return ps.plan(model, cluster, training, **settings)

    (needed,) = (row["peak"] for row in planned("state").as_dict()["memory"].values())
    stay = planned("weights", needed - 1)
    assert len(movable := [v for v in stay.module.vars.values() if v.role == "param" and v.home]) > 0
    assert len(movable) < len([v for v in planned("weights").module.vars.values() if v.role == "param" and v.home])
    whole, away = (
        ps.compile(plan, tmp_path / name, backend="numpy")
        for name, plan in (("whole", planned("none")), ("away", stay))
    )
    same(trained(away), trained(whole))
    module, copies = traced(away, tmp_path / "trace.json")
    assert moved_lanes(module, copies) == planned_lanes(module)
    checkpoints((whole, away), tmp_path / "checkpoints")


def test_checkpoints_are_those_of_training_without(packs, chunks, tmp_path):
    checkpoints(packs, tmp_path / "packs")
    checkpoints(chunks, tmp_path / "chunks")


def checkpoints(bundles, tmp_path):
    tmp_path.mkdir()
    whole, away = bundles
    batches = batches_of(open_bundle(whole), 4)
    with ps.open(whole, timeout=60) as job:
        expected = [step.losses for step in job.steps(batches)]
    for first, then, background in ((away, whole, True), (whole, away, False), (away, away, False)):
        place = tmp_path / f"{first.name}-{then.name}"
        with ps.open(first, timeout=60) as job:
            losses = [step.losses for step in job.steps(batches[:2])]
            job.save(place, background=background)
            # What is trained meanwhile is in no checkpoint of before.
            losses += [step.losses for step in job.steps(batches[2:])]
        assert losses == expected
        with ps.open(then, timeout=60, resume=place) as job:
            assert expected[:2] + [step.losses for step in job.steps(batches[2:])] == expected


def test_what_a_rank_has_elsewhere_is_shown(packs):
    whole, away = (open_bundle(path).module for path in packs)
    text = show_memory(memory_curves(away))
    for rank, curve in enumerate(memory_curves(away)):
        (home,) = curve.homes
        assert home.on_device < home.bytes
        assert f"rank {rank}: {home.bytes / 1024:.1f} KiB at home in disk" in text
        assert curve.memory.peak < memory_curves(whole)[rank].memory.peak
    assert "at home" not in show_memory(memory_curves(whole))


def test_options_that_do_not_fit_are_refused(mlp, packs, tmp_path):
    plain = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.01), microbatches=M)
    with pytest.raises(UsageError, match="no rank has optimiser state that could be elsewhere"):
        ps.plan(ps.from_onnx(mlp), Cluster.local(2), plain, offload="state")
    with pytest.raises(UsageError, match="--spill says where"):
        compiled(mlp, tmp_path / "b", "interleaved", 2, 2, spill="disk")
    with pytest.raises(UsageError, match="reaches no memory space 'tape'"):
        compiled(mlp, tmp_path / "c", "interleaved", 2, 2, offload="state", spill="tape")
    with pytest.raises(UsageError, match="what a training holds"):
        ps.plan(ps.from_onnx(mlp), Cluster.local(1), offload="state")
    gone = compiled(mlp, tmp_path / "d", "interleaved", 2, 2, offload="state", spill=str(tmp_path / "gone"))
    with pytest.raises(PenstockError, match="cannot make room in memory space disk"):
        trained(gone)
    assert np.isfinite(trained(packs[1])[0]).all()


# ------------------------------------------------------------------------------------------------ a real limit

WIDTH = 1448
# What a worker takes beyond what is planned: stacks of threads, blocks of the allocator.
HEADROOM = 48 << 20
# In a process of its own: a limit of the system on private memory, which workers inherit. It prints the losses, and the
# private memory of the worker at the start.
LIMITED = """
import re, resource, sys
import penstock as ps
from tests.runtime.job.test_replicas import batches_of

if int(sys.argv[2]):
    resource.setrlimit(resource.RLIMIT_DATA, (int(sys.argv[2]),) * 2)
if __name__ == "__main__":
    with ps.open(sys.argv[1], timeout=60) as job:
        (worker,) = job.workers.process_ids()
        data = int(re.search(r"VmData:\\s+(\\d+)", open(f"/proc/{worker}/status").read())[1]) * 1024
        print(data, *[loss for step in job.steps(batches_of(job.bundle, 20)) for loss in step.losses])
"""


def deep(out, width, offload, packs):
    """A bundle of one rank that runs so many stages: 4 bytes of state for each of weights and gradients."""
    path = write_mlp(out / f"{width}.onnx", [width] * 9, batch=2)
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.001), microbatches=M)
    names = ["fc3.product", "fc5.product", "fc7.product"]
    several = {"schedule": "interleaved", "packs": packs, "split_at": names} if packs > 1 else {}
    options = {**several, "offload": offload, "spill": ""}
    plan = ps.plan(ps.from_onnx(path), Cluster.local(1), training, **options)
    return ps.compile(plan, out / f"{width}-{offload}"), measure_memory(plan.module)[0]


def limited(bundle, limit):
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    return subprocess.run(
        [sys.executable, "-c", LIMITED, bundle, str(limit)],
        capture_output=True,
        text=True,
        env=environment,
        timeout=120,
    )


@pytest.mark.slow
@pytest.mark.parametrize("packs", [1, 4])
def test_what_does_not_fit_under_a_limit_of_the_system_trains(tmp_path, packs):
    """20 steps of a model whose weights, gradients and state are more than the limit leaves for them."""
    base = int(limited(deep(tmp_path, 16, "none", packs)[0], 0).stdout.split()[0])
    whole, needed = deep(tmp_path, WIDTH, "none", packs)
    away, row = deep(tmp_path, WIDTH, "state", packs)
    limit = base + row.peak + HEADROOM
    assert base + needed.fixed > limit
    expected = limited(whole, 0).stdout.split()[1:]
    assert len(expected) == 20 * M
    assert limited(away, limit).stdout.split()[1:] == expected
    failed = limited(whole, limit)
    assert failed.returncode != 0
    assert "gave no more memory" in failed.stderr
