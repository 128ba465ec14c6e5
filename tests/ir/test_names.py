"""Tests of names: data and results have the model's own names, and those of the IR where a name had to be spelled
otherwise."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
import torch
from onnx import TensorProto, helper, numpy_helper
from torch import Tensor, nn

import penstock as ps
from penstock.commands.parser import main
from penstock.frontends.onnx.table import RULES
from penstock.ir.names import accepted, by_our_names, in_words_of_source, shown
from penstock.support.errors import UsageError

TIMEOUT = 20
RANDOM = np.random.default_rng(0)
X = RANDOM.standard_normal((4, 3)).astype(np.float32)


def write_odd(path):
    """An input, a weight and outputs with characters that the text form cannot print; one output's name is another one's with `_` in their place."""
    weight = numpy_helper.from_array(RANDOM.standard_normal((3, 3)).astype(np.float32), "a weight")
    nodes = [
        helper.make_node("MatMul", ["in put:0", "a weight"], ["out put"]),
        helper.make_node("Neg", ["out put"], ["out_put"]),
        helper.make_node("ReduceMean", ["out_put"], ["the loss"], keepdims=0),
    ]
    kinds = {"in put:0": ["rows", 3], "out put": ["rows", 3], "out_put": ["rows", 3], "the loss": []}
    first, *rest = [helper.make_tensor_value_info(name, TensorProto.FLOAT, dims) for name, dims in kinds.items()]
    model = helper.make_model(
        helper.make_graph(nodes, "odd", [first], rest, [weight]),
        opset_imports=[helper.make_opsetid("", 20)],
        ir_version=10,
    )
    onnx.save(model, path)
    return path


@pytest.fixture(scope="module")
def odd(tmp_path_factory):
    folder = tmp_path_factory.mktemp("odd")
    path = write_odd(folder / "model.onnx")
    model = ps.from_onnx(path, dims={"rows": 4})
    return path, model, ps.compile(ps.plan(model, ps.Cluster.local(1)), folder / "bundle", backend="numpy")


def test_results_come_by_the_names_of_the_file(odd):
    path, model, bundle = odd
    said = "spelled otherwise here: 'in put:0' as in_put:0, 'out put' as out_put.1, 'the loss' as the_loss, 'a weight' as a_weight"
    assert said in model.imported.report
    session = onnxruntime.InferenceSession(str(path), providers=["CPUExecutionProvider"])
    expected = dict(zip(["out put", "out_put", "the loss"], session.run(None, {"in put:0": X}), strict=True))
    with ps.open(bundle, timeout=TIMEOUT) as job:
        for name in ("in put:0", "in_put:0"):
            found = job.infer({name: X})
            assert found.keys() == expected.keys()
            for key in ("out put", "out_put"):
                np.testing.assert_allclose(found[key], expected[key], rtol=1e-5, atol=1e-6)
        with pytest.raises(UsageError, match="input in_put:0 is given twice"):
            job.infer({"in put:0": X, "in_put:0": X})
        with pytest.raises(
            UsageError, match=r"in put:0: missing(.|\n)*other: the model has no such input, it has in put:0$"
        ):
            job.infer({"other": X})


def test_files_come_and_go_by_the_names_of_the_model(odd, tmp_path):
    _, _, bundle = odd
    for name in ("in put:0", "in_put:0"):
        np.savez(tmp_path / "in.npz", **{name: X})
        out = tmp_path / "out.npz"
        assert main(["infer", str(bundle), "--input", str(tmp_path / "in.npz"), "--output", str(out)]) == 0
        with np.load(out) as found:
            assert set(found) == {"out put", "out_put", "the loss"}


@pytest.mark.slow
def test_training_takes_either_name(odd, tmp_path):
    _, model, _ = odd
    losses = {}
    for name in ("the loss", "the_loss"):
        training = ps.Training(loss=f"output:{name}", optimizer=ps.SGD(lr=0.1), microbatches=2)
        bundle = ps.compile(ps.plan(model, ps.Cluster.local(1), training), tmp_path / name, backend="numpy")
        for fed in ("in put:0", "in_put:0"):
            with ps.open(bundle, timeout=TIMEOUT) as job:
                losses[name, fed] = [
                    *job.run([{fed: np.concatenate([X, X])}] * 2),
                    job.step({fed: np.concatenate([X, X])}),
                ]
            np.savez(tmp_path / "data.npz", **{fed: np.concatenate([X, X])})
            assert main(["run", str(bundle), "--data", str(tmp_path / "data.npz"), "--steps", "2"]) == 0
    first = losses["the loss", "in put:0"]
    assert all(found == first for found in losses.values())
    assert first[2] < first[1] < first[0]
    with pytest.raises(
        UsageError, match=r"the model has no output of that name, it has %out put : .*%out_put : .*%the loss : "
    ):
        ps.plan(model, ps.Cluster.local(1), ps.Training(loss="output:nothing"))


def test_what_is_no_mapping_of_arrays_is_refused(odd, tmp_path):
    _, model, bundle = odd
    with ps.open(bundle, timeout=TIMEOUT) as job:
        for wrong in ([{"in put:0": X}], None, 3):
            with pytest.raises(
                UsageError, match="expected a dict of arrays by the names of inputs, or a tuple of arrays, got "
            ):
                job.infer(wrong)
        assert job.infer(X).keys() == job.infer((X,)).keys()  # the only input needs no name
        with pytest.raises(UsageError, match="in_put:0: is no array"):
            job.infer({"in put:0": [[1.0], [2.0, 3.0]]})
        assert job.infer({"in put:0": X})  # still there
    training = ps.Training(loss="output:the loss", optimizer=ps.SGD(lr=0.1))
    trained = ps.compile(ps.plan(model, ps.Cluster.local(1), training), tmp_path / "bundle", backend="numpy")
    with ps.open(trained, timeout=TIMEOUT) as job:
        for wrong in ([{"in put:0": X}], None, 3):
            with pytest.raises(
                UsageError,
                match="batch 0: expected a dict of arrays by the names of inputs, or a tuple of arrays, got ",
            ):
                job.step(wrong)
            with pytest.raises(
                UsageError,
                match="batch 0: expected a dict of arrays by the names of inputs, or a tuple of arrays, got ",
            ):
                list(job.run([wrong]))
        with pytest.raises(
            UsageError, match="batch 0: expected a dict of arrays by the names of inputs, or a tuple of arrays, got str"
        ):
            list(job.run({"in put:0": X}))
        with pytest.raises(UsageError, match="expected batches, got int"):
            list(job.run(3))
        assert job.step({"in put:0": X})


class Named(nn.Module):
    """Results called like the input, like a parameter, and like nothing that can be printed."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(3, 3)

    def forward(self, x: Tensor) -> dict[str, Tensor]:
        y = self.layer(x)
        return {"x": y.mean(), "layer.bias": y * 2, "a b/é": y * 3, "y": y}


