"""The files of a dump for a planned module: parts of stages and ranks, their actions, and a picture of the run.

The prediction depends on the module alone, not on measurements of this machine.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Protocol

from penstock.inspection.views.gantt import svg_gantt
from penstock.ir.action_kinds import (
    COPY_IN,
    COPY_OUT,
    DROP,
    FORWARD,
    GRADIENTS_ITEM,
    LET_GO,
    STATE_ITEM,
    SUM,
    WEIGHTS_ITEM,
)
from penstock.ir.collective_calls import kept_parts
from penstock.ir.graph import Module, Value, summed_vars
from penstock.ir.memory.items import is_made_later, stage_images
from penstock.ir.memory.saved_sets import moves_saved, saved_set
from penstock.ir.schedule import COMPUTE, COPIES, HANDS, RECEIVES, SENDS, Action
from penstock.ir.sharding.tile_messages import ends_of, message_values
from penstock.passes.simulator.forecast import Forecast
from penstock.planning.predict import Predicted, predict
from penstock.support.gc_pause import nothing_collected
from penstock.support.words import counted, shown_bytes

from .parts import part_of_rank, part_of_stage

STAGES, RANKS = "stages", "ranks"
# Pictures of more ranks are slow to open.
_MOST_RANKS = 64
# What items are, but for chunks.
_MOVED = {
    STATE_ITEM: "the optimiser state",
    WEIGHTS_ITEM: "the weights",
    GRADIENTS_ITEM: "gradients, which begin as zeros,",
}


class _Files(Protocol):
    """A folder that modules and texts are written into."""

    folder: Path | None

    def write(self, name: str, text: str) -> str: ...

    def write_module(self, name: str, module: Module) -> str | None: ...


@nothing_collected()
def dump_program(dump: _Files, module: Module, predicted: Callable[[], Predicted] | None = None) -> None:
    """Write the parts of a module that has been cut into stages, as far as it is planned.

    `predicted` returns the predicted run, if the caller has it.
    """
    if dump.folder is None or not any(module.stage_graph(stage.index, FORWARD) for stage in module.stages):
        return
    for stage in module.stages:
        dump.write_module(f"{STAGES}/s{stage.index}/module.ir", part_of_stage(module, stage.index))
    if module.schedule is None:
        return
    for rank in module.schedule.ranks:
        dump.write_module(f"{RANKS}/r{rank}/module.ir", part_of_rank(module, rank))
        dump.write(f"{RANKS}/r{rank}/actions.tsv", "".join("\t".join(row) + "\n" for row in action_rows(module, rank)))
    if "wired" in module.facts and len(module.schedule.ranks) <= _MOST_RANKS:
        known = predicted() if predicted is not None else predict(module)
        dump.write("schedule.svg", _picture(known.forecast))


def _picture(run: Forecast) -> str:
    return svg_gantt(run.simulated, f"{run.module.name}, {run.simulated.schedule.name}, predicted", run.curves())


def action_rows(module: Module, rank: int) -> Iterator[tuple[str, str, str]]:
    """Yield rows of when, action and its meaning; numbers are those of batch 1, as in the module."""
    assert module.schedule is not None
    program = module.schedule.ranks[rank]
    yield "when", "action", "does"
    for when, actions in (("start", program.start), ("batch", program.batch)):
        yield from ((when, str(action), DOES[action.kind](module, rank, action)) for action in actions)


def _unit(action: Action) -> str:
    return f"{'batch' if action.once else 'microbatch'} {action.mb}"


def _computes(module: Module, rank: int, action: Action) -> str:
    version = "" if action.version is None else f", version {action.version} of the weights"
    return f"run @s{action.stage}.{action.computation} for {_unit(action)}{version}"


def _copies(module: Module, rank: int, action: Action) -> str:
    image = stage_images(module, action.stage).get(action.item) or (
        saved_set(module, action.stage) if moves_saved(action) else None
    )
    if image is None:
        return f"copy what stage {action.stage} has not"
    part = _MOVED.get(action.item) or f"chunk {action.item[1:]} of the optimiser state"
    what = f"{part} of stage {action.stage}, {shown_bytes(image.nbytes)}"
    if action.version is not None:
        what = f"{part} of stage {action.stage} in version {action.version}, {shown_bytes(image.nbytes)}"
    if moves_saved(action):
        what = f"what @s{action.stage}.{FORWARD} saved, {shown_bytes(image.nbytes)}"
    if action.kind == LET_GO:
        claimed = ", and nothing else claims it" if action.item == WEIGHTS_ITEM else ""
        return f"let go of {what}, once it is in {image.space}{claimed}"
    if is_made_later(action):
        return f"take memory for {what}, which the update of batch {action.mb} makes"
    ways = {COPY_IN: f"from {image.space} for", COPY_OUT: f"to {image.space} after"}
    there = ", unless it is there" if action.kind == COPY_IN and action.item == WEIGHTS_ITEM else ""
    return f"begin to copy {what}, {ways[action.kind]} {_unit(action)}{there}"


def _lets_go(module: Module, rank: int, action: Action) -> str:
    if action.item:
        return _copies(module, rank, action)
    return f"let go of what @s{action.stage}.{action.phase} computes again for {_unit(action)}"


def _drops(module: Module, rank: int, action: Action) -> str:
    return f"drop what is left of {_unit(action)}"


def _sums(module: Module, rank: int, action: Action) -> str:
    grads = summed_vars(module, action.stage)
    total = sum(module.vars[name].type.nbytes for name in grads)
    kept = len(kept_parts(module, action.stage))
    parts = f"; of {kept} of these each rank keeps its part" if kept else ""
    return f"sum {counted(len(grads), 'gradient')} over the ranks of the stage, {shown_bytes(total)}{parts}"


def _sends(module: Module, rank: int, action: Action) -> str:
    return f"send to rank {action.peer}: {_message(module, rank, action)}"


def _hands_on(module: Module, rank: int, action: Action) -> str:
    return f"hand on to rank {action.peer}, from stage {action.end}: {_message(module, rank, action)}"


def _receives(module: Module, rank: int, action: Action) -> str:
    return f"receive from rank {action.peer}: {_message(module, rank, action)}"


def _message(module: Module, rank: int, action: Action) -> str:
    assert action.peer is not None
    ranks = (action.peer, rank) if action.kind in RECEIVES else (rank, action.peer)
    values = message_values(module, ends_of(action, module.rank_stages()), *ranks)
    return f"{_listed(values)} of {_unit(action)}, {shown_bytes(sum(v.type.nbytes for v in values))}"


# The meaning of an action, in words.
DOES: dict[str, Callable[[Module, int, Action], str]] = {
    **dict.fromkeys(COMPUTE, _computes),
    **dict.fromkeys(SENDS, _sends),
    **dict.fromkeys(RECEIVES, _receives),
    **dict.fromkeys(HANDS, _hands_on),
    SUM: _sums,
    **dict.fromkeys(COPIES, _copies),
    LET_GO: _lets_go,
    DROP: _drops,
}


def _listed(values: Iterable[Value]) -> str:
    return ", ".join(f"%{v.name}" for v in values)
