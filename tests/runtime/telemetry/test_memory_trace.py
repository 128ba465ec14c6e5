"""Tests that the blocks in memory are those of the plan, block by block, action by action, for all schedules. The plan
is a walk through the schedule (ir/memory/walk.py), what is measured are entries of real stores and transports.
Controls: stores that let go too late, or never."""

from __future__ import annotations

import json
from collections import Counter
from dataclasses import replace

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.classifier import classifier
from oracles.drawn_chains import chain_model
from oracles.loopback import traced
from oracles.toy import toy_text

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.ir.cluster.cluster import Cluster, Device
from penstock.ir.memory.account import Account, first_difference
from penstock.ir.memory.predict import planned_account
from penstock.ir.text import parse_module
from penstock.ir.verify.verifier import verify
from penstock.models import write_gpt
from penstock.passes.communicate.communicate import communicate
from penstock.passes.kernels.fuse import FuseOptions, fuse
from penstock.passes.manager import run_passes
from penstock.passes.memory.lifetimes import lifetimes
from penstock.passes.memory.repeated import apart, may_repeat
from penstock.passes.partition.split_backward import split_backward
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline
from penstock.passes.schedules.schedule import SCHEDULES, ScheduleOptions, schedule
from penstock.passes.schedules.weight_versions import weight_versions
from penstock.runtime.job.run import run_bundle
from penstock.runtime.state.store import Store
from penstock.runtime.telemetry.blocks import Stays
from penstock.runtime.telemetry.memory_trace import measured_account, planned_beside, read_trace
from penstock.runtime.telemetry.trace import write_trace

TRAINING_OF_GPT = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3), microbatches=4, clip=0.5)
TRAINING = [kind for kind, row in SCHEDULES.items() if row.trains]


def accounts(module, runs, store_kind=Store):
    """As planned and as measured, of every rank."""
    found = traced(module, runs, store_kind)
    return [
        (planned_beside(module, rank, trace), measured_account(module, rank, trace)) for rank, trace in enumerate(found)
    ]


def check(module, runs, store_kind=Store):
    for planned, measured in accounts(module, runs, store_kind):
        assert str(first_difference(planned, measured)) == "None"
        assert planned.curve() == measured.curve()
        for purpose in {life.purpose for life in planned.lives}:
            alike = [
                replace(account, lives=tuple(life for life in account.lives if life.purpose == purpose))
                for account in (planned, measured)
            ]
            assert alike[0].curve() == alike[1].curve()
        assert list(planned.actions) == list(measured.actions)
        assert all(life.given_at is not None for life in measured.lives if life.owner is not None)


def scheduled_toy(kind, shares, skip):
    m = sum(shares[0])
    text = toy_text(len(shares), skip=skip, trains=SCHEDULES[kind].trains, devices=[len(share) for share in shares])
    module = parse_module(text, "toy.ir")
    module = split_backward(module) if SCHEDULES[kind].splits else module
    options = ScheduleOptions(kind, m, tuple(n for share in shares for n in share))
    return lifetimes(communicate(weight_versions(schedule(module, options))))


