"""The table of action kinds: one row for each kind of action that a schedule may hold.

Adding an action kind:

1. Add a row to `ACTION_KINDS`. The tuples of `schedule.py`, the pattern that parses actions and the arrow of a peer
   follow from it.
2. Run `tests/ir/test_action_kinds.py`. It lists the holes: every dictionary by kind that the new row needs an entry in.
3. Fill them, in this order: the meaning (`interpreter/schedules.py`); the waits between ranks (`grid.py`,
   `passes/simulator/simulate.py`); memory (`memory/walk.py`, `memory/touches.py`); the checks (`verify/verifier.py`,
   `verify/schedules.py`, `verify/messages.py`); the time (`passes/simulator/simulate.py`); the run
   (`runtime/worker/executor.py`); words and pictures (`runtime/messages/status.py`,
   `src/penstock/inspection/views/gantt.py`, `src/penstock/inspection/dump/program.py`, the report).
4. Let a pass write the action, and test a module that has it in the interpreter, the verifier, the simulator and the
   runtime.

A consumer reads a field of the row for a fact of the kind. Where it needs code of its own for each kind, it keeps a
dictionary by kind. It compares no kind with a literal; the same test reads the syntax trees for that. A kind that
computes has a graph of its name on the stages that run it: `s0.F` is what `0F3` calls.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

FORWARD, AGAIN, BACKWARD, WEIGHTS, PARTS, NORM_PARTS, UPDATE = "F", "R", "B", "W", "P", "N", "U"
SUM, LET_GO, DROP = "AR", "L", "D"
COPY_IN, COPY_OUT = "CI", "CO"
# The items of a stage that actions move between memory spaces, and what their actions are counted by: its optimiser
# state, `o`, chunks of that, `c0`, `c1` and so on, its weights, `w`, its gradients, `g`, and what the forward of a
# microbatch saved, `a0`.
STATE_ITEM, CHUNK_ITEM, WEIGHTS_ITEM, GRADIENTS_ITEM, SAVED_ITEM = "o", "c", "w", "g", "a0"
ITEMS: dict[str, Literal["microbatch", "batch"]] = {
    STATE_ITEM: "batch",
    CHUNK_ITEM: "batch",
    WEIGHTS_ITEM: "batch",
    GRADIENTS_ITEM: "batch",
    SAVED_ITEM[0]: "microbatch",
}
# The text of items.
ITEM_PATTERN = rf"{STATE_ITEM}|{CHUNK_ITEM}\d+|{WEIGHTS_ITEM}|{GRADIENTS_ITEM}|{SAVED_ITEM}"


@dataclass(frozen=True, slots=True)
class ActionKind:
    """A row: all that is a fact of a kind of action. Kinds in it are names of rows.

    `phase` is the computation that runs, or whose results are moved, and `words` says it in words. `takes` are the
    phases of other stages whose results it takes. `saved_by` are the computations of its own stage whose saved values
    it takes. `after` is the computation of its microbatch that comes before it. Results go `way` stages further, to any
    stage where it is 0. `versions`: a computation reads the weights in one version, or makes the next. `gradients`: it
    adds to those of its batch, sums them over the ranks of its stage, or uses the sum. A computation that a schedule
    may split off is `part_of` the other, whose adding and time it takes over. `partner` is the action at the other end
    of a message. With an item an action `may` or `must` name what it works on, and is counted as that is.
    """

    name: str
    meaning: str
    per: Literal["microbatch", "batch"]
    does: Literal["computes", "sends", "receives", "hands on", "sums", "copies", "drops"]
    phase: str = ""
    words: str = ""
    takes: tuple[str, ...] = ()
    saved_by: tuple[str, ...] = ()
    after: str = ""
    way: int = 0
    versions: Literal["", "reads", "makes"] = ""
    gradients: Literal["", "adds", "sums", "uses"] = ""
    part_of: str = ""
    partner: str = ""
    item: Literal["", "may", "must"] = ""

    @property
    def computes(self) -> bool:
        return self.does == "computes"

    @property
    def arrow(self) -> str:
        """The sign between the action and its peer."""
        return ">" if self.does in ("sends", "hands on") else "<" if self.does == "receives" else ""


def _message(phase: str, values: str, per: Literal["microbatch", "batch"], words: str) -> tuple[ActionKind, ActionKind]:
    """Return the send and the receive of a phase."""
    send, receive = f"S{phase}", f"R{phase}"
    return (
        ActionKind(send, f"sends {values}", per, "sends", phase, words, partner=receive),
        ActionKind(receive, f"receives {values}", per, "receives", phase, words, partner=send),
    )


def _hand(phase: str, values: str, per: Literal["microbatch", "batch"], words: str) -> ActionKind:
    """Return what sends to a rank of the same stage what has come to this one."""
    meaning = f"hands on {values} to a rank of the same stage"
    return ActionKind(f"H{phase}", meaning, per, "hands on", phase, words, partner=f"R{phase}")


# What travels: the phase that makes it, how often, and words.
_TRAVELLING: tuple[tuple[str, str, Literal["microbatch", "batch"], str], ...] = (
    (FORWARD, "results of the forward of a microbatch", "microbatch", "forward"),
    (BACKWARD, "gradients of these results", "microbatch", "backward"),
    (PARTS, "parts of gradients that several stages add to", "batch", "parts of gradients"),
    (NORM_PARTS, "parts of what all stages agree on", "batch", "norm of the gradients"),
)
_ROWS = (
    ActionKind(
        FORWARD,
        "computes the forward of a microbatch, and saves what the backward takes",
        "microbatch", "computes", FORWARD, "forward", takes=(FORWARD,), way=1, versions="reads",
    ),
    ActionKind(
        AGAIN,
        "computes again what the backward of a microbatch takes and its forward did not keep",
        "microbatch", "computes", AGAIN, "forward again", saved_by=(FORWARD,), after=FORWARD, versions="reads",
    ),
    ActionKind(
        BACKWARD,
        "computes the backward of a microbatch, with the gradients of the weights where they are not apart",
        "microbatch", "computes", BACKWARD, "backward", takes=(BACKWARD,), saved_by=(FORWARD, AGAIN), after=FORWARD,
        way=-1, versions="reads", gradients="adds",
    ),
    ActionKind(
        WEIGHTS,
        "computes the gradients of the weights of a microbatch, split off its backward",
        "microbatch", "computes", WEIGHTS, "weight gradient", saved_by=(FORWARD, AGAIN, BACKWARD),
        after=BACKWARD, versions="reads", gradients="adds", part_of=BACKWARD,
    ),
    ActionKind(
        PARTS,
        "hands out this stage's part of gradients that several stages add to",
        "batch", "computes", PARTS, "parts of gradients", gradients="uses",
    ),
    ActionKind(
        NORM_PARTS,
        "hands out this stage's part of what all stages agree on, the norm of the gradient",
        "batch", "computes", NORM_PARTS, "norm of the gradients", takes=(PARTS,), gradients="uses",
    ),
    ActionKind(
        UPDATE,
        "makes the next version of the weights from the gradients of a batch",
        "batch", "computes", UPDATE, "update", takes=(PARTS, NORM_PARTS, UPDATE), versions="makes", gradients="uses",
        item="may",
    ),
    *(row for values in _TRAVELLING for row in _message(*values)),
    ActionKind(SUM, "sums the gradients of a batch over the ranks of the stage", "batch", "sums", gradients="sums"),
    ActionKind(
        LET_GO,
        "lets go of what is computed again later, or of an item whose copy is at home",
        "microbatch", "drops", AGAIN, "forward again", item="may",
    ),
    ActionKind(DROP, "drops all that a microbatch still holds", "microbatch", "drops"),
    ActionKind(COPY_IN, "begins to copy an item from its home to the device", "batch", "copies", item="must"),
    ActionKind(COPY_OUT, "begins to copy an item from the device to its home", "batch", "copies", item="must"),
    *(_hand(*values) for values in _TRAVELLING),
    *_message(UPDATE, "weights that were updated for another stage", "batch", "update"),
)  # fmt: skip

ACTION_KINDS: dict[str, ActionKind] = {row.name: row for row in _ROWS}


def adder(kinds: Iterable[str]) -> str:
    """Name the computation that adds to the gradients on a stage with graphs of these kinds: B, or W where it is split
    off."""
    split = [row.name for row in _ROWS if row.part_of and row.name in kinds]
    return split[0] if split else BACKWARD
