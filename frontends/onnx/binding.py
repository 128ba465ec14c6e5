"""Values that the user binds before an import: sizes of symbolic dimensions, and elements of inputs.

In: the inputs of a graph, sizes by the name of the dimension, values by the name of the input. Out: the shape of every
input, the values as arrays of the declared type, and the reason for each input that has neither. A value also fixes the
sizes of its input's dimensions. One error lists everything that does not fit.

A dimension without a name, or with one that says nothing (`?`, `*`, `None`), is called INPUT.AXIS: two of them are two
dimensions. The size of one that is an expression (`past + seq`) follows from its parts.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx.helper import tensor_dtype_to_np_dtype

from penstock.frontends.expressions import expression_of, with_derived
from penstock.frontends.names import Names
from penstock.support.errors import UsageError
from penstock.support.words import flag_for

from .source import OnnxFile, element_name

# Python's word for a size that nobody knows; a name has a letter.
_NOTHING = ("None",)
# The value of an input: numbers; for a sequence a list of them; for an optional also None.
Given = object


@dataclass
class Inputs:
    """The inputs of a graph after binding.

    `shapes` are those of tensors that stay inputs, `known` the values of bound inputs. `odd` says why an input is
    neither. `named` has the names of the dimensions that had no size.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    known: dict[str, np.ndarray | list[np.ndarray] | None] = field(default_factory=dict)
    odd: dict[str, str] = field(default_factory=dict)
    named: dict[str, dict[int, str]] = field(default_factory=dict)


def _as_declared(array: np.ndarray, kind: onnx.TypeProto.Tensor) -> tuple[np.ndarray | None, str]:
    """Convert an array to the declared element type and rank, or say why it does not fit."""
    try:
        dtype = np.dtype(tensor_dtype_to_np_dtype(kind.elem_type))
    except KeyError:
        return None, f"element type {element_name(kind.elem_type)} cannot be bound"
    if array.dtype.kind in "OUSV" and array.dtype != dtype:
        return None, f"needs numbers, got elements of type {array.dtype}"
    with np.errstate(all="ignore"):
        converted = array.astype(dtype)
    exact = (
        array.dtype == dtype
        or (converted.dtype.kind == "f" and array.dtype.kind in "fiu")
        or np.array_equal(converted, array)
    )
    if not exact:
        return (
            None,
            f"has element type {element_name(kind.elem_type)}, which cannot hold {array.reshape(-1)[:8].tolist()}",
        )
    if kind.HasField("shape"):
        dims = kind.shape.dim
        if converted.ndim != len(dims) and converted.size == 1:
            converted = converted.reshape((1,) * len(dims))
        static = tuple(None if _is_open(d) else d.dim_value for d in dims)
        fits = len(static) == converted.ndim and all(
            s in (None, n) for s, n in zip(static, converted.shape, strict=True)
        )
        if not fits:
            shape = ", ".join(d.dim_param or "?" if _is_open(d) else str(d.dim_value) for d in dims)
            return None, f"has shape [{shape}], the values have shape {list(converted.shape)}"
    return converted, ""


def _bind_value(value: onnx.ValueInfoProto, bound: Given) -> tuple[np.ndarray | list[np.ndarray] | None, str]:
    kind = value.type
    while kind.HasField("optional_type"):
        if bound is None:
            return None, ""
        kind = kind.optional_type.elem_type
    if kind.HasField("sequence_type"):
        if not isinstance(bound, list | tuple):
            return None, "is a sequence, and takes a list of arrays"
        items = []
        for item in bound:
            array, problem = _as_declared(np.asarray(item), kind.sequence_type.elem_type.tensor_type)
            if array is None:
                return None, problem
            items.append(array)
        return items, ""
    if not kind.HasField("tensor_type"):
        return None, f"is of {kind.WhichOneof('value')}, which cannot be bound"
    return _as_declared(np.asarray(bound), kind.tensor_type)


def _is_open(dim: onnx.TensorShapeProto.Dimension) -> bool:
    """Say whether a dimension has no size yet. Some exporters write -1 there, which onnxruntime reads so, too."""
    return not dim.HasField("dim_value") or dim.dim_value < 0


def symbol_of(dim: onnx.TensorShapeProto.Dimension) -> str:
    """Return the name that a file gives an open dimension; "" where it gives none."""
    name: str = dim.dim_param
    says_something = any(c.isalpha() for c in name) and name not in _NOTHING
    return name if _is_open(dim) and says_something else ""


def dimension_name(value: str, axis: int, dim: onnx.TensorShapeProto.Dimension) -> str:
    """Return the name of an open dimension of an input."""
    return symbol_of(dim) or f"{value}.{axis}"


