"""Predicted memory of ranks that hold parts."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest
from tests.oracles.sharding.local_modules import local_mlp

from penstock.ir.batch_shares import fed_to_rank, share_of
from penstock.ir.graph import Value
from penstock.ir.memory.exchanges import ring_bytes
from penstock.ir.memory.predict import BATCHES_AHEAD, measure_memory, memory_course, planned_account
from penstock.ir.types import TensorType
from penstock.runtime.data.batches import BatchCuts

TYPES = {"f32": np.float32, "i64": np.int64}


@pytest.mark.parametrize("kind", ["2bw", "zb-1f1b"])
@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("dp", "tp", "hidden"), [(1, 2, 6), (2, 2, 6), (1, 3, 5)])
def test_a_rank_holds_what_a_model_of_its_parts_would(kind: str, stages: int, dp: int, tp: int, hidden: int) -> None:
    """The oracle: a model whose hidden layers have the size of a part, on devices that share nothing but batches."""
    split = local_mlp(kind, stages, dp, tp, hidden=hidden).local
    small = local_mlp(kind, stages, dp, 1, hidden=-(-hidden // tp)).local
    rows, expected = measure_memory(split), measure_memory(small)
    # Beside that it has blocks of collectives, an operand of f32[3,4] in use and one to spare.
    for rank, row in rows.items():
        alike = expected[rank // tp]
        assert row == replace(alike, data=alike.data + 96, peak=alike.peak + 96)
    whole = measure_memory(local_mlp(kind, stages, dp, 1, hidden=hidden).local)
    assert all(row.weights < whole[rank // tp].weights for rank, row in rows.items())
    for rank in rows:
        assert memory_course(split, rank, 2).held == memory_course(small, rank // tp, 2).held
        lives = [planned_account(module, r, [(0, 2)]).lives for module, r in ((split, rank), (small, rank // tp))]
        assert lives[0] == lives[1]


def test_inputs_and_messages_count_as_parts() -> None:
    module = local_mlp("1f1b", 2, 1, 2).local
    before = measure_memory(module)
    type = TensorType("f32", (6, 4))
    x, labels = module.inputs
    doubled = module.but(inputs=(Value(x.name, type.laid([("tp",), ()])), labels))
    assert measure_memory(doubled)[0].data == before[0].data
    assert measure_memory(module.but(inputs=(Value(x.name, type), labels)))[0].data > before[0].data


@pytest.mark.parametrize(("dp", "microbatches"), [(1, 4), (2, 4), (2, 3)])
def test_replicas_wait_for_their_part_of_each_batch(dp: int, microbatches: int) -> None:
    """The oracle: what a job sends to a rank, of so many batches. With one replica that is all of them."""
    module = local_mlp("1f1b", 1, dp, 1, microbatches=microbatches).local
    cuts = BatchCuts(module)
    batch = {
        value.name: np.zeros((value.type.dims[0] * microbatches, *value.type.dims[1:]), TYPES[value.type.dtype])
        for value in module.data_inputs
    }
    whole = sum(array.nbytes for array in batch.values())
    for rank, row in measure_memory(module).items():
        sent = [
            cuts.share(name, batch[name], share_of(module, rank), microbatches) for name in fed_to_rank(module, rank)
        ]
        waiting = row.data - ring_bytes(module, rank, [0])
        assert waiting == (BATCHES_AHEAD + 1) * sum(array.nbytes for array in sent)
        assert (sum(array.nbytes for array in sent) < whole) == (dp > 1)
