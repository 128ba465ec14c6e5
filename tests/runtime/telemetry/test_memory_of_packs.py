"""The memory of ranks that run several stages: a run's account is the plan's, block by block. Controls: an edge left
out, a value that is kept too long, stages that do not share what is free, a byte less."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

import pytest
from oracles.drawn_chains import chain_model
from oracles.loopback import traced

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.ir.action_kinds import BACKWARD, WEIGHTS
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.ir.memory.account import Account, first_difference
from penstock.ir.memory.predict import measure_memory, memory_course, planned_account
from penstock.ir.memory.stage_values import StageValues
from penstock.ir.schedule import COMPUTE
from penstock.ir.verify.verifier import verify
from penstock.models import write_gpt, write_mlp
from penstock.passes.manager import run_passes
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.runtime.job.run import run_bundle
from penstock.runtime.state.store import Store
from penstock.runtime.telemetry.memory_trace import measured_account, planned_beside, read_trace
from penstock.runtime.telemetry.trace import write_trace
from penstock.support.errors import DoesNotFit

KINDS = ("interleaved", "zb-v", "interleaved-2bw")


def chain(kind: str, *, tied: bool = False, skips=(), devices: int = 2, packs: int = 2) -> Module:
    """A chain of layers of unlike widths."""
    widths = [8, 8, 8, 8, 8] if tied else [8, 16, 24, 16, 8]
    model = chain_model(widths, list(skips), tied).but(cluster=Cluster.local(devices))
    options = PipelineOptions(schedule=kind, microbatches=4, packs=packs, recompute="none", guard={"clip": 0.5})
    stages = tuple(f"layer{i}" for i in range(1, devices * packs))
    return run_passes(model, training_pipeline({"kind": "adamw", "lr": 0.1}, {"split_at": stages}, options), PASSES)


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    path = write_gpt(
        tmp_path_factory.mktemp("memory") / "gpt.onnx", layers=2, width=16, heads=2, vocab=24, positions=8, batch=2
    )
    return ps.from_onnx(path)


def planned(gpt, kind, packs=2, **options) -> Module:
    training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3), microbatches=4, clip=0.5)
    return ps.plan(gpt, Cluster.local(2), training, schedule=kind, packs=packs, **options).module


def accounts(module: Module, runs, store_kind=Store) -> list[tuple[Account, Account]]:
    """As planned and as measured, of every rank."""
    found = traced(module, runs, store_kind)
    return [
        (planned_beside(module, rank, trace), measured_account(module, rank, trace)) for rank, trace in enumerate(found)
    ]


def check(module: Module) -> list[tuple[Account, Account]]:
    assert all(len(stages) > 1 for stages in module.rank_packs())
    return compare(module)


def compare(module: Module) -> list[tuple[Account, Account]]:
    both = accounts(module, [(0, 3), (3, 2)])
    for expected, measured in both:
        assert str(first_difference(expected, measured)) == "None"
        assert expected.curve() == measured.curve()
        assert [life.uses for life in expected.lives] == [life.uses for life in measured.lives]
        assert all(life.given_at is not None for life in measured.lives if life.owner is not None)
    return both


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize(("tied", "skips"), [(False, ()), (True, ()), (False, ((0, 2), (1, 3)))])
def test_blocks_of_a_chain_are_taken_and_given_back_as_planned(kind, tied, skips):
    check(chain(kind, tied=tied, skips=skips))


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("options", [{}, {"recompute": "all"}, {"wire": "bf16"}])
def test_blocks_of_a_gpt_are_taken_and_given_back_as_planned(gpt, kind, options):
    check(planned(gpt, kind, **options))


@pytest.mark.parametrize("kind", ["zb-v", "zb-1f1b"])
def test_a_gradient_that_is_sent_and_that_w_takes_stays_until_both_are_done(tmp_path, kind):
    """Three blocks over two devices: a stage ends within one, where W takes a gradient that goes to another rank."""
    path = write_gpt(tmp_path / "gpt.onnx", layers=3, width=16, heads=2, vocab=24, positions=8, batch=2)
    module = planned(ps.from_onnx(path), kind, packs=2 if kind == "zb-v" else 1)
    sent_and_taken = {
        value
        for edge in module.edges
        if edge.phase == BACKWARD and (weights := module.stage_graph(edge.src, WEIGHTS)) is not None
        for value in {v.name for v in edge.values} & {v.name for v in weights.ins}
    }
    assert sent_and_taken
    compare(module)


def test_control_a_hand_over_that_is_left_out_is_named():
    """Stages 1 and 2 of a V are on one rank."""
    module = chain("zb-v")
    less = module.but(edges=tuple(edge for edge in module.edges if (edge.src, edge.dst, edge.phase) != (1, 2, "F")))
    measured = accounts(module, [(0, 2)])[1][1]
    assert first_difference(planned_account(module, 1, [(0, 2)]), measured) is None
    difference = first_difference(planned_account(less, 1, [(0, 2)]), measured)
    assert difference is not None
    name = next(edge.values[0].name for edge in module.edges if (edge.src, edge.dst, edge.phase) == (1, 2, "F"))
    assert f"%{name} of microbatch 0" in str(difference)


def test_control_what_the_other_stage_keeps_too_long_is_named():
    class Late(Store):
        """Keeps what it was handed of one microbatch until its last action."""

        def keep_only(self, mb, names):
            super().keep_only(mb, names | {"a1"} if mb == 3 and names else names)

    module = chain("zb-v")
    assert any("a1" in [v.name for v in edge.values] for edge in module.edges if (edge.src, edge.dst) == (1, 2))
    said = [str(first_difference(*both)) for both in accounts(module, [(0, 2)], Late)]
    assert any("%a1 of microbatch 3" in text for text in said)


def most_at_once(account: Account, module: Module, stages: tuple[int, ...], *, fed: bool) -> int:
    """The bytes of blocks, each used again for one of its size: of each size the most that there are at once. By an
    account of a run, looked through action by action, and within an action as its graph takes and gives back."""
    inputs, most = {value.name for value in module.inputs}, Counter[int]()
    values = {stage: StageValues(module, stage, stages) for stage in stages}
    for step, action in enumerate(account.actions):
        here = [
            life
            for life in account.lives
            if life.owner is not None
            and life.stage in stages
            and inputs.isdisjoint(life.names) != fed
            and life.taken_at <= step
            and (life.given_at is None or life.given_at >= step)
        ]
        called = action.kind in COMPUTE and action.stage in stages and not fed
        changes = values[action.stage].calls.get(action.computation, ()) if called else ()
        new = {life.names[0] for life in here if life.taken_at == step} & {change.result for change in changes}
        now = Counter(life.nbytes for life in here if life.names[0] not in new or life.taken_at < step)
        for nbytes, result in changes:
            if not result or result in new:
                now[abs(nbytes)] += 1 if nbytes > 0 else -1
                most |= now
        most |= Counter(life.nbytes for life in here)
    return sum(size * count for size, count in most.items())


@pytest.mark.parametrize(
    ("kind", "packs"), [("interleaved", 2), ("interleaved", 4), ("zb-v", 2), ("interleaved-2bw", 2)]
)
def test_the_peak_is_that_of_all_stages_together(kind, packs):
    """On one device nothing is sent, so the peak is that of values, inputs and temporaries alone."""
    module = chain(kind, skips=((0, 2), (1, 3)), devices=1, packs=packs)
    ((_, measured),) = accounts(module, [(0, 3)])
    row, stages = measure_memory(module)[0], tuple(range(packs))
    blocks = sum(most_at_once(measured, module, stages, fed=fed) for fed in (False, True))
    assert row.peak == row.fixed + row.data + blocks
    # Inputs of the first stage and of the last lie in the same blocks.
    fed = {(life.block, life.nbytes) for life in measured.lives if life.names in (("x",), ("labels",))}
    assert sum(nbytes for _, nbytes in fed) == most_at_once(measured, module, stages, fed=True)
    assert max(map(sum, memory_course(module, 0, 3).held)) == blocks
    # The control: stages that share nothing.
    assert blocks < sum(most_at_once(measured, module, (stage,), fed=fed) for stage in stages for fed in (False, True))


@pytest.mark.parametrize("kind", KINDS)
def test_a_byte_less_than_the_peak_does_not_fit(gpt, kind):
    module = planned(gpt, kind)
    rows = measure_memory(module)

    def within(less: int) -> Module:
        devices = (
            replace(device, spaces=(("ram", rows[rank].peak - (less if rank == 1 else 0)),))
            for rank, device in enumerate(module.cluster.devices)
        )
        return module.but(cluster=Cluster(tuple(devices)))

    verify(within(0))
    with pytest.raises(DoesNotFit, match=r"device cpu:1: needs .* at the worst moment"):
        verify(within(1))


def test_a_trace_file_says_which_stage_ran(tmp_path):
    module = chain("interleaved", tied=True)
    traces = traced(module, [(0, 2)])
    write_trace(tmp_path / "t.json", [t.events for t in traces], module=module, held=[t.entries for t in traces])
    for again, trace in zip(read_trace(tmp_path / "t.json"), traces, strict=True):
        assert [entry._replace(at=0) for entry in again.entries] == [entry._replace(at=0) for entry in trace.entries]
        assert {entry.stage for entry in again.entries if entry.what == "own"} == {a.stage for a in trace.actions}


def shares_blocks(module: Module, measured: Account) -> bool:
    """Whether results of one stage of a rank lie where results of another one have been."""
    there: dict[tuple[str, int], set[int]] = {}
    for life in measured.lives:
        graphs = (graph for kind in COMPUTE if (graph := module.stage_graph(life.stage, kind)))
        if life.owner is not None and {v.name for graph in graphs for v in graph.results}.issuperset(life.names):
            there.setdefault((life.block, life.nbytes), set()).add(life.stage)
    return any(len(stages) > 1 for stages in there.values())


@pytest.mark.slow
@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("model", ["gpt", "mlp"])
def test_compiled_code_in_processes_does_so_too(gpt, tmp_path, kind, model):
    training = ps.Training(loss="cross_entropy" if model == "gpt" else "mse", optimizer=ps.AdamW(), microbatches=4)
    source = gpt if model == "gpt" else ps.from_onnx(write_mlp(tmp_path / "mlp.onnx", [8, 24, 16, 24, 16, 8], batch=4))
    plan = ps.plan(source, Cluster.local(2), training, schedule=kind, packs=2)
    bundle = open_bundle(ps.compile(plan, tmp_path / "bundle"))
    run_bundle(bundle.path, steps=4, trace=tmp_path / "t.json", timeout=60)
    seen, shares = set(), False
    for rank, trace in enumerate(read_trace(tmp_path / "t.json")):
        expected, measured = planned_beside(bundle.module, rank, trace), measured_account(bundle.module, rank, trace)
        assert str(first_difference(expected, measured)) == "None"
        assert measured.workspace.keys() == expected.workspace.keys()
        shares |= shares_blocks(bundle.module, measured)
        for graph, sizes in measured.workspace.items():
            if sizes:
                # The control: one block less.
                fewer = replace(measured, workspace={**measured.workspace, graph: sizes[1:]})
                assert f"temporaries of {graph}" in str(first_difference(expected, fewer))
                seen.add(graph)
    assert shares
    assert len({graph.partition(".")[0] for graph in seen}) > 1
