"""Small networks from torch: the same numbers, and the same gradients, which stop where the module says so."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from oracles.torch_modules import GPT, Conv, tokens
from torch import Tensor, nn

import penstock as ps
from penstock.frontends.imported import Imported
from penstock.frontends.torch import import_torch

from .cases import compare, compare_gradients, gradients, judge, labels_of, tensors

pytestmark = pytest.mark.usefixtures("seeded")


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(6, 5, num_layers=2, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=True)[0]


def worked_in(module: nn.Module) -> nn.Module:
    """With running statistics that are not those of a fresh module."""
    for name, buffer in module.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + (0.5 if name.endswith("var") else 0.0))
    return module


MODELS: dict[str, tuple[Any, Any]] = {
    "gpt": (GPT, lambda: (tokens(),)),
    "conv": (lambda: worked_in(Conv()).eval(), lambda: (torch.randn(2, 3, 16, 16),)),
    "conv in training": (Conv, lambda: (torch.randn(2, 3, 16, 16),)),
    "lstm": (lambda: Recurrent(nn.LSTM, bidirectional=True, batch_first=True), lambda: (torch.randn(2, 4, 6),)),
    "lstm projected": (lambda: Recurrent(nn.LSTM, proj_size=3), lambda: (torch.randn(4, 2, 6),)),
    "gru": (lambda: Recurrent(nn.GRU, bidirectional=True), lambda: (torch.randn(4, 2, 6),)),
    "gru unbiased": (lambda: Recurrent(nn.GRU, bias=False, batch_first=True), lambda: (torch.randn(2, 3, 6),)),
    "rnn": (lambda: Recurrent(nn.RNN), lambda: (torch.randn(4, 6),)),
    "rnn relu": (lambda: Recurrent(nn.RNN, nonlinearity="relu"), lambda: (torch.randn(4, 2, 6),)),
    "encoder layer": (
        lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True),
        lambda: (torch.randn(2, 5, 8),),
    ),
    "attention": (lambda: SelfAttention(), lambda: (torch.randn(2, 5, 8),)),
}


@functools.cache
def imported_model(name: str) -> tuple[nn.Module, Any, Imported]:
    """A model, its arguments, and what it became, for both of the tests that follow."""
    make, draw = MODELS[name]
    torch.manual_seed(0)
    model, fed = make(), draw()
    return model, fed, import_torch(model, fed)


@pytest.mark.parametrize("name", MODELS)
def test_forward_is_torchs(name: str) -> None:
    model, fed, imported = imported_model(name)
    judge(imported, fed, tensors(copy.deepcopy(model)(*fed)))


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_torchs(name: str) -> None:
    model, fed, imported = imported_model(name)
    compare_gradients(copy.deepcopy(model), fed, imported)


def test_a_wrong_weight_is_noticed() -> None:
    """The control of both comparisons."""
    model, fed = GPT(), (tokens(),)
    imported = import_torch(model, fed)
    imported.weights["norm.bias"] += 0.01
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        judge(imported, fed, [model(*fed)])


def test_a_plan_for_training() -> None:
    model = ps.from_torch(GPT(), (tokens(),))
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3), microbatches=2)
    plan = ps.plan(model, ps.Cluster.local(2), training)
    assert {"s0.F", "s0.B", "s0.U", "s1.F", "s1.B", "s1.U"} <= set(plan.module.graphs)


# ---------------------------------------------------------------------------------------- what gradients are


class Lengths(nn.Module):
    def __init__(self, measure: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer, self.measure = nn.Linear(4, 4, bias=False), measure

    def forward(self, x: Tensor) -> Tensor:
        return self.measure(self.layer(x))


LENGTHS: dict[str, Callable[[Tensor], Tensor]] = {
    "norm": lambda x: x.norm(dim=-1),
    "normalize": lambda x: F.normalize(x, dim=-1),
    "normalize by cubes": lambda x: F.normalize(x, p=3.0, dim=-1),
    "std": lambda x: x.std(-1),
    "std_mean": lambda x: torch.std_mean(x, -1)[0],
    "cosine similarity": lambda x: F.cosine_similarity(x, x.flip(0), dim=-1),
    "pairwise distance": lambda x: F.pairwise_distance(x, x * 2.0, eps=0.0),
}


@pytest.mark.parametrize("measure", LENGTHS.values(), ids=LENGTHS)
def test_gradients_of_what_has_no_length_are_zero(measure: Callable[[Tensor], Tensor]) -> None:
    x = torch.randn(5, 4)
    x[2] = 0.0
    imported = compare_gradients(Lengths(measure), (x,))
    assert all(np.isfinite(grad).all() for grad in gradients(imported, x)[0].values())


def test_the_root_of_nothing_has_no_gradient() -> None:
    """The control: written out, torch has none either."""
    x = torch.zeros(2, 4)
    for measure in (lambda x: x.square().sum(-1).sqrt(), lambda x: x.var(-1).sqrt()):
        assert np.isnan(gradients(import_torch(Lengths(measure), (x,)), x)[0]["layer.weight"]).any()


class Stopped(nn.Module):
    """`second` is used without gradients alone."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.first, self.second, self.how = nn.Linear(3, 3), nn.Linear(3, 3), how

    def forward(self, x: Tensor) -> Tensor:
        if self.how == "detach":
            return self.first(x).detach() * self.first(x) + self.second(x).detach()
        with torch.no_grad():
            y, z = self.first(x), self.second(x)
        return y * self.first(x) + z


@pytest.mark.parametrize("how", ["detach", "no_grad"])
def test_gradients_stop_where_the_module_says(how: str) -> None:
    model, fed = Stopped(how), (torch.randn(2, 3),)
    imported = compare(model, fed)
    found, _ = gradients(imported, fed)
    F.mse_loss(model(*fed), torch.from_numpy(labels_of(imported.module))).backward()
    assert model.first.weight.grad is not None
    np.testing.assert_allclose(found["first.weight"], model.first.weight.grad.numpy(), rtol=1e-4, atol=1e-6)
    assert model.second.weight.grad is None
    assert not found.get("second.weight", np.zeros(1)).any()


class Doubled(torch.autograd.Function):
    """With a gradient that is not that of its operations."""

    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        return x * 2

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad * 7


class Own(nn.Module):
    def __init__(self, how: str) -> None:
        super().__init__()
        self.layer, self.how = nn.Linear(3, 3), how

    def forward(self, x: Tensor) -> Tensor:
        y = self.layer(x)
        match self.how:
            case "function":
                return Doubled.apply(y)
            case "hook" if y.requires_grad:
                y.register_hook(lambda grad: grad * 7)
            case "inference":
                with torch.inference_mode():
                    y = self.layer(x)
        return y * 2


@pytest.mark.parametrize("how", ["function", "hook", "inference"])
def test_gradients_are_those_of_the_operations(how: str) -> None:
    """torch.export leaves no trace of others, as docs/frontends.md says; should it ever, they are to be refused."""
    model, x = Own(how), torch.randn(2, 3)
    imported = import_torch(model, (x,))
    plain = Own("plain")
    plain.load_state_dict(model.state_dict())
    F.mse_loss(plain(x), torch.from_numpy(labels_of(imported.module))).backward()
    np.testing.assert_allclose(gradients(imported, x)[0]["layer.weight"], plain.layer.weight.grad, rtol=1e-4, atol=1e-6)
