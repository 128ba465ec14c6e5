"""The planner from the command line and from Python: what it chooses goes through all passes, trains and argues."""

from __future__ import annotations

import json
import re
from dataclasses import replace

import numpy as np
import onnx
import pytest
from oracles.planned_models import TRAIN, UNSPLIT, command

import penstock as ps
from penstock import plan_best
from penstock.commands.parser import main
from penstock.frontends.onnx import open_dimensions
from penstock.ir.cluster.cluster import Cluster, Device
from penstock.models import write_gpt
from penstock.passes.planner.refine import Refined
from penstock.planning import tries
from penstock.planning.explain import argument
from penstock.planning.facts import planner_facts
from penstock.planning.pipeline import before_partition
from penstock.planning.tries import sizes_of
from penstock.planning.watching import Feedback
from penstock.support.errors import DoesNotFit, UsageError

CLUSTER = '[[device]]\nname = "cpu:0"\n[[device]]\nname = "cpu:1"\nflops = 2.5e10\n[[device]]\nname = "cpu:2"\nflops = 1e5\nbandwidth = 1e5\n'

pytestmark = pytest.mark.usefixtures("own_cache")


@pytest.fixture
def cluster(tmp_path):
    path = tmp_path / "cluster.toml"
    path.write_text(CLUSTER)
    return path


def test_the_planner_chooses_all(symbolic, cluster, tmp_path, capsys):
    assert (
        main(command("plan", symbolic, "--cluster", cluster, *TRAIN, "--batch", 32, "--schedule", "auto", "--json"))
        == 0
    )
    found = json.loads(capsys.readouterr().out)
    planner = found["planner"]
    used = [name for stage in found["stages"] for name in stage["devices"]]
    assert planner["left_out"] == ["cpu:2"]
    assert sorted(used) == ["cpu:0", "cpu:1"]
    assert planner["bound_s"] <= planner["step_s"] * (1 + 1e-9)
    assert set(planner["schedules"]) == {"1f1b", "gpipe", "2bw", "eager-2bw", "zb-1f1b"}
    assert min(planner["schedules"].values()) <= planner["step_s"] <= min(planner["schedules"].values()) * 1.01
    assert planner["what_if"]["without cpu:0"] > planner["step_s"]
    rows = {row["device"]: row for row in planner["devices"]}
    assert list(rows) == ["cpu:0", "cpu:1", "cpu:2"]
    for name in ("cpu:0", "cpu:1"):
        (without,) = (step for change, step in planner["what_if"].items() if change.startswith(f"without {name}"))
        assert rows[name]["step_without_s"] == without
        assert rows[name]["gain"] == without / planner["against_s"] - 1 > 0.01
        assert (rows[name]["used"], rows[name]["effect"]) == (True, "helps")
    assert not rows["cpu:2"]["used"]
    assert found["predicted"]["step_s"] > 0
    # One device alone is a plan as well, and no better one.
    single = tmp_path / "single.toml"
    single.write_text('[[device]]\nname = "cpu:0"\n')
    assert main(command("plan", symbolic, "--cluster", single, *TRAIN, "--batch", 32, "--json")) == 0
    alone = json.loads(capsys.readouterr().out)
    assert alone["planner"]["step_s"] > planner["step_s"]


def test_what_is_printed_for_people(symbolic, cluster, capsys):
    assert main(command("plan", symbolic, "--cluster", cluster, *UNSPLIT, "--batch", 32, "--schedule", "auto")) == 0
    text = capsys.readouterr().out
    for part in (
        "of slowest",
        "predicted: ",
        "limited by: ",
        "planner: left out",
        "cpu:2",
        "twice as fast",
        "what if: without cpu:0",
    ):
        assert part in text, part
    if "schedule 2bw" in text or "schedule eager-2bw" in text:
        assert "gradients are one update late" in text


