"""`penstock ops`: all operations with their support, or one in full.

In: the op table and the tables of rules. Out: text.
"""

from __future__ import annotations

import inspect
from collections.abc import Iterator

import numpy as np

from penstock.inspection.reference import trial
from penstock.ir.attrs import print_literal
from penstock.ir.interpreter.ops import NUMPY
from penstock.ir.ops import ANY, OPS, OpDef, Required
from penstock.passes.rewrite.decompose import DECOMPOSE, DecomposeOptions
from penstock.passes.training.vjp import FLAT, STATISTICS, STOPS, VJP
from penstock.support.terminal import table

from .coverage import MEANINGS, STATE, coverage

_TYPES = {bool: "bool", int: "int", float: "float", str: "word", tuple: "list", object: "any"}
_CPUS = "kernels for CPUs"
_DIMENSIONS = (
    "a name is a dimension, `...` any leading ones; n may be split over devices, n+ into partial sums, n^ stays whole"
)


def list_ops() -> Iterator[str]:
    """Yield lines about all operations, and which parts of the compiler support them."""
    yield table(*coverage())
    yield ""
    yield from (f"{word}: {meaning}" for word, meaning in MEANINGS.items())
    yield "`penstock ops OP` says where the rules of one are, and tries its kernel for CPUs on a small example."


def op_help(name: str) -> Iterator[str]:
    """Yield the lines of help for an operation."""
    row = OPS[name]
    yield f"{name}({_operands(row)})"
    yield f"    {row.doc}"
    yield ""
    rows = [[attr, *_attribute(spec)] for attr, spec in row.attrs.items()]
    yield table(["attribute", "type", "default"], rows) if rows else "no attributes"
    yield ""
    yield f"family: {row.family}" + (", has an effect: it is done once, and in its place" if row.effect else "")
    if row.dims:
        yield f"dimensions: {row.dims}  ({_DIMENSIONS})"
    else:
        yield "dimensions: those of all operands are the same, after broadcasting, and any of them may be split"
    yield f"gradient: {_gradient(name)}"
    yield f"interpreter: {_interpreter(row)}"
    for device, kinds in _kernels():
        yield f"{device}: {_kernel(row, kinds, tried=device == _CPUS)}"
    if name in DECOMPOSE:
        kept = (
            f", which leaves it alone where that pays (keep=[{','.join(DecomposeOptions().keep)}])"
            if name in DecomposeOptions().keep
            else ""
        )
        yield f"taken apart by the pass decompose{kept}: {_place(DECOMPOSE[name])}"


def _operands(row: OpDef) -> str:
    low, high = row.arity
    names = [f"%{chr(ord('a') + i)}" for i in range(low)]
    more = ["..."] if high >= ANY else [f"[%{chr(ord('a') + i)}]" for i in range(low, high)]
    variable = ["@var"] if "var" in row.attrs else []
    return ", ".join(
        [
            *names,
            *more,
            *variable,
            *(f"{attr}=" for attr, spec in row.attrs.items() if isinstance(spec, Required) and attr != "var"),
        ]
    )


def _attribute(spec: object) -> tuple[str, str]:
    if isinstance(spec, Required):
        return _TYPES.get(spec.kind, spec.kind.__name__), "must be given"
    return _TYPES[type(spec)], print_literal(spec)  # type: ignore[arg-type]


def _gradient(name: str) -> str:
    if name in VJP:
        without = "".join(f", none through result {number}" for number in STATISTICS.get(name, ()))
        return f"{_place(VJP[name])}{without}"
    if name in FLAT:
        return "zero wherever there is one, so nothing is trained through it"
    if name in STOPS:
        return "none: gradients end here"
    return "that of what it is taken apart into" if name in DECOMPOSE else "none"


def _interpreter(row: OpDef) -> str:
    if row.name in NUMPY:
        return _place(NUMPY[row.name])
    return "built in: reads and writes variables" if row.family == STATE else "no"


def _kernels() -> Iterator[tuple[str, frozenset[str]]]:
    from penstock.backends.tvm.cuda.kernels.generate import KINDS  # lazy: heavy
    from penstock.backends.tvm.kernels import MAIN  # lazy: heavy
    from penstock.backends.tvm.kernels.tools.elements import INDEXED, POINTWISE  # lazy: heavy

    yield _CPUS, frozenset((*MAIN, *INDEXED, *POINTWISE))
    yield "kernels for CUDA", KINDS


def _kernel(row: OpDef, kinds: frozenset[str], tried: bool) -> str:
    if row.name in kinds:
        if not tried or (example := trial.example_of(row)) is None:
            return "a rule, which was not tried here"
        trouble = trial.trouble_with(example)
        return f"no: {trouble}" if trouble else "a rule, and on a small example it gave a kernel"
    if row.family == STATE:
        return "built in: variables are parameters of kernels"
    return "that of what it is taken apart into" if row.name in DECOMPOSE else "no"


def _functions_within(rule: object) -> list[object]:
    """Return the functions in the closure of a rule."""
    values = [cell.cell_contents for cell in getattr(rule, "__closure__", None) or ()]
    return [value for value in values if callable(value)]


def _place(rule: object) -> str:
    """Return the place of a rule in the source; of a rule made from another function, the place of that function."""
    target = inspect.unwrap(rule) if callable(rule) else rule
    while len(made_of := _functions_within(target)) == 1:
        target = made_of[0]
    code = getattr(target, "__code__", None)
    if code is None:
        name = getattr(target, "__name__", "")
        return f"a rule, numpy.{name}" if name and getattr(np, name, None) is target else "a rule"
    path = code.co_filename.replace("\\", "/").rpartition("/penstock/")[2] or code.co_filename
    return f"a rule, {path}:{code.co_firstlineno}"
