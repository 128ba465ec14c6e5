"""Plans for a GPU and a processor on two hosts: against every cut there is, by simulation, and the words on what the processor is good for."""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import replace
from itertools import combinations, pairwise, product

import pytest

from penstock.ir.cluster.cluster import Cluster, Device, Link
from penstock.ir.cluster.gpus import CONTEXT, WORKSPACES, usual_settings
from penstock.passes.planner import refine as refining
from penstock.passes.planner.argue import plan_chain
from penstock.passes.planner.chain import Amount, Chain, Layer, PhaseWork
from penstock.passes.planner.fleet import fleet_of
from penstock.passes.planner.mixed import helping
from penstock.passes.planner.plan import PipelinePlan, PlanRequest, StagePlan
from penstock.passes.planner.planner import Planner

BATCH, SIZES = 8, (1, 2)
SCHEDULES = ("1f1b", "gpipe", "2bw")


def layer(name: str, weights: int, flops: int, out: int, saved: int) -> Layer:
    """A layer by its numbers of weights, of operations of a sample, and of elements that it hands on and saves; float32 and adam."""
    moved = Amount(4 * weights, 4 * (out + saved))
    return Layer(
        name,
        4 * weights,
        4 * weights,
        8 * weights,
        saved=Amount(0, 4 * saved),
        out=Amount(0, 4 * out),
        back=Amount(0, 4 * out),
        forward=PhaseWork(Amount(0, flops), moved),
        backward=PhaseWork(Amount(0, 2 * flops), Amount(2 * moved.fixed, 2 * moved.each)),
        weight=PhaseWork(Amount(0, flops), moved),
    )


def decoder(tokens: int, width: int, blocks: int, words: int) -> Chain:
    """A table of words, equal blocks, and a head (a GPT), or as many words as there are classes (a BERT)."""
    inner = 12 * width * width
    body = [
        layer(f"block{i}", inner, 2 * tokens * inner + 4 * tokens**2 * width, tokens * width, 16 * tokens * width)
        for i in range(blocks)
    ]
    table = layer("table", 30000 * width, tokens * width, tokens * width, tokens)
    head = layer("head", words * width, 2 * tokens * words * width, 1, tokens * words)
    return Chain((table, *body, head), entry=Amount(0, 8 * tokens))


def convolutional() -> Chain:
    """Sixteen blocks in four groups, whose images get smaller and whose weights get more (a ResNet-50)."""
    made = [layer("stem", 9408, 236_000_000, 64 * 56 * 56, 4 * 64 * 56 * 56)]
    for group, (blocks, width, side) in enumerate(((3, 256, 56), (4, 512, 28), (6, 1024, 14), (3, 2048, 7))):
        weights, elements = 17 * width * width // 16, width * side * side
        made += [
            layer(f"group{group}.{i}", weights, 2 * weights * side * side, elements, 3 * elements)
            for i in range(blocks)
        ]
    return Chain((*made, layer("head", 2048 * 1000, 2 * 2048 * 1000, 1, 2048)), entry=Amount(0, 4 * 3 * 224 * 224))


# Each with the bytes that all of it does not fit into, besides what CUDA takes.
MODELS = {
    "gpt": (decoder(512, 768, 12, 30000), 1200 << 20),
    "bert": (decoder(128, 768, 12, 2), 1500 << 20),
    "resnet": (convolutional(), 400 << 20),
}


def clusters(tight: int) -> Iterator[tuple[str, Cluster]]:
    """Yield a GPU with plenty of memory or little, and a processor, at 1, 10 and 100 Gbit/s."""
    for gbit, (name, room) in product((1, 10, 100), (("ample", 80 << 30), ("tight", tight + CONTEXT + WORKSPACES))):
        usual = usual_settings("sm_90")
        gpu = Device("gpu:0", "cuda", "a", "sm_90", spaces=(("hbm", room),), **usual)  # type: ignore[arg-type]
        cpu = Device("cpu:0", host="b", threads=16, flops=8e11, bandwidth=1e11, spaces=(("ram", 64 << 30),))
        yield f"{gbit} Gbit/s, {name}", Cluster((gpu, cpu), (Link("gpu:0", "cpu:0", gbit * 1.25e8, 1e-4),))


