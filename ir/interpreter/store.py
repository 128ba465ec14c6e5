"""Variables while graphs are interpreted: what a graph may ask of a store, and stores with one version or with several.

Invariant of `VersionStore`: version v of a parameter that is updated lives in slot v modulo its number of versions, and
nowhere else; a read of a version that is not there is an error, never a silent read of another one.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import Protocol

import numpy as np

from penstock.ir.graph import COPY, GRAD, Module, Value, Var
from penstock.ir.types import FLOATS
from penstock.support.errors import VerifyError

from .derived import DerivedWeights
from .ops import TYPED, Array, array_dtype

Arrays = Mapping[str, Array]


class Variables(Protocol):
    """Variables, as one run of a graph sees them: `slot` is mb or latest, a written value becomes the next version, and
    `replace` gives a cache its new elements at once."""

    def read(self, var: str, slot: str) -> Array: ...
    def write(self, var: str, value: Array) -> None: ...
    def accumulate(self, var: str, value: Array) -> None: ...
    def take(self, var: str) -> Array: ...
    def replace(self, var: str, value: Array) -> None: ...


class DictStore:
    """The simplest store: one array per variable, all slots are the same."""

    def __init__(self, arrays: Arrays) -> None:
        self.arrays = dict(arrays)

    def read(self, var: str, slot: str) -> Array:
        if var not in self.arrays:
            raise VerifyError(f"no value for variable @{var}")
        return self.arrays[var]

    def write(self, var: str, value: Array) -> None:
        self.arrays[var] = value

    def accumulate(self, var: str, value: Array) -> None:
        self.arrays[var] = self.arrays[var] + value if var in self.arrays else value

    def take(self, var: str) -> Array:
        value = self.read(var, "")
        self.arrays[var] = np.zeros_like(value)
        return value

    def replace(self, var: str, value: Array) -> None:
        self.arrays[var] = value


def as_value(array: object, value: Value, precision: str = TYPED) -> Array:
    """Return `array` in the value's element type. Raise VerifyError when shape or kind of element differ."""
    result = np.asarray(array)
    floating = result.dtype.kind == "f" or result.dtype.name == "bfloat16"
    if result.shape != value.type.shape or floating != (value.type.dtype in FLOATS):
        raise VerifyError(f"%{value.name} is {value.type}, got an array of {result.dtype}{list(result.shape)}")
    return result.astype(array_dtype(value.type.dtype, precision), copy=False)


# ---------------------------------------------------------------------------------------- versions


def initial_arrays(module: Module, weights: Arrays, names: Sequence[str], precision: str) -> dict[str, Array]:
    """Return the first values of variables: the given arrays, zeros where the variable says so, or what it is computed
    from. One VerifyError lists all that are missing or do not fit."""
    values, problems = {}, []
    weights = DerivedWeights(weights, module.vars)
    for name in names:
        var = module.vars[name]
        value = Value(name, var.type)
        if var.init == "zeros" and name not in weights:
            values[name] = np.zeros(var.type.dims, array_dtype(var.type.dtype, precision))
        elif isinstance(var.init, tuple) and name not in weights:
            values[name] = np.array(var.init, array_dtype(var.type.dtype, precision)).reshape(var.type.dims)
        elif var.role == COPY and var.source in weights:
            values[name] = as_value(weights[var.source], value, precision)
        elif name not in weights:
            problems.append(f"no weights for @{name}")
        else:
            try:
                values[name] = as_value(weights[name], value, precision)
            except VerifyError as error:
                problems.append(error.what.replace("%", "@", 1))
    if problems:
        raise VerifyError("; ".join(problems), where=f"weights of {module.name}")
    return values