def test_a_delay_only_for_who_asks(symbolic, cluster, capsys):
    assert main(command("plan", symbolic, "--cluster", cluster, *UNSPLIT, "--batch", 32, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert "2bw" not in found["schedule"]
    assert (
        main(command("plan", symbolic, "--cluster", cluster, *UNSPLIT, "--batch", 32, "--schedule", "2bw", "--json"))
        == 0
    )
    assert json.loads(capsys.readouterr().out)["schedule"] == "2bw"


def test_the_chosen_plan_trains_as_one_device_would(symbolic, tmp_path):
    training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.01))
    fast = Device("cpu:0")
    losses = []
    for number, cluster in enumerate((Cluster((fast,)), Cluster((fast, Device("cpu:1", flops=2e10))))):
        plan = plan_best(
            lambda b: ps.from_onnx(symbolic, dims={"batch": b}),
            cluster,
            training,
            batch=16,
            sizes=(4,),
            schedules=("1f1b",),
        )
        rng = np.random.default_rng(0)
        batches = [
            {v.name: rng.normal(size=(16, *v.type.dims[1:])).astype(np.float32) for v in plan.module.data_inputs}
            for _ in range(3)
        ]
        with ps.open(ps.compile(plan, tmp_path / f"b{number}", backend="numpy")) as job:
            losses.append(list(job.run(batches)))
    np.testing.assert_allclose(losses[1], losses[0], rtol=1e-5)


def test_the_end_of_the_passes_is_told_once(symbolic, capsys):
    """Sizes of microbatches are profiled by passes as well, whose end is of no interest: the control tells it."""
    training, cluster = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.01)), Cluster.local(2)
    told, alone = [], []
    plan_best(
        lambda b: ps.from_onnx(symbolic, dims={"batch": b}),
        cluster,
        training,
        batch=8,
        sizes=(2, 4),
        progress=lambda *now: told.append(now),
    )
    assert [done == total for done, total, _ in told].count(True) == 1
    assert told[-1][2] == "done"
    cases, sizes = {what.partition(" (")[2] for _, _, what in told}, {"microbatches of 2)", "microbatches of 4)", ""}
    assert cases >= sizes
    assert all(case.startswith(("tp=2", "teams")) for case in cases - sizes)
    before_partition(
        ps.from_onnx(symbolic, dims={"batch": 2}),
        cluster,
        training,
        feedback=Feedback(progress=lambda *now: alone.append(now)),
    )
    assert [done == total for done, total, _ in alone].count(True) == 1


def test_an_error_does_not_stand_behind_the_line_of_progress(symbolic, tmp_path, capsys, monkeypatch):
    tight = tmp_path / "tight.toml"
    tight.write_text('[[device]]\nname = "cpu:0"\nmemory = "100 KB"\n')
    monkeypatch.setattr("sys.stderr.isatty", lambda: True)
    assert main(command("plan", symbolic, "--cluster", tight, *TRAIN, "--dim", "batch=4")) == 4
    told = capsys.readouterr().err
    assert "\r\x1b[Kpasses 0/" in told
    assert "\npenstock: error: " in told


def test_what_does_not_fit_says_what_would(symbolic, tmp_path, capsys):
    """With the memory that the hint names the passes take a plan. The control: with three quarters of what the formulas ask for, none."""

    def planned(memory):
        tight = tmp_path / "tight.toml"
        tight.write_text("".join(f'[[device]]\nname = "cpu:{i}"\nmemory = {memory}\n' for i in range(2)))
        return main(command("plan", symbolic, "--cluster", tight, *UNSPLIT, "--batch", 8))

    assert planned(100_000) == DoesNotFit.exit_code == 4
    told = capsys.readouterr().err
    estimate, named = (
        float(re.search(rf"{words} ([\d.]+) times", told)[1]) for words in ("fits .*: with", "and the others")
    )
    assert planned(int(100_000 * named)) == 0
    assert planned(int(100_000 * 0.75 * estimate)) == 4


def limited(memory, count=1):
    return Cluster(tuple(Device(f"cpu:{i}", spaces=(("ram", memory),)) for i in range(count)))


