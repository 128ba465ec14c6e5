"""What a dump has of a planned module beside the modules of its passes: the parts of stages and ranks, what each rank
does, and a picture of the run that is predicted. The prediction depends on the module alone, not on what was measured on this machine."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator

from penstock.arguing import predict
from penstock.ir.action_kinds import ACTION_KINDS, DROP, FORWARD, SUM
from penstock.ir.graph import Module, Value, summed_vars
from penstock.ir.schedule import COMPUTE, RECEIVES, SENDS, Action
from penstock.simulating import Forecast
from penstock.support.gc_pause import nothing_collected
from penstock.support.words import counted, shown_bytes

from .folder import RANKS, STAGES, Dump
from .parts import part_of_rank, part_of_stage

# Pictures of more are slow to open.
_MOST_RANKS = 64


@nothing_collected()
def dump_program(dump: Dump, module: Module, predicted: Callable[[], Forecast] | None = None) -> None:
    """Write the parts of a module that has been cut into stages, as far as it is planned; `predicted`
    gives the run where somebody knows it."""
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
        dump.write(
            "schedule.svg", _picture(predicted() if predicted is not None else predict(module, plain=True).forecast)
        )


def _picture(made: Forecast) -> str:
    from penstock.inspection.views.gantt import svg_gantt

    return svg_gantt(made.found, f"{made.module.name}, {made.found.schedule.name}, predicted", made.curves())


def action_rows(module: Module, rank: int) -> Iterator[tuple[str, str, str]]:
    """When, action, what it does; numbers are those of batch 1, as in the module."""
    assert module.schedule is not None
    program = module.schedule.ranks[rank]
    yield "when", "action", "does"
    for when, actions in (("start", program.start), ("batch", program.batch)):
        yield from ((when, str(action), DOES[action.kind](module, action)) for action in actions)


def _unit(action: Action) -> str:
    return f"{ACTION_KINDS[action.kind].per} {action.mb}"


def _computes(module: Module, action: Action) -> str:
    version = "" if action.version is None else f", version {action.version} of the weights"
    return f"run @s{action.stage}.{action.kind} for {_unit(action)}{version}"


def _drops(module: Module, action: Action) -> str:
    return f"drop what is left of {_unit(action)}"


def _sums(module: Module, action: Action) -> str:
    grads = summed_vars(module, action.stage)
    total = sum(module.vars[name].type.nbytes for name in grads)
    return f"sum {counted(len(grads), 'gradient')} over the ranks of the stage, {shown_bytes(total)}"


def _sends(module: Module, action: Action) -> str:
    assert action.peer is not None
    ends = action.stage, module.rank_stages()[action.peer]
    return f"send to rank {action.peer}: {_message(module, action, *ends)}"


def _receives(module: Module, action: Action) -> str:
    assert action.peer is not None
    ends = module.rank_stages()[action.peer], action.stage
    return f"receive from rank {action.peer}: {_message(module, action, *ends)}"


def _message(module: Module, action: Action, src: int, dst: int) -> str:
    values = [v for e in module.edges if (e.src, e.dst, e.phase) == (src, dst, action.phase) for v in e.values]
    return f"{_listed(values)} of {_unit(action)}, {shown_bytes(sum(v.type.nbytes for v in values))}"


# What an action does, in words.
DOES: dict[str, Callable[[Module, Action], str]] = {
    **dict.fromkeys(COMPUTE, _computes),
    **dict.fromkeys(SENDS, _sends),
    **dict.fromkeys(RECEIVES, _receives),
    SUM: _sums,
    DROP: _drops,
}


def _listed(values: Iterable[Value]) -> str:
    return ", ".join(f"%{v.name}" for v in values)
