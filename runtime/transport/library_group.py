"""Collectives of GPUs, by NCCL through torch: one communicator for each group.

In: operands on the device. Out: results there. A collective is started behind what torch's current stream does, and
runs on a stream of its own. To wait for it is to let the current stream wait: the program goes on at once.

NCCL knows even parts side by side. Other layouts are cut and joined on the device (rounds.py). The order of its sums
is its own, so results are not those of CPUs bit for bit.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import torch
import torch.distributed as dist

from penstock.ir.collective_calls import CollectiveCall, JointSum
from penstock.ir.ops import integer
from penstock.ir.types import part_size
from penstock.support.errors import PeerLost

from .overdue import Overdue
from .rounds import KeepParts, cut, join


class _Started(NamedTuple):
    """Works under way, the tensors that they use, and what is left to do behind them."""

    works: list[dist.Work]
    held: tuple[torch.Tensor, ...]
    finish: Callable[[], None]


class LibraryGroup:
    """A group whose library does collectives itself. `group` is torch's, whose members are in the order of their
    ranks."""

    def __init__(self, group: dist.ProcessGroup, ranks: Sequence[int], rank: int, overdue: Overdue) -> None:
        self.place, self.members, self._group = ranks.index(rank), len(ranks), group
        self._rank, self._others, self._overdue = rank, [other for other in ranks if other != rank], overdue
        order = sorted(ranks)
        # The place in torch's group of every member of this one, and the other way round.
        self._ends = [order.index(other) for other in ranks]
        self._members = [list(ranks).index(other) for other in order]
        self._started: dict[str, list[_Started]] = {}

    def begin(self, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor) -> None:
        """Begin a collective behind what the device does."""
        started: _Started = (
            self._keep_parts(call, x, out)
            if isinstance(call, JointSum)
            else getattr(self, f"_{call.op.kind}")(call, x, out)
        )
        self._started.setdefault(call.key, []).append(started)
        self._overdue.watch(started.works, started.held, lambda error: self._lost(call, error))

    def wait(self, call: CollectiveCall) -> None:
        """Let the device wait for a collective."""
        started = self._started[call.key].pop(0)
        for work in started.works:
            work.wait()
        started.finish()

    def _lost(self, call: CollectiveCall, error: Exception) -> PeerLost:
        others = ", ".join(map(str, self._others))
        what = f"one of the ranks {others} did not answer ({str(error).partition(chr(10))[0]}); waited for {call}"
        return PeerLost(what, where=f"rank {self._rank}", hint="if it was only slow, give a longer --timeout")

    def _all_reduce(self, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor) -> _Started:
        out.copy_(x)
        how = dist.ReduceOp.SUM if call.attrs["by"] == "sum" else dist.ReduceOp.MAX
        return _Started(_works(dist.all_reduce(out, how, self._group, async_op=True)), (x, out), _nothing)

    def _all_gather(self, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor) -> _Started:
        parts = x.new_empty((self.members, *x.shape))
        works = _works(dist.all_gather_into_tensor(parts.view(-1), x.view(-1), self._group, async_op=True))
        axis, blocks = integer(call.attrs["axis"]) % x.dim(), integer(call.attrs["blocks"])
        return _Started(works, (x, out), lambda: self._join(out, parts, axis, blocks))

    def _reduce_scatter(self, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor) -> _Started:
        parts = self._cut(x, integer(call.attrs["axis"]) % x.dim(), integer(call.attrs["blocks"]))
        work = dist.reduce_scatter_tensor(out.view(-1), parts.view(-1), dist.ReduceOp.SUM, self._group, async_op=True)
        return _Started(_works(work), (parts, out), _nothing)

    def _keep_parts(self, call: JointSum, x: torch.Tensor, out: torch.Tensor) -> _Started:
        turn = KeepParts(call, self.members, self.place, lent=False)
        parts, total = x.new_zeros((self.members, *turn.shape)), x.new_empty(turn.shape)
        for end, member in enumerate(self._members):
            for place, part in zip(
                turn.in_block(parts[end], turn.parts(x, member)), turn.parts(x, member), strict=True
            ):
                place.copy_(part)
        work = dist.reduce_scatter_tensor(total, parts.view(-1), dist.ReduceOp.SUM, self._group, async_op=True)

        def finish() -> None:
            mine = turn.parts(out, self.place)
            for part, summed in zip(mine, turn.in_block(total, mine), strict=True):
                part.copy_(summed)

        return _Started(_works(work), (parts, total, out), finish)

    def _all_to_all(self, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor) -> _Started:
        parts = self._cut(x, integer(call.attrs["split"]) % x.dim(), 1)
        arrived = torch.empty_like(parts)
        work = dist.all_to_all_single(arrived, parts, group=self._group, async_op=True)
        axis = integer(call.attrs["join"]) % x.dim()
        return _Started(_works(work), (parts, out), lambda: self._join(out, arrived, axis, 1))

    def _shift(self, call: CollectiveCall, x: torch.Tensor, out: torch.Tensor) -> _Started:
        by = integer(call.attrs["by"]) % self.members
        if not by:
            out.copy_(x)
            return _Started([], (x, out), _nothing)
        after, before = (self.place + by) % self.members, (self.place - by) % self.members
        sends = [
            dist.P2POp(dist.isend, x, group=self._group, group_peer=self._ends[after]),
            dist.P2POp(dist.irecv, out, group=self._group, group_peer=self._ends[before]),
        ]
        return _Started(list(dist.batch_isend_irecv(sends)), (x, out), _nothing)

    def _cut(self, x: torch.Tensor, axis: int, blocks: int) -> torch.Tensor:
        """Return the parts for all members, one behind the other."""
        dims = list(x.shape)
        dims[axis] = part_size(dims[axis], self.members, blocks)
        parts = x.new_empty((self.members, *dims))
        for end, member in enumerate(self._members):
            cut(parts[end], x, axis, self.members, member, blocks)
        return parts

    def _join(self, out: torch.Tensor, parts: torch.Tensor, axis: int, blocks: int) -> None:
        for end, member in enumerate(self._members):
            join(out, parts[end], axis, member, blocks)


def _works(work: dist.Work | None) -> list[dist.Work]:
    return [] if work is None else [work]


def _nothing() -> None:
    """Do nothing: the library has filled the result."""
