"""Sinks get the rows of the metrics file: checked with the packages where they are installed, else with modules that stand in for them."""

from __future__ import annotations

import json
import sys
import types
import urllib.error
import urllib.request
from importlib.util import find_spec

import pytest

from penstock.runtime.messages.control import Evaluation, Step
from penstock.runtime.telemetry.metrics import Metrics
from penstock.runtime.telemetry.sinks import (
    TOKEN_VARIABLE,
    PrometheusServer,
    Sinks,
    exposition,
    open_sink,
    sink_problems,
)
from penstock.support.errors import UsageError

STEPS = [Step(3, 4.5, (4.5,), 0.1, 10.0), Step(4, float("nan"), (float("nan"),), 0.1, 10.5, 2.0)]


def feed(texts: list[str], tmp_path) -> list[dict]:
    """Two steps through the metrics, whose file says what a sink has to get."""
    record = Metrics(tmp_path / "m.jsonl", 8, 3, 5, progress=False, log=texts)
    for step in STEPS:
        record.add(step)
    record.close()
    return [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]


def numbers(row: dict) -> dict[str, float]:
    return {name: float(value) for name, value in row.items() if name != "step" and value is not None}


class Recorder(types.ModuleType):
    """Stands in for wandb and mlflow."""

    def __init__(self, name: str) -> None:
        super().__init__(name)
        self.__spec__ = types.SimpleNamespace(name=name)
        self.calls: list[tuple] = []

    def __getattr__(self, name: str):
        if name.startswith("__"):
            raise AttributeError(name)

        def call(*args, **options):
            self.calls.append((name, *args, options))
            return self

        return call


@pytest.mark.parametrize(
    ("kind", "begin", "log", "end"),
    [
        ("wandb", [("init", {"project": "mine"})], "log", ("finish", {})),
        ("mlflow", [("set_experiment", "mine", {}), ("start_run", {})], "log_metrics", ("end_run", {})),
    ],
)
def test_rows_reach_a_module_that_stands_in(kind, begin, log, end, tmp_path, monkeypatch):
    module = Recorder(kind)
    monkeypatch.setitem(sys.modules, kind, module)
    rows = feed([f"{kind}:mine"], tmp_path)
    given = [call for call in module.calls if call[0] == log]
    assert module.calls == [*begin, *given, end]
    assert [call[2]["step"] for call in given] == [3, 4]
    for call, row in zip(given, rows, strict=True):
        assert str(call[1]) == str(numbers(row))  # nan is not itself
    assert "grad_norm" not in given[0][1]
    assert "grad_norm" in given[1][1]


@pytest.mark.skipif(find_spec("tensorboard") is None, reason="tensorboard is not installed")
def test_tensorboard_reads_them_back(tmp_path):
    from tensorboard.backend.event_processing.event_accumulator import EventAccumulator

    rows = feed([f"tensorboard:{tmp_path / 'events'}"], tmp_path)
    found = EventAccumulator(str(tmp_path / "events"))
    found.Reload()
    assert [(event.step, event.value) for event in found.Scalars("lr")] == [
        (3, pytest.approx(0.1)),
        (4, pytest.approx(0.1)),
    ]
    assert found.Scalars("samples_per_s")[1].value == pytest.approx(rows[1]["samples_per_s"], rel=1e-5)


@pytest.mark.skipif(find_spec("mlflow") is None, reason="mlflow is not installed")
def test_mlflow_reads_them_back(tmp_path, monkeypatch):
    import mlflow

    mlflow.set_tracking_uri(f"sqlite:///{tmp_path}/mlflow.db")
    feed(["mlflow:mine"], tmp_path)
    (run,) = mlflow.search_runs(experiment_names=["mine"], output_format="list")
    assert run.data.metrics["loss"] != run.data.metrics["loss"]
    assert run.data.metrics["grad_norm"] == 2.0


def test_prometheus_as_a_file_and_over_loopback(tmp_path):
    path = tmp_path / "deep" / "run.prom"
    rows = feed([f"prometheus:{path}"], tmp_path)
    lines = path.read_text().splitlines()
    found = dict(line.split() for line in lines if not line.startswith("#"))
    assert found == {"penstock_step": "4.0", "penstock_loss": "NaN"} | {
        f"penstock_{name}": repr(value) for name, value in numbers(rows[1]).items() if name != "loss"
    }
    assert [line for line in lines if line.startswith("#")] == [f"# TYPE {name} gauge" for name in found]
    assert [entry.name for entry in path.parent.iterdir()] == ["run.prom"]
    sink = open_sink("prometheus:0")
    assert isinstance(sink, PrometheusServer)
    host, port = sink.address
    assert host == "127.0.0.1"
    try:
        sink.add(7, {"loss": 0.5})
        with urllib.request.urlopen(f"http://127.0.0.1:{port}/metrics", timeout=5) as answer:
            assert answer.headers["Content-Type"] == "text/plain; version=0.0.4"
            assert answer.read().decode() == exposition(7, {"loss": 0.5})
        with pytest.raises(urllib.error.HTTPError, match="404"):
            urllib.request.urlopen(f"http://127.0.0.1:{port}/etc/passwd", timeout=5)
        with pytest.raises(UsageError, match=f"prometheus:{port}: Address already in use"):
            open_sink(f"prometheus:{port}")
    finally:
        sink.close()


