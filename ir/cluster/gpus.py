"""The usual card of every architecture of NVIDIA: its rates by data sheet, and what a launch takes.

Rates are those of dense work. tf32, bf16 and f16 are those of tensor cores with sums in float32; 0 where an
architecture has none for that type. Sheets state some of them with sparsity, as twice as much.

Known limit: cards of one architecture differ by up to a factor of ten. A cluster file with `flops` and `bandwidth` says
which one it is; the ratios between element types stay those of the usual card.
"""

from __future__ import annotations

from typing import NamedTuple


class GpuSheet(NamedTuple):
    """The rates of a card: operations per second by element type, and bytes per second of its memory."""

    card: str
    f32: float
    tf32: float
    bf16: float
    f16: float
    bandwidth: float

    def speedup(self, dtype: str) -> float:
        """Return how many times faster than in float32 products of a type are by data sheet; 1 for other types."""
        rate = {"bf16": self.bf16, "f16": self.f16, "tf32": self.tf32}.get(dtype, 0.0)
        return rate / self.f32 if rate else 1.0


SHEETS = {
    "sm_75": GpuSheet("T4", 8.1e12, 0.0, 0.0, 6.5e13, 3.0e11),
    "sm_80": GpuSheet("A100 40GB", 1.95e13, 1.56e14, 3.12e14, 3.12e14, 1.55e12),
    "sm_86": GpuSheet("A40", 3.74e13, 7.48e13, 1.497e14, 1.497e14, 6.96e11),
    "sm_89": GpuSheet("L40S", 9.16e13, 1.83e14, 3.62e14, 3.62e14, 8.64e11),
    "sm_90": GpuSheet("H100 SXM", 6.7e13, 4.95e14, 9.89e14, 9.89e14, 3.35e12),
    "sm_100": GpuSheet("B200", 7.5e13, 1.12e15, 2.25e15, 2.25e15, 7.7e12),
    "sm_120": GpuSheet("RTX 5090", 1.048e14, 1.048e14, 2.095e14, 2.095e14, 1.79e12),
}
# The card of architectures that the table does not have.
_OTHER = SHEETS["sm_80"]
# Seconds of the host for a kernel of a GPU, and for a call of a stage: estimates, no sheet has them.
LAUNCH_OVERHEAD, GPU_CALL_OVERHEAD = 5e-6, 1e-4
# Bytes of a process for CUDA's own memory, and for the workspaces of cuBLAS and cuDNN: estimates.
CONTEXT, WORKSPACES = 512 << 20, 256 << 20
# Seconds of a rank for one end of a message that its device sends or receives by itself (NCCL): an estimate.
LIBRARY_OVERHEAD = 2e-5


def sheet_of(target: str) -> GpuSheet:
    """Return the usual card of an architecture, with or without a letter: sm_90, sm_90a."""
    return SHEETS.get(target.rstrip("af"), _OTHER)


def usual_settings(target: str) -> dict[str, float]:
    """Return the settings of a device where a cluster file has none."""
    sheet = sheet_of(target)
    return {
        "flops": sheet.f32,
        "bandwidth": sheet.bandwidth,
        "overhead": LAUNCH_OVERHEAD,
        "call_overhead": GPU_CALL_OVERHEAD,
    }
