"""Losses against torch, settings and their errors."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from penstock.frontends.onnx import import_onnx
from penstock.frontends.training import Training, attach_loss, load_training
from penstock.ir.graph import Module
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.store import DictStore
from penstock.ir.training.optimizers import SGD, AdamW, Group, Momentum, Muon, optimizer_of, parse_groups
from penstock.ir.training.rates import Cosine
from penstock.ir.verify.verifier import check
from penstock.passes.training.autodiff import AutodiffOptions, autodiff
from penstock.support.errors import UsageError

from .onnx.cases import draw, write_model

F32 = np.dtype(np.float32)
TWO = """(float[2,3,4] x, float[4,5] w, float[4,4] v) => (float[2,3,5] logits, float[2,3,4] side, float total) {
  logits = MatMul(x, w) side = MatMul(x, v) square = Mul(side, side) total = ReduceMean<keepdims = 0>(square)
}"""


def two(tmp_path: Path) -> tuple[Module, dict[str, np.ndarray]]:
    text = TWO.replace(", float[4,5] w, float[4,4] v)", ")")
    arrays = {"w": draw("w", F32, (4, 5)), "v": draw("v", F32, (4, 4))}
    imported = import_onnx(write_model(tmp_path / "two.onnx", text, 17, arrays))
    return imported.module, imported.weights


def train(loss: str) -> Training:
    return Training(loss=loss, optimizer=SGD(lr=0.1))


def value_of(module: Module, weights: dict[str, np.ndarray], feeds: dict[str, np.ndarray]) -> float:
    check(module, ("typed",))
    (loss,) = run_graph(module.graphs["main"], feeds, DictStore(weights))
    assert loss.shape == ()
    return float(loss)


def test_cross_entropy_is_torch_s(tmp_path: Path) -> None:
    module, weights = two(tmp_path)
    trained = attach_loss(module, train("cross_entropy"))
    assert [str(v.type) for v in trained.inputs] == ["f32[2,3,4]", "i64[2,3]"]
    assert trained.outputs == ("loss",)
    assert set(trained.vars) == {"w"}  # what the loss does not need is gone
    x, labels = draw("x", F32, (2, 3, 4)), np.array([[0, 4, 2], [1, 1, 3]])
    expected = torch.nn.functional.cross_entropy(
        torch.from_numpy(x @ weights["w"]).reshape(6, 5), torch.from_numpy(labels).reshape(6)
    )
    assert value_of(trained, weights, {"x": x, "labels": labels}) == pytest.approx(float(expected), rel=1e-5)
    wrong = torch.nn.functional.cross_entropy(
        torch.from_numpy(x @ weights["w"]).reshape(6, 5), torch.from_numpy(labels[::-1].copy()).reshape(6)
    )
    assert value_of(trained, weights, {"x": x, "labels": labels}) != pytest.approx(float(wrong), rel=1e-5)


def test_mse_is_the_mean_over_everything(tmp_path: Path) -> None:
    module, weights = two(tmp_path)
    trained = attach_loss(module, train("mse"))
    assert str(trained.inputs[-1].type) == "f32[2,3,5]"
    x, labels = draw("x", F32, (2, 3, 4)), draw("y", F32, (2, 3, 5))
    expected = float(np.mean((x @ weights["w"] - labels) ** 2))
    assert value_of(trained, weights, {"x": x, "labels": labels}) == pytest.approx(expected, rel=1e-5)


def test_a_loss_of_the_model_needs_no_labels(tmp_path: Path) -> None:
    module, weights = two(tmp_path)
    trained = attach_loss(module, train("output:total"))
    assert [v.name for v in trained.inputs] == ["x"]
    assert trained.outputs == ("total",)
    x = draw("x", F32, (2, 3, 4))
    assert value_of(trained, weights, {"x": x}) == pytest.approx(float(np.mean((x @ weights["v"]) ** 2)), rel=1e-5)
    assert any("@w" in note.text for note in trained.notes)


@pytest.mark.parametrize(
    ("loss", "said"),
    [
        ("output:nothing", r"output:nothing: the model has no output of that name, it has '?%logits.*%side.*%total"),
        ("output:side", r"must be a floating-point scalar, but is f32\[2,3,4\]"),
    ],
)
def test_a_loss_that_does_not_fit_names_what_there_is(tmp_path: Path, loss: str, said: str) -> None:
    module, _ = two(tmp_path)
    with pytest.raises(UsageError, match=said):
        attach_loss(module, train(loss))


def test_outputs_of_the_wrong_kind_are_refused(tmp_path: Path) -> None:
    flat = import_onnx(write_model(tmp_path / "a.onnx", "(float[5] x) => (float[5] y) { y = Relu(x) }")).module
    with pytest.raises(UsageError, match=r"one score per class.*%y : f32\[5\]"):
        attach_loss(flat, train("cross_entropy"))
    whole = import_onnx(write_model(tmp_path / "a.onnx", "(int64[2,5] x) => (int64[2,5] y) { y = Neg(x) }")).module
    for loss in ("cross_entropy", "mse"):
        with pytest.raises(UsageError, match=r"needs a floating-point output.*i64\[2,5\]"):
            attach_loss(whole, train(loss))


def test_settings_of_the_wrong_type_are_told_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        Training("mse", optimizer="adamw", rate="cosine", groups=Group("x", frozen=True))  # type: ignore[arg-type]
    for said in (
        "optimizer must be an optimiser such as",
        "rate must be a schedule such as",
        "groups must be a tuple of",
    ):
        assert said in str(caught.value)
    with pytest.raises(UsageError, match="an empty pattern would match every parameter"):
        Group("", frozen=True)


def test_parameters_of_f16_are_refused(tmp_path: Path) -> None:
    body = "(float[2, 3] x) => (float[2, 3] y) <float16[3, 3] w = {1, 2, 3, 4, 5, 6, 7, 8, 9}> { c = Cast<to: int = 1>(w) y = MatMul(x, c) }"
    path = tmp_path / "half.onnx"
    path.write_bytes(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> m {body}').SerializeToString())
    module = import_onnx(path).module
    with pytest.raises(UsageError, match=r"parameters in f16 cannot be trained.*@w"):
        attach_loss(module, Training("mse"))


def test_labels_of_the_model_are_not_overwritten(tmp_path: Path) -> None:
    taken = import_onnx(
        write_model(tmp_path / "a.onnx", "(float[2,5] labels) => (float[2,5] y) { y = Relu(labels) }")
    ).module
    with pytest.raises(UsageError, match="adds an input labels"):
        attach_loss(taken, train("mse"))
    inside = import_onnx(
        write_model(
            tmp_path / "a.onnx",
            "(float[2,5] x) => (float[2,5] y) { labels = Neg(x) loss = Exp(labels) y = Relu(loss) }",
        )
    )
    trained = attach_loss(inside.module, train("mse"))
    check(trained, ("typed",))
    assert [v.name for v in trained.inputs] == ["x", "labels"]
    x, labels = draw("x", F32, (2, 5)), draw("y", F32, (2, 5))
    expected = float(np.mean((np.exp(-x) - labels) ** 2))
    assert value_of(trained, {}, {"x": x, "labels": labels}) == pytest.approx(expected, rel=1e-5)


# ---------------------------------------------------------------------------------------- settings


def test_a_training_file_gives_the_settings(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text('loss = "cross_entropy"\nmicrobatches = 4\n[optimizer]\nkind = "adamw"\nlr = 1\nbeta2 = 0.95\n')
    found = load_training(path)
    assert found == Training("cross_entropy", AdamW(lr=1.0, beta2=0.95), 4)
    assert found.pass_options() == {"kind": "adamw", "lr": 1.0, "beta2": 0.95}
    path.write_text('loss = "output:total"\n[optimizer]\nkind = "momentum"\nnesterov = true\n')
    assert load_training(path) == Training("output:total", Momentum(nesterov=True))


def test_all_errors_of_a_training_file_come_at_once(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(
        'microbatches = 0\nlos = "mse"\n[optimizer]\nkind = "sgd"\nlr = -1.0\nbeta = 0.9\nweight_decay = "much"\n'
    )
    with pytest.raises(UsageError) as caught:
        load_training(path)
    text = str(caught.value)
    for said in (
        "los is not known",
        "loss is missing",
        "microbatches must be 1 to 65536, got 0",
        "optimizer.beta is not known",
    ):
        assert said in text
    assert "optimizer.weight_decay must be a number, got 'much'" in text
    assert "optimizer.lr must be 0 or more, got -1.0" in text


def test_a_loss_beside_the_file_stands_in_for_that_of_the_file(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text("microbatches = 4\n")
    assert load_training(path, "mse") == Training("mse", SGD(), 4)
    path.write_text('loss = "cross_entropy"\n')
    assert load_training(path, "mse") == Training("mse", SGD())
    path.write_text("loss = 3\n")
    with pytest.raises(UsageError, match="loss must be a text"):
        load_training(path, "mse")


@pytest.mark.parametrize(
    ("text", "said"),
    [
        ("loss = ", "not a TOML file"),
        ('loss = "hinge"', "loss must be one of cross_entropy, mse, output:NAME, got 'hinge'"),
        ('loss = "output:"', "got 'output:'"),
        ('loss = "mse"\noptimizer = "sgd"', "optimizer must be a table"),
        (
            'loss = "mse"\n[optimizer]\nkind = "adan"',
            "optimizer.kind must be one of sgd, momentum, adam, adamw, adagrad, lion, muon, got 'adan'",
        ),
        (
            'loss = "mse"\n[optimizer]\nkind = "muon"\nadjust = "no"',
            "optimizer.adjust must be one of original, match_rms_adamw, got 'no'",
        ),
        ('loss = "mse"\n[optimizer]\nkind = "muon"\nlr = 0', "optimizer.lr must be above 0"),
        ('loss = "mse"\nrate = "cosine"', "rate must be a table"),
        ('loss = "mse"\n[rate]\nkind = "cosine"\nwarmup = -1', "rate.steps is missing"),
        ('loss = "mse"\n[rate]\nkind = "linear"\nsteps = 3\nwarmup = 3', "rate.steps must be more than warmup, got 3"),
        (
            'loss = "mse"\n[rate]\nkind = "square"',
            "rate.kind must be one of constant, linear, cosine, step, got 'square'",
        ),
        ('loss = "mse"\ngroup = [3]', "group[0] must be a table, got 3"),
        ('loss = "mse"\n[[group]]\nname = "a"\n[[group]]\nname = "("\nlr = 2', "group[0].nothing is different in it"),
        ('loss = "mse"\n[[group]]\nname = "a"\n[[group]]\nname = "("\nlr = 2', "group[1].bad pattern '('"),
        ('loss = "mse"\n[[group]]\nlr = 2', "group[0].name is missing"),
        ('loss = "mse"\n[[group]]\nname = "a"\nfrozen = true\nlr = 2', "group[0].frozen stands alone"),
        (
            'loss = "mse"\n[optimizer]\nkind = "adamw"\nbeta1 = 1.0',
            "optimizer.beta1 must be at least 0 and below 1, got 1.0",
        ),
        ('loss = "mse"\n[optimizer]\nkind = "sgd"\nlr = nan', "optimizer.lr must be 0 or more, got nan"),
        (
            'loss = "mse"\n[optimizer]\nkind = "momentum"\nnesterov = 1',
            "optimizer.nesterov must be true or false, got 1",
        ),
    ],
)
def test_errors_of_a_training_file(tmp_path: Path, text: str, said: str) -> None:
    path = tmp_path / "train.toml"
    path.write_text(text)
    with pytest.raises(UsageError, match=r"train\.toml") as caught:
        load_training(path)
    assert said in str(caught.value)


def test_a_training_file_that_is_missing(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="cannot be read: No such file"):
        load_training(tmp_path / "absent.toml")


def test_optimisers_by_name() -> None:
    assert optimizer_of("momentum", lr=0.5) == Momentum(lr=0.5)
    assert optimizer_of("momentum{nesterov=true,lr=2}", lr=0.5) == Momentum(lr=0.5, nesterov=True)
    assert optimizer_of(str(Muon(lr=0.5, adjust="match_rms_adamw"))) == Muon(lr=0.5, adjust="match_rms_adamw")
    with pytest.raises(UsageError, match="must be one of sgd, momentum, adam, adamw"):
        optimizer_of("adan")
    with pytest.raises(UsageError, match=r"optimizer\.beta1 is not known"):
        optimizer_of("sgd", beta1=0.5)
    with pytest.raises(UsageError, match="eps must be above 0"):
        AdamW(eps=0.0)


# ---------------------------------------------------------------------------------------- groups and rates


def test_groups_and_rate_of_a_training_file(tmp_path: Path) -> None:
    path = tmp_path / "train.toml"
    path.write_text(
        'loss = "mse"\n[rate]\nkind = "cosine"\nsteps = 9\n[[group]]\nname = "w"\nlr = 2\n[[group]]\nname = "b"\nfrozen = true\n'
    )
    found = load_training(path)
    assert found == Training("mse", rate=Cosine(9), groups=(Group("w", lr=2.0), Group("b", frozen=True)))
    assert found.pass_options() == {"kind": "sgd", "rate": "cosine{steps=9}", "groups": ("w{lr=2.0}",)}
    assert parse_groups(tuple(map(str, found.groups))) == found.groups


def test_frozen_groups_are_no_parameters(tmp_path: Path) -> None:
    """As with `frozen` at import: no gradient, no state."""
    body = "(float[2, 3] x) => (float[2, 3] y) <float[3, 3] w1 = {1, 2, 3, 4, 5, 6, 7, 8, 9}, float[3, 3] w2 = {1, 2, 3, 4, 5, 6, 7, 8, 9}> { h = MatMul(x, w1) y = MatMul(h, w2) }"
    path = tmp_path / "two.onnx"
    path.write_bytes(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["" : 17]> m {body}').SerializeToString())
    frozen = attach_loss(
        import_onnx(path).module, Training("mse", groups=(Group("^w1$", frozen=True), Group("w", lr=2.0)))
    )
    imported = attach_loss(import_onnx(path, frozen="^w1$").module, Training("mse"))
    assert {name: var.role for name, var in frozen.vars.items()} == {"w1": "buffer", "w2": "param"}
    one, other = (autodiff(module, AutodiffOptions()) for module in (frozen, imported))
    assert [op.kind for op in one.graphs["B"].ops] == [op.kind for op in other.graphs["B"].ops]
    assert "w2.grad" in one.vars
    assert "w1.grad" not in one.vars
    with pytest.raises(
        UsageError, match="'v' matches no parameter; 'w2' matches no parameter that the groups before it leave"
    ):
        attach_loss(
            import_onnx(path).module,
            Training("mse", groups=(Group("v", lr=2.0), Group("w", frozen=True), Group("w2", lr=2.0))),
        )
