"""Export where the source is no plain ONNX graph: weights inside of control flow, and modules of torch."""

from __future__ import annotations

import numpy as np
import onnx
import onnxruntime
import pytest
from onnx import TensorProto, helper, numpy_helper
from onnx.reference import ReferenceEvaluator
from oracles.export_cases import TIMEOUT, batches, bits, compiled, outputs

import penstock as ps
from penstock.backends.bundle.tensor_file import map_tensors
from penstock.frontends.onnx import import_onnx
from penstock.frontends.onnx.source import all_graphs
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.store import DictStore
from penstock.support.errors import UsageError


def test_a_state_dict_comes_back_whole(tmp_path):
    import torch
    from safetensors import safe_open
    from safetensors.torch import load_file
    from torch import nn

    class Tied(nn.Module):
        """Tied weights, a frozen one, a batch norm with its counter, buffers of both kinds, and a layer nobody uses."""

        def __init__(self) -> None:
            super().__init__()
            self.first, self.norm, self.last, self.unused = (
                nn.Linear(8, 8),
                nn.BatchNorm1d(8),
                nn.Linear(8, 8),
                nn.Linear(3, 2),
            )
            self.last.weight = self.first.weight
            self.last.bias.requires_grad_(False)
            self.register_buffer("shift", torch.randn(8))
            self.register_buffer("passing", torch.randn(8, 8), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.last(torch.tanh(self.norm(self.first(x)) + self.shift) @ self.passing)

    torch.manual_seed(0)
    module, again = Tied().eval(), Tied().eval()
    again.passing = module.passing
    model = ps.from_torch(module, (torch.zeros(4, 8),))
    training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.05), microbatches=2)
    bundle = ps.compile(ps.plan(model, ps.Cluster.local(2), training, stages=1), tmp_path / "bundle", backend="numpy")

    ps.export(bundle, safetensors=tmp_path / "before.safetensors")
    before = module.state_dict()
    found = load_file(tmp_path / "before.safetensors")
    assert found.keys() == before.keys()
    assert all(
        torch.equal(found[name], tensor) and found[name].dtype == tensor.dtype for name, tensor in before.items()
    )

    with ps.open(bundle, timeout=TIMEOUT) as job:
        list(job.run(batches(3)))
        job.save(tmp_path / "ckpt")
    assert ps.export(bundle, checkpoint=tmp_path / "ckpt", safetensors=tmp_path / "after.safetensors").step == 3
    again.load_state_dict(load_file(tmp_path / "after.safetensors"))  # strict: every key is there, and no other
    optimizer = torch.optim.SGD([p for p in module.parameters() if p.requires_grad], lr=0.05)
    for batch in batches(3):
        optimizer.zero_grad()
        torch.nn.functional.mse_loss(module(torch.tensor(batch["x"])), torch.tensor(batch["labels"])).backward()
        optimizer.step()
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(again.state_dict()[name], tensor, rtol=1e-4, atol=1e-5)
    changed = {
        name
        for name, tensor in load_file(tmp_path / "after.safetensors").items()
        if not torch.equal(tensor, found[name])
    }
    assert changed == {"first.weight", "last.weight", "first.bias", "norm.weight", "norm.bias"}
    with safe_open(tmp_path / "after.safetensors", "pt") as file:
        assert file.metadata() == {"format": "pt"}
    with pytest.raises(UsageError, match="holds no ONNX model"):
        ps.export(bundle, onnx=tmp_path / "out.onnx")


