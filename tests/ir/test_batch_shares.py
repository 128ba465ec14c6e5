"""The parts of a batch that teams have, and who reports."""

from __future__ import annotations

import pytest
from tests.oracles.sharding.local_modules import local_mlp

from penstock.ir.batch_shares import leads, reports, share_of
from penstock.runtime.telemetry.steps import loss_shares


@pytest.mark.parametrize("stages", [1, 2])
@pytest.mark.parametrize(("dp", "tp"), [(1, 1), (2, 1), (1, 2), (2, 2), (2, 3)])
def test_the_first_rank_of_a_team_reports_its_share(stages: int, dp: int, tp: int) -> None:
    module = local_mlp("1f1b", stages, dp, tp, microbatches=4, last="communicate").local
    last = (stages - 1) * dp * tp
    shares = {last + d * tp: list(range(d, 4, dp)) for d in range(dp)}
    assert loss_shares(module) == shares
    assert {rank for rank in range(stages * dp * tp) if reports(module, rank)} == shares.keys()
    for rank in range(stages * dp * tp):
        assert leads(module, rank) == (rank % tp == 0)
        assert share_of(module, rank) == list(range(rank // tp % dp, 4, dp))
