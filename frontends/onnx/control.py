"""Control flow, unrolled: branches, loops and scans become the operations that they run.

In: a node with graphs inside. Out: its results. The nodes of these graphs are imported in its place, once for each run,
under names with the numbers of the iterations.

    If      A condition known at import chooses the branch. With one computed at run time both branches run, and `where`
            chooses between their results, which must agree in type. An error in the other branch is not seen, but its
            nan reaches gradients.
    Loop    The number of iterations must be known, as a trip count or by conditions known at import. A condition
            computed at run time keeps the state of the last iteration that ran, up to the trip count. Results collected
            over iterations are refused then.
    Scan    Once per entry of the scanned dimension.
    SequenceMap    Once per entry of the sequence.

`functions.MOST_NODES` limits the number of nodes that all of this may add to a model.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Protocol

import numpy as np
import onnx

from penstock.frontends.formulas.layout import axis_of, entry, reshape, stack
from penstock.frontends.writer import Lost, Refused
from penstock.ir.graph import Value
from penstock.ir.types import numpy_dtype

from .functions import BodyImporter, results_of
from .inference import promises_of
from .node import OnnxNode, Result
from .tensors import BodyUnfinished, KnownTensor, NodeUnfinished, OnnxWeight, Scope, Tensor, TensorList


class Graphs(BodyImporter, Protocol):
    """An importer of graphs inside nodes."""

    def open_graph(self, graph: onnx.GraphProto, n: OnnxNode, part: str) -> Scope:
        """Open a scope around a graph, with its initializers, which all its runs share."""

    def note_choice(self, n: OnnxNode, condition: Value) -> None:
        """Record that a condition at run time decides whether a body that cannot be imported runs."""


Control = Callable[[Graphs, OnnxNode], Sequence[Result]]
Array = KnownTensor | OnnxWeight | Value | Lost


def _run(importer: Graphs, graph: onnx.GraphProto, scope: Scope, operands: Sequence[Tensor]) -> list[Tensor]:
    """Import the nodes of a graph once."""
    if len(operands) != len(graph.input):
        raise Refused(f"graph {graph.name} takes {len(graph.input)} inputs, not {len(operands)}")
    scope.tensors.update({formal.name: tensor for formal, tensor in zip(graph.input, operands, strict=True)})
    importer.run_nodes(graph.node, scope)
    return results_of(scope, [value.name for value in graph.output])


def _run_if(
    importer: Graphs,
    n: OnnxNode,
    condition: bool | Value,
    graph: onnx.GraphProto,
    scope: Scope,
    operands: Sequence[Tensor],
) -> list[Tensor]:
    """Import the nodes of a graph that runs on a condition. If they cannot be, record that the condition decides."""
    try:
        return _run(importer, graph, scope, operands)
    except BodyUnfinished:
        if isinstance(condition, Value):
            importer.note_choice(n, condition)
        raise


def _body(n: OnnxNode, name: str = "body") -> onnx.GraphProto:
    n.require(n.given(name), f"attribute {name} is missing")
    return n.raw_attr(name).g


def _condition(n: OnnxNode, tensor: Tensor) -> bool | Value:
    """Read a condition: as a bool if it is known, else as a value of rank 0."""
    if isinstance(tensor, KnownTensor | OnnxWeight):
        array = n.constant_of(tensor, "the condition")
        n.require(array.size == 1, f"the condition must be one number, got shape {list(array.shape)}")
        return bool(array.reshape(-1)[0])
    n.require(
        isinstance(tensor, Value) and tensor.type.size == 1 and tensor.type.dtype == "bool",
        "the condition must be one bool",
    )
    assert isinstance(tensor, Value)
    return reshape(n, tensor, ())


def _same(a: Tensor, b: Tensor) -> bool:
    if isinstance(a, KnownTensor) and isinstance(b, KnownTensor):
        return a is b or (a.array.dtype == b.array.dtype and np.array_equal(a.array, b.array))
    return a == b if not isinstance(a, KnownTensor) and not isinstance(b, KnownTensor) else False


def _choose(n: OnnxNode, condition: Value, yes: Tensor, no: Tensor) -> Tensor:
    """Select `yes` where the condition holds at run time, else `no`."""
    if _same(yes, no):
        return yes
    if isinstance(yes, TensorList) and isinstance(no, TensorList):
        n.require(
            len(yes.items) == len(no.items),
            "the length of a sequence depends on a condition that is computed at run time",
        )
        return TensorList(tuple(_choose(n, condition, a, b) for a, b in zip(yes.items, no.items, strict=True)))
    if not isinstance(yes, Array) or not isinstance(no, Array):
        raise Refused("whether a result is a tensor depends on a condition that is computed at run time")
    n.require(
        n.type_of(yes) == n.type_of(no), f"a condition at run time chooses between {n.type_of(yes)} and {n.type_of(no)}"
    )
    return n.emit("where", condition, n.value_of(yes), n.value_of(no))


# ---------------------------------------------------------------------------------------- branches


def _if(importer: Graphs, n: OnnxNode) -> Sequence[Result]:
    condition = _condition(n, n.operand(0))
    results: dict[bool, list[Tensor]] = {}
    failed: NodeUnfinished | None = None
    for outcome, part in ((True, "then"), (False, "else")):
        graph = _body(n, f"{part}_branch")
        if condition is (not outcome):
            continue
        scope = importer.open_graph(graph, n, part).inside(f"{part}/")
        try:
            results[outcome] = _run_if(importer, n, condition, graph, scope, ())
        except NodeUnfinished as error:  # the other branch may have more to report
            failed = error
    if failed is not None:
        raise failed
    if not isinstance(condition, Value):
        return results[condition]
    n.require(len(results[True]) == len(results[False]), "the branches have different numbers of results")
    chosen: list[Result] = []
    for i, (yes, no) in enumerate(zip(results[True], results[False], strict=True)):
        try:
            chosen.append(_choose(n, condition, yes, no))
        except Refused as error:
            if isinstance(n.operand(0), Value):
                n.constant_of(n.operand(0), f"result {i}: {error}; the condition")
            raise
    return chosen


# ---------------------------------------------------------------------------------------- loops


def _loop(importer: Graphs, n: OnnxNode) -> Sequence[Result]:
    body = _body(n)
    trips = int(n.constant(0, "the number of iterations").reshape(-1)[0]) if n.has(0) else None
    condition = _condition(n, n.operand(1)) if n.has(1) else True
    state: list[Tensor] = [n.operand(i) for i in range(2, n.count)]
    n.require(
        len(body.input) == len(state) + 2 and len(body.output) > len(state),
        "the body does not fit the state that it is given",
    )
    scope = importer.open_graph(body, n, "body")
    collected: list[list[Tensor]] = [[] for _ in body.output[len(state) + 1 :]]
    i = 0
    while condition is not False and (trips is None or i < trips):
        if isinstance(condition, Value):
            if trips is None:
                n.constant_of(condition, "the condition of a loop without a number of iterations")
            if collected:
                n.constant_of(condition, "the condition of a loop that collects results")
        operands = (n.known_of(np.array(i, np.int64)), _as_tensor(n, condition), *state)
        again, *results = _run_if(importer, n, condition, body, scope.inside(f"{i}/"), operands)
        after, outputs = results[: len(state)], results[len(state) :]
        if isinstance(condition, Value):  # the iteration may not have run
            state = [_choose(n, condition, new, old) for new, old in zip(after, state, strict=True)]
        else:
            state = after
        for items, item in zip(collected, outputs, strict=True):
            items.append(item)
        condition = _both(n, condition, _condition(n, again))
        i += 1
    stacked = [_stack(n, items, 0, body.output[len(state) + 1 + k]) for k, items in enumerate(collected)]
    return [*state, *stacked]


def _as_tensor(n: OnnxNode, condition: bool | Value) -> Tensor:
    return condition if isinstance(condition, Value) else n.known_of(np.array(condition))


def _both(n: OnnxNode, before: bool | Value, after: bool | Value) -> bool | Value:
    if isinstance(before, Value) and isinstance(after, Value):
        return n.emit("and", before, after)
    if before is False or after is False:
        return False
    return after if before is True else before


def _stack(n: OnnxNode, items: Sequence[Tensor], axis: int, declared: onnx.ValueInfoProto) -> Tensor:
    """Stack tensors of one type along a new dimension. If there are none, `declared` must give the type."""
    if not items:
        kind = promises_of({"": declared.type}).types.get("")
        if kind is None:
            raise Refused(f"nothing is collected for {declared.name}, and the model does not say its type")
        at = axis_of(n, axis, kind.rank + 1)
        return n.known_of(np.zeros((*kind.dims[:at], 0, *kind.dims[at:]), numpy_dtype(kind.dtype)))
    arrays = [item for item in items if isinstance(item, Array)]
    n.require(len(arrays) == len(items), "only tensors can be collected")
    types = [n.type_of(item) for item in arrays]
    n.require(
        len(set(types)) == 1, f"what is collected has different types: {', '.join(map(str, dict.fromkeys(types)))}"
    )
    axis = axis_of(n, axis, types[0].rank + 1)
    if all(isinstance(item, KnownTensor) for item in arrays):
        return n.known_of(np.stack([item.array for item in arrays if isinstance(item, KnownTensor)], axis))
    return stack(n, [n.value_of(item) for item in arrays], axis)


# ---------------------------------------------------------------------------------------- scans


def _scan(importer: Graphs, n: OnnxNode) -> Sequence[Result]:
    n.require(n.opset >= 9, "the Scan of opset 8 is not supported")
    body, count = _body(n), n.int_attr("num_scan_inputs")
    n.require(
        0 < count <= n.count and len(body.input) == n.count, f"{count} scanned inputs of {n.count} do not fit the body"
    )
    states = n.count - count
    collected: list[list[Tensor]] = [[] for _ in body.output[states:]]
    backward = _listed(n, "scan_input_directions", count)
    out_axes, out_backward = (
        _listed(n, "scan_output_axes", len(collected)),
        _listed(n, "scan_output_directions", len(collected)),
    )
    axes = [axis_of(n, axis, n.type(states + i).rank) for i, axis in enumerate(_listed(n, "scan_input_axes", count))]
    n.require(all(n.type(states + i).rank > 0 for i in range(count)), "a scanned input has no dimension")
    sizes = {n.type(states + i).dims[axis] for i, axis in enumerate(axes)}
    n.require(len(sizes) == 1, f"the scanned dimensions differ: {sorted(sizes)}")
    size = sizes.pop()
    scope = importer.open_graph(body, n, "body")
    state: list[Tensor] = [n.operand(i) for i in range(states)]
    for step in range(size):
        entries = [
            _entry(n, n.tensor(states + i), axes[i], size - 1 - step if backward[i] else step) for i in range(count)
        ]
        results = _run(importer, body, scope.inside(f"{step}/"), [*state, *entries])
        state = results[:states]
        for items, item in zip(collected, results[states:], strict=True):
            items.append(item)
    stacked = []
    for items, axis, reverse, declared in zip(collected, out_axes, out_backward, body.output[states:], strict=True):
        stacked.append(_stack(n, items[::-1] if reverse else items, axis, declared))
    return [*state, *stacked]


def _listed(n: OnnxNode, name: str, count: int) -> tuple[int, ...]:
    numbers = n.ints_attr(name) or (0,) * count
    n.require(len(numbers) == count, f"{name} has {len(numbers)} entries, expected {count}")
    return numbers


def _entry(n: OnnxNode, tensor: Array, axis: int, i: int) -> Tensor:
    """Return tensor[..., i, ...] without that dimension."""
    if isinstance(tensor, KnownTensor):
        return n.known_of(np.take(tensor.array, i, axis))
    return entry(n, n.value_of(tensor), axis, i)


def _sequence_map(importer: Graphs, n: OnnxNode) -> Sequence[Result]:
    body = _body(n)
    operands = [n.operand(i) for i in range(n.count)]
    first = operands[0] if operands else None
    if not isinstance(first, TensorList):
        raise Refused("operand 0 is not a sequence")
    lengths = {len(t.items) for t in operands if isinstance(t, TensorList)}
    n.require(len(lengths) == 1, f"the sequences have different lengths: {sorted(lengths)}")
    scope = importer.open_graph(body, n, "body")
    collected: list[list[Tensor]] = [[] for _ in body.output]
    for i in range(len(first.items)):
        entries = [t.items[i] if isinstance(t, TensorList) else t for t in operands]
        for items, item in zip(collected, _run(importer, body, scope.inside(f"{i}/"), entries), strict=True):
            items.append(item)
    return [TensorList(tuple(items)) for items in collected]


CONTROL: Mapping[str, Control] = {"If": _if, "Loop": _loop, "Scan": _scan, "SequenceMap": _sequence_map}
