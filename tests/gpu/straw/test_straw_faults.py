"""The controls of the driver of straw: faults that are put in on purpose are noticed, each by what it is, and nothing is where there is none."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

# What the driver, or the comparison of results, says of each fault.
SAID = {
    "missing_wait": "results differ",
    "wrong_stream": "results differ",
    "wrong_slot": "results differ",
    "double_free": "double free: cudaFree",
    "unaligned_argument": "alignment:",
    "freed_too_early": "which was freed",
    "write_past_the_end": "access:",
    "wrong_grid": "results differ",
    "uninitialised_memory": "results differ",
    "leak": "leak: block",
    "wrong_device": "device:",
    "copy_past_the_end": "range: copy from",
}


def test_every_fault_is_noticed(program: Callable[..., Any], tmp_path: Path) -> None:
    said = program("gpu.straw.faults", tmp_path, devices=2)
    assert said.pop("sound") == []
    assert said.keys() == SAID.keys()
    missed = {name: said[name] for name, words in SAID.items() if not any(words in line for line in said[name])}
    assert not missed
