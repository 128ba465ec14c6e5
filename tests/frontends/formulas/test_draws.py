"""Random numbers from torch and ONNX: dropout against torch with the same masks, other distributions against their shares, and the numbers
themselves."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.drawn import drawn
from oracles.torch_meaning import MEANING
from torch import Tensor, nn

from penstock.frontends.onnx import import_onnx
from penstock.frontends.torch import import_torch
from penstock.ir.graph import MICROBATCH
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.ops.draws import philox
from penstock.ir.interpreter.store import DictStore


class Attention(nn.Module):
    def __init__(self, **options: object) -> None:
        super().__init__()
        self.options = options

    def forward(self, q: Tensor, k: Tensor, v: Tensor, mask: Tensor | None = None) -> Tensor:
        return nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=mask, dropout_p=0.4, **self.options)


def weights_dropped(draws, q: Tensor, k: Tensor, v: Tensor, hidden: Tensor | None) -> Tensor:
    """Attention as its definition has it."""
    scores = q @ k.transpose(-1, -2) / q.shape[-1] ** 0.5
    return (
        draws.dropout(torch.softmax(scores if hidden is None else scores.masked_fill(hidden, -torch.inf), -1), 0.4) @ v
    )


def run(imported, inputs: list[Tensor], microbatch: int) -> list[Tensor]:
    names = [v.name for v in imported.module.inputs if v.name != MICROBATCH]
    fed = {**dict(zip(names, inputs, strict=True)), MICROBATCH: np.array(microbatch)}
    return [
        torch.from_numpy(x) for x in run_graph(imported.module.graphs["main"], fed, DictStore(imported.weights), "f64")
    ]


@pytest.mark.parametrize("p", [0.0, 0.1, 0.75, 1.0])
def test_dropout_equals_torch_with_the_same_masks(p: float) -> None:
    torch.manual_seed(0)
    model, x = nn.Sequential(nn.Linear(9, 7), nn.Dropout(p), nn.Tanh(), nn.Dropout(p)).train(), torch.randn(5, 9)
    imported = import_torch(model, (x,))
    model.double()
    for microbatch in (0, 3, 2**32 + 1):
        found = run(imported, [x], microbatch)[0]
        with drawn() as draws:
            draws.begin(microbatch)
            torch.testing.assert_close(
                found, model(x.double()), rtol=1e-6, atol=1e-9, msg=lambda said, at=microbatch: f"{at}: {said}"
            )


@pytest.mark.parametrize("kind", ["plain", "causal", "mask"])
def test_dropout_of_the_weights_of_attention(kind: str) -> None:
    torch.manual_seed(1)
    q, k, v = torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 4), torch.randn(2, 3, 6, 5)
    mask = torch.rand(6, 6) > 0.3
    mask[torch.arange(6), torch.arange(6)] = True
    model, given_ = Attention(is_causal=kind == "causal"), [q, k, v, *([mask] if kind == "mask" else [])]
    hidden = {"plain": None, "causal": ~torch.ones(6, 6).tril().bool(), "mask": ~mask}[kind]
    found = run(import_torch(model, tuple(given_)), given_, 2)[0]
    with drawn() as draws:
        draws.begin(2)
        torch.testing.assert_close(
            found, weights_dropped(draws, q.double(), k.double(), v.double(), hidden), rtol=1e-6, atol=1e-9
        )


def test_dropout_between_recurrent_layers() -> None:
    torch.manual_seed(2)
    model, x = nn.LSTM(4, 5, num_layers=2, dropout=0.5).train(), torch.randn(3, 2, 4)
    found = run(import_torch(model, (x,)), [x], 1)
    below, above = nn.LSTM(4, 5).double(), nn.LSTM(5, 5).double()
    for layer, single in enumerate((below, above)):
        single.load_state_dict(
            {name: getattr(model, name.replace("l0", f"l{layer}")).detach().double() for name in single.state_dict()}
        )
    with drawn() as draws:
        draws.begin(1)
        expected = above(draws.dropout(below(x.double())[0], 0.5))[0]
    torch.testing.assert_close(found[0], expected, rtol=1e-6, atol=1e-9)


@pytest.mark.parametrize("ratio", ["0.25", ""])
def test_dropout_of_onnx_in_training_mode(ratio: str, tmp_path: Path) -> None:
    constants = f"bool on = {{1}}{f', float p = {{{ratio}}}' if ratio else ''}"
    node = f"y, kept = Dropout(x, {'p' if ratio else ''}, on)"
    text = f"""<ir_version: 8, opset_import: ["" : 13]> m (float[4, 6] x) => (float[4, 6] y, bool[4, 6] kept) <{constants}> {{ {node} }}"""
    path = tmp_path / "dropout.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    x = torch.randn(4, 6)
    y, kept = run(import_onnx(path), [x], 5)
    with drawn() as draws:
        draws.begin(5)
        expected = draws.kept(x.shape, float(ratio or 0.5))
    assert torch.equal(kept, expected)
    torch.testing.assert_close(
        y, torch.where(expected, x.double() / (1 - float(ratio or 0.5)), 0.0), rtol=1e-6, atol=1e-9
    )


@pytest.mark.parametrize("node", ["Dropout(c, , on)", "RandomNormalLike(c)", "RandomUniformLike(c)", "Bernoulli(c)"])
def test_nothing_is_drawn_at_import(node: str, tmp_path: Path) -> None:
    """Not of constants either: they are drawn for each microbatch."""
    body = f"(float[3] x) => (float[3] y) <bool on = {{1}}> {{ c = Constant<value = float[3] {{0.1, 0.2, 0.3}}>() d = {node} y = Add(x, d) }}"
    path = tmp_path / "draws.onnx"
    path.write_bytes(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> m {body}').SerializeToString())
    assert {"random", "random_key"} <= {op.kind for op in import_onnx(path).module.graphs["main"].ops}


def test_evaluation_draws_nothing() -> None:
    model = nn.Sequential(nn.Linear(3, 3), nn.Dropout(0.5), nn.LSTM(3, 3, 2, dropout=0.5)).eval()
    imported = import_torch(nn.Sequential(*list(model)[:2]), (torch.randn(2, 3),))
    assert [v.name for v in imported.module.inputs] == ["input"]
    assert (
        import_torch(model[2], (torch.randn(2, 1, 3),)).module.data_inputs
        == import_torch(model[2], (torch.randn(2, 1, 3),)).module.inputs
    )


# ------------------------------------------------------------------------------------------------ other distributions

MANY = 20000
DRAWS: dict[str, tuple[Callable[[Tensor], Tensor], str, Callable[[Tensor], Tensor]]] = {
    "uniform": (torch.rand_like, "RandomUniformLike(x)", lambda x: x),
    "uniform between": (
        lambda x: torch.empty_like(x).uniform_(-1, 3),
        "RandomUniformLike<low: float = -1, high: float = 3>(x)",
        lambda x: (x + 1) / 4,
    ),
    "normal": (torch.randn_like, "RandomNormalLike(x)", torch.special.ndtr),
    "normal about": (
        lambda x: torch.empty_like(x).normal_(2, 0.5),
        "RandomNormal<shape: ints = [20000], mean: float = 2, scale: float = 0.5>()",
        lambda x: torch.special.ndtr((x - 2) * 2),
    ),
    "exponential": (lambda x: torch.empty_like(x).exponential_(3), "", lambda x: 1 - torch.exp(-3 * x)),
}


class Drawing(nn.Module):
    def __init__(self, draw: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.draw = draw

    def forward(self, x: Tensor) -> Tensor:
        return self.draw(x) + 0 * x


def distance(found: Tensor, share: Callable[[Tensor], Tensor]) -> float:
    """Of Kolmogorov and Smirnov: how far the shares below each number are from what they should be."""
    ordered = found.double().flatten().sort().values
    return float((share(ordered) - (torch.arange(MANY) + 0.5) / MANY).abs().max())


@pytest.mark.parametrize("name", DRAWS)
def test_distributions(name: str, tmp_path: Path) -> None:
    draw, node, share = DRAWS[name]
    x = torch.zeros(MANY)
    samples = [run(import_torch(Drawing(draw), (x,)), [x], 4)[0]]
    if node:
        text = f'<ir_version: 8, opset_import: ["" : 17]> m (float[{MANY}] x) => (float[{MANY}] y) {{ d = {node} y = Add(x, d) }}'
        (tmp_path / "m.onnx").write_bytes(onnx.parser.parse_model(text).SerializeToString())
        samples.append(run(import_onnx(tmp_path / "m.onnx"), [x], 9)[0])
    for found in samples:
        assert distance(found, share) < 2.5 / MANY**0.5
        assert distance(found * 1.1 + 0.05, share) > 2.5 / MANY**0.5, "control: numbers that are a little off"


def test_bernoulli_and_masks_of_whole_channels() -> None:
    x = torch.ones(100, 40, 5)
    dropped = run(import_torch(nn.Dropout1d(0.25).train(), (x,)), [x], 0)[0]
    assert dropped.unique().tolist() == pytest.approx([0.0, 4 / 3])
    assert torch.equal(dropped.amin(2), dropped.amax(2))
    assert abs(float((dropped == 0).double().mean()) - 0.25) < 6 * (0.25 * 0.75 / 4000) ** 0.5


# ------------------------------------------------------------------------------------------------ the numbers


def test_philox_gives_what_its_authors_publish() -> None:
    """The first words of philox2x32 with ten rounds in the known answers of Random123."""
    known = {
        (0, 0, 0): (0xFF1DAE59, 0x6CD10DF2),
        (0xFFFFFFFF, 0xFFFFFFFF, 0xFFFFFFFF): (0x2C3F628B, 0xAB4FD7AD),
        (0x243F6A88, 0x85A308D3, 0x13198A2E): (0xDD7CE038, 0xF62A4C12),
    }
    for words, expected in known.items():
        assert tuple(int(x) for x in philox(*(np.array(word, np.uint64) for word in words))) == expected


def _numbers(microbatch: int, use: int, seed: int, count: int = 40000) -> np.ndarray:
    key = MEANING["random_key"](torch.tensor(microbatch), number=use, seed=seed)
    found = MEANING["random"](torch.arange(count), key)
    assert isinstance(found, Tensor)
    return found.double().numpy()


@settings(max_examples=25, deadline=None)
@given(st.integers(0, 2**40), st.integers(0, 200), st.integers(0, 2**32 - 1))
def test_numbers_are_even_and_have_nothing_to_do_with_each_other(microbatch: int, use: int, seed: int) -> None:
    here = _numbers(microbatch, use, seed)
    assert 0 <= here.min() < here.max() < 1
    assert abs(here.mean() - 0.5) < 6 * (1 / 12 / len(here)) ** 0.5
    shares = np.histogram(here, 20, (0, 1))[0] / len(here)
    assert np.abs(shares - 0.05).max() < 6 * (0.05 * 0.95 / len(here)) ** 0.5
    for other in (
        _numbers(microbatch + 1, use, seed),
        _numbers(microbatch, use + 1, seed),
        _numbers(microbatch, use, seed ^ 1),
        np.roll(here, 1),
    ):
        assert abs(np.corrcoef(here, other)[0, 1]) < 6 / len(here) ** 0.5
