"""Runs against their plans: what a grade says, which corrections are kept, and what is no run of the plan."""

from __future__ import annotations

import json
from dataclasses import replace

import msgspec
import pytest
from oracles.planned_models import TRAIN, command

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.calibration.corrections import best_prices, corrected
from penstock.calibration.grade import grade, step_times
from penstock.calibration.measured import Measured
from penstock.commands.parser import main
from penstock.ir.cluster.cluster import Cluster, Device, Link
from penstock.passes.costs.prices import rank_seconds
from penstock.passes.kernels.divide import kernels_of
from penstock.passes.simulator.forecast import forecast, seconds_of
from penstock.planning.predict import predict, predict_here
from penstock.support.errors import UsageError

pytestmark = pytest.mark.usefixtures("own_cache")


def compiled(symbolic, folder, cluster, microbatches=2, **options):
    training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.1), microbatches=microbatches)
    return open_bundle(
        ps.compile(
            ps.plan(ps.from_onnx(symbolic, dims={"batch": 4}), cluster, training, **options), folder, backend="numpy"
        )
    )


def slow(number=2, bandwidth=1e9, **of_device):
    """Devices on which even a small model is mostly work."""
    devices = [Device(f"cpu:{i}", flops=1e9, bandwidth=1e8, **of_device) for i in range(number)]
    return Cluster(
        tuple(devices), tuple(Link(f"cpu:{i}", f"cpu:{j}", bandwidth, 1e-6) for i in range(number) for j in range(i))
    )


@pytest.fixture
def bundle(symbolic, tmp_path):
    return compiled(symbolic, tmp_path / "bundle", slow())


@pytest.fixture
def of_tvm(bundle):
    return as_tvm(bundle)


def as_tvm(bundle):
    """The bundle as if it were of compiled code, whose runs estimates learn from."""
    return replace(bundle, manifest=msgspec.structs.replace(bundle.manifest, backend="tvm"))


def trace(path, bundle, seconds):
    """A trace in which computations took what `seconds(rank, kind)` says."""
    events = [
        {"ph": "X", "name": f"{bundle.rank(rank).stage}{kind}0", "pid": rank, "ts": 0, "dur": seconds(rank, kind) * 1e6}
        for rank, kind in rank_seconds(bundle.module)
    ]
    path.write_text(json.dumps({"traceEvents": events}))
    return path


def beside_work(bundle):
    """Calls and launches by rank and kind, by hand."""
    found = {}
    for entry in bundle.manifest.ranks:
        device = bundle.module.cluster.device(entry.device)
        for kind in "FBU":
            kernels = kernels_of(bundle.module.stage_graph(entry.stage, kind))
            found[entry.rank, kind] = device.call_overhead + len(kernels) * device.overhead
    return found


def simulated(bundle, factor):
    """The step if work took so many times what was estimated, and links and calls what they do."""
    plain, beside = rank_seconds(bundle.module), beside_work(bundle)
    return forecast(
        bundle.module, seconds_of(bundle.module, {k: beside[k] + factor * (s - beside[k]) for k, s in plain.items()}), 4
    ).step


def metrics(path, seconds):
    path.write_text("".join(json.dumps({"step": i, "loss": 1.0, "step_s": s}) + "\n" for i, s in enumerate(seconds)))
    return path


def test_a_grade_is_the_median_without_the_first_steps(bundle, tmp_path):
    promised = bundle.plan["predicted"]["step_s"]
    found = grade(bundle, metrics(tmp_path / "m.jsonl", [99.0] * 3 + [2 * promised] * 5 + [99.0]))
    assert found.measured == pytest.approx(2 * promised)
    assert not found.kept  # a run of the interpreter
    assert step_times(metrics(tmp_path / "short.jsonl", [9.0, 1.0])) == [1.0]


