"""A program: the GPUs of straw measured as `penstock doctor` does, with small matrices.

Out: a line of JSON: the rates, the edges and the problems, and those of GPUs that are not what they are said to be.
"""

from __future__ import annotations

import json

import msgspec

from penstock.doctor.gpu_rates import measure_gpus
from penstock.support.hardware import Gpu

SIDE = 128


def main() -> dict[str, object]:
    """Measure two GPUs twice."""
    gpus = [Gpu(index, "sm_90", 1 << 32, 0.0, f"GPU-{index}") for index in range(2)]
    said = {"measured": msgspec.to_builtins(measure_gpus(gpus, SIDE))}
    # GPUs that are of another architecture than the driver says: no code of theirs is loaded.
    others = [Gpu(gpu.index, "sm_80", gpu.memory) for gpu in gpus]
    return said | {"refused": msgspec.to_builtins(measure_gpus(others, SIDE))}


if __name__ == "__main__":
    print(json.dumps(main()))
