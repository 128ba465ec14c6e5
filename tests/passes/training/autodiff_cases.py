"""One operation per gradient rule with its meaning in torch, and the comparison: F then B in float64 against torch's autograd."""

from __future__ import annotations

import numpy as np
import torch
import torch.nn.functional as F

from penstock.ir.graph import Graph, Module, Op, Value, Var
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.store import DictStore
from penstock.ir.ops import make
from penstock.ir.types import TensorType, dtype_of
from penstock.ir.verify.verifier import check
from penstock.passes.training.autodiff import AutodiffOptions, autodiff

RNG = np.random.default_rng(11)
THE_OP = "/the/op"


def normal(*shape):
    return RNG.normal(size=shape)


def positive(*shape):
    return RNG.uniform(0.3, 2.0, size=shape)


# ---------------------------------------------------------------------------------------- building and running


def of_one_op(kind, arrays, attrs, outs=1, frozen=(), read=None):
    """main: loss = sum over (the first `read`) results of sum(result * weight), where float operands are parameters and the rest are inputs."""
    values = [Value(f"x{i}", TensorType(dtype_of(x.dtype), x.shape)) for i, x in enumerate(arrays)]
    is_param = [x.dtype == np.float64 and i not in frozen for i, x in enumerate(arrays)]
    ops = [Op("read", (), (v,), {"var": v.name}) for v, p in zip(values, is_param, strict=True) if p]
    ops.append(make(kind, values, [f"y{i}" for i in range(outs)], THE_OP, **attrs))
    ins = [v for v, p in zip(values, is_param, strict=True) if not p]
    total = None
    for y in [v for v in ops[-1].outs[:read] if v.type.dtype != "i64"]:
        weight = Value(f"{y.name}.weight", y.type)
        ins.append(weight)
        ops.append(make("mul", [y, weight], [f"{y.name}.weighted"]))
        ops.append(make("sum", [ops[-1].outs[0]], [f"{y.name}.sum"], axes=tuple(range(y.type.rank))))
        if total is not None:
            ops.append(make("add", [total, ops[-1].outs[0]], [f"{y.name}.total"]))
        total = ops[-1].outs[0]
    variables = {v.name: Var(v.name, v.type, "param") for v, p in zip(values, is_param, strict=True) if p}
    main = Graph("main", tuple(ins), (total,), tuple(ops))
    return Module("m", tuple(ins), (total.name,), vars=variables, graphs={"main": main})


def gradients(module, arrays, microbatches=1):
    """Gradients of the variables by F and B; `arrays` hold variables and inputs."""
    found = autodiff(module, AutodiffOptions(microbatches))
    check(found, ("typed", "differentiated"))
    store = DictStore({name: arrays[name] for name in module.vars})
    forward, backward = found.graphs["F"], found.graphs["B"]
    results = run_graph(forward, {v.name: arrays[v.name] for v in forward.ins}, store, "f64")
    values = {**arrays, **{v.name: x for v, x in zip(forward.results, results, strict=True)}}
    run_graph(backward, [values[v.name] for v in backward.ins], store, "f64")
    return {name: store.arrays[f"{name}.grad"] for name in module.vars if f"{name}.grad" in store.arrays}, float(
        results[0]
    )


def image(*shape):
    """All elements different, so that a maximum has no ties."""
    return RNG.permutation(int(np.prod(shape))).reshape(shape) / 7.0


CONV = {"strides": (2, 1), "pads": (1, 2, 1, 2), "dilations": (2, 1), "groups": 2}
POOL = {"window": (3, 2), "strides": (2, 1), "pads": (1, 1, 1, 1)}
MASK = normal(3, 4) > 0
INDEX = np.array([[0, -1, 2], [2, 2, 0]])
LABELS = RNG.integers(0, 5, size=(2, 3))
AWAY = np.sign(normal(3, 4)) * positive(3, 4)


def batch_norm(x, scale, bias, mean, variance):
    """Written out: torch's own has no gradient for the statistics."""
    scale, bias, mean, variance = (v[:, None, None] for v in (scale, bias, mean, variance))
    return (x - mean) / torch.sqrt(variance + 1e-3) * scale + bias


def scatter_add(x, indices, updates):
    return x.index_add(1, indices.flatten() % x.shape[1], updates.flatten(1))


def transposed(x, w):
    """Uneven padding: the symmetric result with more cut off in front."""
    full = F.conv_transpose2d(x, w, None, (2, 1), 0, (1, 0), 2, (1, 3))
    return full[:, :, 1:7, 2:8]


