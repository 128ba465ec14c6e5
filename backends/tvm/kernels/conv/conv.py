"""Convolutions and their gradients: the choice of a formulation by sizes and machine.

In: conv, conv_grad_input or conv_grad_weight with any strides, dilations, padding and groups. Out: the loops of one of

  * a direct correlation (tools/correlation.py; register_tiles.py, planes.py for groups of one channel, channel_lanes.py
    where their images are small, lines.py for few output channels, row_vectors.py for sums of few terms): convolutions,
    and gradients for the input, which
    are correlations of the output's gradient with the flipped weight. With stride s they fall apart into s phases per
    dimension, each with the taps that meet its positions:
        dx[h] = sum of dy[(h + low - r * dilation) / stride] * w[r]
    over the taps r for which this divides without remainder,
    and in a phase, h = first mod stride, these taps are every (stride / gcd(stride, dilation))-th;
  * the direct sums on tile registers (tile_conv.py), where the machine has them and there is enough to do;
  * squares of 2x2 outputs with fewer multiplications (winograd.py): else, of 3x3 taps side by side, where there is
    enough to do;
  * a product of few rows (product/few_rows.py): one tap at the only position of few images;
  * a product that reads small images where they lie (small_images.py): one tap, every position once, weights packed
    ahead;
  * a product per image (points.py): one tap, every position once, and not a small image;
  * sums over positions: gradients for the weight (weight/tiles.py with tile registers, weight/direct.py without),
    and weight/depthwise.py for small groups;
  * a product that gathers windows (windows.py): everything else: three and more spatial dimensions, convolutions with
    one tap that leave positions out, and integers.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from math import gcd, prod

from penstock.backends.tvm.group import PACKED
from penstock.backends.tvm.kernels.conv.weight.depthwise import emit_depthwise_gradient
from penstock.backends.tvm.kernels.conv.weight.direct import WeightGradient, emit_weight_gradient, is_suited
from penstock.backends.tvm.kernels.conv.weight.tiles import emit_weight_tiles, plan_tiles
from penstock.backends.tvm.kernels.product.choose import emit_product
from penstock.backends.tvm.kernels.product.few_rows import DOT_ROWS
from penstock.backends.tvm.kernels.tools.body import EFFECTS, Body
from penstock.backends.tvm.kernels.tools.correlation import Correlation, Pair, Phase, lanes_of
from penstock.backends.tvm.kernels.tools.elements import Index, unravel, zero
from penstock.backends.tvm.kernels.tools.emit import Buffer, Expr, ceil_div, literal
from penstock.backends.tvm.kernels.tools.product_terms import Product
from penstock.ir.graph import Op, Value
from penstock.ir.ops import Window, complete_attrs, ints, window_of
from penstock.ir.types import FLOATS

from . import channel_lanes, planes, row_vectors, small_images, tile_conv, windows
from . import winograd as conv_winograd
from .lines import emit_lines
from .points import PointProduct, emit_points
from .register_tiles import emit_tiles

# A smaller image leaves lanes empty behind its last whole vector, and has no long runs to pack.
_LEAST_POSITIONS = 256
# Fewer than a tile of positions with channels in lanes has.
_FEW_POSITIONS = 14
# Pairs of channels in a group up to which each pair's gradient for the weight may be summed on its own.
_SMALL_GROUP = 64


@dataclass(frozen=True)
class Geometry:
    """A window over two spatial dimensions; of one spatial dimension it is the second."""

    kernel: Pair
    strides: Pair
    low: Pair
    dilations: Pair
    flat: bool

    def place(self, n: Expr, channel: Expr, h: Expr, w: Expr) -> Index:
        return (n, channel, w) if self.flat else (n, channel, h, w)

    def sizes(self, value: Value) -> Pair:
        return (1, value.type.dims[2]) if self.flat else value.type.dims[2:4]  # type: ignore[return-value]

    def padded(self, spatial: Pair) -> Pair:
        """Return the sizes of the source with its border that windows at `spatial` positions read."""
        sizes = zip(spatial, self.strides, self.kernel, self.dilations, strict=True)
        return tuple((o - 1) * s + (k - 1) * d + 1 for o, s, k, d in sizes)  # type: ignore[return-value]


def _geometry(w: Window) -> Geometry | None:
    if len(w.kernel) == 2:
        return Geometry(w.kernel, w.strides, w.low, w.dilations, False)  # type: ignore[arg-type]
    if len(w.kernel) == 1:
        return Geometry((1, w.kernel[0]), (1, w.strides[0]), (0, w.low[0]), (1, w.dilations[0]), True)
    return None


def _is_direct(op: Op) -> bool:
    """Return whether the operation is on floats, and no tensor of it is empty."""
    return op.outs[0].type.dtype in FLOATS and all(prod(v.type.dims) for v in (*op.ins, *op.outs))


def _stored(body: Body, value: Value) -> Buffer | None:
    """Return the buffer of a value that is read from memory as it is; None for other values."""
    changed = {op.var for op in body.group.ops if op.kind in EFFECTS}
    return body.operand(value) if body.is_stored(value) and body.group.homes.get(value) not in changed else None


def _zeros(g: Geometry) -> Index:
    return (zero(),) if g.flat else (zero(), zero())


def _is_pointwise(g: Geometry, sizes: Pair, spatial: Pair) -> bool:
    """Return whether there is one tap, every position once, and enough positions for lanes. Small images are better off
    with channels in lanes."""
    return _takes_all(g, sizes, spatial) and prod(sizes) >= _LEAST_POSITIONS


def _takes_all(g: Geometry, sizes: Pair, spatial: Pair) -> bool:
    """Return whether there is one tap, and every position once."""
    return g.kernel == g.strides == (1, 1) and sizes == spatial and not any(g.low)


def _gathers(op: Op, images: int, positions: int, strides: Pair) -> bool:
    """Return whether one tap is faster as a product that gathers while it packs.

    It is for few positions of each image, so that all images share a pass over the weights. It is where strides leave
    most of the source out, unless weights are packed ahead, when packing all the rest costs more than it saves."""
    return (images > 1 and positions < _FEW_POSITIONS) or (strides != (1, 1) and not op.attrs.get(PACKED))


def _emit_pointwise(
    body: Body,
    op: Op,
    out: Value,
    source: Value,
    groups: int,
    channels: int,
    g: Geometry,
    weight: Callable[[Expr, Expr, Expr], Expr],
) -> None:
    spatial = g.sizes(out)

    def place(n: Expr, channel: Expr, p: Expr) -> Index:
        return g.place(n, channel, *(unravel(p, spatial) if not g.flat else (zero(), p)))

    emit_points(
        body,
        PointProduct(
            out=out,
            images=out.type.dims[0],
            groups=groups,
            filters=out.type.dims[1] // groups,
            channels=channels,
            positions=prod(spatial),
            source=lambda n, channel, p: body.at(source, place(n, channel, p)),
            weight=weight,
            place=place,
            op=op,
            plain=_stored(body, source),
        ),
    )


def emit_correlation(body: Body, c: Correlation) -> None:
    lanes = lanes_of(body, c)
    if conv_winograd.suits(body, c):
        conv_winograd.emit_winograd(body, c, lanes)
    elif channel_lanes.suits(body, c):
        channel_lanes.emit_channel_lanes(body, c)
    elif planes.suits(c):
        planes.emit_planes(body, c, lanes)
    elif row_vectors.suits(body, c):
        row_vectors.emit_row_vectors(body, c)
    else:
        (emit_lines if c.filters * 2 <= lanes else emit_tiles)(body, c, lanes)


def _correlation_of(body: Body, op: Op, g: Geometry, groups: int) -> Correlation:
    """Describe a convolution as a correlation."""
    x, w, y = op.ins[0], op.ins[1], op.outs[0]
    filters = y.type.dims[1] // groups
    spatial = g.sizes(y)

    def weight(group: Expr, o: Expr, c: Expr, r: Expr, s: Expr) -> Expr:
        return body.at(w, (group * filters + o, c, s) if g.flat else (group * filters + o, c, r, s))

    return Correlation(
        out=y,
        images=y.type.dims[0],
        groups=groups,
        filters=filters,
        channels=w.type.dims[1],
        sizes=g.sizes(x),
        low=g.low,
        padded=g.padded(spatial),
        strides=g.strides,
        dilations=g.dilations,
        step=(1, 1),
        spatial=spatial,
        phases=(Phase((0, 0), spatial, (0, 0), g.kernel, lambda r, s: (r, s)),),
        source=lambda n, c, h, v: body.at(x, g.place(n, c, h, v)),
        weight=weight,
        place=g.place,
        plain=_stored(body, x),
        stored=_stored(body, w),
        filters_first=True,
        kernel=g.kernel,
        op=op,
        counts_border=True,
    )


def _is_row(op: Op, g: Geometry, c: Correlation) -> bool:
    """Return whether there is one tap at one position of few images: a product of few rows."""
    return _takes_all(g, c.sizes, c.spatial) and prod(c.spatial) == 1 and c.groups == 1 and c.images <= DOT_ROWS


def _emit_row(body: Body, op: Op, g: Geometry, c: Correlation) -> None:
    x, w = op.ins[0], op.ins[1]

    def place(_: Index, i: Expr, j: Expr) -> Index:
        return (i, j, *_zeros(g))

    emit_product(
        body,
        Product(
            *(c.out, (), c.images, c.filters, c.channels),
            a=lambda _, i, k: body.at(x, (i, k, *_zeros(g))),
            b=lambda _, k, j: body.at(w, (j, k, *_zeros(g))),
            place=place,
            a_along_k=True,
            b_along_j=False,
            b_along_k=True,
            b_address=lambda _, k, j: body.address(w, (j, k, *_zeros(g))),
        ),
    )


def emit_conv(body: Body, op: Op) -> None:
    """Emit a convolution by the formulation that suits its sizes."""
    x, w, y = op.ins[0], op.ins[1], op.outs[0]
    attrs = complete_attrs(op)
    g = _geometry(window_of(attrs, w.type.dims[2:]))
    groups = int(attrs["groups"])  # type: ignore[arg-type]
    if g is None or not _is_direct(op):
        windows.emit_conv(body, op)
        return
    c = _correlation_of(body, op, g, groups)
    if tile_conv.suits(body, c):
        tile_conv.emit_tile_conv(body, c)
    elif _is_row(op, g, c):
        _emit_row(body, op, g, c)
    elif _takes_all(g, c.sizes, c.spatial) and small_images.suits(body, c):
        small_images.emit_small_images(body, c)
    elif _is_pointwise(g, c.sizes, c.spatial):

        def weight(group: Expr, o: Expr, channel: Expr) -> Expr:
            return body.at(w, (group * c.filters + o, channel, *_zeros(g)))

        _emit_pointwise(body, op, y, x, groups, c.channels, g, weight)
    elif g.kernel == (1, 1) and groups == 1 and not any(g.low) and _gathers(op, c.images, prod(c.spatial), g.strides):
        windows.emit_conv(body, op)
    else:
        emit_correlation(body, c)


@dataclass(frozen=True)
class _PhaseLine:
    """One dimension of one phase: its positions, its taps last to first, and where its first window starts in the
    source."""

    first: int
    count: int
    taps: tuple[int, ...]
    start: int


def _lines(size: int, kernel: int, stride: int, low: int, dilation: int) -> list[_PhaseLine]:
    lines = []
    apart = stride // gcd(stride, dilation)
    for first in range(min(stride, size)):
        taps = [r for r in range(min(apart, kernel)) if (first + low - r * dilation) % stride == 0]
        taps = list(range(taps[0], kernel, apart)) if taps else []
        start = (first + low - taps[-1] * dilation) // stride if taps else 0
        lines.append(_PhaseLine(first, ceil_div(size - first, stride), tuple(reversed(taps)), start))
    return lines


def emit_conv_grad_input(body: Body, op: Op) -> None:
    """Emit the gradient of a convolution for its input, which is a correlation of the output's gradient."""
    dy, w, dx = op.ins[0], op.ins[1], op.outs[0]
    attrs = complete_attrs(op)
    g = _geometry(window_of(attrs, w.type.dims[2:]))
    groups = int(attrs["groups"])  # type: ignore[arg-type]
    if g is None or not _is_direct(op):
        windows.emit_conv_grad_input(body, op)
        return
    channels = dy.type.dims[1] // groups
    spatial, sizes = g.sizes(dx), g.sizes(dy)

    def weight(group: Expr, o: Expr, c: Expr, r: Expr, s: Expr) -> Expr:
        return body.at(w, (group * channels + c, o, s) if g.flat else (group * channels + c, o, r, s))

    def source(n: Expr, c: Expr, h: Expr, v: Expr) -> Expr:
        return body.at(dy, g.place(n, c, h, v))

    plain, stored = _stored(body, dy), _stored(body, w)
    gradient = _InputGradient(op, dx, g, groups, w.type.dims[1], channels, sizes, source, weight, plain, stored)
    correlation = gradient.correlation()
    if tile_conv.suits(body, correlation):
        tile_conv.emit_tile_conv(body, correlation)
    elif _is_pointwise(g, sizes, spatial):

        def tap(group: Expr, o: Expr, c: Expr) -> Expr:
            return body.at(w, (group * channels + c, o, *_zeros(g)))

        _emit_pointwise(body, op, dx, dy, groups, channels, g, tap)
    else:
        emit_correlation(body, correlation)


