"""The importer of ONNX: reads a file and returns a Module and its weights.

The module has one graph `main`: the model's inputs, its outputs, and one or a few operations per node. They are in the
order of the file, which source.py mends. Each has the node's name as its `loc`. Tensor names are kept (names.py says
how illegal ones are spelled).
Opsets 7 to 28 of the default domain are supported. Every size is a number once `dims` has bound the symbolic ones.
Inputs that `known` binds to values are not inputs of the module.

trained.py decides which initializers are parameters, by the rules of constants/. All others are constants. Results
that depend on constants alone are computed here. Constants that are small or have one value throughout become `const`,
larger ones buffers. An initializer used by several nodes stays one variable, read once.

The importer tries these readings of a node in this order: a call of one of the model's functions (functions.py);
control flow or a sequence (control.py, rules/sequences.py); a computation on known operands (folding.py); an operator
with a rule (table.py); an operator that ONNX defines by a function. One CannotImport lists all nodes that cannot be
imported.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx

from penstock.frontends.imported import Imported, Unimported, told_renames
from penstock.frontends.names import Names
from penstock.frontends.writer import Lost, Refused
from penstock.ir.graph import CACHE, Graph, Value, Var
from penstock.ir.sharding.batch_dims import values_with
from penstock.ir.types import TensorType, dtype_of
from penstock.support.errors import UsageError

from .binding import Given, Inputs, bind, symbols_of
from .constants.separation import separate_statistics
from .control import CONTROL
from .folding import fold, small
from .functions import DEEPEST, MOST_NODES, call, definition, has_definition, identity
from .hints import Marks
from .inference import Promises, contradicts, promised_by_node, promises_of, rounds_up
from .node import OnnxBuilder, OnnxNode, Rule
from .report import CannotImport, Findings, contradiction, problem_of, report
from .rules.dequantised.choose import follow_integers, on_integers
from .source import OnnxFile, node_name, our_dtype, stored_in
from .structure import take_structure
from .table import FOLD_ONLY, OTHERS, UNFOLDED, rule_of, why_without_rule
from .tensors import (
    BodyUnfinished,
    Empty,
    KnownTensor,
    NeedsKnown,
    NodeUnfinished,
    OnnxWeight,
    Result,
    Scope,
    Tensor,
    TensorList,
    is_lost,
)
from .trained import Trained
from .versions import CHANGED, DOMAINS, UPGRADES, opsets_of, upgrade

# Errors that rules, the op table and NumPy raise for operands and attributes that do not fit each other.
_DO_NOT_FIT = (Refused, TypeError, ValueError, IndexError, ArithmeticError)


def import_onnx(
    path: str | Path,
    *,
    dims: Mapping[str, int] | None = None,
    known: Mapping[str, Given] | None = None,
    frozen: str | None = None,
    trained: str | None = None,
    source: OnnxFile | None = None,
) -> Imported:
    """Import the model at `path` as a Module, or an opened `source`, which is used up.

    `dims` gives sizes for symbolic dimensions by name, `known` elements for inputs. `frozen` and `trained` are patterns
    of names of initializers.
    """
    source = source or OnnxFile(path)
    where = str(source.path)
    opsets = opsets_of(source)
    graph = source.model.graph
    _check(source)
    separate_statistics(source.model)
    try:
        bound = bind(graph, dims or {}, known or {}, where)
    except UsageError as error:
        if unknown := _unknown_operators(source):  # both lists together say more
            raise CannotImport(where, [*unknown, *error.what.splitlines()[1:]], hint=error.hint) from error
        raise
    findings = Findings()
    if source.moved:
        findings.warnings.append(f"nodes that lie before those whose results they take, put in order: {source.moved}")
    importer = OnnxImporter(source, opsets, findings, Trained(source, findings, frozen, trained))
    importer.take_inputs(graph, bound)
    importer.take_initializers(graph)
    for index, node in enumerate(graph.node):
        importer.take_node(node, index, importer.scope)
    importer.complain()
    imported = importer.finish(dims or {})
    types = {name: var.type for name, var in imported.module.vars.items()}
    return replace(imported, bound=bound.known, structure=take_structure(source.model, source, types, imported.names))


# ---------------------------------------------------------------------------------------- before the nodes


def _check(source: OnnxFile) -> None:
    """Raise a usage error for an invalid model, or CannotImport if its only fault is an unknown operator."""
    problem = source.check()
    if not problem:
        return
    if unknown := _unknown_operators(source):
        raise CannotImport(str(source.path), unknown)
    raise UsageError(f"not a valid ONNX model: {problem}", where=str(source.path))


def _unknown_operators(source: OnnxFile) -> list[Unimported]:
    """List the nodes whose operators are not supported on any operands."""
    functions = {identity(f) for f in source.model.functions}
    nodes = [(i, node) for i, node in enumerate(source.model.graph.node) if identity(node) not in functions]
    return [problem_of(node_name(node, i), node, reason) for i, node in nodes if (reason := _why_unknown(node))]


def _behind_rounded_pools(graph: onnx.GraphProto) -> set[str]:
    """Find tensors whose declared shape may be wrong.

    Exporters take it from shape inference, which counted a window too many.
    """
    doubtful: set[str] = set()
    for node in graph.node:
        if rounds_up(node) or not doubtful.isdisjoint(node.input):
            doubtful.update(node.output)
    return doubtful


# ---------------------------------------------------------------------------------------- the import itself


class OnnxImporter:
    """State of one import: the graph so far, and the findings to report.

    `scope` holds the names of the model's own graph.
    """

    def __init__(self, source: OnnxFile, opsets: Mapping[str, int], findings: Findings, trained: Trained) -> None:
        graph = source.model.graph
        every = [v.name for v in graph.input] + [o for n in graph.node for o in n.output]
        every += [t.values.name for t in graph.sparse_initializer]
        # By the graph object: protobuf returns the same one again as long as this list holds it.
        self.stored = stored_in(graph)
        self.labels: dict[int, dict[str, str]] = {}
        for label, owner, tensor in self.stored:
            self.labels.setdefault(id(owner), {})[tensor.name] = label
            every.append(label)
        self.inner: dict[object, Tensor] = {}
        self.trained = trained
        self.source = source
        doubtful = _behind_rounded_pools(graph) if opsets[""] < 22 else set()
        self.declared = promises_of({value.name: value.type for value in graph.output if value.name not in doubtful})
        self.functions = {identity(f): f for f in source.model.functions}
        self.added = self.depth = 0
        self.builder = OnnxBuilder(Names(every), source=source)
        self.scope = Scope(opsets)
        self.inputs: list[Value] = []
        # The dimensions that had no size in the file, of each input.
        self.named: dict[Value, Mapping[int, str]] = {}
        self.findings = findings
        self.marks = Marks(source.model, self.builder.names.__getitem__)

    def rule_of(self, domain: str, kind: str) -> Rule | None:
        """Return the rule of an operator, if it has one."""
        return rule_of(domain, kind)

    def why_unknown(self, node: onnx.NodeProto) -> str:
        """Explain why a node's operator is not supported on any operands, "" if it may be."""
        return _why_unknown(node)

    def take_inputs(self, graph: onnx.GraphProto, bound: Inputs) -> None:
        tensors = self.scope.tensors
        for name, reason in bound.odd.items():
            self.findings.problems.append(f"input {name}: {reason}")
            tensors[name] = Lost(None)
        for name, elements in bound.known.items():
            self.findings.bound.append(name)
            if isinstance(elements, list):
                tensors[name] = TensorList(
                    tuple(KnownTensor(self.builder.names.new(f"{name}.{i}"), array) for i, array in enumerate(elements))
                )
            else:
                tensors[name] = Empty() if elements is None else KnownTensor(name, elements)
        for value in graph.input:
            if value.name not in bound.shapes:
                continue
            try:
                dtype = our_dtype(value.type.tensor_type.elem_type)
            except ValueError as error:
                self.findings.problems.append(f"input {value.name}: {error}")
                tensors[value.name] = Lost(None)
                continue
            entry = Value(self.builder.names[value.name], TensorType(dtype, bound.shapes[value.name]))
            self.inputs.append(entry)
            self.named[entry] = bound.named.get(value.name, {})
            self.builder.inputs[entry] = value.name
            tensors[value.name] = entry

    def take_initializers(self, graph: onnx.GraphProto) -> None:
        for tensor in graph.initializer:
            self.scope.tensors[tensor.name] = self._initializer(tensor, tensor.name)
        for sparse in graph.sparse_initializer:
            self.scope.tensors[sparse.values.name] = KnownTensor(sparse.values.name, self.source.dense(sparse))

    def _initializer(self, tensor: onnx.TensorProto, label: str) -> Tensor:
        try:
            kind = self.source.type_of(tensor)
        except ValueError:  # reported when a node uses it as a tensor: as a number it may be harmless
            return KnownTensor(label, self.source.array(tensor))
        return (
            OnnxWeight(label, kind, tensor)
            if self.trained(tensor, kind)
            else KnownTensor(label, self.source.array(tensor))
        )

    def open_graph(self, graph: onnx.GraphProto, n: OnnxNode, part: str) -> Scope:
        """Open a scope around a graph inside a node, with its initializers.

        All its runs share these, also runs by repetitions of the graphs around it. In a function, whose nodes are read
        anew at each call, the calls of one place share them.
        """
        scope = n.scope.inside(f"{n.own_name}/", f"{n.own_name}/{part}/")
        labels = self.labels.get(id(graph), {})
        for tensor in graph.initializer:
            label = labels.get(tensor.name)
            at = f"{scope.path}{tensor.name}"
            key = label or (*scope.calls, at)
            if key not in self.inner:
                self.inner[key] = self._initializer(tensor, label or self.builder.names.new(at))
            scope.tensors[tensor.name] = self.inner[key]
        for sparse in graph.sparse_initializer:
            scope.tensors[sparse.values.name] = n.known_of(self.source.dense(sparse))
        return scope

    def run_nodes(self, nodes: Sequence[onnx.NodeProto], scope: Scope) -> None:
        """Import the nodes of a graph inside a node."""
        before = len(self.findings.problems)
        self.added += len(nodes) + 1
        if self.added > MOST_NODES:
            raise Refused(f"loops, branches and functions written out would be more than {MOST_NODES} nodes")
        self.depth += 1
        try:
            if self.depth > DEEPEST:
                raise Refused(f"functions, loops and branches inside each other are more than {DEEPEST} deep")
            for index, proto in enumerate(nodes):
                self.take_node(proto, index, scope)
        finally:
            self.depth -= 1
        if len(self.findings.problems) > before:
            raise BodyUnfinished

    def note_choice(self, n: OnnxNode, condition: Value) -> None:
        """Record that a body cannot be imported which may not run: the inputs behind the condition decide."""
        behind = tuple(self.builder.inputs_behind(condition))
        if behind:
            self.findings.needs.update(dict.fromkeys(behind))
            self.findings.choices.setdefault(behind, {})[n.name] = None

    def take_node(self, proto: onnx.NodeProto, index: int, scope: Scope) -> None:
        """Import one node into a scope. If it cannot be imported, record why, and mark its results as lost."""
        promises, node = Promises(), None
        results, first = None, len(self.builder.ops)
        try:
            node = OnnxNode(self.builder, proto, index, scope)
            if identity(proto) not in self.functions and (reason := self.why_unknown(proto)):
                raise Refused(reason)
            if any(map(is_lost, node.operands)):  # the node cannot be judged
                raise NodeUnfinished
            if proto.op_type not in CONTROL:
                promises = promised_by_node(node)
            try:
                results = self._results(node, promises)
                _agree(proto, results, promises)
                if scope is self.scope:
                    self._compare_declared(proto, results)
                node.finish(results)
                self.marks.take(proto, self.builder.ops[first:], scope.tensors, node.name)
            finally:
                if results is None:
                    node.abandon()
        except NodeUnfinished:
            pass
        except _DO_NOT_FIT as error:
            results = None
            problem = problem_of(scope.prefix + node_name(proto, index), proto, str(error))
            self._note(problem, error)
            if node is not None and contradicts(node):
                self.findings.contradictions[problem] = self._sizes_in(node)
        if results is None:
            for name in filter(None, proto.output):
                scope.tensors[name] = Lost(promises.types.get(name))

    def _compare_declared(self, proto: onnx.NodeProto, results: Sequence[Result]) -> None:
        """Compare results with the types that the model declares. As in onnxruntime, a shape may be out of date."""
        for name, actual, declared in _differences(proto, results, self.declared):
            if actual.dtype != declared.dtype:
                raise Refused(_difference(name, actual, declared, "the model"))
            self.findings.warnings.append(
                f"output {name} comes out as {actual}, but the model says {declared}, which is out of date"
            )

    def _note(self, problem: Unimported, error: Exception) -> None:
        self.findings.problems.append(problem)
        cause: BaseException | None = error
        while cause is not None:
            if isinstance(cause, NeedsKnown):
                self.findings.needs.update(dict.fromkeys(cause.inputs))
            cause = cause.__cause__

    def _sizes_in(self, node: OnnxNode) -> dict[str, int]:
        """Return the sizes that were given for dimensions of a node's operands; of those of the inputs behind them, if
        none can be followed so far."""
        operands = {tensor for tensor in node.operands if isinstance(tensor, Value)}
        graph = Graph("main", tuple(self.inputs), (), tuple(self.builder.ops))
        behind = {name for value in operands for name in self.builder.inputs_behind(value)}
        near, far = dict[str, int](), dict[str, int]()
        for entry, called in self.named.items():
            for axis, name in called.items():
                if not operands.isdisjoint(values_with(graph, entry, axis)):
                    near[name] = entry.type.dims[axis]
                elif self.builder.inputs[entry] in behind:
                    far[name] = entry.type.dims[axis]
        return near or far

    def _results(self, node: OnnxNode, promises: Promises) -> Sequence[Result]:
        """Import a node as a call, control flow, folded constants or by its rule, and return its results."""
        function = self.functions.get(identity(node.proto))
        if function is not None:
            return _all_read(node, call(self, node, function))
        standard = node.proto.domain in DOMAINS
        if standard and node.kind in CONTROL:
            return _all_read(node, CONTROL[node.kind](self, node))
        written_in = upgrade(node) if standard else node.opset
        note = ""
        known = bool(node.operands) and all(t is None or isinstance(t, KnownTensor) for t in node.operands)
        if (
            standard
            and known
            and small(node, promises)
            and node.kind not in UNFOLDED
            and node.opset >= CHANGED.get(node.kind, 0)
        ):
            try:
                folded = fold(node, written_in)
                follow_integers(node)
                self.findings.folded.append(node.name)
                return folded
            except Refused as error:
                note = f"; {error}"
        try:
            rule = self.rule_of(node.proto.domain, node.kind)
            if rule is not None:
                written = on_integers(node, rule) or rule(node)
                follow_integers(node)
                return _all_read(node, written if isinstance(written, list | tuple) else (written,))
            function = definition(node) if standard else None
            if function is None:
                raise Refused("not supported on operands that are not known at import")
            self.findings.expanded.append(node.name)
            return _all_read(node, call(self, node, function))
        except (Refused, TypeError) as error:
            raise Refused(f"{error}{note}") from error
        except (
            ValueError,
            LookupError,
            ArithmeticError,
        ) as error:  # a rank, a length or a number that no valid node has
            raise Refused(f"operands and attributes do not fit the operator: {error}{note}") from error

    def complain(self) -> None:
        """Raise an error if anything could not be imported."""
        twice = [name for name, times in Counter(v.name for v in self.source.model.graph.output).items() if times > 1]
        if twice:
            raise UsageError(f"output {', '.join(twice)} is listed more than once", where=str(self.source.path))
        for value in self.source.model.graph.output:
            tensor = self.scope.tensors.get(value.name)
            if tensor is None:
                raise UsageError(f"output {value.name} is not computed by any node", where=str(self.source.path))
            if isinstance(tensor, TensorList | Empty):
                self.findings.problems.append(
                    f"output {value.name}: sequences and optionals cannot be results, only tensors"
                )
        if self.findings.problems and (refused := contradiction(self.findings)) is not None:
            raise UsageError(refused[0], where=str(self.source.path), hint=refused[1])
        if self.findings.problems:
            raise CannotImport(
                str(self.source.path),
                self.findings.problems,
                self.findings.needs,
                "; ".join(self.findings.told_choices()),
            )

    # ------------------------------------------------------------------------------------ the result

    def finish(self, dims: Mapping[str, int]) -> Imported:
        builder, source = self.builder, self.source
        module = builder.module(source.path.stem, self.inputs, self._outputs())
        ops = module.graphs["main"].ops
        values = {v.name for v in self.inputs} | {v.name for op in ops for v in op.outs}
        hints = self.marks.hints()
        names = builder.names.changed(values | set(module.vars))
        seen = [*(v.name for v in module.inputs), *module.outputs, *module.vars]
        lines = report(self.findings, ops, module.vars, dims, len(source.model.graph.node), self._unused(module.vars))
        return Imported(
            module,
            {name: builder.weights[name] for name, var in module.vars.items() if var.role != CACHE},
            source.digest(),
            (*lines, *told_renames({name: names[name] for name in seen if name in names}), *hints.report()),
            names,
            hints=hints,
            symbols=symbols_of(source.model.graph, builder.names),
        )

    def _outputs(self) -> list[tuple[str, Value]]:
        """Return the model's outputs, each with its name."""
        outputs = []
        for proto in self.source.model.graph.output:
            tensor = self.scope.tensors[proto.name]
            value = self.builder.value_of(tensor) if isinstance(tensor, KnownTensor | OnnxWeight) else tensor
            assert isinstance(value, Value)
            outputs.append((self.builder.names[proto.name], value))
        return outputs

    def _unused(self, variables: Mapping[str, Var]) -> list[str]:
        stored = {self.builder.names[t.name]: t.name for t in self.source.model.graph.initializer}
        return [
            theirs
            for ours, theirs in stored.items()
            if ours not in variables and isinstance(self.scope.tensors[theirs], OnnxWeight)
        ]


