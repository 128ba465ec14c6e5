"""ONNX file in, Module and weights out.

The module has one graph `main`: the model's inputs, its outputs, one operation or a few per node, in the order of the file, each with
the node's name as its `loc`. Tensor names are kept (names.py says how others are spelled). Supported are opsets 13 to 24 of the default
domain; every size is a number once `dims` has bound the symbolic ones.

Which initializers are trained: every floating-point initializer that is used as a tensor is a parameter, except
  * those whose name matches `frozen` (a regular expression, searched for anywhere in the name),
  * the running mean and variance of a BatchNormalization,
  * those of rank 0: exporters write the numbers of the source text (a scale, an exponent, an epsilon) that way,
  * those that a rule needs as numbers (a bound of Clip, the value of Pad).
All others are constants. What depends on constants alone is computed here. Small constants and those with one value throughout become
`const`, the rest buffers. An initializer used by several nodes stays one variable, read once.

All nodes that cannot be imported are listed by one UnsupportedModel.
"""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path

import numpy as np
import onnx
import onnx.inliner

from penstock.ir.errors import UnsupportedModel, UsageError
from penstock.ir.graph import BUFFER, PARAM, Graph, Module, Op, Value, Var, substitute
from penstock.ir.ops import make
from penstock.ir.types import FLOATS, TensorType, dtype_of

from ..names import Names, legal
from ..pruning import live_ops
from ..writer import Refused
from .folding import LARGEST, fold
from .node import Builder, Known, Lost, Node, Result, Tensor, Weight
from .source import Source, our_dtype
from .structure import Structure, take_structure
from .table import FOLD_ONLY, RULES

OPSETS = range(13, 25)
_DOMAINS = ("", "ai.onnx")


@dataclass(frozen=True)
class Imported:
    """A model as read: `weights` holds the elements of each variable by its name and is read-only; `source_hash` is taken over all files;
    `report` says what was folded, frozen and left out; `names` gives the ONNX name of everything that had to be spelled otherwise;
    `structure` is the file without the elements of the variables."""

    module: Module
    weights: dict[str, np.ndarray]
    source_hash: str
    report: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    structure: Structure | None = None


def import_onnx(path: str | Path, *, dims: Mapping[str, int] | None = None, frozen: str | None = None) -> Imported:
    """The model at `path` as a Module. `dims` gives sizes for symbolic dimensions by name."""
    source = Source(path)
    where = str(source.path)
    original = source.model
    opset = _opset(source)
    _check(source)
    if source.model.functions:
        source.model = onnx.inliner.inline_local_functions(source.model)
    graph = source.model.graph
    bound, odd = _bind(graph, dict(dims or {}), where)
    doubtful = _behind_rounded_pools(graph) if opset < 22 else set()
    inferred = {name: kind for name, kind in source.infer_types(bound).items() if name not in doubtful}
    importer = _Importer(source, opset, inferred)
    importer.take_inputs(graph, bound, odd)
    importer.take_initializers(graph, _frozen(frozen, where), where)
    for index, node in enumerate(graph.node):
        importer.take_node(node, index)
    importer.complain()
    imported = importer.finish(dims or {})
    shapes = {name: var.type.dims for name, var in imported.module.vars.items()}
    return replace(imported, structure=take_structure(original, source, shapes, imported.names))


# ---------------------------------------------------------------------------------------- before the nodes


def _opset(source: Source) -> int:
    versions = {entry.domain: entry.version for entry in source.model.opset_import}
    found = next((versions[d] for d in _DOMAINS if d in versions), None)
    if found is None:
        problem = source.check() or "it names no opset of the default domain"
        raise UsageError(f"not a valid ONNX model: {problem}", where=str(source.path))
    if found not in OPSETS:
        raise UnsupportedModel(
            f"opset {found} is not supported, only {OPSETS[0]} to {OPSETS[-1]}",
            where=str(source.path),
            hint="onnx.version_converter can change the opset of a model, or export it again",
        )
    return int(found)


def _check(source: Source) -> None:
    """A file that is no valid model is a usage error, unless an operator that nobody knows is all there is against it."""
    problem = source.check()
    if not problem:
        return
    unknown = [(node, _why_unknown(source.model, node)) for node in source.model.graph.node]
    listed = [_row(_name(node, i), node, reason) for i, (node, reason) in enumerate(unknown) if reason]
    if listed:
        raise _unsupported(str(source.path), listed)
    raise UsageError(f"not a valid ONNX model: {problem}", where=str(source.path))


