"""A program: an item and a saved set of a device of straw, whose homes are in pinned memory of the host.

Out: a line of JSON: the largest difference to what was expected, what the trace says of each copy, and what the driver reports.
"""

from __future__ import annotations

import ctypes
import json

import torch
from gpu.straw import libraries
from gpu.straw.torch_device import devices

from penstock.ir.cluster.spaces import Space
from penstock.ir.graph import STATE, Value, Var
from penstock.ir.memory.items import images_of
from penstock.ir.memory.saved_sets import SavedSet
from penstock.ir.types import TensorType
from penstock.runtime.state.homes import HomedItem
from penstock.runtime.state.lanes import StreamLanes
from penstock.runtime.state.saved_sets import SavedSets

TYPES = {"a": TensorType("f32", (50, 30)), "b": TensorType("bf16", (77,))}
SPACE = Space.from_fields("dram", {"kind": "ram"})
TURNS = 5


def waits() -> int:
    """Return how often the host has waited."""
    tasks, count = ctypes.c_uint64(), ctypes.c_uint64()
    devices().runtime.straw_counts(ctypes.byref(tasks), ctypes.byref(count))
    return count.value


def off(x: torch.Tensor, expected: float) -> float:
    """Return the largest difference of a tensor to a number."""
    return float(torch.nan_to_num((x.cpu().float() - expected).abs(), nan=1e9).max())


def moved_item(lanes: StreamLanes) -> tuple[list[float], int]:
    """Double an item a few times, each time behind its way here and in front of its way home. Return the differences that were seen, and the waits until
    then."""
    variables = {name: Var(name, type, STATE, 0, home="dram") for name, type in TYPES.items()}
    (image,) = images_of(variables).values()
    item = HomedItem(image, lanes.open(SPACE, image.nbytes), lanes)
    with item.filling():
        for name in TYPES:
            item.tensor(name).fill_(1)
    (apart,) = images_of(variables).values()
    # What is filled for the first time begins with zeros.
    fresh = HomedItem(apart, lanes.open(SPACE, apart.nbytes), lanes)
    with fresh.filling():
        pass
    worst = [off(fresh.newest(name), 0) for name in TYPES]
    seen, before = list[torch.Tensor](), waits()
    lanes.trace()
    for turn in range(TURNS):
        item.bring(f"0CI{turn}:o")
        item.wait()
        for name in TYPES:
            item.tensor(name).mul_(2)
        item.store(f"0CO{turn}:o")
        # Other memory, which may be where the item was.
        item.let_go()
        seen.append(torch.full((image.nbytes,), 255, dtype=torch.uint8, device=lanes.device))
    waited = waits() - before
    aside = item.apart()
    worst += [off(item.newest(name), 2**TURNS) for name in TYPES]
    item.bring()
    item.wait()
    for name in TYPES:
        item.tensor(name).fill_(7)
    worst += [off(item.newest(name), 7) for name in TYPES]
    item.store()
    item.let_go()
    worst += [off(item.newest(name), 7) for name in TYPES]
    worst += [off(aside[name], 2**TURNS) for name in TYPES]
    return worst, waited


def moved_sets(lanes: StreamLanes) -> list[float]:
    """Let the sets of three microbatches go home and come back, with one home more than are away at once."""
    values = {name: Value(name, type) for name, type in TYPES.items()}
    saved = SavedSet("dram", values, {"a": 0, "b": 6016}, 6016 + 192, frozenset({"B"}))
    sets = SavedSets(saved, [lanes.open(SPACE, saved.nbytes) for _ in range(2)], lanes)
    worst = []
    for mb in range(4):
        if mb > 1:
            back = sets.bring(mb - 2, f"0CI{mb - 2}:a0")
            sets.wait(mb - 2)
            worst += [off(back[name] * 2, 2 * (mb - 1)) for name in TYPES]
            del back
        if mb < 3:
            made = {name: value.to(lanes.device) for name, value in _made(mb + 1).items()}
            sets.store(mb, made, f"0CO{mb}:a0")
            sets.let_go(mb)
            del made
    return worst


def _made(number: int) -> dict[str, torch.Tensor]:
    return {"a": torch.full((50, 30), float(number)), "b": torch.full((77,), float(number), dtype=torch.bfloat16)}


def main() -> dict[str, object]:
    """Move an item and saved sets."""
    lanes = StreamLanes(torch.device("cuda", 0))
    worst, waited = moved_item(lanes)
    item = [(copy.text, copy.nbytes, copy.ended - copy.begun, copy.waited) for copy in lanes.copied()]
    worst += moved_sets(lanes)
    torch.cuda.synchronize(0)
    sets = [(copy.text, copy.nbytes, copy.ended - copy.begun, copy.waited) for copy in lanes.copied()]
    return {
        "worst": max(worst),
        "waits": waited,
        "copies": [*item, *sets],
        "faults": libraries.report(devices().runtime),
    }


if __name__ == "__main__":
    print(json.dumps(main()))