@dataclass(frozen=True)
class _InputGradient:
    """The gradient of a convolution for its input. `filters` are its channels in a group, `channels` and `sizes` those
    of dy."""

    op: Op
    dx: Value
    g: Geometry
    groups: int
    filters: int
    channels: int
    sizes: Pair
    source: Callable[[Expr, Expr, Expr, Expr], Expr]
    weight: Callable[[Expr, Expr, Expr, Expr, Expr], Expr]
    plain: Buffer | None = None
    stored: Buffer | None = None

    def correlation(self) -> Correlation:
        """Describe the correlation of dy that gives the gradient, with a phase for each remainder modulo the
        strides."""
        g, spatial = self.g, self.g.sizes(self.dx)
        step = tuple(s // gcd(s, d) for s, d in zip(g.strides, g.dilations, strict=True))
        dilations = tuple(d // gcd(s, d) for s, d in zip(g.strides, g.dilations, strict=True))
        rows, columns = (
            _lines(n, k, s, low, d)
            for n, k, s, low, d in zip(spatial, g.kernel, g.strides, g.low, g.dilations, strict=True)
        )
        low = (_border(rows), _border(columns))
        padded = tuple(_reach(lines, d) + edge for lines, d, edge in zip((rows, columns), dilations, low, strict=True))

        def phase(a: _PhaseLine, b: _PhaseLine) -> Phase:
            def tap(r: Expr, s: Expr) -> tuple[Expr, Expr]:
                return a.taps[0] - r * step[0], b.taps[0] - s * step[1]

            taps = (len(a.taps), len(b.taps)) if a.taps and b.taps else (0, 0)
            shift = (a.start + low[0], b.start + low[1]) if all(taps) else (0, 0)
            return Phase((a.first, b.first), (a.count, b.count), shift, taps, tap)

        return Correlation(
            out=self.dx,
            images=self.dx.type.dims[0],
            groups=self.groups,
            filters=self.filters,
            channels=self.channels,
            sizes=self.sizes,
            low=low,
            padded=padded,  # type: ignore[arg-type]
            strides=(1, 1),
            dilations=dilations,  # type: ignore[arg-type]
            step=g.strides,
            spatial=spatial,
            phases=tuple(phase(a, b) for a in rows for b in columns),
            source=self.source,
            weight=self.weight,
            place=g.place,
            plain=self.plain,
            stored=self.stored,
            filters_first=False,
            kernel=g.kernel,
            op=self.op,
            counts_border=False,
        )


def _border(lines: list[_PhaseLine]) -> int:
    """Count the elements in front of the source that the windows of some phases reach."""
    return max((-line.start for line in lines if line.taps), default=0)


def _reach(lines: list[_PhaseLine], dilation: int) -> int:
    """Count the elements of the source from its first to the last that the windows of some phases read."""
    ends = [line.start + (line.count - 1) + (len(line.taps) - 1) * dilation + 1 for line in lines if line.taps]
    return max(ends, default=1)


def emit_conv_grad_weight(body: Body, op: Op) -> None:
    """Emit the gradient of a convolution for its weight by the formulation that suits its sizes."""
    x, dy, dw = op.ins[0], op.ins[1], op.outs[0]
    attrs = complete_attrs(op)
    g = _geometry(window_of(attrs, dw.type.dims[2:]))
    groups = int(attrs["groups"])  # type: ignore[arg-type]
    if g is not None and _is_direct(op) and body.is_stored(x) and body.is_stored(dy):
        spatial = g.sizes(dy)
        source, gradient = _stored(body, x), _stored(body, dy)
        if source is not None and gradient is not None:
            shape = (dy.type.dims[0], groups, dy.type.dims[1] // groups, dw.type.dims[1])
            window = (g.sizes(x), spatial, g.kernel, g.strides, g.dilations, g.low, g.padded(spatial))
            wanted = WeightGradient(dw, *shape, *window, source, gradient, g.place)
            plan = plan_tiles(body, wanted)
            if plan is not None:
                emit_weight_tiles(body, wanted, plan)
                return
            if is_suited(body, wanted):
                emit_weight_gradient(body, wanted)
                return
            if wanted.filters * wanted.channels <= _SMALL_GROUP:
                emit_depthwise_gradient(body, wanted)
                return
    windows.emit_conv_grad_weight(body, op)


def emit_avg_pool_grad(body: Body, op: Op) -> None:
    """Emit the gradient of an average pool: that of a depthwise convolution, whose weight is the same number
    everywhere."""
    dy, dx = op.ins[0], op.outs[0]
    attrs = complete_attrs(op)
    window = window_of(attrs, ints(attrs["window"]))
    geometry = _geometry(window)
    if windows.covers_all(op):
        windows.emit_global_pool_grad(body, op)
        return
    if geometry is None or not _is_direct(op):
        windows.emit_avg_pool_grad(body, op)
        return
    counted, sizes, dtype = bool(attrs["include_pad"]), dx.type.dims[2:], dx.type.dtype

    def share(n: Expr, c: Expr, h: Expr, w: Expr) -> Expr:
        index = geometry.place(n, c, h, w)
        value = body.at(dy, index)
        return value if counted else value / windows.count_taps(window, index[2:], sizes, dtype)

    factor = literal(1 / prod(window.kernel) if counted else 1, dtype)
    channels, sizes_of_dy = dx.type.dims[1], geometry.sizes(dy)
    gradient = _InputGradient(op, dx, geometry, channels, 1, 1, sizes_of_dy, share, lambda *_: factor)
    emit_correlation(body, gradient.correlation())
