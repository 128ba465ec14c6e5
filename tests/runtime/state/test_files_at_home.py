"""What ranks have at home, block by block: the files that their processes hold open, against what the plan says of each
item, version and saved set. Linux alone lists the files of a process."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import pytest
from tests.passes.memory.test_offload import let_sets_go
from tests.runtime.job.test_replicas import M, batches_of

import penstock as ps
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.memory.items import home_bytes, stage_images
from penstock.ir.memory.saved_sets import most_sets_at_home, saved_set
from penstock.models import write_mlp
from penstock.runtime.state.home_files import room_of

pytestmark = pytest.mark.skipif(
    not sys.platform.startswith("linux"), reason="only Linux lists the files that a process holds open"
)

CASES = {
    "state in chunks": ("1f1b", 1, "state"),
    "saved sets": ("gpipe", 1, "activations"),
    "weights": ("wrap", 3, "weights"),
    "weights in two versions": ("interleaved-2bw", 3, "all"),
}


def planned(case: str, path: Path, home: Path) -> ps.Plan:
    schedule, packs, offload = CASES[case]
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=M)
    split_at = [f"fc{i}.product" for i in range(1 + 6 // packs, 13, 6 // packs)]
    options = {"packs": packs, "split_at": split_at, "offload": offload, "spill": f"{home}/", "recompute": "none"}
    return ps.plan(ps.from_onnx(path), Cluster.local(2), training, schedule=schedule, **options)


def blocks_of(plan: ps.Plan, rank: int) -> list[int]:
    """The bytes of each file that a rank has at home, by the plan."""
    module, blocks = plan.module, list[int]()
    assert module.schedule is not None
    for stage in module.rank_packs()[rank]:
        for image in stage_images(module, stage).values():
            blocks += [image.stored] * image.versions
        if (saved := saved_set(module, stage)) is not None:
            blocks += [saved.nbytes] * most_sets_at_home(module.schedule.expand(rank, 4), stage, saved.users)
    return sorted(room_of(nbytes) for nbytes in blocks if nbytes)


def files_of(process: int, folder: Path) -> list[int]:
    """The bytes of each file in a folder that a process holds open."""
    held = []
    for link in Path(f"/proc/{process}/fd").iterdir():
        if os.readlink(link).startswith(f"{folder}/"):
            held.append(os.stat(link).st_size)
    return sorted(held)


@pytest.mark.parametrize("case", CASES)
def test_ranks_hold_the_files_that_are_planned(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: the plan of another schedule, which has other blocks."""
    let_sets_go(monkeypatch)
    (home := tmp_path / "home").mkdir()
    plan = planned(case, write_mlp(tmp_path / "deep.onnx", [16] * 13, batch=4), home)
    with ps.open(ps.compile(plan, tmp_path / "bundle", backend="numpy"), timeout=60) as job:
        list(job.steps(batches_of(job.bundle, 2)))
        files = [files_of(process, home) for process in job.workers.process_ids()]
    blocks = [blocks_of(plan, rank) for rank in range(2)]
    assert files == blocks
    assert all(blocks)
    # What the plan counts against the bytes of a space are whole items; files are whole blocks of the disk.
    (held,) = home_bytes(plan.module).values()
    assert all(nbytes <= sum(blocks[rank]) for rank, nbytes in held.items())
    others = [planned(other, tmp_path / "deep.onnx", home) for other in CASES if other != case]
    assert all([blocks_of(other, rank) for rank in range(2)] != files for other in others)
