"""The blocks that a compiled graph takes, and when they come and go, against TVM's own planner, for the kernels and in
the order of the back end."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

import penstock as ps
from penstock.ir.graph import Graph, Module
from penstock.ir.memory.workspace import planned_blocks, planned_changes
from penstock.ir.ops import EXCHANGES
from penstock.models import write_cnn, write_gpt

CLIPPED = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3), microbatches=4, clip=0.5)


@pytest.fixture(scope="module", params=["gpt", "cnn"])
def module(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Module:
    path = tmp_path_factory.mktemp("model") / "m.onnx"
    if request.param == "gpt":
        write_gpt(path, layers=2, width=32, heads=4, vocab=50, positions=16, batch=2)
    else:
        write_cnn(path, channels=(1, 4, 8), classes=5, size=12, batch=2)
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3), microbatches=2)
    return ps.plan(ps.from_onnx(path), ps.Cluster.local(2), training).module


@pytest.fixture(scope="module")
def split(tmp_path_factory: pytest.TempPathFactory) -> Module:
    """A model whose ranks meet in every block, where what one sends is in memory until the others have it."""
    path = tmp_path_factory.mktemp("model") / "m.onnx"
    model = ps.from_onnx(write_gpt(path, layers=3, width=16, heads=2, vocab=24, positions=8, batch=2))
    return ps.plan(model, ps.Cluster.local(8), CLIPPED, mesh="tp=2", shard=("preset:megatron",)).module


def compiled(graph: Graph) -> list[tuple[int, Any]]:
    """List the bindings of the function that TVM makes of a graph: hashes of variables, and what they are bound to."""
    import tvm
    from tvm import relax

    from penstock.backends.tvm.lower.lower import plan_kernels, relax_module
    from penstock.backends.tvm.target import machine_of

    lowered = plan_kernels(graph, machine_of("x86-64-v3"))
    # Kernels of one name count as one: here names do not tell shapes apart.
    steps = tuple(replace(step, name=f"{step.name}_{i}") for i, step in enumerate(lowered.steps))
    with tvm.target.Target("llvm"):
        module = relax.get_pipeline("default_build")(relax_module([replace(lowered, steps=steps)], declared=True))
    (function,) = (f for f in module.functions.values() if isinstance(f, relax.Function))
    return [(hash(bound.var), bound.value) for block in function.body.blocks for bound in block.bindings]


def called(value: Any) -> str:
    return str(getattr(getattr(value, "op", None), "name", "")).rpartition(".")[2]


def by_tvm(graph: Graph) -> list[int]:
    """Bytes of all blocks that the compiled function allocates, results included."""
    return sorted(int(value.args[0].values[0]) for _, value in compiled(graph) if called(value) == "alloc_storage")


def most_by_tvm(graph: Graph) -> Counter[int]:
    """The most blocks of each size at once, as the compiled function takes them and lets go of them. Names hold blocks
    until they are killed. A tuple, which nobody kills, holds those of its members."""
    sizes, holds, most = dict[int, int](), dict[int, set[int]](), Counter[int]()
    for name, value in compiled(graph):
        if called(value) == "alloc_storage":
            sizes[name], holds[name] = int(value.args[0].values[0]), {name}
            most |= Counter(sizes[block] for block in set[int]().union(*holds.values()))
        elif called(value) == "alloc_tensor":
            holds[name] = set(holds[hash(value.args[0])])
        elif called(value) == "kill_object":
            del holds[hash(value.args[0])]
        elif hasattr(value, "fields"):
            holds[name] = set[int]().union(*(holds.get(hash(f), set()) for f in value.fields))
    return most


def most_of_ours(graph: Graph) -> Counter[int]:
    now, most = Counter[int](), Counter[int]()
    for change in planned_changes(graph):
        now[abs(change.bytes)] += 1 if change.bytes > 0 else -1
        most |= now
    return most


def ours(graph: Graph) -> list[int]:
    return sorted([*planned_blocks(graph), *(v.type.nbytes for v in graph.results)])


def test_blocks_are_those_of_tvm(module: Module) -> None:
    for graph in module.graphs.values():
        assert ours(graph) == by_tvm(graph)


def test_blocks_go_when_those_of_tvm_go(module: Module, tmp_path: Path) -> None:
    """Also where forwards are done again, and where weight gradients are apart."""
    graphs = [*module.graphs.values()]
    model = ps.from_onnx(write_cnn(tmp_path / "m.onnx", channels=(1, 4, 8, 8), classes=5, size=12, batch=2))
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3), microbatches=2)
    for settings in ({"recompute": "all"}, {"schedule": "zb-1f1b"}):
        graphs += ps.plan(model, ps.Cluster.local(2), training, **settings).module.graphs.values()
    for graph in graphs:
        assert most_of_ours(graph) == most_by_tvm(graph)


def test_other_kernels_have_other_blocks(module: Module) -> None:
    """Control: with a kernel for every operation there is more to store, and the comparison tells."""
    graph = module.graphs["s0.B"]
    apart = replace(graph, ops=tuple(op.with_attrs(kernel=None) for op in graph.ops))
    assert sum(ours(apart)) > sum(by_tvm(graph))


def test_what_a_collective_sends_is_used_again_once_it_is_waited_for(split: Module) -> None:
    meeting = [graph for graph in split.graphs.values() if any(op.kind in EXCHANGES for op in graph.ops)]
    assert meeting
    for graph in split.graphs.values():
        assert ours(graph) == by_tvm(graph)
        assert most_of_ours(graph) == most_by_tvm(graph)
    # Control: were all blocks held until the call ends, results would have more of their own.
    forward = split.graphs["s0.F"]
    assert most_by_tvm(forward) < Counter(ours(forward))


@pytest.mark.parametrize("level", [1, 2])
def test_only_the_copy_of_a_counter_that_changes_too_early_is_not_counted(level: int, tmp_path: Path) -> None:
    """Under zero an update changes `step` before it last needs it. Without that limit all blocks are those of TVM."""
    path = write_gpt(tmp_path / "m.onnx", layers=2, width=16, heads=2, vocab=24, positions=8, batch=2)
    module = ps.plan(ps.from_onnx(path), ps.Cluster.local(4), CLIPPED, replicas=2, zero=level).module
    for name, graph in module.graphs.items():
        more = [8] if name.endswith(".U") else []
        assert sorted([*ours(graph), *more]) == by_tvm(graph), name
        assert most_of_ours(graph) + Counter(more) == most_by_tvm(graph), name
