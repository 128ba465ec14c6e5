"""Programs of torch as one graph of ATen operations: modules, torch.fx graphs and exported programs.

In: a module with example arguments, or an ExportedProgram. Out: an ExportedProgram without in-place operations,
decomposed into operations that the tables have rows for. Modules are exported with the sizes of the examples. Symbolic
sizes of an ExportedProgram are bound later (`SymbolSizes`).

Regions of the source that compute without gradients (`torch.no_grad` inside forward) end in `detach` in the graph.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from numbers import Integral
from typing import Any

import sympy  # torch writes symbolic sizes with it
import torch
from torch.export import ExportedProgram

from penstock.support.errors import UnsupportedModel, UsageError

from .cumulative import cumulative_averages
from .memory import place
from .table import WHOLE, name_of


def original(source: object) -> object:
    """Return the module inside the result of torch.compile, whose names lack `_orig_mod`.

    Return anything else as it is.
    """
    inner = getattr(source, "_orig_mod", None)
    return inner if type(source).__name__ == "OptimizedModule" and isinstance(inner, torch.nn.Module) else source


def exported(source: object, args: Sequence[Any], kwargs: Mapping[str, Any] | None, where: str) -> ExportedProgram:
    """Export and decompose the source. Raise UnsupportedModel with torch's reason if torch cannot export it."""
    if isinstance(source, ExportedProgram):
        if args or kwargs:
            raise UsageError(
                "an ExportedProgram has its example arguments already; give dims={NAME: SIZE} to bind its sizes",
                where=where,
            )
        return decomposed(source, where)
    if isinstance(source, torch.jit.ScriptModule | torch.jit.ScriptFunction):
        raise UsageError(
            "scripted and traced modules are not supported",
            where=where,
            hint="give the torch.nn.Module that was scripted or traced",
        )
    if not isinstance(source, torch.nn.Module):
        kind = type(source).__name__
        raise UsageError(
            f"expected a torch.nn.Module, a torch.fx.GraphModule or a torch.export.ExportedProgram, got {kind}",
            where=where,
        )
    try:
        inspect.signature(source.forward).bind(*args, **(kwargs or {}))
    except TypeError as error:
        raise UsageError(f"the example arguments do not fit forward: {error}", where=where) from error
    try:
        with cumulative_averages(source), _quiet_about_leaves():
            program = torch.export.export(source, tuple(args), dict(kwargs or {}), strict=False)
    except Exception as error:  # torch.export raises errors of its own, of the model's code, and of tensors
        hint = _HINT if _depends_on_data(error) else ""
        raise UnsupportedModel(f"torch.export cannot export it: {_reason(error)}", where=where, hint=hint) from error
    return decomposed(program, where)


@contextmanager
def _quiet_about_leaves() -> Iterator[None]:
    """Silence torch's deprecation warning on its own class LeafSpec, about which users can do nothing.

    All other warnings, above all those of the module's code, stay as they are.
    """
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", r"`isinstance\(treespec, LeafSpec\)` is deprecated", FutureWarning)
        yield


_HINT = (
    "code that depends on the elements of tensors cannot be exported; "
    "a wrapper module may choose another way or other outputs"
)


def _depends_on_data(error: BaseException) -> bool:
    """Return whether torch needed to know the elements of a tensor."""
    kinds = ("DataDependent", "DynamicOutputShape")
    return any(kind in type(error).__name__ for kind in kinds) or "data-dependent" in str(error).lower()


def _reason(error: Exception) -> str:
    """Return type and first lines of an error of torch."""
    lines = [line.strip() for line in str(error).splitlines() if line.strip()]
    return f"{type(error).__name__}: {' '.join(lines[:3])[:400]}" if lines else type(error).__name__


def decomposed(program: ExportedProgram, where: str) -> ExportedProgram:
    """Decompose a program into operations that the tables have rows for."""
    table: Any = torch.export.default_decompositions()
    for target in list(table.keys()):
        if name_of(target) in WHOLE:
            table.pop(target)
    stops = _mark_stops(program)
    try:
        with _quiet_about_leaves():
            result: ExportedProgram = program.run_decompositions(table)
        return result
    except Exception as error:  # as above
        if isinstance(error, AssertionError) and (shared := _one_tensor(program)):
            raise UnsupportedModel(
                f"buffers {shared} are one tensor: "
                f"torch.export does not follow where forward changes it ({_reason(error)})",
                where=where,
                hint="give each of them memory of its own, with clone()",
            ) from error
        raise UnsupportedModel(f"torch.export cannot decompose it: {_reason(error)}", where=where) from error
    finally:
        for stop in stops:
            stop.replace_all_uses_with(stop.all_input_nodes[0])
            stop.graph.erase_node(stop)


