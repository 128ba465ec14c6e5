"""Messages of an import for its user: the report of a successful one, and the single error of a failed one."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

import onnx

from penstock.frontends.imported import Unimported, counted, refusal, some
from penstock.ir.graph import PARAM, Op, Var
from penstock.support.errors import UnsupportedModel
from penstock.support.words import flag_for

from .tensors import known_flags

# The most characters of a name in the lines about constants.
LONGEST_NAME = 64


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
    # Nodes whose operands have sizes that contradict each other, with those that were given for dimensions.
    contradictions: dict[Unimported, dict[str, int]] = field(default_factory=dict)
    bound: list[str] = field(default_factory=list)
    folded: list[str] = field(default_factory=list)
    # By the rule of constants/rules.py: its reason, and the initializers.
    constants: dict[str, tuple[str, list[str]]] = field(default_factory=dict)
    # Initializers that are trained though they look like constants, by what makes them look so.
    unusual: dict[str, list[str]] = field(default_factory=dict)
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


def contradiction(findings: Findings) -> tuple[str, str] | None:
    """Return an error and a hint where all problems come from sizes that were given for dimensions; else None."""
    sizes = findings.contradictions
    if not all(isinstance(p, Unimported) and sizes.get(p) for p in findings.problems):
        return None
    lines = [
        f"{problem}; here {', '.join(f'{name} is {size}' for name, size in sizes_here.items())}"
        for problem, sizes_here in sizes.items()
    ]
    names = dict.fromkeys(name for sizes_here in sizes.values() for name in sizes_here)
    flags = " ".join(flag_for("--dim", name, "INT") for name in names)
    return (
        "sizes of dimensions contradict the model:\n" + "\n".join(f"  {line}" for line in lines),
        f"another size may fit: {flags}",
    )


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
    lines += _told_constants(findings)
    if unused:
        lines.append(f"floating-point initializers that no result depends on as tensors, left out: {some(unused)}")
    return lines


def _told_constants(findings: Findings) -> list[str]:
    """Write a line on each rule that kept initializers from training, and on what is trained all the same."""
    lines = [
        f"not trained by rule {rule}, {len(names)}: {_short(names)} ({reason})"
        for rule, (reason, names) in findings.constants.items()
    ]
    if lines:
        lines.append("--trained REGEX makes parameters of initializers that rules took for constants")
    return lines + [
        f"trained though unusual, {len(names)}: {_short(names)} ({reason})"
        for reason, names in findings.unusual.items()
    ]


def _short(names: Sequence[str]) -> str:
    """List the first names, each shortened in its middle to a bounded length."""
    half = LONGEST_NAME // 2 - 2
    return some([name if len(name) <= LONGEST_NAME else f"{name[:half]}...{name[-half:]}" for name in names])
