"""Pictures of a simulated run: text for a terminal, SVG with memory over time for a browser.

In: a Simulated. Out: text, or a self-contained SVG. (exports/schedule.py writes Chrome traces.)

In the text every column is an equal part of the time. It shows the kind of action that took most of it (F, R, B, W, U,
P, N), `.` where nothing ran for most of it. The SVG has one row per rank with a box for every computation that is wide
enough to be seen. Below it, where curves are given, are the bytes that live, as a share of the highest curve of all.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from html import escape

import numpy as np

from penstock.ir.schedule import COMPUTE
from penstock.passes.costs.prices import shown_seconds
from penstock.passes.simulator.result import Simulated

Curve = Sequence[tuple[float, float]]

COLOURS = {
    "F": "#7aa6d8",
    "R": "#8fc6c0",
    "B": "#e3a857",
    "W": "#c8d06a",
    "U": "#8f6bb1",
    "P": "#b98aa8",
    "N": "#a8a8a8",
}
_WIDTH, _ROW, _CURVE, _LEFT = 1400, 22, 26, 90
# Boxes narrower than this many pixels are not drawn: thousands of ranks make a picture that can still be opened.
_SEEN = 0.15


def text_gantt(simulated: Simulated, columns: int = 100, until: float | None = None) -> str:
    """Draw one line per rank, from the beginning to a moment."""
    shown = list(simulated.lines)
    end = until or simulated.finish or 1.0
    label = max((len(f"rank {rank}") for rank in shown), default=0)
    lines = []
    for rank in shown:
        shares = {kind: np.zeros(columns) for kind in COMPUTE}
        line = simulated.lines[rank]
        for step, start, finish in zip(line.steps, line.starts, line.finishes, strict=True):
            if step.action.kind in shares and start < min(finish, end):
                first, last = start / end * columns, finish / end * columns
                for column in range(int(first), min(columns, int(np.ceil(last)))):
                    shares[step.action.kind][column] += min(last, column + 1) - max(first, column)
        kinds = list(shares)
        table = np.stack([shares[kind] for kind in kinds])
        best, idle = table.argmax(axis=0), 1 - table.sum(axis=0)
        cells = ["." if idle[c] > table[best[c], c] else kinds[best[c]] for c in range(columns)]
        lines.append(f"{f'rank {rank}':<{label}} | {''.join(cells).rstrip('.')}")
    return "\n".join([*lines, f"the first {shown_seconds(end)}, {shown_seconds(end / columns)} a column"])


def svg_gantt(simulated: Simulated, title: str, curves: Mapping[int, Curve] | None = None) -> str:
    """Draw a self-contained picture. `curves` are (seconds, bytes) of ranks, in order of time."""
    curves = curves or {}
    end = simulated.finish or 1.0
    scale = (_WIDTH - _LEFT - 10) / end
    pitch = _ROW + (_CURVE if curves else 0) + 6
    most = max((size for curve in curves.values() for _, size in curve), default=0.0) or 1.0
    height = 40 + pitch * len(simulated.lines)
    parts = [
        (
            f'<svg xmlns="http://www.w3.org/2000/svg" width="{_WIDTH}" height="{height}" font-family="sans-serif" '
            'font-size="11">'
        ),
        (
            f'<rect width="100%" height="100%" fill="white"/><text x="8" y="16">{escape(title, quote=False)}: '
            f"{shown_seconds(end)}</text>"
        ),
    ]
    for number, (rank, line) in enumerate(simulated.lines.items()):
        top = 28 + number * pitch
        parts.append(f'<text x="8" y="{top + 15}">rank {rank}</text>')
        parts.append(f'<rect x="{_LEFT}" y="{top}" width="{end * scale:.1f}" height="{_ROW}" fill="#f4f4f4"/>')
        for position, (step, start, finish) in enumerate(zip(line.steps, line.starts, line.finishes, strict=True)):
            colour, width = COLOURS.get(step.action.kind), (finish - start) * scale
            if colour is None or width < _SEEN:
                continue
            action = line.action(position, simulated.schedule.microbatches)
            label = f"{action}: {start * 1e3:.3f} to {finish * 1e3:.3f} ms"
            box = (
                f'x="{_LEFT + start * scale:.2f}" y="{top}" width="{width:.2f}" height="{_ROW}" fill="{colour}" '
                'stroke="white" '
                'stroke-width="0.3"'
            )
            parts.append(f"<rect {box}><title>{escape(label, quote=False)}</title></rect>")
            if width > 22:
                parts.append(
                    f'<text x="{_LEFT + start * scale + 3:.2f}" y="{top + 15}">{action.kind}{action.mb}</text>'
                )
        if rank in curves:
            parts += _curve(curves[rank], top + _ROW + 2, scale, most, end)
    return "\n".join([*parts, "</svg>"]) + "\n"


def _curve(curve: Curve, top: float, scale: float, most: float, end: float) -> list[str]:
    low = top + _CURVE - 2
    points, height = [f"{_LEFT},{low}"], low
    for time, size in curve:
        # Steps: what lives stays until the next action has ended.
        points.append(f"{_LEFT + time * scale:.2f},{height:.1f}")
        height = low - (_CURVE - 4) * size / most
        points.append(f"{_LEFT + time * scale:.2f},{height:.1f}")
    points += [f"{_LEFT + end * scale:.2f},{height:.1f}", f"{_LEFT + end * scale:.2f},{low}"]
    peak = max((size for _, size in curve), default=0.0)
    return [
        (
            f'<polygon points="{" ".join(points)}" fill="#cfe3cf"><title>at most {peak / 2**20:.1f} MiB '
            "live</title></polygon>"
        )
    ]
