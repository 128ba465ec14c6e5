"""Tests of the account of a traced run: times by hand, ways by the cluster, and refusals."""

from __future__ import annotations

import json
from dataclasses import replace

import pytest
from oracles.classifier import classifier
from oracles.loopback import traced

from penstock.commands.parser import main
from penstock.inspection.traces.memory import traced_memory
from penstock.inspection.traces.trace import load_trace
from penstock.ir.cluster.cluster import Cluster, Device, Link, LinkClass
from penstock.ir.memory.account import BEFORE, Account, Life
from penstock.ir.memory.idle import Gap, Way, gaps, idle_at, longest_gap, way_out
from penstock.ir.schedule import Action
from penstock.ir.text import print_module
from penstock.runtime.telemetry.memory_trace import RankTrace, read_trace
from penstock.runtime.telemetry.trace import write_trace
from penstock.support.errors import UsageError


@pytest.fixture(scope="module")
def files(tmp_path_factory):
    """A module and the trace of its run, as files."""
    folder, module = tmp_path_factory.mktemp("traced"), classifier(2, "2bw", 2)
    found = traced(module, [(0, 4)])
    write_trace(folder / "t.json", [t.events for t in found], module=module, held=[t.entries for t in found])
    (folder / "m.ir").write_text(print_module(module))
    return folder, module


def test_idle_times_by_hand():
    """Four actions of one second, a second after each; a block that the first and the last use."""
    actions = tuple(Action("F", 0, mb) for mb in range(4))
    life = Life("activations", ("h",), 0, 1000, 0, 3, uses=(0, 1, 3))
    account = Account(0, actions, (life,), times=tuple((2.0 * i, 2.0 * i + 1) for i in range(4)))
    assert list(gaps(account, life)) == [Gap(0, 1, 1.0), Gap(1, 3, 3.0)]
    assert longest_gap(account, life) == Gap(1, 3, 3.0)
    assert longest_gap(account, life._replace(uses=(2,))) is None
    fast, slow = Way("", 1000.0, 0.0), Way("", 1000.0, 0.6)
    assert (fast.seconds(1000), slow.seconds(1000)) == (2.0, 3.2)
    assert [idle_at(account, life, step, fast) for step in range(4)] == [False, False, True, False]
    assert not any(idle_at(account, life, step, slow) for step in range(4))


def test_where_a_block_could_wait():
    gpu, cpu, far = Device("cuda:0", "cuda"), Device("cpu:0", bandwidth=2e10), Device("cpu:1", host="other")
    assert way_out(Cluster((cpu,)), "cpu:0") == Way("host memory", 1e10, 0.0)
    linked = Cluster((gpu, cpu, far), (Link("cuda:0", "cpu:0", 3e9, 1e-4),))
    assert way_out(linked, "cuda:0") == Way("memory of cpu:0", 3e9, 1e-4)
    # Nobody moves memory to another host.
    alone = Cluster((gpu, far), classes=(LinkClass("host-to-device", 5e9, 2e-5),))
    assert way_out(alone, "cuda:0") == Way("host memory", 5e9, 2e-5)


def test_facts_of_a_run(files):
    folder, module = files
    for rank, found in enumerate(traced_memory(module, read_trace(folder / "t.json"), "t.json")):
        assert found.difference is None
        assert [point.action for point in found.points] == [str(a) for a in module.schedule.expand(rank, 4)]
        assert all(point.planned == point.measured for point in found.points)
        weights = {block.block: block for block in found.blocks if block.what.startswith(f"@w{rank}#")}
        # Four updates: odd versions are in the second buffer.
        assert [v.version for v in weights["1"].versions] == [1, 3]
        assert weights["0"].versions[0].written is None
        assert weights["0"].versions[1].written == f"{rank}U1@2"
        state = next(block for block in found.blocks if "momentum" in block.what)
        assert (len(state.uses), state.first_use, state.last_use) == (4, f"{rank}U0@1", f"{rank}U3@4")
        assert state.after is not None
        assert state.after[1] == state.before[1] == "U"
        for block in found.blocks:
            assert all(block.taken_s <= begin <= end <= block.given_s for begin, end in block.uses)
            assert block.made_by is None or block.made_by.startswith(("s0.", "s1.", "input"))
        assert sum(kind.count for kind in found.kinds) == len(found.blocks)
        slow = replace(module, cluster=Cluster(tuple(replace(d, bandwidth=1.0) for d in module.cluster.devices)))
        # Control: by a way as slow as that nothing is worth moving.
        assert not any(
            k.candidate or k.at_peak for k in traced_memory(slow, read_trace(folder / "t.json"), "t.json")[rank].kinds
        )


