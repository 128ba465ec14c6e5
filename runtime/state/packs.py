"""The state of a rank that runs several stages, as if it were that of one.

In: the store of each stage. Out: what a checkpoint takes of them. Stages may have copies of a variable under one name,
such as counters, which are equal between batches: that of the first stage stands for all.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence

import torch

from penstock.ir.graph import Var

from .store import Store
from .versions import Versions


class PackState:
    """The variables of all stages of a rank."""

    def __init__(self, stores: Sequence[Store]) -> None:
        self.stores = tuple(stores)
        self._store_of = {name: store for store in reversed(self.stores) for name in store.variables}

    @property
    def version(self) -> int:
        """The newest version of the weights: stages are at one version between batches."""
        return max(store.version for store in self.stores)

    @property
    def variables(self) -> dict[str, Var]:
        return {name: store.variables[name] for name, store in self._store_of.items()}

    @property
    def versioned(self) -> Mapping[str, Versions]:
        return {name: versions for store in self.stores for name, versions in store.versioned.items()}

    def newest(self, name: str) -> torch.Tensor:
        """Return the buffer with the newest contents of a variable."""
        return self._store_of[name].newest(name)

    def apart(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return what is at home in copies that nothing changes, by version."""
        return _of_all(store.apart() for store in self.stores)

    def older(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return live versions other than the newest, with their parameters."""
        return _of_all(store.older() for store in self.stores)


def _of_all(stores: Iterable[Mapping[int, Mapping[str, torch.Tensor]]]) -> dict[int, dict[str, torch.Tensor]]:
    """Join the tensors of several stages by version."""
    joined: dict[int, dict[str, torch.Tensor]] = {}
    for versions in stores:
        for version, tensors in versions.items():
            joined.setdefault(version, {}).update(tensors)
    return joined
