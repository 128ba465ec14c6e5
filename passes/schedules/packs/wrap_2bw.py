"""The schedule `wrap-2bw`: wrap that is never drained, with two versions of the weights, as in 2bw.

A batch takes m·t, as under interleaved-2bw, for the same numbers of microbatches, none of which has to make groups. A
rank holds as many of these as under wrap.
"""

from __future__ import annotations

from penstock.passes.schedules.kind import PackKind

from .interleaved_2bw import in_groups, least, too_few

KIND = PackKind(
    lambda place, m: in_groups(place, m, m),
    "wrap, never drained: two weight versions, gradients one update late, as 2bw with several stages on a rank",
    each=(2, 3, 4),
    delay=1,
    refused=too_few,
    least=least,
)
