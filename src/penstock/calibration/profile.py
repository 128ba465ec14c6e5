"""Times of the ranks of a bundle on this machine: from the table of measured times, or measured for this call.

In: a bundle, and what runs one of its ranks by itself. Out: the seconds of each kind of action of every rank.
"""

from __future__ import annotations

from collections.abc import Callable

from penstock.backends.bundle.format import Bundle
from penstock.ir.cluster.cluster import Device
from penstock.ir.schedule import COMPUTE

from .measured import Measured

# Seconds of each kind of action of a rank, by rank.
Rehearse = Callable[[Bundle, list[int]], list[dict[str, float]]]


def profile(
    bundle: Bundle, rehearse: Rehearse, table: Measured | None = None, *, anew: bool = False
) -> dict[tuple[int, str], float]:
    """Return the seconds of each kind of action of every rank, by rank and kind, as the ranks of the bundle would run
    them here.

    They come from the table. What is not there (everything, if `anew`) is measured by `rehearse`, one rank after the
    other.
    """
    table = table or Measured(bundle.manifest.backend)
    module = bundle.module
    times: dict[tuple[int, str], float] = {}
    for entry in bundle.manifest.ranks:
        stage = entry.stage
        device = Device("here", threads=entry.threads)
        known = {} if anew else table.stage(module, stage, device)
        wanted = [kind for kind in COMPUTE if module.stage_graph(stage, kind) is not None]
        if any(kind not in known for kind in wanted):
            (known,) = rehearse(bundle, [entry.rank])
            table.keep_stage(module, stage, entry.threads, known)
        times |= {(entry.rank, kind): known[kind] for kind in wanted if kind in known}
    return times