def test_outputs_of_torch_keep_their_names(tmp_path):
    torch.manual_seed(0)
    module = Named()
    model = ps.from_torch(module, (torch.zeros(4, 3),))
    assert model.module.outputs == ("x.1", "layer.bias.1", "a_b/_", "y")
    assert "spelled otherwise here: 'x' as x.1, 'layer.bias' as layer.bias.1, 'a b/é' as a_b/_" in model.imported.report
    bundle = ps.compile(ps.plan(model, ps.Cluster.local(1)), tmp_path / "bundle", backend="numpy")
    with ps.open(bundle, timeout=TIMEOUT) as job:
        found = job.infer({"x": X})
    expected = module(torch.tensor(X))
    assert found.keys() == expected.keys()
    for name, tensor in expected.items():
        np.testing.assert_allclose(found[name].reshape(tensor.shape), tensor.detach().numpy(), rtol=1e-5, atol=1e-6)
    for name in ("x", "x.1"):
        plan = ps.plan(model, ps.Cluster.local(1), ps.Training(loss=f"output:{name}"))
        assert plan.module.outputs == ("x.1",)


def test_a_compiled_module_has_the_names_of_its_own():
    module = nn.Sequential(nn.Linear(3, 2))
    model = ps.from_torch(torch.compile(module), (torch.zeros(4, 3),))
    assert set(model.imported.weights) == set(module.state_dict()) == {"0.weight", "0.bias"}
    assert [value.name for value in model.module.inputs] == ["input"]


