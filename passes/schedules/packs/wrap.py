"""The schedule `wrap` (the wrap-around pipeline of Li et al., 2022): interleaved whose stages run all microbatches of a
batch before the next stage of the rank does.

Stages are dealt round, as for interleaved. A batch takes as long, m·t + (d-1)·t/v. With `--offload weights` the weights
of a stage come once for all of its forwards and once for its backwards, however many microbatches there are. In
exchange a rank holds more of these: (v-1)m + 2(d-1) + 1 microbatches of single stages on rank 0.
"""

from __future__ import annotations

from penstock.passes.schedules.kind import PackKind

from .interleaved import in_groups

KIND = PackKind(
    lambda place, m: in_groups(place, m, m),
    "interleaved with all microbatches on one stage before the next: fewest moves of weights, more in flight",
    each=(2, 3, 4),
)