def test_running_statistics_come_back(tmp_path):
    """What is exported from a checkpoint evaluates as torch does after the same training; with the statistics of before it does not."""
    import torch
    from safetensors.torch import load_file
    from torch import nn

    torch.manual_seed(0)
    module = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8))
    model = ps.from_torch(module, (torch.zeros(4, 8),))
    training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.1), microbatches=2)
    bundle = ps.compile(ps.plan(model, ps.Cluster.local(1), training), tmp_path / "bundle", backend="numpy")
    data = [{"input": batch["x"] * 3 + 2, "labels": batch["labels"]} for batch in batches(6)]
    with ps.open(bundle, timeout=TIMEOUT) as job:
        list(job.run(data))
        job.save(tmp_path / "ckpt")
    ps.export(bundle, safetensors=tmp_path / "before.safetensors")
    ps.export(bundle, checkpoint=tmp_path / "ckpt", safetensors=tmp_path / "after.safetensors")
    optimizer = torch.optim.SGD(module.parameters(), lr=0.1)
    for batch in data:
        optimizer.zero_grad()
        for x, labels in zip(np.split(batch["input"], 2), np.split(batch["labels"], 2), strict=True):
            (nn.functional.mse_loss(module(torch.tensor(x)), torch.tensor(labels)) / 2).backward()
        optimizer.step()
    before, after = (load_file(tmp_path / f"{name}.safetensors") for name in ("before", "after"))
    for name, tensor in module.state_dict().items():
        torch.testing.assert_close(after[name], tensor, rtol=1e-4, atol=1e-5)
    again, x = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Linear(8, 8)), torch.tensor(data[0]["input"])
    again.load_state_dict(after)
    with torch.no_grad():
        torch.testing.assert_close(again.eval()(x), module.eval()(x), rtol=1e-4, atol=1e-4)
        again.load_state_dict({name: before[name] if "running" in name else tensor for name, tensor in after.items()})
        assert (again(x) - module(x)).abs().max() > 0.5


def test_running_statistics_of_an_onnx_file(tmp_path):
    """A node in training mode: in each step its statistics become what ONNX says its results are, and are written back into the file."""
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node(
            "BatchNormalization",
            ["h", "scale", "bias", "mean", "var"],
            ["y", "new_mean", "new_var"],
            training_mode=1,
            momentum=0.7,
        ),
    ]
    random = np.random.default_rng(0)
    stored = {
        "w": random.standard_normal((8, 8)),
        "scale": np.ones(8),
        "bias": np.zeros(8),
        "mean": random.standard_normal(8),
        "var": np.ones(8),
    }
    tensors = [numpy_helper.from_array(array.astype(np.float32), name) for name, array in stored.items()]
    names = (("y", [4, 8]), ("new_mean", [8]), ("new_var", [8]))
    outs = [helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name, shape in names]
    x = helper.make_tensor_value_info("x", TensorProto.FLOAT, [4, 8])
    proto = helper.make_model(
        helper.make_graph(nodes, "g", [x], outs, tensors), opset_imports=[helper.make_opsetid("", 15)], ir_version=10
    )
    onnx.save(proto, tmp_path / "m.onnx")
    data = batches(3)

    model = ps.from_onnx(tmp_path / "m.onnx")
    training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.0), microbatches=2)
    bundle = ps.compile(ps.plan(model, ps.Cluster.local(1), training), tmp_path / "bundle", backend="numpy")
    with ps.open(bundle, timeout=TIMEOUT) as job:
        list(job.run(data))
        job.save(tmp_path / "ckpt")
    ps.export(bundle, checkpoint=tmp_path / "ckpt", onnx=tmp_path / "after.onnx")
    after = {t.name: numpy_helper.to_array(t) for t in onnx.load(tmp_path / "after.onnx").graph.initializer}
    assert after.keys() == stored.keys()
    mean, var = stored["mean"], stored["var"]
    for part in (part for batch in data for part in np.split(batch["x"], 2)):
        for i, (name, array) in enumerate((("mean", mean), ("var", var)), 3):
            proto.graph.initializer[i].CopyFrom(numpy_helper.from_array(array.astype(np.float32), name))
        _, mean, var = ReferenceEvaluator(proto).run(None, {"x": part})
    np.testing.assert_allclose(after["mean"], mean, rtol=1e-5)
    np.testing.assert_allclose(after["var"], var, rtol=1e-5)
    assert np.abs(after["mean"] - stored["mean"]).max() > 0.3

    with ps.open(
        ps.compile(ps.plan(model, ps.Cluster.local(1)), tmp_path / "inference", backend="numpy"), timeout=TIMEOUT
    ) as job:
        first, second = (job.infer({"x": data[0]["x"][:4]}) for _ in range(2))
    for name, expected in zip(
        ("y", "new_mean", "new_var"),
        ReferenceEvaluator(str(tmp_path / "m.onnx")).run(None, {"x": data[0]["x"][:4]}),
        strict=True,
    ):
        np.testing.assert_allclose(first[name], expected, rtol=1e-5, atol=1e-5)
        np.testing.assert_array_equal(second[name], first[name])


