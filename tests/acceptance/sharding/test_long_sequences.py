"""Sequences that ranks share out: a decoder with dropout trains as on one device, and each rank holds its part of what the
backward needs. The example `long_sequence.py`, under a limit of the system, is in tests/project/test_examples.py.

The judge is the interpreter on one device in float64, which knows neither meshes nor kernels.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.commands.parser import main
from penstock.ir.collective_calls import calls_of
from penstock.ir.memory.predict import measure_memory

from .test_fifty_steps import (
    ALONE,
    BATCH,
    MICROBATCHES,
    POSITIONS,
    Block,
    batches,
    compiled,
    interpreted,
    model_of,
    on_one_device,
)

CONTEXT = "preset:context"
PLANS: dict[str, dict[str, Any]] = {
    "folded": {"devices": 3, "mesh": "cp=3", "shard": CONTEXT},
    "in order": {"devices": 2, "mesh": "cp=2", "shard": {"tokens": (None, "cp")}},
    "beside split weights": {"devices": 6, "mesh": "tp=2,cp=3", "shard": [CONTEXT, "preset:megatron"]},
    "in two stages": {"devices": 6, "mesh": "cp=3", "stages": 2, "shard": CONTEXT},
    "with replicas": {"devices": 6, "mesh": "dp=2,cp=3", "shard": CONTEXT, "zero": 3},
    "computed again": {"devices": 3, "mesh": "cp=3", "shard": CONTEXT, "recompute": "all"},
}

QUICK = ("folded", "beside split weights")


def planned(asked: dict[str, Any], **more: Any) -> ps.Plan:
    options = {key: value for key, value in asked.items() if key != "devices"} | more
    training = ps.Training(loss="cross_entropy", optimizer=ps.Momentum(lr=0.05), microbatches=MICROBATCHES)
    return ps.plan(model_of("gpt"), ps.Cluster.local(asked["devices"]), training, **options)


@pytest.mark.parametrize(
    "name", [name if name in QUICK else pytest.param(name, marks=pytest.mark.slow) for name in PLANS]
)
def test_ranks_that_share_positions_have_the_losses_of_one_device(name: str) -> None:
    plan = planned(PLANS[name])
    assert any(call.op.kind == "shift" for graph in plan.module.graphs.values() for call in calls_of(graph))
    np.testing.assert_allclose(interpreted(plan, 4), on_one_device("gpt", ALONE, 4), rtol=1e-10)


def test_compiled_ranks_train_and_are_verified(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    plan = planned(PLANS["folded"])
    first, second = compiled(plan, tmp_path / "bundle", 4, times=2)
    assert first == second
    np.testing.assert_allclose(first, on_one_device("gpt", ALONE, 4), rtol=1e-5)
    assert main(["verify", str(tmp_path / "bundle")]) == 0
    assert "values of 3 ranks in float64 are those of the whole program" in capsys.readouterr().err
    assert main(["inspect", str(tmp_path / "bundle"), "--sharding"]) == 0
    shown = capsys.readouterr().out
    assert f"i64[{BATCH // MICROBATCHES},-2*{POSITIONS // 2}/cp]" in shown
    assert "shift" in shown


def test_a_checkpoint_of_positions_goes_on_on_one_device(tmp_path: Path) -> None:
    """The table of positions lies in folded order: a rank has two of its rows."""
    plan, alone = planned(PLANS["folded"]), planned({"devices": 1})
    assert str(plan.module.vars["places.weight"].type) == f"f32[-2*{POSITIONS // 2}/cp,32]"
    feed = batches(plan, 4)
    for name, one in (("ranks", plan), ("alone", alone)):
        ps.compile(one, tmp_path / name, backend="numpy")
    with ps.open(tmp_path / "ranks") as job:
        begun = list(job.run(iter(feed[:2])))
        table = np.array(job.parameters()["places.weight"])
        saved = job.save(tmp_path / "state")
    with ps.open(tmp_path / "alone", resume=saved) as job:
        np.testing.assert_array_equal(job.parameters()["places.weight"], table)
        ended = list(job.run(iter(feed[2:])))
    with ps.open(tmp_path / "alone") as job:
        np.testing.assert_allclose(begun + ended, list(job.run(iter(feed))), rtol=1e-5)


def test_each_of_four_ranks_keeps_a_quarter_for_the_backward() -> None:
    """What graphs keep, by their own types and by the plan's account. The control: split weights keep more."""
    plans = {
        name: ps.plan(long_decoder(), ps.Cluster.local(4 if asked else 1), TRAINING, **asked)
        for name, asked in {
            "one": {},
            "context": {"mesh": "cp=4", "shard": CONTEXT},
            "megatron": {"mesh": "tp=4", "shard": "preset:megatron"},
        }.items()
    }
    kept = {name: sum(v.type.nbytes for v in plan.module.graphs["s0.F"].saved) for name, plan in plans.items()}
    told = {name: measure_memory(plan.module)[0].activations for name, plan in plans.items()}
    for bytes_of in (kept, told):
        assert bytes_of["context"] / bytes_of["one"] == pytest.approx(1 / 4, rel=0.05)
        assert bytes_of["megatron"] / bytes_of["one"] > 1 / 4 * 1.05


TRAINING = ps.Training("cross_entropy", ps.AdamW(lr=1e-2), 1)


class Layers(torch.nn.Module):
    """Two layers of a decoder, for sequences of any length."""

    def __init__(self) -> None:
        super().__init__()
        self.tokens, self.blocks = torch.nn.Embedding(30, 32), torch.nn.ModuleList(Block() for _ in range(2))
        self.head = torch.nn.Linear(32, 30, bias=False)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        x = self.tokens(tokens)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def long_decoder() -> ps.Model:
    return ps.from_torch(Layers(), (torch.zeros(1, 1024, dtype=torch.int64),))
