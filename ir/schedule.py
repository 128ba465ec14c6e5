"""The schedule: the program of every rank as a list of actions, in order and with weight versions.

    <stage><kind><microbatch>[@version][>peer|<peer][:stage|:item]
    0F3@1   0SF3>1   1RF3<0   0U1@2   0D3   0SF3>1:5   0CI1:o   1HF3>2:0

Kinds are the rows of ir/action_kinds.py. `str(action)` and `Action.parse` are exact inverses. For a microbatch:

    F  B  W       forward, backward, and the weight gradient where it is split off from B
    R             what B takes and F did not keep, computed again
    L             lets go of what F saved and R computes again; without it F does not save that at all
    SF RF SB RB   send and receive of the values on the boundary of F and B
    HF HB         hand on what has come from the stage that it names, to a rank of the same stage
    D             drop of all that a microbatch still holds

Once per batch, with the number of the batch:

    P             returns this stage's part of gradients that several stages add to
    N             returns the part of this stage in what all stages have to agree on, the norm of the gradient
    U             update; with an item the part of it that changes a chunk, `0U1@2:c0`. One without an item ends it
    SP RP SN RN   move results of P and N to where N and U take them; HP and HN hand them on
    SU RU         move new weights from the U that makes them to the U of the stage that reads them
    AR            sums the gradients of a batch over the teams of the stage
    CI CO         begin to copy an item of the stage from its home in another memory space to the device, or back: `o`,
                  its optimiser state, or `c0`, a chunk of that, `w`, its weights, or `g`, its gradients, which are zero
                  as they come; a computation that touches it waits for CI
    L             with an item: lets go of its memory on the device, once CO is done

The item `a0` is what F of a microbatch saved, and CI, CO and L of it are counted by microbatches: `0CO5:a0`.

A stage lies on one rank or on several. Those that run the same microbatches of a batch are a team: they work on each of
them together. One team of each stage runs a given microbatch, the same one in every batch. Teams are replicas of each
other: the ranks at one place of all teams have the same part of the stage, and AR sums over these. Mostly a team is one
rank. The peer of a send or receive is a rank. With one rank per stage, rank r runs stage r.

A rank may run several stages, a pack; all of these lie on the same ranks, which run the same microbatches of each. Then
every message names the stage at its other end, too. Values that go from one stage of a rank to another need no action.

Training has no fixed length, so a schedule is a *period*: for each rank a `start` list, run once, and a `batch` list,
run once per batch. Both are written as for batch 1 (microbatches m .. 2m-1 of m per batch): weight versions are
relative to the batch and clamped at 0, and batch 1 is the first where no clamping hides them. `expand` turns the period
into the concrete program of a run: it shifts everything by (t - 1) batches, and leaves out actions of microbatches and
batches outside of the run. That drains the pipeline. At the end it reads the list of one more batch, because an update
may stand in the list of the batch after its own.
"""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

from .action_kinds import ACTION_KINDS, FORWARD, ITEM_PATTERN, ITEMS

# Lists of actions are written out for a whole batch.
MOST_MICROBATCHES = 1 << 16

