"""Stages whose meshes have other sizes: each rank is sent the tiles that it needs.

The oracle of numbers is a training on one device; that of what arrives is the whole program, value by value. What the
checkers refuse, and what `verify` finds, are the same plans wrong in one place.
"""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch
from acceptance.sharding import matrix as m
from acceptance.sharding.changed_schedules import wired_problems
from torch import nn

import penstock as ps
from penstock.inspection.summary import summarize
from penstock.inspection.views.links import show_links
from penstock.ir.cluster.cluster import Cluster, Device, Host
from penstock.ir.sharding.tile_messages import moved_bytes
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.layouts import check_local
from penstock.ir.verify.messages import check_wired
from penstock.models import write_gpt
from penstock.verification.inputs import synthetic_batch
from penstock.verification.parts import PartOff, PartsComparison

INSIDE, MEGATRON = ("h.1.mlp.fc",), ("preset:megatron",)
BATCH = 4


def planned(folder: Path, mesh: str = "tp=2;tp=3", cluster: Cluster | None = None, **settings: object) -> ps.Plan:
    """Return the plan of a GPT of six heads that is cut inside of a layer."""
    sizes = {"layers": 2, "width": 24, "heads": 6, "vocab": m.VOCABULARY, "positions": m.POSITIONS, "batch": m.BATCH}
    model = ps.from_onnx(write_gpt(folder / "six.onnx", **{**sizes, **settings}))
    given = {"split_at": INSIDE, "shard": MEGATRON, "mesh": mesh, "stages": 2}
    return ps.plan(model, cluster or Cluster.local(5), m.TRAINING, schedule="1f1b", **given)


def first_off(plan: ps.Plan) -> PartOff | None:
    assert plan.reference is not None
    assert plan.module.schedule is not None
    batch = synthetic_batch(plan.module, plan.module.schedule.microbatches, 0)
    return PartsComparison(plan.module, plan.reference).first_off(plan.model.imported.weights, batch)


def _edges(plan: ps.Plan) -> list[str]:
    return [line.strip() for line in print_module(plan.module).splitlines() if line.startswith("  edge")]


