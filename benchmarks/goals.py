"""Goals of the results: ratios that were set before the run, and whether they were reached.

In: the result of run.py. Out: goals with the measured figures. A goal whose section did not run has no figure, and
counts as missed.
"""

from __future__ import annotations

import statistics
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

# Model, section, and the least speed relative to the fastest other pipeline and to torch in one process.
TRAINING = (
    ("GPT-2 small", "training-gpt", 1.5, 1.3),
    ("BERT-base", "training-bert", 1.1, 1.1),
    ("ResNet-50", "training-resnet", 1.1, 1.1),
)
SINGLE = "torch-single"
INFERENCE, LEAST_MODELS = "onnxruntime", 4


@dataclass(frozen=True)
class Goal:
    name: str
    wanted: str
    measured: str
    reached: bool


def goals(result: dict[str, Any]) -> Iterator[Goal]:
    sections = {name: section["found"] for name, section in result["sections"].items() if not section["exit"]}
    for model, section, pipeline, single in TRAINING:
        for what, is_other, least in (("pipelines", _is_pipeline, pipeline), ("one process", _is_single, single)):
            yield _trained(f"{model}, {what}", sections.get(section), is_other, least)
    yield _inferred(sections.get("inference"))
    yield _started(sections.get("startup"))


def _is_pipeline(name: str) -> bool:
    return not name.startswith("penstock") and name != SINGLE


def _is_single(name: str) -> bool:
    return name == SINGLE


def _trained(name: str, result: dict[str, Any] | None, is_other: Any, least: float) -> Goal:
    wanted = f"training at {least:g} times the speed of the fastest contender of that kind"
    if result is None:
        return Goal(name, wanted, "not measured", False)
    seconds = {contender: statistics.median(row["turn_s"]) for contender, row in result["contenders"].items()}
    ours = {contender: time for contender, time in seconds.items() if contender.startswith("penstock")}
    other = min((contender for contender in seconds if is_other(contender)), key=lambda contender: seconds[contender])
    ratios = {contender: seconds[other] / time for contender, time in ours.items()}
    figures = ", ".join(f"{contender.removeprefix('penstock-')} {ratio:.2f}" for contender, ratio in ratios.items())
    return Goal(name, wanted, f"{figures} times {other}", max(ratios.values()) >= least)


def _inferred(result: dict[str, Any] | None) -> Goal:
    name, wanted = "inference", f"no slower than {INFERENCE} on at least {LEAST_MODELS} of 5 models"
    if result is None:
        return Goal(name, wanted, "not measured", False)
    ratios = {
        row["model"].removesuffix("-infer"): _times(row, INFERENCE) / _times(row, "penstock") for row in result["rows"]
    }
    ahead = sum(ratio >= 1 for ratio in ratios.values())
    figures = ", ".join(f"{model} {ratio:.2f}" for model, ratio in ratios.items())
    return Goal(name, wanted, f"{ahead} of {len(ratios)}: {figures}", ahead >= LEAST_MODELS)


def _times(row: dict[str, Any], contender: str) -> float:
    return statistics.median(row["contenders"][contender]["turn_s"])


def _started(result: dict[str, Any] | None) -> Goal:
    name = "start-up"
    if result is None:
        return Goal(name, "`penstock --help` under 0.4 s without torch, TVM or ONNX", "not measured", False)
    row = next(row for row in result["rows"] if row["command"] == "penstock --help")
    seconds, loaded = statistics.median(row["seconds"]), ", ".join(row["loaded"]) or "none of them"
    wanted = f"`penstock --help` under {result['limit_s']:g} s without torch, TVM or ONNX"
    return Goal(name, wanted, f"{seconds:.2f} s, {loaded} loaded", seconds <= result["limit_s"] and not row["loaded"])
