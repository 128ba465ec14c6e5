"""Rows of the kernel benchmark that change tensors in place: AdamW over GPT-2 small, and an embedding's gradient.

In: nothing. Out: rows added to ROWS. Ours and torch's update the very same tensors, in turn, so that both find them
equally cold. Before the results are checked the tensors get their first values again.
"""

from __future__ import annotations

from collections.abc import Iterator
from math import prod
from typing import Any

import torch
from kernel_graphs import FORWARD, effects
from kernel_rows import CLASSES, TOKENS, WIDTH, Results, Work, _labels, bytes_of, kind_of, random, row, wide
from torch import Tensor

from penstock.backends.interface import StageProgram
from penstock.ir.graph import Graph, Module, Op, Value, Var, signature
from penstock.ir.ops import make
from penstock.ir.types import TensorType
from penstock.passes.training.optimizer import STEP, UPDATES, OptimizerOptions, optimizer

RATE, DECAY = 1e-3, 0.01
LAYERS, POSITIONS = 12, 1024
BLOCK = [(WIDTH,), (WIDTH,), (WIDTH, 3 * WIDTH), (3 * WIDTH,), (WIDTH, WIDTH), (WIDTH,)]
BLOCK += [(WIDTH,), (WIDTH,), (WIDTH, 4 * WIDTH), (4 * WIDTH,), (4 * WIDTH, WIDTH), (WIDTH,)]
GPT2_SMALL = [(CLASSES, WIDTH), (POSITIONS, WIDTH), *(BLOCK * LAYERS), (WIDTH,), (WIDTH,)]


class AdamW:
    """One step of all parameters, from step 1 with moments that are not zero.

    With `zero`, gradients are zero afterwards.
    """

    def __init__(self, zero: bool) -> None:
        self.zero = zero
        module = self._module()
        self.graph = self._graph(module)
        self.tensors = {
            name: [torch.empty(shape) for shape in GPT2_SMALL] for name in ("", ".grad", ".adam_m", ".adam_v")
        }
        self.counters = {name: torch.zeros((), dtype=torch.int64) for name in (STEP, UPDATES)}
        self.scalars = {
            **self.counters,
            **{name: x.reshape(module.vars[name].type.dims) for name, x in _tables(module)},
        }
        self.params = [torch.nn.Parameter(w) for w in self.tensors[""]]
        for param, grad in zip(self.params, self.tensors[".grad"], strict=True):
            param.grad = grad
        self.torch = torch.optim.AdamW(self.params, lr=RATE, weight_decay=DECAY, fused=True)
        for i, param in enumerate(self.params):
            moments = {"exp_avg": self.tensors[".adam_m"][i], "exp_avg_sq": self.tensors[".adam_v"][i]}
            self.torch.state[param] = {"step": torch.zeros(()), **moments}
        sig = signature(self.graph)
        self.args = [self.scalars[s.var] if s.var in self.scalars else self._tensor(s.var) for s in sig.slots]

    def _module(self) -> Module:
        variables = {}
        for i, shape in enumerate(GPT2_SMALL):
            variables[f"w{i}"] = Var(f"w{i}", TensorType("f32", shape), "param")
            variables[f"w{i}.grad"] = Var(f"w{i}.grad", TensorType("f32", shape), "grad", init="zeros")
        options = OptimizerOptions(kind="adamw", lr=RATE, weight_decay=DECAY)
        return optimizer(Module("adamw", vars=variables), options)

    def _graph(self, module: Module) -> Graph:
        ops = module.graphs["U"].ops
        if not self.zero:
            ops = tuple(Op("read", (), op.outs, op.attrs) if op.kind == "take" else op for op in ops)
        return effects(ops, {})

    def _tensor(self, name: str) -> Tensor:
        number, dot, kind = name.removeprefix("w").partition(".")
        return self.tensors[dot + kind][int(number)]

    def _first(self, kind: str, i: int) -> Tensor:
        drawn = random(*GPT2_SMALL[i], seed=i * 7 + len(kind))
        return drawn.square_().mul_(1e-2) if kind == ".adam_v" else drawn.mul_(0.1)

    def reset(self) -> None:
        for counter in self.counters.values():
            counter.zero_()
        for state in self.torch.state.values():
            state["step"].zero_()
        for kind, tensors in self.tensors.items():
            for i, x in enumerate(tensors):
                x.copy_(self._first(kind, i))

    def ours(self, program: StageProgram) -> Results:
        program.call(FORWARD, self.args)
        return self._results()

    def theirs(self) -> Results:
        self.torch.step()
        if self.zero:
            self.torch.zero_grad(set_to_none=False)
        return self._results()

    def _results(self) -> Results:
        return [x for i in range(len(GPT2_SMALL)) for x in self._row(i)]

    def _row(self, i: int) -> list[Tensor]:
        return [
            self.tensors[kind][i]
            for kind in (("", ".adam_m", ".adam_v", ".grad") if self.zero else ("", ".adam_m", ".adam_v"))
        ]

    def exact(self) -> Iterator[Tensor]:
        """Yield the first step in float64, one parameter at a time: all together would not fit."""
        beta1, beta2 = 0.9, 0.999
        for i in range(len(GPT2_SMALL)):
            w, g, m, v = (wide(self._first(kind, i)) for kind in self.tensors)
            m = beta1 * m + (1 - beta1) * g
            v = beta2 * v + (1 - beta2) * g * g
            change = (m / (1 - beta1)) / ((v / (1 - beta2)).sqrt() + 1e-8)
            yield w * (1 - RATE * DECAY) - RATE * change
            yield m
            yield v
            if self.zero:
                yield torch.zeros_like(g)


