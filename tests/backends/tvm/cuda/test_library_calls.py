"""Products, convolutions and attention of whole models reach the vendor's libraries: calls in the plan are counted, not annotations."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from replay.models import Llama

from penstock import api
from penstock.backends.tvm.cuda.target import device_machine
from penstock.backends.tvm.group import LibraryCall
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.frontends.training import Training
from penstock.inspection.kernels.kernels import format_report, kernel_rows
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Graph, Module, Op, Value
from penstock.ir.ops import OPS, cost_of, make
from penstock.ir.training.optimizers import AdamW
from penstock.ir.types import TensorType
from penstock.models import write_bert, write_gpt, write_resnet
from penstock.passes.kernels import fuse
from penstock.passes.kernels.libraries import LibrariesOptions, libraries
from penstock.support.errors import UnsupportedModel

# From here on a contraction has to be a call.
LARGE = 1e6
CONTRACTIONS = ("matmul", "conv", "conv_grad_input", "conv_grad_weight", "attention", "attention_grad")


def gpt(folder: Path) -> api.Model:
    sizes = {"layers": 2, "width": 64, "heads": 2, "vocab": 203, "positions": 64}
    return api.from_onnx(write_gpt(folder / "gpt.onnx", batch=2, **sizes))


def bert(folder: Path) -> api.Model:
    sizes = {"layers": 2, "width": 64, "heads": 2, "vocab": 200, "positions": 64, "classes": 3}
    return api.from_onnx(write_bert(folder / "bert.onnx", 2, **sizes))


def resnet(folder: Path) -> api.Model:
    return api.from_onnx(write_resnet(folder / "resnet.onnx", 4, blocks=(1, 1), width=32, size=64, classes=10))


def llama(folder: Path) -> api.Model:
    return api.from_torch(Llama(64, 203, 64), (torch.zeros(2, 64, dtype=torch.int64),))


MODELS: dict[str, Callable[[Path], api.Model]] = {"gpt": gpt, "bert": bert, "resnet": resnet, "llama": llama}


def planned(folder: Path, model: str, precision: str, training: bool) -> Module:
    how = Training(loss="cross_entropy", optimizer=AdamW(lr=0.1), microbatches=2) if training else None
    place = Cluster.listed("sm_90")
    return api.plan(MODELS[model](folder), place, how, precision=precision, cuda_libraries="torch").module


def contractions(module: Module) -> list[tuple[Op, bool]]:
    """All contractions of a module's stages, each with whether the plan calls a library for it."""
    result = []
    for graph in module.graphs.values():
        for step in plan_kernels(graph, device_machine("sm_90")).steps if "." in graph.name else ():
            called = isinstance(step.kernel.function, LibraryCall)
            result += [(op, called) for op in step.group.ops if op.kind in CONTRACTIONS]
    return result


def products_added(module: Module) -> int:
    """The products that a library adds to a variable, in the call that makes them."""
    steps = [s for g in module.graphs.values() if "." in g.name for s in plan_kernels(g, device_machine("sm_90")).steps]
    calls = [step for step in steps if isinstance(step.kernel.function, LibraryCall)]
    return sum(any(op.kind == "accum" for op in step.group.ops) for step in calls)


@pytest.mark.parametrize("training", [True, False], ids=["training", "inference"])
@pytest.mark.parametrize("precision", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("model", MODELS)
def test_every_large_contraction_is_a_library_call(model: str, precision: str, training: bool, tmp_path: Path) -> None:
    module = planned(tmp_path, model, precision, training)
    made = contractions(module)
    assert not training or products_added(module) >= (1 if model == "resnet" else 9)
    large = [(op, called) for op, called in made if cost_of(op).flops > LARGE]
    assert not [f"{op.kind} at {op.loc}" for op, called in large if not called]
    # The models are large enough to say something.
    kinds = {op.kind for op, _ in large}
    assert kinds >= ({"conv"} if model == "resnet" else {"matmul", "attention"})
    assert not training or kinds >= ({"conv_grad_input", "conv_grad_weight"} if model == "resnet" else {"matmul"})
    if precision != "f32":
        assert {op.outs[0].type.dtype for op, _ in large} >= {precision}
    # What is promised, what is called and what is told are one number.
    promised = sum("library" in op.attrs for graph in module.graphs.values() for op in graph.ops)
    assert promised == sum(called for _, called in made)
    told = "\n".join(note.text for note in module.notes if note.origin == "libraries")
    assert told.count("by a kernel of Penstock") == len(made) - promised


def test_a_promise_that_cannot_be_kept_is_an_error(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: casts are computed where libraries read them, as for kernels of ours."""
    monkeypatch.setattr(fuse._Fuser, "_library_reads", lambda self, value: False)
    monkeypatch.setattr(
        fuse._Fuser, "_packs", lambda self, op: op.kind in fuse._PACKING or OPS[op.kind].family == "layout"
    )
    module = planned(tmp_path, "gpt", "bf16", False)
    with pytest.raises(
        UnsupportedModel, match=r"matmul %.* is promised to torch, and cannot go there: cast is not a view"
    ):
        contractions(module)


def test_what_no_library_can_compute_is_told(tmp_path: Path) -> None:
    """A product with an operand of one constant, and one of whole numbers."""
    half, whole = TensorType("f16", (8, 8)), Value("w", TensorType("i32", (8, 8)))
    q, k = (Value(name, half) for name in "qk")
    number = make("const", [], ["n"], "", value=0.5, dtype="f16")
    spread = make("broadcast", number.outs, ["b"], "", shape=half.dims)
    products = [
        make("matmul", operands, [name], "")
        for name, operands in {"x": [whole, whole], "y": [q, spread.outs[0]], "z": [q, k]}.items()
    ]
    graph = Graph("s0.F", (q, k, whole), tuple(p.outs[0] for p in products), (number, spread, *products))
    module = planned(tmp_path, "gpt", "f32", False).but(graphs={"s0.F": graph}, vars={})
    module = fuse.fuse(libraries(module, LibrariesOptions()), fuse.FuseOptions())
    notes = [note.text for note in module.notes if note.origin == "libraries"][-3:]
    assert notes == [
        "@s0.F: 1 matmul by torch",
        "@s0.F: matmul %x by a kernel of Penstock: libraries have none of i32",
        "@s0.F: matmul %y by a kernel of Penstock: an operand is made of one constant, and is nowhere in memory",
    ]
    assert {op.outs[0].name: called for op, called in contractions(module)} == {"x": False, "y": False, "z": True}
    module = replace(module, facts=frozenset({*module.facts, "fused"}))
    report = format_report(kernel_rows(module), module)
    assert "s0.F: 1 of 3 products, convolutions and attentions by torch" in report
    assert all(note.removeprefix("@") in report for note in notes[1:])