class VersionStore:
    """Variables of one rank. Version v of a stepped parameter lives in slot v % versions, everything else has one
    buffer.

    Gradients may have several buffers, too: those of batch t are summed in buffer t % versions. `at(version, made,
    batch)` fixes what a graph sees: reads of `mb` want `version`, a write makes version `made`; None means newest and
    newest + 1.

    Variables with a home are there until `bring`, each version by itself. What is brought twice is let go of twice;
    that leaves nothing of it in its slot.
    """

    def __init__(self, variables: Mapping[str, Var], stepped: set[str], arrays: Arrays, first: int = 0) -> None:
        self.slots: dict[str, list[Array | None]] = {}
        self.held: dict[str, list[int | None]] = {}
        self.newest = dict.fromkeys(stepped & arrays.keys(), first)
        for name, array in arrays.items():
            count = variables[name].versions if name in stepped else 1
            if variables[name].role == GRAD:
                self.slots[name], self.held[name] = (
                    [array, *(array.copy() for _ in range(1, variables[name].versions))],
                    [],
                )
                continue
            self.slots[name], self.held[name] = [None] * count, [None] * count
            self.slots[name][first % count], self.held[name][first % count] = array, first
        # The versions at home, by slot, and how often what is on the device was brought.
        self.homes = {name: list(self.slots[name]) for name in arrays if variables[name].home}
        self._claims = Counter[tuple[str, int]]()
        for name in self.homes:
            self._forget(name, first % len(self.slots[name]))
        self._version: int | None = None
        self._made: int | None = None
        self._batch = 0

    def put(self, var: str, version: int, array: Array) -> None:
        """Store a version beside the newest, where there is a slot for it."""
        at = version % len(self.slots[var])
        if self.held[var][at] != self.newest[var]:
            self.slots[var][at], self.held[var][at] = array, version
            if var in self.homes:
                self.homes[var][at] = array
                self._forget(var, at)

    def bring(self, names: Iterable[str], version: int | None = None) -> None:
        """Copy variables from their home to the device. One that is not made yet has nothing there."""
        for name in names:
            at = self._place(name, version)
            self._claims[name, at] += 1
            if self._claims[name, at] == 1:
                self.slots[name][at] = self.homes[name][at]
                if self.slots[name][at] is None or (version is not None and version > self.newest[name]):
                    self._forget(name, at)

    def store(self, names: Iterable[str], version: int | None = None) -> None:
        """Copy variables from the device to their home."""
        for name in names:
            at = self._place(name, version)
            self.homes[name][at] = self.slots[name][at]

    def let_go(self, names: Iterable[str], version: int | None = None) -> None:
        """Give the memory of variables back: what reads it then reads nothing that makes sense."""
        for name in names:
            at = self._place(name, version)
            self._claims[name, at] -= 1
            if not self._claims[name, at]:
                self._forget(name, at)

    def _place(self, name: str, version: int | None) -> int:
        return 0 if version is None else version % len(self.slots[name])

    def _forget(self, name: str, at: int) -> None:
        """Leave nothing in a slot that makes sense."""
        like = next(array for array in (self.slots[name][at], *self.homes[name]) if array is not None)
        kind = like.dtype.kind
        nothing = np.nan if kind not in "iub" else np.iinfo(like.dtype).min if kind == "i" else 1
        self.slots[name][at] = np.full_like(like, nothing)

    def at(self, version: int | None = None, made: int | None = None, batch: int = 0) -> VersionStore:
        self._version, self._made, self._batch = version, made, batch
        return self

    def buffers(self, var: str) -> int:
        """Count the buffers of a variable that are alive."""
        return sum(slot is not None for slot in self.slots[var])

    def latest(self, var: str) -> Array:
        newest = self.newest.get(var, 0)
        at_home = self.homes[var][newest % len(self.slots[var])] if var in self.homes else None
        return self._version_of(var, newest) if at_home is None else at_home

    def before_latest(self, var: str) -> Array | None:
        """Return the version before the newest, while it is alive."""
        version = self.newest[var] - 1
        at = version % len(self.slots[var])
        return (self.homes.get(var) or self.slots[var])[at] if self.held[var][at] == version else None

    def _version_of(self, var: str, version: int) -> Array:
        if var not in self.slots:
            raise VerifyError(f"@{var} is not a variable of this rank")
        slots, held = self.slots[var], self.held[var]
        at = (version if var in self.newest else self._batch) % len(slots)
        held_array = slots[at]
        if held_array is None or (var in self.newest and held[at] != version):
            alive = ", ".join(str(v) for v in sorted(v for v in held if v is not None))
            raise VerifyError(
                f"version {version} of @{var} is asked for, its {len(slots)} slots hold {alive or 'nothing'}"
            )
        return held_array

    def read(self, var: str, slot: str) -> Array:
        newest = self.newest.get(var, 0)
        if slot == "mb" and self._version is not None:
            return self._version_of(var, self._version)
        return self._version_of(var, newest if self._made is None or var not in self.newest else self._made - 1)

    def write(self, var: str, value: Array) -> None:
        version = 0
        if var in self.newest:
            version = self.newest[var] + 1 if self._made is None else self._made
            if version <= self.newest[var]:
                raise VerifyError(f"version {version} of @{var} is written, the newest is {self.newest[var]} already")
            self.newest[var] = version
        at = version % len(self.slots[var])
        self.slots[var][at], self.held[var][at] = value, version

    def accumulate(self, var: str, value: Array) -> None:
        self.slots[var][self._batch % len(self.slots[var])] = self._version_of(var, 0) + value

    def take(self, var: str) -> Array:
        value = self._version_of(var, 0)
        self.slots[var][self._batch % len(self.slots[var])] = np.zeros_like(value)
        return value

    def replace(self, var: str, value: Array) -> None:
        self._version_of(var, 0)
        self.slots[var][0] = value
