"""Small networks from torch: the same numbers and the same gradients; names, ties, buffers and outputs as the user knows them; and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
from torch import Tensor, nn

import penstock as ps
from penstock.frontends.torch import import_torch
from penstock.ir.errors import UnsupportedModel, UsageError

from .torch_cases import compare, compare_gradients, gradients, judge, labels_of, run


@pytest.fixture(autouse=True)
def seeded() -> None:
    torch.manual_seed(0)


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """With the head tied to the embedding, and a buffer of positions that is not in the state dict."""

    def __init__(self, vocab: int = 23, width: int = 16, positions: int = 8) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList([Block(width, 2) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("order", torch.arange(positions), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(self.order[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding="same", groups=2), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(image))), 2)
        x = x + F.silu(self.norm2(self.conv2(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


class Recurrent(nn.Module):
    def __init__(self, kind: type[nn.RNNBase], **options: Any) -> None:
        super().__init__()
        self.rnn = kind(6, 5, num_layers=2, **options)

    def forward(self, x: Tensor) -> Tensor:
        return self.rnn(x)[0]


def tokens(batch: int = 2, length: int = 8) -> Tensor:
    return torch.randint(0, 23, (batch, length))


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
    "encoder layer": (lambda: nn.TransformerEncoderLayer(8, 2, 16, dropout=0.0, batch_first=True), lambda: (torch.randn(2, 5, 8),)),
    "attention": (lambda: SelfAttention(), lambda: (torch.randn(2, 5, 8),)),
}


class SelfAttention(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(8, 2, batch_first=True)

    def forward(self, x: Tensor) -> Tensor:
        return self.attention(x, x, x, need_weights=True)[0]


@pytest.mark.parametrize("name", MODELS)
def test_forward_is_torchs(name: str) -> None:
    make, draw = MODELS[name]
    compare(make(), draw())


@pytest.mark.parametrize("name", MODELS)
def test_gradients_are_torchs(name: str) -> None:
    make, draw = MODELS[name]
    compare_gradients(make(), draw())


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


def test_a_wrong_weight_is_noticed() -> None:
    """The control of both comparisons."""
    model, fed = GPT(), (tokens(),)
    imported = import_torch(model, fed)
    imported.weights["norm.bias"] += 0.01
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        judge(imported, fed, [model(*fed)])


# ---------------------------------------------------------------------------------------- names and variables


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


@pytest.mark.parametrize("buffer", [False, True])
@pytest.mark.parametrize(
    ("a", "b"),
    [
        (lambda x: x[:4], lambda x: x[2:]),
        (lambda x: x[::2], lambda x: x[12:16]),
        (lambda x: x[2:], lambda x: x),
        (lambda x: x.view(5, 4), lambda x: x.view(5, 4).T),
        (lambda x: x.view(5, 4)[:, :3], lambda x: x.view(5, 4)[:, 2:]),
        (lambda x: torch.from_numpy(x.numpy()[:4]), lambda x: torch.from_numpy(x.numpy()[3:])),
        (lambda x: x[:4], lambda x: x.view(torch.float64)[1:3]),
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
    with pytest.raises(UnsupportedModel, match="b: shares memory with a, and one of them alone is a parameter that requires a gradient"):
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


# ---------------------------------------------------------------------------------------- inputs and outputs


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


def test_arguments_that_are_no_tensors_have_the_values_of_the_examples() -> None:
    x = torch.randn(2, 3)
    once, twice = (import_torch(Outputs(), (x, scale), {"kind": "tuple"}) for scale in (1.0, 2.0))
    twice.weights.update(once.weights)
    np.testing.assert_allclose(2 * run(once, x)[0], run(twice, x)[0], rtol=1e-6)


# ---------------------------------------------------------------------------------------- sources


def test_a_graph_module_is_a_source() -> None:
    model = Conv().eval()
    compare(torch.fx.symbolic_trace(model), (torch.randn(2, 3, 16, 16),))


@pytest.mark.parametrize("key", ["symbol", "place"])
def test_sizes_of_an_exported_program_are_bound(key: str) -> None:
    model = GPT()
    batch, length = torch.export.Dim("batch"), torch.export.Dim("length", max=8)
    program = torch.export.export(model, (tokens(),), dynamic_shapes=({0: batch, 1: length},), strict=False)
    shape = next(node.meta["val"].shape for node in program.graph.nodes if node.name == "tokens")
    names = [str(size) for size in shape] if key == "symbol" else ["tokens.0", "tokens.1"]
    fed = tokens(3, 5)
    imported = import_torch(program, dims=dict(zip(names, (3, 5), strict=True)))
    judge(imported, fed, [model(fed)])
    with pytest.raises(UsageError, match=r"tokens\.1 .* is open"):
        import_torch(program, dims={"tokens.0": 3})
    with pytest.raises(UsageError, match="no such dimension"):
        import_torch(program, dims={"tokens.0": 3, "tokens.1": 5, "depth": 2})
    with pytest.raises(UsageError, match=r"must be in \d+\.\.8"):
        import_torch(program, dims={"tokens.0": 3, "tokens.1": 9})
    for size in ("3", 3.0, 3.5, True, None):
        with pytest.raises(UsageError, match=r"tokens\.0=.*: must be a whole number"):
            import_torch(program, dims={"tokens.0": size, "tokens.1": 5})  # type: ignore[dict-item]


def test_sources_that_make_no_sense() -> None:
    with pytest.raises(UsageError, match=r"expected a torch\.nn\.Module"):
        import_torch(lambda x: x, (torch.randn(2),))
    with pytest.raises(UsageError, match="do not fit forward: missing a required argument: 'tokens'"):
        import_torch(GPT())
    program = torch.export.export(nn.Linear(3, 2), (torch.randn(1, 3),))
    with pytest.raises(UsageError, match="has its example arguments already"):
        import_torch(program, (torch.randn(1, 3),))
    with pytest.raises(UsageError, match="no such dimension"):
        import_torch(program, dims={"batch": 2})


def test_an_exported_program_is_left_as_it_was() -> None:
    class Quiet(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.randn(3))

        def forward(self, x: Tensor) -> Tensor:
            with torch.no_grad():
                y = x * 2
            return y * self.weight

    program = torch.export.export(Quiet(), (torch.randn(3),), strict=False)
    before = str(program.graph)
    import_torch(program)
    assert str(program.graph) == before


# ---------------------------------------------------------------------------------------- what is refused


class Unsupported(nn.Module):
    def forward(self, x: Tensor) -> Tensor:
        a = torch.linalg.inv(x)
        b = torch.rand_like(a) + a
        return torch.fft.fft(b).real


def test_everything_unsupported_is_listed_at_once() -> None:
    with pytest.raises(UnsupportedModel) as caught:
        import_torch(Unsupported(), (torch.randn(3, 3),))
    text = str(caught.value)
    assert "places" in text
    assert "aten.linalg_inv_ex.default" in text
    assert "random numbers" in text
    assert "test_torch_models.py:" in text
    assert "/" + "tests" not in text


def test_dropout_in_training_is_refused() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.1))
    with pytest.raises(UnsupportedModel, match=r"1/native_dropout \(aten.native_dropout.default\).*dropout of 0.1 in training mode"):
        import_torch(model, (torch.randn(2, 3),))
    compare(model.eval(), (torch.randn(2, 3),))


def test_state_that_outputs_depend_on_is_refused() -> None:
    class Counter(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.register_buffer("count", torch.zeros(()))

        def forward(self, x: Tensor) -> Tensor:
            self.count += 1
            return x * self.count

    with pytest.raises(UnsupportedModel, match="count: forward changes this buffer"):
        import_torch(Counter(), (torch.randn(3),))


def test_running_statistics_in_training_are_reported() -> None:
    imported = import_torch(nn.BatchNorm1d(3), (torch.randn(4, 3),))
    assert any(line.startswith("changed by forward, not changed here: ") and "running_mean" in line for line in imported.report)
    assert set(imported.module.vars) == {"weight", "bias"}


def test_what_torch_cannot_export_is_an_error_of_ours() -> None:
    class Dependent(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x + 1 if x.sum() > 0 else x - 1

    with pytest.raises(UnsupportedModel, match=r"torch\.export cannot export it: ") as caught:
        import_torch(Dependent(), (torch.randn(3),))
    assert caught.value.__cause__ is not None


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


# ---------------------------------------------------------------------------------------- through the whole compiler


def test_a_plan_for_training() -> None:
    model = ps.from_torch(GPT(), (tokens(),))
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3), microbatches=2)
    plan = ps.plan(model, ps.Cluster.local(2), training)
    assert {"s0.F", "s0.B", "s0.U", "s1.F", "s1.B", "s1.U"} <= set(plan.module.graphs)
