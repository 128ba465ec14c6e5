"""The result of every frontend: a module with one graph `main`, and the elements of its variables."""

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
    """A state dict.

    `names` lists its names of each variable, several where one is tied. `unused` holds tensors that are no variables of
    the module.
    """

    names: Mapping[str, tuple[str, ...]]
    unused: Mapping[str, np.ndarray]


@dataclass(frozen=True)
class Imported:
    """A model as read.

    weights       the elements of each variable by its name, read-only
    source_hash   the hash of all that was read
    report        lines on tensors that were folded, frozen or left out
    names         the source's name of everything that is spelled otherwise in the module
    bound         the elements of inputs that were bound to values
    structure     an ONNX file without the elements of the variables
    state         the state dict of a torch module
    attachments   files that travel with a bundle, by their names
    hints         the stages and layers in which the model says its nodes should run
    symbols       the symbols of the dimensions of inputs and outputs, by their names here; empty where there is none
    """

    module: Module
    weights: dict[str, np.ndarray]
    source_hash: str
    report: tuple[str, ...] = ()
    names: Mapping[str, str] = field(default_factory=dict)
    bound: Mapping[str, object] = field(default_factory=dict)
    structure: Structure | None = None
    state: State | None = None
    attachments: Mapping[str, bytes] = field(default_factory=dict)
    hints: Hints = field(default_factory=Hints)
    symbols: Mapping[str, tuple[str, ...]] = field(default_factory=dict)


@dataclass(frozen=True)
class Unimported:
    """A node that cannot be imported: its name, its operator, and why. `line` is that of the model's code, if known."""

    name: str
    kind: str
    reason: str
    line: str = ""

    def __str__(self) -> str:
        return f"{self.name} ({self.kind}){self.line}: {self.reason}"


def refusal(problems: Sequence[Unimported | str]) -> str:
    """List what cannot be imported, for an error.

    Nodes of one operator and one reason share a row, which names the first three.
    """
    groups: dict[object, list[Unimported | str]] = {}
    for number, problem in enumerate(problems):
        key = (problem.kind, problem.reason) if isinstance(problem, Unimported) else number
        groups.setdefault(key, []).append(problem)
    count = f"{len(problems)} places" if len(problems) > 1 else "one place"
    return f"the model cannot be imported, {count}:\n" + "\n".join(f"  {_row(group)}" for group in groups.values())


def _row(group: Sequence[Unimported | str]) -> str:
    first = group[0]
    if isinstance(first, str) or len(group) == 1:
        return str(first)
    names = [f"{problem.name}{problem.line}" for problem in group[:3] if isinstance(problem, Unimported)]
    shown = ", ".join([*names, *(["..."] if len(group) > 3 else [])])
    return f"{first.kind}: {len(group)} nodes ({shown}): {first.reason}"


def counted(variables: Collection[Var]) -> str:
    """Count parameters and buffers for a line of the report."""
    roles = {PARAM: "parameters", BUFFER: "buffers"}
    sizes = {role: [v.type.size for v in variables if v.role == role] for role in roles}
    return ", ".join(f"{len(sizes[role])} {what} with {sum(sizes[role])} elements" for role, what in roles.items())


def told_renames(names: Mapping[str, str]) -> list[str]:
    """Write a line of the report on inputs, outputs and variables that are spelled otherwise here, if any."""
    spelled = [f"{theirs!r} as {ours}" for ours, theirs in names.items()]
    return [f"spelled otherwise here: {some(spelled)}"] if spelled else []


def some(names: Sequence[str]) -> str:
    """Shorten a list of names to eight, for a line of the report."""
    shown = ", ".join(names[:8])
    return f"{shown} and {len(names) - 8} more" if len(names) > 8 else shown
