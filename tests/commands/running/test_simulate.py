"""The command simulate, and the times that it measures. Runs on the reference back end, which needs no compiler."""

from __future__ import annotations

import json
import re
import shutil
import xml.etree.ElementTree as ElementTree
from functools import partial

import pytest
import torch

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.calibration import rehearse as rehearsals
from penstock.calibration.rehearse import rehearse
from penstock.commands.parser import main
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.memory.predict import measure_memory
from penstock.ir.schedule import RECEIVES, SENDS
from penstock.models import write_mlp
from penstock.passes.simulator.forecast import forecast
from penstock.support.errors import PenstockError, UsageError


def call(*words):
    return main([str(word) for word in words])


@pytest.fixture(scope="module")
def bundle(tmp_path_factory):
    folder = tmp_path_factory.mktemp("simulate")
    path = write_mlp(folder / "mlp.onnx", [32, 64, 64, 8], batch=16)
    words = [
        "--devices",
        2,
        "--loss",
        "cross_entropy",
        "--lr",
        0.01,
        "--microbatches",
        4,
        "--schedule",
        "2bw",
        "--backend",
        "numpy",
    ]
    assert call("compile", path, "-o", folder / "bundle", *words, "--dump-ir", folder / "dumps") == 0
    return folder / "bundle"


def read(capsys, *words):
    assert call("simulate", *words, "--json") == 0
    return json.loads(capsys.readouterr().out)


def test_numbers_fit_together(bundle, capsys):
    found = read(capsys, bundle)
    module = open_bundle(bundle).module
    window = found["window"]["to_s"] - found["window"]["from_s"]
    assert found["step_s"] == pytest.approx(window / found["window"]["batches"])
    assert found["samples_per_s"] == pytest.approx(64 / found["step_s"])
    assert found["step_s"] <= found["drained_s"] <= found["finish_s"]
    for row in found["ranks"]:
        assert row["busy"] + row["waiting"] + row["idle"] == pytest.approx(window)
        assert row["peak_bytes"] == measure_memory(module)[row["rank"]].peak
    sizes = {edge.phase: sum(value.type.nbytes for value in edge.values) for edge in module.edges}
    assert {row["name"]: row["bytes"] for row in found["links"]} == {
        "cpu:0>cpu:1": 40 * sizes["F"],
        "cpu:1>cpu:0": 40 * sizes["B"],
    }
    assert sum(found["critical_path"].values()) == pytest.approx(window)


def test_other_links_and_clusters(bundle, tmp_path, capsys):
    usual = read(capsys, bundle)["step_s"]
    slow = read(capsys, bundle, "--bandwidth", 1e4)
    assert slow["step_s"] > 10 * usual
    assert slow["bound_by"].startswith("link cpu:")
    assert read(capsys, bundle, "--latency", 0.5)["step_s"] > 0.5
    for latency in ("-1", "-0.5", "nan"):
        assert call("simulate", bundle, f"--latency={latency}") == 2
        assert f"--latency must be a number of 0 or more, got {latency}" in capsys.readouterr().err
    cluster = open_bundle(bundle).module.cluster
    faster = tmp_path / "faster.toml"
    text = cluster.to_toml()
    faster.write_text(text.replace("flops = 5", "flops = 50").replace("bandwidth = 1", "bandwidth = 10"))
    assert Cluster.load(faster) != cluster
    assert read(capsys, bundle, "--cluster", faster)["step_s"] < usual
    other = tmp_path / "other.toml"
    other.write_text('[[device]]\nname = "cpu:0"\n')
    assert call("simulate", bundle, "--cluster", other) == 2
    assert "no device cpu:1, on which stages are" in capsys.readouterr().err


def test_a_link_that_moves_nothing_is_named(bundle, capsys):
    """No table says that a batch takes infinitely long, or writes out hundreds of digits."""
    for dead in ("5e-324", "1e-300"):
        assert call("simulate", bundle, "--bandwidth", dead) == 2
        printed = "".join(capsys.readouterr())
        assert re.search(r"link \S+ is dead: at its rate no message would ever arrive", printed)
        assert not re.search(r"\binf\b|Infinity", printed)
    assert call("simulate", bundle, "--bandwidth", "1e-9") == 0  # control: it takes long, and ends
    printed = "".join(capsys.readouterr())
    assert "one batch takes more than 1000 years" in printed
    assert max(map(len, printed.splitlines())) < 400
    assert call("simulate", bundle, "--bandwidth", "1e9") == 0
    assert re.search(r"one batch takes \d+\.\d+ ms", capsys.readouterr().out)


