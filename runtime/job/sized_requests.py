"""Requests to a bundle with bounded dimensions: from arrays of any size to the rungs that take them, and back."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from penstock.backends.bundle.format import Bundle
from penstock.ir.graph import Module
from penstock.ir.ladder.bounds import Bounded
from penstock.ir.ladder.ladder import Ladder, Rung, best_pieces
from penstock.ir.names import shown
from penstock.runtime.messages.control import Arrays
from penstock.support.errors import UsageError


class SizedRequests:
    """The way from requests of any size to rungs: what to cut, what to fill up, and what to cut off again."""

    def __init__(self, bundle: Bundle, ladder: Ladder[Module] | None = None) -> None:
        module = bundle.module
        self.ladder: Ladder[Module] = ladder or bundle.ladder
        self.bounds: tuple[Bounded, ...] = module.bounds
        inputs = shown([value.name for value in module.data_inputs], bundle.renamed)
        outputs = shown(module.outputs, bundle.renamed)
        self.inputs = list(inputs.values())
        self._types = {inputs[value.name]: value.type for value in module.data_inputs}
        self._into = {inputs[name]: _times(self.bounds, name, value) for name, value in _shapes(module).items()}
        self._from = {
            outputs[name]: {bound.name: bound.dims_of(name) for bound in self.bounds} for name in module.outputs
        }
        self._whole = {bound.name: bound.size for bound in self.bounds}
        self._seconds = {tuple(row["sizes"].values()): float(row["seconds"]) for row in bundle.plan.get("rungs", ())}
        self.rows = next((bound.name for bound in self.bounds if bound.rows), None)
        self._pieces: dict[tuple[int, ...], list[list[int]]] = {}

    def named(self, given: Any) -> dict[str, Any]:
        """Return the arrays of a request by the model's names of inputs."""
        if isinstance(given, Mapping):
            return dict(given)
        values = given if isinstance(given, list | tuple) else (given,)
        return dict(zip(self.inputs, values, strict=False)) if len(values) == len(self.inputs) else {}

    def sizes(self, arrays: Mapping[str, Any]) -> dict[str, int] | None:
        """Return the sizes of a request, or None where its arrays do not fit the model in other ways. Sizes beyond a
        bound, and those that differ between inputs, are one error."""
        seen: dict[str, dict[str, int]] = {}
        for name, places in self._into.items():
            shape = getattr(arrays.get(name), "shape", None)
            if shape is None or len(shape) != self._types[name].rank:
                return None
            for along, (dim, times) in places.items():
                if shape[dim] % times:
                    return None
                seen.setdefault(along, {})[name] = int(shape[dim]) // times
        problems = []
        for bound in self.bounds:
            along_bound = seen.get(bound.name, {})
            most = self.ladder.most[bound.name]
            if len(set(along_bound.values())) > 1:
                listed = ", ".join(f"{name} {size}" for name, size in along_bound.items())
                problems.append(f"inputs have different sizes along {bound.name}: {listed}")
            elif along_bound and not 1 <= next(iter(along_bound.values())) <= (2**62 if bound.rows else most):
                size = next(iter(along_bound.values()))
                fits = (
                    "a request has one row at least"
                    if bound.rows
                    else f"the bundle was compiled for sizes from 1 to {most}"
                )
                problems.append(f"{bound.name} is {size}, {fits}")
        if problems:
            raise UsageError("; ".join(problems), where="inputs")
        return {bound.name: next(iter(seen[bound.name].values())) for bound in self.bounds if bound.name in seen}

    def split(self, sizes: Mapping[str, int]) -> list[tuple[Rung[Module], dict[str, int]]]:
        """Return the rungs that take a request, one after the other, with the size of the part that each takes."""
        if self.rows is None:
            return [(self._fit(sizes), dict(sizes))]
        rung = self._fit({**sizes, self.rows: 1})
        parts = []
        left = sizes[self.rows]
        for size in self._of_rows(rung, left):
            part = {**sizes, self.rows: min(size, left)}
            parts.append((self._fit({**part, self.rows: size}), part))
            left -= part[self.rows]
        return parts

    def _fit(self, sizes: Mapping[str, int]) -> Rung[Module]:
        rung = self.ladder.fit(sizes)
        assert rung is not None
        return rung

    def _of_rows(self, rung: Rung[Module], count: int) -> list[int]:
        """Return the sizes of pieces that so many rows are cut into, beside the other sizes of a rung."""
        assert self.rows is not None
        most = self.ladder.most[self.rows]
        key = tuple(size for name, size in rung.sizes.items() if name != self.rows)
        if key not in self._pieces:
            seconds = {}
            for size in self.ladder.sizes_along(self.rows):
                sizes = {**rung.sizes, self.rows: size}
                seconds[size] = self._seconds.get(tuple(sizes.values()), float(size))
            self._pieces[key] = best_pieces(most, seconds)
        full, remainder = divmod(count, most)
        return [most] * full + self._pieces[key][remainder]

    def rows_of(self, arrays: Mapping[str, Any], start: int, stop: int) -> dict[str, Any]:
        """Return some rows of a request; inputs without rows are whole."""
        assert self.rows is not None
        chosen = dict(arrays)
        for name, places in self._into.items():
            if self.rows in places:
                dim, times = places[self.rows]
                chosen[name] = arrays[name][(slice(None),) * dim + (slice(start * times, stop * times),)]
        return chosen

    @property
    def output_axes(self) -> dict[str, int]:
        """The dimension of outputs along which rows are joined."""
        return {} if self.rows is None else {name: dims[self.rows][0] for name, dims in self._from.items()}

    def padded(
        self, arrays: Mapping[str, Any], rung: Rung[Module], start: int, part: Mapping[str, int]
    ) -> dict[str, Any]:
        """Return the inputs of a rung: rows of the request from `start` on, filled up with zeros."""
        inputs = {}
        chosen = arrays if self.rows is None else self.rows_of(arrays, start, start + part[self.rows])
        for name, places in self._into.items():
            array = chosen[name]
            shape = list(array.shape)
            for bound, (dim, times) in places.items():
                shape[dim] = rung.sizes[bound] * times
            if shape != list(array.shape):
                live = elements(array)
                array = np.zeros(shape, live.dtype)
                array[tuple(slice(0, n) for n in live.shape)] = live
            inputs[name] = array
        return inputs | {name: array for name, array in arrays.items() if name not in self._into}

    def cut(self, results: Arrays, rung: Rung[Module], part: Mapping[str, int]) -> Arrays:
        """Return the outputs of a part of a request, of its own size."""
        outputs = {}
        for name, array in results.items():
            keep = [slice(None)] * array.ndim
            for bound, dims in self._from[name].items():
                for dim in dims:
                    keep[dim] = slice(0, array.shape[dim] // rung.sizes[bound] * part[bound])
            outputs[name] = np.ascontiguousarray(array[tuple(keep)]) if array.ndim else array
        return outputs

    def joined(self, parts: Sequence[Arrays]) -> Arrays:
        """Return the outputs of a request whose rows were computed in several parts."""
        if len(parts) == 1:
            return parts[0]
        return {name: np.concatenate([part[name] for part in parts], axis) for name, axis in self.output_axes.items()}


def _shapes(module: Module) -> dict[str, tuple[int, ...]]:
    return {value.name: value.type.dims for value in module.data_inputs}


def _times(bounds: Sequence[Bounded], name: str, shape: tuple[int, ...]) -> dict[str, tuple[int, int]]:
    """Return where an input has bounded dimensions: the first of each, and how many times the size it is."""
    return {bound.name: (dims[0], shape[dims[0]] // bound.size) for bound in bounds if (dims := bound.dims_of(name))}


def elements(array: Any) -> np.ndarray:
    """Return the elements of a tensor of torch, or of whatever NumPy takes for an array."""
    if isinstance(array, np.ndarray):
        return array
    import torch  # lazy: heavy

    from penstock.runtime.state.tensors import as_array  # lazy: heavy

    return as_array(array) if isinstance(array, torch.Tensor) else np.asarray(array)
