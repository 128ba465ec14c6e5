"""Layouts as users write them, as the list of texts that the pass `shard` reads.

    h.*.weight=[_,/tp]       a pattern of names and a layout
    preset:megatron          layouts by the structure of the model
    FILE.toml                a table `layouts` of patterns and layouts, in order, and a list `presets`
    {"h.*.weight": (None, "tp"), "x": ("?", ("dp", "tp"))}       in Python, like partition specs of jax
    {"h.*.fc1": "Colwise", "h.*.fc2": "Rowwise"}                 modules of torch, or a plan of parallelize_module

A style of torch is known by the name of its class: ColwiseParallel, RowwiseParallel. `Colwise` splits the outputs of
a linear module, its bias with them, `Rowwise` the inputs.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.support.errors import UsageError

PRESET = "preset:"
# The layout of a linear module's weight [out, in] under a style of torch. A bias lies as the result does.
_STYLES = {"Colwise": "[/{axis},_]", "Rowwise": "[_,/{axis}]"}


def layouts_of(given: str | Path | Sequence[str] | Mapping[str, Any] | None, axis: str = "tp") -> tuple[str, ...]:
    """Return layouts as texts `PATTERN=[...]` and `preset:NAME`. Styles of torch split over `axis`."""
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return tuple(text for name, layout in given.items() for text in _from_python(str(name), layout, axis))
    entries = [given] if isinstance(given, str | Path) else given
    return tuple(text for entry in entries for text in _from_text(str(entry)))


def _from_text(entry: str) -> Iterator[str]:
    if entry.startswith(PRESET) or entry.endswith("]"):
        yield entry
    elif entry.endswith(".toml"):
        yield from _from_file(Path(entry))
    else:
        raise UsageError(
            f"{entry!r} is no layout",
            hint="give FILE.toml, preset:NAME or PATTERN=[DIMENSION,...], such as 'w=[_,/tp]'",
        )


def _from_file(path: Path) -> Iterator[str]:
    try:
        table = tomllib.loads(path.read_text())
    except OSError as error:
        raise UsageError(f"cannot read layouts: {error.strerror}", where=str(path)) from error
    except (tomllib.TOMLDecodeError, UnicodeDecodeError) as error:
        raise UsageError(f"is no TOML file: {error}", where=str(path)) from error
    unknown = sorted(table.keys() - {"presets", "layouts"})
    layouts, presets = table.get("layouts", {}), table.get("presets", [])
    texts = isinstance(presets, list) and all(isinstance(x, str) for x in presets)
    if unknown or not isinstance(layouts, dict) or not texts:
        what = f"has {', '.join(unknown)}" if unknown else "has another form"
        raise UsageError(
            what, where=str(path), hint='expected presets = ["NAME"] and a table [layouts] "PATTERN" = "[_,/tp]"'
        )
    for pattern, layout in layouts.items():
        if not isinstance(layout, str):
            raise UsageError(f"the layout of {pattern!r} is {layout!r}", where=str(path), hint='write "[_,/tp]"')
        yield f"{pattern}={layout}"
    for name in presets:
        yield PRESET + name


def _from_python(name: str, layout: Any, axis: str) -> Iterator[str]:
    """Yield the texts of one entry of a mapping: a layout as text or tuple, or a style for a module."""
    if isinstance(layout, tuple | list):
        yield f"{name}=[{','.join(map(_dimension, layout))}]"
    elif isinstance(layout, str) and layout.startswith("["):
        yield f"{name}={layout}"
    else:
        style = (layout if isinstance(layout, str) else type(layout).__name__).removesuffix("Parallel")
        if style not in _STYLES:
            raise UsageError(
                f"the layout of {name!r} is {style!r}",
                hint=f"give a tuple, a text such as '[_,/tp]', or a style: {', '.join(_STYLES)}",
            )
        yield f"{name}.weight={_STYLES[style].format(axis=axis)}"


def _dimension(part: Any) -> str:
    """Return the text of a dimension: None is whole, "?" free, an axis or several."""
    if part is None:
        return "_"
    if part in ("?", "_"):
        return str(part)
    if isinstance(part, tuple | list):
        return "".join(f"/{axis}" for axis in part)
    return str(part) if "/" in str(part) else f"/{part}"
