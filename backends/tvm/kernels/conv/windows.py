"""Sliding windows: convolution with its gradients as matrix products that gather while they pack, and pooling.

In: any number of spatial dimensions, strides, dilations, padding, groups. A convolution is the product, per image and
group,

    out[o, p] = sum over (c, r) of  w[o, (c, r)] * x[c, p * stride - low + r * dilation]

with the windows gathered into the packed panel of the right operand, so no image of all windows is ever in memory. Its
gradients are the same with the roles exchanged. Pooling runs along the last dimension in vectors.

conv.py sends here only operations that have no faster form. Limits: packing costs one guarded read per element and
output channel block, so few output channels are slow; pooling reads windows with a stride lane by lane.
"""

from __future__ import annotations

import math
from contextlib import ExitStack
from math import prod
from typing import NamedTuple

from tvm import tirx

from penstock.backends.tvm.kernels.elementwise.elementwise import emit_nest
from penstock.backends.tvm.kernels.product.choose import emit_product
from penstock.backends.tvm.kernels.rows.sums import LOWEST
from penstock.backends.tvm.kernels.tools.body import Body, NotOneKernel, parallel_if
from penstock.backends.tvm.kernels.tools.elements import Index, bound_index, linear, unravel, zero
from penstock.backends.tvm.kernels.tools.emit import HALVES, SERIAL, Buffer, Expr, ceil_div, literal
from penstock.backends.tvm.kernels.tools.product_terms import Product
from penstock.backends.tvm.kernels.tools.transpose import pieces, separate_pairs
from penstock.ir.graph import Op, Value
from penstock.ir.ops import Window, complete_attrs, ints, window_of
from penstock.ir.types import FLOATS

from .pool_lines import emit_max_pool, pools_by_lines


def inside_of(positions: Index, sizes: tuple[int, ...]) -> tuple[Index, list[Expr]]:
    """Move positions into the tensor, and return the conditions under which they lay inside."""
    conditions: list[Expr] = []
    moved: list[Expr] = []
    for p, n in zip(positions, sizes, strict=True):
        conditions += [p >= 0, p < n]
        moved.append(tirx.max(tirx.min(p, n - 1), 0))
    return tuple(moved), conditions


def window_positions(w: Window, out: Index, tap: Index) -> Index:
    """Return the position that a tap of the window of `out` reads."""
    return tuple(o * s - low + r * d for o, r, s, low, d in zip(out, tap, w.strides, w.low, w.dilations, strict=True))


def windows_of(w: Window, place: Index, tap: Index, sizes: tuple[int, ...]) -> tuple[Index, list[Expr]]:
    """Return the window whose `tap` lies on `place`, and the conditions under which there is one."""
    windows: list[Expr] = []
    conditions: list[Expr] = []
    for p, r, s, low, d in zip(place, tap, w.strides, w.low, w.dilations, strict=True):
        t = p + low - r * d
        if s > 1:
            conditions.append(tirx.EQ(tirx.floormod(t, s), 0))
            t = tirx.floordiv(t, s)
        windows.append(t)
    inside, bounds = inside_of(tuple(windows), sizes)
    return inside, conditions + bounds


def _guarded(body: Body, value: Value, index: Index, conditions: list[Expr]) -> Expr:
    return body.emit.bind(tirx.Select(tirx.all(*conditions), body.at(value, index), literal(0, value.type.dtype)))


def _needs_no_guard(w: Window) -> bool:
    return not any(w.low) and not any(w.high)


class _Grouped(NamedTuple):
    """The window and groups of a convolution or one of its gradients; channels are those of one group."""

    kernel: tuple[int, ...]
    window: Window
    groups: int
    per_out: int
    per_in: int


