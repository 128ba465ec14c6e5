"""The ranks of a job: worker processes, or the job's own process where one rank answers requests.

A job has worker processes where something asks for them: several ranks, a training, samples of its own, measurements
(`audit`, `trace`, `pace`, `latency`), a GPU, or a number of threads that this process does not have.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import numpy as np

from penstock.backends.bundle.format import Bundle
from penstock.backends.interface import device_of
from penstock.backends.registry import backend_of
from penstock.ir.batch_shares import loss_stage
from penstock.ir.graph import Module
from penstock.ir.sharding.tiles import fill, seat_of
from penstock.runtime.launch.local import Workers
from penstock.runtime.launch.options import JobOptions
from penstock.runtime.messages.control import Arrays, Setup

if TYPE_CHECKING:
    from penstock.runtime.checkpoint.resuming import Start

    from .own_process import OwnProcess


def needs_workers(bundle: Bundle, options: JobOptions) -> bool:
    """Return whether anything asks for worker processes."""
    measures = options.audit or options.trace or options.pace or options.latency
    reads = options.data is not None or options.evaluation is not None
    if bundle.world_size > 1 or loss_stage(bundle.module) is not None or measures or reads:
        return True
    entry = bundle.rank(0)
    device = device_of(bundle.module, entry.stage, entry.device)
    on_gpu = device is not None and device.kind == "cuda"
    return on_gpu or not backend_of(bundle.manifest.backend).allows(entry.threads)


def start_ranks(bundle: Bundle, setup: Setup, start: Start, options: JobOptions) -> Workers | OwnProcess:
    """Start all ranks of a bundle on this host."""
    if needs_workers(bundle, options):
        return Workers(bundle, setup, options.heartbeat, options.log_ranks)
    from .own_process import OwnProcess  # lazy: heavy

    return OwnProcess(bundle, setup, start)


def whole_parameters(module: Module, answers: Sequence[Arrays]) -> Arrays:
    """Return whole parameters from what each rank has of them, in the order of ranks."""
    parameters: Arrays = {}
    for rank, arrays in enumerate(answers):
        mesh, place = seat_of(module, rank)
        for name, array in arrays.items():
            type = module.vars[name].type
            if type.local(mesh.sizes) == type.plain:
                parameters[name] = array
            else:
                whole = parameters.setdefault(name, np.zeros(type.dims, array.dtype))
                fill(whole, array, type, mesh, place)
    return parameters
