"""What gloo keeps to sum up gradients, by the pages of real processes."""

from __future__ import annotations

import os
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
import torch.multiprocessing as mp

from penstock.ir.memory.exchanges import RING
from penstock.runtime.telemetry.resident import resident_bytes

MIB, SUMS = 1 << 20, 16


def grow(rank: int, ranks: int, folder: str, numbers: int) -> None:
    """Sum up an array again and again, and write down how many pages that took."""
    os.environ["GLOO_SOCKET_IFNAME"] = "lo"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{folder}/store", rank=rank, world_size=ranks)
    few, many = torch.ones(16), torch.ones(numbers)
    for _ in range(SUMS):
        dist.all_reduce(few)
    before = resident_bytes()
    for _ in range(SUMS):
        dist.all_reduce(many)
        many.fill_(1)
    Path(folder, str(rank)).write_text(str(resident_bytes() - before))
    dist.barrier()
    dist.destroy_process_group()


def least_grown(ranks: int, nbytes: int, folder: Path) -> int:
    """Return by how much the rank grew that grew least. Now and then a sum runs on one thread more, with memory of its
    own."""
    folder.mkdir()
    mp.spawn(grow, (ranks, str(folder), nbytes // 4), nprocs=ranks)
    return min(int((folder / str(rank)).read_text()) for rank in range(ranks))


@pytest.mark.parametrize(("ranks", "nbytes"), [(2, 16 * MIB), (3, 16 * MIB), (2, 1200 << 10)])
def test_a_ring_keeps_as_much_as_is_counted(ranks: int, nbytes: int, tmp_path: Path) -> None:
    """Half of it would be too little, and a mebibyte more is what threads take beside it."""
    counted = min(RING, nbytes)
    tries = (least_grown(ranks, nbytes, tmp_path / str(number)) for number in range(3))
    grown = next((nbytes for nbytes in tries if nbytes < counted + MIB), None)
    assert grown is not None
    assert grown > counted * 0.6