def test_prometheus_demands_a_token(tmp_path, monkeypatch):
    token = "t0ken" * 8
    (tmp_path / "token").write_text(f"{token}\n")
    monkeypatch.setenv(TOKEN_VARIABLE, str(tmp_path / "token"))
    sink = open_sink("prometheus:0")
    assert isinstance(sink, PrometheusServer)
    address = f"http://127.0.0.1:{sink.address[1]}/metrics"
    try:
        sink.add(7, {"loss": 0.5})
        for wrong in (
            {},
            {"Authorization": "Bearer "},
            {"Authorization": f"Bearer {token}x"},
            {"Authorization": token},
        ):
            with pytest.raises(urllib.error.HTTPError, match="401"):
                urllib.request.urlopen(urllib.request.Request(address, headers=wrong), timeout=5)
        with urllib.request.urlopen(
            urllib.request.Request(address, headers={"Authorization": f"Bearer {token}"}), timeout=5
        ) as answer:
            assert answer.read().decode() == exposition(7, {"loss": 0.5})
    finally:
        sink.close()
    (tmp_path / "token").write_text("short")
    (problem,) = sink_problems(["prometheus:0"])
    assert "PENSTOCK_METRICS_TOKEN" in problem
    assert "short" not in problem


def test_what_cannot_be_opened_is_said_at_once(monkeypatch):
    monkeypatch.setattr("penstock.runtime.telemetry.sinks.find_spec", lambda name: None)
    assert sink_problems(["prometheus:9090", "prometheus:0.0.0.0:9090", "prometheus:a.prom"]) == []
    problems = sink_problems(
        ["wandb:mine", "tensorboard:", "grafana:x", "prometheus:", "prometheus:99999", "prometheus:x"]
    )
    assert (
        problems[0]
        == "--log wandb:mine: needs the package wandb, which is not installed (pip install 'penstock[wandb]')"
    )
    assert problems[1] == "--log tensorboard:: expected tensorboard:DIR"
    assert problems[2].startswith(
        "--log grafana:x: knows tensorboard:DIR, wandb:PROJECT, mlflow:EXPERIMENT, prometheus:PORT"
    )
    assert len(problems) == 6


def test_a_sink_that_fails_is_left_out_and_the_run_goes_on(tmp_path, monkeypatch, capsys):
    module = Recorder("wandb")
    monkeypatch.setitem(sys.modules, "wandb", module)

    def fail(*args, **options):
        raise ConnectionError("nobody there")

    module.log = fail
    rows = feed(["wandb:mine", f"prometheus:{tmp_path / 'a.prom'}"], tmp_path)
    assert [row["step"] for row in rows] == [3, 4]
    said = capsys.readouterr().err
    assert said.count("--log wandb:mine failed and gets no more: ConnectionError: nobody there") == 1
    assert "penstock_step 4.0" in (tmp_path / "a.prom").read_text()


def test_a_sink_that_cannot_be_opened_is_an_error_of_ours(tmp_path, monkeypatch):
    module = Recorder("wandb")
    monkeypatch.setitem(sys.modules, "wandb", module)

    def fail(*args, **options):
        raise RuntimeError("no key")

    module.init = fail
    with pytest.raises(UsageError, match="--log wandb:mine: RuntimeError: no key"):
        open_sink("wandb:mine")
    (tmp_path / "file").touch()
    with pytest.raises(UsageError, match=r"a\.prom: "):
        open_sink(f"prometheus:{tmp_path / 'file' / 'a.prom'}")


def test_evaluations_do_not_hide_the_numbers_of_steps(tmp_path):
    record = Metrics(None, 8, 3, 5, progress=False, log=[f"prometheus:{tmp_path / 'a.prom'}"])
    record.add(STEPS[0])
    record.evaluated(4, Evaluation(2.5, 7))
    record.close()
    text = (tmp_path / "a.prom").read_text()
    assert "penstock_eval_loss 2.5" in text
    assert "penstock_loss 4.5" in text
    assert "penstock_step 3.0" in text


def test_sinks_that_were_opened_are_closed_when_another_one_cannot_be(monkeypatch):
    module = Recorder("mlflow")
    monkeypatch.setitem(sys.modules, "mlflow", module)
    with pytest.raises(UsageError):
        Sinks(["mlflow:mine", "prometheus:x"], print)
    assert module.calls[-1] == ("end_run", {})
