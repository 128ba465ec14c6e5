"""Random convolutions and pools, and their gradients, with random splits of their spatial dimensions."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from math import prod
from random import Random

import numpy as np

from penstock.ir.attrs import Attr
from penstock.ir.graph import Graph, Mesh, Op, Value
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.ops import make
from penstock.ir.sharding.rules import rule_of
from penstock.ir.sharding.splits import Split
from penstock.ir.types import TensorType

from .one_operation import types_of

KINDS = ("conv", "conv_grad_input", "conv_grad_weight", "max_pool", "max_pool_grad", "avg_pool", "avg_pool_grad")
MESHES = ((("a", 2),), (("a", 3),), (("a", 4),), (("a", 2), ("b", 2)))


@dataclass(frozen=True)
class DrawnWindow:
    """An operation with its operands, a mesh, and the types of operands and results on it."""

    op: Op
    arrays: tuple[np.ndarray, ...]
    mesh: Mesh
    types: tuple[TensorType, ...]

    def __str__(self) -> str:
        return f"{self.op.kind}({', '.join(map(str, self.types))}, {dict(self.op.attrs)}) on {self.mesh.axes}"


def drawn_window(number: int, dtype: str = "f64") -> DrawnWindow:
    """Return the operation of a number. Its spatial dimensions are split, perhaps others as well."""
    random = Random(number)
    while (case := _drawn(random, number, dtype)) is None:
        pass
    return case


def _drawn(random: Random, number: int, dtype: str) -> DrawnWindow | None:
    kind, rank = KINDS[number % len(KINDS)], random.choice((1, 2, 2))
    kernel = tuple(random.randint(1, 4) for _ in range(rank))
    attrs: dict[str, Attr] = {
        "strides": tuple(random.randint(1, 3) for _ in range(rank)),
        "dilations": tuple(random.randint(1, 2) for _ in range(rank)),
        "pads": tuple(random.randint(0, 3) for _ in range(2 * rank)),
    }
    if "pool" in kind:
        # A window that lies in padding alone has no mean.
        reach = [d * (k - 1) for d, k in zip(attrs["dilations"] * 2, kernel * 2, strict=True)]  # type: ignore[operator]
        pads = tuple(min(p, n) for p, n in zip(attrs["pads"], reach, strict=True))  # type: ignore[arg-type]
        attrs |= {"window": kernel, "pads": pads}
    groups, each, filters = random.choice((1, 1, 2, 3)), random.randint(1, 2), random.randint(1, 2)
    shapes = {
        "x": (random.randint(1, 3), groups * each, *(random.randint(3, 13) for _ in range(rank))),
        "w": (groups * filters, each, *kernel),
    }
    try:
        op, arrays = _operation(kind, shapes, attrs, groups, np.random.default_rng(number), random, dtype)
    except TypeError:  # The window does not fit into the image.
        return None
    mesh_axes = random.choice(MESHES)
    mesh = Mesh("m", mesh_axes, tuple(f"c{i}" for i in range(prod(n for _, n in mesh_axes))))
    rule = rule_of(op)
    spatial = [name for name in rule.sizes if name.startswith("y")]
    axes = [axis for axis, _ in mesh_axes]
    ways = [[tuple(axes)], *([[tuple(axes[::-1])], [axes[:1], axes[1:]]] if len(axes) > 1 else [])]
    way = random.choice(ways)
    others = [name for name in rule.sizes if rule.may_split(name)]
    names = [random.choice(spatial), *random.sample(others, len(way) - 1)]
    splits = {name: Split(tuple(part)) for name, part in zip(names, way, strict=False)}
    if len(splits) < len(way) or any(
        rule.sizes[name] < prod(mesh.sizes[a] for a in s.axes) for name, s in splits.items()
    ):
        return None
    types = types_of(op, rule, splits, mesh.sizes)
    return None if types is None else DrawnWindow(op, tuple(arrays), mesh, tuple(types))


def _operation(
    kind: str,
    shapes: Mapping[str, tuple[int, ...]],
    attrs: dict[str, Attr],
    groups: int,
    rng: np.random.Generator,
    random: Random,
    dtype: str,
) -> tuple[Op, list[np.ndarray]]:
    """Return an operation of a kind and its operands."""
    x, w = (Value(name, TensorType(dtype, shapes[name])) for name in "xw")
    # Few different numbers, so that maxima have ties.
    data = {v.name: rng.integers(-4, 5, v.type.dims) / 4.0 for v in (x, w)}
    base = kind.removesuffix("_grad_input").removesuffix("_grad_weight").removesuffix("_grad")
    if base == "conv":
        forward = make("conv", (x, w), ["y"], groups=groups, **attrs)
        extra: dict[str, Attr] = {"groups": groups}
    else:
        extra = {"include_pad": random.random() < 0.4} if base == "avg_pool" else {}
        forward = make(base, (x,), ["y"], **attrs, **extra)
    if kind == base:
        return forward, [data[v.name] for v in forward.ins]
    (y,) = forward.outs
    dy = Value("dy", y.type)
    data["dy"] = rng.integers(-4, 5, y.type.dims) / 4.0
    data["y"] = run_graph(Graph("f", forward.ins, forward.outs, (forward,)), [data[v.name] for v in forward.ins])[0]
    ins, shape = {
        "conv_grad_input": ((dy, w), {"shape": x.type.dims}),
        "conv_grad_weight": ((x, dy), {"shape": w.type.dims}),
        "max_pool_grad": ((x, y, dy), {}),
        "avg_pool_grad": ((dy,), {"shape": x.type.dims}),
    }[kind]
    return make(kind, ins, ["z"], **attrs, **extra, **shape), [data[v.name] for v in ins]
