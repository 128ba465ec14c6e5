"""Costs: against arithmetic by hand, conserved when they are shared out, and asked of the right source."""

from __future__ import annotations

from dataclasses import replace

import pytest

import penstock as ps
from penstock.ir.cluster.cluster import Cluster, Device, Link
from penstock.ir.cluster.gpus import sheet_of
from penstock.ir.graph import Graph, Module, Op, Value
from penstock.ir.ops import cost_of, make
from penstock.ir.schedule import COMPUTE
from penstock.ir.text import parse_module, print_module
from penstock.ir.types import TensorType, parse_type
from penstock.models import write_gpt
from penstock.passes.costs.prices import (
    ATTENTION,
    CONVOLUTIONS,
    EFFICIENCY,
    ELEMENTS,
    LAYOUT,
    PRODUCTS,
    SQUARES,
    TENSOR_CORES,
    UPDATES,
    GraphCost,
    InTurn,
    Transfer,
    alone,
    bound,
    by_simulation,
    cost,
    efficiency_of,
    family_of,
    graph_seconds,
    op_seconds,
    rank_seconds,
    shown_seconds,
    work_of,
)  # fmt: skip
from penstock.passes.kernels.divide import Kernel, kernels_of
from penstock.support.errors import UsageError

DEVICE = Device("cpu:0", flops=1e9, bandwidth=1e8, overhead=1e-3, call_overhead=5e-2, efficiency=(("products", 0.5), ("products.bf16", 2.0), ("elements", 0.1), ("products.bytes", 0.25), ("elements.bytes", 0.5)))  # fmt: skip


def value(name: str, text: str) -> Value:
    return Value(name, parse_type(text))


def layer(dtype: str = "f32", rows: int = 64) -> Graph:
    """relu(a b), then its sum: the sum stands in a kernel of its own."""
    a, b = value("a", f"{dtype}[{rows},32]"), value("b", f"{dtype}[32,128]")
    product = make("matmul", (a, b), ["y"])
    active = make("relu", product.outs, ["z"])
    turned = make("transpose", active.outs, ["t"], "", perm=(1, 0))
    total = make("sum", turned.outs, ["s"], "", axes=(0,))
    return Graph("main", (a, b), (*active.outs, *total.outs), (product, active, turned, total))


@pytest.fixture(scope="module")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Module:
    path = write_gpt(tmp_path_factory.mktemp("cost") / "gpt.onnx", layers=2, width=32, heads=2, vocab=40, positions=12)
    training = ps.Training("cross_entropy", ps.AdamW(lr=0.01), 2)
    return ps.plan(ps.from_onnx(path, dims={"batch": 2}), Cluster.local(2), training).module


def test_a_kernel_is_its_work_by_the_shares_of_its_device() -> None:
    first, second = GraphCost(layer()).kernels
    assert [op.kind for op in first.ops] == ["matmul", "relu"]
    flops, moved = 2 * 64 * 128 * 32, 4 * (64 * 32 + 32 * 128 + 64 * 128)
    arithmetic, memory = flops / (1e9 * 0.5) + 64 * 128 / (1e9 * 0.1), moved / (1e8 * 0.25)
    # A product on a CPU waits for a part of its bytes.
    by_hand = max(arithmetic, memory) + 0.6 * min(arithmetic, memory) + 1e-3
    assert cost(first, DEVICE) == pytest.approx((by_hand, moved), rel=1e-12)
    # The sum reads the result through the transpose, which has no memory.
    assert cost(second, DEVICE) == pytest.approx(
        (4 * (64 * 128 + 64) / (1e8 * 0.5) + 1e-3, 4 * (64 * 128 + 64)), rel=1e-12
    )
    assert graph_seconds(layer(), DEVICE) == pytest.approx(
        5e-2 + sum(cost(k, DEVICE).seconds for k in (first, second)), rel=1e-12
    )
    # One on a GPU does not.
    assert cost(first, replace(DEVICE, kind="cuda")).seconds == pytest.approx(max(arithmetic, memory) + 1e-3, rel=1e-12)
    # Bound by arithmetic when memory is fast; and the bound is below every price.
    fast = replace(DEVICE, bandwidth=1e15)
    assert cost(first, fast).seconds == pytest.approx(flops / 5e8 + 64 * 128 / 1e8 + 1e-3, rel=1e-6)
    assert bound(first.body.ops, moved, DEVICE) == max((flops + 64 * 128) / 1e9, moved / 1e8) < by_hand


