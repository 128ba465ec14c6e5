"""One case through Penstock: imported from a file, run, compared.

`judged` gives a status and a reason. PASSED: imported as the test has it. KNOWN: passed with the inputs that the reason names known at import.
FOLDED: passed with all inputs known, so that nothing was left to be run: import computed the result. FAILED: for the reason given.
"""

from __future__ import annotations

import re
import tempfile
from collections.abc import Callable, Mapping
from pathlib import Path

import numpy as np

from penstock.frontends.onnx import Imported, import_onnx
from penstock.ir.graph import MICROBATCH
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.store import DictStore
from penstock.support.errors import PenstockError, UnsupportedModel, UsageError

from .binding import attempts
from .cases import Case, plain

PASSED, KNOWN, FOLDED, FAILED = "passed", "known", "folded", "failed"
INTERPRETER, TVM = "interpreter", "tvm"
Arrays = Mapping[str, np.ndarray]
Execute = Callable[[Imported, Arrays, Path], list[np.ndarray]]


def judged(case: Case, execute: Execute) -> tuple[str, str]:
    with tempfile.TemporaryDirectory(prefix="penstock-conformance-") as folder:
        path = Path(folder) / "case.onnx"
        refusal = ""
        for known in attempts(case.model):
            try:
                imported = imported_case(case, known, path)
            except (UnsupportedModel, UsageError) as error:
                refusal = "not imported: " + _reason(error)
                continue
            failure = _failure(case, imported, known, execute, Path(folder))
            if failure:
                return FAILED, failure
            if known:
                return (FOLDED if len(known) == len(case.model.graph.input) else KNOWN), ", ".join(known)
            return PASSED, ""
        return FAILED, refusal


def imported_case(case: Case, known: tuple[str, ...], path: Path) -> Imported:
    named = dict(zip((value.name for value in case.model.graph.input), case.inputs, strict=True))
    path.write_bytes(case.model.SerializeToString())
    dims = {}
    for value in case.model.graph.input:
        if value.name in known:
            continue
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not dim.HasField("dim_value"):
                dims[dim.dim_param or f"{value.name}.{axis}"] = plain(named[value.name]).shape[axis]
    return import_onnx(path, dims=dims, known={name: plain(named[name]) for name in known})


def _failure(case: Case, imported: Imported, known: tuple[str, ...], execute: Execute, folder: Path) -> str:
    given = [plain(x) for value, x in zip(case.model.graph.input, case.inputs, strict=True) if value.name not in known]
    try:
        with np.errstate(all="ignore"):
            named = {v.name: x for v, x in zip(imported.module.data_inputs, given, strict=True)}
            found = execute(imported, {**named, MICROBATCH: np.array(0)}, folder)
        case.compare(found)
    except AssertionError as error:
        return "wrong result: " + _mismatch(str(error))
    except PenstockError as error:
        return "not run: " + _reason(error)
    return ""


def interpret(imported: Imported, inputs: Arrays, folder: Path) -> list[np.ndarray]:
    return [np.asarray(x) for x in run_graph(imported.module.graphs["main"], inputs, DictStore(imported.weights))]


def compiled(imported: Imported, inputs: Arrays, folder: Path) -> list[np.ndarray]:
    """Through all passes for inference, and a stage of machine code."""
    from penstock import api
    from penstock.backends.interface import CompileOptions
    from penstock.backends.registry import backend_of
    from penstock.ir.cluster.cluster import Cluster
    from penstock.ir.graph import signature
    from penstock.runtime.state.tensors import CPU, allocate, as_array, fill

    plan = api.plan(api.Model(imported), Cluster.local(1))
    backend = backend_of(TVM)
    files = backend.compile_stages(plan.module, [0], folder, CompileOptions(jobs=1))
    program = backend.load_stage(plan.module, 0, [folder / name for name in files[0]])
    graph = plan.module.graphs["s0.F"]
    convention = signature(graph)
    args = [fill(allocate(v.type, CPU), np.asarray(inputs[v.name])) for v in convention.ins]
    args += [
        fill(allocate(plan.module.vars[slot.var].type, CPU), imported.weights[slot.var]) for slot in convention.slots
    ]
    results = dict(zip((v.name for v in convention.results), program.call(graph.name, args), strict=True))
    # An output that is an input is not a result of the stage.
    return [as_array(results[name]) if name in results else np.asarray(inputs[name]) for name in plan.module.outputs]


EXECUTE: Mapping[str, Execute] = {INTERPRETER: interpret, TVM: compiled}


# ---------------------------------------------------------------------------------------- reasons


def _reason(error: PenstockError) -> str:
    """What an error says, without the names of this model: tests that fail alike shall read alike."""
    lines = [line.strip() for line in error.what.splitlines()]
    rows = [match for line in lines if (match := re.match(r"\S+ \((\S+) (\w+)\): (.*)", line))]
    if rows:
        operator = rows[0][2] if rows[0][1] == "ai.onnx" else f"{rows[0][1]} {rows[0][2]}"
        return _shortened(f"{operator}: {rows[0][3]}")
    return _shortened(" ".join(lines[-1:] if len(lines) > 1 else lines))


def _mismatch(text: str) -> str:
    lines = [line.strip() for line in text.splitlines() if line.strip()]
    for word, said in (
        ("shape", "shape"),
        ("dtype", "element type"),
        ("nan", "nan in other places"),
        ("inf", "inf in other places"),
    ):
        if any(word in line for line in lines[:3]):
            return said
    if any("ACTUAL" in line for line in lines) and not any("Mismatched" in line for line in lines):
        return "element type"
    return next((line for line in lines if line.startswith("Mismatched")), lines[0] if lines else "no message")


def _shortened(text: str) -> str:
    text = re.sub(r"(input|output|result|node|tensor) (?!is |are )\S+", r"\1 ...", text)
    return text if len(text) <= 140 else text[:137] + "..."
