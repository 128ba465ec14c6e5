"""The variables of a stage, with their values: from the bundle, or from a checkpoint.

In: a bundle, a stage, the elements of its settings, the directory of a checkpoint. Out: a Store that is filled.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from pathlib import Path

import torch

from penstock.backends.bundle.format import Bundle
from penstock.ir.graph import GRAD, Var, stage_vars, stepped_vars
from penstock.runtime.checkpoint.format import read_index
from penstock.runtime.checkpoint.resuming import fill_tensors, load_state
from penstock.runtime.state.settings import Settings
from penstock.runtime.state.store import Store


def load_store(
    bundle: Bundle,
    stage: int,
    tables: Settings,
    place: Path | None,
    device: torch.device,
    *,
    grow: bool = False,
    summed: Iterable[str] = (),
) -> Store:
    """Return the state of a stage at a checkpoint, or at the beginning. `grow` and `summed` are those of a Store."""
    module = bundle.module
    variables = stage_vars(module, stage)
    step = 0 if place is None else read_index(place).step
    store = Store(variables, stepped_vars(module), version=step, grow=grow, device=device, summed=summed)
    for name, var in variables.items():
        if var.init == "zeros" and var.role != GRAD:
            store.newest(name).zero_()
    _fill_tables(variables, tables, store)
    if place is None:
        fill_tensors(
            bundle.weights_file(stage),
            {name: store.newest(name) for name, var in variables.items() if var.init == "file"},
        )
    else:
        load_state(place, store, variables)
    return store


def _fill_tables(variables: Mapping[str, Var], tables: Settings, store: Store) -> None:
    for name, var in variables.items():
        if isinstance(var.init, tuple):
            tensor = store.newest(name)
            tensor.copy_(torch.tensor(tables.get(name, var.init), dtype=tensor.dtype).reshape(tensor.shape))
