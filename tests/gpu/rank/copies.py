"""A program: copies between pinned memory and a device of straw, beside its computations and among them.

Out: a line of JSON: the largest difference to what was expected, the waits of the host before it read anything, and what the driver reports.
"""

from __future__ import annotations

import ctypes
import json
import sys

import numpy as np
import torch
from gpu.straw import libraries
from gpu.straw.torch_device import devices

from penstock.ir.types import TensorType
from penstock.runtime.state.device_copies import DeviceCopies

TYPE = TensorType("f32", (50, 30))
TURNS = 9


def waits() -> int:
    """Return how often the host has waited."""
    tasks, count = ctypes.c_uint64(), ctypes.c_uint64()
    devices().runtime.straw_counts(ctypes.byref(tasks), ctypes.byref(count))
    return count.value


def main(beside: int) -> dict[str, object]:
    """Double arrays on a device, add them up there, and read both."""
    copies = DeviceCopies(torch.device("cuda", 0), beside)
    total, before, started = torch.zeros(TYPE.dims, device=copies.device), waits(), []
    # The buffers on the device are there before anything is late.
    given = [np.full(TYPE.dims, i + 1, np.float32) for i in range(TURNS)]
    for array in given:
        x = copies.feed(array, TYPE)
        array.fill(np.nan)
        total += x
        started.append(copies.download([x * 2]))
        del x
    started.append((lambda copy, event: ([copy], event))(*copies.read(total)))
    waited = waits() - before
    worst = 0.0
    # The last copy first, so that nothing else was waited for.
    for i, ((copy,), event) in reversed(list(enumerate(started))):
        event.synchronize()
        expected = 2 * (i + 1) if i < TURNS else TURNS * (TURNS + 1) / 2
        worst = max(worst, float(np.nan_to_num(np.abs(copy.numpy() - expected), nan=1e9).max()))
    return {"worst": worst, "waits": waited, "faults": libraries.report(devices().runtime)}


if __name__ == "__main__":
    print(json.dumps(main(int(sys.argv[1]))))
