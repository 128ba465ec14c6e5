"""A planned model: the program of every rank, how it came about, and its predicted times."""

from __future__ import annotations

import json
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from penstock.frontends.training import Training
from penstock.ir.graph import Module
from penstock.ir.ladder.ladder import Ladder
from penstock.passes.manager import Call
from penstock.support import notebook
from penstock.support.words import counted

from .choice import Search
from .facts import describe_plan
from .model import Model
from .offloading.prices import FatePrices
from .predict import Predicted, predict


@dataclass(frozen=True)
class Plan:
    """A planned model. `module` is the program, `reference` the same model before it was cut into stages, `search` what
    the planner did if it chose."""

    model: Model
    module: Module
    reference: Module
    calls: tuple[Call, ...]
    training: Training | None
    search: Search | None = None
    # The programs of all sizes, where dimensions are bounded; `module` is that of the largest.
    ladder: Ladder[Module] | None = None
    # The prices of what could be elsewhere or computed again, where they chose (`--offload auto`).
    prices: FatePrices | None = None

    def __repr__(self) -> str:
        return f"<{plan_line(self.module)}>"

    def _repr_html_(self) -> str:
        return notebook.as_html(self)

    @cached_property
    def predicted(self) -> Predicted:
        """The forecast of the simulator, by the module alone."""
        return predict(self.module)

    def to_json(self) -> str:
        """Return the plan as text that `penstock compile --plan` reads back."""
        return json.dumps(self.as_dict(), indent=2, sort_keys=True)

    def as_dict(self) -> dict[str, Any]:
        """Return the plan as plain data: the same facts as `notes`, for programs, and its predicted times."""
        facts = describe_plan(self.module, self.reference, self.calls, self.predicted, self.search)
        if self.prices is not None:
            facts["prices"] = self.prices.as_dict()
        if self.ladder is not None:
            facts["rungs"] = [{"sizes": dict(rung.sizes), "seconds": predict(rung.held).step} for rung in self.ladder]
        return facts


def plan_line(module: Module) -> str:
    """Describe a plan in one line."""
    schedule = module.schedule
    pace = (
        f"{schedule.name}, {counted(schedule.microbatches, 'microbatch')} per batch"
        if schedule is not None
        else "no schedule"
    )
    stages = "; ".join(
        f"stage {stage.index} on {' '.join(module.devices_of(stage.index))}" for stage in module.stages[:8]
    )
    more = f"; {counted(len(module.stages) - 8, 'more stage')}" if len(module.stages) > 8 else ""
    return f"plan of {module.name}: {pace}, {stages}{more}"
