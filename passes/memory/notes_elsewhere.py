"""Say what is elsewhere: the notes of the pass `offload`.

In: a module whose variables or saved sets have a home in another memory space. Out: a line for each rank and each set.
`recompute` changes what forwards save, so it has these lines written anew.
"""

from __future__ import annotations

from collections.abc import Iterator

from penstock.ir.action_kinds import STATE_ITEM, WEIGHTS_ITEM
from penstock.ir.graph import Module
from penstock.ir.memory.items import copied_bytes, resident_bytes, stage_images
from penstock.ir.memory.saved_sets import most_sets_at_home, moves_saved, saved_set
from penstock.support.words import counted, shown_bytes

_ORIGIN = "offload"
# The batches after which a rank has no more at home than before.
_BATCHES = 3


def with_notes(module: Module) -> Module:
    """Return the module with notes of what is elsewhere, in place of earlier ones."""
    others = tuple(note for note in module.notes if note.origin != _ORIGIN)
    return module.but(notes=others).noted(_ORIGIN, *_notes(module))


def _notes(module: Module) -> Iterator[str]:
    """Yield what is elsewhere of each rank, and what that moves."""
    assert module.schedule is not None
    for rank, stages in enumerate(module.rank_packs()):
        images = {stage: images for stage in stages if (images := stage_images(module, stage))}
        if images:
            space = next(iter(next(iter(images.values())).values())).space
            moved = sum(copied_bytes(module, rank).values())
            weights = any(WEIGHTS_ITEM in items for items in images.values())
            chunked = next((len(items) for items in images.values() if not weights and STATE_ITEM not in items), 0)
            parts = f" in {counted(chunked, 'chunk')}" if chunked else ""
            nbytes = sum(image.stored * image.versions for items in images.values() for image in items.values())
            most = max(resident_bytes(module, module.schedule.expand(rank, 2)))
            yield (
                f"rank {rank}: {'weights and ' if weights else ''}state of {counted(len(images), 'stage')}{parts}, "
                f"{shown_bytes(nbytes)}, is at home in {space}, at most {shown_bytes(most)} of it on the device"
                + (
                    f", with gradients; a batch copies {shown_bytes(moved)}"
                    if weights
                    else "; a batch copies all of it"
                )
                + " in and out"
            )
        for stage in stages:
            yield from _saved_notes(module, rank, stage)


def _saved_notes(module: Module, rank: int, stage: int) -> Iterator[str]:
    schedule, saved = module.schedule, saved_set(module, stage)
    assert schedule is not None
    moved = {a.mb % schedule.microbatches for a in schedule.ranks[rank].batch if moves_saved(a) and a.stage == stage}
    if saved is not None and moved:
        at_once = most_sets_at_home(schedule.expand(rank, _BATCHES), stage, saved.users)
        yield (
            f"rank {rank}: what stage {stage} saves of {len(moved)} of {schedule.microbatches} microbatches, "
            f"{shown_bytes(saved.nbytes)} of each, is at home in {saved.space} until the backward, at most "
            f"{counted(at_once, 'set')} at once; a batch copies {shown_bytes(len(moved) * saved.nbytes)} out and in"
        )