def test_shares_are_by_family_and_element_type() -> None:
    assert efficiency_of(DEVICE, "products", "f32") == 0.5
    assert efficiency_of(DEVICE, "products", "bf16") == 2.0
    assert efficiency_of(DEVICE, "products", "bytes") == 0.25
    # What a device does not say is the usual; the share of operations is not that of bytes.
    assert efficiency_of(DEVICE, ATTENTION, "f32") == EFFICIENCY[ATTENTION]
    assert efficiency_of(DEVICE, LAYOUT, "bytes") == EFFICIENCY["layout.bytes"]
    assert efficiency_of(Device("d"), "products", "bytes") == EFFICIENCY["products.bytes"]
    fast = replace(DEVICE, bandwidth=1e15)
    wide, narrow = (GraphCost(layer(dtype)).kernels[0] for dtype in ("f32", "bf16"))
    ratio = (cost(wide, fast).seconds - 1e-3 - 64 * 128 / 1e8) / (cost(narrow, fast).seconds - 1e-3 - 64 * 128 / 1e8)
    assert ratio == pytest.approx(4.0, rel=1e-6)


def test_every_operation_has_a_family() -> None:
    from penstock.ir.ops import OPS

    # Those of convolutions depend on their sizes.
    families = {name: family_of(Op(name, (), (), {})) for name in OPS if name not in ("conv", "conv_grad_input")}
    assert families["matmul"] == PRODUCTS
    assert {families[k] for k in ("add", "softmax", "sum", "gather", "max_pool", "random")} == {ELEMENTS}
    assert {families[k] for k in ("sgd", "adamw")} == {UPDATES}
    assert {families[k] for k in ("reshape", "pad", "concat", "accum", "take")} == {LAYOUT}