def _grouped(op: Op, weight: Value) -> _Grouped:
    attrs, (outs, per_in, *kernel) = complete_attrs(op), weight.type.dims
    groups = int(attrs["groups"])  # type: ignore[arg-type]
    return _Grouped(tuple(kernel), window_of(attrs, tuple(kernel)), groups, outs // groups, per_in)


def emit_conv(body: Body, op: Op) -> None:
    x, w, y = op.ins[0], op.ins[1], op.outs[0]
    kernel, window, groups, per_out, per_in = _grouped(op, w)
    spatial, sizes = y.type.dims[2:], x.type.dims[2:]

    def a(lead: Index, i: Expr, k: Expr) -> Expr:
        return body.at(w, (lead[1] * per_out + i, *unravel(k, (per_in, *kernel))))

    def b(lead: Index, k: Expr, j: Expr) -> Expr:
        channel, *tap = unravel(k, (per_in, *kernel))
        channel = lead[1] * per_in + channel
        positions = window_positions(window, unravel(j, spatial), tuple(tap))
        if _needs_no_guard(window):
            return body.at(x, (lead[0], channel, *positions))
        inside, conditions = inside_of(positions, sizes)
        return _guarded(body, x, (lead[0], channel, *inside), conditions)

    def place(lead: Index, i: Expr, j: Expr) -> Index:
        return (lead[0], lead[1] * per_out + i, *unravel(j, spatial))

    batch = (y.type.dims[0], groups)
    emit_product(
        body, Product(y, batch, per_out, prod(spatial), per_in * prod(kernel), a, b, place, body.is_stored(w), False)
    )


def emit_conv_grad_input(body: Body, op: Op) -> None:
    dy, w, dx = op.ins[0], op.ins[1], op.outs[0]
    kernel, window, groups, per_out, per_in = _grouped(op, w)
    spatial, sizes = dx.type.dims[2:], dy.type.dims[2:]

    def a(lead: Index, i: Expr, k: Expr) -> Expr:
        channel, *tap = unravel(k, (per_out, *kernel))
        return body.at(w, (lead[1] * per_out + channel, i, *tap))

    def b(lead: Index, k: Expr, j: Expr) -> Expr:
        channel, *tap = unravel(k, (per_out, *kernel))
        where, conditions = windows_of(window, unravel(j, spatial), tuple(tap), sizes)
        return _guarded(body, dy, (lead[0], lead[1] * per_out + channel, *where), conditions)

    def place(lead: Index, i: Expr, j: Expr) -> Index:
        return (lead[0], lead[1] * per_in + i, *unravel(j, spatial))

    batch = (dx.type.dims[0], groups)
    emit_product(body, Product(dx, batch, per_in, prod(spatial), per_out * prod(kernel), a, b, place, False, False))


def emit_conv_grad_weight(body: Body, op: Op) -> None:
    x, dy, dw = op.ins[0], op.ins[1], op.outs[0]
    kernel, window, groups, per_out, per_in = _grouped(op, dw)
    images = dy.type.dims[0]
    spatial, sizes = dy.type.dims[2:], x.type.dims[2:]

    def a(lead: Index, i: Expr, k: Expr) -> Expr:
        image, *out = unravel(k, (images, *spatial))
        return body.at(dy, (image, lead[0] * per_out + i, *out))

    def b(lead: Index, k: Expr, j: Expr) -> Expr:
        image, *out = unravel(k, (images, *spatial))
        channel, *tap = unravel(j, (per_in, *kernel))
        positions = window_positions(window, tuple(out), tuple(tap))
        inside, conditions = inside_of(positions, sizes)
        return _guarded(body, x, (image, lead[0] * per_in + channel, *inside), conditions)

    def place(lead: Index, i: Expr, j: Expr) -> Index:
        return (lead[0] * per_out + i, *unravel(j, (per_in, *kernel)))

    emit_product(
        body, Product(dw, (groups,), per_out, per_in * prod(kernel), images * prod(spatial), a, b, place, False, False)
    )


# ---------------------------------------------------------------------------------------- pooling


def emit_pool(body: Body, op: Op) -> None:
    # Lines are read in vectors, which threads of a GPU have none of.
    if body.lanes > 1 and not body.machine.is_device and pools_by_lines(op):
        emit_max_pool(body, op)
        return
    x, y = op.ins[0], op.outs[0]
    attrs = complete_attrs(op)
    kernel, dtype, sizes = ints(attrs["window"]), x.type.dtype, x.type.dims[2:]
    window = window_of(attrs, kernel)
    largest = op.kind == "max_pool"
    start = literal(LOWEST.get(dtype, -math.inf) if largest else 0, dtype)
    counts = not largest and not attrs["include_pad"]
    emit = body.emit

    def point(index: Index) -> None:
        with body.point():
            lane = emit.lane()
            total = emit.alloc(emit.width(), dtype, "total")
            number = emit.alloc(emit.width(), dtype, "count")
            emit.store(total, start, lane)
            emit.store(number, literal(0, dtype), lane)
            with ExitStack() as stack:
                tap = tuple(stack.enter_context(emit.loop(k, SERIAL, "t")) for k in kernel)
                stack.enter_context(body.point())
                inside, conditions = inside_of(window_positions(window, index[2:], tap), sizes)
                valid = emit.bind(tirx.all(*conditions))
                value = body.at(x, (*index[:2], *inside))
                before = tirx.BufferLoad(total, [lane])
                if largest:
                    emit.store(total, body.functions.larger(before, tirx.Select(valid, value, start)), lane)
                else:
                    emit.store(total, before + tirx.Select(valid, value, literal(0, dtype)), lane)
                if counts:
                    one = tirx.Select(valid, literal(1, dtype), literal(0, dtype))
                    emit.store(number, tirx.BufferLoad(number, [lane]) + one, lane)
            result = tirx.BufferLoad(total, [lane])
            if counts:
                result = result / tirx.BufferLoad(number, [lane])
            elif not largest:
                result = result * literal(1 / prod(kernel), dtype)
            body.finish({y: (result, index)})

    emit_nest(body, y.type.dims, y.type.rank - 1, point)


def count_taps(window: Window, out: Index, sizes: tuple[int, ...], dtype: str) -> Expr:
    """Count the taps of a window that lie inside."""
    total: Expr = literal(1, dtype)
    for o, n, k, s, low, d in zip(out, sizes, window.kernel, window.strides, window.low, window.dilations, strict=True):
        along: Expr = literal(0, dtype)
        for r in range(k):
            p = o * s - low + r * d
            along = along + tirx.Select(tirx.all(p >= 0, p < n), literal(1, dtype), literal(0, dtype))
        total = total * along
    return total


def emit_avg_pool_grad(body: Body, op: Op) -> None:
    dy, dx = op.ins[0], op.outs[0]
    attrs = complete_attrs(op)
    kernel, dtype, sizes, outs = ints(attrs["window"]), dx.type.dtype, dx.type.dims[2:], dy.type.dims[2:]
    window = window_of(attrs, kernel)
    emit = body.emit

    def point(index: Index) -> None:
        with body.point():
            lane = emit.lane()
            total = emit.alloc(emit.width(), dtype, "total")
            emit.store(total, literal(0, dtype), lane)
            with ExitStack() as stack:
                tap = tuple(stack.enter_context(emit.loop(k, SERIAL, "t")) for k in kernel)
                stack.enter_context(body.point())
                where, conditions = windows_of(window, index[2:], tap, outs)
                share = body.at(dy, (*index[:2], *where))
                if attrs["include_pad"]:
                    share = share * literal(1 / prod(kernel), dtype)
                else:
                    share = share / count_taps(window, where, sizes, dtype)
                share = tirx.Select(tirx.all(*conditions), share, literal(0, dtype))
                emit.store(total, tirx.BufferLoad(total, [lane]) + share, lane)
            body.finish({dx: (tirx.BufferLoad(total, [lane]), index)})

    emit_nest(body, dx.type.dims, dx.type.rank - 1, point)


def covers_all(op: Op) -> bool:
    """Return whether pooling has one window, and all elements lie in it."""
    dy, dx = op.ins[0].type.dims[2:], op.outs[0].type.dims[2:]
    window = window_of(complete_attrs(op), ints(op.attrs["window"]))
    reach = all(k - low >= n for k, low, n in zip(window.kernel, window.low, dx, strict=True))
    return prod(dy) == 1 and reach and all(d == 1 for d in window.dilations)


def emit_global_pool_grad(body: Body, op: Op) -> None:
    """Emit the gradient of a pool over whole planes: every element of a plane has the same share."""
    dy, dx = op.ins[0], op.outs[0]
    attrs = complete_attrs(op)
    count = prod(ints(attrs["window"])) if attrs["include_pad"] else prod(dx.type.dims[2:])
    share = literal(1 / count, dx.type.dtype)
    zeros = tuple(zero() for _ in dx.type.dims[2:])

    def point(index: Index) -> None:
        with body.point():
            body.finish({dx: (body.at(dy, (*index[:2], *zeros)) * share, index)})

    alone = len(body.group.ops) == 1
    emit_nest(body, dx.type.dims, 2 if alone else dx.type.rank - 1, point)


def emit_max_pool_grad(body: Body, op: Op) -> None:
    """Emit the gradient of a max pool: the first element equal to a window's maximum gets the window's gradient."""
    if len(body.group.ops) > 1:
        raise NotOneKernel("the gradient of a maximum is scattered, nothing can follow it in one loop")
    _MaxPoolGradient(body, op).run()


class _MaxPoolGradient:
    """The emitter of the gradient of a max pool, window by window. Threads share planes.

    The search takes a row of windows at once, in vectors. It reads a copy of the plane that has a border and keeps
    columns apart by their remainder modulo the stride. Only the additions are done one by one."""

    def __init__(self, body: Body, op: Op) -> None:
        self.body, self.emit, self.lanes = body, body.emit, body.lanes
        (self.x, self.y, self.dy), self.dx = op.ins, op.outs[0]
        attrs = complete_attrs(op)
        self.kernel, self.dtype = ints(attrs["window"]), self.x.type.dtype
        self.sizes, self.outs = self.x.type.dims[2:], self.y.type.dims[2:]
        self.window = window_of(attrs, self.kernel)
        self.stored = body.result(self.dx)
        # The loops visit all dimensions but the last position by position, and cut windows that reach over their edge
        # there.
        self.split, self.low = self.window.strides[-1], self.window.low[-1]
        last_window = (self.outs[-1] - 1) * self.split + (self.kernel[-1] - 1) * self.window.dilations[-1] + 1
        self.width = ceil_div(max(last_window, self.sizes[-1] + self.low), self.split)
        self.lines = prod(self.sizes[:-1])

    def run(self) -> None:
        emit, plane = self.emit, prod(self.sizes)
        planes = self.x.type.dims[:2]
        with emit.loop(prod(planes), parallel_if(self.body.machine, self.x.type.size), "p") as p:
            lead = bound_index(emit, p, planes, "p")
            # Sums of 16-bit floats are taken in f32 and rounded once.
            in_halves = self.dtype in HALVES
            target = emit.alloc(plane, self.dtype, "sums") if in_halves else self.stored
            origin = literal(0, "i32") if in_halves else p * plane
            copy = emit.alloc(self.lines * self.split * self.width, self.dtype, "xp")
            places = emit.alloc(self.outs[-1], "i32", "found")
            # The border of the copy is never looked at.
            with emit.loop(self.lines, SERIAL, "h") as h:
                at = bound_index(emit, h, self.sizes[:-1], "h")
                # Zeros line by line: a plane at once becomes a call that writes past the caches.
                for v, _ in pieces(emit, self.sizes[-1], self.lanes):
                    emit.store(target, literal(0, self.dtype), origin + h * self.sizes[-1] + v)
                self._copy_line(copy, (*lead, *at), h)
            with emit.loop(prod(self.outs[:-1]), SERIAL, "o") as o, self.body.point():
                out = bound_index(emit, o, self.outs[:-1], "o")
                self._find(copy, places, lead, out)
                with emit.loop(self.outs[-1], SERIAL, "v") as v, self.body.point():
                    gradient = self.body.at(self.dy, (*lead, *out, v))
                    with emit.when(tirx.BufferLoad(places, [v]) >= 0):
                        position = origin + tirx.BufferLoad(places, [v])
                        emit.store(target, tirx.BufferLoad(target, [position]) + gradient, position)
            if in_halves:
                for i, _ in emit.spans(plane, self.lanes):
                    emit.store(self.stored, tirx.BufferLoad(target, [i]), p * plane + i)

    def _copy_line(self, copy: Buffer, line: Index, h: Expr) -> None:
        """Copy a line of a plane, with columns apart by their remainder modulo the stride."""
        emit, lanes, split, low = self.emit, self.lanes, self.split, self.low
        done = 0
        if split == 2 and self.body.is_stored(self.x) and self.dtype not in HALVES:
            done = self.sizes[-1] // (2 * lanes) * lanes
            source = emit.bind(linear((*line, zero()), self.x.type.dims), "line")
            with emit.loop(done // lanes, SERIAL, "v") as v:
                places = [(h * 2 + (begin + low) % 2) * self.width + (begin + low) // 2 + v * lanes for begin in (0, 1)]
                operand = (self.body.operand(self.x), source + v * (2 * lanes))
                separate_pairs(emit, lanes, operand, [(copy, place) for place in places])
        for remainder in range(split):
            begin = (remainder - low) % split
            count = ceil_div(self.sizes[-1] - begin, split)
            for v, _ in pieces(emit, max(count - done, 0), lanes):
                with self.body.point():
                    value = self.body.at(self.x, (*line, (v + done) * split + begin))
                    emit.store(copy, value, (h * split + remainder) * self.width + (begin + low) // split + v + done)

    def _find(self, copy: Buffer, places: Buffer, lead: Index, out: Index) -> None:
        """Find the places in the plane that get the gradients of a row of windows; -1 where there is none."""
        emit, window = self.emit, self.window
        for v, _ in emit.spans(self.outs[-1], self.lanes):
            emit.store(places, literal(-1, "i32"), v)
        with ExitStack() as stack:
            tap = tuple(stack.enter_context(emit.loop(k, SERIAL, "t")) for k in self.kernel[:-1])
            outer = zip(out, tap, window.strides[:-1], window.low[:-1], window.dilations[:-1], strict=True)
            inside, conditions = inside_of(tuple(i * s - b + r * d for i, r, s, b, d in outer), self.sizes[:-1])
            if conditions:
                stack.enter_context(emit.when(tirx.all(*conditions)))
            line = emit.bind(linear(inside, self.sizes[:-1]), "line")
            for s in range(self.kernel[-1]):
                column = s * window.dilations[-1]
                for v, _ in pieces(emit, self.outs[-1], self.lanes):
                    with self.body.point():
                        self._match(copy, places, (*lead, *out, v), line, column)

    def _match(self, copy: Buffer, places: Buffer, index: Index, line: Expr, column: int) -> None:
        """Record the place of an element `column` behind the start of its window, if it is the first to equal the
        maximum."""
        split, v = self.split, index[-1]
        place = v * split + (column - self.low)
        value = tirx.BufferLoad(copy, [(line * split + column % split) * self.width + column // split + v])
        top = self.body.at(self.y, index)
        hit = tirx.EQ(value, top)
        if self.dtype in FLOATS:
            hit = tirx.Or(hit, tirx.isnan(value))
        before = tirx.BufferLoad(places, [v])
        wanted = tirx.all(hit, before < 0, place >= 0, place < self.sizes[-1])
        self.emit.store(places, tirx.Select(wanted, line * self.sizes[-1] + place, before), v)