def test_weights_inside_of_loops_and_branches(tmp_path):
    """Written out by the importer, trained as one variable each; in the file, loops and branches are what they were. An old opset, besides."""

    def value(name: str, kind: int, shape: list[int] | None) -> onnx.ValueInfoProto:
        return helper.make_tensor_value_info(name, kind, shape)

    random = np.random.default_rng(0)
    weights = {
        name: (random.standard_normal((8, 8)) * 0.4).astype(np.float32) for name in ("looped", "taken", "left", "outer")
    }
    stored = {name: numpy_helper.from_array(array, name) for name, array in weights.items()}
    floats = TensorProto.FLOAT
    body = helper.make_graph(
        [
            helper.make_node("MatMul", ["carried", "looped"], ["product"]),
            helper.make_node("Tanh", ["product"], ["next"]),
            helper.make_node("Identity", ["go"], ["go on"]),
        ],
        "body",
        [value("i", TensorProto.INT64, []), value("go", TensorProto.BOOL, []), value("carried", floats, ["rows", 8])],
        [value("go on", TensorProto.BOOL, []), value("next", floats, ["rows", 8])],
        [stored["looped"]],
    )
    branches = {
        f"{word}_branch": helper.make_graph(
            [helper.make_node("MatMul", ["h", name], [f"{name} result"])],
            word,
            [],
            [value(f"{name} result", floats, ["rows", 8])],
            [stored[name]],
        )
        for word, name in (("then", "taken"), ("else", "left"))
    }
    constants = [numpy_helper.from_array(np.array(v), n) for n, v in (("three", np.int64(3)), ("yes", np.bool_(True)))]
    nodes = [
        helper.make_node("Loop", ["three", "yes", "x"], ["h"], name="loop", body=body),
        helper.make_node("If", ["yes"], ["g"], name="branch", **branches),
        helper.make_node("MatMul", ["g", "outer"], ["y"], name="last"),
    ]
    graph = helper.make_graph(
        nodes,
        "control",
        [value("x", floats, ["rows", 8])],
        [value("y", floats, ["rows", 8])],
        [*constants, stored["outer"]],
    )
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 11)], ir_version=6)
    onnx.checker.check_model(model)
    onnx.save(model, tmp_path / "model.onnx")

    bundle = compiled(tmp_path / "model.onnx", tmp_path / "bundle", frozen=None, stages=1)
    ps.export(bundle, onnx=tmp_path / "out.onnx")
    assert (tmp_path / "out.onnx").read_bytes() == (tmp_path / "model.onnx").read_bytes()
    with ps.open(bundle, timeout=TIMEOUT) as job:
        list(job.run(batches(3)))
        job.save(tmp_path / "ckpt")
        parameters = job.parameters()
    assert parameters.keys() == {"looped", "taken", "outer"}
    (tmp_path / "out.onnx").unlink()
    ps.export(bundle, checkpoint=tmp_path / "ckpt", onnx=tmp_path / "out.onnx")
    trained = onnx.load(tmp_path / "out.onnx")
    stored_now = {t.name: numpy_helper.to_array(t) for g in all_graphs(trained.graph) for t in g.initializer}
    assert all(bits(stored_now[name]) == bits(array) for name, array in parameters.items())
    assert bits(stored_now["left"]) == bits(weights["left"])
    x = batches(1)[0]["x"][:4]
    imported = import_onnx(tmp_path / "model.onnx", dims={"rows": 4})
    (expected,) = run_graph(imported.module.graphs["main"], {"x": x}, DictStore(imported.weights | parameters))
    np.testing.assert_allclose(outputs(tmp_path / "out.onnx", x)[0], expected, rtol=1e-5, atol=1e-6)
    assert np.abs(outputs(tmp_path / "model.onnx", x)[0] - expected).max() > 1e-3