def test_a_step_teaches_what_computation_explains(symbolic, tmp_path):
    """Links slow enough to be seen: work that took three times as long does not make the step three times as long."""
    bundle = as_tvm(compiled(symbolic, tmp_path / "links", slow(bandwidth=1e6), split_at=["fc3.product"]))
    measured = simulated(bundle, 3.0)
    found = grade(bundle, metrics(tmp_path / "m.jsonl", [measured] * 9))
    assert found.factor == pytest.approx(3, rel=2e-3)
    assert found.measured / found.predicted < 2.9, "the control: what a whole step is off by is something else"
    faster = grade(bundle, metrics(tmp_path / "m.jsonl", [simulated(bundle, 0.75)] * 9))
    assert faster.factor == pytest.approx(0.75, rel=2e-3)
    assert corrected().factor == pytest.approx((3 + 0.75) / 2, rel=2e-3)


def test_a_step_of_waiting_teaches_nothing(symbolic, tmp_path, capsys):
    bundle = as_tvm(compiled(symbolic, tmp_path / "links", slow(bandwidth=2e4), split_at=["fc3.product"]))
    steps = metrics(tmp_path / "m.jsonl", [3 * bundle.plan["predicted"]["step_s"]] * 9)
    found = grade(bundle, steps)
    assert (found.factor, found.kept, corrected()) == (None, False, None)
    # Its trace does: what computations took stands there.
    beside = beside_work(bundle)
    took = {key: beside[key] + 5 * (seconds - beside[key]) for key, seconds in rank_seconds(bundle.module).items()}
    found = grade(bundle, steps, trace(tmp_path / "t.json", bundle, lambda rank, kind: took[rank, kind]))
    assert found.factor == pytest.approx(5)
    assert corrected().factor == pytest.approx(5)
    assert main(command("plan", bundle.path, "--grade", steps)) == 0
    assert (
        "no correction is kept, as links, messages and calls alone are more than half of the time; a run with --trace"
        in capsys.readouterr().err
    )


def test_corrections_are_of_work_not_of_calls(symbolic, tmp_path):
    """Estimates, what is learnt, and what the planner counts for calls go by one rule."""
    bundle = as_tvm(compiled(symbolic, tmp_path / "calls", slow(call_overhead=2e-3, overhead=1e-4)))
    plain, beside = rank_seconds(bundle.module), beside_work(bundle)
    took = {key: beside[key] + 4 * (seconds - beside[key]) for key, seconds in plain.items()}
    grade(
        bundle,
        metrics(tmp_path / "m.jsonl", [1.0] * 9),
        trace(tmp_path / "t.json", bundle, lambda rank, kind: took[rank, kind]),
    )
    assert sum(took.values()) / sum(plain.values()) < 3.9, "the control: calls are a part of it"
    assert corrected().factor == pytest.approx(4)
    assert rank_seconds(bundle.module, best_prices()) == pytest.approx(took)
    # And where calls are most of it, a run says nothing of the rest.
    bundle = as_tvm(compiled(symbolic, tmp_path / "only-calls", slow(call_overhead=1.0)))
    assert (
        grade(
            bundle, metrics(tmp_path / "m.jsonl", [9.0] * 9), trace(tmp_path / "t.json", bundle, lambda rank, kind: 1.5)
        ).factor
        is None
    )


def test_corrected_estimates_know_caches(of_tvm, tmp_path):
    """The estimate is that of the plan, times a factor; also where a part of it is in a cache."""
    cached = of_tvm.module.but(cluster=slow(cache=1 << 22, cache_bandwidth=1e9))
    plain = rank_seconds(cached)
    assert sum(plain.values()) < 0.9 * sum(rank_seconds(of_tvm.module).values()), "the control: the cache is seen"
    assert rank_seconds(cached, best_prices()) == pytest.approx(plain)
    grade(of_tvm, metrics(tmp_path / "m.jsonl", [simulated(of_tvm, 2.0)] * 9))
    beside = beside_work(of_tvm)
    assert rank_seconds(cached, best_prices()) == pytest.approx(
        {k: beside[k] + 2 * (s - beside[k]) for k, s in plain.items()}, rel=2e-3
    )


