"""Models before planning: one as it was imported, and a file that gives it at any size of a microbatch."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from pathlib import Path
from typing import Any

from penstock.frontends.imported import Imported
from penstock.ir.graph import Module
from penstock.ir.ladder.bounds import Bound, parse_bound
from penstock.ir.sharding.batch_dims import with_batch_dims
from penstock.support.errors import UsageError

from .watching import Feedback

# A size of a dimension, or a bound for it: as such, or written `<=512`.
Size = int | str | Bound
# The model at so many samples per microbatch; None for the size that it has.
Load = Callable[[int | None], "Model"]


@dataclass(frozen=True)
class Model:
    """A model as it was imported: `imported.module` has one graph, `imported.weights` an array per variable. Dimensions
    with `bounds` have their largest size there; `at` imports the model at other sizes of them."""

    imported: Imported
    bounds: Mapping[str, Bound] = field(default_factory=dict)
    at: Callable[[Mapping[str, int]], Model] | None = field(default=None, compare=False)

    @property
    def module(self) -> Module:
        """The model as a program of one graph, `main`."""
        return self._module

    @cached_property
    def _module(self) -> Module:
        return with_batch_dims(self.imported.module, self.imported.symbols)

    def __repr__(self) -> str:
        return f"<imported {repr(self.module)[1:]}"

    def _repr_html_(self) -> str:
        """Show the module in a notebook, without its weights."""
        return self.module._repr_html_()


@dataclass(frozen=True)
class ModelFile:
    """An ONNX file, and the settings it is read with: `dims` binds symbolic dimensions, `known` inputs to numbers or
    arrays; `frozen` and `trained` are patterns of names of parameters."""

    path: str | Path
    dims: Mapping[str, Size]
    known: Mapping[str, object]
    frozen: str | None = None
    trained: str | None = None

    def load(self, size: int | None = None) -> Model:
        """Import the model, with so many samples per microbatch where its dimensions leave them open."""
        dims = self.dims if size is None or self.open is None else {**self.dims, self.open: size}
        return from_onnx(self.path, dims, self.frozen, self.known, self.trained)

    def loader(self, feedback: Feedback) -> Load:
        """Return `load` with each call shown as a step."""

        def load(size: int | None) -> Model:
            with feedback.step("import") as said:
                model = self.load(size)
                said += model.imported.report
            return model

        return load

    def check(self) -> None:
        """Read the file's dimensions, so that an error in it is noticed before any other."""
        _ = self.open

    @cached_property
    def open(self) -> str | None:
        """The symbolic dimension that samples are counted along, where it is the one that nothing binds."""
        from penstock.frontends.onnx import open_dimensions  # lazy: heavy

        first, others = open_dimensions(self.path, dict.fromkeys(self.dims, 1), self.known)
        return first if first is not None and not others else None

    def without(self, dim: str) -> ModelFile:
        """Return the same file with one dimension left open."""
        return replace(self, dims={name: size for name, size in self.dims.items() if name != dim})


def from_onnx(
    path: str | Path,
    dims: Mapping[str, Size] | None = None,
    frozen: str | None = None,
    known: Mapping[str, object] | None = None,
    trained: str | None = None,
) -> Model:
    """Import an ONNX file, as `penstock.from_onnx` does."""
    from penstock.frontends.onnx import OnnxFile, import_onnx  # lazy: heavy

    if all(isinstance(size, int) for size in (dims or {}).values()):
        opened, spare = [], None
    else:
        # The file is opened once for all sizes. The first import, at the largest, keeps what a bundle has of it.
        opened = [OnnxFile(path)]
        spare = opened[0].copy()

    def load(sizes: Mapping[str, int]) -> Model:
        source = opened.pop() if opened else None if spare is None else spare.copy()
        return Model(import_onnx(path, dims=sizes, known=known or {}, frozen=frozen, trained=trained, source=source))

    return with_bounds(dims or {}, load)


def from_torch(
    source: object,
    args: Sequence[Any] = (),
    kwargs: Mapping[str, Any] | None = None,
    *,
    dims: Mapping[str, Size] | None = None,
    frozen: str | None = None,
) -> Model:
    """Import a program of torch, as `penstock.from_torch` does."""
    from penstock.frontends.torch import import_torch  # lazy: heavy

    def load(sizes: Mapping[str, int]) -> Model:
        return Model(import_torch(source, args, kwargs, dims=sizes, frozen=frozen))

    return with_bounds(dims or {}, load)


def with_bounds(dims: Mapping[str, Size], load: Callable[[Mapping[str, int]], Model]) -> Model:
    """Import a model at its largest size, with what imports it at others."""
    fixed = {name: size for name, size in dims.items() if isinstance(size, int)}
    bounds = {name: bound_of(name, size) for name, size in dims.items() if not isinstance(size, int)}
    if not bounds:
        return load(fixed)
    model = load({**fixed, **{name: bound.most for name, bound in bounds.items()}})
    return replace(model, bounds=bounds, at=lambda sizes: load({**fixed, **sizes}))


def bound_of(name: str, size: str | Bound) -> Bound:
    """Read a bound of a dimension."""
    if isinstance(size, Bound):
        return size
    try:
        return parse_bound(size)
    except (ValueError, TypeError) as error:
        raise UsageError(
            f"dimension {name}: {error}", hint=f"write {name}<=64, or dims={{{name!r}: '<=64'}}"
        ) from error
