"""A program: the GPUs of straw measured as `penstock doctor` does, with small matrices, and faults that are put in on purpose.

Out: a line of JSON: by the name of a case its rates, edges and problems; of each call its GPU and whether its operands were all alike; the captured calls of a
program; copies that fail; and how convolutions in float32 round, in torch by itself, while GPUs are measured and in stages.
"""

from __future__ import annotations

import json
import os
import tempfile
import uuid
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import msgspec
import torch

from penstock.backends.registry import backend_of
from penstock.backends.tvm.cuda.captures import Captures
from penstock.backends.tvm.cuda.torch_calls import CALLS
from penstock.doctor import gpu_rates
from penstock.doctor.gpu_rates import measure_gpus
from penstock.support.hardware import Gpu

SIDE = 128
# The order of the driver is not that of torch.
GPUS = [Gpu(index, "sm_90", 1 << 32, 0.0, f"GPU-{uuid.UUID(int=2 - index)}") for index in range(2)]
Fault = Callable[[str, str, int], None]
# How torch let convolutions in float32 round in calls that were measured.
ROUNDED = set[str]()


@contextmanager
def faulty(fault: Fault, seen: list[list[Any]]) -> Iterator[None]:
    """Let a function see each call of a library, by its kind, element type and GPU."""

    def watched(kind: str, function: Callable[..., None]) -> Callable[..., None]:
        def call(attrs: Any, outs: Any, *ins: torch.Tensor) -> None:
            dtype, index = str(ins[0].dtype).removeprefix("torch."), ins[0].device.index
            ROUNDED.add(torch.backends.cudnn.conv.fp32_precision)
            if [kind, dtype, index] not in [case[:3] for case in seen]:
                alike = any(bool(x.cpu().min() == x.cpu().max()) for x in ins)
                seen.append([kind, dtype, index, alike])
            fault(kind, dtype, index)
            function(attrs, outs, *ins)

        return call

    before = dict(CALLS)
    CALLS.update({kind: watched(kind, function) for kind, function in before.items()})
    try:
        yield
    finally:
        CALLS.update(before)


def measured_here(fault: Fault, seen: list[list[Any]], gpus: Sequence[Gpu] = GPUS) -> Any:
    """Measure GPUs in this process, without launches."""
    with tempfile.TemporaryDirectory() as folder, faulty(fault, seen):
        return msgspec.to_builtins(gpu_rates._measured(gpus, Path(folder), SIDE))


def no_attention(kind: str, dtype: str, index: int) -> None:
    if (kind, dtype, index) == ("attention", "bfloat16", 1):
        raise RuntimeError


def no_products(kind: str, dtype: str, index: int) -> None:
    if (kind, dtype, index) == ("matmul", "float32", 1):
        raise RuntimeError("CUDA error: out of patience\nCompile with other words")


def failing_copies() -> list[Any]:
    """Measure copies with the host on torch's second GPU, the only one, and on one whose memory is full."""
    fine = gpu_rates.measure_host_copies({3: torch.device("cuda", 1)})
    torch.cuda.synchronize(1)
    filling = torch.empty(torch.cuda.mem_get_info(1)[0], dtype=torch.uint8, device="cuda:1")
    failed = gpu_rates.measure_host_copies({3: torch.device("cuda", 1), 4: torch.device("cuda", 0)})
    del filling
    return [fine, failed]


def captured_calls() -> dict[str, int]:
    """Return how many calls were captured while launches were measured, and of the same program with captures."""
    counts = dict.fromkeys(("measured", "with captures"), 0)
    state, capture = {"now": "measured"}, Captures._capture

    def counted(self: Captures, *arguments: Any) -> Any:
        counts[state["now"]] += 1
        return capture(self, *arguments)

    Captures._capture = counted  # type: ignore[method-assign, assignment]
    os.environ["PENSTOCK_CUDA_GRAPHS"] = "1"
    device = torch.device("cuda", 0)
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name) / "sm_90"
        gpu_rates._compile_launches(folder, "sm_90")
        seconds = gpu_rates.measure_launches("sm_90", device, folder)
        state["now"] = "with captures"
        module = gpu_rates._launches("sm_90", "0")
        files = [folder / file for file in json.loads((folder / "files.json").read_text())]
        program, x = backend_of("tvm").load_stage(module, 0, files), torch.randn(16, device=device)
        for _ in range(4):
            program.call("s0.tiny8", [x])
        torch.cuda.synchronize(device)
    assert all(spent > 0 for spent in seconds.values())
    return {**counts, "graphs": len(seconds)}


def main() -> dict[str, object]:
    """Measure two GPUs, with and without faults."""
    # The first one is too old for nvcc, and torch does not see it.
    old = Gpu(2, "sm_75", 1 << 32, 0.0, "GPU-77")
    by_itself = torch.backends.cudnn.conv.fp32_precision
    said: dict[str, object] = {"measured": msgspec.to_builtins(measure_gpus([old, *GPUS], SIDE))}
    # Times are of no interest from here on.
    gpu_rates._LEAST_SECONDS = 0.0
    # GPUs that are not what the driver says, and one that torch does not see: nothing is measured on them.
    others = [Gpu(0, "sm_80", 1 << 32, 0.0, GPUS[0].uuid), GPUS[1], Gpu(2, "sm_90", 1 << 32, 0.0, "GPU-77")]
    seen: dict[str, list[list[Any]]] = {name: [] for name in ("refused", "attention", "products")}
    said["refused"] = measured_here(lambda *_: None, seen["refused"], others)
    said["attention"] = measured_here(no_attention, seen["attention"])
    said["products"] = measured_here(no_products, seen["products"])
    said["copies"] = failing_copies()
    torch.backends.cudnn.conv.fp32_precision = by_itself
    said["captured"] = captured_calls()
    in_stages = torch.backends.cudnn.conv.fp32_precision
    return said | {"seen": seen, "rounded": [by_itself, *ROUNDED, in_stages]}


if __name__ == "__main__":
    print(json.dumps(main()))
