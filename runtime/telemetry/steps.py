"""Optimiser steps put together from the reports of the ranks of the loss stage.

In: a Step of each of them, for the microbatches that it ran. Out: one Step for all microbatches of the batch, in their
order, once all of these ranks have reported.
"""

from __future__ import annotations

import threading

from penstock.ir.batch_shares import loss_stage, share_of
from penstock.ir.graph import Module
from penstock.runtime.messages.control import Step


def loss_shares(module: Module) -> dict[int, list[int]]:
    """Return the ranks that report losses, and which microbatches of a batch each of them runs."""
    schedule, stage = module.schedule, loss_stage(module)
    if schedule is None or stage is None:
        return {}
    return {team[0]: share_of(module, team[0]) for team in schedule.teams()[stage]}


class StepsUnderWay:
    """Steps under way. May be used from several threads."""

    def __init__(self, module: Module) -> None:
        self.shares = loss_shares(module)
        self._parts: dict[int, dict[int, Step]] = {}
        self._lock = threading.Lock()

    def take(self, rank: int, part: Step) -> Step | None:
        """Accept the report of one rank. Return the whole step if that was its last part."""
        if len(self.shares) == 1:
            return part
        with self._lock:
            parts = self._parts.setdefault(part.step, {})
            parts[rank] = part
            if len(parts) < len(self.shares):
                return None
            del self._parts[part.step]
        of_microbatch = {
            mb: loss for r, step in parts.items() for mb, loss in zip(self.shares[r], step.losses, strict=True)
        }
        losses = tuple(of_microbatch[mb] for mb in sorted(of_microbatch))
        latest = max(step.at for step in parts.values())
        # Numbers about the whole gradient are the same on all ranks.
        return Step(part.step, sum(losses) / len(losses), losses, part.lr, latest, part.grad_norm)