def test_parts_are_computed_again_before_nothing_fits(tmp_path):
    """As a plan by hand does in the same memory, where whole stages computed again do not fit, nor without: the controls."""
    path = write_gpt(tmp_path / "g.onnx", layers=2, width=32, heads=2, vocab=64, positions=32)
    model, training = (
        ps.from_onnx(path, dims={"batch": 4}),
        ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.1), microbatches=2),
    )

    def peak(plan):
        return max(row["peak"] for row in plan.as_dict()["memory"].values())

    whole = peak(ps.plan(model, limited(1 << 40), training, recompute="none"))
    # Of less memory the estimates say that it is too little, and the passes that it is enough.
    for memory, more in ((int(0.81 * whole), 1.0), (int(0.72 * whole), 1.05)):
        assert peak(ps.plan(model, limited(memory), training)) <= memory
        plan = plan_best(lambda size: model, limited(memory), training, batch=8, schedules=("1f1b",))
        assert peak(plan) <= memory
        assert [stage.in_parts for stage in plan.search.chosen.plan.stages] == [True]
        assert plan.search.more_memory == more
        told = list(argument(plan.search))
        assert any("what if: memory without limit" in line and "faster" in line for line in told)
        assert sum("by the exact count of the passes the plan fits" in line for line in told) == (more > 1)
    for mode in ("none", "all"):
        with pytest.raises(DoesNotFit):
            plan_best(lambda size: model, limited(memory), training, batch=8, schedules=("1f1b",), recompute=mode)


def test_devices_whose_stages_are_too_large_are_given_less(tmp_path, monkeypatch):
    """Memory is short everywhere, and the formulas see less of it used than the passes count: less on all devices fits nowhere."""
    model = write_gpt(tmp_path / "model.onnx", layers=2, width=32, heads=2, vocab=64, positions=16)
    (tmp_path / "cluster.toml").write_text(
        "".join(f'[[device]]\nname = "d{i}"\nmemory = "290 KiB"\nflops = "50 GFLOP/s"\n' for i in range(3))
    )
    cluster, training = (
        Cluster.load(tmp_path / "cluster.toml"),
        ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3)),
    )

    def plan():
        return plan_best(
            lambda size: ps.from_onnx(model, dims={"batch": size}),
            cluster,
            training,
            batch=16,
            sizes=(1, 2, 4),
            schedules=("1f1b",),
            shard="none",
        )

    found = plan()
    assert max(row["peak"] for row in found.as_dict()["memory"].values()) <= 290 * 1024
    assert "1f1b" in found.search.refused
    assert any("not the fastest by these" in line for line in argument(found.search))
    monkeypatch.setattr(tries, "CORRECTIONS", 0)
    with pytest.raises(DoesNotFit, match="refused by the passes"):
        plan()


def test_smaller_microbatches_are_proposed_where_there_is_a_plan_for_them(symbolic, tmp_path, capsys):
    said = {}
    for memory in ("700 KB", "2300 KB"):
        path = tmp_path / "tight.toml"
        path.write_text(f'[[device]]\nname = "cpu:0"\nmemory = "{memory}"\n')
        words = ["plan", symbolic, "--cluster", path, *UNSPLIT, "--batch", 256]
        assert main(command(*words, "--dim", "batch=256")) == 4
        said[memory] = re.search(
            r"hint: --dim batch=(\d+), smaller microbatches, for which there is a plan; or ", capsys.readouterr().err
        )
        if said[memory]:
            assert main(command(*words, "--dim", f"batch={said[memory][1]}")) == 0
            assert main(command(*words, "--dim", "batch=128")) == (0 if int(said[memory][1]) == 128 else 4)
    assert said["2300 KB"]
    assert not said["700 KB"]


def test_other_sizes_are_tried_where_none_fits(symbolic, tmp_path, capsys, monkeypatch):
    """Were the whole batch the only size that is tried first. The control: a memory in which none of the others fits."""
    for home in ("penstock.planning.tries", "penstock.planning.search"):
        monkeypatch.setattr(f"{home}.sizes_of", lambda batch, fixed: (batch,))
    said = {}
    for memory, code in (("2300 KB", 0), ("100 KB", 4)):
        path = tmp_path / "tight.toml"
        path.write_text(f'[[device]]\nname = "cpu:0"\nmemory = "{memory}"\n')
        assert main(command("plan", symbolic, "--cluster", path, *UNSPLIT, "--batch", 256)) == code
        said[memory] = capsys.readouterr().err
        assert (
            "no plan fits with the sizes of microbatches that were tried first; trying 1, 2, 4, 8, 16" in said[memory]
        )
    assert "no plan fits into the memory of the devices" in said["100 KB"]
    assert tries.other_sizes(12) == (1, 2, 3, 4, 6)


