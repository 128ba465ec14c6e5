"""Layouts as users write them, as the list of texts that the pass `shard` reads.

    h.*.weight=[_,/tp]       a pattern of names and a layout
    preset:megatron          layouts by the structure of the model
    widths, widths:1.5       a width for each layer, with an amplification limit (planning/widths)
    auto                     layouts chosen by price (planning/layouts)
    none                     no layouts: all tensors are whole, whatever the model says
    FILE.toml                a table `layouts` of patterns and layouts, in order, and a list `presets`
    {"h.*.weight": (None, "tp"), "x": ("?", ("dp", "tp"))}       in Python, like partition specs of jax
    {"h.*.fc1": "Colwise", "h.*.fc2": RowwiseParallel()}         modules of torch, or a plan of parallelize_module

Styles of torch are read in styles/torch_styles.py. Their texts name modules, and styles/modules.py finds the tensors
there.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from penstock.passes.sharding.styles.modules import ABOUT_MODULE
from penstock.passes.sharding.styles.torch_styles import COLWISE, ROWWISE, StyleTexts
from penstock.support.errors import UsageError

PRESET = "preset:"
WIDTHS = "widths"
AUTO, NONE = "auto", "none"


def layouts_of(given: str | Path | Sequence[str] | Mapping[str, Any] | None, axis: str = "tp") -> tuple[str, ...]:
    """Return layouts as texts `PATTERN=[...]` and `preset:NAME`. Styles of torch split over `axis`."""
    if given is None:
        return ()
    if isinstance(given, Mapping):
        return _from_python(given, axis)
    entries = [given] if isinstance(given, str | Path) else given
    texts = tuple(text for entry in entries for text in _from_text(str(entry)))
    for word in (AUTO, NONE):
        if word in texts and len(texts) > 1:
            others = ", ".join(text for text in texts if text != word) or word
            raise UsageError(
                f"{word} says how all tensors lie, and other layouts are given", hint=f"leave out {others}"
            )
    return texts


def _from_text(entry: str) -> Iterator[str]:
    entry = _with_axis(entry)
    if (
        is_preset(entry)
        or is_widths(entry)
        or ABOUT_MODULE.fullmatch(entry)
        or entry.endswith("]")
        or entry in (AUTO, NONE)
    ):
        yield entry
    elif entry.endswith(".toml"):
        yield from _from_file(Path(entry))
    else:
        raise UsageError(
            f"{entry!r} is no layout",
            hint="give auto, none, FILE.toml, preset:NAME, widths or PATTERN=[DIMENSION,...], such as 'w=[_,/tp]'",
        )


def is_preset(text: str) -> bool:
    """Return whether a text names a preset, and no value whose name begins like one."""
    return text.startswith(PRESET) and not text.endswith("]")


def is_widths(text: str) -> bool:
    """Return whether a text asks for numbers of devices by layer, and is of no value whose name begins like that."""
    return text.partition(":")[0] == WIDTHS and not text.endswith("]")


def _with_axis(text: str) -> str:
    """Return the text of a style with the axis that it splits over."""
    return f"{text}/tp" if text.rpartition("=")[2] in (COLWISE, ROWWISE) else text


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
        yield _with_axis(f"{pattern}={layout}")
    for name in presets:
        yield PRESET + name


def _from_python(given: Mapping[Any, Any], axis: str) -> tuple[str, ...]:
    """Return the texts of a mapping: layouts as texts or tuples, and behind them styles for modules."""
    texts: list[str] = []
    styles = StyleTexts(axis)
    for name, layout in given.items():
        if isinstance(layout, tuple | list):
            texts.append(f"{name}=[{','.join(map(_dimension, layout))}]")
        elif isinstance(layout, str) and layout.startswith("["):
            texts.append(f"{name}={layout}")
        else:
            styles.take(str(name), layout)
    return (*texts, *styles.texts())


def _dimension(part: Any) -> str:
    """Return the text of a dimension: None is whole, "?" free, an axis or several."""
    if part is None:
        return "_"
    if part in ("?", "_"):
        return str(part)
    if isinstance(part, tuple | list):
        return "".join(f"/{axis}" for axis in part)
    return str(part) if "/" in str(part) else f"/{part}"
