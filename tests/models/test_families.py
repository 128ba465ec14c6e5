"""Model families from both sources, on bundles of two stages that real processes run, against torch.

Forward: the outputs of an inference bundle equal eager torch's within 1e-5 of the largest. Gradients: one step of sgd from a training bundle gives
every parameter's gradient, within 1e-4 of its largest, or of a thousandth of the largest gradient of all: below that is rounding. Training: three steps
of AdamW leave every parameter within 1e-4 of its largest, or of 0.01 where all of it is smaller (0.1 where its gradient is nothing but rounding). The
loss is the mean squared difference from noise, so that it does not depend on what a family's outputs mean.

Needs transformers and onnxscript (`pip install -e '.[models]'`); skipped without.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np
import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

import penstock as ps
from penstock.api import Model

from .against_torch import error, export_onnx
from .families import FAMILIES, build

pytest.importorskip("transformers")
pytest.importorskip("onnxscript")
pytestmark = pytest.mark.slow

SOURCES = ("torch", "onnx")
# So large that the step, not the parameter, is what the difference of two float32 numbers resolves; a power of two, so that dividing is exact.
STEEP = 4096.0
# Adam divides by the root of a mean square: where a gradient is nothing but rounding, as that of attention's key bias, a small eps would make noise of it.
ADAM = {"lr": 1e-3, "eps": 1e-3, "weight_decay": 0.01}
STEPS = 3


def load(source: str, module: nn.Module, inputs: Mapping[str, Tensor], folder: Path) -> Model:
    args = tuple(inputs.values())
    if source == "torch":
        return ps.from_torch(module, args)
    path = export_onnx(module, args, folder)
    # A file does not say which parameters ask for no gradient.
    still = "|".join(re.escape(name) for name, parameter in module.named_parameters() if not parameter.requires_grad)
    return ps.from_onnx(path, frozen=f"^({still})$" if still else None)


def parameters(module: nn.Module) -> list[tuple[set[str], nn.Parameter]]:
    """Each parameter with all names it has."""
    found: dict[int, tuple[set[str], nn.Parameter]] = {}
    for name, parameter in module.named_parameters(remove_duplicate=False):
        found.setdefault(parameter.data_ptr(), (set(), parameter))[0].add(name)
    return list(found.values())


def matched(model: Model, module: nn.Module) -> dict[str, nn.Parameter]:
    """Our variables and torch's parameters by name. One that has no counterpart must not matter to the output."""
    names = {model.imported.names.get(v.name, v.name): v.name for v in model.module.vars.values() if v.role == "param"}
    pairs = {names[name]: parameter for known, parameter in parameters(module) for name in known if name in names}
    assert set(pairs) == set(names.values()), f"not torch's: {set(names.values()) - set(pairs)}"
    missing = [
        known
        for known, parameter in parameters(module)
        if known.isdisjoint(names) and parameter.grad is not None and parameter.grad.any()
    ]
    assert not missing, f"lost: {missing}"
    return pairs


def batches(
    family: str, inputs: Mapping[str, Tensor], output: Tensor, count: int
) -> list[list[tuple[list[Tensor], Tensor]]]:
    """For each step, the arguments and labels of each microbatch."""
    generator = torch.Generator().manual_seed(7)

    def other(x: Tensor) -> Tensor:
        if x.is_floating_point():
            return torch.randn(x.shape, generator=generator)
        return x[torch.randperm(len(x), generator=generator)] if FAMILIES[family].microbatches > 1 else x

    def one() -> tuple[list[Tensor], Tensor]:
        return [other(x) for x in inputs.values()], torch.randn(output.shape, generator=generator)

    return [[one() for _ in range(FAMILIES[family].microbatches)] for _ in range(count)]


def joined(model: Model, step: Sequence[tuple[list[Tensor], Tensor]]) -> dict[str, np.ndarray]:
    """One global batch by the names of the inputs, which come in the order of the arguments."""
    columns = zip(*(args for args, _ in step), strict=True)
    given = [torch.cat(column).numpy() for column in columns]
    batch = dict(zip((v.name for v in model.module.inputs), given, strict=True))
    return batch | {"labels": torch.cat([labels for _, labels in step]).numpy()}


def backward(module: nn.Module, step: Sequence[tuple[list[Tensor], Tensor]]) -> float:
    """Gradients of the mean loss over microbatches; the loss."""
    module.zero_grad(set_to_none=True)
    loss = torch.stack([F.mse_loss(module(*args), labels) for args, labels in step]).mean()
    loss.backward()
    return float(loss.detach())


