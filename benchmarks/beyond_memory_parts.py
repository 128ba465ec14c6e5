"""A GPT of twice the memory of a process, trained by replicas that share all variables out, under a limit of the system.

    python benchmarks/beyond_memory_parts.py                          four ranks: three minutes
    python benchmarks/beyond_memory_parts.py --width 384 --steps 2

Four replicas of one thread each train a GPT with AdamW, each in a memory cgroup of its own, in which the kernel ends what
takes more (memory_group.py; Linux, cgroup v1, root). What a run of a tiny model takes in such a group is measured first.
Half of the weights, gradients and state of the whole model come on top: that is the limit of each rank. At `--zero 3` the
run has to end, with the losses of the same level without a limit. At level 0, the control, the kernel has to end it: exit
code 1 where one of these is not so.
"""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from machine import load, markdown, processor, system, versions, write_json
from memory_group import CGROUPS, MemoryGroup, enter
from torch_ranks import free_port

import penstock as ps
from penstock.ir.graph import GRAD, PARAM, STATE
from penstock.ir.memory.predict import measure_memory
from penstock.models import write_gpt
from penstock.runtime.launch.local import thread_environment

RANKS, SHARE, LAYERS, VOCABULARY, POSITIONS = 4, 2, 12, 2048, 32
# The width of the tiny model, and the seconds that a run may take.
TINY, LONGEST = 64, 600.0


def compiled(folder: Path, width: int, level: int, steps: int) -> tuple[Path, Path, Any]:
    """Return the bundle at a level, data for it, and its module."""
    sizes = {"heads": 4, "vocab": VOCABULARY if width > TINY else TINY, "positions": POSITIONS, "batch": 1}
    layers = LAYERS if width > TINY else 2
    model = write_gpt(folder / f"gpt-{width}.onnx", layers=layers, width=width, **sizes)
    training = ps.Training("cross_entropy", ps.AdamW(lr=1e-3), RANKS)
    plan = ps.plan(ps.from_onnx(model), ps.Cluster.local(RANKS), training, replicas=RANKS, stages=1, zero=level)
    tokens, labels = (value.name for value in plan.module.data_inputs)
    drawn = np.random.default_rng(0).integers(0, sizes["vocab"], (RANKS * steps, POSITIONS + 1))
    data = folder / f"data-{width}.npz"
    np.savez(data, **{tokens: drawn[:, :-1], labels: drawn[:, 1:]})
    return ps.compile(plan, folder / f"{width}-{level}"), data, plan.module


@contextlib.contextmanager
def groups(name: str, limit: int = 0) -> Iterator[list[MemoryGroup]]:
    """Make a group for each rank."""
    listed = [MemoryGroup(f"{name}-{rank}", limit) for rank in range(RANKS)]
    try:
        yield listed
    finally:
        for group in listed:
            group.close()


