"""The reproducer: a folder with the smallest module that shows a fault, and its inputs.

`penstock verify FILE.ir` runs it.

    repro.ir            the module; its first line is the command that shows the fault
    inputs.safetensors  weights as `@name`, batches as `%name`, one batch after the other
    repro.onnx          in the place of repro.ir, where the import is at fault: the node by itself

`verify FILE.ir -p PASSES` runs the passes, and compares the results of the module before and after them, in the
interpreter in float64. Without `-p` its graphs are compiled, and compared with the interpreter. A fault that the
verifier sees is shown by `penstock opt`.
"""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.backends.bundle.tensor_file import write_tensors
from penstock.frontends.names import legal
from penstock.ir.files import read_module, verify_read
from penstock.ir.graph import Module, Stage, signature, slot_of
from penstock.ir.interpreter.ops import Array
from penstock.ir.text import print_module
from penstock.ir.types import numpy_dtype
from penstock.passes.kernels.fuse import choose_kernels
from penstock.passes.manager import parse_pipeline, run_passes
from penstock.passes.pipelines import PASSES
from penstock.support.errors import PenstockError, UsageError, VerifyError
from penstock.support.terminal import say, table
from penstock.support.words import counted
from penstock.verification.inputs import synthetic_batch

from .case import KERNEL, Case
from .data import read_data, write_data
from .edits import with_outputs
from .kernels import GraphCall, compare, compiled, recorded_slots
from .original import OnnxOriginal, first_difference
from .shrinking import Budget, shrink
from .steps import TrailStep
from .trial import Off, Trial, can_run, comparable, drawn
from .values import Spot

if TYPE_CHECKING:
    import onnx

MODULE, INPUTS, MODEL = "repro.ir", "inputs.safetensors", "repro.onnx"
# Errors of passes on modules that they were not made for: another fault than the one that is sought.
_CRASHES = (PenstockError, AssertionError, LookupError, TypeError, ValueError, StopIteration)


@dataclass(frozen=True)
class Written:
    """A reproducer as it was written: its place, its content, and the command that shows the fault."""

    folder: Path
    command: str
    ops: int
    before: int
    tried: int

    @property
    def shell(self) -> str:
        """The command line that runs the reproducer from any folder."""
        return f"cd {shlex.quote(str(self.folder))} && {self.command}"

    def lines(self) -> list[str]:
        """Return the lines that announce the reproducer."""
        shrunk = f"{counted(self.ops, 'operation')} of {self.before}, {counted(self.tried, 'case')} tried"
        return [f"reproducer in {self.folder}: {shrunk}", f"  {self.shell}"]


def check_place(folder: Path) -> None:
    """Raise UsageError, before the work, where something else than a reproducer stands."""
    if folder.exists() and not (
        folder.is_dir() and {path.name for path in folder.iterdir()} <= {MODULE, INPUTS, MODEL}
    ):
        raise UsageError(
            "there is something else than a reproducer",
            where=str(folder),
            hint="remove it, or choose another place with --repro",
        )


# ------------------------------------------------------------------------------------------------ making one


def of_pass(
    folder: Path,
    base: Module,
    passes: str,
    trial: Trial,
    spot: Spot | None,
    seed: int,
    tolerance: float | None,
    budget: Budget,
) -> Written:
    """Write the reproducer of a pass that changes the results of a module: `passes` are those from `base` to it."""
    calls = parse_pipeline(passes, PASSES)

    def wrong(case: Case) -> bool:
        try:
            after = run_passes(case.module, calls, PASSES)
            steps = [TrailStep("before", "", case.module), TrailStep("after", passes, after)]
            problem = Trial(steps, 0, seed, tolerance, case.weights, case.batches).problem(after)
        except _CRASHES:
            return False
        return isinstance(problem, Off)

    words = ["penstock", "verify", MODULE, "-p", passes, "--data", INPUTS]
    words += [] if tolerance is None else ["--tolerance", str(tolerance)]
    words += ["--seed", str(seed)] if seed else []
    return _shrunk(folder, Case(base, _own(trial.weights, base), trial.batches), wrong, words, spot, budget)


def of_refusal(
    folder: Path, base: Module, passes: str, weights: Mapping[str, Array], error: PenstockError, budget: Budget
) -> Written:
    """Write the reproducer of a pass that the verifier refuses, or that raises an error."""
    calls = parse_pipeline(passes, PASSES)
    expected = _shape(error)

    def refused(case: Case) -> bool:
        try:
            run_passes(case.module, calls, PASSES)
        except VerifyError as refusal:
            return _shape(refusal) == expected
        except _CRASHES:
            return False
        return False

    case = Case(
        base, _own(weights, base), [{v.name: np.zeros(v.type.dims, numpy_dtype(v.type.dtype)) for v in base.inputs}]
    )
    return _shrunk(folder, case, refused, ["penstock", "opt", MODULE, "-p", passes], None, budget, data=False)


