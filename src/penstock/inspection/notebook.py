"""Display of modules, bundles, plans and traces in a notebook.

In: a module, a bundle, a planned module or a trace. Out: one line, or a fragment of HTML without scripts; text is
escaped where it goes in (html.py).

The classes themselves stand in lower rooms and ask penstock.support.notebook, which comes here. A plan is shown as
`penstock inspect` shows it: by the facts of summary.py. A trace is a picture: a row per rank, a box for every
computation that is wide enough to be seen, with the action and its time as its title.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import singledispatch
from html import escape

from penstock.backends.bundle.format import Bundle
from penstock.inspection import html
from penstock.inspection.traces.trace import Trace
from penstock.inspection.views.gantt import COLOURS
from penstock.ir.graph import Module
from penstock.ir.schedule import COMPUTE
from penstock.passes.costs.prices import shown_seconds
from penstock.planning.plan import Plan, plan_line
from penstock.support.errors import PenstockError
from penstock.support.words import counted, shown_bytes

from .summary import summarize

_DECIDING = ("placement", "partition", "update-on", "schedule", "recompute")
_WIDTH, _LEFT, _ROW = 960, 190, 22
# Narrower boxes are not drawn: a long run stays a picture that can be opened.
_SEEN = 0.15


@singledispatch
def in_one_line(shown: object) -> str:
    """Describe an object in one line, for `repr`."""
    raise TypeError(f"no line for {type(shown).__name__}")


@singledispatch
def as_html(shown: object) -> str:
    """Show an object as the result of a cell."""
    raise TypeError(f"no HTML for {type(shown).__name__}")


@in_one_line.register
def _(module: Module) -> str:
    return f"<{html.describe(module)}>"


@as_html.register
def _(module: Module) -> str:
    return html.module_html(module)


@in_one_line.register
def _(bundle: Bundle) -> str:
    return f"<{_bundle_line(bundle)}>"


@as_html.register
def _(bundle: Bundle) -> str:
    """Show the ranks with their files, and the module."""
    ranks = [
        (r.rank, r.stage, r.device, r.host, r.threads, shown_bytes(bundle.bytes_of(r.files)))
        for r in bundle.manifest.ranks
    ]
    line = _bundle_line(bundle)
    parts = [html.title(line), html.table(("rank", "stage", "device", "host", "threads", "files"), ranks)]
    try:
        parts.append(html.module_html(bundle.module))
    except PenstockError as error:
        parts.append(html.line(str(error)))
    return f"<div>{''.join(parts)}</div>"


def _bundle_line(bundle: Bundle) -> str:
    manifest = bundle.manifest
    size = shown_bytes(bundle.bytes_of(manifest.files))
    ranks = counted(len(manifest.ranks), "rank")
    return f"bundle {bundle.path}: {manifest.name}, back end {manifest.backend}, {ranks}, {size}"


@as_html.register
def _(trace: Trace) -> str:
    return trace_html(trace)


@as_html.register
def _(plan: Plan) -> str:
    return plan_html(plan.module)


def plan_html(module: Module) -> str:
    """Show the predictions for stages, the notes of passes that decide, and the module."""
    facts = summarize(module)
    rows = [
        (
            row.stage,
            " ".join(row.devices),
            f"{row.parameters:,}",
            "-" if row.seconds is None else shown_seconds(row.seconds),
            "-" if row.peak is None else shown_bytes(row.peak),
            shown_bytes(row.sent),
        )
        for row in facts.stages
    ]
    parts = [
        html.title(plan_line(module)),
        html.table(("stage", "devices", "parameters", "time per batch", "peak memory", "sent per batch"), rows),
        *(html.line(f"{origin}: {text}") for origin, text in facts.notes if origin in _DECIDING),
        html.module_html(module),
    ]
    return f"<div>{''.join(parts)}</div>"


def trace_html(trace: Trace) -> str:
    return f"<div>{html.title(repr(trace)[1:-1])}{''.join(_picture(trace))}</div>"


def _picture(trace: Trace) -> Iterator[str]:
    scale = (_WIDTH - _LEFT) / (trace.seconds or 1.0)
    height = (_ROW + 4) * len(trace.rows)
    yield (
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {_WIDTH} {height}" width="100%" '
        'font-family="sans-serif" font-size="11">'
    )
    for number, row in enumerate(trace.rows):
        top = number * (_ROW + 4)
        yield f'<text x="0" y="{top + 15}" fill="currentColor">{escape(row.name)}</text>'
        for span in row.spans:
            width = (span.end - span.start) * scale
            if span.kind in COMPUTE and width >= _SEEN:
                tip = f"{span.action}: {shown_seconds(span.start)} to {shown_seconds(span.end)}"
                box = (
                    f'x="{_LEFT + span.start * scale:.2f}" y="{top}" width="{width:.2f}" height="{_ROW}" '
                    f'fill="{COLOURS[span.kind]}"'
                )
                yield f"<rect {box}><title>{escape(tip)}</title></rect>"
    yield "</svg>"
