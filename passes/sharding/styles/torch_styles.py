"""Styles of torch's `parallelize_module`, as texts about modules (modules.py).

In: the entries of a plan, names of modules with styles. Out: texts such as `h.*.fc1=Colwise/tp` and
`h.*.ln=out:[_,/tp,...]`. Styles and placements are known by the names of their classes and by their attributes: torch
is not imported, and no group of processes is needed.

A style says where torch exchanges tensors, a text how one tensor lies. So a style adds texts where it says more than
its kind does: `output_layouts` of Rowwise are written down where they are not Replicate(), and so on. What a module
takes is split where `input_layouts` or the desired layouts split it. Texts about that come last, behind those of the
modules that make it. `use_local_output` says what torch hands to the program's own code, and means nothing here.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

from penstock.support.errors import UsageError
from penstock.support.words import itemised

COLWISE, ROWWISE = "Colwise", "Rowwise"
_LAST = -1
_KNOWN = ("ColwiseParallel", "RowwiseParallel", "SequenceParallel", "PrepareModuleInput", "PrepareModuleOutput")


@dataclass
class StyleTexts:
    """Texts of all styles of a plan, and what cannot be read of them."""

    axis: str
    first: list[str] = field(default_factory=list)
    last: list[str] = field(default_factory=list)
    problems: list[str] = field(default_factory=list)

    def take(self, name: str, style: Any) -> None:
        """Add the texts of one module's style; a text is the name of a style."""
        kind = style if isinstance(style, str) else type(style).__name__
        reader = _READERS.get(kind.removesuffix("Parallel"))
        if reader is None:
            self.problems.append(f"{name!r} has the style {kind}")
            return
        try:
            for text in reader(style, self.axis):
                (self.last if text.startswith(("in:", "arg.")) else self.first).append(f"{name}={text}")
        except _UnknownPlacement as error:
            self.problems.append(f"{name!r} has {error} in its {kind}")

    def texts(self) -> tuple[str, ...]:
        """Return all texts; a UsageError names everything that is not known."""
        if self.problems:
            raise UsageError(
                "cannot read these styles:" + itemised(self.problems),
                hint=f"known are {', '.join(_KNOWN)}, with Shard and Replicate; or give a tuple, or a text '[_,/tp]'",
            )
        return (*self.first, *self.last)


class _UnknownPlacement(Exception):
    """A placement other than Shard and Replicate."""


def _dim(placement: Any) -> int | None:
    """Return the dimension that a placement splits; None for a whole tensor."""
    kind = type(placement).__name__
    if kind == "Replicate":
        return None
    if kind == "Shard" and isinstance(placement.dim, int):
        return int(placement.dim)
    raise _UnknownPlacement(f"the placement {kind}")


def _layout(dim: int | None, axis: str) -> str:
    if dim is None:
        return "[...]"
    if dim < 0:
        return f"[...,/{axis}{',_' * (-1 - dim)}]"
    return f"[{'_,' * dim}/{axis},...]"


def _colwise(style: Any, axis: str) -> Iterator[str]:
    if (out := _first(style, "output_layouts", _LAST)) != _LAST:
        yield f"out:{_layout(out, axis)}"
    yield f"{COLWISE}/{axis}"
    if (dim := _first(style, "input_layouts", None)) is not None:
        yield f"in:{_layout(dim, axis)}"


def _rowwise(style: Any, axis: str) -> Iterator[str]:
    if (out := _first(style, "output_layouts", None)) is not None:
        yield f"out:{_layout(out, axis)}"
    yield f"{ROWWISE}/{axis}"
    if (dim := _first(style, "input_layouts", _LAST)) not in (None, _LAST):
        yield f"in:{_layout(dim, axis)}"


def _sequence(style: Any, axis: str) -> Iterator[str]:
    dim = _first(style, "sequence_sharding", 1)
    yield f"out:{_layout(dim, axis)}"
    yield f"in:{_layout(dim, axis)}"


def _first(style: Any, attribute: str, default: int | None) -> int | None:
    listed = getattr(style, attribute, None)
    return default if not listed else _dim(listed[0])


def _module_input(style: Any, axis: str) -> Iterator[str]:
    arriving, wanted = style.input_layouts or (), style.desired_input_layouts or ()
    layouts = [_taken(*pair, axis) for pair in zip(arriving, wanted, strict=True)]
    if any(layout != "?" for layout in layouts):
        yield f"in:{':'.join(layouts)}"
    named: Mapping[str, Any] = style.input_kwarg_layouts or {}
    for name, placement in named.items():
        layout = _taken(placement, (style.desired_input_kwarg_layouts or {}).get(name), axis)
        if layout != "?":
            yield f"arg.{name}:{layout}"


def _taken(arriving: Any, wanted: Any, axis: str) -> str:
    """Return the layout of what a module takes: that in which it arrives, or the one wanted where that splits it."""
    if arriving is None:
        return "?"
    dim = _dim(arriving)
    return _layout(_dim(wanted) if dim is None and wanted is not None else dim, axis)


def _module_output(style: Any, axis: str) -> Iterator[str]:
    pairs = zip(style.output_layouts, style.desired_output_layouts, strict=True)
    yield f"out:{':'.join('?' if now is None else _layout(_dim(wanted), axis) for now, wanted in pairs)}"


def _module_both(style: Any, axis: str) -> Iterator[str]:
    yield from _module_output(style.prepare_module_output, axis)
    yield from _module_input(style.prepare_module_input, axis)


_READERS = {
    "Colwise": _colwise,
    "Rowwise": _rowwise,
    "Sequence": _sequence,
    "PrepareModuleInput": _module_input,
    "PrepareModuleOutput": _module_output,
    "PrepareModuleInputOutput": _module_both,
}