def _shape(error: PenstockError) -> str:
    """Return the message of an error without names and numbers; of a list the first item."""
    lines = str(error).splitlines()
    message = lines[1] if len(lines) > 1 and re.match(r"\d+\. ", lines[1]) else error.what.splitlines()[0]
    return re.sub(r"[%@][\w./:\-]+(, )?|\d+", "_", message.partition(": ")[2] or message)


def of_kernel(
    folder: Path, module: Module, call: GraphCall, spot: Spot, backend: str, tolerance: float | None, budget: Budget
) -> Written:
    """Write the reproducer of a kernel: the only graph of a stage."""
    slots = {op.var for op in call.graph.ops if slot_of(op) is not None}
    held = {name: replace(module.vars[name], stage=0) for name in slots}
    # The version that is read counts, not the buffer into which a new version will be written.
    weights = {slot.var: array for slot, array in sorted(call.slots.items(), key=lambda item: item[0].slot != "next")}
    graph = replace(call.graph, name=KERNEL)
    apart = Module(
        "kernel",
        graph.ins,
        tuple(v.name for v in graph.outs),
        stages=(Stage(0, "cpu:0"),),
        vars=held,
        graphs={KERNEL: graph},
    )

    def wrong(case: Case) -> bool:
        try:
            return _graph_spot(case, KERNEL, backend, tolerance) is not None
        except _CRASHES:
            return False

    words = ["penstock", "verify", MODULE, "--data", INPUTS, *([] if backend == "tvm" else ["--backend", backend])]
    words += [] if tolerance is None else ["--tolerance", str(tolerance)]
    return _shrunk(folder, Case(apart, weights, [call.ins]), wrong, words, spot, budget)


def of_import(
    folder: Path,
    original: OnnxOriginal,
    spot: Spot,
    inputs: Mapping[str, Array],
    tolerance: float | None,
    budget: Budget,
) -> Written:
    """Write the reproducer of a wrongly imported ONNX node, with as many nodes before it as the fault needs."""
    from penstock.frontends.onnx import import_onnx  # lazy: heavy

    from .onnx_part import save, smallest_part  # lazy: heavy

    folder.mkdir(parents=True, exist_ok=True)
    model, name = original.load(), original.theirs(spot.tensor.lstrip("%"))
    feeds = {original.names.get(n, n): array for n, array in inputs.items()}

    def wrong(part: onnx.ModelProto, part_inputs: Mapping[str, Array]) -> bool:
        budget.spent += 1
        save(part, folder / MODEL)
        try:
            imported = import_onnx(folder / MODEL)
            alone = OnnxOriginal(folder / MODEL, imported.names)
            inputs_by_name = {legal(n): array for n, array in part_inputs.items()}
            return (
                first_difference(alone, imported.module, imported.weights, inputs_by_name, tolerance).first is not None
            )
        except _CRASHES:
            return False

    part, part_inputs = smallest_part(model, name, {**original.bound, **feeds, **original.run(feeds)}, wrong)
    save(part, folder / MODEL)
    (folder / MODULE).unlink(missing_ok=True)
    write_tensors(folder / INPUTS, {f"%{legal(n)}": np.asarray(array)[None] for n, array in part_inputs.items()})
    words = ["penstock", "verify", MODEL, "--data", INPUTS, "--backend", "numpy"]
    words += [] if tolerance is None else ["--tolerance", str(tolerance)]
    return Written(folder, shlex.join(words), len(part.graph.node), len(model.graph.node), budget.spent)


def _shrunk(
    folder: Path,
    case: Case,
    fails: Callable[[Case], bool],
    words: Sequence[str],
    spot: Spot | None,
    budget: Budget,
    data: bool = True,
) -> Written:
    before = case.size[0]
    if not fails(case):
        say("the fault does not show in the module alone: the reproducer holds all that was run")
    else:
        rooted = with_outputs(case, [spot.tensor.lstrip("%")]) if spot is not None else None
        case = shrink(rooted if rooted is not None and fails(rooted) else case, fails, budget)
    folder.mkdir(parents=True, exist_ok=True)
    command = shlex.join(words)
    comments = [] if spot is None else [f"// {line.strip()}" for line in spot.lines()]
    text = print_module(case.module.but(notes=()))
    (folder / MODULE).write_text("\n".join([f"// {command}", *comments, text]), encoding="utf-8")
    for name in (INPUTS, MODEL):
        (folder / name).unlink(missing_ok=True)
    if data:
        write_data(folder / INPUTS, case.weights, case.batches)
    return Written(folder, command, case.size[0], before, budget.spent)


def _own(weights: Mapping[str, Array], module: Module) -> dict[str, Array]:
    return {name: np.asarray(array) for name, array in weights.items() if name in module.vars}


# ------------------------------------------------------------------------------------------------ running one


