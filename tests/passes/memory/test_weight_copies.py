"""Weights in 16 bits that updates write: the same numbers as weights that are rounded in every microbatch, in the interpreter and in compiled stages,
from checkpoints too; how often a step rounds them; and programs that the verifier refuses."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from pathlib import Path

import numpy as np
import pytest
from safetensors.numpy import load_file
from tests.oracles.drawn_chains import chain_model
from tests.passes.memory.test_offload import same, trained

from penstock.backends.bundle.writer import write_bundle
from penstock.backends.registry import backend_of
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.ir.memory.predict import measure_memory
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import verify
from penstock.passes.manager import parse_pipeline, run_passes
from penstock.passes.memory.weight_copies import WeightCopiesOptions, weight_copies
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.runtime.checkpoint.finding import find_checkpoint
from penstock.runtime.job.job import Job
from penstock.support.errors import UsageError, VerifyError

M, WIDTHS, CUTS = 4, [4, *[6] * 3, 4], ("layer2",)
CASES = {
    "1f1b": {},
    "2bw": {"schedule": "2bw"},
    "zb-1f1b": {"schedule": "zb-1f1b"},
    "made again": {"recompute": "all"},
    "f16": {"precision": "f16"},
    "replicas": {"zero": 1, "mesh": "dp=2"},
    "split": {"mesh": "tp=2"},
    "elsewhere": {"schedule": "2bw", "update_on": ("cpu:2",)},
}
# Devices of stages, where there are others than one each.
PAIRS = ("cpu:0 cpu:1", "cpu:2 cpu:3")
PLACES = {"replicas": PAIRS, "split": PAIRS, "elsewhere": ("cpu:0", "cpu:1")}


@cache
def planned(case: str, copied: bool = False, devices: str = "") -> Module:
    options = PipelineOptions(**{"microbatches": M, "precision": "bf16", **CASES[case]})
    cluster = Cluster.listed(devices) if devices else Cluster.local(4 if case in PLACES else 2)
    partition = {"split_at": CUTS, **({"devices": PLACES[case]} if case in PLACES else {})}
    calls = training_pipeline(
        {"kind": "adamw", "lr": 0.1}, partition, replace(options, library="torch" if devices else "")
    )
    if copied:
        at = [call.name for call in calls].index("fuse")
        calls[at:at] = parse_pipeline("weight-copies{devices=all}", PASSES)
    return run_passes(chain_model(WIDTHS, [], rows=2).but(cluster=cluster), calls, PASSES)


def roundings(module: Module) -> Counter[str]:
    """Count how often a batch rounds each parameter or what an update makes of it, over all stages."""
    assert module.schedule is not None
    times: Counter[str] = Counter()
    for program in module.schedule.ranks.values():
        for action in program.batch:
            graph = module.stage_graph(action.stage, action.kind)
            for op in graph.ops if graph is not None else ():
                makers = graph.producers()
                of = makers.get(op.ins[0]) if op.kind == "cast" and op.outs[0].type.dtype in ("bf16", "f16") else None
                new = {w.ins[0]: w.var for w in graph.ops if w.kind == "write" and module.vars[w.var].role == "param"}
                if of is not None and (of.kind == "read" or op.ins[0] in new):
                    times[of.var if of.kind == "read" else new[op.ins[0]]] += 1
    return times


@pytest.mark.parametrize("case", CASES)
def test_numbers_are_the_same_bit_for_bit(case: str) -> None:
    module, former = planned(case, copied=True), planned(case)
    verify(module)
    assert parse_module(print_module(module)) == module
    here, there = trained(module), trained(former)
    assert here.losses == there.losses
    assert all(np.array_equal(array, here.variables[name]) for name, array in there.variables.items())
    assert not same(here, trained(planned("f16" if case != "f16" else "1f1b")))
    # Rounded once a step, where forward and backward of every microbatch did so; what comes from elsewhere, on coming.
    assert set(roundings(module).values()) == ({2 if case in PLACES else 1} if case != "elsewhere" else set())
    assert min(roundings(former).values()) >= M


def test_stages_on_gpus_have_copies_where_there_is_memory() -> None:
    module = planned("2bw", devices="sm_90,cpu")
    assert {var.source: (str(var.type), var.stage, var.versions) for var in module.vars.values() if var.source} == {
        "w0": ("bf16[4,6]", 0, 2),
        "w1": ("bf16[6,6]", 0, 2),
    }
    # Two versions of 2 bytes take the place of one of 4.
    assert [module.vars[name].versions for name in ("w0", "w1", "w2", "w3")] == [1, 1, 2, 2]
    assert measure_memory(module)[0].weights == measure_memory(planned("2bw"))[0].weights
    assert any("no memory" not in n.text for n in module.notes if n.origin == "weight-copies")
    plain = planned("1f1b")
    need = {rank: memory.peak for rank, memory in measure_memory(plain).items()}
    assert plain.cluster is not None
    assert plain.schedule is not None
    undropped = plain.schedule.rewrite(lambda action: () if action.kind == "D" else (action,))
    for spare, copied in ((0, False), (10_000, True)):
        sized = [replace(d, spaces=(("ram", need[rank] + spare),)) for rank, d in enumerate(plain.cluster.devices)]
        limited = plain.but(cluster=replace(plain.cluster, devices=tuple(sized)), schedule=undropped)
        tried = weight_copies(limited, WeightCopiesOptions("all"))
        assert any(var.role == "copy" for var in tried.vars.values()) == copied
        assert any("no memory for" in n.text for n in tried.notes) != copied
    with pytest.raises(UsageError, match="unknown devices 'tpu'"):
        weight_copies(module, WeightCopiesOptions("tpu"))


@pytest.mark.parametrize(
    ("old", "new", "said"),
    [
        (
            "cast(%{new}, dtype=bf16",
            "cast(%{old}, dtype=bf16",
            "otherwise than @w0; expected the cast of the same value",
        ),
        ("cast(%{new}, dtype=bf16", "cast(%{other}, dtype=bf16", "otherwise than @w0; expected"),
        ("copy from @w0 as bf16", "copy from @w1 as bf16", "is a copy bf16"),
    ],
)
def test_copies_that_are_not_those_of_their_parameter_are_refused(old: str, new: str, said: str) -> None:
    module = planned("1f1b", copied=True)
    update = module.stage_graph(0, "U")
    (made,) = (op.ins[0].name for op in update.ops if op.kind == "write" and op.var == "w0")
    (read,) = (op.outs[0].name for op in update.ops if op.kind == "read" and op.var == "w0")
    (other,) = (op.outs[1].name for op in update.ops if op.kind == "adamw" and op.outs[0].name == made)
    names = {"new": made, "old": read, "other": other}
    text = "".join(line.split(" ; ")[0] + "\n" for line in print_module(module).splitlines())
    assert old.format(**names) in text
    with pytest.raises(VerifyError, match=said):
        verify(parse_module(text.replace(old.format(**names), new.format(**names))))


def bundle(module: Module, folder: Path, backend: str):
    weights = {
        name: np.random.default_rng(int(name[1:])).standard_normal(var.type.dims).astype(np.float32)
        for name, var in module.vars.items()
        if var.role == "param"
    }
    place = folder / "built"
    place.mkdir(parents=True)
    names = {} if backend == "numpy" else backend_of(backend).compile_stages(module, (0, 1), place)
    files = {stage: [place / name for name in built] for stage, built in names.items()}
    return write_bundle(folder / "bundle", module, files, weights, backend=backend)


@pytest.mark.parametrize("backend", ["tvm", pytest.param("numpy", marks=pytest.mark.slow)])
def test_a_run_from_a_checkpoint_reads_what_the_run_before_it_read(backend: str, tmp_path: Path) -> None:
    """Under 2bw, whose checkpoints hold the version before the newest: that of a parameter of which the copy alone has versions is the copy's."""
    draw = np.random.default_rng(5)
    batches = [{n: draw.standard_normal((2 * M, 4)).astype(np.float32) for n in ("x", "labels")} for _ in range(6)]
    results = []
    for copied in (False, True):
        made = bundle(planned("2bw", copied), tmp_path / str(copied), backend)
        stored = load_file(made.weights_file(0))
        assert set(stored) == {"w0", "w1"}
        with Job(made, timeout=60) as job:
            whole = [job.step(batch) for batch in batches[:3]]
            job.save(tmp_path / f"save{copied}")
            whole += [job.step(batch) for batch in batches[3:]]
            after = job.parameters()
        place = find_checkpoint(tmp_path / f"save{copied}")
        with Job(made, timeout=60, resume=place) as job:
            again = [job.step(batch) for batch in batches[3:]]
            assert all(np.array_equal(array, after[name]) for name, array in job.parameters().items())
        assert again == whole[3:]
        older = load_file(place / "rank0.older.safetensors")
        assert {name: str(array.dtype) for name, array in older.items()} == {"w0": "float32", "w1": "float32"}
        results.append((whole, after, older))
    (one, before, full), (other, since, rounded) = results
    assert one == other
    assert all(np.array_equal(array, since[name]) for name, array in before.items())
    # The control: the saved version is rounded, and differs from the newest.
    assert all(not np.array_equal(full[name], rounded[name]) for name in full)
    assert all(np.allclose(full[name], rounded[name], rtol=2**-8) for name in full)
    assert all(not np.allclose(rounded[name], since[name], rtol=2**-8) for name in full)