@pytest.fixture(params=SOURCES)
def source(request: pytest.FixtureRequest) -> str:
    return str(request.param)


@pytest.mark.parametrize("family", FAMILIES)
def test_family(family: str, source: str, tmp_path: Path) -> None:
    check_family(family, source, tmp_path)


def check_family(
    family: str, source: str, folder: Path, spoil: Callable[[nn.Module], None] | None = None, rate: float = ADAM["lr"]
) -> None:
    """`spoil` changes the module after it was imported, `rate` is torch's learning rate: whatever they change has to be noticed."""
    module, inputs = build(family)
    model = load(source, module, inputs, folder)
    if spoil is not None:
        spoil(module)
    cluster = ps.Cluster.local(2)
    expected = module(*inputs.values()).detach()

    inference = ps.compile(ps.plan(model, cluster, stages=2), folder / "inference")
    with ps.open(inference) as job:
        given = dict(zip((v.name for v in model.module.inputs), (x.numpy() for x in inputs.values()), strict=True))
        (found,) = job.infer(given).values()
    assert error(found, expected.numpy()) <= 1e-5, "forward"

    count = FAMILIES[family].microbatches
    steps = batches(family, inputs, expected, STEPS)
    before = {name: array.astype(np.float64) for name, array in model.imported.weights.items()}
    loss = backward(module, steps[0])
    pairs = matched(model, module)
    steep = ps.Training(loss="mse", optimizer=ps.SGD(lr=STEEP), microbatches=count)
    with ps.open(ps.compile(ps.plan(model, cluster, steep, stages=2), folder / "steep")) as job:
        assert job.step(joined(model, steps[0])) == pytest.approx(loss, rel=1e-5)
        after = job.parameters()
    largest = max(float(p.grad.abs().max()) for p in pairs.values() if p.grad is not None)
    wrong = {}
    floors = {}
    for name, parameter in pairs.items():
        gradient = np.zeros(parameter.shape) if parameter.grad is None else parameter.grad.numpy()
        # Gradients that are nothing but rounding (of attention's key bias) are compared with the size of the others; what Adam makes of them, with 0.1.
        floors[name] = 0.1 if np.abs(gradient).max() <= 1e-4 * largest else 1e-2
        off = error((before[name] - after[name]) / STEEP, gradient, floor=1e-3 * largest)
        if not off <= 1e-4:
            wrong[name] = off
    assert not wrong, f"gradients: {wrong}"

    optimizer = torch.optim.AdamW(module.parameters(), **{**ADAM, "lr": rate})
    losses = []
    for step in steps:
        losses.append(backward(module, step))
        optimizer.step()
    settings = ps.Training(loss="mse", optimizer=ps.AdamW(**ADAM), microbatches=count)
    with ps.open(ps.compile(ps.plan(model, cluster, settings, stages=2), folder / "adam")) as job:
        assert list(job.run(joined(model, step) for step in steps)) == pytest.approx(losses, rel=1e-4)
        after = job.parameters()
    wrong = {
        name: off
        for name, p in pairs.items()
        if not (off := error(after[name], p.detach().numpy(), floors[name])) <= 1e-4
    }
    assert not wrong, f"after {STEPS} steps: {wrong}"


@pytest.mark.parametrize("part", ["weight", "statistic"])
def test_a_wrong_number_is_noticed(part: str, tmp_path: Path) -> None:
    def spoil(module: nn.Module) -> None:
        with torch.no_grad():
            if part == "weight":
                next(module.parameters()).mul_(1.001)
            else:
                next(b for name, b in module.named_buffers() if name.endswith("running_var")).mul_(1.001)

    with pytest.raises(AssertionError, match="forward"):
        check_family("resnet", "onnx", tmp_path, spoil)


def test_a_wrong_gradient_is_noticed(tmp_path: Path) -> None:
    def spoil(module: nn.Module) -> None:
        next(module.parameters()).register_hook(lambda gradient: 1.001 * gradient)

    with pytest.raises(AssertionError, match="gradients"):
        check_family("dlrm_sum", "torch", tmp_path, spoil)


def test_a_wrong_step_is_noticed(tmp_path: Path) -> None:
    with pytest.raises(AssertionError):
        check_family("dlrm_sum", "torch", tmp_path, rate=1.1 * ADAM["lr"])
