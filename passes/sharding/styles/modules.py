"""Layouts of modules of the source program, as layouts of the tensors there.

    h.*.fc1=Colwise/tp         the columns of the product that reads h.*.fc1.weight, or of the look-up; with them the
                               bias, and the result
    h.*.fc2=Rowwise/tp         its rows; the bias is whole
    h.*.ln=out:[_,/tp,...]     what the module results in; `...` stands for all other dimensions, which are whole
    h.*.attn=in:[_,/tp,...]:?  what it takes, in the order in which it is read; `?` is left open
    =arg.tokens:[/tp,...]      an input of the whole model, whose name is empty, by its own name

In: such texts and the forward graph. Out: a text per tensor, with its name alone, in the order of the texts. An
operation's module is the part of its `loc` before the last slash, as the torch frontend writes it.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from fnmatch import fnmatchcase
from glob import escape

from penstock.ir.graph import PARAM, Graph, Module, Op, Value
from penstock.ir.ops import OPS
from penstock.ir.types import TensorType
from penstock.support.errors import UsageError
from penstock.support.words import MOST_ITEMS, counted, itemised

from .torch_styles import COLWISE, ROWWISE

_LAYOUT = r"(?:\?|\[[^\]]*\])"
ABOUT_MODULE = re.compile(
    rf"(?P<name>[^=]*)=(?:(?P<style>{COLWISE}|{ROWWISE})/(?P<axis>\w+)"
    rf"|(?P<side>in|out|arg\.[^:]+)(?P<layouts>(?::{_LAYOUT})+))"
)


class _DoesNotApply(Exception):
    """The reason why a text says nothing about a module."""


def about_tensors(module: Module, graph: Graph, texts: Sequence[str]) -> list[str]:
    """Return texts in which those about modules are replaced by texts about their tensors."""
    borders = _Borders(module, graph)
    expanded: dict[str, None] = {}
    # Of a style nothing is taken for tensors that have a text before it.
    patterns: set[str] = set()
    problems: list[str] = []
    for text in texts:
        match = ABOUT_MODULE.fullmatch(text)
        if match is None:
            expanded[text] = None
            patterns.add(text.rpartition("=")[0].strip())
            continue
        try:
            tensors = (
                borders.parameters(match["name"], match["style"], match["axis"])
                if match["style"]
                else borders.values(match["name"], match["side"], match["layouts"])
            )
            for about in tensors:
                if (pattern := about.rpartition("=")[0]) not in patterns:
                    patterns.add(pattern)
                    expanded[about] = None
        except _DoesNotApply as error:
            problems.append(f"{text!r}: {error}")
    if problems:
        raise UsageError("cannot lay modules out like this:" + itemised(problems, MOST_ITEMS))
    return list(expanded)


class _Borders:
    """The modules of a graph, with the values that go into and out of them."""

    def __init__(self, module: Module, graph: Graph) -> None:
        self.module, self.graph = module, graph
        self.homes = [
            (op, op.loc.rpartition("/")[0]) for op in graph.ops if OPS[op.kind].family not in ("state", "source")
        ]
        paths = {path for _, path in self.homes}
        self.names = {"", *(path[:i] for path in paths for i, c in enumerate(path) if c == "."), *paths}

    def parameters(self, name: str, style: str, axis: str) -> Iterator[str]:
        weights = [
            var for var in self.module.vars.values() if var.role == PARAM and fnmatchcase(var.name, f"{name}.weight")
        ]
        if not weights:
            raise _DoesNotApply(f"no parameter is called {name}.weight")
        for var in weights:
            dim = (_columns if style == COLWISE else _rows)(self._first_use(var.name), var.name)
            yield _split_at(var.name, var.type.rank, dim, axis)
            path = var.name.removesuffix(".weight")
            bias = self.module.vars.get(f"{path}.bias")
            if bias is not None and bias.type.rank == 1:
                yield _split_at(bias.name, 1, 0 if style == COLWISE else None, axis)
            results = self._made(path) if path in self.names else []
            if style == COLWISE and len(results) == 1:
                rank = results[0].type.rank
                yield _split_at(results[0].name, rank, rank - 1, axis)

    def _first_use(self, name: str) -> tuple[Op, int] | None:
        """Return the operation that reads a variable first, itself or in another element type, and its operand."""
        values = {op.outs[0] for op in self.graph.ops if op.kind == "read" and op.var == name}
        for op in self.graph.ops:
            position = next((i for i, value in enumerate(op.ins) if value in values), None)
            if position is not None and op.kind == "cast":
                values.add(op.outs[0])
            elif position is not None:
                return op, position
        return None

    def values(self, name: str, side: str, layouts: str) -> Iterator[str]:
        shapes = re.findall(_LAYOUT, layouts)
        modules = sorted(path for path in self.names if fnmatchcase(path, name))
        if not modules:
            raise _DoesNotApply(f"no module is called {name}")
        for path in modules:
            for value, shape in zip(self._at(path, side, shapes), _of_values(shapes), strict=True):
                yield f"{escape(value.name)}={_filled(shape, value.type)}"

    def _at(self, path: str, side: str, shapes: Sequence[str]) -> list[Value]:
        """Return the values at a side of a module that layouts are given for."""
        whose = f"module {path}" if path else "the model"
        if side.startswith("arg."):
            if path:
                raise _DoesNotApply(f"arguments of {whose} are not known by their names")
            values = [value for value in self.module.data_inputs if value.name == side.removeprefix("arg.")]
        else:
            values = self._taken(path) if side == "in" else self._made(path)
        if len(values) == len(shapes):
            return [value for value, shape in zip(values, shapes, strict=True) if shape != "?"]
        if len(values) != len(_of_values(shapes)):
            verb = "results in" if side == "out" else "takes"
            names = f" ({', '.join(value.name for value in values)})" if values else ""
            raise _DoesNotApply(f"{whose} {verb} {counted(len(values), 'value')}{names}, {len(shapes)} are laid out")
        return values

    def _inside(self, path: str) -> list[Op]:
        return [op for op, home in self.homes if not path or home == path or home.startswith(f"{path}.")]

    def _taken(self, path: str) -> list[Value]:
        """Return the values that a module reads and does not make: inputs, and results of operations."""
        if not path:
            return list(self.module.data_inputs)
        ops = self._inside(path)
        results = {value for op in ops for value in op.outs}
        known = {*self.module.data_inputs, *(value for op, _ in self.homes for value in op.outs)}
        return list(dict.fromkeys(v for op in ops for v in op.ins if v in known and v not in results))

    def _made(self, path: str) -> list[Value]:
        """Return the values that a module makes and others read, or that the graph returns."""
        ops = self._inside(path)
        inside = set(map(id, ops))
        read = {value for op in self.graph.ops if id(op) not in inside for value in op.ins} | {*self.graph.outs}
        outputs = {*self.module.outputs}
        return [v for op in ops for v in op.outs if v in read or v.name in outputs]


def _split_at(name: str, rank: int, dim: int | None, axis: str) -> str:
    return f"{escape(name)}=[{','.join(f'/{axis}' if i == dim else '_' for i in range(rank))}]"


def _of_values(shapes: Sequence[str]) -> list[str]:
    return [shape for shape in shapes if shape != "?"]


def _filled(shape: str, t: TensorType) -> str:
    """Return a layout with as many dimensions as a value has."""
    words = shape[1:-1].split(",")
    if "..." in words:
        at = words.index("...")
        words[at : at + 1] = ["_"] * (t.rank - len(words) + 1)
    return f"[{','.join(words)}]"


def _columns(use: tuple[Op, int] | None, name: str) -> int:
    """Return the dimension of a weight along which results lie."""
    op, transposed = _by_product(use, name)
    if op.kind == "gather":
        return 1
    return op.ins[1].type.rank - (2 if transposed else 1)


def _rows(use: tuple[Op, int] | None, name: str) -> int:
    """Return the dimension of a weight that its operand is summed over, or looked up in."""
    op, transposed = _by_product(use, name)
    if op.kind == "gather":
        return 0
    return op.ins[1].type.rank - (1 if transposed else 2)


def _by_product(use: tuple[Op, int] | None, name: str) -> tuple[Op, bool]:
    if use is not None:
        op, position = use
        if op.kind == "matmul" and position == 1:
            return op, bool(op.attrs.get("tb"))
        if op.kind == "gather" and position == 0 and op.attrs.get("axis", 0) == 0 and op.ins[0].type.rank == 2:
            return op, False
    what = "nothing" if use is None else use[0].kind
    raise _DoesNotApply(f"{name} is read by {what}; styles are of linear modules and embeddings")