def test_the_nearest_change_is_of_sizes_that_were_profiled(symbolic, tmp_path, capsys):
    """Of the many divisors of this batch few are."""
    tight = tmp_path / "tight.toml"
    tight.write_text("".join(f'[[device]]\nname = "cpu:{i}"\nmemory = "700 KB"\n' for i in range(2)))
    assert main(command("plan", symbolic, "--cluster", tight, *UNSPLIT, "--batch", 64)) == 4
    told = capsys.readouterr().err
    assert "hint: give cpu:" in told or "; or give cpu:" in told
    assert re.search(r"cpu:\d, which has 683\.6 KiB, holds \d+\.\d (K|M)iB:\n  weights ", told)
    assert " bytes" not in told


def test_changes_are_against_the_best_by_the_same_formulas(symbolic):
    """What was chosen may be slower by them: a limit that does not matter still changes nothing."""
    cluster = Cluster(tuple(Device(f"cpu:{i}", spaces=(("ram", 1 << 33),)) for i in range(2)))
    training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.01))
    plan = plan_best(
        lambda b: ps.from_onnx(symbolic, dims={"batch": b}),
        cluster,
        training,
        batch=16,
        sizes=(4,),
        schedules=("1f1b",),
    )
    search, usual = plan.search, plan.search.result.best
    slower = replace(search, chosen=replace(usual, judged=replace(usual.judged, step=1.1 * usual.step)))
    assert not any(stage.recompute for stage in usual.plan.stages)
    for told in (list(argument(search)), list(argument(slower))):
        assert any(re.fullmatch(r"what if: memory without limit: .* \(the same\)", line) for line in told)
        assert not any("recomputation: none" in line for line in told)
        assert any("what if: recomputation: all" in line and "slower" in line for line in told)
        assert any(
            line.startswith("planner: with one thing changed in what was given, by its formulas, against ")
            for line in told
        )
    assert any(
        re.search(r"by its formulas another plan of 1f1b is 9\.1% faster, .* ms, but not when it is simulated", line)
        for line in told
    )
    # What the formulas find faster and the simulator does not is said to be so.
    other = replace(
        usual, plan=replace(usual.plan, schedule="gpipe"), judged=replace(usual.judged, step=0.9 * usual.step)
    )
    result = replace(search.result, outcomes={"gpipe": other, **search.result.outcomes})
    for refined, said in (({"gpipe": Refined(other, 1.2 * usual.step, 1)}, True), ({}, False)):
        told = list(argument(replace(search, result=result, refined=refined)))
        (line,) = [line for line in told if line.startswith("what if: schedule gpipe: ")]
        assert "(10.0% faster)" in line
        assert (", but " in line and line.endswith(" simulated")) == said
    # Nor is a number made up where no plan of a schedule could be simulated, and plan.json stays JSON.
    refused = replace(search, result=result, refined={"gpipe": Refined(other, float("inf"), 0)})
    (line,) = [line for line in argument(refused) if line.startswith("what if: schedule gpipe: ")]
    assert line.endswith(", but no plan of it is legal and fits when simulated")
    facts = planner_facts(refused)
    assert facts["simulated"] == {"gpipe": None}
    json.dumps(facts, allow_nan=False)


def test_flags_that_the_planner_decides(symbolic, capsys):
    assert main(command("plan", symbolic, *UNSPLIT, "--batch", 8, "--stages", 2, "--microbatches", 2)) == 2
    assert "--stages, --microbatches with --batch: the planner chooses that" in capsys.readouterr().err
    assert main(command("plan", symbolic, *UNSPLIT, "--batch", 8, "--offload", "weights", "--schedule", "1f1b")) == 2
    assert "it takes three stages or more" in capsys.readouterr().err
    assert main(command("plan", symbolic, *UNSPLIT, "--batch", 8, "--spill", "/tmp/")) == 2
    assert "add --offload state" in capsys.readouterr().err
    assert main(command("plan", symbolic, "--batch", 8)) == 2
    assert "--batch plans for training" in capsys.readouterr().err
    assert main(command("plan", symbolic, "--dim", "batch=4", *TRAIN, "--schedule", "auto")) == 2
    assert "--schedule auto" in capsys.readouterr().err