@settings(deadline=None, max_examples=40)
@given(
    st.sampled_from(sorted(SCHEDULES)),
    st.lists(st.integers(1, 2), min_size=1, max_size=4),
    st.integers(1, 4),
    st.booleans(),
    st.lists(st.integers(1, 4), min_size=1, max_size=3),
)
def test_blocks_are_taken_and_given_back_as_planned(kind, ranks, each, skip, batches):
    """Runs follow each other, as between checkpoints; with `skip` a value goes to two stages."""
    m = max(2 * each, 4 * len(ranks) - 2 if kind == "eager-2bw" else 2 * len(ranks))
    m += m % 2
    module = scheduled_toy(kind, [(m // count,) * count for count in ranks], skip)
    check(module, [(sum(batches[:i]), count) for i, count in enumerate(batches)])


@pytest.fixture(scope="module")
def gpt(tmp_path_factory):
    path = write_gpt(
        tmp_path_factory.mktemp("memory") / "gpt.onnx", layers=2, width=16, heads=2, vocab=24, positions=8, batch=2
    )
    return ps.from_onnx(path)


def planned(gpt, kind, replicas=1, **options):
    cluster = Cluster(tuple(Device(f"cpu:{i}") for i in range(2 * replicas)))
    return ps.plan(gpt, cluster, TRAINING_OF_GPT, schedule=kind, stages=2, replicas=replicas, **options).module


@pytest.mark.parametrize("kind", TRAINING)
def test_a_model_with_all_there_is(gpt, kind):
    """Adam, clipping (values of a batch), values that share messages and travel in 16 bits; computed again, or on several devices."""
    more = {"replicas": 2} if kind in ("1f1b", "2bw") else {"recompute": "all"}
    check(planned(gpt, kind, wire="bf16", **more), [(0, 3), (3, 2)])


def test_microbatches_that_let_go_beside_some_that_keep(gpt):
    """What is computed again is there from its own action on, and of other microbatches from their forward on."""
    whole = planned(gpt, "gpipe", recompute="none")
    forward = whole.graphs["s0.F"]
    dropped = [op for op in forward.ops if may_repeat(forward)(op) and not {*op.outs}.isdisjoint(forward.saved)]
    graphs = apart(forward, whole.graphs["s0.B"], dropped, frozenset({1, 2}), lets_go=True)
    schedule = graphs.scheduled(whole.schedule.rewrite(lambda a: () if a.kind == "D" else (a,)), 0)
    some = lifetimes(fuse(whole.but(schedule=schedule, graphs={**whole.graphs, **graphs.graphs}), FuseOptions()))
    verify(some)
    assert {"L", "R"} <= {action.kind for action in some.schedule.ranks[0].batch}
    check(some, [(0, 3), (3, 2)])


@pytest.mark.parametrize("kind", TRAINING)
def test_a_parameter_on_several_stages(kind):
    """Parts of its gradient travel once per batch, and stay until the update."""
    model = chain_model([8, 16, 16, 16, 16, 8], [], tied=True)
    cuts = {"stages": 3, "split_at": ("layer2", "layer4")}
    module = run_passes(
        model,
        training_pipeline({"kind": "adamw", "lr": 0.1}, cuts, PipelineOptions(schedule=kind, microbatches=4)),
        PASSES,
    )
    assert any(edge.phase == "P" for edge in module.edges)
    check(module, [(0, 3), (3, 1)])


def test_receives_of_a_gpu_wait_in_host_memory():
    """They are no part of its memory until they have come."""
    module = classifier(2, "1f1b", 4)
    far = Cluster(tuple(Device(device.name, "cuda") for device in module.cluster.devices))
    for place, early in ((module, True), (module.but(cluster=far), False)):
        account = planned_account(place, 1, [(0, 2)])
        came = [life.taken_at < life.uses[0] for life in account.lives if life.names == ("h0",)]
        assert len(came) == 8
        assert any(came) == early


def test_what_was_sent_stays_until_it_has_arrived():
    """Values that stage 0 does not save live no longer than their send; what holds them then is the transport, until all of them have arrived."""
    module = classifier(2, "1f1b", 4)
    for trace in traced(module, [(0, 3)]):
        counted = Counter((e.what, e.name, e.owner) for e in trace.entries if e.what in ("send", "sent"))
        sends = [a for a in trace.actions if a.kind in ("SF", "SB")]
        assert counted == Counter((what, f"{a.kind}>{a.peer}", a.mb) for a in sends for what in ("send", "sent"))
        stays = Stays()
        for entry in trace.entries:
            stays.follow(entry)
        assert (stays.away, stays.most_away % 128) == (0, 0)
        assert 128 <= stays.most_away <= 128 * len(sends)


class Late(Store):
    """Drops a microbatch only when it is next asked for something."""

    waiting = None

    def keep_only(self, mb, names):
        if self.waiting is not None:
            super().keep_only(*self.waiting)
        self.waiting = None if names or mb != 2 else (mb, names)
        if self.waiting is None:
            super().keep_only(mb, names)


class Leaky(Store):
    """Forgets one value of one microbatch."""

    def keep_only(self, mb, names):
        super().keep_only(mb, names | {"h0"} if mb == 3 else names)
        if mb == 3 and not names and self.values:
            # So that the run may end; the memory stays where it is.
            self.forgotten = self.values.pop(3, None)


@pytest.mark.parametrize("store_kind", [Late, Leaky])
def test_control_what_lives_too_long_is_named(store_kind):
    found = [first_difference(*both) for both in accounts(classifier(2, "1f1b", 4), [(0, 3)], store_kind)]
    assert all(found)
    said = [str(difference) for difference in found]
    for text, difference in zip(said, found, strict=True):
        assert difference.measured_bytes > difference.planned_bytes
        assert f"{difference.planned_bytes} bytes live as planned, {difference.measured_bytes} as measured" in text
        owner = "of microbatch 2" if store_kind is Late else "%h0 of microbatch 3"
        assert any("give" in text and owner in text for text in difference.only_planned)


def test_control_a_version_that_is_kept_too_long_is_named():
    module = classifier(1, "1f1b", 2)
    ((planned, measured),) = accounts(module, [(0, 3)])
    late = replace(
        measured, versions=tuple(v if v.version != 1 else replace(v, retired=v.retired + 1) for v in measured.versions)
    )
    assert "retire version 1 of @w0" in str(first_difference(planned, late))


def written(trace, module, rank: int, batch: int):
    """What a rank wrote down in the list of a batch, in that order, counted from the batch; of values not where they lie. When messages arrive, nobody plans."""
    program, m = module.schedule.ranks[rank], module.schedule.microbatches
    begin = trace.actions.index(program.batch[0].shifted(batch - 1, m))
    found = []
    for e in trace.entries:
        if begin <= e.step < begin + len(program.batch) and e.what != "sent":
            place = (
                (e.version - batch, e.block)
                if e.what in ("write", "retire")
                else e.owner - batch * m
                if e.owner >= 0
                else e.owner + batch
            )
            found.append((e.step - begin, e.what, e.name, place, e.nbytes))
    return found


def shape(account: Account, module, batch: int, copies: bool):
    """What happens to memory in the list of one batch, with microbatches and versions counted from the batch."""
    program, m = module.schedule.ranks[account.rank], module.schedule.microbatches
    # The first list lacks what belongs to the batch before the first.
    begins = [i for i, action in enumerate(account.actions) if action == program.batch[0].shifted(batch - 1, m)]
    begin, end = begins[0], begins[0] + len(program.batch)
    found = []
    for h in account.happenings():
        if begin <= h.step < end:
            owner = None if h.owner is None else h.owner - batch * m if h.owner >= 0 else h.owner + batch
            found.append(
                (
                    h.step - begin,
                    h.what,
                    h.names,
                    owner,
                    h.copy if copies else 0,
                    h.version - batch if h.version else 0,
                    h.nbytes,
                )
            )
    return sorted(found, key=str)


@pytest.mark.parametrize("kind", TRAINING)
def test_every_batch_is_like_the_one_before(kind):
    """From the second one on, but for the end of the run; under 2bw buffers of weights take turns, so that every second one is the same."""
    stages, m = 3, 4
    module = classifier(stages, kind, m)
    for both in accounts(module, [(0, 8)]):
        for account in both:
            rounds = [shape(account, module, batch, copies=True) for batch in range(2, 6)]
            assert all(rounds)
            if SCHEDULES[kind].delay:
                assert rounds[0] == rounds[2] != rounds[1]
                assert rounds[1] == rounds[3]
                alike = [shape(account, module, batch, copies=False) for batch in range(2, 6)]
                assert alike[0] == alike[1] == alike[2] == alike[3]
            else:
                assert rounds[0] == rounds[1] == rounds[2] == rounds[3]


@pytest.mark.parametrize("kind", TRAINING)
def test_entries_come_in_the_same_order_in_every_batch(kind):
    module, period = classifier(3, kind, 4), 1 + SCHEDULES[kind].delay
    for rank, trace in enumerate(traced(module, [(0, 8)])):
        rounds = [written(trace, module, rank, batch) for batch in range(2, 6)]
        assert all(rounds)
        assert rounds[period:] == rounds[:-period]
        assert (rounds[0] == rounds[1]) == (period == 1)


def test_control_a_batch_that_is_not_like_the_others_is_seen():
    class Odd(Store):
        """Holds on to a value in one batch only."""

        def keep_only(self, mb, names):
            super().keep_only(mb, names | {"h0"} if mb == 13 and names else names)

    module = classifier(3, "1f1b", 4)
    _, measured = accounts(module, [(0, 8)], Odd)[0]
    assert shape(measured, module, 3, True) != shape(measured, module, 4, True) == shape(measured, module, 5, True)


def test_a_trace_file_says_all_that_a_job_does(tmp_path):
    module = classifier(2, "2bw", 2)
    traces = traced(module, [(0, 3), (3, 1)])
    write_trace(tmp_path / "t.json", [t.events for t in traces], module=module, held=[t.entries for t in traces])
    for rank, (again, trace) in enumerate(zip(read_trace(tmp_path / "t.json"), traces, strict=True)):
        assert [entry._replace(at=0) for entry in again.entries] == [entry._replace(at=0) for entry in trace.entries]
        assert measured_account(module, rank, again).curve() == measured_account(module, rank, trace).curve()


@pytest.mark.parametrize(
    "text",
    ["", "[]", "{}", '{"traceEvents": [{}]}', '{"traceEvents": []}', json.dumps({"traceEvents": [{"name": "x"}]})],
)
def test_what_is_no_trace_is_refused(tmp_path, text):
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(ps.PenstockError, match="cannot read it as a trace"):
        read_trace(path)


@pytest.mark.parametrize(
    "damage",
    [
        lambda e: e["args"].update(step=10**6),
        lambda e: e["args"].update(bytes="many"),
        lambda e: e["args"].pop("block"),
        lambda e: e.update(name="drop %x"),
        lambda e: e.update(pid=7),
        lambda e: e.update(ts=None),
    ],
)
def test_a_damaged_trace_is_refused(tmp_path, damage):
    module, path = classifier(1, "1f1b", 2), tmp_path / "t.json"
    found = traced(module, [(0, 1)])
    write_trace(path, [t.events for t in found], module=module, held=[t.entries for t in found])
    told = json.loads(path.read_text())
    damage(next(e for e in told["traceEvents"] if e["name"] == "keep %x"))
    path.write_text(json.dumps(told))
    with pytest.raises(ps.PenstockError, match="cannot read it as a trace"):
        read_trace(path)


def test_uses_are_those_of_the_graphs():
    """By hand: two stages, 1f1b, the weights of stage 0 are read by F and B of its version and by U, its momentum by U alone."""
    module = classifier(2, "2bw", 2)
    planned, _ = accounts(module, [(0, 2)])[0]
    of = {
        life.label: [str(planned.actions[step]) for step in life.uses] for life in planned.lives if life.owner is None
    }
    assert of["@w0.momentum#0"] == ["0U0@1", "0U1@2"]
    assert of["@w0#1"] == [str(a) for a in planned.actions if a.kind == "U"]
    assert set(of["@w0#0"]) == {str(a) for a in planned.actions if a.kind in "FU"}


@pytest.mark.slow
@pytest.mark.parametrize("kind", ["2bw", "zb-1f1b"])
def test_compiled_code_in_processes_does_so_too(gpt, tmp_path, kind):
    """Temporaries as TVM's virtual machine tells of them, results as they come from it, messages over gloo."""
    bundle = open_bundle(
        ps.compile(ps.plan(gpt, Cluster.local(2), TRAINING_OF_GPT, schedule=kind, wire="bf16"), tmp_path / "bundle")
    )
    run_bundle(bundle.path, steps=4, trace=tmp_path / "t.json", timeout=60)
    seen = []
    for rank, trace in enumerate(read_trace(tmp_path / "t.json")):
        planned, measured = planned_beside(bundle.module, rank, trace), measured_account(bundle.module, rank, trace)
        assert str(first_difference(planned, measured)) == "None"
        assert measured.workspace.keys() == planned.workspace.keys()
        for graph, sizes in measured.workspace.items():
            if sizes:
                # Control: one block less.
                fewer = replace(measured, workspace={**measured.workspace, graph: sizes[1:]})
                assert f"temporaries of {graph}" in str(first_difference(planned, fewer))
                seen.append(graph)
    assert "B" in seen