def test_tables_pictures_and_traces(bundle, tmp_path, capsys):
    picture, trace = tmp_path / "run.svg", tmp_path / "run.json"
    assert call("simulate", bundle, "--batches", 3, "--gantt", picture, "--trace", trace) == 0
    out = capsys.readouterr().out
    assert "rank 0 | F" in out
    assert "bound by: " in out
    drawing = ElementTree.fromstring(picture.read_text())
    titles = [node.text for node in drawing.iter("{http://www.w3.org/2000/svg}title")]
    expected = [a for rank in (0, 1) for a in open_bundle(bundle).module.schedule.expand(rank, 3) if a.kind in "FBU"]
    assert [title.partition(":")[0] for title in titles if ":" in title] == [str(a) for a in expected]
    assert sum("live" in title for title in titles) == 2
    events = [event for event in json.loads(trace.read_text())["traceEvents"] if event["ph"] == "X"]
    assert {event["name"] for event in events} >= {str(a) for a in expected}


def test_dumps_can_be_simulated_once_they_are_wired(bundle, capsys):
    dumps = bundle.parent / "dumps"
    (wired,), (early,), (unwired,) = (
        dumps.glob("*_lifetimes.ir"),
        dumps.glob("*_split.ir"),
        dumps.glob("*_weight-versions.ir"),
    )
    assert read(capsys, wired) == read(capsys, bundle)
    for path in (early, unwired):
        assert call("simulate", path) == 2
        assert "a dump after `communicate`" in capsys.readouterr().err
    assert call("simulate", wired, "--costs", "measured") == 2
    assert "only a bundle can be measured" in capsys.readouterr().err
    assert call("simulate", wired, "--bandwidth", "0") == 2
    assert "--bandwidth must be a positive number" in capsys.readouterr().err


def test_measured_times(bundle, own_cache, capsys, monkeypatch):
    """Every kind of action that a rank runs has a time; the command simulates with them."""
    monkeypatch.setattr(rehearsals, "rehearse", partial(rehearse, seconds=0.2))
    opened = open_bundle(bundle)
    (row,) = rehearse(opened, [1], seconds=0.2)
    assert row.keys() == {a.kind for a in opened.module.schedule.ranks[1].batch}
    assert all(seconds > 0 for kind, seconds in row.items() if kind not in (*SENDS, *RECEIVES))
    assert call("simulate", bundle, "--costs", "table", "--json") == 0
    assert "6 of 6 times are not in the table" in capsys.readouterr().err
    found = read(capsys, bundle, "--costs", "measured", "--batches", 4)
    assert all(use["busy"] > 0 for use in found["ranks"])
    assert call("simulate", bundle, "--costs", "table", "--batches", 4, "--json") == 0
    assert json.loads(capsys.readouterr().out) == found


def test_a_rank_that_cannot_be_measured_says_why(bundle, tmp_path):
    copy = open_bundle(shutil.copytree(bundle, tmp_path / "copy"))
    copy.weights_file(1).unlink()
    with pytest.raises(PenstockError, match=r"(?s)rank 1.*measuring failed.*s1\.safetensors"):
        rehearse(copy, [1])


class Normed(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.second = torch.nn.Linear(8, 8), torch.nn.BatchNorm1d(8), torch.nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(torch.relu(self.norm(self.first(x))))


def test_stages_may_have_nothing_to_do_with_each_other() -> None:
    """The counter of a batch norm can be a stage of its own, which sends nothing to anybody."""
    training = ps.Training(loss="cross_entropy", optimizer=ps.SGD(lr=0.1), microbatches=2)
    model = ps.from_torch(Normed().train(), (torch.zeros(4, 8),))
    plan = ps.plan(model, ps.Cluster.local(2), training, stages=2, schedule="2bw")
    assert not plan.module.edges
    assert plan.as_dict()["predicted"]["step_s"] > 0
    # What does need values of others is refused without its edges.
    whole = ps.plan(model, ps.Cluster.local(2), training, split_at=["relu"]).module
    assert whole.edges
    with pytest.raises(UsageError, match="sends and receives"):
        forecast(whole.but(edges=()), lambda rank, action: 1.0, 2)
