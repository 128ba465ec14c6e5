"""The importer of torch: takes a module or program and returns a Module and its weights.

The module has one graph `main`. Its inputs are those of forward by name, nested ones as torch.export spells them. Its
outputs are named by their path in forward's result. Each call of ATen becomes one or a few operations. The `loc` of an
operation is the path of the submodule and the name of the call.

Variables have their names of the state dict. Tensors that share memory are one variable, under the first of their
names. Trained are the parameters with `requires_grad` whose name does not match `frozen`. Other parameters, buffers and
constants are not; torch computes here what depends on these alone. Parameters and buffers that no output depends on are
left out.

Sizes are numbers. Arguments of forward that are numbers, strings or None have the values of the examples. Outputs that
are None are left out. Buffers that forward changes (running statistics in training) are variables that main reads and
then writes (frontends/running_statistics.py).

One UnsupportedModel lists all calls that cannot be imported.
"""

from __future__ import annotations

import hashlib
import re
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch
from torch.export import ExportedProgram
from torch.export.graph_signature import ConstantArgument, InputKind, OutputKind, TensorArgument
from torch.utils import _pytree as pytree

from penstock.frontends.imported import Imported, State, Unimported, counted, some, told_renames
from penstock.frontends.names import Names, legal, pattern_of
from penstock.frontends.writer import Lost, Refused
from penstock.ir.graph import BUFFER, Module, Value, Var
from penstock.ir.text import print_module
from penstock.ir.types import TensorType
from penstock.support.errors import UsageError

from .arrays import array_of, has_dtype, our_dtype
from .calls import Caller, complain
from .memory import place, sharing
from .node import Absent, KnownElements, TorchBuilder, TorchWeight, type_of
from .source import SymbolSizes, exported, original


def import_torch(
    source: object,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dims: Mapping[str, int] | None = None,
    frozen: str | None = None,
) -> Imported:
    """Import a torch module, torch.fx graph or ExportedProgram as a Module.

    `dims` gives sizes for symbolic dimensions of an ExportedProgram.
    """
    source = original(source)
    where = type(source).__name__
    pattern = pattern_of(frozen, "frozen", where)
    program = exported(source, args, kwargs, where)
    return ProgramImporter(program, where, dims or {}).run(pattern)


def _trains(tensor: object) -> bool:
    return isinstance(tensor, torch.nn.Parameter) and tensor.requires_grad and tensor.is_floating_point()


