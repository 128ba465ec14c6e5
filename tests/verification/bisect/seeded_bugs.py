"""Bugs, each a small patch of the compiler: what it is called, the model that shows it, and where it must be found.

`place` is what must be named: `pass NAME`, `kernel`, or `import`; `tensor` is the value, variable or action. `refused` says that the verifier finds it, without numbers.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

import pytest

from penstock.ir.graph import Module
from penstock.ir.schedule import Action
from penstock.passes.pipelines import PASSES

from .breaking import (
    Break,
    before,
    changed,
    dropped,
    followed_by,
    in_graph,
    in_schedule,
    latest,
    passed_by,
    swapped,
)

Patch = Callable[[pytest.MonkeyPatch], None]


@dataclass(frozen=True)
class Bug:
    name: str
    model: str
    place: str
    tensor: str
    patch: Patch
    refused: bool = False
    more: Sequence[str] = ()

    @property
    def compiles(self) -> bool:
        """Whether kernels have to be compiled to see it."""
        return self.place.startswith("kernel")


def in_pass(name: str, broken: Break) -> Patch:
    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        row = PASSES[name]

        def run(module: Module, options: object) -> Module:
            return broken(row.run(module, options))

        monkeypatch.setitem(PASSES, name, replace(row, run=run))

    return patch


def in_kernels(**rules: Callable[..., Any]) -> Patch:
    """Other meanings of operations at one element."""

    def patch(monkeypatch: pytest.MonkeyPatch) -> None:
        from penstock.backends.tvm.kernels.tools import elements

        for kind, rule in rules.items():
            monkeypatch.setitem(elements.POINTWISE, kind, rule)

    return patch


def broadcast_of_rows(monkeypatch: pytest.MonkeyPatch) -> None:
    """What lacks dimensions is taken to lack the last ones, not the first."""
    from penstock.backends.tvm.kernels.tools import elements

    right = elements.broadcast_index

    def wrong(index: elements.Index, shape: Sequence[int]) -> elements.Index:
        return right(index[: len(shape)] if len(shape) < len(index) else index, shape)

    monkeypatch.setattr(elements, "broadcast_index", wrong)


def another_epsilon(monkeypatch: pytest.MonkeyPatch) -> None:
    """The ONNX rules read another epsilon than the file has."""
    from penstock.frontends.onnx.node import OnnxNode

    right = OnnxNode.float_attr

    def wrong(node: OnnxNode, name: str, default: float = 0.0) -> float:
        found = right(node, name, default)
        return 100 * found if name == "epsilon" else found

    monkeypatch.setattr(OnnxNode, "float_attr", wrong)


def sooner(kind: str) -> Callable[[list[Action]], list[Action]]:
    """The first action of a kind one step early."""

    def change(actions: list[Action]) -> list[Action]:
        i = next(i for i, action in enumerate(actions) if action.kind == kind)
        return [*actions[: i - 1], actions[i], actions[i - 1], *actions[i + 1 :]]

    return change


def exchanged(kind: str) -> Callable[[list[Action]], list[Action]]:
    """The first two actions of a kind in each other's place."""

    def change(actions: list[Action]) -> list[Action]:
        i, j = [i for i, action in enumerate(actions) if action.kind == kind][:2]
        actions[i], actions[j] = actions[j], actions[i]
        return actions

    return change


_COLUMN = [("reshape", {"shape": (8, 1)})]
_ROTATED = [("slice", {"start": (0, 0), "stop": (1, 5), "step": (1, 1)}), ("broadcast", {"shape": (2, 5)})]

