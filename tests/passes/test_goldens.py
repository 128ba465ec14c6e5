"""Every pass on a small module, its result kept as a file to read and to compare: goldens/NN_pass.ir is what the pass made of the file
before it. `python tests/passes/test_goldens.py` writes the files again after a change that is meant; `git diff` then shows what changed.
goldens_bf16 holds the same for the pipeline of `--precision bf16`, goldens_zb for that of schedule zb-1f1b, from the pass on that makes the difference.
"""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.ir.text import parse_module, print_module
from penstock.passes.manager import Call, parse_pipeline, run_passes
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline

GOLDENS = Path(__file__).with_name("goldens")
LOW = Path(__file__).with_name("goldens_bf16")
ZERO = Path(__file__).with_name("goldens_zb")
CALLS = training_pipeline({"kind": "adamw", "lr": 0.01}, {"stages": 2}, PipelineOptions(schedule="2bw", microbatches=2))
# Folder, the pipeline, and its first pass that is not in the one above.
OTHERS = [
    (
        LOW,
        training_pipeline(
            {"kind": "adamw", "lr": 0.01},
            {"stages": 2},
            PipelineOptions(schedule="2bw", microbatches=2, precision="bf16"),
        ),
        "precision",
    ),
    (
        ZERO,
        training_pipeline(
            {"kind": "adamw", "lr": 0.01}, {"stages": 2}, PipelineOptions(schedule="zb-1f1b", microbatches=2)
        ),
        "split-backward",
    ),
]


def files() -> list[Path]:
    return [GOLDENS / f"{i:02d}_{call.name}.ir" for i, call in enumerate(CALLS, 1)]


def other_steps() -> list[tuple[Call, Path, Path]]:
    """Call, module before it, module after it, of the other pipelines, from their first own pass on."""
    found = []
    for folder, calls, name in OTHERS:
        first = [call.name for call in calls].index(name)
        after = [folder / f"{i:02d}_{call.name}.ir" for i, call in enumerate(calls, 1)][first:]
        found += zip(calls[first:], [files()[first - 1], *after], after, strict=False)
    return found


def run(call: Call, before: Path) -> str:
    module = parse_module(before.read_text(encoding="utf-8"), str(before))
    return print_module(run_passes(module, [call], PASSES))


@pytest.mark.parametrize("number", range(len(CALLS)), ids=[call.name for call in CALLS])
def test_pass_makes_its_golden(number: int) -> None:
    before = files()[number - 1] if number else GOLDENS / "input.ir"
    after = files()[number]
    assert after.read_text(encoding="utf-8") == f"// {CALLS[number]}\n" + run(CALLS[number], before)


@pytest.mark.parametrize("step", other_steps(), ids=lambda step: f"{step[2].parent.name}-{step[0].name}")
def test_pass_makes_its_golden_in_another_pipeline(step: tuple[Call, Path, Path]) -> None:
    call, before, after = step
    assert after.read_text(encoding="utf-8") == f"// {call}\n" + run(call, before)


def test_there_are_no_other_goldens() -> None:
    assert sorted(GOLDENS.glob("*.ir")) == sorted([*files(), GOLDENS / "input.ir"])
    assert sorted(path for folder, _, _ in OTHERS for path in folder.glob("*.ir")) == sorted(
        after for _, _, after in other_steps()
    )


def test_a_changed_golden_is_noticed() -> None:
    """Control: goldens are compared as text, so that one other number is a difference."""
    (call,) = parse_pipeline("optimizer{kind=adamw,lr=0.02}", PASSES)
    number = [c.name for c in CALLS].index("optimizer")
    made = run(call, files()[number - 1])
    golden = files()[number].read_text(encoding="utf-8").split("\n", 1)[1]
    assert made != golden
    assert made.replace("init [0.02]", "init [0.01]") == golden


if __name__ == "__main__":
    before = GOLDENS / "input.ir"
    for call, after in zip(CALLS, files(), strict=True):
        after.write_text(f"// {call}\n" + run(call, before), encoding="utf-8")
        before = after
    for call, before, after in other_steps():
        after.parent.mkdir(exist_ok=True)
        after.write_text(f"// {call}\n" + run(call, before), encoding="utf-8")
