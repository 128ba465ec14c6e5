"""Sharded runs that lose ranks: killed at random moments they compute what they would have anyway, and with fewer ranks
they go on from the same checkpoint. The judge is the run that nothing happens to."""

from __future__ import annotations

import contextlib
import json
import os
import random
import re
import signal
import threading
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.planning.replan import replan
from penstock.runtime.job.job import Job
from penstock.runtime.job.run import run_bundle

STEPS, EVERY, WIDTH = 90, 5, 16
MEGATRON = ("preset:megatron",)
# How four ranks share a model out.
PLANS: dict[str, dict[str, Any]] = {
    "level 1": {"mesh": "dp=2", "stages": 2, "schedule": "2bw", "zero": 1},
    "level 2": {"mesh": "dp=4", "stages": 1, "zero": 2},
    "level 3": {"mesh": "dp=4", "stages": 1, "zero": 3},
    "level 1, tp=2": {"mesh": "dp=2,tp=2", "stages": 1, "zero": 1, "shard": MEGATRON},
    "level 3, tp=2": {"mesh": "dp=2,tp=2", "stages": 1, "zero": 3, "shard": MEGATRON},
}
FOUR, THREE, TWO = (tuple(f"cpu:{i}" for i in range(n)) for n in (4, 3, 2))


@cache
def model() -> ps.Model:
    """Return a model with two pairs of layers, which the preset splits."""
    torch.manual_seed(0)

    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.c_fc, self.c_proj = nn.Linear(WIDTH, 4 * WIDTH), nn.Linear(4 * WIDTH, WIDTH)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x + self.c_proj(nn.functional.gelu(self.c_fc(x)))

    return ps.from_torch(nn.Sequential(Block(), Block()), (torch.randn(4, WIDTH),))