def _value(name: str, kind: int = TensorProto.FLOAT, shape: tuple[int | str, ...] = ("rows", 8)) -> onnx.ValueInfoProto:
    return helper.make_tensor_value_info(name, kind, list(shape))


def _weight(seed: int, name: str = "w") -> onnx.TensorProto:
    return numpy_helper.from_array((np.random.default_rng(seed).standard_normal((8, 8)) * 0.4).astype(np.float32), name)


def _branch(name: str, seed: int, then: list[onnx.NodeProto] | None = None) -> onnx.GraphProto:
    """h times the weight `w` of this graph; and what `then` makes of that."""
    nodes = [helper.make_node("MatMul", ["h", "w"], [name if then is None else f"{name} inner"]), *(then or [])]
    return helper.make_graph(nodes, name, [], [_value(name)], [_weight(seed)])


def _namesakes(path, second):
    """Five weights called `w`: the model's own, those of two nodes, one in a branch in a branch, and one in the body of a loop that
    runs twice; and a `w` that no result depends on."""
    inner = helper.make_node(
        "If", ["no"], ["deep"], name="if", then_branch=_branch("never", 9), else_branch=_branch("deeper", 4)
    )
    kinds = [_value("i", TensorProto.INT64, ()), _value("go", TensorProto.BOOL, ()), _value("carried")]
    body = helper.make_graph(
        [helper.make_node("MatMul", ["carried", "w"], ["next"]), helper.make_node("Identity", ["go"], ["go on"])],
        "body",
        kinds,
        [_value("go on", TensorProto.BOOL, ()), _value("next")],
        [_weight(5)],
    )
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"]),
        helper.make_node(
            "If", ["yes"], ["a"], name="if", then_branch=_branch("first", 2), else_branch=_branch("other", 8)
        ),
        helper.make_node(
            "If",
            ["flag"],
            ["b"],
            name=second,
            then_branch=_branch("second", 3),
            else_branch=_branch("deep", 7, [inner]),
        ),
        helper.make_node("Add", ["a", "b"], ["c"]),
        helper.make_node("Loop", ["two", "", "c"], ["y"], name="loop", body=body),
    ]
    constants = [
        numpy_helper.from_array(np.array(v), n)
        for n, v in (("two", np.int64(2)), ("yes", np.bool_(True)), ("no", np.bool_(False)))
    ]
    flag = _value("flag", TensorProto.BOOL, ())
    graph = helper.make_graph(nodes, "namesakes", [_value("x"), flag], [_value("y")], [*constants, _weight(1)])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10), path)
    return path


def _run_onnx(path, feeds):
    model = onnx.load(path)
    model.graph.node[2].name = "another"  # onnxruntime does not read two nodes of one name
    return onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"]).run(None, feeds)