def test_replicas_of_a_stage_are_one_entry(symbolic, tmp_path):
    """What is kept is the median of its ranks, not what the last of them took."""
    bundle = as_tvm(
        compiled(symbolic, tmp_path / "copies", slow(3), 3, devices=[["cpu:0", "cpu:1", "cpu:2"]], shares=[[1, 1, 1]])
    )
    took = {0: 0.25, 1: 2.0, 2: 0.5}
    grade(
        bundle,
        metrics(tmp_path / "m.jsonl", [9.0] * 9),
        trace(tmp_path / "t.json", bundle, lambda rank, kind: took[rank]),
    )
    found = Measured().stage(bundle.module, 0, bundle.module.cluster.device("cpu:2"))
    assert found == pytest.approx({"F": 0.5, "B": 0.5, "U": 0.5})


def test_a_run_counts_once(of_tvm, tmp_path, capsys):
    steps = metrics(tmp_path / "m.jsonl", [simulated(of_tvm, 2.0)] * 9)
    for _ in range(3):
        assert grade(of_tvm, steps).kept
    assert corrected().runs == 1
    # Its trace knows better, and takes its place; another run is another one.
    beside = beside_work(of_tvm)
    took = {key: beside[key] + 4 * (seconds - beside[key]) for key, seconds in rank_seconds(of_tvm.module).items()}
    grade(of_tvm, steps, trace(tmp_path / "t.json", of_tvm, lambda rank, kind: took[rank, kind]))
    assert (corrected().runs, corrected().factor) == (1, pytest.approx(4))
    grade(of_tvm, metrics(tmp_path / "other.jsonl", [simulated(of_tvm, 3.0)] * 9))
    assert corrected().runs == 2


@pytest.mark.parametrize("factor", [0.01, 50.0])
def test_factors_that_are_far_off_are_not_kept(of_tvm, tmp_path, factor, monkeypatch, capsys):
    beside = beside_work(of_tvm)
    took = {key: beside[key] + factor * (seconds - beside[key]) for key, seconds in rank_seconds(of_tvm.module).items()}
    monkeypatch.setattr("penstock.calibration.grade._says_enough", lambda *seconds: True)
    found = grade(
        of_tvm,
        metrics(tmp_path / "m.jsonl", [1.0] * 9),
        trace(tmp_path / "t.json", of_tvm, lambda rank, kind: took[rank, kind]),
    )
    assert (found.factor, found.kept, corrected()) == (pytest.approx(factor), False, None)
    monkeypatch.setattr("penstock.backends.bundle.format.open_bundle", lambda path: of_tvm)
    monkeypatch.setattr("penstock.calibration.grade.grade", lambda *given: found)
    assert main(command("plan", of_tvm.path, "--grade", tmp_path / "m.jsonl")) == 0
    assert f"warning: work took {factor:g} times as long; that is not kept" in capsys.readouterr().err


def test_corrections_change_the_next_prediction(of_tvm, symbolic, tmp_path, capsys):
    def predicted():
        assert (
            main(command("plan", symbolic, "--dim", "batch=4", "--devices", 2, *TRAIN, "--microbatches", 2, "--json"))
            == 0
        )
        return json.loads(capsys.readouterr().out)["predicted"]

    before = predicted()
    assert before["correction"] is None
    for factor in (3.0, 2.0, 4.0):
        assert grade(of_tvm, metrics(tmp_path / "m.jsonl", [simulated(of_tvm, factor)] * 9)).kept
    assert corrected().factor == pytest.approx(3, rel=2e-3)
    assert corrected().runs == 3
    after = predicted()
    assert after["correction"] == pytest.approx(3, rel=2e-3)
    for rank, seconds in before["busy_s"].items():
        assert seconds < after["busy_s"][rank] < 3 * seconds