def _one_tensor(program: ExportedProgram) -> str:
    """Return the names of buffers that share all of their memory with another one."""
    places: dict[tuple[object, ...], list[str]] = {}
    for name in program.graph_signature.buffers:
        tensor = program.state_dict.get(name, program.constants.get(name))
        if isinstance(tensor, torch.Tensor) and tensor.numel():
            places.setdefault(place(tensor), []).append(name)
    return ", ".join(name for names in places.values() if len(names) > 1 for name in names)


def _mark_stops(program: ExportedProgram) -> list[torch.fx.Node]:
    """Insert `detach` after every tensor that leaves a region without gradients, which decomposing would lose."""
    stops = []
    for node in list(program.graph.nodes):
        if "wrap_with_set_grad_enabled" not in str(node.target) or node.args[0]:
            continue
        for result in list(node.users):
            value = result.meta.get("val")
            if not isinstance(value, torch.Tensor) or not value.is_floating_point():
                continue
            with program.graph.inserting_after(result):
                stop = program.graph.call_function(torch.ops.aten.detach.default, (result,))
            stop.meta = dict(result.meta)
            result.replace_all_uses_with(stop, delete_user_cb=lambda user, stop=stop: user is not stop)
            stops.append(stop)
    return stops


# ---------------------------------------------------------------------------------------- sizes


class SymbolSizes:
    """Symbolic sizes of a program as the numbers in `dims`, by the symbol's name or as INPUT.AXIS."""

    def __init__(
        self, program: ExportedProgram, inputs: Mapping[str, torch.Tensor], dims: Mapping[str, int], where: str
    ) -> None:
        self._numbers: dict[Any, Any] = {}
        symbols: dict[str, Any] = {}
        places: dict[str, list[str]] = {}
        for name, tensor in inputs.items():
            for axis, size in enumerate(tensor.shape):
                if isinstance(size, torch.SymInt):
                    for symbol in size.node.expr.free_symbols:
                        symbols[str(symbol)] = symbol
                    if str(size.node.expr) in symbols:
                        places.setdefault(str(size.node.expr), []).append(f"{name}.{axis}")
        aliases = {place: symbol for symbol, spots in places.items() for place in spots}
        problems = []
        flags: dict[str, None] = {}
        for name, number in dims.items():
            symbol = symbols.get(aliases.get(name, name))
            if symbol is None:
                listed = ", ".join(sorted([*symbols, *aliases])) or "none: all sizes are numbers"
                problems.append(f"{name}={number}: there is no such dimension, the program has {listed}")
                continue
            if isinstance(number, bool) or not isinstance(number, Integral):
                problems.append(f"{name}={number!r}: must be a whole number")
                continue
            number = int(number)
            bounds = program.range_constraints.get(symbol)
            if number < 1 or (bounds is not None and not bounds.lower <= number <= bounds.upper):
                problems.append(
                    f"{name}={number}: must be "
                    f"{f'in {bounds.lower}..{bounds.upper}' if bounds is not None else '1 or more'}"
                )
            elif self._numbers.setdefault(symbol, sympy.Integer(number)) != number:
                problems.append(
                    f"{name}={number}: it is the same dimension as one that is bound to {self._numbers[symbol]}"
                )
        for name, symbol in symbols.items():
            if symbol not in self._numbers and not problems:
                shown = places.get(name, [name])[0]
                problems.append(f"dimension {shown} ({name}) is open")
                flags[shown] = None
        if problems:
            hint = f"add dims={{{', '.join(f'{flag!r}: INT' for flag in flags)}}}" if flags else ""
            raise UsageError(
                "dimensions do not fit the program:\n" + "\n".join(f"  {p}" for p in problems), where=where, hint=hint
            )

    def number(self, size: int | torch.SymInt) -> int:
        """Return a size as a number, or -1 if it depends on elements of tensors."""
        if isinstance(size, int):
            return size
        bound = size.node.expr.xreplace(self._numbers)
        return int(bound) if bound.is_number else -1

    def shape(self, tensor: torch.Tensor) -> tuple[int, ...]:
        return tuple(self.number(size) for size in tensor.shape)
