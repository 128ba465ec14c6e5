"""Tests of stages whose graphs have collectives, in two processes: what they give is what the interpreter says for the
ranks in lockstep, by the interpreter's back end to the bit, compiled within rounding."""

from __future__ import annotations

import numpy as np
import pytest
from tests.oracles.sharding.local_modules import local_mlp

from penstock.backends.interface import CompileOptions
from penstock.backends.numpy_backend import SlotStore
from penstock.backends.registry import backend_of
from penstock.ir.collective_calls import calls_of
from penstock.ir.graph import Slot, signature
from penstock.ir.interpreter.graphs import run_team
from penstock.ir.text import parse_module, print_module

from . import members
from .test_collectives import meet  # noqa: F401

RANKS = 2


def lockstep(module):
    """The values of each rank, and its variables, after F and B of one microbatch."""
    values, slots = zip(*(members.stage_inputs(module, rank) for rank in range(RANKS)), strict=True)
    values = list(values)
    for kind in ("F", "B"):
        graph = module.stage_graph(0, kind)
        called = signature(graph)
        stores = [SlotStore({Slot(s.var, s.slot): slots[r][s.var] for s in called.slots}) for r in range(RANKS)]
        ins = [{v.name: values[rank][v.name] for v in called.ins} for rank in range(RANKS)]
        results = run_team(graph, ins, module.mesh_of(0), stores)
        for rank in range(RANKS):
            stores[rank].finish()
            values[rank] |= {v.name: x for v, x in zip(called.results, results[rank], strict=True)}
    return [values[rank] | {f"@{name}": x for name, x in slots[rank].items()} for rank in range(RANKS)]


@pytest.mark.parametrize(("backend", "tolerance"), [("numpy", 0.0), ("tvm", 2e-5)])
def test_ranks_together_give_what_the_interpreter_says(backend, tolerance, meet, tmp_path):  # noqa: F811
    module = local_mlp("gpipe", 1, 1, RANKS, microbatches=1).local
    (tmp_path / "local.ir").write_text(print_module(module))
    module = parse_module((tmp_path / "local.ir").read_text(), "local.ir")
    assert sum(len(calls_of(module.stage_graph(0, kind))) for kind in ("F", "B")) >= 4
    names = backend_of(backend).compile_stages(module, [0], tmp_path, CompileOptions(jobs=1))[0]
    files = [str(tmp_path / name) for name in names]
    codes, said, _ = meet("stage", RANKS, str(tmp_path / "local.ir"), backend, files, str(tmp_path), seconds=120)
    assert codes == [0] * RANKS, said
    expected = lockstep(module)
    for rank in range(RANKS):
        with np.load(tmp_path / f"{backend}{rank}.npz") as kept:
            found = {name.replace("|", "/"): kept[name] for name in kept.files}
        assert found.keys() == expected[rank].keys()
        for name, array in expected[rank].items():
            np.testing.assert_allclose(found[name], array, rtol=tolerance, atol=tolerance, err_msg=name)


def test_a_sum_that_is_left_out_is_seen():
    """The control: without one all_reduce the values differ by far more than rounding."""
    module = local_mlp("gpipe", 1, 1, RANKS, microbatches=1).local
    graph = module.stage_graph(0, "F")
    call = calls_of(graph)[0]
    swapped = [op.with_attrs(by="max") if op is call.op else op for op in graph.ops]
    other = module.with_graph(type(graph)(graph.name, graph.ins, graph.outs, tuple(swapped), graph.saved))
    right, wrong = lockstep(module)[0], lockstep(other)[0]
    assert any(not np.allclose(right[name], wrong[name], rtol=1e-3, atol=1e-3) for name in right)