def _fed(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """List the inputs without an initializer."""
    stored = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    return [value for value in graph.input if value.name not in stored]


def symbols_of(graph: onnx.GraphProto, names: Names) -> dict[str, tuple[str, ...]]:
    """Return the symbols of the dimensions of inputs and outputs, by their new names; empty where there is none."""
    return {
        names[value.name]: tuple(map(symbol_of, value.type.tensor_type.shape.dim))
        for value in (*_fed(graph), *graph.output)
        if value.type.HasField("tensor_type")
    }


def bind(graph: onnx.GraphProto, dims: Mapping[str, int], known: Mapping[str, Given], where: str) -> Inputs:
    inputs = _fed(graph)
    result = Inputs()
    problems: list[str] = []
    for name in known:
        if name not in {value.name for value in inputs}:
            problems.append(
                f"--known {name}: there is no such input, the model has {', '.join(v.name for v in inputs) or 'none'}"
            )
    sizes = dict(dims)
    for value in inputs:
        if value.name in known:
            bound, problem = _bind_value(value, known[value.name])
            result.known[value.name] = bound
            if problem:
                problems.append(f"--known {value.name}: {'' if problem.startswith('needs') else 'the input '}{problem}")
            elif isinstance(bound, np.ndarray):
                for dim, size in zip(value.type.tensor_type.shape.dim, bound.shape, strict=False):
                    name = symbol_of(dim)
                    if name and sizes.setdefault(name, size) != size:
                        problems.append(
                            f"--known {value.name}: dimension {name} is {size} there, elsewhere {sizes[name]}"
                        )
    of_known = {name for v in inputs if v.name in known for d in v.type.tensor_type.shape.dim if (name := symbol_of(d))}
    fed = [v for v in inputs if v.name not in known]
    names = of_known | {name for value in fed for _, name in _open_of(value)}
    problems += _contradictions(sizes, names)
    sizes = with_derived(sizes, names)
    flags = _take_shapes(fed, sizes, result, problems, names)
    accepted = names | {part for name in names for part in _parts(name)}
    for name, size in dims.items():
        if name not in accepted:
            listed = f"the model has {', '.join(sorted(names))}" if names else "the model has no symbolic dimension"
            problems.append(f"--dim {name}={size}: there is no such dimension, {listed}")
        elif size < 1:
            problems.append(f"--dim {name}={size}: a size must be 1 or more")
    if problems:
        what = "dimensions" if not known else "dimensions and values"
        sizes_in_python = ", ".join(f"{name!r}: INT" for name in flags)
        hint = f"add {' '.join(flags.values())}, or dims={{{sizes_in_python}}} in Python" if flags else ""
        raise UsageError(
            f"{what} do not fit the model:\n" + "\n".join(f"  {p}" for p in problems), where=where, hint=hint
        )
    return result


def open_dimensions(
    path: str | Path, dims: Mapping[str, int], known: Mapping[str, Given]
) -> tuple[str | None, list[str]]:
    """List a model's symbolic dimensions that are not bound.

    Return the one that is the first of every input with an open dimension, or None, and the others. Expressions of
    other dimensions follow from them.
    """
    inputs = [value for value in _fed(OnnxFile(path).model.graph) if value.name not in known]
    every = [place for value in inputs for place in _open_of(value)]
    names = {name for _, name in every}
    bound = with_derived(dims, names)
    left = {name for name in names if name not in bound and not _follows(name, names | dims.keys())}
    first = {name for axis, name in every if name in left and not axis}
    others = {name for axis, name in every if name in left and axis}
    alone = next(iter(first)) if len(first) == 1 and not first & others else None
    return alone, sorted(others | (first - {alone}))


def _parts(name: str) -> tuple[str, ...]:
    """Return the names that the size of a dimension follows from; none of one that is no expression."""
    expression = expression_of(name)
    return () if expression is None else expression.parts


def _follows(name: str, names: Collection[str]) -> bool:
    """Return whether a dimension is an expression of others among these."""
    parts = _parts(name)
    return bool(parts) and all(part in names for part in parts)


def _open_of(value: onnx.ValueInfoProto) -> list[tuple[int, str]]:
    """List the open dimensions of an input, with their names."""
    dims = value.type.tensor_type.shape.dim if value.type.HasField("tensor_type") else ()
    return [(axis, dimension_name(value.name, axis, dim)) for axis, dim in enumerate(dims) if _is_open(dim)]


def _contradictions(sizes: Mapping[str, int], names: Collection[str]) -> list[str]:
    """List expressions that have another size than follows from their parts, or none at all."""
    problems = []
    for name in sorted(names):
        expression = expression_of(name)
        if expression is None or not all(part in sizes for part in expression.parts):
            continue
        size, parts = expression.size(sizes), ", ".join(f"{part}={sizes[part]}" for part in expression.parts)
        if sizes.get(name, size) != size:
            problems.append(f"--dim {name}={sizes[name]}: it is {size} by {parts}")
        elif size < 1:
            problems.append(f"dimension {name} is {size} by {parts}: a size must be 1 or more")
    return problems


def _take_shapes(
    inputs: Sequence[onnx.ValueInfoProto],
    sizes: Mapping[str, int],
    result: Inputs,
    problems: list[str],
    names: set[str],
) -> dict[str, str]:
    """Fill in the shapes of inputs, and the names of their dimensions. Return the flags of those that are missing."""
    flags: dict[str, str] = {}
    several = len(inputs) > 1
    for value in inputs:
        if not value.type.HasField("tensor_type"):
            kind = f"is not a tensor but of {value.type.WhichOneof('value')}"
            # Without any input left there would be nothing to run.
            binding = f": {flag_for('--known', value.name, '...')} binds it to values" if several else ""
            result.odd[value.name] = kind + binding
            continue
        if not value.type.tensor_type.HasField("shape"):
            result.odd[value.name] = "has no shape, not even its number of dimensions is known"
            continue
        called = dict(_open_of(value))
        dims = value.type.tensor_type.shape.dim
        for axis, name in called.items():
            if name in sizes:
                continue
            if _follows(name, names | sizes.keys()):
                follows = ", ".join(part for part in _parts(name) if part not in sizes)
                problems.append(f"input {value.name}, dimension {axis} is {name}: it follows from {follows}")
                continue
            flags[name] = flag_for("--dim", name, "INT")
            problems.append(f"input {value.name}, dimension {axis} is {symbol_of(dims[axis]) or 'open'}: {flags[name]}")
        shape = (sizes.get(called[i], 1) if i in called else dim.dim_value for i, dim in enumerate(dims))
        result.shapes[value.name] = tuple(shape)
        result.named[value.name] = called
    return flags