# kind, arrays, attrs, torch function
CASES = [
    ("neg", (normal(3, 4),), {}, torch.neg),
    ("abs", (AWAY,), {}, torch.abs),
    ("exp", (normal(3, 4),), {}, torch.exp),
    ("log", (positive(3, 4),), {}, torch.log),
    ("sqrt", (positive(3, 4),), {}, torch.sqrt),
    ("rsqrt", (positive(3, 4),), {}, torch.rsqrt),
    ("sin", (normal(3, 4),), {}, torch.sin),
    ("cos", (normal(3, 4),), {}, torch.cos),
    ("atan", (normal(3, 4),), {}, torch.atan),
    ("rem", (3 * normal(3, 4), normal(3, 4)), {}, torch.fmod),
    ("tanh", (normal(3, 4),), {}, torch.tanh),
    ("sigmoid", (normal(3, 4),), {}, torch.sigmoid),
    ("erf", (normal(3, 4),), {}, torch.erf),
    ("relu", (np.append(AWAY, 0.0),), {}, torch.relu),
    ("gelu", (normal(3, 4),), {}, F.gelu),
    ("gelu", (normal(3, 4),), {"approximate": "tanh"}, lambda x: F.gelu(x, approximate="tanh")),
    ("cast", (normal(3, 4).astype(np.float64),), {"dtype": "f32"}, lambda x: x * 1),
    ("add", (normal(2, 3, 4), normal(4)), {}, torch.add),
    ("add", (normal(3, 1), normal(2, 1, 4)), {}, torch.add),
    ("sub", (normal(4), normal(2, 3, 1)), {}, torch.sub),
    ("mul", (normal(2, 3, 4), normal(3, 1)), {}, torch.mul),
    ("mul", (np.array(0.7), normal(2, 3)), {}, torch.mul),
    ("div", (normal(3, 4), positive(2, 1, 4)), {}, torch.div),
    ("pow", (positive(3, 4), normal(4)), {}, torch.pow),
    ("pow", (np.array([0.0, 2.0, 0.0]), np.array([0.0, 0.0, 2.0])), {}, torch.pow),
    ("minimum", (normal(3, 4), normal(4)), {}, torch.minimum),
    ("maximum", (np.array([1.0, 2.0, 3.0]), np.array([3.0, 2.0, 1.0])), {}, torch.maximum),
    ("where", (MASK, normal(3, 4), normal(4)), {}, torch.where),
    ("where", (MASK, np.array(2.0), normal(3, 1)), {}, torch.where),
    ("reshape", (normal(2, 6),), {"shape": (3, 4)}, lambda x: x.reshape(3, 4)),
    ("transpose", (normal(2, 3, 4),), {"perm": (2, 0, 1)}, lambda x: x.permute(2, 0, 1)),
    ("broadcast", (normal(3, 1),), {"shape": (2, 3, 4)}, lambda x: x.expand(2, 3, 4)),
    ("slice", (normal(7, 5),), {"start": (1, 0), "stop": (6, 5), "step": (3, 2)}, lambda x: x[1:6:3, ::2]),
    ("slice", (normal(3, 5),), {"start": (1, 0), "stop": (1, 5), "step": (1, 1)}, lambda x: x[1:1]),
    ("pad", (normal(2, 3),), {"low": (1, 0), "high": (0, 2)}, lambda x: F.pad(x, (0, 2, 1, 0))),
    (
        "pad",
        (normal(2, 3),),
        {"low": (0, 1), "high": (0, 1), "inner": (0, 1)},
        lambda x: F.pad(torch.stack([x, x * 0], -1).reshape(2, 6), (1, 0)),
    ),
    ("concat", (normal(2, 3), normal(2, 1), normal(2, 2)), {"axis": -1}, lambda *x: torch.cat(x, -1)),
    ("sum", (normal(2, 3, 4),), {"axes": (0, -1)}, lambda x: x.sum((0, -1))),
    ("mean", (normal(2, 3, 4),), {"axes": (1,), "keep": True}, lambda x: x.mean(1, keepdim=True)),
    ("mean", (normal(2, 3, 4),), {"axes": (0, 1, 2)}, lambda x: x.mean()),
    ("max", (image(2, 3, 4),), {"axes": (-1, 0)}, lambda x: x.amax((-1, 0))),
    (
        "max",
        (np.array([[1.0, 3.0, 3.0], [2.0, 2.0, 2.0]]),),
        {"axes": (1,), "keep": True},
        lambda x: x.amax(1, keepdim=True),
    ),
    ("matmul", (normal(3, 4), normal(4, 2)), {}, torch.matmul),
    ("matmul", (normal(4, 3), normal(4, 2)), {"ta": True}, lambda a, b: a.mT @ b),
    ("matmul", (normal(3, 4), normal(2, 4)), {"tb": True}, lambda a, b: a @ b.mT),
    ("matmul", (normal(4, 3), normal(2, 4)), {"ta": True, "tb": True}, lambda a, b: a.mT @ b.mT),
    ("matmul", (normal(5, 2, 3, 4), normal(4, 2)), {}, torch.matmul),
    ("matmul", (normal(5, 3, 4), normal(2, 4)), {"tb": True}, lambda a, b: a @ b.mT),
    ("matmul", (normal(5, 4, 3), normal(2, 4)), {"ta": True, "tb": True}, lambda a, b: a.mT @ b.mT),
    ("matmul", (normal(3, 4), normal(5, 4, 2)), {}, torch.matmul),
    ("matmul", (normal(1, 2, 3, 4), normal(5, 1, 4, 2)), {}, torch.matmul),
    (
        "conv",
        (normal(2, 3, 9), normal(5, 3, 4)),
        {"strides": (3,), "pads": (2, 2)},
        lambda x, w: F.conv1d(x, w, None, 3, 2),
    ),
    (
        "conv",
        (normal(2, 4, 7, 6), normal(6, 2, 3, 2)),
        CONV,
        lambda x, w: F.conv2d(x, w, None, (2, 1), (1, 2), (2, 1), 2),
    ),
    ("max_pool", (image(2, 2, 7, 6),), POOL, lambda x: F.max_pool2d(x, (3, 2), (2, 1), (1, 1))),
    (
        "avg_pool",
        (normal(2, 2, 7, 6),),
        POOL,
        lambda x: F.avg_pool2d(x, (3, 2), (2, 1), (1, 1), count_include_pad=False),
    ),
    (
        "avg_pool",
        (normal(2, 2, 7, 6),),
        {**POOL, "include_pad": True},
        lambda x: F.avg_pool2d(x, (3, 2), (2, 1), (1, 1)),
    ),
    ("softmax", (normal(2, 3, 4),), {"axis": 1}, lambda x: F.softmax(x, 1)),
    ("log_softmax", (normal(2, 3, 4),), {"axis": -2}, lambda x: F.log_softmax(x, -2)),
    (
        "batch_norm",
        (normal(2, 3, 4, 5), normal(3), normal(3), normal(3), positive(3)),
        {"eps": 1e-3},
        batch_norm,
    ),
    ("gather", (normal(4, 5), INDEX), {"axis": 1}, lambda x, i: x[:, i]),
    ("gather", (normal(6, 2), INDEX), {}, lambda x, i: x[i]),
    ("mse", (normal(3, 4), normal(3, 4)), {}, F.mse_loss),
    ("cumsum", (normal(3, 4),), {"axis": 1}, lambda x: x.cumsum(1)),
    (
        "cumsum",
        (normal(3, 4),),
        {"axis": 0, "reverse": True, "exclusive": True},
        lambda x: x.flip(0).cumsum(0).flip(0) - x,
    ),
    ("scatter", (normal(5, 4), np.array([3, 0]), normal(2, 4)), {}, lambda x, i, u: x.index_copy(0, i, u)),
    ("scatter", (normal(3, 5), INDEX, normal(3, 2, 3)), {"axis": 1, "add": True}, scatter_add),
    (
        "conv_grad_input",
        (normal(2, 4, 3, 5), normal(4, 3, 3, 2)),
        {"shape": (2, 6, 6, 6), "strides": (2, 1), "pads": (1, 2, 1, 0), "dilations": (1, 3), "groups": 2},
        transposed,
    ),
]


def reference(function, arrays, weights):
    tensors = [torch.tensor(x, requires_grad=x.dtype == np.float64) for x in arrays]
    results = function(*tensors)
    results = results if isinstance(results, tuple) else (results,)
    sum((y * torch.tensor(w)).sum() for y, w in zip(results, weights, strict=True)).backward()
    return {f"x{i}": t.grad.numpy() for i, t in enumerate(tensors) if t.requires_grad and t.grad is not None}


def compare(kind, arrays, attrs, function, outs=1, frozen=(), rtol=1e-9, read=None):
    module = of_one_op(kind, arrays, attrs, outs, frozen, read)
    weights = {v.name: normal(*v.type.shape) for v in module.inputs if v.name.endswith(".weight")}
    inputs = {f"x{i}": x for i, x in enumerate(arrays)} | weights
    found, _ = gradients(module, inputs)
    expected = reference(function, arrays, list(weights.values()))
    assert set(found) == set(expected) - {f"x{i}" for i in frozen}
    for name, grad in found.items():
        np.testing.assert_allclose(grad, expected[name], rtol=rtol, atol=1e-12, err_msg=name)
