"""Tests of variables from torch modules: which tensors become variables, which share one, and the names of variables,
inputs and outputs."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from oracles.torch_modules import GPT, tokens
from torch import Tensor, nn

from penstock.frontends.onnx import import_onnx
from penstock.frontends.torch import import_torch
from penstock.ir.graph import written_vars
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.store import DictStore
from penstock.support.errors import UnsupportedModel, UsageError

from .cases import compare, run

pytestmark = pytest.mark.usefixtures("seeded")


def test_tied_weights_are_one_variable_of_the_first_name() -> None:
    model = GPT()
    imported = compare(model, (tokens(),))
    params = {name for name, var in imported.module.vars.items() if var.role == "param"}
    assert params == {name for name, _ in model.named_parameters()}
    assert "wte.weight" in params
    assert "tied, trained as one variable each: wte.weight" in imported.report
    assert [v.name for v in imported.module.inputs] == ["tokens"]
    assert imported.module.outputs == ("output",)


def test_weights_are_copies() -> None:
    model = nn.Linear(3, 2)
    imported = import_torch(model, (torch.randn(4, 3),))
    before = imported.weights["weight"].copy()
    with torch.no_grad():
        model.weight.zero_()
    np.testing.assert_array_equal(imported.weights["weight"], before)


class Pair(nn.Module):
    """Two tensors of state, `b` perhaps as a buffer."""

    def __init__(self, a: Tensor, b: Tensor, buffer: bool = False, trained: bool = True) -> None:
        super().__init__()
        self.a = nn.Parameter(a)
        if buffer:
            self.register_buffer("b", b)
        else:
            self.b = nn.Parameter(b, requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        return x * self.a.sum() + self.b.sum()


PARTS_OF_ONE_MEMORY: list[tuple[Callable[[Tensor], Tensor], Callable[[Tensor], Tensor]]] = [
    (lambda x: x[:4], lambda x: x[2:]),
    (lambda x: x[::2], lambda x: x[12:16]),
    (lambda x: x[2:], lambda x: x),
    (lambda x: x.view(5, 4), lambda x: x.view(5, 4).T),
    (lambda x: x.view(5, 4)[:, :3], lambda x: x.view(5, 4)[:, 2:]),
    (lambda x: torch.from_numpy(x.numpy()[:4]), lambda x: torch.from_numpy(x.numpy()[3:])),
    (lambda x: x[:4], lambda x: x.view(torch.float64)[1:3]),
]


@pytest.mark.parametrize(
    ("a", "b", "buffer"),
    [
        pytest.param(*parts, buffer, marks=[pytest.mark.slow] if buffer == bool(number % 2) else [])
        for number, parts in enumerate(PARTS_OF_ONE_MEMORY)
        for buffer in (False, True)
    ],
)
def test_parameters_that_share_a_part_of_their_memory_are_refused(
    a: Callable[[Tensor], Tensor], b: Callable[[Tensor], Tensor], buffer: bool
) -> None:
    whole = torch.randn(20)
    with pytest.raises(UnsupportedModel, match="b: shares memory with a"):
        import_torch(Pair(a(whole), b(whole), buffer), (torch.randn(4),))
    import_torch(Pair(a(whole), b(whole), buffer), (torch.randn(4),), frozen="[ab]")


@pytest.mark.parametrize(
    ("a", "b"),
    [
        (lambda x: x[:10], lambda x: x[10:]),
        (lambda x: x[::2], lambda x: x[1::2]),
        (lambda x: x.view(5, 4)[:, :2], lambda x: x.view(5, 4)[:, 2:]),
        (lambda x: x[0:0], lambda x: x),
    ],
)
def test_parameters_side_by_side_are_two(a: Callable[[Tensor], Tensor], b: Callable[[Tensor], Tensor]) -> None:
    whole = torch.randn(20)
    imported = import_torch(Pair(a(whole), b(whole)), (torch.randn(4),))
    assert set(imported.module.vars) == {"a", "b"}


@pytest.mark.parametrize("buffer", [False, True])
def test_one_memory_that_is_trained_and_is_not_is_refused(buffer: bool) -> None:
    whole = torch.randn(4)
    with pytest.raises(
        UnsupportedModel, match="b: shares memory with a, and one of them alone is a parameter that requires a gradient"
    ):
        import_torch(Pair(whole, whole, buffer, trained=False), (torch.randn(4),))
    compare(Pair(whole, whole, buffer, trained=False), (torch.randn(4),), frozen="a")
    assert set(import_torch(Pair(whole, whole), (torch.randn(4),)).module.vars) == {"a"}


def test_frozen_and_not_requiring_a_gradient() -> None:
    model = nn.Sequential(nn.Linear(3, 20), nn.ReLU(), nn.Linear(20, 20), nn.ReLU(), nn.Linear(20, 2))
    model[0].weight.requires_grad_(False)
    imported = compare(model, (torch.randn(4, 3),), frozen=r"^2\.")
    roles = {name: var.role for name, var in imported.module.vars.items()}
    assert {name for name, role in roles.items() if role == "param"} == {"0.bias", "4.weight", "4.bias"}
    assert {name for name, role in roles.items() if role == "buffer"} == {"0.weight", "2.weight", "2.bias"}
    with pytest.raises(UsageError, match="matches no name"):
        import_torch(model, (torch.randn(4, 3),), frozen="nothing")
    with pytest.raises(UsageError, match="regular expression"):
        import_torch(model, (torch.randn(4, 3),), frozen="(")


def test_unused_parameters_are_left_out() -> None:
    class Unused(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.used, self.other = nn.Linear(3, 3), nn.Linear(3, 3)

        def forward(self, x: Tensor) -> Tensor:
            self.other(x)
            return self.used(x)

    imported = compare(Unused(), (torch.randn(2, 3),))
    assert set(imported.module.vars) == {"used.weight", "used.bias"}
    assert "parameters that no output depends on, left out: other.weight, other.bias" in imported.report


def test_running_statistics_in_training_are_variables_that_move() -> None:
    imported = import_torch(nn.BatchNorm1d(3), (torch.randn(4, 3),))
    names = ["num_batches_tracked", "running_mean", "running_var"]
    assert sorted(written_vars(imported.module.graphs["main"])) == names
    assert f"changed by forward, in training once per microbatch: {', '.join(names)}" in imported.report
    assert {imported.module.vars[name].role for name in names} == {"buffer"}
    assert imported.state is not None
    assert set(names) <= imported.state.names.keys()
    stored = import_torch(nn.BatchNorm1d(3).eval(), (torch.randn(4, 3),)).module
    assert not written_vars(stored.graphs["main"])
    assert set(stored.vars) == {"weight", "bias"}


def test_plain_averages_leave_the_module_as_it_was() -> None:
    """Their forward is another one while torch exports it."""
    layer = nn.BatchNorm1d(3, momentum=None)
    imported = compare(layer, (torch.randn(4, 3),))
    assert "forward" not in vars(layer)
    assert len(written_vars(imported.module.graphs["main"])) == 3
    with pytest.raises(UnsupportedModel):
        import_torch(nn.Sequential(layer, nn.BatchNorm2d(3)), (torch.randn(4, 3),))
    assert "forward" not in vars(layer)


def test_a_buffer_may_become_any_value() -> None:
    """An input as it is, a constant, or another buffer: each is what it was before the call while the call reads it."""

    class Moving(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            for i, name in enumerate("abcd"):
                self.register_buffer(name, torch.full((3,), float(i)))

        def forward(self, x: Tensor) -> Tensor:
            y = x + self.a + self.b
            swapped = self.a.clone()
            self.a.copy_(self.b)
            self.b.copy_(swapped)
            self.c.copy_(x)
            self.d.fill_(7.0)
            return y

    x = torch.randn(3)
    imported = import_torch(Moving(), (x,))
    store = DictStore(imported.weights)
    (y,) = run_graph(imported.module.graphs["main"], [x.numpy()], store)
    np.testing.assert_array_equal(y, x.numpy() + 1)
    expected = {"a": [1.0] * 3, "b": [0.0] * 3, "c": x.numpy(), "d": [7.0] * 3}
    for name, array in expected.items():
        np.testing.assert_array_equal(store.arrays[name], array, err_msg=name)


# ---------------------------------------------------------------------------------------- inputs and outputs


def test_an_input_called_like_a_parameter_gives_way() -> None:
    class Named(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, weight: Tensor) -> dict[str, Tensor]:
            return {"weight": self.weight * weight}

    imported = compare(Named(), (torch.randn(2, 3),))
    assert "weight" in imported.module.vars
    assert [imported.names[v.name] for v in imported.module.inputs] == ["weight"]


@dataclass
class Results:
    logits: Tensor
    nothing: Tensor | None
    hidden: tuple[Tensor, ...]


torch.export.register_dataclass(Results, serialized_type_name="penstock.tests.Results")


class Outputs(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor, scale: float = 1.0, *, mask: Tensor | None = None, kind: str = "dict") -> Any:
        y = self.layer(x) * scale
        y = y if mask is None else y * mask
        match kind:
            case "dict":
                return {"y": y, "none": None, "more": [x, y, y + 1]}
            case "dataclass":
                return Results(y, None, (x, y * 2))
        return y, y, x


@pytest.mark.parametrize(
    ("kind", "names"),
    [
        ("dict", ("y", "more.0", "more.1", "more.2")),
        ("dataclass", ("logits", "hidden.0", "hidden.1")),
        ("tuple", ("output.0", "output.1", "output.2")),
    ],
)
def test_outputs_are_named_by_their_paths(kind: str, names: tuple[str, ...]) -> None:
    imported = compare(Outputs(), (torch.randn(2, 3), 0.5), {"mask": torch.ones(3), "kind": kind})
    assert imported.module.outputs == names
    assert [v.name for v in imported.module.inputs] == ["x", "mask"]


class Repeated(nn.Module):
    """One product under several names; `mul` is also what torch calls it."""

    def __init__(self, names: tuple[str, ...]) -> None:
        super().__init__()
        self.names = names

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = x * 2
        return dict.fromkeys(self.names, y)


@pytest.mark.parametrize("names", [("a", "b"), ("mul", "a"), ("a", "mul"), ("x", "a", "mul")])
def test_one_tensor_as_several_outputs(names: tuple[str, ...]) -> None:
    imported = compare(Repeated(names), (torch.randn(2, 3),))
    assert tuple(imported.names.get(name, name) for name in imported.module.outputs) == names


def test_arguments_that_are_no_tensors_have_the_values_of_the_examples() -> None:
    x = torch.randn(2, 3)
    once, twice = (import_torch(Outputs(), (x, scale), {"kind": "tuple"}) for scale in (1.0, 2.0))
    twice.weights.update(once.weights)
    np.testing.assert_allclose(2 * run(once, x)[0], run(twice, x)[0], rtol=1e-6)


def test_exporters_forget_that_batch_norms_train(tmp_path: Path) -> None:
    """In a file of torch's exporter nothing moves; in the module itself statistics do. The control is the
    same module at rest."""
    pytest.importorskip("onnxscript")
    net, example = nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6)).train(), (torch.zeros(8, 4),)
    torch.onnx.export(net, example, str(tmp_path / "net.onnx"), dynamo=True, optimize=False, verbose=False)
    assert not written_vars(import_onnx(tmp_path / "net.onnx").module.graphs["main"])
    assert written_vars(import_torch(net, example).module.graphs["main"]) == {
        "1.running_mean",
        "1.running_var",
        "1.num_batches_tracked",
    }
    assert not written_vars(import_torch(net.eval(), example).module.graphs["main"])