def test_sizes_of_microbatches():
    assert sizes_of(12, 4) == (4,)
    with pytest.raises(UsageError, match="batch of 10 samples cannot be made of microbatches of 4"):
        sizes_of(10, 4)
    assert sizes_of(7, None) == (1, 7)
    found = sizes_of(720, None)
    assert found[0] == 1
    assert found[-1] == 720
    assert len(found) <= 5
    assert all(720 % b == 0 for b in found)


def test_open_dimensions(symbolic, tmp_path):
    assert open_dimensions(symbolic, {}, {}) == ("batch", [])
    assert open_dimensions(symbolic, {"batch": 4}, {}) == (None, [])
    model = onnx.load(symbolic)
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "width"
    onnx.save(model, tmp_path / "two.onnx")
    assert open_dimensions(tmp_path / "two.onnx", {}, {}) == ("batch", ["width"])
    model.graph.input[0].type.tensor_type.shape.dim[1].dim_param = "batch"
    onnx.save(model, tmp_path / "same.onnx")
    assert open_dimensions(tmp_path / "same.onnx", {}, {}) == (None, ["batch"])


# ------------------------------------------------------------------------------------------------ grades


def planned(capsys, symbolic, *words):
    assert main(command("plan", symbolic, "--dim", "batch=4", *TRAIN, "--json", *words)) == 0
    return json.loads(capsys.readouterr().out)


def test_a_plan_file_is_carried_out(symbolic, tmp_path, capsys):
    given = planned(capsys, symbolic, "--devices", 3, "--schedule", "2bw", "--microbatches", 4)
    path = tmp_path / "plan.json"
    path.write_text(json.dumps(given))
    again = planned(capsys, symbolic, "--devices", 3, "--plan", path)
    for key in ("schedule", "microbatches", "recompute", "stages", "memory", "samples_per_microbatch", "precision"):
        assert again[key] == given[key], key
    # The file says how many samples make a microbatch, and in which precision.
    assert main(command("plan", symbolic, *TRAIN, "--json", "--devices", 3, "--plan", path)) == 0
    assert json.loads(capsys.readouterr().out)["samples_per_microbatch"] == 4
    assert main(command("plan", symbolic, "--dim", "batch=8", *TRAIN, "--devices", 3, "--plan", path)) == 2
    assert "microbatches of 4 samples, the model's are of 8" in capsys.readouterr().err
    assert main(command("plan", symbolic, *TRAIN, "--devices", 3, "--plan", path, "--precision", "bf16")) == 2
    assert "--precision bf16, but the plan is in f32" in capsys.readouterr().err
    # Edited: two stages, the first on two devices with unequal shares, another schedule.
    first, _, third = given["stages"]
    first |= {"devices": ["cpu:2", "cpu:0"], "shares": [3, 1]}
    edited = given | {"schedule": "1f1b", "stages": [first, third | {"stage": 1, "devices": ["cpu:1"]}]}
    path.write_text(json.dumps(edited))
    found = planned(capsys, symbolic, "--devices", 3, "--plan", path)
    assert found["schedule"] == "1f1b"
    assert [(s["devices"], s["shares"]) for s in found["stages"]] == [(["cpu:2", "cpu:0"], [3, 1]), (["cpu:1"], [4])]
    assert found["stages"][1]["starts_at"] == third["starts_at"]