def _behind_rounded_pools(graph: onnx.GraphProto) -> set[str]:
    """Tensors whose inferred shape may be wrong: before opset 22, shape inference counts one window too many when pooling rounds up."""
    found: set[str] = set()
    for node in graph.node:
        rounded = node.op_type.endswith("Pool") and any(a.name == "ceil_mode" and a.i for a in node.attribute)
        if rounded or not found.isdisjoint(node.input):
            found.update(node.output)
    return found


def _frozen(frozen: str | None, where: str) -> re.Pattern[str] | None:
    try:
        return re.compile(frozen) if frozen else None
    except re.error as error:
        raise UsageError(f"--frozen {frozen!r} is not a regular expression: {error}", where=where) from error


def _bind(graph: onnx.GraphProto, dims: dict[str, int], where: str) -> tuple[dict[str, tuple[int, ...]], dict[str, str]]:
    """The shape of every input as numbers, and why an input has none. A dimension without a name is called INPUT.AXIS."""
    stored = {t.name for t in graph.initializer}
    shapes: dict[str, tuple[int, ...]] = {}
    odd: dict[str, str] = {}
    known: set[str] = set()
    problems: list[str] = []
    flags: dict[str, None] = {}
    for value in graph.input:
        if value.name in stored:
            continue
        if not value.type.HasField("tensor_type"):
            odd[value.name] = f"is not a tensor but of {value.type.WhichOneof('value')}"
            continue
        if not value.type.tensor_type.HasField("shape"):
            odd[value.name] = "has no shape, not even its number of dimensions is known"
            continue
        shape = []
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if dim.HasField("dim_value"):
                shape.append(dim.dim_value)
                continue
            name = dim.dim_param or f"{value.name}.{axis}"
            known.add(name)
            shape.append(dims.get(name, 1))
            if name not in dims:
                problems.append(f"input {value.name}, dimension {axis} is {dim.dim_param or 'open'}: --dim {name}=INT")
                flags[f"--dim {name}=INT"] = None
        shapes[value.name] = tuple(shape)
    for name, size in dims.items():
        if name not in known:
            there = f"the model has {', '.join(sorted(known))}" if known else "the model has no symbolic dimension"
            problems.append(f"--dim {name}={size}: there is no such dimension, {there}")
        elif size < 1:
            problems.append(f"--dim {name}={size}: a size must be 1 or more")
    if problems:
        hint = f"add {' '.join(flags)}" if flags else ""
        raise UsageError("dimensions do not fit the model:\n" + "\n".join(f"  {p}" for p in problems), where=where, hint=hint)
    return shapes, odd


# ---------------------------------------------------------------------------------------- the import itself


