"""Gradients of the stages of a pack that are on the device while a batch adds to them, and gone between.

In: the batch list of a rank, whose gradients have a home. Out: the places of `CI:g`, in front of the first computation
that adds to them, and `L:g`, behind the update. They come as zeros, so nothing is copied.
"""

from __future__ import annotations

from collections.abc import Collection, Sequence

from penstock.ir.action_kinds import COPY_IN, GRADIENTS_ITEM, LET_GO, UPDATE
from penstock.ir.graph import Module
from penstock.ir.memory.items import stage_images
from penstock.ir.schedule import ADDERS, Action
from penstock.passes.memory.chunks import ahead_of_receives


def put_gradients(
    module: Module,
    batch: Sequence[Action],
    stages: Collection[int],
    before: dict[int, list[Action]],
    behind: dict[int, list[Action]],
) -> None:
    """Let gradients come with the first computation that adds to them, and go with the update, which may be that of the
    batch before."""
    assert module.schedule is not None
    for stage in stages:
        if GRADIENTS_ITEM not in stage_images(module, stage):
            continue
        places = [i for i, a in enumerate(batch) if a.stage == stage and a.kind in ADDERS]
        updates = [i for i, a in enumerate(batch) if a.stage == stage and a.kind == UPDATE and not a.item]
        if places and updates:
            first, update = batch[places[0]], batch[updates[0]]
            come = Action(COPY_IN, stage, first.batch(module.schedule.microbatches), item=GRADIENTS_ITEM)
            go = Action(LET_GO, stage, update.mb, item=GRADIENTS_ITEM)
            before.setdefault(ahead_of_receives(batch, places[0]), []).append(come)
            behind.setdefault(updates[0], []).append(go)