def test_all_that_is_wrong_with_a_plan_file_is_told(symbolic, tmp_path, capsys):
    path = tmp_path / "plan.json"
    stages = [
        {"stage": 0, "starts_at": "fc1", "devices": ["cpu:0", "cpu:1"], "shares": [3, 3]},
        {"stage": 2, "devices": [], "share": 1},
        {"starts_at": "fc3", "devices": ["cpu:1", "cpu:2"]},
    ]
    path.write_text(
        json.dumps({"schedule": "3bw", "microbatches": 4, "recompute": "some", "stages": stages, "stage": 1})
    )
    assert main(command("plan", symbolic, "--dim", "batch=4", "--devices", 2, *TRAIN, "--plan", path)) == 2
    told = capsys.readouterr().err
    for part in (
        "unknown key 'stage'",
        "schedule '3bw' is none of",
        "recompute 'some' is none of auto, none, all",
        "stage 0: is the first and begins with the model, not at 'fc1'",
        "stage 0: `shares` must be 1 or more each and 4 together, got 3, 3",
        "stage 1: unknown key 'share'",
        "stage 1: stands in the place of stage 1, but says it is stage 2",
        "stage 1: needs `starts_at`",
        "stage 1: needs `devices`",
        "stage 2: needs `shares`, as it has several devices",
        "stage 2: no device 'cpu:2' in the cluster, it has cpu:0, cpu:1",
        "stages 0, 2: device 'cpu:1' is listed 2 times",
    ):
        assert part in told, part
    for text, said in (
        ("[", "cannot read the plan"),
        ("[" * 100000, "cannot read the plan"),
        ('{"stages": 1, "stages": 2}', "stands there twice"),
        ("[]", "is not a plan"),
        ("{}", "schedule is missing\n  - microbatches is missing\n  - stages is missing"),
        ('{"schedule": "1f1b", "microbatches": 1}', "the plan has problems:\n  - stages is missing\n"),
        ('{"schedule": "1f1b", "microbatches": "4", "stages": [{"devices": ["cpu:0"], "shares": [4]}]}', "got '4'\n"),
    ):
        path.write_text(text)
        assert main(command("plan", symbolic, "--dim", "batch=4", *TRAIN, "--plan", path)) == 2
        told = capsys.readouterr().err
        assert said in told
        assert "together" not in told
    path.write_text("{}")
    assert main(command("plan", symbolic, "--dim", "batch=4", *TRAIN, "--plan", path, "--stages", 2)) == 2
    assert "--stages with --plan: the file says that" in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ estimates and the passes


def test_a_call_costs_what_it_costs(symbolic, tmp_path, capsys):
    """With calls of five milliseconds nothing is gained by a second stage, and the planner's seconds are near the simulated ones."""
    path = tmp_path / "slow.toml"
    path.write_text('[[device]]\nname = "a"\ncall_overhead = 5e-3\n[[device]]\nname = "b"\ncall_overhead = 5e-3\n')
    assert main(command("plan", symbolic, "--cluster", path, *UNSPLIT, "--batch", 64, "--replicas", 1, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert len(found["stages"]) == 1
    assert found["planner"]["step_s"] == pytest.approx(found["predicted"]["step_s"], rel=0.2)


def test_batches_that_wait_are_counted(symbolic, tmp_path, capsys):
    """What the planner takes for the memory of a plan is at least most of what the passes count for it."""
    path = tmp_path / "two.toml"
    path.write_text('[[device]]\nname = "a"\nmemory = "4 MB"\n[[device]]\nname = "b"\nmemory = "4 MB"\n')
    assert main(command("plan", symbolic, "--cluster", path, *UNSPLIT, "--batch", 512, "--replicas", 1, "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert not found["planner"]["refused"]
    assert max(row["data"] for row in found["memory"].values()) >= 5 * 512 * 64 * 4


def test_a_flat_list_of_devices_is_explained(tmp_path):
    model = ps.from_onnx(write_gpt(tmp_path / "m.onnx", layers=1, width=16, heads=2, vocab=32, positions=8, batch=2))
    with pytest.raises(UsageError) as error:
        ps.plan(model, Cluster.local(2), devices=["cpu:0", "cpu:1"])
    assert "devices lists the devices of every stage, and 'cpu:0', 'cpu:1' are no list" in str(error.value)
    for stages in ([["cpu:0"], ["cpu:1"]], [["cpu:0", "cpu:1"]]):
        assert f"devices={stages}" in str(error.value)
        assert ps.plan(model, Cluster.local(2), devices=stages, microbatches=2).module.rank_devices() == [
            "cpu:0",
            "cpu:1",
        ]
