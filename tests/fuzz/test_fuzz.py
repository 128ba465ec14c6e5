"""Damaged files through import; files that ask for too much; and that the judgement of an import can fail."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import onnx
import onnx.parser
import pytest
from onnx import TensorProto, helper
from oracles.limits import ANSWERED, CRASHED, Outcome

from fuzz import run as fuzz_run
from fuzz.run import IMPORTED, imported, write_files, wrong
from fuzz.seeds import MODEL, read_seeds, seeds, write_seeds
from penstock.frontends.onnx import import_onnx
from penstock.support.errors import UnsupportedModel, UsageError

RUN = Path(fuzz_run.__file__)


def execute(tmp_path: Path, count: int, minutes: int, *options: str) -> dict:
    report = tmp_path / "report.json"
    words = [
        sys.executable,
        str(RUN),
        "--count",
        str(count),
        "--jobs",
        str(len(os.sched_getaffinity(0))),
        "--json",
        str(report),
        *options,
    ]
    done = subprocess.run(words, capture_output=True, text=True, timeout=minutes * 60, check=False)
    assert report.exists(), done.stderr
    found: dict = json.loads(report.read_text())
    return found


def test_seeds_are_imported_where_they_are_supported(tmp_path: Path) -> None:
    ends = {}
    for name, files in seeds():
        folder = tmp_path / name
        for relative, content in files.items():
            (folder / relative).parent.mkdir(parents=True, exist_ok=True)
            (folder / relative).write_bytes(content)
        ends[name] = imported(folder / MODEL)
    assert {"mlp", "gpt", "bert", "cnn", "if", "loop", "shapes", "cast", "functions", "external"} <= {
        n for n, e in ends.items() if e == IMPORTED
    }
    assert list(ends.values()).count(IMPORTED) > len(ends) / 2


def test_damage_is_the_same_in_every_run(tmp_path: Path) -> None:
    for index in range(30):
        folders = [tmp_path / f"{index}.{k}" for k in range(2)]
        for folder in folders:
            folder.mkdir()
        assert len({write_files(index, folder).read_bytes() for folder in folders}) == 1


def test_damaged_files_give_a_module_or_an_error_of_ours(tmp_path: Path) -> None:
    write_seeds(tmp_path / "seeds.zip")
    assert read_seeds(tmp_path / "seeds.zip") == seeds()
    found = execute(tmp_path, 200, 10, "--seeds", str(tmp_path / "seeds.zip"))
    assert not found["failures"]
    assert found["ends"][IMPORTED] > 5


@pytest.mark.slow
def test_many_damaged_files_give_a_module_or_an_error_of_ours(tmp_path: Path) -> None:
    found = execute(tmp_path, 5000, 60)
    assert not found["failures"]
    assert found["ends"][IMPORTED] > 200


def test_control_failures_are_seen(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert not wrong(Outcome(ANSWERED, IMPORTED, 0.0))
    assert wrong(Outcome(CRASHED, "SIGSEGV", 0.0))
    assert wrong(Outcome(ANSWERED, "unsupported x: cannot be computed at import: Unable to allocate 7.28 TiB", 0.0))
    path = tmp_path / MODEL
    path.write_bytes(seeds()[0][1][MODEL])
    assert imported(path) == IMPORTED

    def broken(path: Path) -> object:
        raise KeyError("a bug of ours")

    monkeypatch.setattr(fuzz_run, "import_onnx", broken)
    with pytest.raises(KeyError):
        imported(path)


# ---------------------------------------------------------------------------------------- too much

HUGE = 10**12
_HEADER = '<ir_version: 10, opset_import: ["" : 21]>'
# Nodes on known operands whose results, or what rules make for them, would not fit into any memory.
ASKING = {
    "Tile": f"o = Constant<value_floats = [1., 2.]>() r = Constant<value_ints = [{HUGE}]>() z = Tile(o, r)",
    "Expand": f"o = Constant<value_floats = [1.]>() r = Constant<value_ints = [{HUGE}]>() z = Expand(o, r)",
    "ConstantOfShape": "r = Constant<value_ints = [1000000, 1000000]>() z = ConstantOfShape(r)",
    "Range": f"a = Constant<value_int = 0>() b = Constant<value_int = {HUGE}>() c = Constant<value_int = 1>() i = Range(a, b, c) z = Cast<to = 1>(i)",
    "Pad": f"o = Constant<value_floats = [1., 2.]>() p = Constant<value_ints = [0, {HUGE}]>() z = Pad(o, p)",
    "Pad edge": f'p = Constant<value_ints = [0, {HUGE}]>() z = Pad<mode = "edge">(x, p)',
    "Resize": f"s = Constant<value_ints = [{HUGE}]>() z = Resize(x, , , s)",
    "Resize linear": f'o = Constant<value_floats = [1., 2.]>() s = Constant<value_ints = [{HUGE}]>() z = Resize<mode = "linear">(o, , , s)',
    "OneHot": f"i = Constant<value_ints = [1, 2]>() d = Constant<value_int = {HUGE}>() v = Constant<value_floats = [0., 1.]>() z = OneHot(i, d, v)",
    "HannWindow": f"n = Constant<value_int = {HUGE}>() z = HannWindow(n)",
    "MatMul": "a = Constant<value_ints = [1000000, 1]>() b = Constant<value_ints = [1, 1000000]>() p = ConstantOfShape(a) q = ConstantOfShape(b) z = MatMul(p, q)",
    "Add": "a = Constant<value_ints = [1000000, 1]>() b = Constant<value_ints = [1, 1000000]>() p = ConstantOfShape(a) q = ConstantOfShape(b) z = Add(p, q)",
    "Conv": "a = Constant<value_ints = [1, 1, 3000000]>() b = Constant<value_ints = [1, 1, 3]>() p = ConstantOfShape(a) q = ConstantOfShape(b) z = Conv(p, q)",
    "Einsum": 'a = Constant<value_ints = [2000]>() p = ConstantOfShape(a) z = Einsum<equation = "i,j,k,l->">(p, p, p, p)',
    "Dropout": "n = Constant<value_ints = [1000000, 1000000]>() e = Expand(x, n) d, m = Dropout(e) z = Cast<to = 1>(m)",
}


@pytest.mark.parametrize("name", ASKING)
def test_what_a_file_asks_for_is_not_made_before_its_size_is_known(name: str, tmp_path: Path) -> None:
    """Imported as operations, or refused."""
    model = onnx.parser.parse_model(
        f"{_HEADER} asking (float[1] x) => (float[1] y) {{ {ASKING[name]} s = ReduceSum<keepdims = 0>(z) y = Add(x, s) }}"
    )
    path = tmp_path / MODEL
    path.write_bytes(model.SerializeToString())
    assert not wrong(Outcome(ANSWERED, imported(path), 0.0))


def _functions(count: int, calls: int, cycle: bool = False) -> bytes:
    """Functions that call the next one so many times each; the last one adds, or calls the first."""
    bodies = []
    for i in range(count):
        kind = f"f{(i + 1) % count}" if cycle or i + 1 < count else ""
        names = ["a", *(f"h{k}" for k in range(calls))]
        nodes = [
            helper.make_node(kind, [names[k]], [names[k + 1]], domain="own")
            if kind
            else helper.make_node("Neg", [names[k]], [names[k + 1]])
            for k in range(calls)
        ]
        bodies.append(
            helper.make_function(
                "own", f"f{i}", ["a"], [names[-1]], nodes, [helper.make_opsetid("", 21), helper.make_opsetid("own", 1)]
            )
        )
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2]) for name in "xy"]
    graph = helper.make_graph([helper.make_node("f0", ["x"], ["y"], domain="own")], "g", values[:1], values[1:])
    model = helper.make_model(
        graph,
        opset_imports=[helper.make_opsetid("", 21), helper.make_opsetid("own", 1)],
        functions=bodies,
        ir_version=10,
    )
    content: bytes = model.SerializeToString()
    return content


@pytest.mark.parametrize(
    ("content", "said"),
    [
        (_functions(3000, 1), "depth exceeds"),
        (_functions(90, 1), "more than 64 deep"),
        (_functions(40, 2), "would be more than"),
        (_functions(3, 1, cycle=True), "calls itself|recursive"),
    ],
    ids=["longest", "long", "wide", "cyclic"],
)
def test_functions_that_call_each_other_without_end_are_refused(content: bytes, said: str, tmp_path: Path) -> None:
    path = tmp_path / MODEL
    path.write_bytes(content)
    with pytest.raises((UnsupportedModel, UsageError), match=said):
        import_onnx(path)


@pytest.mark.parametrize("trips", [HUGE, 2**63 - 1])
def test_a_loop_without_end_is_refused(trips: int, tmp_path: Path) -> None:
    text = f"""{_HEADER} g (float[2] x) => (float[2] y) {{ n = Constant<value_int = {trips}>() c = Constant<value = bool {{1}}>()
        y = Loop(n, c, x)<body = b (int64 i, bool on, float[2] h) => (bool go, float[2] k) {{ go = Identity(on) k = Neg(h) }}> }}"""
    path = tmp_path / MODEL
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    with pytest.raises(UnsupportedModel, match="more than"):
        import_onnx(path)
