"""A bundle with bounded dimensions in the calling process: one model for each rung of its ladder, with one stage.

    model = penstock.load("bundle/")       the bundle was compiled with --dim 'batch<=32' or --dim 'seq<=512'
    model({"ids": ids})                    any size up to the bound; nothing is compiled
    model.at({"seq": 64})                  the model of exactly one rung, without padding

In: a request of any size. A dimension whose rows do not see each other is cut into pieces that rungs take without
padding, 17 = 16 + 1, by the predicted times of rungs. Every other one is filled up with zeros to the next rung, and
its size goes to the masks of the program. Out: outputs of the request's own size.

Code and variables are loaded once. What a rung needs besides is made with the first request that takes it.
"""

from __future__ import annotations

import os
import threading
from collections.abc import Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
import torch

from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.ir.batch_shares import loss_stage
from penstock.ir.graph import Module
from penstock.ir.ladder.bounds import Bounded, print_sizes
from penstock.ir.ladder.ladder import Ladder, Rung, best_pieces
from penstock.ir.names import shown
from penstock.runtime.checkpoint.finding import choose
from penstock.runtime.checkpoint.resuming import Start, start_from
from penstock.runtime.generation.generator import TextGenerator
from penstock.runtime.generation.turn import TOKENS
from penstock.runtime.messages.control import Arrays
from penstock.runtime.state.store import as_array
from penstock.support.errors import UsageError

from .in_process import LoadedModel, LoadedStage
from .texts import GeneratesText, generator_of


class SizedRequests:
    """The way from requests of any size to rungs: what to cut, what to fill up, and what to cut off again."""

    def __init__(self, bundle: Bundle) -> None:
        module = bundle.module
        self.ladder: Ladder[Module] = bundle.ladder
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
                problems.append(f"{bound.name} is {size}, the bundle was compiled for sizes from 1 to {most}")
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
                live = as_array(array) if isinstance(array, torch.Tensor) else np.asarray(array)
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


class LoadedLadder(GeneratesText):
    """A bundle of one rank with bounded dimensions, ready to compute in this process. Any thread may call it."""

    def __init__(self, bundle: Bundle, start: Start, stage: LoadedStage | None = None) -> None:
        self.bundle, self.warnings, self._start = bundle, start.warnings, start
        self.requests = SizedRequests(bundle)
        self._stage = stage or LoadedStage(bundle, start)
        self.store, self.base_bytes = self._stage.store, self._stage.base_bytes
        self._models: dict[str, LoadedModel] = {}
        self._lock = threading.Lock()
        self.layout = self._of(bundle.ladder.largest).layout

    def __repr__(self) -> str:
        bounds = ", ".join(f"{name} <= {most}" for name, most in self.bundle.ladder.most.items())
        return f"<penstock model {self.bundle.manifest.name}: {bounds}, {len(self.bundle.ladder)} sizes>"

    def __call__(self, *inputs: Any) -> Arrays:
        """Return all outputs by the model's names, of the size of the inputs. Inputs are a dict by name, or arrays in
        the order of the inputs."""
        request = inputs[0] if len(inputs) == 1 else inputs
        arrays = self.requests.named(request)
        sizes = self.requests.sizes(arrays)
        if sizes is None:
            # The checks of one size say what is wrong.
            return self._of(self.bundle.ladder.largest)(request)
        parts, start = [], 0
        for rung, part in self.requests.split(sizes):
            model = self._of(rung)
            padded = self.requests.padded(arrays, rung, start, part)
            results = model.answer(padded, _live(self.requests.bounds, part))
            parts.append(self.requests.cut(results, rung, part) if part != dict(rung.sizes) else results)
            start += part.get(self.requests.rows or "", 0)
        return self.requests.joined(parts)

    @cached_property
    def generator(self) -> TextGenerator:
        """The generator of the bundle, with the rates of what it computed."""
        return generator_of(self.bundle, lambda rows, inputs: self.at({TOKENS: rows}).compute(inputs))

    def at(self, sizes: Mapping[str, int]) -> LoadedModel:
        """Return the model of exactly these sizes, which pads nothing."""
        rung = self.bundle.ladder.at(sizes)
        if rung is None:
            listed = "; ".join(print_sizes(rung.sizes) for rung in self.bundle.ladder)
            raise UsageError(f"there is no rung of {print_sizes(sizes)}", hint=f"the sizes are {listed}")
        return self._of(rung)

    def _of(self, rung: Rung[Module]) -> LoadedModel:
        with self._lock:
            if rung.name not in self._models:
                self._models[rung.name] = LoadedModel(self.bundle, self._start, self._stage, rung)
            return self._models[rung.name]


def _live(bounds: Sequence[Bounded], sizes: Mapping[str, int]) -> tuple[torch.Tensor, ...]:
    return tuple(torch.tensor(sizes[bound.name], dtype=torch.int64) for bound in bounds)


# ------------------------------------------------------------------------------------------------ the way in


def load(
    path: str | os.PathLike[str], *, checkpoint: str | os.PathLike[str] | None = None
) -> LoadedModel | LoadedLadder:
    """Check a bundle for inference and load it into this process. It must be of one stage on one device.

    `checkpoint` is a checkpoint of a training of the model, or a directory of them, of which the newest is chosen: its
    weights stand in for those of the bundle.
    """
    bundle = open_bundle(path)
    if loss_stage(bundle.module) is not None:
        raise UsageError(
            "the bundle is for training",
            where=str(bundle.path),
            hint="compile the model without a loss for inference, or train it with `penstock.open`",
        )
    if bundle.world_size > 1:
        raise UsageError(
            f"the bundle is for {bundle.world_size} processes, and a loaded model is one",
            where=str(bundle.path),
            hint="`penstock.open` starts them, and `job.infer` asks them; or compile it for one device",
        )
    chosen = None if checkpoint is None else choose(checkpoint)
    return load_bundle(bundle, start_from(bundle, None, chosen, None, None))


def load_bundle(bundle: Bundle, start: Start) -> LoadedModel | LoadedLadder:
    """Load an opened bundle of one rank at a start."""
    return LoadedLadder(bundle, start) if bundle.module.bounds else LoadedModel(bundle, start)
