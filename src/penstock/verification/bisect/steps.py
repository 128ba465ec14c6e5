"""The input of a bisection: the modules of one compilation in the order of its passes, and what else is known of it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

from penstock.ir.graph import Module
from penstock.ir.interpreter.ops import Array
from penstock.support.errors import PenstockError

if TYPE_CHECKING:
    import torch

    from penstock.backends.interface import Exchange


# The call of a module that no pass made now.
WRITTEN = "the program of the bundle"


@dataclass(frozen=True)
class TrailStep:
    """A module, the file or place it stands in, and the call of the pass that made it."""

    name: str
    call: str
    module: Module


class Original(Protocol):
    """The framework a model came from.

    `values` are tensors in the order in which they are computed, by their names in the IR; those without a name there
    are left out. `optimised` are results of its optimiser, if that rounds in other places. `source_of` describes the
    maker of a value, in the framework's words.
    """

    name: str

    def values(self, inputs: Mapping[str, Array]) -> Iterator[tuple[str, Array]]: ...

    def optimised(self, inputs: Mapping[str, Array]) -> Iterator[tuple[str, Array]]: ...

    def source_of(self, name: str) -> str: ...


class CompiledGraphs(Protocol):
    """The code of a stage, as far as kernels are compared: a graph is called by its name in the module."""

    @property
    def device(self) -> torch.device: ...

    def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]: ...


class CompiledStages(Protocol):
    """Compiled stages: those of a bundle, or compiled now."""

    @property
    def backend(self) -> str: ...

    def load(self, stage: int, exchange: Exchange | None = None) -> CompiledGraphs: ...


@dataclass(frozen=True)
class CompiledRung:
    """A smaller size of the model: its module, and its code."""

    sizes: str
    module: Module
    compiled: CompiledStages


@dataclass(frozen=True)
class Trail:
    """All that is known of a compilation.

    `weights` are empty where only dumps are left of a model: then they are drawn. `refused` is the call of a pass that
    did not finish, and its error; `compiled` is the code of the last module, which is that of the largest rung where
    sizes are bounded; `rungs` are the others. `renamed` are the model's names of inputs that the modules spell
    otherwise.
    """

    name: str
    steps: Sequence[TrailStep]
    weights: Mapping[str, Array] = field(default_factory=dict)
    original: Original | None = None
    refused: tuple[str, PenstockError] | None = None
    compiled: CompiledStages | None = None
    renamed: Mapping[str, str] = field(default_factory=dict)
    rungs: Sequence[CompiledRung] = ()

    def __post_init__(self) -> None:
        assert self.steps, "there is nothing to compare"