def cuts_of(layers: int, schedule: str) -> Iterator[PipelinePlan]:
    """Yield each device alone, and both in both orders with every cut, for each size of microbatches."""
    for size, order in product(SIZES, ((0,), (1,), (0, 1), (1, 0))):
        for cuts in combinations(range(1, layers), len(order) - 1):
            ends, count = pairwise((0, *cuts, layers)), BATCH // size
            stages = (StagePlan(a, b, (d,), (count,)) for (a, b), d in zip(ends, order, strict=True))
            yield PipelinePlan(schedule, size, count, tuple(stages))


def request(schedule: str) -> PlanRequest:
    return PlanRequest(BATCH, (schedule,), "none", SIZES)


@pytest.mark.parametrize("model", MODELS)
def test_a_mixed_plan_is_within_a_tenth_of_the_best_of_all_cuts(model: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a planner that takes the GPU for no faster than the processor is far off. Where memory is ample the GPU alone is best, and else
    both are."""
    monkeypatch.setattr(refining, "MOST_SIMULATED", 10**9)
    chain, tight = MODELS[model]
    for (name, cluster), schedule in product(clusters(tight), SCHEDULES):
        planner = Planner(chain, fleet_of(cluster), request(schedule))
        judge_of, outcome = refining.SimulatedSteps(planner, cluster), planner.best(schedule)
        best = min(cuts_of(len(chain.layers), schedule), key=judge_of.step)
        assert outcome is not None
        near = refining.refine(planner, cluster, outcome, range(2))
        assert near is not None
        assert near.step <= judge_of.step(best) * 1.1, (name, schedule)
        assert len(best.stages) == (1 if "ample" in name else 2), (name, schedule)
        if name == "100 Gbit/s, ample":
            gpu, cpu = planner.fleet.devices
            slow = planner.fleet.but([replace(gpu, flops=cpu.flops, bandwidth=cpu.bandwidth), cpu])
            wrong = Planner(chain, slow, request(schedule)).best(schedule)
            assert wrong is not None
            assert judge_of.step(wrong.plan) > judge_of.step(best) * 1.1


@pytest.mark.parametrize("model", MODELS)
def test_the_plan_says_why_the_processor_helps_or_does_not(model: str) -> None:
    """Where it does not, the figures explain it: what its layers take more there, and messages, are what the batch takes longer."""
    chain, tight = MODELS[model]
    for name, cluster in clusters(tight):
        result = plan_chain(chain, cluster, request("1f1b"))
        helps = dict(helping(result.planner, result.best))
        if "tight" in name:
            assert helps == {"cpu:0": "without it no plan fits into the memory of the others"}
            assert not result.left_out
            continue
        assert not helps
        reason = result.left_out["cpu:0"]
        longer = re.fullmatch(
            r"a batch would take (\S+) ms with it instead of (\S+) ms: its layers would take (\S+) ms of a batch there and (\S+) ms on gpu:0, "
            r"their messages (\S+) ms",
            reason,
        )
        assert longer is not None, reason
        with_it, without, there, here, messages = map(float, longer.groups())
        assert there > here
        assert with_it - without <= (there - here + messages) * 1.05, reason


def test_of_equal_kinds_nothing_more_is_said() -> None:
    """The control: two processors are left out and used without these words."""
    devices = (Device("cpu:0", flops=1e12), Device("cpu:1", flops=1e9))
    result = plan_chain(MODELS["bert"][0], Cluster(devices, (Link("cpu:0", "cpu:1", 1e6, 1e-3),)), request("1f1b"))
    assert not dict(helping(result.planner, result.best))
    assert ":" not in result.left_out["cpu:1"]