def test_what_is_called_alike_outside_keeps_our_names():
    assert shown(["a", "b", "c"], {"a": "n", "b": "n", "c": "m"}) == {"a": "a", "b": "b", "c": "m"}
    assert shown(["x.1", "x.1.1"], {"x.1": "x", "x.1.1": "x.1"}) == {"x.1": "x", "x.1.1": "x.1"}
    assert accepted(["x.1", "x.1.1"], {"x.1": "x", "x.1.1": "x.1"}) == {"x": "x.1", "x.1": "x.1.1", "x.1.1": "x.1.1"}
    assert by_our_names({"x": 1, "x.1": 2, "z": 3}, ["x.1", "x.1.1"], {"x.1": "x", "x.1.1": "x.1"}, "") == {
        "x.1": 1,
        "x.1.1": 2,
        "z": 3,
    }


def test_scripted_and_traced_modules_are_refused():
    module, example = nn.Linear(3, 3), (torch.zeros(4, 3),)
    for scripted in (torch.jit.trace(module, example), torch.jit.script(module)):
        with pytest.raises(UsageError, match="scripted and traced modules are not supported") as error:
            ps.from_torch(scripted, example)
        assert "give the torch.nn.Module" in error.value.hint


def test_inspect_shows_the_names_of_the_model(odd, tmp_path, capsys):
    """The control is the program alone, which knows no others."""
    path, _, bundle = odd
    assert main(["inspect", str(bundle)]) == 0
    shown_names = capsys.readouterr().out
    assert "input in put:0:" in shown_names
    assert main(["inspect", str(bundle / "module.ir")]) == 0
    assert "input in_put:0:" in capsys.readouterr().out
    model = onnx.load(path)
    del model.graph.output[1:], model.graph.node[1:]
    onnx.save(model, tmp_path / "one.onnx")
    words = ["--loss", "mse", "--microbatches", "2", "--backend", "numpy", "--devices", "2", "--dim", "rows=4"]
    assert main(["compile", str(tmp_path / "one.onnx"), *words, "-o", str(tmp_path / "training")]) == 0
    capsys.readouterr()
    assert main(["inspect", str(tmp_path / "training")]) == 0
    told = capsys.readouterr().out
    assert "not handed out in training: 'out put'" in told
    assert "out_put" not in told
    assert main(["inspect", str(path)]) == 2
    assert "is a model, and not compiled" in capsys.readouterr().err


def test_a_text_in_words_of_the_source():
    """Words of the text stay, also where a name is spelled as one of them is."""
    renamed = {"a_b": "a b", "loss": "0 loss", "same": "same"}
    text = "@a_b of %a_b and a_b, not a_b.1 or xa_b: the loss is %loss, same"
    expected = "'a b' of 'a b' and 'a b', not a_b.1 or xa_b: the loss is '0 loss', same"
    assert in_words_of_source(text, renamed) == expected


def test_bisection_takes_no_value_for_another(odd, capsys):
    """Two names of the file are spelled alike here. Where one is wrong, its node is named as the model names it."""
    path, _, _ = odd
    words = ["verify", str(path), "--bisect", "--backend", "numpy", "--repro", "none", "--dim", "rows=4"]
    assert main(words) == 0
    assert " 3 " in next(line for line in capsys.readouterr().out.splitlines() if line.startswith("onnxruntime"))


def test_bisection_names_the_node_of_the_model(odd, capsys, monkeypatch):
    path, _, _ = odd
    monkeypatch.setitem(RULES, "Neg", lambda node: node.emit("relu", node.value(0)))
    words = ["verify", str(path), "--bisect", "--backend", "numpy", "--repro", "none", "--dim", "rows=4"]
    assert main(words) == 5
    assert "tensor   %out_put of node out_put (Neg)" in capsys.readouterr().out