_ROWS = tuple(ACTION_KINDS.values())
KINDS = tuple(ACTION_KINDS)
COMPUTE = tuple(row.name for row in _ROWS if row.computes)
# Computations whose results travel to other stages, and which computations take them there.
PHASES = tuple(kind for kind in COMPUTE if any(kind in row.takes for row in _ROWS))
TAKERS = {phase: tuple(row.name for row in _ROWS if phase in row.takes) for phase in PHASES}
SENDS = tuple(row.name for row in _ROWS if row.does == "sends")
RECEIVES = tuple(row.name for row in _ROWS if row.does == "receives")
# Sends of what has come, to ranks of the same stage that need the same.
HANDS = tuple(row.name for row in _ROWS if row.does == "hands on")
MESSAGES = (*SENDS, *RECEIVES, *HANDS)
SEND_OF, RECEIVE_OF, HAND_OF = (
    {ACTION_KINDS[kind].phase: kind for kind in kinds} for kinds in (SENDS, RECEIVES, HANDS)
)
PER_BATCH = tuple(row.name for row in _ROWS if row.per == "batch")
_ONCE = frozenset(PER_BATCH)
# Computations that read weights in one version, or make one.
VERSIONED = tuple(row.name for row in _ROWS if row.versions)
READERS = tuple(row.name for row in _ROWS if row.versions == "reads")
# Computations that save values for later ones of their microbatch.
SAVERS = tuple(kind for kind in COMPUTE if any(kind in row.saved_by for row in _ROWS))
# Computations that add to gradients, and those that use the sum of a batch.
ADDERS = tuple(row.name for row in _ROWS if row.gradients == "adds")
SUM_USERS = tuple(row.name for row in _ROWS if row.gradients == "uses")
# The actions once per batch that are no messages, in the order in which they are done.
BATCH_ORDER = (*(row.name for row in _ROWS if row.gradients == "sums"), *SUM_USERS)
# Actions that copy items between memory spaces.
COPIES = tuple(row.name for row in _ROWS if row.does == "copies")
_NAMES = "|".join(sorted(KINDS, key=len, reverse=True))
_ACTION = re.compile(rf"(\d+)({_NAMES})(\d+)(?:@(\d+))?(?:([<>])(\d+)(?::(\d+))?|:({ITEM_PATTERN}))?")


class Action(NamedTuple):
    kind: str
    stage: int
    mb: int
    version: int | None = None
    peer: int | None = None
    # The stage at the other end of a message, where ranks run several, or where values come from that are handed on.
    end: int | None = None
    # What it works on, of actions that move between memory spaces.
    item: str = ""

    def __str__(self) -> str:
        text = f"{self.stage}{self.kind}{self.mb}"
        if self.version is not None:
            text += f"@{self.version}"
        if self.peer is not None:
            text += f"{'<' if self.kind in RECEIVES else '>'}{self.peer}"
        if self.end is not None:
            text += f":{self.end}"
        return f"{text}:{self.item}" if self.item else text

    @staticmethod
    def parse(text: str) -> Action:
        match = _ACTION.fullmatch(text)
        if match is not None:
            stage, kind, mb, version, arrow, peer, end, item = match.groups()
            row = ACTION_KINDS[kind]
            if (arrow or "") == row.arrow and row.item in (("may", "must") if item else ("", "may")):
                return Action(
                    kind,
                    int(stage),
                    int(mb),
                    None if version is None else int(version),
                    None if peer is None else int(peer),
                    None if end is None else int(end),
                    item or "",
                )
        raise ValueError(
            f"bad action {text!r}, expected <stage><kind><microbatch>[@version][>peer|<peer][:stage|:item], "
            "e.g. 0F3@1, 1RF3<0 or 0CI1:o"
        )

    def batch(self, per_batch: int) -> int:
        """Return the batch it belongs to."""
        return self.mb if self.once else self.mb // per_batch

    @property
    def once(self) -> bool:
        """Return whether it is done once per batch, so that its number is that of a batch."""
        return ITEMS[self.item[0]] == "batch" if self.item else self.kind in _ONCE

    @property
    def computation(self) -> str:
        """The name of what it runs on its stage: its kind, with the item where that is a part."""
        return f"{self.kind}.{self.item}" if self.item and ACTION_KINDS[self.kind].computes else self.kind

    @property
    def phase(self) -> str:
        """The computation that it runs, or whose results it moves."""
        return ACTION_KINDS[self.kind].phase

    @property
    def holder(self) -> int:
        """The number of the unit whose values it works with: those of a microbatch under its number, those of batch t
        under -1 - t."""
        return -1 - self.mb if self.once else self.mb

    def shifted(self, batches: int, per_batch: int) -> Action:
        """Return the same action `batches` later; versions stop at 0."""
        mb = self.mb + (batches if self.once else batches * per_batch)
        version = None if self.version is None else max(0, self.version + batches)
        return Action(self.kind, self.stage, mb, version, self.peer, self.end, self.item)

    def other(self, homes: Mapping[int, int] | Sequence[int]) -> int:
        """Return the stage at the other end of a message. `homes` are the stages of ranks that run one."""
        assert self.peer is not None
        return homes[self.peer] if self.end is None else self.end

    def channel(self, rank: int) -> tuple[str, int, int, int | None, int | None]:
        """Return the channel of a message of a rank: phase, source, target, and their stages where it names them."""
        assert self.peer is not None
        stages = (None, None) if self.end is None else (self.stage, self.end)
        if self.kind in SENDS:
            return (self.phase, rank, self.peer, *stages)
        if self.kind in HANDS:
            return (self.phase, rank, self.peer, *stages[::-1])
        return (self.phase, self.peer, rank, *stages[::-1])


