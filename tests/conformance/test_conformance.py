"""ONNX's node tests against Penstock, as listed in known_gaps_*.txt; and that the comparison, the limits and the lists can fail."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections import Counter
from pathlib import Path

import onnx
import pytest
from oracles.limits import ANSWERED, CRASHED, HUNG, MEMORY

from conformance import operators
from conformance.binding import attempts
from conformance.cases import ALL, COUNTS, NUMERIC, ONNX, PLAIN, collect, excluded, members
from conformance.execution import FAILED, FOLDED, INTERPRETER, KNOWN, PASSED, TVM, interpret, judged
from conformance.gaps import changes, file_of, read_gaps, write_gaps
from penstock.ir.interpreter import ops as numpy_ops

RUN = Path(__file__).with_name("run.py")


@pytest.fixture(scope="module")
def cases():
    return {case.name: case for case in collect()}


def execute(way: str, tmp_path: Path, *options: str, minutes: int) -> dict[str, tuple[str, str]]:
    """All results of a run in a process of its own, which forks: this one has threads."""
    report = tmp_path / "report.json"
    jobs = len(os.sched_getaffinity(0))
    words = [sys.executable, str(RUN), "--through", way, "--jobs", str(jobs), "--json", str(report), *options]
    done = subprocess.run(words, capture_output=True, text=True, timeout=minutes * 60, check=False)
    assert report.exists(), done.stderr
    return {name: (status, reason) for name, (status, reason) in json.loads(report.read_text()).items()}


# ---------------------------------------------------------------------------------------- the sets


@pytest.mark.skipif(onnx.__version__ != ONNX, reason=f"the tests are those of onnx {ONNX}")
def test_the_sets_have_the_sizes_that_are_reported(cases) -> None:
    assert Counter(name for case in cases.values() for name in members(case)) == COUNTS


def test_why_cases_are_left_out(cases) -> None:
    """Each rule by one that it is about, and by one that is near it and stays."""
    assert "sequence" in excluded(cases["test_sequence_insert_at_back"])
    assert "strings" in excluded(cases["test_string_concat"])
    assert "8 bits" in excluded(cases["test_cast_FLOAT_to_FLOAT8E4M3FN"])
    assert "4 or 2 bits" in excluded(cases["test_dequantizelinear_int4"])
    assert "training" in excluded(cases["test_adam"])
    assert "ai.onnx.ml" in excluded(cases["test_ai_onnx_ml_binarizer"])
    assert "random" in excluded(cases["test_bernoulli"])
    assert "random" in excluded(cases["test_training_dropout"])
    for name in (
        "test_dequantizelinear",
        "test_batchnorm_epsilon",
        "test_batchnorm_epsilon_training_mode",
        "test_dropout_random_old",
        "test_argmax_default_axis_random",
    ):
        assert not excluded(cases[name]), name


# ---------------------------------------------------------------------------------------- the runs


@pytest.mark.skipif(onnx.__version__ != ONNX, reason=f"the lists are for onnx {ONNX}")
@pytest.mark.filterwarnings("ignore")
def test_the_interpreter_passes_every_fourth_that_is_not_listed(cases) -> None:
    """Here, in one process: a process for each takes longer than what it does."""
    numeric = [case for case in cases.values() if NUMERIC in members(case)]
    results = {case.name: judged(case, interpret) for case in numeric[::4]}
    assert not changes({name: gap for name, gap in read_gaps(file_of(INTERPRETER)).items() if name in results}, results)


@pytest.mark.slow
@pytest.mark.skipif(onnx.__version__ != ONNX, reason=f"the lists are for onnx {ONNX}")
@pytest.mark.parametrize(("way", "part", "minutes"), [(INTERPRETER, NUMERIC, 20), (TVM, PLAIN, 90)])
def test_all_that_is_not_listed_passes(way: str, part: str, minutes: int, tmp_path: Path) -> None:
    results = execute(way, tmp_path, "--set", part, minutes=minutes)
    assert len(results) == COUNTS[part]
    assert not changes(read_gaps(file_of(way)), results)


# ---------------------------------------------------------------------------------------- binding


def test_inputs_that_say_shapes_are_found(cases) -> None:
    assert attempts(cases["test_reshape_reordered_all_dims"].model) == [(), ("shape",)]
    assert attempts(cases["test_slice"].model) == [(), ("starts", "ends", "axes", "steps")]
    assert attempts(cases["test_resize_upsample_scales_nearest"].model) == [(), ("scales",)]
    assert attempts(cases["test_add"].model) == [()]


def test_shapes_that_are_inputs_are_bound_only_where_import_wants_them(cases) -> None:
    assert judged(cases["test_add"], interpret) == (PASSED, "")
    assert judged(cases["test_tile"], interpret) == (KNOWN, "y")
    assert judged(cases["test_hannwindow_expanded"], interpret) == (FOLDED, "x")


# ---------------------------------------------------------------------------------------- controls


def test_control_a_wrong_rule_fails(cases, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(numpy_ops.NUMPY, "add", lambda x, attrs: (x[0] - x[1],))
    status, reason = judged(cases["test_add"], interpret)
    assert status == FAILED
    assert "Mismatched elements" in reason


@pytest.mark.parametrize(
    ("change", "said"), [(lambda x: x.astype("f8"), "element type"), (lambda x: x[:1], "shape")], ids=["dtype", "shape"]
)
def test_control_a_result_of_another_type_fails(change, said: str, cases) -> None:
    def changed(*given):
        return [change(x) for x in interpret(*given)]

    assert judged(cases["test_add"], changed) == (FAILED, f"wrong result: {said}")


def test_control_what_crashes_hangs_or_takes_all_memory_is_ended(tmp_path: Path) -> None:
    """In a process of its own: forking is for programs without threads."""
    code = (
        "import os, sys, time\n"
        f"sys.path.insert(0, {str(RUN.parents[1])!r})\n"
        "from oracles.limits import each\n"
        "def work(kind):\n"
        "    if kind == 'hang': time.sleep(600)\n"
        "    if kind == 'crash': os.abort()\n"
        "    if kind == 'raise': raise KeyError(kind)\n"
        "    if kind == 'grow': bytes(1 << 31)\n"
        "    return kind * 100000\n"
        "kinds = ['good', 'hang', 'crash', 'raise', 'grow', 'good']\n"
        "for index, o in sorted(each(work, kinds, seconds=3.0, growth=1 << 30, jobs=2)): print(kinds[index], o.ended, len(o.text), o.text[:20])\n"
    )
    began = time.monotonic()
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert time.monotonic() - began < 100
    said = [line.split()[:3] for line in done.stdout.splitlines()]
    assert said[0] == said[5] == ["good", ANSWERED, "400000"]
    assert [row[1] for row in said[1:5]] == [HUNG, CRASHED, CRASHED, MEMORY]
    assert signal.SIGABRT.name in done.stdout
    assert "KeyError" in done.stdout


def test_lists_are_read_as_they_were_written_and_see_both_directions(tmp_path: Path) -> None:
    found = {"a": (PASSED, ""), "b": (FAILED, "no rule"), "c": (KNOWN, "shape"), "d": (FAILED, "no rule")}
    path = tmp_path / "gaps.txt"
    write_gaps(path, INTERPRETER, found)
    listed = read_gaps(path)
    assert listed == {name: result for name, result in found.items() if result[0] != PASSED}
    assert not changes(listed, found)
    assert changes(listed, found | {"a": (FAILED, "broken")}) == ["a: listed as passed, but failed: broken"]
    assert changes(listed, found | {"a": (KNOWN, "x")}) == ["a: listed as passed, but known: x"]
    assert len(changes(listed, found | {"b": (PASSED, "")})) == 1
    assert len(changes(listed, {"a": (PASSED, "")})) == 3


def test_all_cases_are_listed_once(cases) -> None:
    for way, name in ((INTERPRETER, NUMERIC), (TVM, PLAIN)):
        names = {case.name for case in cases.values() if name in members(case)}
        assert read_gaps(file_of(way)).keys() <= names
    assert len(cases) == len(collect())
    assert ALL in COUNTS


@pytest.mark.slow
def test_what_operators_become_is_recorded() -> None:
    assert json.loads(operators.FILE.read_text(encoding="utf-8")) == operators.operators()
