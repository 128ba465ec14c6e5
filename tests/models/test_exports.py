"""Exports of other libraries' families: their list, the committed verdicts, and the program that makes these."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import onnx
import pytest
from onnx import TensorProto, helper
from verification.faults import FOUND, NONE

from . import exports
from .export_list import EXPORTS

RESULTS = Path(exports.__file__).with_name("exports.json")


def test_the_list() -> None:
    assert len(EXPORTS) == 60
    assert {export.library for export in EXPORTS.values()} == {"timm", "torchvision", "transformers"}
    assert len({(export.library, export.model) for export in EXPORTS.values()}) == 60


def test_no_verdict_of_the_committed_ones_is_wrong() -> None:
    """All families were verified with the same seeds, on both kinds of inputs; none failed, and all faults were found."""
    record = exports.Record(RESULTS)
    assert list(record.families) == list(EXPORTS)
    seeds = {int(key.split()[0]) for key in record.families["sknet"]}
    assert len(seeds) >= 2
    assert all(record.has(family, seed) for family in EXPORTS for seed in seeds)
    assert record.counts().total() == len(EXPORTS) * len(seeds) * len(exports.KINDS)
    assert record.counts().keys() <= {exports.OK, exports.UNTOLD}
    assert any(fault.startswith(FOUND) for fault in record.faults)
    assert all(fault.startswith((FOUND, NONE)) for fault in record.faults)


def write_model(path: Path, kind: str) -> Path:
    nodes = [helper.make_node(kind, ["x"], ["y"])]
    x, y = (helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 3]) for name in "xy")
    graph = helper.make_graph(nodes, "m", [x], [y])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def test_verdicts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that is right, one that is imported wrongly, and one that is not imported."""
    from penstock.frontends.onnx.table import RULES

    path = write_model(tmp_path / "right.onnx", "Exp")
    assert exports.verdict(path, ["--backend", "numpy"])[0] == exports.OK
    assert exports.verdict(write_model(tmp_path / "other.onnx", "NoSuchThing"), [])[0] == exports.REFUSED
    monkeypatch.setitem(RULES, "Exp", lambda node: node.emit("relu", node.value(0)))
    assert exports.verdict(path, ["--backend", "numpy"])[0] == exports.FAILED


def test_a_record_goes_on_where_it_ended(tmp_path: Path) -> None:
    record = exports.Record(tmp_path / "r.json")
    record.add("sknet", 3, "drawn", exports.OK)
    assert not exports.Record(tmp_path / "r.json").has("sknet", 3)
    record.add("sknet", 3, "own", exports.FAILED)
    again = exports.Record(tmp_path / "r.json")
    assert again.has("sknet", 3)
    assert again.counts() == {exports.OK: 1, exports.FAILED: 1}
    assert json.loads((tmp_path / "r.json").read_text())["counts"] == {exports.OK: 1, exports.FAILED: 1}


@pytest.mark.slow
@pytest.mark.parametrize("library", ["timm", "torchvision", "transformers"])
def test_a_family_of_each_library(library: str, tmp_path: Path) -> None:
    """The control is in test_verdicts."""
    pytest.importorskip(library)
    pytest.importorskip("onnxscript")
    family = next(name for name, export in EXPORTS.items() if export.library == library)
    record = exports.Record(tmp_path / "r.json")
    exports.judge(sys.executable, [0], [family], record)
    assert record.has(family, 0)
    assert record.counts().keys() <= {exports.OK, exports.UNTOLD}