def run(
    bundle: Path, data: Path, steps: int, ranks: Sequence[MemoryGroup], folder: Path
) -> tuple[list[float] | None, int]:
    """Train with each rank in its group, as `penstock run` does under a launcher. Return the losses, None where a rank was
    ended, and the most that a rank was seen to hold."""
    metrics, log = folder / "metrics.jsonl", folder / "log"
    metrics.unlink(missing_ok=True)
    words = ["run", bundle, "--data", data, "--steps", steps, "--metrics", metrics]
    meeting = {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": str(free_port()), "WORLD_SIZE": str(RANKS)}
    running: list[subprocess.Popen[bytes]] = []
    most = 0
    with log.open("w") as out:
        try:
            for rank, group in enumerate(ranks):
                own = {"RANK": str(rank), "LOCAL_RANK": str(rank)}
                command = [sys.executable, __file__, "--enter", str(group.path), *map(str, words)]
                environment = os.environ | thread_environment(1) | meeting | own
                running.append(subprocess.Popen(command, env=environment, stdout=out, stderr=out))
            deadline = time.monotonic() + LONGEST
            while any(p.poll() is None for p in running) and time.monotonic() < deadline:
                if any(p.returncode for p in running) or any(group.kills for group in ranks):
                    break
                most = max(most, *(group.resident for group in ranks))
                time.sleep(0.1)
        finally:
            for process in running:
                process.kill()
                process.wait()
            for group in ranks:
                group.end()
    if any(process.returncode for process in running):
        print((log.read_text().strip().splitlines() or ["ended without a word"])[-1], file=sys.stderr)
        return None, most
    rows = [json.loads(line) for line in metrics.read_text(encoding="utf-8").splitlines()]
    return [row["loss"] for row in rows if "loss" in row], most


def measure(width: int, steps: int) -> dict[str, Any]:
    with tempfile.TemporaryDirectory(prefix="penstock-") as place:
        folder = Path(place)
        tiny = compiled(folder, TINY, 3, 2)
        with groups("tiny") as ranks:
            losses, base = run(*tiny[:2], 2, ranks, folder)
            assert losses is not None, "the run of a tiny model failed"
        parts, whole = (compiled(folder, width, level, steps) for level in (3, 0))
        held = [var.type.nbytes for var in whole[2].vars.values() if var.role in (PARAM, GRAD, STATE)]
        limit = base + sum(held) // SHARE
        with groups("free") as ranks:
            expected, without = run(*parts[:2], steps, ranks, folder)
        with groups("parts", limit) as ranks:
            losses, most = run(*parts[:2], steps, ranks, folder)
            kills = sum(group.kills for group in ranks)
        with groups("whole", limit) as ranks:
            control, _ = run(*whole[:2], steps, ranks, folder)
            ended = control is None and any(group.kills for group in ranks)
    assert expected is not None, "the run without a limit failed"
    return {
        "parameters": sum(var.type.size for var in whole[2].vars.values() if var.role == PARAM),
        "weights, gradients and state": sum(held),
        "base": base,
        "limit": limit,
        "planned": [max(row.peak for row in measure_memory(module).values()) for module in (parts[2], whole[2])],
        "steps": steps,
        "same losses": losses == expected,
        "resident": [most, without],
        "kills": kills,
        "control ended": ended,
    }


def table_of(rows: Sequence[Mapping[str, Any]]) -> tuple[list[str], list[list[str]]]:
    """Return the head and the rows of a table: what there is, what the limit leaves, and how runs ended."""
    row, mib = rows[0], 1 << 20
    parts, whole = row["planned"]
    listed = [
        ["parameters", f"{row['parameters'] / 1e6:.0f} million"],
        ["weights, gradients and state", f"{row['weights, gradients and state'] / mib:.0f} MiB"],
        ["what the limit of a rank leaves", f"{(row['limit'] - row['base']) / mib:.0f} MiB"],
        ["planned for a rank at level 3, and at level 0", f"{parts / mib:.0f} and {whole / mib:.0f} MiB"],
        [
            f"level 3 under the limit, losses of {row['steps']} steps",
            "those without a limit, bit for bit" if row["same losses"] and not row["kills"] else "DIFFER",
        ],
        ["level 0 under the limit", "ended by the kernel" if row["control ended"] else "NOT ENDED"],
    ]
    return ["", "measured"], listed


def main() -> int:
    if sys.argv[1:2] == ["--enter"]:
        enter(sys.argv[2])
        os.execv(sys.executable, [sys.executable, "-m", "penstock", *sys.argv[3:]])
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--width", type=int, default=512, help="of the model (default: 512)")
    parser.add_argument("--steps", type=int, default=5, help="(default: 5)")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the figures here, too")
    arguments = parser.parse_args()
    if not os.access(CGROUPS, os.W_OK):
        parser.error(f"{CGROUPS} is no place for memory cgroups of version 1")
    row = measure(arguments.width, arguments.steps)
    machine = [processor(sorted(os.sched_getaffinity(0))), system(), versions("torch", "numpy"), f"load {load()}"]
    print(markdown(*table_of([row])))
    if arguments.json:
        write_json(arguments.json, {"machine": machine, "width": arguments.width, "rows": [row]})
    return int(not row["same losses"] or not row["control ended"] or row["kills"] > 0)


if __name__ == "__main__":
    sys.exit(main())