@dataclass(frozen=True, slots=True)
class Program:
    """One rank's actions: `start` once, `batch` once per batch."""

    start: tuple[Action, ...]
    batch: tuple[Action, ...]


@dataclass(frozen=True, slots=True)
class Schedule:
    """The program of every rank, for `microbatches` per batch; one update per batch. `ranks` maps a rank to its
    program."""

    name: str
    microbatches: int
    ranks: Mapping[int, Program] = field(default_factory=dict)
    # The runs that the verifier looks at, each several times (ir/verify/runs.py).
    kept: dict[tuple[int, int], dict[int, list[Action]]] = field(
        default_factory=dict, init=False, repr=False, compare=False
    )

    def rewrite(self, rule: Callable[[Action], Iterable[Action]]) -> Schedule:
        """Replace every action of every rank by the results of `rule` for it, in both lists."""
        return self.rewrite_ranks(lambda rank, action: rule(action))

    def rewrite_ranks(self, rule: Callable[[int, Action], Iterable[Action]]) -> Schedule:
        """Replace every action by the results of a rule that gets the rank as well."""

        def changed(rank: int, actions: tuple[Action, ...]) -> tuple[Action, ...]:
            return tuple(b for a in actions for b in rule(rank, a))

        ranks = {
            rank: Program(changed(rank, program.start), changed(rank, program.batch))
            for rank, program in self.ranks.items()
        }
        return Schedule(self.name, self.microbatches, ranks)

    def homes(self) -> dict[int, int]:
        """Return the first stage of every rank that does something."""
        return {rank: min(stages) for rank in self.ranks if (stages := self.stages_of(rank))}

    def stages_of(self, rank: int) -> tuple[int, ...]:
        """Return the stages that a rank runs, in order."""
        program = self.ranks[rank]
        return tuple(sorted({action.stage for action in (*program.start, *program.batch)}))

    def members(self) -> dict[int, tuple[int, ...]]:
        """Return the ranks of every stage, in order."""
        ranks: dict[int, tuple[int, ...]] = {}
        for rank in sorted(self.ranks):
            for stage in self.stages_of(rank):
                ranks[stage] = (*ranks.get(stage, ()), rank)
        return dict(sorted(ranks.items()))

    def teams(self) -> dict[int, tuple[tuple[int, ...], ...]]:
        """Return the teams of every stage: the ranks that run the same microbatches, in order."""
        teams: dict[int, dict[frozenset[int], tuple[int, ...]]] = {}
        for stage, ranks in self.members().items():
            of_stage = teams.setdefault(stage, {})
            for rank in ranks:
                numbers = frozenset(a.mb % self.microbatches for a in self._forwards(rank, stage))
                of_stage[numbers] = (*of_stage.get(numbers, ()), rank)
        return {stage: tuple(of_stage.values()) for stage, of_stage in teams.items()}

    def replicas(self) -> dict[int, tuple[int, ...]]:
        """Return for every rank the ranks that have its part of the stage, one of each team and itself among them: AR
        sums over these."""
        groups: dict[int, tuple[int, ...]] = {}
        for teams in self.teams().values():
            for group in zip(*teams, strict=False):
                groups |= dict.fromkeys(group, group)
        return {rank: groups.get(rank, (rank,)) for rank in self.homes()}

    def runners(self) -> dict[tuple[int, int], tuple[int, ...]]:
        """Return the team of a stage that runs each microbatch: (stage, number in the batch) -> ranks."""
        return {
            (stage, a.mb % self.microbatches): team
            for stage, teams in self.teams().items()
            for team in teams
            for a in self._forwards(team[0], stage)
        }

    def sends(self, rank: int) -> Counter[tuple[str, int, int]]:
        """Count the sends of a rank for each kind, stage and number of a microbatch in its batch; 0 of what is sent
        once per batch."""
        m, sent = self.microbatches, [a for a in self.ranks[rank].batch if a.kind in SENDS]
        return Counter((a.kind, a.stage, 0 if a.once else a.mb % m) for a in sent)

    def shares(self, stage: int) -> list[int]:
        """Count the microbatches of a batch that each rank of a stage runs."""
        return [len(self._forwards(rank, stage)) for rank in self.members()[stage]]

    def _forwards(self, rank: int, stage: int) -> list[Action]:
        return [a for a in self.ranks[rank].batch if (a.kind, a.stage) == (FORWARD, stage)]

    def actions(self) -> Iterator[Action]:
        """Yield all actions as written, rank by rank."""
        for program in self.ranks.values():
            yield from program.start
            yield from program.batch

    def expand(self, rank: int, batches: int, first: int = 0) -> Iterator[Action]:
        """Yield the program of `rank` for batches first .. first+batches-1, from an empty pipeline to an empty
        pipeline."""
        m, program, run = self.microbatches, self.ranks[rank], range(first, first + batches)
        parts = [(program.start, first - 1)] + [(program.batch, t - 1) for t in range(first, first + batches + 1)]
        for actions, shift in parts:
            for action in actions:
                if action.batch(m) + shift in run:
                    yield action.shifted(shift, m)

    def expand_all(self, batches: int, first: int = 0) -> dict[int, list[Action]]:
        return {rank: list(self.expand(rank, batches, first)) for rank in self.ranks}


