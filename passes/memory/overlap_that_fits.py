"""The pass `overlap` as far as devices have memory for it.

In: stage graphs with collectives. Out: those that `overlap` orders. Variables over replicas are gathered ahead and
added up late, which takes memory, and a plan without that may fit where one with it does not. So the later passes are
tried: where a device is too small, nothing may grow, and where that does not fit either, the order stays as it was.
"""

from __future__ import annotations

from collections import Counter

from penstock.ir.action_kinds import BACKWARD, FORWARD, WEIGHTS
from penstock.ir.graph import REPLICAS, Module
from penstock.ir.memory.predict import measure_memory
from penstock.ir.ops import EXCHANGES, axes_over
from penstock.passes.communicate.overlap import OverlapOptions, overlap
from penstock.passes.kernels.fuse import FuseOptions, fuse

from .lifetimes import lifetimes


def overlap_that_fits(module: Module, options: OverlapOptions) -> Module:
    """Begin collectives early and read their results late, so that computations hide them."""
    ordered = overlap(module, options)
    if ordered is module or not _limited(module) or fits_devices(ordered):
        return ordered
    tight = overlap(module, OverlapOptions(0.0))
    return tight if fits_devices(tight) else module


def _limited(module: Module) -> bool:
    """Return whether graphs move variables over replicas, on a device whose memory is known."""
    cluster, kinds = module.cluster, (FORWARD, BACKWARD, WEIGHTS)
    if cluster is None or module.schedule is None or not any(cluster.device(d).memory for d in module.rank_devices()):
        return False
    graphs = [graph for stage in module.stages for kind in kinds if (graph := module.stage_graph(stage.index, kind))]
    return any(REPLICAS in axes_over(op.attrs["over"]) for g in graphs for op in g.ops if op.kind in EXCHANGES)


def later_peaks(module: Module) -> dict[int, int]:
    """Return the bytes that each rank needs at the worst moment, with the kernels and drops of later passes."""
    return {rank: row.peak for rank, row in measure_memory(lifetimes(fuse(module, FuseOptions()))).items()}


def fits_devices(module: Module) -> bool:
    """Return whether all that lives on a device fits into its memory, with the kernels and drops of later passes."""
    return not too_small(module)


def too_small(module: Module) -> set[str]:
    """Return the devices whose memory is too small for all that lives there, and what is taken of it beside."""
    assert module.cluster is not None
    devices, used, cluster = module.rank_devices(), Counter[str](), module.cluster
    for rank, peak in later_peaks(module).items():
        used[devices[rank]] += peak + cluster.device(devices[rank]).taken
    return {name for name, nbytes in used.items() if nbytes > (cluster.device(name).memory or nbytes)}