def test_measured_stages_are_what_the_next_plan_goes_by(bundle):
    """With times of all stages the prediction is that of the simulator with these."""
    plain = predict(bundle.module)
    table = Measured()
    for rank in (0, 1):
        table.keep_stage(bundle.module, rank, bundle.rank(rank).threads, {"F": 0.25, "B": 0.5, "U": 0.125})
    found = predict_here(bundle.module)
    assert found.measured == 6
    assert found.correction is None
    assert found.busy == pytest.approx({0: 1.625, 1: 1.625}, rel=1e-3)  # and the ends of messages
    assert found.step > 20 * plain.step


def test_the_command_grades_a_real_run(bundle, tmp_path, capsys):
    path = bundle.path
    assert (
        main(command("run", path, "--steps", 4, "--metrics", tmp_path / "m.jsonl", "--trace", tmp_path / "t.json")) == 0
    )
    assert main(command("plan", path, "--grade", tmp_path / "m.jsonl", "--trace", tmp_path / "t.json")) == 0
    text = capsys.readouterr().out
    assert "measured / predicted" in text
    found = predict_here(bundle.module)
    assert found.measured == 0  # this bundle is of another back end than plans are for
    assert predict(bundle.module).step == pytest.approx(bundle.plan["predicted"]["step_s"])
    assert [line.split()[:3] for line in text.splitlines() if line.startswith("rank 1")][:2] == [
        ["rank", "1", "F"],
        ["rank", "1", "B"],
    ]
    assert corrected() is None  # a run of the interpreter says nothing about compiled code
    capsys.readouterr()
    other = ("--replicas", 2, "--optimizer", "adam", "--devices", 3, "--batch", 8)
    assert main(command("plan", path, "--grade", tmp_path / "m.jsonl", *other)) == 2
    told = capsys.readouterr().err
    assert all(flag in told for flag in other[::2])
    assert main(command("plan", "model.onnx", "--trace", tmp_path / "t.json")) == 2
    capsys.readouterr()
    assert main(command("plan", path, "--grade", tmp_path / "m.jsonl", "--json")) == 0
    found = json.loads(capsys.readouterr().out)
    assert found["ratio"] == pytest.approx(found["measured_s"] / found["predicted_s"])


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("", "has no steps"),
        ('{"step_s": true}', "step_s is True"),
        ('{"step_s": 1e308}', "step_s is 1e"),
        ("[" * 100000, "cannot read the metrics"),
        ("{}", "cannot read the metrics"),
        ("[1]", "cannot read the metrics"),
        ('{"step_s": -1}', "step_s is -1"),
        ("\x00", "cannot read"),
    ],
)
def test_metrics_that_are_none(bundle, tmp_path, text, said):
    path = tmp_path / "bad.jsonl"
    path.write_text(text)
    with pytest.raises(UsageError, match=said):
        grade(bundle, path)


def test_metrics_of_another_bundle(bundle, tmp_path):
    path = tmp_path / "m.jsonl"
    for samples in (8, 16):  # two microbatches of four
        path.write_text(json.dumps({"step": 0, "samples": samples, "step_s": 1.0}) + "\n")
        if samples == 8:
            assert grade(bundle, path).measured == 1.0
    with pytest.raises(UsageError, match="not of a run of this bundle: its steps have 16 samples, those of the plan 8"):
        grade(bundle, path)


def test_traces_that_are_of_something_else(bundle, tmp_path):
    good = metrics(tmp_path / "m.jsonl", [1.0] * 3)
    for text, said in (
        ("{}", "cannot read the trace"),
        ('{"traceEvents": []}', "not of a run of this bundle"),
        ('{"traceEvents": [{"ph": "X", "name": "5F0", "pid": 7, "dur": 1}]}', "not of a run of this bundle"),
    ):
        path = tmp_path / "t.json"
        path.write_text(text)
        with pytest.raises(UsageError, match=said):
            grade(bundle, good, path)
    with pytest.raises(SystemExit):
        raise SystemExit(main(command("plan", "model.onnx", "--grade", good)))


# ------------------------------------------------------------------------------------------------ plan files
