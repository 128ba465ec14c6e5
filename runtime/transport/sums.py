"""Sums over the ranks of a stage, in the background: an action that needs one waits for it.

In: gradients of a batch, in whole pieces, on each of the ranks. Out: their sums, in place.

Between GPUs that is NCCL's business where torch has it: the device waits, and the rank goes on. Else gloo sums in
memory of the host. Gradients of a GPU are copied there; a thread waits for the copy, and for the sum.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from functools import partial

import torch
import torch.distributed as dist

from penstock.ir.schedule import Action
from penstock.runtime.group.group import Team, time_span
from penstock.runtime.state.device_copies import DeviceCopies
from penstock.support.errors import PenstockError

from .overdue import Overdue

# Finishes a sum that has begun.
_Finish = Callable[[], None]


class GradientSums:
    """The sums of one rank. `lost` makes an error of one that failed."""

    def __init__(
        self,
        team: Team,
        seconds: float,
        lost: Callable[[Action, Exception], PenstockError],
        copies: DeviceCopies | None,
        overdue: Overdue | None,
    ) -> None:
        self._team, self._timeout, self._lost = team, time_span(seconds), lost
        self._copies, self._overdue = copies, overdue
        # By stage and batch.
        self._under_way: dict[tuple[int, int], list[_Finish]] = {}
        # One thread, so that sums begin in the same order on all ranks.
        self._thread = ThreadPoolExecutor(1, "sums")

    def begin(self, action: Action, tensors: Sequence[torch.Tensor]) -> None:
        """Start to sum up tensors; no action may touch them until `finish`."""
        try:
            self._under_way[action.stage, action.mb] = [self._begin(action, tensor) for tensor in tensors]
        except RuntimeError as error:
            raise self._lost(action, error) from error

    def finish(self, action: Action) -> None:
        """Wait for the sum of the batch that an action uses, if it has not been waited for."""
        for finish in self._under_way.pop((action.stage, action.mb), ()):
            try:
                finish()
            except RuntimeError as error:
                raise self._lost(action, error) from error

    def _begin(self, action: Action, tensor: torch.Tensor) -> _Finish:
        if self._team.kind == "gloo" and self._copies is not None:
            held, ready = self._copies.read(tensor)
            summed = self._thread.submit(self._sum_on_host, held, ready)
            return partial(self._write_back, tensor, held, summed)
        work = dist.all_reduce(tensor, group=self._team.group, async_op=True)
        assert work is not None
        if self._team.kind == "gloo":
            return lambda: _done(work.wait(self._timeout))
        assert self._overdue is not None
        self._overdue.watch([work], [tensor], partial(self._lost, action))
        # Without a deadline the device waits, and the rank goes on.
        return lambda: _done(work.wait())

    def _sum_on_host(self, held: torch.Tensor, ready: torch.cuda.Event) -> None:
        ready.synchronize()
        work = dist.all_reduce(held, group=self._team.group, async_op=True)
        assert work is not None
        work.wait(self._timeout)

    def _write_back(self, tensor: torch.Tensor, held: torch.Tensor, summed: Future[None]) -> None:
        assert self._copies is not None
        summed.result()  # bounded: the wait in the thread is
        self._copies.write(tensor, held)


def _done(_: object) -> None:
    """Drop what torch returns when a work is done."""
