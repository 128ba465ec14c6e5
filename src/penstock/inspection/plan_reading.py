"""The reader of plan.json in a bundle or a dump folder.

In: the folder, or the parsed JSON. Out: plain data whose displayed fields have the right types.

All readers of plans use it (`Subject.plan`), so a damaged plan is one error. Fields that are not displayed are checked
only for being JSON that can be written again: numbers are finite, texts are Unicode.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import msgspec

from penstock.inspection.dump_reading import dumped_text
from penstock.support.errors import VerifyError

PLAN = "plan.json"


class _PlannedStage(msgspec.Struct):
    stage: int
    starts_at: str | None


class _Predicted(msgspec.Struct):
    step_s: float
    limited_by: str
    busy_s: dict[str, float]


class _Packs(msgspec.Struct):
    stages_on_a_device: int
    step_s: float
    taken: bool


class _Contribution(msgspec.Struct):
    device: str
    used: bool
    effect: str
    gain: float | None
    step_with_s: float | None
    step_without_s: float | None
    reason: str = ""


class _Served(msgspec.Struct):
    devices: list[str]
    latency_s: float
    pace_s: float


class _Objective(msgspec.Struct):
    name: str
    microbatches: int
    plans: dict[str, _Served]


class _Planner(msgspec.Struct):
    step_s: float
    bound_s: float
    proven: bool
    schedules: dict[str, float]
    refused: dict[str, str]
    left_out: list[str]
    limited_by: str = ""
    what_if: dict[str, float | None] = {}
    passed_over: str = ""
    simulated: dict[str, float | None] = {}
    packs: dict[str, _Packs] = {}
    formulas_of: str = ""
    stopped: bool = False
    against_s: float = 0.0
    unsure: list[str] = []
    no_less_s: dict[str, float] = {}
    devices: list[_Contribution] = []
    objective: _Objective | None = None


class _Plan(msgspec.Struct):
    pipeline: str = ""
    schedule: str = ""
    precision: str | None = None
    wire: str | None = None
    recompute: str | None = None
    stages: list[_PlannedStage] = []
    predicted: _Predicted | None = None
    planner: _Planner | None = None


def plan_of_folder(folder: Path) -> dict[str, Any]:
    """Return the plan of a dump folder; empty where it has none."""
    if not (folder / PLAN).is_file():
        return {}
    try:
        data = json.loads(dumped_text(folder, PLAN))
    except (ValueError, RecursionError) as error:
        raise _refusal(error, folder) from error
    return checked_plan(data, folder)


def checked_plan(data: Any, folder: Path) -> dict[str, Any]:
    """Return the data, if it is a plan."""
    try:
        json.dumps(data, ensure_ascii=False, allow_nan=False).encode()
        msgspec.convert(data, _Plan)
    except (ValueError, OverflowError, RecursionError) as error:
        raise _refusal(error, folder) from error
    assert isinstance(data, dict)
    return data


def _refusal(error: Exception, folder: Path) -> VerifyError:
    return VerifyError(
        f"{PLAN} is not as `penstock compile` writes it: {error}", where=str(folder), hint="compile the model again"
    )
