"""The comparison of an import with the framework of its model, tensor by tensor.

OnnxOriginal runs an ONNX file in onnxruntime, without its optimiser, with the result of every node as an output;
TorchOriginal (torch_original.py) does the same with a program of torch. `first_difference` compares them with the
interpreter's values of the imported module, in the order of the framework.

Both round as the types say; penstock.verification.tolerance says how far they may be apart for that. The interpreter in
float64 is the judge: a value that is no further off than noise like that of rounding moves it on these inputs
(penstock.verification.roundings) is right, whichever of the two is nearer.

Results in steps of quantisation may be those of the framework's optimiser, which rounds in other places: then values on
the way to them are not judged.

Limits: a value that the importer renames, folds away or computes otherwise inside a node has no counterpart; results of
nodes inside loops and branches are not compared; nor is a model of 2 GiB or more.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.frontends.names import legal
from penstock.ir.graph import Graph, Module, Op
from penstock.ir.interpreter.graphs import Noise, run_graph
from penstock.ir.interpreter.ops import F64, TYPED, Array
from penstock.ir.interpreter.store import DictStore, initial_arrays
from penstock.support.terminal import say
from penstock.support.words import counted, visible
from penstock.verification.quantisation import is_constant, step_values
from penstock.verification.roundings import RoundingEffect, distance, relative_error
from penstock.verification.tolerance import as_typed, asked
from penstock.verification.verdicts import widened

from .steps import Original
from .values import Errors, Spot

if TYPE_CHECKING:
    import onnx


# Results that are alike but for the rounding of a scale.
_NEAR = 1e-5


@dataclass(frozen=True)
class Compared:
    """The number of values with a counterpart, their errors, and the first that is off."""

    count: int
    errors: Errors
    first: Spot | None


def first_difference(
    original: Original,
    module: Module,
    weights: Mapping[str, Array],
    inputs: Mapping[str, Array],
    tolerance: float | None,
) -> Compared:
    """Run the module of an import beside its original."""
    graph = module.graphs.get("main") or module.graphs["F"]
    rounded, exact = (_values(module, graph, weights, inputs, precision) for precision in (TYPED, F64))
    ops = {v.name: op for v, op in graph.producers().items()}
    effect = RoundingEffect(lambda noise: _values(module, graph, weights, inputs, F64, noise), exact)
    count, errors = 0, Errors()
    for name, array in original.values(inputs):
        if name not in rounded or array.shape != rounded[name].shape:
            continue
        drift = relative_error(rounded[name], exact[name])
        error = min(relative_error(rounded[name], array), relative_error(exact[name], array))
        allowed = asked(tolerance) if tolerance is not None else as_typed(graph, ops.get(name), drift)
        if tolerance is None and not error <= allowed.error:
            allowed = widened(effect, name, allowed, [distance(array, x[name]) for x in (exact, rounded)])
        if (
            tolerance is None
            and not error <= allowed.error
            and _is_optimised(original, graph, inputs, (exact, rounded))
        ):
            print(f"from %{name} on the import rounds as {original.name} with its optimiser, and gives its results")
            return Compared(count, errors, None)
        count, errors = count + 1, errors + Errors.of(error, allowed)
        if not error <= allowed.error:
            spot = Spot(graph.name, ops.get(name), f"%{name}", original.source_of(name), error, allowed)
            return Compared(count, errors, spot)
    return Compared(count, errors, None)


def _is_optimised(
    original: Original, graph: Graph, inputs: Mapping[str, Array], ours: tuple[Mapping[str, Array], ...]
) -> bool:
    """Say whether all results are in steps, and are those of the framework with its optimiser."""
    results = {v.name for v in graph.outs}
    if not results or results != step_values(graph).keys():
        return False
    theirs = {name: array for name, array in original.optimised(inputs) if name in results}
    return theirs.keys() == results and all(
        not is_constant(array) and min(relative_error(values[name], array) for values in ours) <= _NEAR
        for name, array in theirs.items()
    )


def _values(
    module: Module,
    graph: Graph,
    weights: Mapping[str, Array],
    inputs: Mapping[str, Array],
    precision: str,
    noise: Noise | None = None,
) -> dict[str, Array]:
    values: dict[str, Array] = {v.name: np.asarray(inputs[v.name]) for v in graph.ins if v.name in inputs}

    def keep(op: Op, results: tuple[Array, ...]) -> None:
        values.update((v.name, array) for v, array in zip(op.outs, results, strict=True))

    store = DictStore(initial_arrays(module, weights, list(module.vars), precision))
    run_graph(graph, inputs, store, precision, keep, noise)
    return values


class OnnxOriginal:
    """An ONNX file as the original of an import.

    `names` are the file's names of values that the module spells otherwise, `bound` elements of inputs that the module
    does not have.
    """

    def __init__(self, path: Path, names: Mapping[str, str], bound: Mapping[str, object] | None = None) -> None:
        import onnxruntime

        self.path, self.names, self.bound = path, names, dict(bound or {})
        self._ours = {theirs: ours for ours, theirs in names.items()}
        self.name = f"onnxruntime {onnxruntime.__version__}"
        self.nodes: dict[str, Any] = {}

    def values(self, inputs: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """Run the file, and yield its values by their names in the module."""
        results = self.run({self.names.get(name, name): array for name, array in inputs.items()})
        for name_in_file, array in results.items():
            if isinstance(array, np.ndarray):
                yield self.ours(name_in_file), array

    def optimised(self, inputs: Mapping[str, Array]) -> Iterator[tuple[str, Array]]:
        """Run the file with the optimiser, and yield its results by their names in the module."""
        import onnxruntime

        model = self.load()
        feeds = {self.names.get(name, name): array for name, array in inputs.items()}
        wanted = [value.name for value in model.graph.output]
        results = self._run(model, onnxruntime.SessionOptions(), wanted, feeds)
        yield from ((self.ours(name), array) for name, array in results.items() if isinstance(array, np.ndarray))

    def run(self, feeds: Mapping[str, Any]) -> dict[str, Any]:
        """Return all results of all nodes, in the order of the import."""
        import onnx
        import onnxruntime

        model = self.load()
        self.nodes = {name: node for node in model.graph.node for name in node.output if name}
        outputs = {value.name for value in model.graph.output}
        model.graph.output.extend(onnx.ValueInfoProto(name=name) for name in self.nodes if name not in outputs)
        options = onnxruntime.SessionOptions()
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
        return self._run(model, options, list(self.nodes), feeds)

    def _run(self, model: onnx.ModelProto, options: Any, wanted: list[str], feeds: Mapping[str, Any]) -> dict[str, Any]:
        import onnxruntime

        options.log_severity_level = 3
        try:
            session = onnxruntime.InferenceSession(
                model.SerializeToString(), options, providers=["CPUExecutionProvider"]
            )
            names = {value.name for value in session.get_inputs()}
            arguments = {name: array for name, array in {**self.bound, **feeds}.items() if name in names}
            results = session.run(wanted, arguments)
        except (ValueError, RuntimeError) as error:  # the errors of protobuf and onnxruntime
            said = str(error).splitlines()[0]
            say(f"{self.name} does not run the model with {counted(len(wanted), 'value')} handed out: {said}")
            return {}
        return dict(zip(wanted, results, strict=True))

    def load(self) -> onnx.ModelProto:
        """Read the file, with its nodes in order."""
        import onnx

        from penstock.frontends.onnx.source import put_in_order  # lazy: heavy

        model = onnx.load(self.path)
        put_in_order(model, str(self.path))
        return model

    def ours(self, name_in_file: str) -> str:
        """Return the module's name of a value. Two names of the file may be spelled alike, and one gets a number."""
        return self._ours.get(name_in_file, legal(name_in_file))

    def theirs(self, name: str) -> str:
        """Return the file's name of a value."""
        return next((name_in_file for name_in_file in self.nodes if self.ours(name_in_file) == name), name)

    def source_of(self, name: str) -> str:
        """Describe the node that makes a value."""
        theirs = self.theirs(name)
        if (node := self.nodes.get(theirs)) is None:
            return ""
        spelled = "" if theirs == name else f", which calls it {theirs!r}"
        return visible(f"node {node.name or theirs} ({node.op_type}){spelled}")