class Routes:
    """The ranks between which a message goes. The team that runs a microbatch on one stage sends to the team that runs
    it on the other, each rank to the one at its own place. Where that has more ranks, places are taken in turn; if it
    has fewer, some ranks send nothing. Results that are sent once per batch are the same in all
    teams of a stage. So each team takes them from one of those, in turn.
    """

    def __init__(self, schedule: Schedule) -> None:
        self._teams, self._runners, self._per_batch = schedule.teams(), schedule.runners(), schedule.microbatches
        # The number of each rank's team in its stage, and its place in the team.
        self._at = {
            rank: (number, place)
            for teams in self._teams.values()
            for number, team in enumerate(teams)
            for place, rank in enumerate(team)
        }

    def seat(self, rank: int) -> tuple[int, int]:
        """Return the place of a rank in its team, and how many ranks that has; none where it is in no team."""
        teams = [team for teams in self._teams.values() for team in teams if rank in team]
        return (teams[0].index(rank), len(teams[0])) if teams else (0, 0)

    def source(self, rank: int, phase: str, stage: int, number: int) -> int:
        """Return the rank of `stage` that sends to `rank`; `number` is that of the microbatch, or of the batch."""
        team = self.source_team(rank, phase, stage, number)
        return team[self._at[rank][1] % len(team)]

    def source_team(self, rank: int, phase: str, stage: int, number: int) -> tuple[int, ...]:
        """Return the team of `stage` whose results `rank` takes."""
        if phase not in PER_BATCH:
            return self._runners[stage, number % self._per_batch]
        return self._teams[stage][self._at[rank][0] % len(self._teams[stage])]

    def team(self, rank: int) -> tuple[int, ...]:
        """Return the team of a rank."""
        return next(team for teams in self._teams.values() for team in teams if rank in team)

    def takers(self, phase: str, stage: int, number: int) -> list[int]:
        """Return the ranks of `stage` that take results of a phase."""
        teams = self._teams[stage] if phase in PER_BATCH else (self._runners[stage, number % self._per_batch],)
        return [rank for team in teams for rank in team]

    def targets(self, rank: int, phase: str, home: int, stage: int, number: int) -> list[int]:
        """Return the ranks of `stage` that `rank` sends results of its stage `home` to."""
        return [other for other in self.takers(phase, stage, number) if self.source(other, phase, home, number) == rank]
