"""Weights that never change, in an order of the kernel's own: the same results, packed once."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.numpy_backend import NumpyProgram
from penstock.backends.tvm.group import PACKED
from penstock.backends.tvm.kernels.product import packed_table
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.run.load import TvmProgram
from penstock.backends.tvm.target import PORTABLE, machine_of
from penstock.ir.graph import Graph, Module, Op, Value, Var
from penstock.ir.ops import make
from penstock.ir.types import parse_type
from penstock.passes.kernels.fuse import FuseOptions, fuse
from penstock.support.errors import VerifyError

from .cases import build, compare, difference, make_args, to_torch, value


class Writer:
    """Operations of a graph that reads variables."""

    def __init__(self) -> None:
        self.ops: list[Op] = []
        self.vars: dict[str, Var] = {}

    def __call__(self, kind: str, *ins: Value, **attrs: object) -> Value:
        self.ops.append(make(kind, ins, [f"v{len(self.ops)}"], "", **attrs))  # type: ignore[arg-type]
        return self.ops[-1].outs[0]

    def read(self, name: str, text: str) -> Value:
        self.vars[name] = Var(name, parse_type(text), "param")
        out = value(f"v{len(self.ops)}", text)
        self.ops.append(Op("read", (), (out,), {"var": name}))
        return out

    def write(self, given: Value, name: str) -> None:
        self.ops.append(Op("write", (given,), (), {"var": name}))

    def fused(self, ins: Sequence[Value], outs: Sequence[Value]) -> Graph:
        graph = Graph("s0.F", tuple(ins), tuple(outs), tuple(self.ops), ())
        return fuse(Module("m", graphs={graph.name: graph}, vars=self.vars), FuseOptions()).graphs[graph.name]


def packed_kernels(graph: Graph) -> int:
    return sum(step.kernel.packing is not None for step in plan_kernels(graph, machine_of("host")).steps)


def linear(rows: int, columns: int, length: int, turned: bool, dtype: str = "f32") -> Graph:
    w = Writer()
    x = value("x", f"{dtype}[2,{rows},{length}]")
    weight = w.read("w", f"{dtype}[{columns},{length}]" if turned else f"{dtype}[{length},{columns}]")
    made = w("matmul", x, w("transpose", weight, perm=(1, 0)) if turned else weight)
    return w.fused((x,), (w("add", made, w.read("b", f"{dtype}[{columns}]")),))


def convolution(
    channels: int, filters: int, size: int, window: int, stride: int, groups: int = 1, images: int = 2
) -> Graph:
    w = Writer()
    x = value("x", f"f32[{images},{channels},{size},{size + 2}]")
    weight = w.read("w", f"f32[{filters},{channels // groups},{window},{window}]")
    made = w("conv", x, weight, strides=(stride, stride), pads=(window // 2,) * 4, groups=groups)
    return w.fused((x,), (w("relu", w("add", made, w.read("b", f"f32[{filters},1,1]"))),))


GRAPHS: dict[str, Callable[[], Graph]] = {
    "whole panels": lambda: linear(64, 256, 96, False),
    "weights along the sum": lambda: linear(64, 256, 96, True),
    "ragged": lambda: linear(33, 107, 51, False),
    "ragged, along the sum": lambda: linear(33, 107, 51, True),
    "few columns left": lambda: linear(33, 67, 51, False),
    "few columns left, along the sum": lambda: linear(33, 67, 51, True),
    "sum in blocks": lambda: linear(40, 70, 5000, False),
    "sum in blocks, along the sum": lambda: linear(40, 70, 5000, True),
    "double precision": lambda: linear(33, 107, 51, True, "f64"),
    "half precision": lambda: linear(33, 107, 51, False, "bf16"),
}
CONVOLUTIONS: dict[str, Callable[[], Graph]] = {
    "3x3": lambda: convolution(32, 64, 14, 3, 1),
    "3x3, many positions": lambda: convolution(64, 80, 40, 3, 1),
    "3x3, stride 2": lambda: convolution(32, 48, 15, 3, 2),
    "3x3, small": lambda: convolution(64, 96, 5, 3, 1),
    "7x7 of 3 channels": lambda: convolution(3, 40, 31, 7, 2),
    "one tap": lambda: convolution(64, 96, 16, 1, 1),
    "one tap, one image": lambda: convolution(320, 50, 37, 1, 1, 1, 1),
    "one tap, groups": lambda: convolution(64, 44, 20, 1, 1, 2, 1),
    "one tap, three images": lambda: convolution(48, 30, 33, 1, 1, 1, 3),
    "one tap, few positions": lambda: convolution(32, 48, 2, 1, 1),
    "one tap, small": lambda: convolution(64, 96, 7, 1, 1),
    "one tap, stride 2": lambda: convolution(64, 96, 14, 1, 2),
    "few filters": lambda: convolution(24, 8, 20, 3, 1),
    "groups": lambda: convolution(32, 64, 14, 3, 1, 4),
    "channels apart": lambda: convolution(32, 32, 14, 3, 1, 32),
    "channels apart, one image": lambda: convolution(32, 32, 14, 3, 1, 32, 1),
    "3x3, one image": lambda: convolution(64, 80, 20, 3, 1, 1, 1),
}


# Ragged sizes in one order or the other, and few of the shapes that take the same way.
SLOW = ("ragged, along the sum", "few columns left", "sum in blocks", "3x3, many positions", "one tap, three images")


def named(graphs: Iterable[str]) -> list[object]:
    return [pytest.param(name, marks=pytest.mark.slow if name in SLOW else ()) for name in graphs]


def on_tiles(graph: Graph) -> bool:
    """Whether the kernel multiplies on tile registers."""
    return "tdpbf16ps" in plan_kernels(graph, machine_of("host")).steps[0].kernel.function.script()


def same_as_unpacked(program: TvmProgram, graph: Graph, arrays: Sequence[np.ndarray], folder: Path) -> bool:
    """Whether the results are those of kernels that pack for themselves, bit by bit. With little to do packing decides whether tile registers
    are worth it, and then the two add up in different order."""
    bare = replace(graph, ops=tuple(op.with_attrs(packed=None) for op in graph.ops))
    if on_tiles(graph) != on_tiles(bare):
        return not compare(build([bare], folder / "bare"), bare, arrays)
    args = [to_torch(a) for a in arrays]
    (ours,), (theirs,) = program.call(graph.name, args), build([bare], folder / "bare").call(graph.name, args)
    return torch.equal(ours, theirs)


@pytest.mark.parametrize("name", named(GRAPHS))
def test_packed_products_give_the_same(name: str, tmp_path: Path) -> None:
    graph = GRAPHS[name]()
    arrays = make_args(graph, np.random.default_rng(1))
    program = build([graph], tmp_path)
    # In half precision the interpreter sums in another order, and a processor with tile registers packs for those.
    if graph.outs[0].type.dtype != "bf16":
        assert packed_kernels(graph) == 1
        assert not compare(program, graph, arrays)
    assert same_as_unpacked(program, graph, arrays, tmp_path)


@pytest.mark.parametrize("name", named(CONVOLUTIONS))
def test_packed_convolutions_give_the_same(name: str, tmp_path: Path) -> None:
    graph = CONVOLUTIONS[name]()
    arrays = make_args(graph, np.random.default_rng(2))
    program = build([graph], tmp_path)
    assert not compare(program, graph, arrays)
    assert same_as_unpacked(program, graph, arrays, tmp_path)


@pytest.mark.parametrize("target", ["x86-64-v2", "portable"])
def test_other_processors(target: str, tmp_path: Path) -> None:
    for name in ("ragged", "sum in blocks, along the sum"):
        graph = GRAPHS[name]()
        assert not compare(build([graph], tmp_path / name, target), graph, make_args(graph, np.random.default_rng(3)))
    for name in ("one tap, one image", "channels apart, one image"):
        graph = CONVOLUTIONS[name]()
        assert not compare(build([graph], tmp_path / name, target), graph, make_args(graph, np.random.default_rng(3)))


def test_held_weights_are_packed_once(tmp_path: Path) -> None:
    """After `hold`, calls with the same tensors see what was packed, also if somebody breaks the promise; other tensors are packed anew."""
    graph = linear(64, 256, 96, False)
    program = build([graph], tmp_path)
    x, weight, bias = (torch.tensor(a) for a in make_args(graph, np.random.default_rng(4)))
    before = program.call(graph.name, [x, weight, bias])[0].clone()
    program.hold(graph.name, [weight, bias])
    assert torch.equal(program.call(graph.name, [x, weight, bias])[0], before)
    other = torch.tensor(make_args(graph, np.random.default_rng(5))[1])
    (expected,) = NumpyProgram([graph]).call(graph.name, [x, other, bias])
    assert not difference(program.call(graph.name, [x, other, bias])[0], expected)
    weight.zero_()
    assert torch.equal(program.call(graph.name, [x, weight, bias])[0], before)
    program.hold(graph.name, [weight, bias])
    assert not torch.equal(program.call(graph.name, [x, weight, bias])[0], before)
    # Both ways in say the same of what does not fit.
    for wrong in (weight.double(), weight[1:].clone()):
        for way in (
            lambda wrong: program.hold(graph.name, [wrong, bias]),
            lambda wrong: program.call(graph.name, [x, wrong, bias]),
        ):
            with pytest.raises(VerifyError, match=r"argument 1 must be f32\[.*\], it is torch\.float"):
                way(wrong)
    with pytest.raises(VerifyError, match="argument 2 is on meta"):
        program.hold(graph.name, [weight, bias.to("meta")])
    with pytest.raises(VerifyError, match="has 2 slots, got 1 tensors"):
        program.hold(graph.name, [weight])


@pytest.mark.parametrize("held", [True, False])
def test_a_bound_graph_takes_its_inputs_alone(held: bool, tmp_path: Path) -> None:
    """Results are those of the interpreter, whether operands were packed before or not; what does not fit is the error of a call."""
    graph = linear(64, 256, 96, False)
    program = build([graph], tmp_path)
    x, weight, bias = (torch.tensor(a) for a in make_args(graph, np.random.default_rng(4)))
    (expected,) = NumpyProgram([graph]).call(graph.name, [x, weight, bias])
    if held:
        program.hold(graph.name, [weight, bias])
    call = program.bind(graph.name, [weight, bias])
    assert not difference(call([x])[0], expected)
    assert torch.equal(NumpyProgram([graph]).bind(graph.name, [weight, bias])([x])[0], expected)
    apart = x.repeat_interleave(2, -1)[..., ::2]
    assert not difference(call([apart])[0], expected)
    # Packed before, the operands are as they were then; otherwise as they are. Other slots are other numbers.
    weight.zero_()
    assert (not difference(call([x])[0], expected)) == held
    other = program.bind(graph.name, [torch.ones_like(weight), bias])([x])[0]
    assert difference(other, expected)
    with pytest.raises(VerifyError, match=r"argument 0 must be f32\[.*\], it is torch\.float64"):
        call([x.double()])
    for wrong in (bias.double(), bias[1:].clone(), bias[None]):
        with pytest.raises(VerifyError, match=r"argument 2 must be f32\[.*\], it is torch\.float"):
            program.bind(graph.name, [weight, wrong])
        with pytest.raises(VerifyError, match=r"argument 2 must be f32\[.*\], it is torch\.float"):
            program.call(graph.name, [x, weight, wrong])
    with pytest.raises(VerifyError, match="takes 1 inputs and 2 slots, got 4 tensors"):
        call([x, x])
    with pytest.raises(VerifyError, match="argument 0 is on meta"):
        call([x.to("meta")])
    with pytest.raises(VerifyError, match="argument 2 is on meta"):
        program.bind(graph.name, [weight, bias.to("meta")])
    with pytest.raises(VerifyError, match="has 2 slots, got 1 tensors"):
        program.bind(graph.name, [weight])


def test_one_variable_in_two_orders(tmp_path: Path) -> None:
    """A tied weight: looked up, multiplied as it is and the other way round, by rows few and many."""
    w = Writer()
    tokens, x = value("tokens", "i64[3,20]"), value("x", "f32[40,96]")
    weight = w.read("w", "f32[5,96]")
    wide = w("matmul", x, w("transpose", weight, perm=(1, 0)))
    outs = (w("gather", weight, tokens), wide, w("matmul", wide, weight))
    graph = w.fused((tokens, x), outs)
    assert packed_kernels(graph) == 2
    assert not compare(build([graph], tmp_path), graph, make_args(graph, np.random.default_rng(6)))


TABLES = {
    "whole panels": (256, 96, "f32"),
    "ragged": (107, 51, "f32"),
    "few rows left": (67, 51, "f32"),
    "rows in blocks": (70, 5000, "f32"),
    "double precision": (107, 51, "f64"),
    "half precision": (107, 51, "bf16"),
}


def tied(words: int, width: int, dtype: str, turned: bool, number: int = 4) -> Graph:
    """Rows of a table are looked up, and multiplied."""
    w = Writer()
    tokens, x = value("tokens", f"i64[{number},1]"), value("x", f"{dtype}[9,{width}]")
    table = w.read("w", f"{dtype}[{words},{width}]")
    found = w("neg", w("gather", table, tokens))
    head = w("matmul", x, w("transpose", table, perm=(1, 0))) if turned else w("matmul", x, table, tb=True)
    return w.fused((tokens, x), (found, head))


def tied_case(graph: Graph, words: int) -> list[np.ndarray]:
    args = make_args(graph, np.random.default_rng(7))
    # Negative ones count from the end, and the last rows lie in a panel of their own.
    args[0] = np.random.default_rng(8).integers(-words, words, args[0].shape)
    args[0].flat[:3] = (0, words - 1, -words)
    return args


@pytest.mark.skipif(machine_of("host").has_tiles, reason="products with tile registers have another order")
@pytest.mark.parametrize(
    "name", [pytest.param(n, marks=pytest.mark.slow if n != "few rows left" else ()) for n in TABLES]
)
def test_a_tied_table_is_there_once(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    words, width, dtype = TABLES[name]
    for turned in (False, True):
        graph = tied(words, width, dtype, turned)
        assert packed_kernels(graph) == 2
        program = build([graph], tmp_path / f"{turned}")
        assert program.unread({graph.name: ["w"]}) == {"w"}
        forms = program._forms.graphs[graph.name].forms
        assert len({form.key for form in forms}) == 1
        assert not compare(program, graph, tied_case(graph, words))
    # Many rows are looked up where they lie.
    assert packed_kernels(tied(words, width, dtype, False, words // 16 + 1)) == 1
    # The control: the place of the element beside it.
    right = packed_table._position
    monkeypatch.setattr(packed_table, "_position", lambda tiled, k, j: right(tiled, (k + 1) % width, j))
    assert compare(build([graph], tmp_path / "wrong"), graph, tied_case(graph, words))


def test_what_changes_is_not_packed_ahead() -> None:
    """A variable that is written anywhere in the module, an operand that is computed, and one that is the left operand."""
    w = Writer()
    x = value("x", "f32[96,96]")
    weight, other = w.read("w", "f32[96,96]"), w.read("other", "f32[96,96]")
    y = w("matmul", w("matmul", other, w("relu", weight)), x)
    assert not any(PACKED in op.attrs for op in w.fused((x,), (y,)).ops)
    w = Writer()
    weight = w.read("w", "f32[96,96]")
    y = w("matmul", x, weight)
    assert any(PACKED in op.attrs for op in w.fused((x,), (y,)).ops)
    w.write(w("relu", weight), "w")
    assert not any(PACKED in op.attrs for op in w.fused((x,), (y,)).ops)


def test_the_elements_of_packed_weights_can_be_let_go(tmp_path: Path) -> None:
    """A stand-in takes the place of a weight that only a packed operand is made of; it has no memory, and is no weight."""
    graph = linear(20, 256, 96, True)
    program = build([graph], tmp_path)
    x, weight, bias = (torch.tensor(a) for a in make_args(graph, np.random.default_rng(4)))
    before = program.call(graph.name, [x, weight, bias])[0].clone()
    assert program.hold(graph.name, [weight, bias]) == {0}
    empty = program.stand_in(graph.name, 0)
    assert (empty.shape, empty.dtype, empty.is_contiguous()) == (weight.shape, weight.dtype, True)
    assert torch.equal(program.call(graph.name, [x, empty, bias])[0], before)
    assert torch.equal(program.bind(graph.name, [empty, bias])([x])[0], before)
    # Other tensors beside it were never packed with what it stood for.
    other = torch.ones_like(weight)
    (expected,) = NumpyProgram([graph]).call(graph.name, [x, other, bias])
    assert not difference(program.call(graph.name, [x, other, bias])[0], expected)
    with pytest.raises(VerifyError, match="its own elements let go"):
        program.hold(graph.name, [empty, bias])


def test_graphs_that_pack_alike_share_what_is_packed(tmp_path: Path) -> None:
    """One row and many read the same panels; a changed weight, or another one, is packed anew. On tile registers many
    rows would read others, so the code is portable."""
    one, many = (replace(linear(rows, 256, 96, True), name=f"s0.F{rows}") for rows in (1, 40))
    program = build([one, many], tmp_path, PORTABLE)
    _, weight, bias = (torch.tensor(a) for a in make_args(one, np.random.default_rng(4)))
    held = program._forms
    for graph in (one, many):
        program.hold(graph.name, [weight, bias])
    (first,), (second,) = (held.held(graph.name, [weight, bias]) or () for graph in (one, many))
    assert first.data_ptr() == second.data_ptr()
    weight += 1
    program.hold(many.name, [weight, bias])
    (third,) = held.held(many.name, [weight, bias]) or ()
    assert third.data_ptr() != first.data_ptr()
    x = torch.ones(2, 40, 96)
    (expected,) = NumpyProgram([many]).call(many.name, [x, weight, bias])
    assert not difference(program.call(many.name, [x, weight, bias])[0], expected)