def test_the_command(files, capsys):
    folder, _ = files
    words = ["inspect", str(folder / "m.ir"), "--memory", "--trace", str(folder / "t.json")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert out.count("as planned in every block after each of") == 2
    assert "rank 1, stage 1 on cpu:1: at most" in out
    assert main([*words, "--json"]) == 0
    ranks = json.loads(capsys.readouterr().out)
    assert [rank["difference"] for rank in ranks] == [None, None]
    assert {"purpose", "made_by", "uses", "idle_s", "move_s"} <= ranks[0]["blocks"][0].keys()
    assert main(["inspect", str(folder / "m.ir"), "--trace", str(folder / "t.json")]) == 2
    assert "--trace goes with --memory" in capsys.readouterr().err


def test_a_block_that_leaks_is_named(files):
    folder, module = files
    one, other = read_trace(folder / "t.json")
    kept = tuple(entry for entry in one.entries if (entry.what, entry.name, entry.owner) != ("drop", "z0", 5))
    found, _ = traced_memory(module, [RankTrace(one.events, kept), other], "t.json")
    assert "only planned: give 128 bytes for %z0 of microbatch 5" in found.difference
    assert found.points[-1].measured == found.points[-1].planned + 128


def test_traces_of_something_else_are_refused(files, tmp_path, capsys):
    folder, module = files
    for stages, kind, said in (
        (1, "2bw", "the trace has 2 ranks, the module 1"),
        (2, "forward", "which it never does in the module"),
    ):
        (tmp_path / "m.ir").write_text(print_module(classifier(stages, kind, 2)))
        assert main(["inspect", str(tmp_path / "m.ir"), "--memory", "--trace", str(folder / "t.json")]) == 2
        assert said in capsys.readouterr().err
    write_trace(tmp_path / "t.json", [t.events for t in read_trace(folder / "t.json")], module=module)
    assert main(["inspect", str(folder / "m.ir"), "--memory", "--trace", str(tmp_path / "t.json")]) == 2
    assert "says nothing of memory" in capsys.readouterr().err


def test_a_run_without_actions_has_nothing_to_say():
    account = Account(0, (), (Life("weights", ("w",), None, 4, BEFORE, None),))
    assert account.curve() == []


@pytest.mark.parametrize(
    ("change", "said"),
    [
        ({"name": "0F999999999"}, "a run of batches"),
        ({"dur": -1.0}, "cannot read it as a trace"),
        ({"ts": float("inf")}, "cannot read it as a trace"),
        ({"dur": float("nan")}, "cannot read it as a trace"),
        ({"ts": 10**400}, "cannot read it as a trace"),
    ],
)
def test_traces_that_nobody_ran_end(change, said, files, tmp_path, capsys):
    folder, _ = files
    trace = json.loads((folder / "t.json").read_text())
    event = next(e for e in trace["traceEvents"] if e["ph"] == "X" and e["name"].startswith("0F1"))
    event.update(change)
    (tmp_path / "t.json").write_text(json.dumps(trace))
    assert main(["inspect", str(folder / "m.ir"), "--memory", "--trace", str(tmp_path / "t.json")]) == 2
    assert said in capsys.readouterr().err
    if "name" not in change:
        with pytest.raises(UsageError, match="cannot read it as a trace"):
            load_trace(tmp_path / "t.json")


def test_names_of_ranks_are_names(files, tmp_path):
    trace = json.loads((files[0] / "t.json").read_text())
    rows = [e for e in trace["traceEvents"] if e["name"] == "process_name"]
    rows[0]["args"]["name"] = "rank \x1b[2J"
    (tmp_path / "t.json").write_text(json.dumps(trace))
    assert "rank \\x1b[2J computes" in repr(load_trace(tmp_path / "t.json"))
    for e in trace["traceEvents"]:
        e["pid"] = "one" if e["pid"] else 0
    (tmp_path / "t.json").write_text(json.dumps(trace))
    with pytest.raises(UsageError, match="cannot read it as a trace"):
        load_trace(tmp_path / "t.json")