# ---------------------------------------------------------------------------------------- single nodes


def _all_read(node: OnnxNode, results: Sequence[Result]) -> Sequence[Result]:
    unread = node.unread()
    if unread:
        raise Refused(f"attribute {', '.join(unread)} is not supported")
    return results


def _agree(proto: onnx.NodeProto, results: Sequence[Result], promises: Promises) -> None:
    """Refuse results that are too few, or of another type than is promised."""
    if len(results) < sum(1 for name in proto.output if name):
        raise Refused(f"only the first {len(results)} results are supported")
    for difference in _differences(proto, results, promises):
        raise Refused(_difference(*difference, "shape inference"))


def _difference(name: str, actual: TensorType, promised: TensorType, authority: str) -> str:
    return f"result {name} comes out as {actual}, but {authority} says {promised}"


def _differences(
    proto: onnx.NodeProto, results: Sequence[Result], promises: Promises
) -> Iterator[tuple[str, TensorType, TensorType]]:
    """Yield the name of each result that is not of the promised type, its type, and the promised one."""
    for name, result in zip(proto.output, results, strict=False):
        promised = promises.types.get(name)
        array = result.array if isinstance(result, KnownTensor) else result
        if promised is None or isinstance(array, TensorList | Empty):
            continue
        actual = TensorType(dtype_of(array.dtype), array.shape) if isinstance(array, np.ndarray) else array.type
        if actual is not None and actual != promised:
            yield name, actual, promised


def _why_unknown(node: onnx.NodeProto) -> str:
    """Explain why a node's operator is unsupported. Return "" if it has a rule or a definition, or may be folded."""
    if rule_of(node.domain, node.op_type) is not None:
        return ""
    if node.domain in OTHERS:
        return why_without_rule(node)
    if node.domain not in DOMAINS:
        return f"operators of domain {node.domain} are not supported"
    if node.op_type in CONTROL or node.op_type in FOLD_ONLY or node.op_type in UPGRADES or has_definition(node.op_type):
        return ""
    return "no rule for this operator"
