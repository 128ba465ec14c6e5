"""The table of measured times: found again by content and by what timed it, never by name, and never when damaged."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.calibration import measured
from penstock.calibration.measured import Measured, stage_times
from penstock.calibration.profile import profile
from penstock.commands.parser import main
from penstock.inspection.kernels import timing as kernel_timing
from penstock.inspection.kernels.kernels import kernel_rows
from penstock.inspection.subject import open_subject
from penstock.inspection.why import why
from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.graph import Graph, Value
from penstock.ir.ops import make
from penstock.ir.types import parse_type
from penstock.models import write_gpt
from penstock.passes.costs.prices import GraphCost, InTurn, graph_seconds, rank_seconds
from penstock.passes.kernels.divide import Kernel
from penstock.support.cache import Cache

DEVICE = Device("cpu:0", threads=2)


def product(rows: int = 8, name: str = "y") -> Graph:
    a, b = Value("a", parse_type(f"f32[{rows},4]")), Value("b", parse_type("f32[4,16]"))
    op = make("matmul", (a, b), [name])
    more = make("cumsum", op.outs, ["z"], "", axis=0)
    return Graph("s0.F", (a, b), more.outs, (op, more))


@pytest.fixture
def table(tmp_path: Path) -> Measured:
    return Measured("tvm", Cache(tmp_path, part="times"))


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Bundle:
    folder = tmp_path_factory.mktemp("measured")
    path = write_gpt(folder / "gpt.onnx", layers=2, width=16, heads=2, vocab=20, positions=6)
    training = ps.Training("cross_entropy", ps.AdamW(lr=0.01), 2)
    plan = ps.plan(ps.from_onnx(path, dims={"batch": 2}), Cluster.local(threads=(1, 2)), training)
    return open_bundle(ps.compile(plan, folder / "bundle", backend="numpy"))


def test_a_kernel_is_known_by_what_it_does(table: Measured) -> None:
    first, second = GraphCost(product()).kernels
    table.keep(first, 2, 3e-3)
    assert table.seconds(first, DEVICE) == 3e-3
    assert table.seconds(GraphCost(product(name="other")).kernels[0], DEVICE) == 3e-3, "names do not matter"
    # Everything else does.
    assert table.seconds(second, DEVICE) is None
    assert table.seconds(GraphCost(product(rows=9)).kernels[0], DEVICE) is None
    packed = replace(first, body=replace(first.body, ops=(first.body.ops[0].with_attrs(packed=True),)))
    assert table.seconds(packed, DEVICE) is None
    assert table.seconds(first, replace(DEVICE, threads=1)) is None
    assert table.seconds(first, replace(DEVICE, host="far")) is None
    assert table.seconds(first, replace(DEVICE, kind="cuda", target="sm_90")) is None
    assert Measured("numpy", table.store).seconds(first, DEVICE) is None


def test_graphs_are_priced_from_the_table_and_gaps_are_told(table: Measured) -> None:
    first, second = GraphCost(product()).kernels
    table.keep(first, 2, 3e-3)
    prices = InTurn([table])
    estimate = graph_seconds(product(), DEVICE)
    found = graph_seconds(product(), DEVICE, prices)
    assert found == pytest.approx(
        DEVICE.call_overhead
        + 3e-3
        + (graph_seconds(Graph("g", (), (), second.body.ops), DEVICE) - DEVICE.call_overhead),
        rel=0.3,
    )
    assert found > estimate
    assert prices.told() == "1 of 2 kernels are not in the table of measured times, and are estimated"
    table.keep(second, 2, 1e-3)
    assert graph_seconds(product(), DEVICE, table) == pytest.approx(DEVICE.call_overhead + 4e-3)


@pytest.mark.parametrize(
    "content", [b"", b"{}", b"nonsense", b'{"seconds": NaN}', b'{"seconds": -1.0}', b'{"seconds": "1"}', b"[1]"]
)
def test_what_is_no_time_is_not_there(table: Measured, content: bytes) -> None:
    (kernel, _) = GraphCost(product()).kernels
    table.keep(kernel, 2, 3e-3)
    folder = table.store.folder
    assert folder is not None
    (file,) = folder.iterdir()
    assert json.loads(file.read_bytes()[32:])["what"] == "s0.F/k0: matmul"
    table.store.put(file.name, content)
    assert table.seconds(kernel, DEVICE) is None
    table.keep(kernel, 2, 4e-3)
    assert table.seconds(kernel, DEVICE) == 4e-3
    file.write_bytes(file.read_bytes()[:-1] + b" ")
    assert table.seconds(kernel, DEVICE) is None, "a hash that does not fit"


def test_measured_kernels_of_a_report_are_kept(
    bundle: Bundle, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path))
    for name, value in {
        "_SECONDS": 0.0,
        "_SIDE": 64,
        "_LENGTH": 1 << 12,
    }.items():  # that times are kept, not what they are
        monkeypatch.setattr(kernel_timing, name, value)
    assert main(["inspect", str(bundle.path), "--measure"]) == 0
    table = Measured("numpy")
    for row in kernel_rows(bundle.module):
        assert table.seconds(Kernel(row.names[0], row.ops, row.body), replace(DEVICE, threads=1)) is not None
    row = next(row for row in kernel_rows(bundle.module) if row.device.threads == 1)
    (part, *_) = why(open_subject(bundle.path), row.label).parts
    assert part.kernel is not None
    assert part.kernel.measured_s == table.seconds(Kernel(row.names[0], row.ops, row.body), row.device) is not None
    monkeypatch.setenv("PENSTOCK_CACHE", "off")
    assert Measured("numpy").seconds(Kernel(row.names[0], row.ops, row.body), replace(DEVICE, threads=1)) is None


def test_stages_are_measured_once(bundle: Bundle, tmp_path: Path) -> None:
    asked: list[int] = []

    def rehearse(given: Bundle, ranks: list[int]) -> list[dict[str, float]]:
        asked.extend(ranks)
        return [{"F": 1.0 + rank, "B": 2.0 + rank, "U": 3.0 + rank, "SF": 9.0} for rank in ranks]

    table = Measured("numpy", Cache(tmp_path, part="times"))
    expected = {(0, "F"): 1.0, (0, "B"): 2.0, (0, "U"): 3.0, (1, "F"): 2.0, (1, "B"): 3.0, (1, "U"): 4.0}
    assert profile(bundle, rehearse, table) == expected
    assert asked == [0, 1]
    assert profile(bundle, rehearse, table) == expected
    assert asked == [0, 1], "known by now"
    assert profile(bundle, rehearse, table, anew=True) == expected
    assert asked == [0, 1, 0, 1]
    # A plan of the same stages uses them; a changed graph is estimated.
    assert stage_times(bundle.module, table) == (expected, 0)
    graph = bundle.module.graphs["s1.F"]
    changed = bundle.module.with_graph(replace(graph, ops=(*graph.ops[:-1], graph.ops[-1].with_attrs(kernel="other"))))
    times, estimated = stage_times(changed, table)
    assert estimated == 3
    assert times == expected | {key: value for key, value in rank_seconds(changed).items() if key[0] == 1}


def test_only_processors_of_this_machine_are_here() -> None:
    import socket

    assert measured.is_here(Device("a"))
    assert measured.is_here(Device("a", host=socket.gethostname()))
    assert not measured.is_here(Device("a", host="nowhere.example"))
    assert not measured.is_here(Device("a", "cuda", target="sm_90"))
