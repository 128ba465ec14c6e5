"""Values that the user binds before an import: sizes of symbolic dimensions, and elements of inputs.

In: the inputs of a graph, sizes by the name of the dimension, values by the name of the input. Out: the shape of every
input, the values as arrays of the declared type, and the reason for each input that has neither. A dimension without a
name is called INPUT.AXIS. A value also fixes the sizes of its input's dimensions. One error lists everything that does
not fit.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

import numpy as np
import onnx
from onnx.helper import tensor_dtype_to_np_dtype

from penstock.frontends.names import Names
from penstock.support.errors import UsageError
from penstock.support.words import flag_for

from .source import OnnxFile, element_name

# The value of an input: numbers; for a sequence a list of them; for an optional also None.
Given = object


@dataclass
class Inputs:
    """The inputs of a graph after binding.

    `shapes` are those of tensors that stay inputs, `known` the values of bound inputs. `odd` says why an input is
    neither.
    """

    shapes: dict[str, tuple[int, ...]] = field(default_factory=dict)
    known: dict[str, np.ndarray | list[np.ndarray] | None] = field(default_factory=dict)
    odd: dict[str, str] = field(default_factory=dict)


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


def _fed(graph: onnx.GraphProto) -> list[onnx.ValueInfoProto]:
    """List the inputs without an initializer."""
    stored = {t.name for t in graph.initializer} | {t.values.name for t in graph.sparse_initializer}
    return [value for value in graph.input if value.name not in stored]


def symbols_of(graph: onnx.GraphProto, names: Names) -> dict[str, tuple[str, ...]]:
    """Return the symbols of the dimensions of inputs and outputs, by their new names; empty where there is none."""
    return {
        names[value.name]: tuple(dim.dim_param if _is_open(dim) else "" for dim in value.type.tensor_type.shape.dim)
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
                    if dim.dim_param and sizes.setdefault(dim.dim_param, size) != size:
                        problems.append(
                            f"--known {value.name}: dimension {dim.dim_param} is {size} there, "
                            f"elsewhere {sizes[dim.dim_param]}"
                        )
    names, flags = _open_dimensions([v for v in inputs if v.name not in known], sizes, result, problems)
    names.update(d.dim_param for v in inputs if v.name in known for d in v.type.tensor_type.shape.dim if d.dim_param)
    for name, size in dims.items():
        if name not in names:
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

    Return the one that is the first of every input with an open dimension, or None, and the others.
    """
    first: set[str] = set()
    others: set[str] = set()
    for value in _fed(OnnxFile(path).model.graph):
        if value.name in known or not value.type.HasField("tensor_type"):
            continue
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            name = dim.dim_param or f"{value.name}.{axis}"
            if _is_open(dim) and name not in dims:
                (others if axis else first).add(name)
    alone = next(iter(first)) if len(first) == 1 and not first & others else None
    return alone, sorted(others | (first - {alone}))


def _open_dimensions(
    inputs: Sequence[onnx.ValueInfoProto], sizes: Mapping[str, int], result: Inputs, problems: list[str]
) -> tuple[set[str], dict[str, str]]:
    """Fill in the shapes of inputs. Return the names of all dimensions, and the flags of those that are missing."""
    names: set[str] = set()
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
        shape = []
        for axis, dim in enumerate(value.type.tensor_type.shape.dim):
            if not _is_open(dim):
                shape.append(dim.dim_value)
                continue
            name = dim.dim_param or f"{value.name}.{axis}"
            names.add(name)
            shape.append(sizes.get(name, 1))
            if name not in sizes:
                flags[name] = flag_for("--dim", name, "INT")
                problems.append(f"input {value.name}, dimension {axis} is {dim.dim_param or 'open'}: {flags[name]}")
        result.shapes[value.name] = tuple(shape)
    return names, flags