def test_convolutions_that_need_fewer_multiplications_are_a_family_of_their_own() -> None:
    """The bound counts 16 multiplications where a direct sum takes 36; the price what a device says of the family."""

    def conv(taps: int, stride: int) -> Op:
        x, w = Value("x", TensorType("f32", (1, 64, 28, 28))), Value("w", TensorType("f32", (64, 64, taps, taps)))
        return make("conv", (x, w), ["y"], strides=(stride, stride), pads=(taps // 2,) * 4)

    squares, strided, wide = conv(3, 1), conv(3, 2), conv(5, 1)
    assert [family_of(op) for op in (squares, strided, wide)] == [SQUARES, CONVOLUTIONS, CONVOLUTIONS]
    fast = replace(DEVICE, bandwidth=1e15, efficiency=(("squares", 2.0), ("convolutions", 0.5)))
    assert cost(squares, fast).seconds == pytest.approx(cost_of(squares).flops / 2e9 + fast.overhead)
    assert cost(strided, fast).seconds == pytest.approx(cost_of(strided).flops / 5e8 + fast.overhead)
    assert bound([squares], 0.0, fast) == pytest.approx(cost_of(squares).flops * 16 / 36 / 1e9)
    assert bound([wide], 0.0, fast) == pytest.approx(cost_of(wide).flops / 1e9)


def test_an_operation_by_itself_pays_for_its_operands() -> None:
    relu = layer().ops[1]
    assert cost(relu, DEVICE) == pytest.approx((4 * 2 * 64 * 128 / (1e8 * 0.5) + 1e-3, 4 * 2 * 64 * 128), rel=1e-12)
    twice = make("mul", (relu.ins[0], relu.ins[0]), ["q"])
    assert cost(twice, DEVICE).bytes == 4 * 2 * 64 * 128, "an operand that is taken twice is read once"


def test_transfers() -> None:
    link = Link("a", "b", bandwidth=1e6, latency=1e-2)
    assert cost(Transfer(5e5), link) == (0.51, 5e5)
    assert cost(Transfer(5e5, messages=3), link).seconds == pytest.approx(0.53)
    assert cost(Transfer(0.0), link).seconds == 1e-2
    assert cost(Transfer(0.0, messages=0), link) == (0.0, 0.0)


def test_parts_of_operations_sum_up_to_their_kernels() -> None:
    graph = layer()
    parts = op_seconds(graph, DEVICE)
    assert sum(parts) == pytest.approx(graph_seconds(graph, DEVICE) - DEVICE.call_overhead, rel=1e-12)
    first = cost(GraphCost(graph).kernels[0], DEVICE).seconds
    assert parts[0] + parts[1] == pytest.approx(first, rel=1e-12)
    assert parts[2] == 0.0, "a layout change that is index arithmetic costs nothing"
    # The control: each by itself they would cost more.
    assert all(part < cost(op, DEVICE).seconds for part, op in zip(parts[:3], graph.ops, strict=False))
    assert sum(cost(op, DEVICE).seconds for op in graph.ops) > 1.5 * sum(parts)


@pytest.mark.parametrize("name", [f"s{stage}.{kind}" for stage in (0, 1) for kind in "FBU"])
def test_the_work_of_kernels_is_that_of_the_graph(trained: Module, name: str) -> None:
    graph = trained.graphs[name]
    kernels = kernels_of(graph)
    counted = sum(flops for kernel in kernels for _, _, flops in work_of(kernel).flops)
    computed_where_read = {
        v for op in graph.ops if str(op.attrs.get("kernel", "")).startswith("inline") for v in op.outs
    }
    once = sum(cost_of(op).flops for op in graph.ops if not computed_where_read.issuperset(op.outs) or not op.outs)
    assert counted == pytest.approx(once, rel=1e-12)
    assert sum(op_seconds(graph, DEVICE)) == pytest.approx(
        graph_seconds(graph, DEVICE) - DEVICE.call_overhead, rel=1e-9
    )
    # The control: a kernel less is seen.
    assert sum(flops for kernel in kernels[1:] for _, _, flops in work_of(kernel).flops) != pytest.approx(
        once, rel=1e-12
    )


def test_before_fusion_a_graph_costs_what_it_costs_after(trained: Module) -> None:
    free = replace(DEVICE, call_overhead=0.0)
    spent = dict.fromkeys(("fused", "apart"), 0.0)
    for name in ("s0.F", "s0.B", "s1.F", "s1.B"):
        fused = trained.graphs[name]
        plain = replace(fused, ops=tuple(op.with_attrs(kernel=None, packed=None) for op in fused.ops))
        assert graph_seconds(plain, DEVICE) == pytest.approx(graph_seconds(fused, DEVICE), rel=1e-9)
        apart = replace(
            plain,
            ops=tuple(op if op.kind == "read" else op.with_attrs(kernel=f"k{i}") for i, op in enumerate(plain.ops)),
        )
        spent["fused"] += graph_seconds(fused, free)
        spent["apart"] += graph_seconds(apart, free)
    # The control: without kernels it would cost much more.
    assert spent["apart"] > 1.3 * spent["fused"]


def test_every_graph_of_a_stage_is_priced_on_its_device(trained: Module) -> None:
    slow = replace(DEVICE, name="cpu:1", flops=1e8, bandwidth=1e7)
    found = rank_seconds(trained.but(cluster=Cluster((DEVICE, slow))))
    graphs = {(s.index, k) for s in trained.stages for k in COMPUTE if trained.stage_graph(s.index, k) is not None}
    assert found.keys() == graphs
    assert found[0, "F"] == graph_seconds(trained.graphs["s0.F"], DEVICE)
    assert found[1, "B"] == graph_seconds(trained.graphs["s1.B"], slow)
    with pytest.raises(UsageError, match="names no devices"):
        rank_seconds(trained.but(cluster=None))


class Fixed:
    """Knows products only."""

    def __init__(self, price: float) -> None:
        self.price, self.asked = price, 0

    def seconds(self, kernel: Kernel, device: Device) -> float | None:
        self.asked += 1
        return self.price if work_of(kernel).family == PRODUCTS else None


def test_sources_are_asked_in_turn_and_gaps_are_told() -> None:
    first, second = GraphCost(layer()).kernels
    prices = InTurn([Fixed(7.0), Fixed(9.0)])
    assert cost(first, DEVICE, prices).seconds == 7.0
    assert cost(second, DEVICE, prices) == cost(second, DEVICE)
    assert (prices.known, prices.unknown) == (1, 1)
    assert prices.told() == "1 of 2 kernels are not in the table of measured times, and are estimated"
    assert InTurn([Fixed(7.0)]).told() == ""
    # A source by itself that does not know is an estimate too.
    assert cost(second, DEVICE, Fixed(7.0)) == cost(second, DEVICE)
    assert graph_seconds(layer(), DEVICE, prices) == pytest.approx(
        7.0 + cost(second, DEVICE).seconds + DEVICE.call_overhead
    )


def test_kernels_that_differ_in_names_are_asked_for_once() -> None:
    once, twice = layer(), layer()
    again = {v: Value(v.name + "2", v.type) for op in twice.ops for v in (*op.ins, *op.outs)}
    ops = tuple(
        replace(op, ins=tuple(again[v] for v in op.ins), outs=tuple(again[v] for v in op.outs)) for op in twice.ops
    )
    both = Graph(
        "main",
        (*once.ins, *(again[v] for v in once.ins)),
        (*once.outs, *(again[v] for v in once.outs)),
        (*once.ops, *ops),
    )
    source = Fixed(1.0)
    assert graph_seconds(both, DEVICE, source) - DEVICE.call_overhead == pytest.approx(
        2 * (graph_seconds(once, DEVICE, Fixed(1.0)) - DEVICE.call_overhead)
    )
    assert source.asked == 2
    assert len({k.key for k in GraphCost(both).kernels}) == 2
    assert alone(layer().ops[0]).key != alone(layer(rows=65).ops[0]).key


def test_what_was_measured_of_a_device_survives_the_text() -> None:
    module = Module("m", cluster=Cluster((DEVICE, Device("plain"))))
    text = print_module(module)
    assert "efficiency.products=0.5 efficiency.products.bf16=2.0" in text
    assert (
        "  device plain kind=cpu host=localhost target=native threads=1 flops=50000000000.0 bandwidth=10000000000.0\n"
        in text
    )
    assert parse_module(text) == module
    assert parse_module(text.replace("efficiency.products=0.5", "efficiency.products=0.6")) != module


def test_seconds_for_people() -> None:
    """From a millisecond to years: no row of digits, and no number where there is none."""
    times = [0.0, 3.61e-4, 1.0, 599.5, 7200.0, 3 * 86400.0, 4e8, 1e300, float("inf")]
    said = ["0.000 ms", "0.361 ms", "1.000 s", "599.500 s", "2.0 hours", "3.0 days", "12.7 years"]
    assert [shown_seconds(time) for time in times] == [*said, "more than 1000 years", "no end"]
    assert by_simulation(0.5) == "500.000 ms simulated"
    for nothing in (None, float("inf")):
        assert by_simulation(nothing) == "no plan of it is legal and fits when simulated"
    assert f"{float('inf'):.3f} s" == "inf s", "control: what it stands in for"


def test_tensor_cores_are_priced_by_element_type() -> None:
    """Products of 16 bits are faster on a GPU by as much as its sheet says, less a share; other work is not."""
    gpu = Device("cuda:0", "cuda", target="sm_90")
    sheet = sheet_of("sm_90")
    for family in (PRODUCTS, CONVOLUTIONS, ATTENTION):
        for dtype in ("bf16", "f16"):
            expected = EFFICIENCY[family] * TENSOR_CORES * getattr(sheet, dtype) / sheet.f32
            assert efficiency_of(gpu, family, dtype) == pytest.approx(expected)
        assert efficiency_of(gpu, family, "f32") == efficiency_of(gpu, family, "f64") == EFFICIENCY[family]
        # The controls: bytes, elements, an architecture without such cores, and processors.
        assert efficiency_of(gpu, family, "bytes") == EFFICIENCY[f"{family}.bytes"]
        assert efficiency_of(replace(gpu, target="sm_75"), family, "bf16") == EFFICIENCY[family]
        assert efficiency_of(Device("cpu:0"), family, "bf16") == EFFICIENCY[family]
    assert efficiency_of(gpu, ELEMENTS, "bf16") == EFFICIENCY[ELEMENTS]
    # What was measured for a type is taken as it is.
    assert efficiency_of(replace(gpu, efficiency=(("products.bf16", 3.0),)), PRODUCTS, "bf16") == 3.0