def test_text_and_links_say_who_sends_what(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert _edges(plan) == [
        "edge 0>1 F : %h.1.attn.residual : f32[2,8,24], %h.1.mlp.fc.product : f32[2,8,96/tp]",
        "edge 1>0 B : %h.1.mlp.residual.grad : f32[2,8,24], %h.1.mlp.fc.grad : f32[2,8,96/tp]",
    ]
    assert parse_module(print_module(plan.module)) == plan.module
    # Ranks 0 and 1 have 48 columns each, ranks 2 to 4 take 32 each; the residual is 1.5 KiB, 16 columns are 1 KiB.
    assert plan.module.schedule is not None
    receives = {r: [str(a) for a in p.batch if a.kind == "RF"][:2] for r, p in plan.module.schedule.ranks.items()}
    assert (receives[2][0], receives[3], receives[4][0]) == ("1RF4<0", ["1RF4<0", "1RF4<1"], "1RF4<1")
    rows = [
        [cell.strip() for cell in line.split("  ") if cell.strip()] for line in show_links(plan.module).splitlines()
    ]
    sent = {row[0]: row[6] for row in rows[2:] if row[2] == "F"}
    assert sent == {"0 > 2": "3.5 KiB", "0 > 3": "2.5 KiB", "1 > 3": "1.0 KiB", "1 > 4": "3.5 KiB"}


def test_summaries_and_reasons_count_what_travels(tmp_path: Path) -> None:
    """Three ranks take the residual of 1,536 bytes each, and a third of 6,144 bytes each; the values are 7,680 bytes."""
    plan = planned(tmp_path)
    facts = summarize(plan.module)
    forward = next(message for message in facts.messages if message.phase == "F")
    assert forward.nbytes == 3 * 1536 + 6144
    assert facts.stages[0].sent == m.MICROBATCHES * forward.nbytes
    edge = next(edge for edge in plan.module.edges if edge.phase == "F")
    assert moved_bytes(plan.module, edge) == {"h.1.attn.residual": 3 * 1536, "h.1.mlp.fc.product": 6144}
    # Before anybody receives, it is not known who sends: the values count.
    bare = plan.module.but(schedule=replace(plan.module.schedule, ranks={}))
    assert sum(moved_bytes(bare, edge).values()) == 1536 + 6144


class _Halved(nn.Module):
    """A product whose sum of parts goes through a multiplication before it is added up."""

    def __init__(self) -> None:
        super().__init__()
        self.a, self.b, self.c = nn.Linear(12, 24, bias=False), nn.Linear(24, 12, bias=False), nn.Linear(12, 12)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y: torch.Tensor = self.c(torch.tanh(self.b(torch.tanh(self.a(x))) * 0.5))
        return y


@pytest.mark.parametrize(("mesh", "devices"), [("tp=2;tp=3", 5), ("tp=4;tp=2", 6), ("tp=2;tp=1", 3)])
def test_sums_of_parts_are_added_up_before_they_leave(mesh: str, devices: int, tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = ps.from_torch(_Halved(), (torch.randn(BATCH, 12),))
    training = ps.Training("mse", ps.AdamW(lr=1e-2), 2)
    settings = {"shard": ("a.weight=[/tp,_]", "b.weight=[_,/tp]"), "split_at": ("mul",), "mesh": mesh, "stages": 2}
    plan = ps.plan(model, Cluster.local(devices), training, schedule="1f1b", **settings)
    assert "%linear_1.sum : f32[4/tp,12] to f32[4,12]" in _edges(plan)[0]
    assert first_off(plan) is None
    alone = ps.plan(model, Cluster.local(1), training, schedule="1f1b", stages=1)
    losses = []
    for number, one in enumerate((plan, alone)):
        rng = np.random.default_rng(1)
        names = [value.name for value in one.module.data_inputs]
        batches = [{n: rng.normal(size=(2 * BATCH, 12)).astype(np.float32) for n in names} for _ in range(5)]
        with ps.open(ps.compile(one, tmp_path / str(number), backend="numpy"), timeout=60) as job:
            losses.append(list(job.run(iter(batches))))
    assert losses[0] == pytest.approx(losses[1], rel=1e-6)


def _two_hosts() -> Cluster:
    """Two devices on one host and four on another, each with a network card."""
    devices = [Device(f"cpu:{i}", host="a" if i < 2 else "b") for i in range(6)]
    return Cluster(tuple(devices), hosts=(Host("a", nic_bandwidth=1e8), Host("b", nic_bandwidth=1e8)))


@pytest.mark.parametrize("mesh", ["tp=2;tp=4", "tp=2;tp=2,sp=2"])
def test_ranks_of_a_host_are_sent_shares_and_gather_them(mesh: str, tmp_path: Path) -> None:
    """What four ranks of a host have alike goes over the network card once, where a collective costs less."""
    plan = planned(tmp_path, mesh, _two_hosts(), width=96, heads=12, positions=256)
    forward, backward = _edges(plan)
    share = "f32[2,256/tp/sp,96]" if mesh == "tp=2;tp=2,sp=2" else "f32[2,256/tp,96]"
    assert f"%h.1.attn.residual : f32[2,256,96] to {share}" in forward
    # Two ranks of the other host share what both of them want.
    assert "%h.1.mlp.residual.grad : f32[2,256,96] to f32[2/tp,256,96]" in backward
    assert any(op.kind == "all_gather" and "residual" in op.outs[0].name for op in plan.module.graphs["s1.F"].ops)
    assert first_off(plan) is None


def test_checker_refuses_tiles_left_out_and_sent_twice(tmp_path: Path) -> None:
    plan = planned(tmp_path)
    assert not wired_problems(plan, {})
    left_out = {f"{r} {k}{mb}{way}": () for mb in range(4, 8) for r, k, way in ((1, "0SF", ">3"), (3, "1RF", "<1"))}
    missing = "takes %h.1.mlp.fc.product from stage 0, of which elements are missing: tiles have come from rank 0"
    assert missing in wired_problems(plan, left_out)
    one = {key: gone for key, gone in left_out.items() if "5" in key.partition(" ")[2]}
    assert missing in wired_problems(plan, one)
    assert "never sends this message" in wired_problems(plan, {"1 0SF4>3": ()})
    # Two ranks with the same tile: the second brings nothing.
    alike = planned(tmp_path, "tp=2,sp=2;tp=1")
    assert not wired_problems(alike, {})
    assert alike.module.schedule is not None
    sender = next(a.peer for a in alike.module.schedule.ranks[4].batch if a.kind == "RF")
    other = sender ^ 1 if sender is not None else 0
    numbers = range(4, 8)
    twice = {f"4 1RF{k}<{sender}": (f"1RF{k}<{sender}", f"1RF{k}<{other}") for k in numbers}
    twice |= {f"{other} 0F{k}@1": (f"0F{k}@1", f"0SF{k}>4") for k in numbers}
    assert "brings nothing that has not come from other ranks" in wired_problems(alike, twice)
    assert "was already done" in wired_problems(plan, {"3 1RF4<0": ("1RF4<0", "1RF4<0")})


def test_wrong_layouts_of_an_edge_are_refused_or_found(tmp_path: Path) -> None:
    plan = planned(tmp_path, "tp=2;tp=4", Cluster.local(6))
    laid = "%h.1.mlp.fc.product : f32[2,8,96/tp]"

    def changed(to: str, before: str = laid) -> ps.Plan:
        text = print_module(plan.module)
        assert text.count(laid) == 1
        return replace(plan, module=parse_module(text.replace(laid, before + to), "changed.ir"))

    assert first_off(changed("")) is None
    # Elements at other places of a part of the same size: what arrives is named, with the rank.
    for to in (" to f32[2,8,-2*48/tp]", " to f32[2,8,2*48/tp]"):
        off = first_off(changed(to))
        assert off is not None
        assert (off.key[2], off.rank, off.op.kind) == ("h.1.mlp.fc.product", 2, "reshard")
    other_size = "; ".join(map(str, check_wired(changed(" to f32[2,8,96]").module)))
    assert "%h.1.mlp.fc.product : f32[2,8,96] arrives on a rank of stage 1, which takes" in other_size
    not_whole = changed(" to f32[2,8,48/tp]", "%h.1.mlp.fc.product : f32[2,8,48]").module
    assert "%h.1.mlp.fc.product may differ along tp" in "; ".join(map(str, check_local(not_whole)))