class _Importer:
    """State of one import: the graph built so far, what went wrong, and what is to be reported."""

    def __init__(self, source: Source, opset: int, inferred: dict[str, onnx.TypeProto]) -> None:
        graph = source.model.graph
        every = [v.name for v in graph.input] + [t.name for t in graph.initializer] + [o for n in graph.node for o in n.output]
        self.source = source
        self.opset = opset
        self.inferred = inferred
        self.builder = Builder(Names(every), source=source, opset=opset)
        self.inputs: list[Value] = []
        self.problems: list[str] = []
        self.folded: list[str] = []
        self.scalars: list[str] = []
        self.matched: list[str] = []

    def take_inputs(self, graph: onnx.GraphProto, bound: Mapping[str, tuple[int, ...]], odd: Mapping[str, str]) -> None:
        for name, reason in odd.items():
            self.problems.append(f"input {name}: {reason}")
            self.builder.tensors[name] = Lost(None)
        for value in graph.input:
            if value.name not in bound:
                continue
            try:
                dtype = our_dtype(value.type.tensor_type.elem_type)
            except ValueError as error:
                self.problems.append(f"input {value.name}: {error}")
                self.builder.tensors[value.name] = Lost(None)
                continue
            found = Value(self.builder.names[value.name], TensorType(dtype, bound[value.name]))
            self.inputs.append(found)
            self.builder.tensors[value.name] = found

    def take_initializers(self, graph: onnx.GraphProto, frozen: re.Pattern[str] | None, where: str) -> None:
        if graph.sparse_initializer:
            names = ", ".join(t.values.name for t in graph.sparse_initializer)
            raise UnsupportedModel(f"sparse initializers are not supported: {names}", where=where)
        for tensor in graph.initializer:
            try:
                kind = self.source.type_of(tensor)
            except ValueError:  # said when a node uses it as a tensor: as a number it may be harmless
                self.builder.tensors[tensor.name] = Known(tensor.name, self.source.array(tensor))
                continue
            trainable = kind.dtype in FLOATS and kind.rank > 0
            if frozen is not None and frozen.search(tensor.name) and kind.dtype in FLOATS:
                self.matched.append(tensor.name)
                trainable = False
            elif kind.dtype in FLOATS and kind.rank == 0:
                self.scalars.append(tensor.name)
            known = Weight(tensor.name, kind, tensor) if trainable else Known(tensor.name, self.source.array(tensor))
            self.builder.tensors[tensor.name] = known
        if frozen is not None and not self.matched:
            raise UsageError(f"--frozen {frozen.pattern!r} matches no floating-point initializer", where=where)

    def take_node(self, proto: onnx.NodeProto, index: int) -> None:
        node = Node(self.builder, proto, index)
        try:
            results = self._results(node, proto)
        except (Refused, TypeError) as error:
            results = None
            node.abandon()
            self.problems.append(_row(node.name, proto, str(error)))
        if results is None:
            for name in filter(None, proto.output):
                self.builder.tensors[name] = Lost(self._promised(name))

    def _results(self, node: Node, proto: onnx.NodeProto) -> Sequence[Result] | None:
        """Import one node. None when nothing can be said, because the type of an operand was lost with another node."""
        reason = _why_unknown(self.source.model, proto)
        if reason:
            raise Refused(reason)
        operands = [self.builder.tensors[name] if name else None for name in proto.input]
        if any(isinstance(t, Lost) and t.type is None for t in operands):
            return None
        note = ""
        results: Sequence[Result] | None = None
        if operands and all(t is None or isinstance(t, Known) for t in operands) and self._small(proto):
            try:
                results = fold(proto, [t.array if isinstance(t, Known) else None for t in operands], self.opset)
                self.folded.append(node.name)
            except Refused as error:
                note = f"; {error}"
        if results is None:
            if proto.op_type not in RULES:
                raise Refused(f"not supported on operands that are not known at import{note}")
            try:
                given = RULES[proto.op_type](node)
            except (Refused, TypeError) as error:
                raise Refused(f"{error}{note}") from error
            results = given if isinstance(given, list | tuple) else (given,)
            unread = node.unread()
            if unread:
                raise Refused(f"attribute {', '.join(unread)} is not supported")
        if len(results) < sum(1 for name in proto.output if name):
            raise Refused(f"only the first {len(results)} results are supported")
        self._compare(proto, results)
        node.finish(results)
        return results

    def _small(self, proto: onnx.NodeProto) -> bool:
        kinds = [self._promised(name) for name in proto.output if name]
        return all(kind is None or kind.size <= LARGEST for kind in kinds)

    def _promised(self, name: str) -> TensorType | None:
        """The static type shape inference gives for a tensor, if it gives one."""
        found = self.inferred.get(name)
        if found is None or not found.HasField("tensor_type") or not found.tensor_type.HasField("shape"):
            return None
        shape = tuple(d.dim_value if d.HasField("dim_value") else -1 for d in found.tensor_type.shape.dim)
        try:
            dtype = our_dtype(found.tensor_type.elem_type)
        except ValueError:
            return None
        return None if -1 in shape else TensorType(dtype, shape)

    def _compare(self, proto: onnx.NodeProto, results: Sequence[Result]) -> None:
        """Each result against what shape inference promises for it."""
        for name, result in zip(proto.output, results, strict=False):
            promised = self._promised(name) if name else None
            if promised is None:
                continue
            array = result.array if isinstance(result, Known) else result
            if isinstance(array, np.ndarray):
                found = TensorType(dtype_of(array.dtype), array.shape)
            else:
                assert isinstance(array, Value | Weight | Lost)
                found = array.type or promised
            if found != promised:
                raise Refused(f"result {name} comes out as {found}, but shape inference says {promised}")

    def complain(self) -> None:
        """Raise when anything could not be imported."""
        for value in self.source.model.graph.output:
            tensor = self.builder.tensors.get(value.name)
            if tensor is None:
                raise UsageError(f"output {value.name} is not computed by any node", where=str(self.source.path))
        if self.problems:
            raise _unsupported(str(self.source.path), self.problems)

    # ------------------------------------------------------------------------------------ the result

    def finish(self, dims: Mapping[str, int]) -> Imported:
        builder = self.builder
        outs = self._outputs()
        ops = live_ops(builder.ops, outs)
        used = [op.var for op in ops if op.kind == "read"]
        variables: dict[str, Var] = {name: builder.vars[name] for name in used}
        name = legal(self.source.path.stem)
        main = Graph("main", tuple(self.inputs), tuple(outs), tuple(ops))
        module = Module(name, tuple(self.inputs), tuple(v.name for v in outs), vars=variables, graphs={"main": main})
        values = {v.name for v in self.inputs} | {v.name for op in ops for v in op.outs}
        return Imported(
            module,
            {name: builder.weights[name] for name in used},
            self.source.digest(),
            tuple(self._report(ops, variables, dims)),
            builder.names.changed(values | set(used)),
        )

    def _outputs(self) -> list[Value]:
        """The model's outputs under their own names, also where an output is another tensor passed through."""
        builder = self.builder
        outs: list[Value] = []
        fixed = {v.name for v in self.inputs} | set(builder.vars)
        for proto in self.source.model.graph.output:
            tensor: Tensor = builder.tensors[proto.name]
            value = tensor if isinstance(tensor, Value) else builder.value_of(tensor) if isinstance(tensor, Known | Weight) else None
            assert value is not None
            wanted = builder.names[proto.name]
            if value.name != wanted:
                if value.name in fixed or value in outs:
                    builder.ops.append(make("reshape", (value,), (wanted,), wanted, shape=value.type.shape))
                    value = builder.ops[-1].outs[0]
                else:
                    table = {value: Value(wanted, value.type)}
                    builder.ops = [
                        Op(op.kind, substitute(op.ins, table), substitute(op.outs, table), op.attrs, op.loc) for op in builder.ops
                    ]
                    builder.tensors = {n: table.get(t, t) if isinstance(t, Value) else t for n, t in builder.tensors.items()}
                    value = table[value]
            outs.append(value)
        return outs

    def _report(self, ops: Sequence[Op], variables: Mapping[str, Var], dims: Mapping[str, int]) -> list[str]:
        params = [v for v in variables.values() if v.role == PARAM]
        buffers = [v for v in variables.values() if v.role == BUFFER]
        lines = [
            f"{len(params)} parameters with {sum(v.type.size for v in params)} elements, "
            f"{len(buffers)} buffers with {sum(v.type.size for v in buffers)} elements"
        ]
        if dims:
            lines.append("dimensions bound: " + ", ".join(f"{name}={size}" for name, size in dims.items()))
        users: dict[str, int] = {}
        for op in ops:
            for name in {v.name for v in op.ins}:
                users[name] = users.get(name, 0) + 1
        tied = [v.name for v in params if users.get(v.name, 0) > 1]
        if tied:
            lines.append(f"used more than once, trained as one variable each: {_some(tied)}")
        nodes = len(self.source.model.graph.node)
        if self.folded:
            lines.append(f"{len(self.folded)} of {nodes} nodes computed at import: {_some(self.folded)}")
        if self.matched:
            lines.append(f"frozen by name: {_some(self.matched)}")
        if self.scalars:
            lines.append(f"initializers of rank 0, taken as constants: {_some(self.scalars)}")
        stored = {self.builder.names[t.name]: t.name for t in self.source.model.graph.initializer}
        unused = [theirs for ours, theirs in stored.items() if ours not in variables and isinstance(self.builder.tensors[theirs], Weight)]
        if unused:
            lines.append(f"floating-point initializers that no result depends on as tensors, left out: {_some(unused)}")
        return lines


