"""Plans for one GPU and one host with a CPU, over networks of 1 to 100 Gbit/s: near the best of all cuts, with reasons.

The judge tries every contiguous cut on both orders of the devices, and each device alone, by simulation. The control is
the cut in the middle, which ignores how unequal the devices are."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

import penstock as ps
from penstock.ir.cluster.cluster import Cluster, Device, Link
from penstock.ir.cluster.gpus import usual_settings
from penstock.planning.explain import plan_lines

# Much work for each byte between layers.
LAYERS, WIDTH, HIDDEN, SAMPLES, MICROBATCHES = 4, 64, 16384, 2048, 8
WEAK, MIDDLE, STRONG = 4e11, 2e13, 5e13
TRAINING = ps.Training("output:output", ps.SGD(0.1), microbatches=MICROBATCHES)


class Network(torch.nn.Module):
    """Equal blocks, and a loss."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = torch.nn.ModuleList(
            torch.nn.Sequential(torch.nn.Linear(WIDTH, HIDDEN), torch.nn.ReLU(), torch.nn.Linear(HIDDEN, WIDTH))
            for _ in range(LAYERS)
        )

    def forward(self, x: torch.Tensor, wanted: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = layer(x)
        return torch.nn.functional.mse_loss(x, wanted)


@pytest.fixture(scope="module")
def model() -> ps.Model:
    return ps.from_torch(Network(), (torch.zeros(SAMPLES, WIDTH), torch.zeros(SAMPLES, WIDTH)))


def cluster_of(gigabits: float, flops: float) -> Cluster:
    """A CPU of so many operations per second, and a GPU of sm_90 at its usual rates, on two hosts."""
    cpu = Device("cpu:0", host="near", threads=16, flops=flops, bandwidth=flops / 10)
    gpu = Device("cuda:0", "cuda", host="far", target="sm_90", **usual_settings("sm_90"))  # type: ignore[arg-type]
    return Cluster((cpu, gpu), links=(Link("cpu:0", "cuda:0", gigabits * 1.25e8, 2e-5),))


def cut_at(model: ps.Model, cluster: Cluster, layer: int, devices: tuple[str, str]) -> float:
    plan = ps.plan(
        model,
        cluster,
        TRAINING,
        stages=2,
        split_at=[f"layers.{layer}.0/linear_{2 * layer}"],
        microbatches=MICROBATCHES,
        devices=[(name,) for name in devices],
    )
    return plan.predicted.step


def all_cuts(model: ps.Model, cluster: Cluster) -> Iterator[float]:
    """The seconds of a batch by every plan of one or two stages, simulated."""
    for name in ("cpu:0", "cuda:0"):
        yield ps.plan(model, cluster, TRAINING, stages=1, microbatches=MICROBATCHES, devices=[(name,)]).predicted.step
    for layer in range(1, LAYERS):
        for devices in (("cpu:0", "cuda:0"), ("cuda:0", "cpu:0")):
            yield cut_at(model, cluster, layer, devices)


@pytest.mark.parametrize(
    ("gigabits", "flops", "both"),
    [
        (1, MIDDLE, False),
        (10, MIDDLE, None),
        (100, MIDDLE, None),
        (10, STRONG, None),
        (100, STRONG, True),
        (10, WEAK, False),
    ],
)
def test_the_plan_is_near_the_best_of_all_cuts(
    gigabits: float, flops: float, both: bool | None, model: ps.Model
) -> None:
    cluster = cluster_of(gigabits, flops)
    plan = ps.plan_best(
        lambda size: model, cluster, TRAINING, batch=SAMPLES * MICROBATCHES, schedules=("1f1b",), replicas=1
    )
    best = min(all_cuts(model, cluster))
    assert plan.predicted.step <= 1.1 * best
    used = {name for stage in plan.module.stages for name in plan.module.devices_of(stage.index)}
    said = "\n".join(plan_lines(plan, True))
    if both is not None:
        assert (len(used) == 2) == both
    # What a device is for, or why it is left out, with figures.
    for name in ("cpu:0", "cuda:0"):
        if name not in used:
            assert f"left out: {name}, because a batch would take" in said
        elif len(used) > 1:
            assert f"what if: without {name}:" in said
    if gigabits == 1:
        # The control.
        assert cut_at(model, cluster, LAYERS // 2, ("cpu:0", "cuda:0")) > 1.1 * best
