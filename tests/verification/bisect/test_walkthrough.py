"""The cases that docs/debugging.md walks through, as they come out: commands, and what they print. `python tests/verification/bisect/test_walkthrough.py` writes the
texts in walkthrough/ again, which the page is made of.

Numbers are not compared: they depend on the machine, and on what is predicted of plans."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

if __name__ == "__main__":
    # Relative imports of a program start where its package is said to be.
    sys.path[0], __package__ = str(Path(__file__).resolve().parents[2]), "verification.bisect"

from penstock.commands.parser import main

from .seeded_bugs import BUGS
from .small_models import write_models

TEXTS = Path(__file__).with_name("walkthrough")
SMALL = '[[device]]\nname = "cpu:0"\nmemory = 60000\n\n[[device]]\nname = "cpu:1"\nmemory = 60000\n'
TRAIN = "gpt.onnx --loss cross_entropy --optimizer adamw --microbatches"
# Rank 1 receives all microbatches before it sends a gradient.
ORDER = "1RF4<0 1F4@1 1RF5<0 1F5@1 1RF6<0 1F6@1 1RF7<0 1F7@1 1B4@1 1SB4>0 1B5@1 1SB5>0 1B6@1 1SB6>0 1B7@1 1SB7>0 1U1@2"


@dataclass(frozen=True)
class Walk:
    """A case: its commands, with a bug in the compiler or without, and those after the bug was mended."""

    name: str
    commands: Sequence[str]
    bug: str = ""
    mended: Sequence[str] = ()


WALKS = (
    Walk(
        "wrong-number",
        (
            "penstock verify gpt.onnx --backend numpy",
            "penstock verify gpt.onnx --bisect --devices 2 --loss cross_entropy --backend numpy",
            "cd gpt.onnx.repro",
            "cat repro.ir",
            "penstock verify repro.ir -p simplify --data inputs.safetensors",
        ),
        "a missing residual",
        ("penstock verify repro.ir -p simplify --data inputs.safetensors",),
    ),
    Walk(
        "hang",
        (
            f"penstock plan {TRAIN} 4 --devices 2 --dump-ir dumps",
            "grep 'rank [01] batch' dumps/10_communicate.ir",
            f"sed -i 's/rank 1 batch:.*/rank 1 batch: {ORDER}/' dumps/10_communicate.ir",
            "penstock opt dumps/10_communicate.ir -p fuse,lifetimes -o mine.ir",
        ),
    ),
    Walk(
        "does-not-fit",
        (
            "cat small.toml",
            f"penstock plan {TRAIN} 8 --cluster small.toml --schedule gpipe --recompute none",
            f"penstock plan {TRAIN} 8 --devices 2 --schedule gpipe --recompute none",
            f"penstock plan {TRAIN} 8 --cluster small.toml --schedule 1f1b --recompute none",
            f"penstock plan {TRAIN} 8 --cluster small.toml --schedule gpipe --recompute auto",
        ),
    ),
)


def walk(case: Walk) -> str:
    """What a terminal would show."""
    shown: list[str] = []
    with TemporaryDirectory() as folder, chdir(folder), pytest.MonkeyPatch.context() as patch:
        write_models(Path(folder))
        Path("small.toml").write_text(SMALL, encoding="utf-8")
        # As wide as the page, whatever terminal this is.
        patch.setenv("COLUMNS", "200")
        with pytest.MonkeyPatch.context() as broken:
            for bug in BUGS:
                if bug.name == case.bug:
                    bug.patch(broken)
            shown += [line for command in case.commands for line in run(command)]
        if case.mended:
            shown.append("... the mistake is mended ...")
            shown += [line for command in case.mended for line in run(command)]
    return "\n".join(shown) + "\n"


def run(command: str) -> list[str]:
    words = shlex.split(command)
    if words[0] == "cd":
        os.chdir(words[1])
        return [f"$ {command}"]
    if words[0] != "penstock":
        done = subprocess.run(words, capture_output=True, text=True, timeout=30, check=True)
        return [f"$ {command}", *done.stdout.splitlines()]
    out = StringIO()
    with redirect_stdout(out), redirect_stderr(out):
        code = main(words[1:])
    return [f"$ {command}", *out.getvalue().rstrip().splitlines(), *([f"(exit code {code})"] if code else [])]


def told(text: str) -> str:
    """What is compared: the words. Numbers that stand by themselves change with the machine and with what is predicted; the page shows some of them."""
    return re.sub(r"-{3,}|  +", " ", re.sub(r"(?<![\w.%@:])\d[\d.,]*(e[+-]\d+)?", "#", text))


@pytest.mark.parametrize("case", WALKS, ids=[case.name for case in WALKS])
def test_a_case_comes_out_as_it_is_told(case: Walk) -> None:
    text = (TEXTS / f"{case.name}.txt").read_text(encoding="utf-8")
    assert told(walk(case)) == told(text), "python tests/verification/bisect/test_walkthrough.py writes the texts again"


def test_the_cases_end_as_the_page_says() -> None:
    wrong, hang, large = ((TEXTS / f"{case.name}.txt").read_text(encoding="utf-8") for case in WALKS)
    assert "first wrong after: simplify" in wrong
    assert wrong.count("(exit code 5)") == 3
    assert "deadlock" in hang
    assert "(exit code 5)" in hang
    assert large.count("(exit code 4)") == 1


if __name__ == "__main__":
    TEXTS.mkdir(exist_ok=True)
    for case in WALKS:
        (TEXTS / f"{case.name}.txt").write_text(walk(case), encoding="utf-8")
