"""Tensors of an ONNX graph during an import, and the scopes of their names.

    KnownTensor  elements known at import: constants, shapes, folded results
    OnnxWeight   a trainable initializer, read from the file only when it is used
    Value        computed by the IR graph
    TensorList   a sequence: its length is known, its entries are any of these
    Empty        an optional that holds nothing; one that holds a tensor is that tensor
    Lost         the result of a node that could not be imported

A `Scope` holds the names of one graph: the model's, a branch, one iteration of a loop, one call of a function. A graph
inside another one sees the names around it; a function sees only its own. Names of the IR are one space, so a scope
puts `prefix` before its own.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import onnx

from penstock.frontends.writer import Lost, Refused
from penstock.ir.graph import Value
from penstock.ir.types import TensorType
from penstock.support.words import flag_for


@dataclass(frozen=True)
class KnownTensor:
    """A tensor whose elements are known. `name` is that of the ONNX tensor, after the prefix of its scope."""

    name: str
    array: np.ndarray


@dataclass(frozen=True)
class OnnxWeight:
    name: str
    type: TensorType
    tensor: onnx.TensorProto


@dataclass(frozen=True)
class Dequantised:
    """The operands that a tensor of floats was dequantised from: integers, scale and zero point, along an axis."""

    integers: Tensor
    scale: Tensor
    zero: Tensor | None
    axis: int


@dataclass(frozen=True)
class ScaledSums:
    """Sums of integers and positive scales that broadcast to them: their product is a tensor, or the relu of it is."""

    sums: Value
    scale: np.ndarray
    relu: bool = False


@dataclass(frozen=True)
class ScaledTerms:
    """Tensors of bytes with zero points and scales: the sum of what they stand for is a tensor, or its relu is."""

    terms: tuple[tuple[Value, float, float], ...]
    relu: bool = False


@dataclass(frozen=True)
class TensorList:
    items: tuple[Tensor, ...]


@dataclass(frozen=True)
class Empty:
    pass


Tensor = KnownTensor | OnnxWeight | Value | TensorList | Empty | Lost
Result = Tensor | np.ndarray


def known_flags(inputs: Sequence[str], what: str) -> str:
    """Write the flags that bind these inputs."""
    return " ".join(flag_for("--known", name, what) for name in inputs)


class NeedsKnown(Refused):
    """A refusal because numbers that must be known depend on inputs of the model. Binding these may help."""

    def __init__(self, reason: str, inputs: Sequence[str]) -> None:
        super().__init__(reason)
        self.inputs = tuple(inputs)

    @classmethod
    def of(cls, wanted: Mapping[str, Sequence[str]], every: Collection[str]) -> NeedsKnown:
        """Create the error. `wanted` maps each thing that must be known to the inputs that it is computed from.

        Flags are proposed where `every` input of the model has more than these, as nothing would be left to run.
        """
        inputs = list(dict.fromkeys(name for behind in wanted.values() for name in behind))
        advice = (
            f": {known_flags(inputs, 'VALUES')}" if set(every) - set(inputs) else ", and the model has no other input"
        )
        verb, they = ("is", "it has") if len(wanted) == 1 else ("are", "they have")
        return cls(
            f"{', '.join(wanted)} {verb} computed at run time from {', '.join(inputs)}, "
            f"{they} to be known at import{advice}",
            inputs,
        )


class NodeUnfinished(Exception):
    """An exception for a node that depends on another one whose problem has been recorded."""


class BodyUnfinished(NodeUnfinished):
    """An exception for a node with a graph inside of it, of which a node cannot be imported."""


@dataclass
class Scope:
    """Names of one graph; None is an optional operand that a call of a function leaves out.

    `path` is the prefix without the numbers of iterations. `opsets` gives the version of each operator domain, `calls`
    the functions whose bodies contain the graph.
    """

    opsets: Mapping[str, int]
    prefix: str = ""
    path: str = ""
    outer: Scope | None = None
    tensors: dict[str, Tensor | None] = field(default_factory=dict)
    calls: tuple[tuple[str, str, str], ...] = ()

    @property
    def opset(self) -> int:
        return self.opsets[""]

    def inside(self, prefix: str, path: str = "") -> Scope:
        """Open a scope for a graph that sees this one's names."""
        return Scope(self.opsets, self.prefix + prefix, self.path + path, self, calls=self.calls)

    def _around(self) -> Iterator[Scope]:
        scope: Scope | None = self
        while scope is not None:
            yield scope
            scope = scope.outer

    def find(self, name: str) -> Tensor | None:
        for scope in self._around():
            if name in scope.tensors:
                return scope.tensors[name]
        raise Refused(f"no tensor is called {name}")

    def replace(self, name: str, tensor: Tensor) -> None:
        """Replace the tensor of an existing name."""
        for scope in self._around():
            if name in scope.tensors:
                scope.tensors[name] = tensor
                return


def is_lost(tensor: Tensor | None) -> bool:
    """Return whether nothing is known about a tensor because the node that computes it was refused."""
    if isinstance(tensor, TensorList):
        return any(map(is_lost, tensor.items))
    return isinstance(tensor, Lost) and tensor.type is None
