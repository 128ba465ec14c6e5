"""The request to the planner, and the plan that answers it: stages with layers, devices, shares and recomputation; a
schedule; microbatches."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from penstock.ir.schedule_names import NAMES, TRAINING
from penstock.support.errors import UsageError


@dataclass(frozen=True, slots=True)
class PlanRequest:
    """The request to the planner: `batch` samples per update, and the plans that are allowed.

    `sizes` are those of microbatches (empty: every divisor, at most `most_microbatches` of them). `recompute` is none,
    all, parts (a stage computes as much again as its memory asks for), or auto: whole stages or none of them, and parts
    where nothing fits so. The runtime takes `base` bytes on every device. A stage has at most `replicas`; 0 does not
    limit them. With `zero` 1 the replicas of a stage share its optimiser state out. A search ends when no plan can be
    better by more than the part `tolerance`.
    """

    batch: int
    schedules: tuple[str, ...] = TRAINING
    recompute: str = "auto"
    sizes: tuple[int, ...] = ()
    base: int = 0
    replicas: int = 0
    most_microbatches: int = 512
    tolerance: float = 1e-4
    zero: int = 0

    def __post_init__(self) -> None:
        problems = [
            f"unknown schedule {s!r}, expected one of {', '.join(NAMES)}" for s in self.schedules if s not in NAMES
        ]
        if self.recompute not in ("auto", "none", "all", "parts"):
            problems.append(f"recompute is auto, none, all or parts, got {self.recompute!r}")
        if self.zero not in (0, 1):
            problems.append(
                f"level {self.zero} of zero exchanges in every microbatch, and has no price here: take level 1, or "
                "leave --batch out"
            )
        if self.batch < 1:
            problems.append(f"a batch has at least one sample, got {self.batch}")
        problems += [
            f"microbatches of {b} do not make a batch of {self.batch}" for b in self.sizes if b < 1 or self.batch % b
        ]
        if problems:
            raise UsageError("; ".join(problems), where="planner")

    def microbatch_sizes(self) -> tuple[int, ...]:
        """Return the sizes to try, the largest first."""
        sizes = self.sizes or tuple(
            b for b in range(1, self.batch + 1) if self.batch % b == 0 and self.batch // b <= self.most_microbatches
        )
        return tuple(sorted(sizes, reverse=True))


@dataclass(frozen=True, slots=True)
class StagePlan:
    """A stage of a plan: layers first .. last-1.

    Replica j is `devices[j]` (an index into the fleet) and runs `shares[j]` of the microbatches of a batch. With
    `recompute` the forward is computed again. That happens all at once, or `in_parts`, of which as few as possible are
    held at a time.
    """

    first: int
    last: int
    devices: tuple[int, ...]
    shares: tuple[int, ...]
    recompute: bool = False
    in_parts: bool = False


@dataclass(frozen=True, slots=True)
class PipelinePlan:
    """A plan: `size` samples per microbatch, `count` microbatches per batch. Under schedules for packs (packed.py) each
    device has several stages. With `zero` 1 replicas share optimiser state out."""

    schedule: str
    size: int
    count: int
    stages: tuple[StagePlan, ...]
    zero: int = 0

    @property
    def devices(self) -> tuple[int, ...]:
        """The devices in the order of ranks, each once."""
        return tuple(dict.fromkeys(device for stage in self.stages for device in stage.devices))

    @property
    def packs(self) -> int:
        """The number of stages on each device, where devices have several; else 1."""
        return max(1, len(self.stages) // len(self.devices))


@dataclass(frozen=True, slots=True)
class Bytes:
    """The predicted peak of one device, by purpose."""

    weights: int
    gradients: int
    state: int
    activations: int
    workspace: int
    buffers: int
    data: int
    base: int

    @property
    def total(self) -> int:
        return sum(self.named().values())

    def named(self) -> dict[str, int]:
        """Return each purpose by the name of its column in the table of a plan. `base`, which the runtime takes, has
        none there."""
        held = {
            "weights": self.weights,
            "gradients": self.gradients,
            "state": self.state,
            "activations": self.activations,
        }
        return held | {"boundary": self.buffers, "data": self.data, "workspace": self.workspace, "base": self.base}


@dataclass(frozen=True, slots=True)
class Judged:
    """The cost model's evaluation of a plan. `step` is seconds per batch, `pipe` the same without the sums of different
    stages on one NIC.

    `limits` are the seconds of each part alone, by name; `memory` is by device. `against` are the reasons that forbid
    the plan.
    """

    step: float
    pipe: float
    limits: Mapping[str, float] = field(default_factory=dict)
    memory: Mapping[int, Bytes] = field(default_factory=dict)
    against: tuple[str, ...] = ()

    @property
    def binding(self) -> str:
        """The part that sets the pace."""
        return max(self.limits, key=lambda name: self.limits[name])