def verify_ir(
    path: str, *, passes: str | None, data: str | None, steps: int, seed: int, tolerance: float | None, backend: str
) -> int:
    """Compare the results of a module before and after passes; or, without passes, its compiled kernels with the
    interpreter.
    """
    module = read_module(Path(path))
    verify_read(module, path)
    weights, batches = read_data(data) if data is not None else ({}, [])
    if passes is None:
        return _verify_graphs(module, path, data, weights, batches, seed, tolerance, backend)
    _check_runs(module, path)
    after = run_passes(module, parse_pipeline(passes, PASSES), PASSES)
    _check_runs(after, f"{path} after {passes}")
    if not comparable(module, after):
        raise UsageError(
            f"{passes} makes updates later, which its stages by themselves cannot be",
            where=path,
            hint="begin with a module in one piece, before `split`",
        )
    steps_of_trial = [TrailStep(path, "", module), TrailStep("after the passes", passes, after)]
    trial = Trial(steps_of_trial, steps, seed, tolerance, weights, batches)
    try:
        trial.run_first()
    except PenstockError as error:
        if data is None:
            raise
        raise UsageError(f"{path} cannot be run on it: {error}", where=data) from error
    if after is module:
        print(f"{passes}: nothing to change, so all stays what it was")
        return 0
    problem = trial.problem(after)
    if isinstance(problem, PenstockError):
        raise VerifyError(f"{module.name} cannot be run after {passes}: {problem}", where=path) from problem
    if problem is None:
        subject = (
            "outputs and variables"
            if trial.compares_training(after)
            else "derivatives"
            if "B" in after.graphs
            else "outputs"
        )
        print(f"{passes}: {subject} stay what they were")
        return 0
    spots = trial.spots(after, module)
    print("\n".join([f"{passes}: {problem}", *(spots[0].lines() if spots else [])]))
    raise VerifyError(f"{passes} changes what {module.name} computes", where=path)


def _check_runs(module: Module, where: str) -> None:
    if not can_run(module):
        raise UsageError(
            "cannot be run: its schedule updates late, and its weights have no versions yet",
            where=where,
            hint="take a module before `schedule`, or have `weight-versions` among the passes",
        )


def _verify_graphs(
    module: Module,
    path: str,
    data: str | None,
    weights: Mapping[str, Array],
    batches: Sequence[Mapping[str, Array]],
    seed: int,
    tolerance: float | None,
    backend: str,
) -> int:
    graph = module.graphs.get("main")
    if graph is not None:
        module = module.but(
            graphs={KERNEL: replace(choose_kernels(graph), name=KERNEL)}, stages=(Stage(0, "cpu:0"),), facts=()
        )
    if KERNEL not in module.graphs or len(module.graphs) > 1:
        raise UsageError(
            "has several graphs", where=path, hint="say with -p what is to be done with it, or give the bundle"
        )
    # One source for all: with equal elements, two swapped variables would not show.
    source = np.random.default_rng(seed)
    arrays = {
        name: weights.get(name, array)
        for name, array in [(name, drawn(var, source)) for name, var in module.vars.items()]
    }
    case = Case(module, arrays, list(batches) or [synthetic_batch(module, 1, seed)])
    if problems := list(_unfit(case)):
        raise UsageError("; ".join(problems), where=data or path)
    spot = _graph_spot(case, KERNEL, backend, tolerance)
    rows = [[f"@{KERNEL}", backend, "ok" if spot is None else f"{spot.tensor} is off by {spot.error:.2g}"]]
    print(table(["graph", "compiled by", "verdict"], rows))
    if spot is None:
        return 0
    print("\n".join(spot.lines()))
    raise VerifyError(f"{spot.tensor} is not what the interpreter gives", where=path)


def _unfit(case: Case) -> Iterator[str]:
    """Yield the problems of data that do not fit the graph."""
    expected = [(f"%{v.name}", case.batches[0].get(v.name), v.type) for v in case.module.graphs[KERNEL].ins]
    expected += [(f"@{name}", case.weights[name], var.type) for name, var in case.module.vars.items()]
    for name, array, kind in expected:
        if array is None:
            yield f"{name} is missing"
        elif array.shape != kind.dims:
            yield f"{name} has the shape {list(array.shape)}, expected {kind}"


def _graph_spot(case: Case, name: str, backend: str, tolerance: float | None) -> Spot | None:
    graph = case.module.graphs[name]
    ins = {v.name: np.asarray(case.batches[0][v.name]) for v in graph.ins}
    reads = {
        slot: np.asarray(case.weights[slot.var])
        for slot in signature(graph).slots
        if slot.slot != "next" and slot.var in case.weights
    }
    call = GraphCall(graph, ins, recorded_slots(case.module, graph, reads))
    with compiled(case.module, 0, [graph], backend) as program:
        return compare(program, call, tolerance)[1]