def _some(names: Sequence[str]) -> str:
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown


# ---------------------------------------------------------------------------------------- what cannot be imported


def _why_unknown(model: onnx.ModelProto, node: onnx.NodeProto) -> str:
    """Why a node's operator as such is not supported; empty when it has a rule or may be folded."""
    if node.domain not in _DOMAINS:
        return f"operators of domain {node.domain} are not supported"
    if any(a.HasField("g") or a.graphs for a in node.attribute):
        return "control flow is not supported"
    if node.op_type in RULES or node.op_type in FOLD_ONLY:
        return ""
    if (
        node.op_type.startswith("Sequence")
        or node.op_type.startswith("Optional")
        or node.op_type in ("SplitToSequence", "ConcatFromSequence")
    ):
        return "sequences and optionals are not supported"
    return "no rule for this operator"


def _name(node: onnx.NodeProto, index: int) -> str:
    return node.name or f"{node.op_type}_{index}"


def _row(name: str, node: onnx.NodeProto, reason: str) -> str:
    return f"{name} ({node.domain or 'ai.onnx'} {node.op_type}): {reason}"


def _unsupported(where: str, rows: Sequence[str]) -> UnsupportedModel:
    count = f"{len(rows)} places" if len(rows) > 1 else "one place"
    return UnsupportedModel(
        f"the model cannot be imported, {count}:\n" + "\n".join(f"  {row}" for row in rows),
        where=where,
        hint="`penstock ops` lists what is supported",
    )


__all__ = ["OPSETS", "Imported", "import_onnx"]
