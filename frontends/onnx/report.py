"""Messages of an import for its user: the report of a successful one, and the single error of a failed one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from penstock.frontends.imported import Unimported, counted, refusal, some
from penstock.ir.graph import PARAM, Op, Var
from penstock.support.errors import UnsupportedModel

from .tensors import known_flags


@dataclass
class Findings:
    """Findings that each give a line of the report.

    `problems` end the import, `warnings` do not. `needs` are the inputs whose values would have to be known.
    `choices` lists, by inputs that decide at run time whether a body runs, nodes with a body that cannot be imported.
    """

    problems: list[Unimported | str] = field(default_factory=list)
    warnings: list[str] = field(default_factory=list)
    needs: dict[str, None] = field(default_factory=dict)
    choices: dict[tuple[str, ...], dict[str, None]] = field(default_factory=dict)
    bound: list[str] = field(default_factory=list)
    folded: list[str] = field(default_factory=list)
    scalars: list[str] = field(default_factory=list)
    matched: list[str] = field(default_factory=list)
    buffers: list[str] = field(default_factory=list)
    expanded: list[str] = field(default_factory=list)

    def told_choices(self) -> list[str]:
        """Write a hint on each of the choices."""
        effect = "decides at import which part of"
        return [
            f"{known_flags(inputs, 'VALUE')} {effect} {some(list(nodes))} runs, and leaves out the rest"
            for inputs, nodes in self.choices.items()
        ]


class CannotImport(UnsupportedModel):
    """An error that lists all that cannot be imported.

    `needs` names the inputs that some node needs to be known at import: binding them (`known=`) may help.
    """

    def __init__(
        self, where: str, problems: Sequence[Unimported | str], needs: Iterable[str] = (), hint: str = ""
    ) -> None:
        super().__init__(
            refusal(problems),
            where=where,
            hint="docs/onnx-operators.md lists what is supported, and what to do about the rest"
            + (f"; {hint}" if hint else ""),
        )
        self.needs = tuple(needs)


def problem_of(name: str, node: onnx.NodeProto, reason: str) -> Unimported:
    return Unimported(name, f"{node.domain or 'ai.onnx'} {node.op_type}", reason)


def report(
    findings: Findings,
    ops: Sequence[Op],
    variables: Mapping[str, Var],
    dims: Mapping[str, int],
    nodes: int,
    unused: Sequence[str],
) -> list[str]:
    """Write the report of an import.

    `nodes` is the number of the model's nodes. `unused` are floating-point initializers that nothing depends on.
    """
    lines = [counted(variables.values()), *(f"warning: {warning}" for warning in findings.warnings)]
    if dims:
        lines.append("dimensions bound: " + ", ".join(f"{name}={size}" for name, size in dims.items()))
    if findings.bound:
        lines.append(f"inputs bound to values: {some(findings.bound)}")
    users: dict[str, int] = {}
    for op in ops:
        for name in {v.name for v in op.ins}:
            users[name] = users.get(name, 0) + 1
    tied = [v.name for v in variables.values() if v.role == PARAM and users.get(v.name, 0) > 1]
    if tied:
        lines.append(f"used more than once, trained as one variable each: {some(tied)}")
    if findings.folded:
        lines.append(f"{len(findings.folded)} of {nodes} nodes computed at import: {some(findings.folded)}")
    if findings.expanded:
        lines.append(f"written out by ONNX's own definition: {some(findings.expanded)}")
    if findings.matched:
        lines.append(f"frozen by name: {some(findings.matched)}")
    if findings.buffers:
        lines.append(f"buffers of the exported module, not trained: {some(findings.buffers)}")
    if findings.scalars:
        lines.append(
            f"initializers of rank 0, taken as constants: {some(findings.scalars)} "
            "(--trained REGEX makes parameters of them)"
        )
    if unused:
        lines.append(f"floating-point initializers that no result depends on as tensors, left out: {some(unused)}")
    return lines
