"""What every frontend hands over: a module with one graph `main`, and the elements of its variables."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.graph import BUFFER, PARAM, Module, Var

from .hints import Hints

if TYPE_CHECKING:
    from penstock.frontends.onnx.structure import Structure


@dataclass(frozen=True)
class State:
    """A state dict: the `names` it has for each variable that it stores, several where it is tied, and the `rest` of its tensors."""

    names: Mapping[str, tuple[str, ...]]
    rest: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Imported:
    """A model as read: `weights` holds the elements of each variable by its name and is read-only; `source_hash` is taken over all that was
    read; `report` says what was folded, frozen and left out; `names` gives the source's name of everything that had to be spelled
    otherwise; `bound` holds the elements of inputs that were bound to values; `structure` is an ONNX file without the elements of the
    variables; `state` is the state dict of a torch module; `hints` is where the model says its nodes should run."""

    module: Module
    weights: dict[str, np.ndarray]
    source_hash: str
    report: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    bound: Mapping[str, object] = field(default_factory=dict)
    structure: Structure | None = None
    state: State | None = None
    hints: Hints = field(default_factory=Hints)


def counted(variables: Collection[Var]) -> str:
    """How many parameters and buffers there are, for a line of the report."""
    roles = {PARAM: "parameters", BUFFER: "buffers"}
    sizes = {role: [v.type.size for v in variables if v.role == role] for role in roles}
    return ", ".join(f"{len(sizes[role])} {what} with {sum(sizes[role])} elements" for role, what in roles.items())


def told_renames(names: Mapping[str, str]) -> list[str]:
    """A line of the report on inputs, outputs and variables, ours and the source's, where there are any."""
    spelled = [f"{theirs!r} as {ours}" for ours, theirs in names.items()]
    return [f"spelled otherwise here: {some(spelled)}"] if spelled else []


def some(names: Sequence[str]) -> str:
    """A list of names for a line of the report."""
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
