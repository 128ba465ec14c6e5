"""The laws of programs for packs of every shape: the verifier follows each, and the plain interpreter's losses are those
of one stage on a device.

Up to six devices with up to four stages each and up to twelve microbatches a batch, under every schedule of packs. The
control: all others are refused, and the error says why.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
from tests.oracles.drawn_chains import chain_model

from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.ir.interpreter.schedules import run_schedule
from penstock.ir.verify.verifier import verify
from penstock.passes.manager import run_passes
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.passes.schedules.schedule import PACK_SCHEDULES
from penstock.support.errors import UsageError, VerifyError

DEVICES, STAGES, MICROBATCHES, LAYERS = range(1, 7), range(2, 5), range(1, 13), 24
# With shapes that are always run: each of one, equal and unequal groups, and more than one group.
FEW = (1, 2, 3, 4, 5, 8)
SHAPES = [(d, v) for d in DEVICES for v in STAGES]
# A shape that is always run, with FEW microbatches; all of them take ten minutes.
SMALL = (2, 3)


def planned(kind: str, d: int, v: int, m: int) -> Module:
    widths = [4] * (LAYERS + 1)
    every = LAYERS // (d * v)
    cuts = tuple(f"layer{every * i}" for i in range(1, d * v))
    module = chain_model(widths, [], False).but(cluster=Cluster.local(d))
    options = PipelineOptions(schedule=kind, microbatches=m, packs=v, recompute="none")
    return run_passes(module, training_pipeline({"kind": "sgd", "lr": 0.1}, {"split_at": cuts}, options), PASSES)


def losses(module: Module, m: int) -> list[float]:
    draw = np.random.default_rng(3)
    weights = {
        name: draw.standard_normal(var.type.dims).astype("f4")
        for name, var in module.vars.items()
        if var.role == "param"
    }
    batches = [
        {v.name: draw.standard_normal((4 * m, *v.type.dims[1:])).astype("f4") for v in module.data_inputs}
        for _ in range(3)
    ]
    return run_schedule(module, weights, batches).losses


@cache
def expected(delay: int, m: int) -> list[float]:
    """The losses of one stage for each of two devices, under a schedule of the same delay."""
    kind = "2bw" if delay else "1f1b"
    return losses(planned(kind, 2 if delay else 1, 1, m), m)


def planned_or_refused(kind: str, d: int, v: int, m: int) -> Module | str:
    try:
        return planned(kind, d, v, m)
    except (UsageError, VerifyError) as error:
        return str(error)


def test_control_an_update_that_is_late_gives_other_losses() -> None:
    assert all(expected(0, m) != expected(1, m) for m in (2, 5))


@pytest.mark.parametrize("kind", PACK_SCHEDULES)
@pytest.mark.parametrize(
    ("d", "v", "counts"),
    [(*SMALL, FEW), *(pytest.param(*shape, MICROBATCHES, marks=pytest.mark.slow) for shape in SHAPES)],
    ids=str,
)
def test_a_legal_program_computes_what_one_stage_on_a_device_does(
    kind: str, d: int, v: int, counts: Sequence[int]
) -> None:
    row = PACK_SCHEDULES[kind]
    for m in counts:
        module = planned_or_refused(kind, d, v, m)
        assert isinstance(module, Module) == LEGAL[kind](d, v, m), (m, module)
        if isinstance(module, str):
            assert any(words in module for words in REFUSED[kind]), module
            continue
        verify(module)
        assert losses(module, m) == expected(row.delay, m), m


def deals(d: int, m: int) -> bool:
    """Say whether microbatches make equal groups of about as many as there are devices."""
    return m % max(1, m // d) == 0


LEGAL = {
    "interleaved": lambda d, v, m: deals(d, m),
    "zb-v": lambda d, v, m: v == 2,
    "interleaved-2bw": lambda d, v, m: deals(d, m) and m >= 2 * d - 2,
    "wrap": lambda d, v, m: True,
    "wrap-2bw": lambda d, v, m: m >= 2 * d - 2,
}
GROUPS, VERSIONS, WAIT = "equal groups", "this would need 3 live versions", "would wait for ever"
REFUSED = {
    "interleaved": (GROUPS,),
    "zb-v": ("two stages",),
    "interleaved-2bw": (GROUPS, VERSIONS, WAIT),
    "wrap": (),
    "wrap-2bw": (VERSIONS, WAIT),
}