class ProgramImporter:
    """State of one import: the graph so far, its problems, and the findings to report.

    A subclass may take variables from elsewhere, name inputs, and hash what it read in its own way.
    """

    def __init__(
        self,
        program: ExportedProgram,
        where: str,
        dims: Mapping[str, int],
        builder: type[TorchBuilder] = TorchBuilder,
    ) -> None:
        self.program = program
        self.where = where
        self.dims = dims
        signature = program.graph_signature
        self.specs = {
            spec.arg.name: spec for spec in signature.input_specs if not isinstance(spec.arg, ConstantArgument)
        }
        self.placeholders = {node.name: node for node in program.graph.nodes if node.op == "placeholder"}
        fed = {name: node.meta["val"] for name, node in self.placeholders.items() if self._is_input(name)}
        self.fed = {name: val for name, val in fed.items() if isinstance(val, torch.Tensor)}
        self.state = {**program.constants, **program.state_dict}
        held = [str(s.target) for s in signature.input_specs if s.kind in _STATE]
        # Variables first: an input of forward with the name of a variable gets another one.
        self.builder = builder(Names(held))
        self.sizes = SymbolSizes(program, self.fed, dims, where)
        self.problems: list[Unimported | str] = []
        self.caller = Caller(self.builder, self.sizes, self.problems)
        self.inputs: list[Value] = []
        self.spelled: dict[str, str] = {}
        self.matched: list[str] = []
        self.stopped: list[str] = []
        self.tied: list[str] = []
        self.dropped: list[str] = []
        self.stored: dict[str, list[str]] = {}
        # Buffers that forward changes, and the values that read them.
        self.moving: dict[str, Value | Lost] = {
            str(s.target): Lost(None) for s in signature.output_specs if s.kind == OutputKind.BUFFER_MUTATION
        }

    def run(self, frozen: re.Pattern[str] | None = None) -> Imported:
        """Import the whole program."""
        self.take_state(frozen)
        self.take_inputs()
        for call in self.program.graph.nodes:
            if call.op in ("call_function", "get_attr"):
                self.caller.take(call)
        return self.finish()

    def _is_input(self, name: str) -> bool:
        return name in self.specs and self.specs[name].kind == InputKind.USER_INPUT

    # ------------------------------------------------------------------------------------ before the calls

    def take_state(self, frozen: re.Pattern[str] | None) -> None:
        """Import parameters, buffers and constants, each under the first of its names in the state dict."""
        program, names = self.program, self.builder.names
        used = {str(s.target): name for name, s in self.specs.items() if s.kind in _STATE}
        aliases: dict[tuple[object, ...], list[str]] = {}
        for name, tensor in program.state_dict.items():
            if isinstance(tensor, torch.Tensor):
                aliases.setdefault(place(tensor), []).append(name)
        hits = {name for name in self.state if frozen is not None and frozen.search(name)}
        seen: dict[tuple[object, ...], KnownElements | TorchWeight] = {}
        firsts: dict[tuple[object, ...], str] = {}
        for target, placeholder in used.items():
            tensor = self.state.get(target)
            node = self.placeholders[placeholder]
            if not isinstance(tensor, torch.Tensor):
                self.builder.env[node] = Lost(None)
                self.problems.append(f"{target}: {type(tensor).__name__} is not a tensor")
                continue
            key = place(tensor)
            same = aliases.get(key, [target])
            if key not in seen:
                name = names[same[0]] if same[0] in used else names[target]
                trainable = _trains(tensor)
                if trainable and not hits.isdisjoint(same):
                    self.matched.append(same[0])
                elif isinstance(tensor, torch.nn.Parameter) and not trainable:
                    self.stopped.append(same[0])
                stays = not trainable or not hits.isdisjoint(same)
                seen[key] = KnownElements(name, tensor.detach()) if stays else TorchWeight(name, tensor)
                firsts[key] = target
                if key in aliases:
                    self.stored[name] = same
            elif hits.isdisjoint(same) and _trains(tensor) != _trains(self.state[firsts[key]]):
                self.problems.append(
                    f"{target}: shares memory with {firsts[key]}, "
                    "and one of them alone is a parameter that requires a gradient"
                )
            if len(same) > 1 and same[0] not in self.tied:
                self.tied.append(same[0])
            self.builder.env[node] = seen[key]
            if target in self.moving:  # never folded at import
                self.moving[target] = self.builder.variable(seen[key].name, type_of(tensor), BUFFER, array_of(tensor))
                self.builder.env[node] = self.moving[target]
        self._overlaps(list(seen.values()))
        if frozen is not None and not hits:
            raise UsageError(f"frozen {frozen.pattern!r} matches no name of the state dict", where=self.where)

    def _overlaps(self, state: Sequence[KnownElements | TorchWeight]) -> None:
        """Refuse parameters that share a part of their memory with other tensors: training would separate them."""
        for i, j in sharing([entry.tensor for entry in state]):
            if isinstance(state[i], TorchWeight) or isinstance(state[j], TorchWeight):
                self.problems.append(
                    f"{state[j].name}: shares memory with {state[i].name}, but not all of it in the same order"
                )

    def take_inputs(self) -> None:
        for spec in self.program.graph_signature.input_specs:
            node = self.placeholders[spec.arg.name]
            if isinstance(spec.arg, ConstantArgument):
                self.builder.env[node] = spec.arg.value
            elif spec.kind == InputKind.USER_INPUT and isinstance(spec.arg, TensorArgument):
                self._take_input(node, self.fed[spec.arg.name])
            elif spec.kind == InputKind.TOKEN:  # the order of operations with effects
                self.builder.env[node] = None
            elif spec.kind not in _STATE:
                self.builder.env[node] = Lost(None)
                self.problems.append(
                    f"input {spec.arg.name}: {spec.kind.name.lower().replace('_', ' ')} is not supported"
                )

    def input_name(self, name: str) -> str:
        """Return the name that an input shall have if it is free."""
        return name

    def _take_input(self, node: torch.fx.Node, fed: torch.Tensor) -> None:
        try:
            kind = TensorType(our_dtype(fed.dtype), self.sizes.shape(fed))
        except ValueError as error:
            self.problems.append(f"input {node.name}: {error}")
            self.builder.env[node] = Lost(None)
            return
        value = Value(self.builder.names.fresh(self.input_name(node.name)), kind)
        if value.name != node.name:
            self.spelled[value.name] = node.name
        self.inputs.append(value)
        self.builder.env[node] = value

    # ------------------------------------------------------------------------------------ the result

    def finish(self) -> Imported:
        named = self._outputs()
        if self.problems:
            raise complain(self.where, self.problems)
        module = self.builder.module(self.where, self.inputs, self._spell(named))
        variables = module.vars
        weights = {name: self.builder.weights[name] for name, var in variables.items() if var.init == "file"}
        names = self.spelled | self.builder.names.changed(set(variables))
        return Imported(
            module,
            weights,
            self.source_hash(module, weights),
            tuple(self._report(variables, module.outputs, names)),
            names,
            state=self.state_of(variables),
        )

    def source_hash(self, module: Module, weights: dict[str, np.ndarray]) -> str:
        """Hash all that was read."""
        digest = hashlib.sha256(print_module(module).encode())
        for array in weights.values():
            digest.update(array.tobytes())
        return digest.hexdigest()

    def state_of(self, variables: Mapping[str, Var]) -> State | None:
        """Return the state dict of the program without tensors of element types that have no counterpart here."""
        tensors = {name: t for name, t in self.program.state_dict.items() if isinstance(t, torch.Tensor)}
        names = {name: tuple(same) for name, same in self.stored.items() if name in variables}
        named = {name for same in names.values() for name in same}
        known = {name: t for name, t in tensors.items() if name not in named and has_dtype(t.dtype)}
        return State(names, {name: array_of(t) for name, t in known.items()})

    def _outputs(self) -> list[tuple[str, Value]]:
        """Return the tensors of forward's result by their paths. Record the buffers and inputs that it changes."""
        call = next(node for node in self.program.graph.nodes if node.op == "output")
        specs = self.program.graph_signature.output_specs
        results: list[Any] = []
        for spec, output in zip(specs, call.args[0], strict=True):
            value = self.builder.env[output] if isinstance(output, torch.fx.Node) else output
            if spec.kind == OutputKind.USER_OUTPUT:
                results.append(value)
            elif spec.kind in (
                OutputKind.BUFFER_MUTATION,
                OutputKind.USER_INPUT_MUTATION,
                OutputKind.PARAMETER_MUTATION,
            ):
                self._changed(spec.kind, str(spec.target), value)
        tree = pytree.tree_unflatten(list(range(len(results))), self.program.call_spec.out_spec)
        paths = {index: _path(path) for path, index in pytree.tree_flatten_with_path(tree)[0]}
        named = []
        for index, result in enumerate(results):
            name = paths[index]
            if isinstance(result, KnownElements | TorchWeight):
                result = self._as_value(name, result)
            if isinstance(result, Value):
                named.append((name, result))
            elif isinstance(result, Absent):
                self.problems.append(f"output {name}: {result.reason}")
            elif result is not None and not isinstance(result, Lost):
                self.dropped.append(name)
        if not named and not self.problems:
            raise UsageError("forward gives no tensor", where=self.where)
        return named

    def _as_value(self, name: str, result: KnownElements | TorchWeight) -> Value | None:
        try:
            type_of(result.tensor)
            return self.builder.value_of(result)
        except Refused as error:
            self.problems.append(f"output {name}: {error}")
            return None

    def _changed(self, kind: OutputKind, target: str, new: Any) -> None:
        """Record the new value of a buffer that forward changes, or the problem with another changed tensor."""
        if kind == OutputKind.USER_INPUT_MUTATION:
            self.dropped.append(f"{target} (changed in place)")
            return
        if kind == OutputKind.PARAMETER_MUTATION:
            self.problems.append(f"{target}: forward changes a parameter, which is not supported")
            return
        old = self.moving.get(target)
        if isinstance(new, KnownElements | TorchWeight):
            new = self._as_value(f"{target}.new", new)
        if isinstance(new, Absent):
            self.problems.append(f"{target}: {new.reason}")
        elif isinstance(old, Value) and isinstance(new, Value) and new != old:
            self.builder.moved[old.name] = new

    def _spell(self, named: Sequence[tuple[str, Value]]) -> list[tuple[str, Value]]:
        """Assign unique names to the outputs: their paths where these are free."""
        spelled: dict[str, Value] = {}
        for path, value in named:
            unchanged = value.name == path == legal(path) and path not in spelled
            name = path if unchanged else self.builder.names.fresh(path)
            if name != path:
                self.spelled[name] = path
            spelled[name] = value
        return list(spelled.items())

    def _report(self, variables: Mapping[str, Var], outputs: Sequence[str], names: Mapping[str, str]) -> list[str]:
        folded = self.caller.folded
        unused = [t.name for t in self.builder.env.values() if isinstance(t, TorchWeight) and t.name not in variables]
        lists = (
            ("dimensions bound", [f"{name}={size}" for name, size in self.dims.items()]),
            ("tied, trained as one variable each", self.tied),
            (f"{len(folded)} calls computed at import", folded),
            ("frozen by name", self.matched),
            ("parameters that do not require a gradient, taken as constants", self.stopped),
            ("parameters that no output depends on, left out", list(dict.fromkeys(unused))),
            (
                "changed by forward, in training once per microbatch",
                [name for name in variables if name in self.builder.moved],
            ),
            ("changed by forward, not changed here", self.dropped),
        )
        values = [*(v.name for v in self.inputs), *outputs, *variables]
        spelled = told_renames({name: names[name] for name in values if name in names})
        return [counted(variables.values()), *spelled, *(f"{what}: {some(listed)}" for what, listed in lists if listed)]


_STATE = (InputKind.PARAMETER, InputKind.BUFFER, InputKind.CONSTANT_TENSOR)


def _path(path: Sequence[Any]) -> str:
    """Return the path of an output in forward's result: `logits`, `hidden_states.0`, or `output.0` in a bare tuple."""
    parts = [str(getattr(key, "key", getattr(key, "idx", getattr(key, "name", key)))) for key in path]
    return ".".join(parts if parts and not parts[0].isdigit() else ["output", *parts])