@pytest.mark.parametrize(("flag", "second"), [(True, "if too"), (False, "if too"), (True, "if"), (False, "")])
def test_weights_of_one_name_in_several_graphs_are_told_apart(tmp_path, flag, second):
    path = _namesakes(tmp_path / "model.onnx", second)
    imported = import_onnx(path, dims={"rows": 4})
    feeds = {"x": batches(1)[0]["x"][:4], "flag": np.array(flag)}
    (got,) = run_graph(imported.module.graphs["main"], feeds, DictStore(imported.weights))
    np.testing.assert_allclose(got, _run_onnx(path, feeds)[0], rtol=1e-5, atol=1e-6)

    model = ps.from_onnx(path, dims={"rows": 4}, known={"flag": flag})
    training = ps.Training(loss="mse", optimizer=ps.SGD(lr=0.05), microbatches=2)
    bundle = ps.compile(ps.plan(model, ps.Cluster.local(1), training), tmp_path / "bundle", backend="numpy")
    ps.export(bundle, onnx=tmp_path / "untrained.onnx")
    assert (tmp_path / "untrained.onnx").read_bytes() == path.read_bytes()
    with ps.open(bundle, timeout=TIMEOUT) as job:
        list(job.run(batches(2)))
        job.save(tmp_path / "ckpt")
        parameters = job.parameters()
    at = second or "If_2"
    used = {"w", "if/then/w", "loop/body/w"} | ({f"{at}/then/w"} if flag else {f"{at}/else/if/else/w"})
    if second == "if":  # the second one of a name gets a number
        used = {"w", "if/then/w", "if/then/w.1", "loop/body/w"}
    assert {model.imported.names.get(name, name) for name in parameters} == used
    ps.export(
        bundle, checkpoint=tmp_path / "ckpt", onnx=tmp_path / "out.onnx", safetensors=tmp_path / "out.safetensors"
    )
    assert onnx.load(tmp_path / "out.onnx").SerializeToString() != path.read_bytes()
    (expected,) = run_graph(
        model.module.graphs["main"], {"x": feeds["x"]}, DictStore(model.imported.weights | parameters)
    )
    np.testing.assert_allclose(_run_onnx(tmp_path / "out.onnx", feeds)[0], expected, rtol=1e-5, atol=1e-6)
    assert np.abs(_run_onnx(path, feeds)[0] - expected).max() > 1e-3
    written = map_tensors(tmp_path / "out.safetensors")
    assert written.keys() == used
    assert all(bits(written[model.imported.names.get(name, name)]) == bits(array) for name, array in parameters.items())


def test_a_weight_without_a_place_of_its_own_is_not_left_behind_in_silence(tmp_path):
    """A function that is called twice has it: there it is one weight for each call, and none of them is the model's `w`."""
    branches = {f"{word}_branch": _branch(word, seed) for word, seed in (("then", 1), ("else", 2))}
    function = helper.make_function(
        "mine",
        "Twist",
        ["h", "yes"],
        ["out"],
        [helper.make_node("If", ["yes"], ["out"], **branches)],
        [helper.make_opsetid("", 20)],
    )
    nodes = [helper.make_node("MatMul", ["x", "w"], ["g"])]
    nodes += [
        helper.make_node("Twist", [a, "yes"], [b], name=f"to {b}", domain="mine") for a, b in (("g", "h"), ("h", "y"))
    ]
    graph = helper.make_graph(
        nodes, "calls", [_value("x")], [_value("y")], [numpy_helper.from_array(np.array(True), "yes"), _weight(3)]
    )
    opsets = [helper.make_opsetid("", 20), helper.make_opsetid("mine", 1)]
    onnx.save(
        helper.make_model(graph, functions=[function], opset_imports=opsets, ir_version=10), tmp_path / "model.onnx"
    )

    imported = import_onnx(tmp_path / "model.onnx", dims={"rows": 4})
    x = batches(1)[0]["x"][:4]
    (got,) = run_graph(imported.module.graphs["main"], {"x": x}, DictStore(imported.weights))
    np.testing.assert_allclose(got, outputs(tmp_path / "model.onnx", x)[0], rtol=1e-5, atol=1e-6)
    bundle = compiled(tmp_path / "model.onnx", tmp_path / "bundle", frozen=None, stages=1)
    with pytest.raises(
        UsageError, match=r"these parameters stand in no one place of the model: to_h/If_0/then/w, to_y/If_0/then/w"
    ):
        ps.export(bundle, onnx=tmp_path / "out.onnx")
    ps.export(bundle, safetensors=tmp_path / "out.safetensors")
    assert map_tensors(tmp_path / "out.safetensors").keys() == {"w", "to_h/If_0/then/w", "to_y/If_0/then/w"}