BUGS = (
    Bug("a layer without its activation", "gpt", "pass simplify", "%h.1.mlp.proj.product", in_pass("simplify", in_graph("main", passed_by("h.1.mlp.gelu")))),
    Bug("a missing residual", "gpt", "pass simplify", "%h.1.ln_1", in_pass("simplify", in_graph("main", passed_by("h.0.mlp.residual", 1)))),
    Bug("a dropped layer", "gpt", "pass simplify", "%ln_f", in_pass("simplify", in_graph("main", passed_by("h.1.mlp.residual")))),
    Bug("a missing bias", "gpt", "pass simplify", "%h.0.attn.q", in_pass("simplify", in_graph("main", passed_by("h.0.attn.qkv")))),
    Bug("a wrong broadcast", "mlp", "pass simplify", "%fc2", in_pass("simplify", in_graph("main", before("fc2", 1, _COLUMN)))),
    Bug("a wrong epsilon", "gpt", "pass decompose", "%h.1.ln_1", in_pass("decompose", in_graph("main", changed("h.1.ln_1", eps=0.1)))),
    Bug("a wrong mask", "gpt", "pass decompose", "%h.0.attn.mix", in_pass("decompose", in_graph("main", changed("h.0.attn.mix", causal=False)))),
    Bug("a wrong sign of a derivative", "gpt", "pass autodiff", "%h.1.mlp.fc.grad", in_pass("autodiff", in_graph("B", followed_by("h.1.mlp.fc.grad", "neg")))),
    Bug("a lost factor 1/m", "gpt", "pass autodiff", "%loss.grad", in_pass("autodiff", in_graph("B", changed("loss.grad", value=1.0)))),
    Bug("the derivative of another function", "gpt", "pass autodiff", "%h.0.mlp.fc.grad", in_pass("autodiff", in_graph("B", changed("h.0.mlp.fc.grad", approximate="none")))),
    Bug("a gradient that is not added up", "gpt", "pass autodiff", "h.0.mlp.fc.bias.grad", in_pass("autodiff", in_graph("B", dropped("h.0.mlp.fc.bias.grad"))), refused=True),
    Bug("a decay that was lost", "gpt", "pass split", "%h.0.mlp.fc.weight.next", in_pass("split", in_graph("s0.U", changed("h.0.mlp.fc.weight.next", weight_decay=0.0)))),
    Bug("operands the wrong way round", "gpt", "pass split", "%h.1.attn.proj.weight.grad", in_pass("split", in_graph("s0.B", swapped("h.1.attn.proj.weight.grad")))),
    Bug("labels of another sample", "gpt", "pass split", "%loss", in_pass("split", in_graph("s1.F", before("loss", 1, _ROTATED)))),
    Bug("a missing sum of tied gradients", "tied", "pass split", "%wte.next", in_pass("split", in_graph("s0.U", passed_by("wte.total"))), refused=True),
    Bug("the wrong version of a weight", "gpt", "pass weight-versions", "@h.", in_pass("weight-versions", in_graph("s0.B", latest)), refused=True),
    Bug("a wrong epsilon where weight gradients are apart", "gpt", "pass weight-versions", "%h.0.ln_1", in_pass("weight-versions", in_graph("s0.F", changed("h.0.ln_1", eps=0.1))), more=("--schedule", "zb-1f1b")),
    Bug("sends in the wrong order", "gpt", "pass communicate", "SF", in_pass("communicate", in_schedule(exchanged("SF"))), refused=True),
    Bug("a drop one step early", "gpt", "pass lifetimes", "D", in_pass("lifetimes", in_schedule(sooner("D"))), refused=True),
    Bug(
        "a wrong mask in recomputation",
        "gpt",
        "pass recompute",
        "%h.0.attn.mix",
        in_pass("recompute", in_graph("s0.R", changed("h.0.attn.mix", causal=False))),
        more=("--recompute", "all"),
    ),
    Bug("an epilogue that is done twice", "gpt", "pass fuse", "%h.1.mlp.proj", in_pass("fuse", in_graph("s0.F", followed_by("h.1.mlp.proj", "add", twice=True)))),
    Bug("a kernel with a bad epilogue", "mlp", "kernel s0.F/k0", "%relu1", in_kernels(relu=lambda f, a, x: x)),
    Bug("a kernel with a wrong broadcast", "mlp", "kernel s0.F/k0", "%relu1", broadcast_of_rows),
    Bug("an attribute that the import reads wrongly", "gpt", "import", "%h.0.ln_1", another_epsilon),
)  # fmt: skip
