"""The kernels of every stage, as data: their operations, predicted and measured times, and source.

    {"stage", "graph", "names", "calls", "per", "ops": [[kind, operands, results], ...], "flops", "bytes", "roofline",
     "measured", "share", "source"}

Seconds are those of one call. `measured` is null where there is no measurement (`penstock inspect --kernels
--measure`). `share` is the part of the stage's time per batch. `source` is a number of `sources` (`_packed` says how
they are written), -1 where there is none.
"""

from __future__ import annotations

import base64
import zlib
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import msgspec

from penstock.calibration.measured import Measured
from penstock.inspection.kernels.kernels import KernelRow, kernel_rows
from penstock.ir.graph import Module
from penstock.passes.kernels.divide import Kernel

from .material import Material
from .strings import Strings


def kernel_facts(module: Module, material: Material, strings: Strings, table: Measured | None) -> dict[str, Any]:
    """Return all kernels.

    Measured times are those of the table, if there is one; `programs` are [file, source] of whole stages.
    """
    rows = [_timed(row, table) for row in kernel_rows(module)]
    texts, totals = Strings(), defaultdict[int, float](float)
    for row in rows:
        totals[row.stage] += row.batch_s
    listed = [_row(row, totals[row.stage], material.sources, strings, texts) for row in rows]
    programs = [[name, texts[text]] for name, text in material.programs.items()]
    return {"rows": listed, "programs": programs, "sources": _packed(list(texts))}


def _packed(texts: Sequence[str]) -> str:
    """Return a list as JSON, deflated, in base64: sources repeat themselves, and few of them are viewed."""
    return base64.b64encode(zlib.compress(msgspec.json.encode(texts), 1)).decode()


def _timed(row: KernelRow, table: Measured | None) -> KernelRow:
    if table is None:
        return row
    return replace(row, measured_s=table.seconds(Kernel(row.names[0], row.ops, row.body), row.device))


def _row(row: KernelRow, total: float, sources: Mapping[str, str], strings: Strings, texts: Strings) -> dict[str, Any]:
    source = next((sources[label] for name in row.names if (label := f"{row.graph}/{name}") in sources), None)
    return {
        "stage": row.stage,
        "graph": row.graph,
        "names": list(row.names),
        "calls": row.calls_per_batch,
        "per": row.per,
        "ops": [
            [strings[op.kind], *(strings[", ".join([str(v.type) for v in values])] for values in (op.ins, op.outs))]
            for op in row.ops
        ],
        "flops": row.flops,
        "bytes": row.moved,
        "rates": [row.device.flops, row.device.bandwidth],
        "roofline": row.roofline_s,
        "measured": row.measured_s,
        "share": row.batch_s / total if total else 0.0,
        "source": -1 if source is None else texts[source],
    }