@pytest.fixture(scope="module")
def bundles(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    """Return the bundle of each plan, compiled when it is asked for."""
    folder = tmp_path_factory.mktemp("bundles")

    class Bundles(dict[str, Path]):
        def __missing__(self, name: str) -> Path:
            training = ps.Training("mse", ps.AdamW(lr=1e-2), 4)
            plan = ps.plan(model(), ps.Cluster.local(4), training, **PLANS[name])
            self[name] = ps.compile(plan, folder / name.replace(" ", "").replace(",", "-"), backend="numpy")
            return self[name]

    return Bundles()


# ------------------------------------------------------------------------------------------------ fewer ranks


@pytest.mark.parametrize(
    ("name", "left", "words"),
    [
        ("level 1", TWO, "2 stages on cpu:0 cpu:1, schedule 2bw with 4 microbatches"),
        ("level 1", ("cpu:0", "cpu:3"), "2 stages on cpu:0 cpu:3, "),
        ("level 1", THREE, "2 stages on cpu:0+cpu:1 cpu:2, "),
        ("level 2", ("cpu:1", "cpu:3"), "1 stage on cpu:1+cpu:3, schedule 1f1b with 4 microbatches"),
        ("level 3", THREE, "with 4 microbatches, level 1 of zero as shares are unequal"),
        ("level 1, tp=2", TWO, "1 stage on cpu:0+cpu:1, "),
        ("level 1, tp=2", THREE, "3 stages on cpu:0 cpu:1 cpu:2, "),
    ],
)
def test_what_is_planned_for_the_ranks_that_are_left(
    name: str, left: tuple[str, ...], words: str, bundles: dict[str, Path], tmp_path: Path
) -> None:
    assert words in replan(open_bundle(bundles[name]), left, tmp_path / "out")
    after = open_bundle(tmp_path / "out")
    assert [rank.device for rank in after.manifest.ranks] == list(left)
    if name == "level 1, tp=2" and left == TWO:
        # Tensors stay split: a team takes the place of a device.
        assert [mesh.axes for mesh in after.module.meshes] == [(("dp", 1), ("tp", 2))]


@pytest.mark.slow
@pytest.mark.parametrize("left", [THREE, TWO, ("cpu:2",)], ids=lambda left: str(len(left)))
@pytest.mark.parametrize("name", PLANS)
def test_a_run_goes_on_with_fewer_ranks_from_the_same_checkpoint(
    name: str, left: tuple[str, ...], bundles: dict[str, Path], tmp_path: Path
) -> None:
    whole = run_bundle(bundles[name], steps=12, progress=False).losses
    begun = run_bundle(bundles[name], steps=6, checkpoint=tmp_path / "ckpt", progress=False).losses
    assert begun == whole[:6]
    replan(open_bundle(bundles[name]), left, tmp_path / "out")
    ended = run_bundle(tmp_path / "out", steps=6, resume=tmp_path / "ckpt", progress=False).losses
    assert ended == pytest.approx(whole[6:], rel=1e-5)
    # The control: from the beginning these are other losses.
    assert run_bundle(tmp_path / "out", steps=6, progress=False).losses != pytest.approx(whole[6:], rel=1e-2)


# ------------------------------------------------------------------------------------------------ random kills


@dataclass
class RandomKills:
    """Kills of a random rank, at a random moment after each of these steps."""

    monkeypatch: pytest.MonkeyPatch
    chance: random.Random
    at: list[int]
    started: set[int] = field(default_factory=set)
    killed: list[int] = field(default_factory=list)

    def __post_init__(self) -> None:
        original = Job.steps_from_data

        def steps(job: Job, count: int) -> Iterator[Any]:
            pids = job.workers.process_ids()
            self.started |= set(pids)
            for step in original(job, count):
                if step.step in self.at:
                    self.at.remove(step.step)
                    threading.Timer(self.chance.uniform(0, 0.02), self.kill, (self.chance.choice(pids),)).start()
                yield step

        self.monkeypatch.setattr(Job, "steps_from_data", steps)

    def remaining(self) -> list[int]:
        """List the workers that are still there; another process may have the number of one that is not."""
        found = []
        for pid in self.started:
            with contextlib.suppress(OSError):
                if Path(f"/proc/{pid}/comm").read_text().startswith("penstock:"):
                    found.append(pid)
        return found

    def kill(self, victim: int) -> None:
        os.kill(victim, signal.SIGKILL)
        self.killed.append(victim)


@pytest.mark.slow
@pytest.mark.parametrize("name", PLANS)
def test_random_kills_lose_no_more_than_the_checkpoints_allow(
    name: str,
    bundles: dict[str, Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capfd: pytest.CaptureFixture[str],
) -> None:
    """Four kills of each of five plans. Steps are not told twice, and losses are those of an undisturbed run."""
    expected = run_bundle(bundles[name], steps=STEPS, progress=False).losses
    chance = random.Random(name)
    # Far enough from each other, and from the end, for each to meet a run under way.
    kills = RandomKills(monkeypatch, chance, [chance.randrange(first, first + 10) for first in (1, 21, 41, 61)])
    after = run_bundle(
        bundles[name],
        steps=STEPS,
        timeout=60,
        progress=False,
        checkpoint=tmp_path / "ckpt",
        checkpoint_every=EVERY,
        checkpoint_wait=True,
        metrics=tmp_path / "m.jsonl",
        max_restarts=4,
    )
    assert after.losses == expected
    assert after.restarts == len(kills.killed) == 4
    records = [json.loads(line) for line in (tmp_path / "m.jsonl").read_text().splitlines()]
    assert [record["step"] for record in records] == list(range(STEPS))
    assert [record["loss"] for record in records] == expected
    said = capfd.readouterr().err
    lost = re.findall(r"last finished step (\d+)(?:, newest checkpoint \S+/step-(\d+))?", said)
    resumed = re.findall(r"restart \d of 4, from (?:checkpoint \S+/step-(\d+)|where)", said)
    assert [saved for _, saved in lost] == resumed
    assert len(resumed) == 4
    # Steps are numbered from 0; a checkpoint is named after the number of steps that it has.
    assert all(0 <= int(step) + 1 - int(saved or 0) <= EVERY for step, saved in lost), said
    deadline = time.monotonic() + 15
    while kills.remaining() and time.monotonic() < deadline:
        time.sleep(0.05)
    assert not kills.remaining()
