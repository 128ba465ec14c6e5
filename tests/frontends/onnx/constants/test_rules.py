"""The table of rules against torch: a file trains exactly what named_parameters() lists.

Each row has a module that needs it. The control takes the row away, and other tensors are trained.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import numpy as np
import onnx
import pytest
import torch
from hypothesis import HealthCheck, assume, given, settings
from hypothesis import strategies as st
from onnx import helper, numpy_helper
from torch import Tensor, nn
from torch.nn import functional as F

from penstock.frontends.onnx import import_onnx
from penstock.frontends.onnx.constants import rules

from ..cases import write_model
from .exported import asked_of_torch, export, lifted, renamed, torch_names, trained_by, without_names
from .test_elements import fourier, mel

WIDTH, TIME = 16, 10


class Formula(nn.Module):
    """A product with a trained weight before and after a formula, and tensors that it uses."""

    def __init__(self, formula: Callable[[nn.Module, Tensor], Tensor], **tensors: Tensor) -> None:
        super().__init__()
        self.before = nn.Linear(WIDTH, WIDTH)
        self.formula = formula
        for name, tensor in tensors.items():
            if isinstance(tensor, nn.Parameter | nn.Module):
                setattr(self, name, tensor)
            else:
                self.register_buffer(name, torch.as_tensor(tensor, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(self, self.before(x))


def gelu(_: nn.Module, x: Tensor) -> Tensor:
    return x * 0.5 * (1 + torch.erf(x / math.sqrt(2)))


def bins() -> nn.Module:
    """The mean over bins that detectors take: a convolution with fixed weights 0, 1, 2, ..."""
    conv = nn.Conv1d(TIME, 1, 1, bias=False).requires_grad_(False)
    conv.weight.data[:] = torch.arange(float(TIME))[None, :, None]
    return conv


def other(path: Path) -> Path:
    return lifted(path, other=True)


def rank_0(path: Path) -> Path:
    return lifted(path, other=True, rank_0=True)


def simplified(path: Path) -> Path:
    return lifted(path, other=False)


def called_as_statistics(path: Path) -> Path:
    names = {"norm.weight": "stored.running_var", "norm.bias": "stored.running_mean"}
    return renamed(path, names)


def as_written(path: Path) -> Path:
    return path


TOKEN = torch.zeros(1, 1, WIDTH)
CASES: dict[str, tuple[Callable[[Path], Path], Callable[[], nn.Module]]] = {
    "setting": (as_written, lambda: Formula(lambda m, x: x * (x > m.levels), levels=torch.rand(WIDTH))),
    "norm": (called_as_statistics, lambda: Formula(lambda m, x: m.norm(x.tanh()), norm=nn.BatchNorm1d(TIME))),
    "buffer-name": (as_written, lambda: Formula(lambda m, x: x @ m.mel_basis, mel_basis=torch.rand(WIDTH, 5))),
    "mask": (
        as_written,
        lambda: Formula(
            lambda m, x: (x @ x.transpose(1, 2) + m.hidden).softmax(-1) @ x,
            hidden=torch.full((TIME, TIME), float("-inf")).triu(1),
        ),
    ),
    "sinusoids": (
        as_written,
        lambda: Formula(
            lambda m, x: F.conv1d(x.flatten(1)[:, None], m.kernels),
            kernels=fourier(torch.hann_window(64).numpy())[:, None],
        ),
    ),
    "window": (as_written, lambda: Formula(lambda m, x: x * m.taper, taper=torch.hamming_window(WIDTH))),
    "filter-bank": (as_written, lambda: Formula(lambda m, x: x @ m.hills, hills=mel(6, WIDTH).T.copy())),
    "expectation": (as_written, lambda: Formula(lambda m, x: m.bins(x.softmax(1)), bins=bins())),
    "parameter-name": (other, lambda: Formula(lambda m, x: x * m.gamma, gamma=nn.Parameter(torch.ones(1)))),
    "eps": (other, lambda: Formula(lambda m, x: ((x * x) @ m.v + 1e-6).log(), v=nn.Parameter(torch.rand(WIDTH, 1)))),
    "bias-of-one": (without_names, lambda: Formula(lambda m, x: m.gate(x) * x, gate=nn.Linear(WIDTH, 1))),
    "steps": (as_written, lambda: Formula(lambda m, x: x + m.places, places=torch.arange(WIDTH))),
    "bound": (other, lambda: Formula(lambda _, x: torch.maximum(gelu(_, torch.maximum(x, torch.tensor(-0.4))), torch.tensor(-0.4)))),
    "state-dict": (as_written, lambda: Formula(lambda m, x: (x * x + 1).pow(m.p), p=nn.Parameter(torch.full((1,), 3.0)))),
    "exponent": (other, lambda: Formula(lambda _, x: (x * x).pow(torch.full((WIDTH,), 1.5)))),
    "choice": (other, lambda: Formula(lambda _, x: torch.where(x[:1] > x[1:], x[1:], torch.tensor(-3.0)))),
    "number": (other, lambda: Formula(gelu)),
    "filling": (simplified, lambda: Formula(lambda _, x: torch.cat([x, torch.zeros(2, 3, WIDTH)], 1))),
    "rank-0": (rank_0, lambda: Formula(lambda _, x: F.prelu(x, torch.full((1,), 0.25)))),
}  # fmt: skip
# The importer of BatchNormalization reads no statistic as a weight: its row is there for the report.
REPORTED = {"statistic"}


def file_of(rule: str, folder: Path) -> tuple[Path, nn.Module]:
    torch.manual_seed(0)
    change, build = CASES[rule]
    module = build()
    return change(export(module, folder / "model.onnx", torch.randn(2, TIME, WIDTH))), module


def test_every_row_has_a_case() -> None:
    assert set(CASES) | REPORTED == {rule.name for rule in rules.RULES}
    assert len({rule.name for rule in rules.RULES}) == len(rules.RULES)


@pytest.mark.parametrize("rule", CASES)
def test_a_row_makes_the_file_train_what_torch_does(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, rule: str) -> None:
    path, module = file_of(rule, tmp_path)
    imported, trained = trained_by(path)
    assert torch_names(imported, trained, module) == asked_of_torch(module)
    verdict = next(row.trained for row in rules.RULES if row.name == rule)
    assert any(line.startswith(f"not trained by rule {rule}, ") for line in imported.report) is not verdict
    monkeypatch.setattr(rules, "RULES", tuple(row for row in rules.RULES if row.name != rule))
    imported, trained = trained_by(path)
    assert torch_names(imported, trained, module) != asked_of_torch(module)


@pytest.mark.parametrize("rule", CASES)
def test_flags_win_over_rows(tmp_path: Path, rule: str) -> None:
    path, _ = file_of(rule, tmp_path)
    floats = {t.name for t in onnx.load(path).graph.initializer if t.data_type == onnx.TensorProto.FLOAT}
    read = {
        name for node in onnx.load(path).graph.node if node.op_type not in ("Clip", "Greater") for name in node.input
    }
    imported, trained = trained_by(path, trained=".")
    assert trained >= floats & read
    assert all("not trained by rule" not in line for line in imported.report)
    assert trained_by(path, trained=".", frozen=".")[1] == set()


def test_elements_of_a_constant_are_told_of_where_a_flag_trains_them(tmp_path: Path) -> None:
    path, _ = file_of("sinusoids", tmp_path)
    report = trained_by(path, trained="^kernels$")[0].report
    (line,) = [line for line in report if line.startswith("trained though unusual")]
    assert line.startswith("trained though unusual, 1: kernels (told to be trained; but rows or columns are sinusoids")
    assert not [line for line in trained_by(path)[0].report if "unusual" in line]


def test_statistics_are_told_of(tmp_path: Path) -> None:
    class Model(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.layers = nn.Sequential(nn.Conv1d(TIME, 3, 1), nn.Tanh(), nn.BatchNorm1d(3))
            for parameter in self.layers[2].state_dict().values():  # else torch's exporter makes one of equal ones
                parameter.copy_(torch.rand(parameter.shape))

        def forward(self, x: Tensor) -> Tensor:
            return self.layers(x)

    module = Model()
    path = without_names(export(module, tmp_path / "model.onnx", torch.randn(2, TIME, WIDTH)))
    imported, trained = trained_by(path)
    assert torch_names(imported, trained, module) == asked_of_torch(module)
    assert [line for line in imported.report if line.startswith("not trained by rule statistic, 2: ")]


@pytest.mark.parametrize("name", ["const_fold_opt__3", "first"])
def test_first_states_of_recurrent_layers(tmp_path: Path, name: str) -> None:
    """One of zeros is a constant if the exporter made up its name; called by a person it may be learnt."""
    text = f"(float[3,2,4] x) => (float[3,1,2,5] y) {{ y = GRU<hidden_size = 5>(x, w, r, '', '', {name}) }}".replace(
        "''", ""
    )
    arrays = {"w": np.ones((1, 15, 4)), "r": np.ones((1, 15, 5)), name: np.zeros((1, 2, 5))}
    path = write_model(tmp_path / "a.onnx", text, arrays={n: a.astype(np.float32) for n, a in arrays.items()})
    assert trained_by(path)[1] == {"w", "r"} | ({name} if name == "first" else set())


def test_names_in_the_report_are_bounded(tmp_path: Path) -> None:
    inputs = [helper.make_tensor_value_info("x", 1, [2])]
    nodes = [
        helper.make_node("Add", ["x" if i == 0 else f"h{i}", "n" * 200 + str(i)], [f"h{i + 1}"]) for i in range(50)
    ]
    tensors = [numpy_helper.from_array(np.ones(1, np.float32), "n" * 200 + str(i)) for i in range(50)]
    graph = helper.make_graph(nodes, "g", inputs, [helper.make_tensor_value_info("h50", 1, [2])], tensors)
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), tmp_path / "m.onnx")
    (line,) = [line for line in import_onnx(tmp_path / "m.onnx").report if line.startswith("not trained by rule")]
    assert line.startswith("not trained by rule number, 50: nnn")
    assert "and 42 more" in line
    assert len(line) < 800


# ------------------------------------------------------------------------------------------------ the law


class Scaled(nn.Module):
    """One learnt number in a formula. Those of `named` are called as parameters are."""

    def __init__(self, formula: Callable[[Tensor, Tensor], Tensor], name: str, first: Tensor) -> None:
        super().__init__()
        self.formula, self.name = formula, name
        self.register_parameter(name, nn.Parameter(first))

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x, getattr(self, self.name))


class Fixed(nn.Module):
    """A formula with a buffer, or with none."""

    def __init__(self, formula: Callable[..., Tensor], buffer: object = None) -> None:
        super().__init__()
        self.formula = formula
        self.register_buffer("fixed", None if buffer is None else torch.as_tensor(buffer, dtype=torch.float32))

    def forward(self, x: Tensor) -> Tensor:
        return self.formula(x) if self.fixed is None else self.formula(x, self.fixed)


class Across(nn.Module):
    """A layer over time in place of width."""

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x.transpose(1, 2)).transpose(1, 2)


class Gated(nn.Module):
    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.gate = nn.Linear(WIDTH, 1, bias)

    def forward(self, x: Tensor) -> Tensor:
        return x * torch.sigmoid(self.gate(x))


def rms(x: Tensor) -> Tensor:
    return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + 1e-6)


def hidden(x: Tensor, mask: Tensor) -> Tensor:
    return (x @ x.transpose(1, 2) / WIDTH**0.5 + mask).softmax(-1) @ x


def with_token(x: Tensor, token: Tensor) -> Tensor:
    return torch.cat([token.expand(x.shape[0], -1, -1), x], 1).tanh().cumsum(1)[:, 1:]


BLOCKS: dict[str, Callable[[], nn.Module]] = {
    "linear": lambda: nn.Linear(WIDTH, WIDTH),
    "plain linear": lambda: nn.Linear(WIDTH, WIDTH, bias=False),
    "norm": lambda: nn.LayerNorm(WIDTH),
    "conv": lambda: Across(nn.Conv1d(WIDTH, WIDTH, 3, padding=1)),
    "batch norm": lambda: Across(nn.BatchNorm1d(WIDTH)),
    "slope": lambda: nn.PReLU(),
    "slopes": lambda: Across(nn.PReLU(WIDTH)),
    "gate": lambda: Gated(True),
    "plain gate": lambda: Gated(False),
    "layer scale": lambda: Scaled(lambda x, w: x * w, "gamma", torch.full((1,), 1e-5)),
    "new bias": lambda: Scaled(lambda x, w: x + w, "bias", torch.zeros(WIDTH)),
    "token": lambda: Scaled(with_token, "cls_token", torch.zeros(1, 1, WIDTH)),
    "table": lambda: Scaled(lambda x, w: x + w, "places", torch.randn(1, TIME, WIDTH)),
    "gelu": lambda: Fixed(lambda x: gelu(nn.Identity(), x)),
    "tanh gelu": lambda: nn.GELU("tanh"),
    "rms": lambda: Fixed(rms),
    "bound": lambda: Fixed(lambda x: torch.maximum(x, torch.tensor(-0.4))),
    "clamp": lambda: Fixed(lambda x: x.clamp(-2, 2)),
    "basis": lambda: Fixed(lambda x, w: x @ w, np.fft.rfft(np.eye(WIDTH)).real[:, [0, *range(1, 8)] * 2]),
    "window": lambda: Fixed(lambda x, w: x * w, torch.hann_window(WIDTH)),
    "positions": lambda: Fixed(lambda x, w: x + w, np.sin(np.outer(np.arange(TIME), 0.7 ** np.arange(WIDTH)))),
    "hidden": lambda: Fixed(hidden, torch.full((TIME, TIME), -1e9).triu(1)),
    "padded": lambda: Fixed(lambda x, w: x * w, (torch.arange(TIME) < 6)[:, None]),
}
# Only the names of torch's state dict tell of these.
OF_TORCH: dict[str, Callable[[], nn.Module]] = {
    "power": lambda: Scaled(lambda x, w: (x * x + 1).pow(w), "p", torch.full((1,), 3.0)),
    "temperature": lambda: Scaled(lambda x, w: x * w.exp(), "logit_scale", torch.tensor(2.6592)),
}
WRITERS = {"torch": as_written, "simplified": simplified, "other": other}


def _make_different(parameters: list[nn.Parameter]) -> None:
    """Leave the first of equal parameters as torch begins with it. Its exporter would write the others as the same tensor."""
    with torch.no_grad():
        for i, parameter in enumerate(parameters):
            if any(torch.equal(parameter, other) for other in parameters[:i]):
                parameter.add_(0.001 * i)


def law(writer: str, names: list[str], folder: Path) -> tuple[set[str], set[str]]:
    """Return what a file of these blocks trains, and what torch does."""
    torch.manual_seed(0)
    module = nn.Sequential(*((BLOCKS | OF_TORCH)[name]() for name in names))
    _make_different(list(module.parameters()))
    path = WRITERS[writer](export(module, folder / "model.onnx", torch.randn(2, TIME, WIDTH)))
    imported, trained = trained_by(path)
    return torch_names(imported, trained, module), asked_of_torch(module)


@pytest.mark.parametrize("writer", WRITERS)
@settings(max_examples=12, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_file_trains_exactly_the_parameters_of_its_module(writer: str, data: st.DataObject, tmp_path: Path) -> None:
    names = sorted(BLOCKS if writer == "other" else BLOCKS | OF_TORCH)
    drawn = ["linear", *data.draw(st.lists(st.sampled_from(names), min_size=1, max_size=4))]
    # Of these two torch's exporter makes one convolution with other weights.
    assume(("conv", "batch norm") not in pairwise(drawn))
    found, expected = law(writer, drawn, tmp_path)
    assert found == expected


@pytest.mark.parametrize("writer", WRITERS)
@pytest.mark.parametrize("block", [*BLOCKS, *OF_TORCH])
def test_each_block_alone(writer: str, block: str, tmp_path: Path) -> None:
    if writer == "other" and block in OF_TORCH:
        return
    found, expected = law(writer, ["linear", block], tmp_path)
    assert found == expected


@pytest.mark.parametrize("trains", [False, True])
def test_the_law_fails_without_rules(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, trains: bool) -> None:
    """The control: with everything trained, and with nothing trained."""
    verdict = rules.Rule("same", trains, "for all", lambda *_: True)
    monkeypatch.setattr(rules, "RULES", (verdict,))
    found, expected = law("other", ["linear", "gelu", "basis"], tmp_path)
    assert found != expected
    assert (found > expected) is trains