def _tables(module: Module) -> Iterator[tuple[str, Tensor]]:
    """Yield the tables of the learning rate."""
    return (
        (name, torch.tensor(var.init, dtype=torch.float64))
        for name, var in module.vars.items()
        if isinstance(var.init, tuple)
    )


def _adamw(zero: bool) -> Work:
    update = AdamW(zero)
    moved = 4.0 * sum(map(prod, GPT2_SMALL)) * (8 if zero else 7)
    return Work(
        (update.graph,),
        update.ours,
        {"AdamW(fused=True)": update.theirs},
        update.exact,
        moved=moved,
        reset=update.reset,
    )


def empty(x: Tensor) -> None:
    x.zero_()


def _embedding_gradient_added() -> Work:
    """Make the gradient of a lookup added to the value of a variable, as in a backward graph."""
    dy, indices, held = random(TOKENS, WIDTH), _labels(TOKENS, CLASSES), torch.zeros(CLASSES, WIDTH)
    values: dict[str, Any] = {"dy": kind_of(dy), "indices": kind_of(indices)}
    ins = [
        Value(name, TensorType(text[:3], tuple(x.shape)))
        for (name, text), x in zip(values.items(), (dy, indices), strict=True)
    ]
    scattered = make("gather_grad", ins, ["table.grad"], shape=(CLASSES, WIDTH))
    graph = effects((scattered, Op("accum", scattered.outs, (), {"var": "table.grad"})), values)

    def ours(program: StageProgram) -> Results:
        program.call(FORWARD, [dy, indices, held])
        return [held]

    def exact() -> Results:
        return [torch.zeros(CLASSES, WIDTH, dtype=torch.float64).index_add_(0, indices, wide(dy))]

    forms = {"index_add_": lambda: [held.index_add_(0, indices, dy)]}
    return Work((graph,), ours, forms, exact, moved=3 * bytes_of(dy), reset=lambda: empty(held))


row("embedding", f"gradient added, {TOKENS} of {CLASSES}x{WIDTH}", _embedding_gradient_added)
row("adamw", "124 M parameters", _adamw, False)
row("adamw", "124 M parameters, gradients zeroed", _adamw, True)
