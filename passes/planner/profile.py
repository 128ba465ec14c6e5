"""Profile a model: make the planner's chain of layers from its graphs.

In: the module as `partition` would see it, at each size of a microbatch to be tried, and the source of times. Out: a
Chain whose layers are runs of operations, with the costs of each at each of these sizes.

    layers      the operations of the forward graph, in their order, cut into at most `most` runs of about the same
                time; of the places where a run may end the one is chosen that fewest bytes cross. So no plan over
                layers is slower than the best over operations by more than a run per stage; `largest` is the part of
                the whole that the longest run is
    seconds     of passes/costs/prices.py, for the kernels that `fuse` would choose; on GPUs libraries compute products
                and convolutions, and leave what follows to other kernels; operations of the backward graph
                count for the layer of the operation they belong to. Those that only gradients of weights need are its
                `weight` part
    calls       a graph of a stage is called once per microbatch, forward and backward, and once for an update; a
                message takes time of the device at both ends, and its bytes do on a CPU
    bytes       a value that the backward needs counts where it is made, or where it is needed if that is one other
                layer; a parameter counts for every layer that reads it, with its gradient and its optimiser state.
                Where other devices update weights, what goes to these and comes from them counts in place of state

Some models have other operations with some sizes of a microbatch, most often with one sample, where exporters and
`simplify` see ones: such sizes are left out.

Limits: the exchange of a tied parameter is memory here, not time. Bytes are estimates for choosing;
ir/memory/predict.py counts what a chosen plan needs. GPUs have the prices of libraries, also where a plan does without.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from operator import add

import numpy as np

from penstock.ir.batch_shares import microbatch_size
from penstock.ir.cluster.cluster import Device
from penstock.ir.graph import GRAD, PARAM, STATE, Graph, Module, Value
from penstock.ir.types import FLOATS
from penstock.passes.costs.prices import LAYOUT, ROOFLINE, GraphCost, Prices, family_of, written_seconds
from penstock.passes.kernels.libraries import with_libraries
from penstock.passes.partition.chain import (
    chain_of,
    crossing_bytes,
    forward_graph,
    moving_spans,
    moving_users,
    names_to_split_at,
    params_behind,
)
from penstock.passes.partition.memory import PASSING
from penstock.support.errors import UsageError

from .chain import Amount, Calls, Chain, Floats, Layer, Times

MOST_LAYERS = 96


@dataclass(frozen=True)
class Profile:
    """A profiled model.

    `starts` are the names of the operations that layers begin with, as `partition` takes them for `split_at`; `largest`
    is the part of all work that the longest layer has. With microbatches of the sizes that were `left_out` the model
    has other operations.
    """

    chain: Chain
    starts: tuple[str, ...]
    operations: int
    largest: float
    left_out: tuple[int, ...] = ()


def profile_chain(
    modules: Mapping[int, Module],
    device: Device,
    prices: Prices = ROOFLINE,
    most: int = MOST_LAYERS,
    wire: str = "f32",
    shared: bool = False,
    updates_elsewhere: bool = False,
    exchanged: Mapping[int, Mapping[str, Sequence[float]]] | None = None,
) -> Profile:
    """Profile `modules`, by samples per microbatch. Layers are of about the same time on `device`.

    Float32 values travel as `wire`, and all through memory where it is `shared`. Operations take the seconds that are
    `exchanged` in their place on top, by samples per microbatch and graph. Where sizes make different operations,
    the group with most sizes is profiled; of equally large groups the one with the larger sizes.
    """
    sized = {
        b: _Sized(module, prices, wire, updates_elsewhere, (exchanged or {}).get(b, {}))
        for b, module in sorted(modules.items())
    }
    alike: dict[tuple[str, ...], list[int]] = {}
    for b, part in sized.items():
        alike.setdefault(tuple(part.names), []).append(b)
    parts = {b: sized[b] for b in max(alike.values(), key=lambda sizes: (len(sizes), sizes[-1]))}
    last = parts[max(parts)]
    cuts = last.cuts(device, most)
    rows = {b: part.layers(cuts) for b, part in parts.items()}
    low, high = min(rows), max(rows)
    layers = [_between(low, a, high, z) for a, z in zip(rows[low], rows[high], strict=True)]
    work = last.work(device)
    sums = [float(work[a:z].sum()) for a, z in zip(cuts, [*cuts[1:], len(work)], strict=True)]
    entry = {b: sum(v.type.nbytes for v in part.module.data_inputs) for b, part in parts.items()}
    known: dict[tuple[Device, int], Times] = {}

    def timer(chain: Chain, on: Device, b: int) -> Times:
        key = (replace(on, name="", host="", spaces=()), b)
        if key not in known:
            if b not in parts:
                raise UsageError(
                    f"microbatches of {b} samples were not profiled, only {', '.join(map(str, parts))}", where="planner"
                )
            known[key] = parts[b].times(on, cuts)
        return known[key]

    def calls(on: Device) -> Calls:
        graphs = 2 if last.backward is not None else 1
        # The sender alone copies into shared memory; over a boundary of a training as much goes one way as the other.
        ends = (
            (on.shared_overhead, 0.5 / on.copy_bandwidth) if shared else (on.message_overhead, 1 / on.socket_bandwidth)
        )
        update = on.call_overhead if "U" in last.module.graphs else 0.0
        return Calls(graphs * on.call_overhead, update, ends[0], 0.0 if on.kind == "cuda" else ends[1])

    chain = Chain(tuple(layers), timer, _amount(low, entry[low], high, entry[high]), calls, tuple(parts))
    left_out = tuple(b for b in sized if b not in parts)
    return Profile(chain, tuple(last.names[i] for i in cuts), len(work), max(sums) / max(sum(sums), 1e-300), left_out)


def _between(low: int, a: Layer, high: int, z: Layer) -> Layer:
    """Return bytes as a function of b, from those at two sizes."""

    def of(what: str) -> Amount:
        return _amount(low, getattr(a, what).fixed, high, getattr(z, what).fixed)

    return replace(z, saved=of("saved"), out=of("out"), back=of("back"), workspace=of("workspace"))


def _amount(low: int, a: int, high: int, z: int) -> Amount:
    """Return the amount that grows linearly with b and is at both sizes at least what was measured there."""
    if low == high:
        return Amount(a, 0)
    each = -(-(z - a) // (high - low)) if z > a else 0
    return Amount(max(a - each * low, z - each * high, 0), each)


class _Sized:
    """A module at one size of a microbatch."""

    def __init__(
        self,
        module: Module,
        prices: Prices,
        wire: str,
        updates_elsewhere: bool,
        exchanged: Mapping[str, Sequence[float]],
    ) -> None:
        self.module, self.prices, self.wire = module, prices, wire
        self.updates_elsewhere, self.exchanged = updates_elsewhere, exchanged
        # Graphs as libraries compute them, by name.
        self.on_gpus = dict[str, GraphCost]()
        self.chain = chain_of(module)
        if not self.chain:
            raise UsageError("the model computes nothing from its inputs: there is no operation to plan for")
        forward = forward_graph(module)
        self.backward = module.graphs.get("B")
        self.names = names_to_split_at(self.chain)
        self.maker_at = {v: i for i, op in enumerate(self.chain) for v in op.outs}
        by_name = {v.name: i for v, i in self.maker_at.items()}
        self.forward_cost = (
            GraphCost(forward),
            [self.maker_at.get(op.outs[0]) if op.outs else None for op in forward.ops],
        )
        self.backward_at = _places(self.backward, by_name) if self.backward is not None else []
        self.backward_cost = GraphCost(self.backward) if self.backward is not None else None
        behind = params_behind(module)
        # The parameters that each operation reads, also through values that any stage can compute.
        self.params = [set[str]().union(*(behind.get(v, ()) for v in op.ins)) for op in self.chain]

    # -------------------------------------------------------------------------------------------- seconds

    def _op_seconds(self, cost: GraphCost, device: Device) -> list[float]:
        """Return the seconds of each operation of a graph, with what is exchanged in its place."""
        exchanged, name = self.exchanged.get(cost.graph.name), cost.graph.name
        if device.kind == "cuda":
            if name not in self.on_gpus:
                self.on_gpus[name] = GraphCost(with_libraries(cost.graph))
            cost = self.on_gpus[name]
        seconds = cost.op_seconds(device, self.prices)
        return seconds if exchanged is None else [a + b for a, b in zip(seconds, exchanged, strict=True)]

    def _forward(self, device: Device) -> Floats:
        totals = np.zeros(len(self.chain))
        cost, where = self.forward_cost
        for at, seconds in zip(where, self._op_seconds(cost, device), strict=True):
            if at is not None:
                totals[at] += seconds
        return totals

    def _backward(self, device: Device, only: Sequence[bool] | None = None) -> Floats:
        totals = np.zeros(len(self.chain))
        if self.backward_cost is not None:
            for i, (at, seconds) in enumerate(
                zip(self.backward_at, self._op_seconds(self.backward_cost, device), strict=True)
            ):
                if at is not None and (only is None or only[i]):
                    totals[at] += seconds
        return totals

    def _update(self, device: Device) -> Floats:
        """Return the seconds of updates, counted for the first operation that reads the parameter. Updates without one
        run on every stage, and are little, as is what a stage does with new weights from elsewhere."""
        totals = np.zeros(len(self.chain))
        update = self.module.graphs.get("U")
        if update is None or self.updates_elsewhere:
            return totals
        reader = {name: i for i, names in reversed(list(enumerate(self.params))) for name in names}
        at: dict[Value, int] = {}
        for op, seconds in zip(update.ops, self._op_seconds(GraphCost(update), device), strict=True):
            variable = op.var if "var" in op.attrs else ""
            places = [at[v] for v in op.ins if v in at] + [
                reader[name] for name in (variable, variable.rpartition(".")[0]) if name in reader
            ]
            if places:
                totals[places[0]] += seconds
                at.update(dict.fromkeys(op.outs, places[0]))
        return totals

    def work(self, device: Device) -> Floats:
        return self._forward(device) + self._backward(device)

    def times(self, device: Device, cuts: Sequence[int]) -> Times:
        def by_layer(seconds: Floats) -> tuple[float, ...]:
            return tuple(float(x) for x in np.add.reduceat(seconds, list(cuts)))

        again, backward = by_layer(self._forward(device)), by_layer(self._backward(device))
        weight = by_layer(self._backward(device, self._for_weights(cuts)))
        forward = tuple(map(add, again, self._written(device, cuts)))
        return Times(forward, backward, tuple(map(min, weight, backward)), again, by_layer(self._update(device)))

    def _written(self, device: Device, cuts: Sequence[int]) -> list[float]:
        """Return the seconds that the forward of each layer takes longer as what it makes and saves is in no cache,
        where a microbatch touches more than the cache holds. Values in another layout are not saved once more."""
        moved = self.forward_cost[0].moved + (0.0 if self.backward_cost is None else self.backward_cost.moved)
        written_bytes = [0] * len(cuts)
        for value, _, home in self._kept(cuts):
            maker = self.maker_at.get(value)
            written_bytes[home] += 0 if maker is None or family_of(self.chain[maker]) == LAYOUT else value.type.nbytes
        return [written_seconds(nbytes, device) if moved > device.cache else 0.0 for nbytes in written_bytes]

    def _for_weights(self, cuts: Sequence[int]) -> list[bool]:
        """Return for each operation of the backward graph whether no earlier layer's backward needs its results."""
        if self.backward is None:
            return []
        layer_of = [None if at is None else int(np.searchsorted(cuts, at, "right")) for at in self.backward_at]
        makers = {v: i for i, op in enumerate(self.backward.ops) for v in op.outs}
        needed = [False] * len(self.backward.ops)
        for i in reversed(range(len(self.backward.ops))):
            for v in self.backward.ops[i].ins:
                j = makers.get(v)
                if j is not None and (needed[i] or layer_of[i] != layer_of[j]) and self.backward.ops[i].kind != "accum":
                    needed[j] = True
        return [not is_needed for is_needed in needed]

    # -------------------------------------------------------------------------------------------- layers and bytes

    def cuts(self, device: Device, most: int) -> list[int]:
        """Return the operations that layers begin with: the cheapest place in every stretch of equal time, and never
        where a stage may not start."""
        work, crossing, count = self.work(device), crossing_bytes(self.chain, self.wire), len(self.chain)
        inside = {i for first, last in moving_spans(self.chain).values() for i in range(first + 1, last + 1)}
        allowed = [i for i in range(1, count) if i not in inside]
        ends = np.concatenate([[0.0], np.cumsum(work)])
        if len(allowed) < most:
            return [0, *allowed]
        stretch: dict[int, list[int]] = {}
        for i in allowed:
            stretch.setdefault(int(ends[i] / max(ends[-1], 1e-300) * (most - 1)), []).append(i)
        return [0, *sorted(min(places, key=lambda i: (crossing[i], i)) for places in stretch.values())]

    def layers(self, cuts: Sequence[int]) -> list[Layer]:
        ends = [*cuts[1:], len(self.chain)]
        crossing, back = crossing_bytes(self.chain, self.wire), np.zeros(len(self.chain) + 1)
        if self.backward is not None:
            back = crossing_bytes(self.chain, self.wire, FLOATS)
        saved, fed = self._saved(cuts), self._fed(cuts)
        moving = [i for users in moving_users(self.chain).values() for i in users]
        layers = []
        for number, (first, last) in enumerate(zip(cuts, ends, strict=True)):
            names = {name for i in range(first, last) for name in self.params[i]}
            owned = [
                var for var in self.module.vars.values() if var.name in names or var.name.rpartition(".")[0] in names
            ]
            by_role = {role: sum(v.type.nbytes for v in owned if v.role == role) for role in (PARAM, GRAD, STATE)}
            if self.updates_elsewhere:
                by_role[STATE] = PASSING * by_role[GRAD] + by_role[PARAM]
            temporary = max((sum(v.type.nbytes for v in op.outs) for op in self.chain[first:last]), default=0)
            layers.append(
                Layer(
                    self.names[first],
                    by_role[PARAM],
                    by_role[GRAD],
                    by_role[STATE],
                    Amount(saved[number]),
                    Amount(int(crossing[last])),
                    Amount(int(back[last])),
                    Amount(2 * temporary),
                    fed=fed[number],
                    # A weight that comes is held beside both versions.
                    late=by_role[PARAM] if self.updates_elsewhere else 0,
                    alone=any(first <= i < last for i in moving),
                    pieces=tuple(v.type.nbytes for v in owned if v.role == GRAD),
                )
            )
        return layers

    def _fed(self, cuts: Sequence[int]) -> list[int]:
        """Return the bytes of one sample of the data that each layer is the first to take."""
        fed_bytes, samples = [0] * len(cuts), microbatch_size(self.module)
        for value in self.module.data_inputs:
            at = next((i for i, op in enumerate(self.chain) if value in op.ins), None)
            if at is not None:
                fed_bytes[int(np.searchsorted(cuts, at, "right")) - 1] += -(-value.type.nbytes // samples)
        return fed_bytes

    def _saved(self, cuts: Sequence[int]) -> list[int]:
        """Return the bytes that the backward of each layer needs of the forward pass."""
        saved_bytes = [0] * len(cuts)
        for value, layers, home in self._kept(cuts):
            saved_bytes[next(iter(layers)) if len(layers) == 1 else home] += value.type.nbytes
        return saved_bytes

    def _kept(self, cuts: Sequence[int]) -> Iterator[tuple[Value, set[int], int]]:
        """Yield the values that the backward needs of the forward pass, with the layers whose backwards do, and the
        layer that makes it, or takes it first."""
        if self.backward is None:
            return
        users: dict[Value, set[int]] = {}
        for at, op in zip(self.backward_at, self.backward.ops, strict=True):
            if at is not None:
                for v in op.ins:
                    users.setdefault(v, set()).add(int(np.searchsorted(cuts, at, "right")) - 1)
        fed = set(self.module.inputs)
        for value, layers in users.items():
            if value in self.maker_at:
                home = int(np.searchsorted(cuts, self.maker_at[value], "right")) - 1
            elif value in fed:
                home = min(layers)
            else:
                continue
            yield value, layers, home


def _places(backward: Graph, position: Mapping[str, int]) -> list[int | None]:
    """Assign each operation of the backward graph to its forward operation, sums of gradients to that of the first of
    their operands."""
    made_at: dict[Value, int] = {}
    places: list[int | None] = []
    for op in backward.ops:
        at = (
            position.get(str(op.attrs["of"]))
            if "of" in op.attrs
            else min((made_at[v] for v in op.ins if v in made_at), default=None)
        )
        places.append(at)
        if at is not None:
            made_at.update(dict.fromkeys(op.outs, at))
    return places
