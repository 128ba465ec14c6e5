"""Many calls of ATen imported as one program, and the part of it that one of them became.

Exporting and decomposing cost torch 0.2 s a program, however small; a call in a program of a hundred costs a tenth of that. Where the import
of a program of several calls fails, each is imported alone, so that the one at fault says so and the others are what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest
from torch import Tensor, nn

from penstock.frontends.imported import Imported
from penstock.frontends.torch import calls, import_torch
from penstock.frontends.torch.node import Rule, TorchNode
from penstock.ir.graph import Value, touched_vars
from penstock.ir.liveness import live_ops

from ..cases import tensors


class Call(nn.Module):
    """A call whose floating-point operands are parameters, so that nothing of it is computed at import."""

    def __init__(self, function: Callable[..., Any], operands: tuple[Tensor, ...]) -> None:
        super().__init__()
        self.function = function
        self.places = [x.is_floating_point() for x in operands]
        self.params = nn.ParameterList([nn.Parameter(x.clone()) for x in operands if x.is_floating_point()])
        self.fed = tuple(x.clone() for x in operands if not x.is_floating_point())

    def forward(self, *rest: Tensor) -> Any:
        trained, fed = iter(self.params), iter(rest)
        return self.function(*(next(trained) if place else next(fed) for place in self.places))


class Calls(nn.Module):
    """Calls side by side: the operands that are fed, and the results, one call's after the other's."""

    def __init__(self, several: Sequence[Call]) -> None:
        super().__init__()
        self.calls = nn.ModuleList(several)

    def forward(self, *rest: Tensor) -> list[Any]:
        fed = iter(rest)
        return [call(*(next(fed) for _ in call.fed)) for call in self.calls]


@dataclass(frozen=True)
class Translated:
    """A call, what torch computes for it, what it became, and the rows whose rules were asked for it."""

    call: Call
    expected: list[Tensor]
    imported: Imported
    asked: frozenset[str]
    params: dict[str, nn.Parameter]  # by the names of the variables


def translate(functions: Sequence[tuple[Callable[..., Any], tuple[Tensor, ...]]]) -> list[Translated]:
    """The calls as one program, and the part of each."""
    found = [Call(function, operands) for function, operands in functions]
    expected = [tensors(call(*call.fed)) for call in found]
    whole, asked = _import(Calls(found), [x for call in found for x in call.fed])
    assert set(whole.weights) == set(whole.module.vars)
    results = iter(whole.module.graphs["main"].outs)
    inputs = iter(whole.module.inputs)
    translated = []
    for index, call in enumerate(found):
        path = f"calls.{index}"
        ins = [next(inputs) for _ in call.fed]
        outs = [next(results) for _ in expected[index]]
        params = {f"{path}.{name}": param for name, param in call.named_parameters()}
        mine = frozenset(row for place, row in asked if place == path)
        translated.append(Translated(call, expected[index], _part(whole, ins, outs), mine, params))
    assert next(inputs, None) is None
    assert next(results, None) is None
    return translated


def _import(program: Calls, fed: Sequence[Tensor]) -> tuple[Imported, set[tuple[str, str]]]:
    """What the program became, and the rules that were asked: the paths of the calls, and the rows."""
    asked: set[tuple[str, str]] = set()

    def noting(row: str, rule: Rule) -> Rule:
        def noted(n: TorchNode) -> Any:
            asked.add((calls.location(n.call).partition("/")[0], row))
            return rule(n)

        return noted

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(calls, "ALL_RULES", {row: noting(row, rule) for row, rule in calls.ALL_RULES.items()})
        return import_torch(program, tuple(fed)), asked


def _part(whole: Imported, ins: Sequence[Value], outs: Sequence[Value]) -> Imported:
    """What some results of a program are computed from, as a program of its own."""
    main = whole.module.graphs["main"]
    graph = replace(main, ins=tuple(ins), outs=tuple(outs), ops=tuple(live_ops(main.ops, outs)))
    read = touched_vars(graph, "read")
    variables = {name: var for name, var in whole.module.vars.items() if name in read}
    module = whole.module.but(
        inputs=tuple(ins), outputs=tuple(v.name for v in outs), vars=variables, graphs={"main": graph}
    )
    return replace(whole, module=module, weights={name: whole.weights[name] for name in variables})
