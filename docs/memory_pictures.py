"""The pictures of docs/memory.md: the program and the memory of a rank with each fate of what its forwards saved.

In: a small model, planned with each fate. Out: text blocks for docs/refresh.py to put into the page, of the lines that
`penstock inspect` prints with --schedule and --memory.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from pathlib import Path

# By the name of the region: the options of `penstock.plan`.
FATES: dict[str, dict[str, str]] = {
    "fate-kept": {"recompute": "none"},
    "fate-again": {"recompute": "all"},
    "fate-elsewhere": {"recompute": "none", "offload": "activations"},
}
MICROBATCHES, WIDTH = 6, 110


def parts() -> dict[str, Callable[[], str]]:
    return {name: partial(fate, **options) for name, options in FATES.items()}


def fate(**options: str) -> str:
    """The first of two ranks over one batch of gpipe: its row of the schedule with its copies, and its memory."""
    import penstock as ps
    from penstock.inspection.memory.curves import memory_curves
    from penstock.inspection.views.schedule_grid import format_grid
    from penstock.inspection.views.text import show_memory
    from penstock.ir.cluster.spaces import Space
    from penstock.models import write_mlp

    with tempfile.TemporaryDirectory() as folder:
        model = ps.from_onnx(write_mlp(Path(folder) / "mlp.onnx", [64] * 9, batch=256))
    cluster = replace(ps.Cluster.local(2, threads=(1, 1)), spaces=(Space("disk"),))
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=MICROBATCHES)
    module = ps.plan(model, cluster, training, schedule="gpipe", split_at=["fc6.product"], **options).module
    assert module.schedule is not None
    rows = _rows_of_first_rank(format_grid(module.schedule, 1, width=WIDTH))
    memory = show_memory(memory_curves(module, batches=1)[:1])
    plots = memory[memory.index("rank 0, stage 0 on") :]
    return "\n".join(["```text", *rows, "", plots, "```", ""])


def _rows_of_first_rank(grid: str) -> Iterator[str]:
    """Yield the rows of rank 0 in each piece of a grid, with an empty line between pieces."""
    shown = False
    for line in grid.splitlines():
        head, bar, _ = line.partition(" | ")
        if head.strip().startswith("rank") or not bar:
            shown = bar != "" and head.strip() == "rank 0"
        if shown or not line:
            yield line
