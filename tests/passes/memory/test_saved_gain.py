"""What forwards saved goes elsewhere only where devices need less memory for it. The oracle is the account of memory,
block by block, added up here."""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from dataclasses import replace
from itertools import accumulate

import pytest
from tests.passes.memory import test_offload as programs
from tests.passes.memory.test_offload import CASES, let_sets_go, planned

import penstock as ps
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import Space
from penstock.ir.graph import Module
from penstock.ir.memory.predict import measure_memory, planned_account
from penstock.ir.memory.saved_sets import saved_set
from penstock.models import write_mlp
from penstock.support.errors import UsageError


def most(module: Module, rank: int) -> int:
    """Return the bytes of all blocks of a rank at the worst moment of a run, with the memory that writes go through."""
    changes = Counter[int]()
    for life in planned_account(module, rank, [(0, 4)]).lives:
        changes[life.taken_at] += life.nbytes
        if life.given_at is not None:
            changes[life.given_at] -= life.nbytes
    sets = (saved_set(module, stage) for stage in module.schedule.stages_of(rank))
    return max(accumulate(changes[at] for at in sorted(changes))) + sum(s.gathered for s in sets if s is not None)


def homes(module: Module) -> list[int]:
    return [stage.index for stage in module.stages if stage.home]


def test_sets_stay_of_ranks_that_would_need_more(monkeypatch):
    """Of four ranks under 2bw the first needs less. The control: the second would need more."""
    kept, away = planned("2bw", "none", "none"), planned("2bw", "none", "activations")
    assert homes(away) == [0]
    assert most(away, 0) < most(kept, 0)
    assert all(most(away, rank) <= most(kept, rank) for rank in kept.schedule.ranks)
    let_sets_go(monkeypatch)
    anyway = planned("2bw", "none", "activations")
    assert homes(anyway) == [0, 1]
    assert most(anyway, 1) > most(kept, 1)


def test_sets_go_of_all_ranks_that_need_less(monkeypatch):
    monkeypatch.setitem(CASES, "gpipe", ("gpipe", 4, 1))
    monkeypatch.setattr(programs, "M", 12)
    kept, away = planned("gpipe", "none", "none"), planned("gpipe", "none", "activations")
    assert homes(away) == [0, 1, 2, 3]
    assert all(most(away, rank) < most(kept, rank) for rank in kept.schedule.ranks)


@pytest.mark.parametrize(
    ("case", "what"),
    [("1f1b", "activations"), ("zb-1f1b", "activations"), ("interleaved", "both"), ("one device", "activations")],
)
def test_one_error_says_that_no_memory_is_gained(case, what, monkeypatch):
    with pytest.raises(UsageError, match=r"saved takes no less memory elsewhere.*its copies rank \d needs \d+ bytes"):
        planned(case, "none", what)
    kept = planned(case, "none", "none")
    let_sets_go(monkeypatch)
    anyway = planned(case, "none", "activations")
    assert homes(anyway)
    assert all(most(anyway, rank) >= most(kept, rank) for rank in kept.schedule.ranks)


def test_the_error_names_a_rank_that_has_copies(monkeypatch):
    """Of three ranks under 1f1b the first alone has a microbatch that waits for long. The control: the last needs as
    much with copies as without, as it has none."""
    monkeypatch.setitem(CASES, "three", ("1f1b", 3, 1))
    monkeypatch.setattr(programs, "DEEP", programs.DEEP[:2])
    with pytest.raises(UsageError, match=r"its copies rank 0 needs \d+ bytes"):
        planned("three", "none", "activations")
    kept = planned("three", "none", "none")
    let_sets_go(monkeypatch)
    anyway = planned("three", "none", "activations")
    assert homes(anyway) == [0]
    assert most(anyway, 2) == most(kept, 2)


@pytest.fixture(scope="module")
def unequal(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Module]:
    """Plans of a stage on two devices, of which the first has eight of twelve microbatches."""
    model = ps.from_onnx(write_mlp(tmp_path_factory.mktemp("model") / "mlp.onnx", [32] * 9, batch=32))
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=1e-3), microbatches=12)

    def plan(offload: str, *memory: int) -> Module:
        cluster = Cluster.local(2)
        rooms = zip(cluster.devices, memory, strict=False)
        devices = tuple(replace(device, spaces=(("ram", room),)) for device, room in rooms) or cluster.devices
        cluster = replace(cluster, devices=devices, spaces=(Space("disk"),))
        places = {"devices": [["cpu:0", "cpu:1"]], "shares": [[8, 4]]}
        return ps.plan(model, cluster, training, schedule="gpipe", recompute="none", offload=offload, **places).module

    return plan


def test_sets_go_where_the_replica_that_needs_most_needs_less(unequal):
    """The other one needs more, as few microbatches wait there. It is what counts on a device of little memory."""
    kept, away = unequal("none"), unequal("activations")
    assert homes(away) == [0]
    assert most(away, 0) < most(kept, 0)
    peaks, others = ({rank: row.peak for rank, row in measure_memory(m).items()} for m in (kept, away))
    assert peaks[1] < others[1] < others[0] < peaks[0]
    assert homes(unequal("activations", peaks[0] - 1, peaks[0] - 1)) == [0]
    with pytest.raises(UsageError, match=r"its copies rank 1 needs \d+ bytes"):
        unequal("activations", 2 * peaks[0], peaks[1])


def test_weights_go_where_sets_stay():
    module = planned("one device", "none", "all")
    assert module.schedule == planned("one device", "none", "weights").schedule
    assert "w" in {action.item for action in module.schedule.actions()}
