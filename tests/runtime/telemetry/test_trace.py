"""Tests of traces: they have the format that Perfetto expects, arrows lead from each send to its own receive, and
clocks of several hosts become one."""

from __future__ import annotations

import json
import threading
import time

import pytest
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.classifier import make_batches

from penstock.ir.schedule import Action
from penstock.runtime.group.clocks import Offset, measure_offset
from penstock.runtime.group.group import RankGroup
from penstock.runtime.job.job import Job
from penstock.runtime.telemetry.trace import write_trace

NEEDED = {
    "X": {"name": str, "cat": str, "pid": int, "tid": int, "ts": float, "dur": float},
    "s": {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": float},
    "f": {"name": str, "cat": str, "id": int, "pid": int, "tid": int, "ts": float, "bp": str},
    "i": {"name": str, "pid": int, "tid": int, "ts": float, "s": str, "args": dict},
    "C": {"name": str, "pid": int, "ts": float, "args": dict},
    "M": {"name": str, "pid": int, "args": dict},
}


def check_schema(text: str) -> list[dict]:
    """The JSON object format of the Trace Event Format, as far as it is used here."""
    trace = json.loads(text, parse_constant=lambda name: pytest.fail(f"{name} is no JSON"))
    assert trace.keys() == {"traceEvents", "displayTimeUnit"}
    for event in trace["traceEvents"]:
        for name, kind in NEEDED[event["ph"]].items():
            assert isinstance(event[name], kind), event
        assert event.get("dur", 0) >= 0
    return trace["traceEvents"]


def check_arrows(events: list[dict]) -> int:
    """Every arrow begins inside of a send and ends inside of the receive of the same message."""
    slices = [e for e in events if e["ph"] == "X"]
    starts, ends = ({e["id"]: e for e in events if e["ph"] == phase} for phase in "sf")
    assert starts.keys() == ends.keys()
    for number, start in starts.items():
        (send, receive) = (
            next(
                Action.parse(s["name"])
                for s in slices
                if s["pid"] == e["pid"] and s["ts"] <= e["ts"] <= s["ts"] + s["dur"] + 0.1
            )
            for e in (start, ends[number])
        )
        assert (send.kind[0], receive.kind[0], send.kind[1:], send.mb) == ("S", "R", receive.kind[1:], receive.mb)
        assert (send.peer, receive.peer) == (ends[number]["pid"], start["pid"])
    return len(starts)


def test_a_run_of_two_stages(bundle_of, tmp_path):
    bundle, path = bundle_of(2, "2bw", 2), tmp_path / "t.json"
    with Job(bundle, timeout=20, trace=True) as job:
        list(job.run(make_batches(3, 2)))
    write_trace(path, job.traces, module=job.module, held=job.held)
    events = check_schema(path.read_text())
    assert [e["args"]["name"] for e in events if e["name"] == "process_name"] == [
        "rank 0 (stage 0, cpu:0)",
        "rank 1 (stage 1, cpu:1)",
    ]
    assert check_arrows(events) == 2 * 3 * 2
    for rank in range(2):
        counted = [e["args"]["bytes"] for e in events if e["ph"] == "C" and e["pid"] == rank]
        assert max(counted) > 0
        assert (min(counted), counted[-1]) == (0, 0)  # all that was kept was dropped
    kept = {
        (e["args"]["value"], e["args"]["microbatch"])
        for e in events
        if e["ph"] == "i" and e["pid"] == 1 and e["name"].startswith("keep")
    }
    assert {("h0", mb) for mb in range(6)} <= kept
    check_memory(bundle.module, events)


def check_memory(module, events):
    """Against the module and the schedule: who made a value, where it lies, and which version of a weight lies in which buffer."""
    stages = module.rank_stages()
    for rank, stage in enumerate(stages):
        own = [e for e in events if e["ph"] == "i" and e["pid"] == rank]
        lying = {}
        for event in own:
            args = event["args"]
            if "value" not in args:
                continue
            graph, _, made = args["op"].partition(": ")
            if args["op"] != "input":
                assert any(
                    op.kind == made.split()[0] and args["value"] in [out.name for out in op.outs]
                    for op in module.graphs[graph].ops
                )
            key = (args["value"], args.get("microbatch"), args.get("batch"))
            if event["name"].startswith("keep"):
                lying[key] = args["block"]
            else:
                assert lying.pop(key) == args["block"]
        assert not lying
        versioned = {name: var for name, var in module.vars.items() if var.role == "param" and var.stage == stage}
        assert versioned
        for name, var in versioned.items():
            written = [e["args"] for e in own if e["name"] == f"write @{name}"]
            assert [(args["version"], args["block"]) for args in written] == [
                (v, v % var.versions) for v in range(1, len(written) + 1)
            ]
            assert all(args["bytes"] == var.type.nbytes for args in written)
            retired = [e["args"]["version"] for e in own if e["name"] == f"retire @{name}"]
            assert retired == sorted(set(retired))
            updates = [e for e in events if e["ph"] == "X" and e["pid"] == rank and Action.parse(e["name"]).kind == "U"]
            assert len(written) == len(updates) == 3
            # Under 2bw the versions that two updates may still need are there.
            times = {
                kind: {e["args"]["version"]: e["ts"] for e in own if e["name"] == f"{kind} @{name}"}
                for kind in ("write", "retire")
            }
            for version, at in times["write"].items():
                gone = version - var.versions
                assert gone < 0 or times["retire"][gone] <= at


def test_control_a_wrong_block_is_seen(bundle_of, tmp_path):
    bundle, path = bundle_of(2, "2bw", 2), tmp_path / "t.json"
    with Job(bundle, timeout=20, trace=True) as job:
        list(job.run(make_batches(3, 2)))
    for field in ("block", "version"):
        held = [
            [entry._replace(**{field: getattr(entry, field) + 1}) if entry.version == 2 else entry for entry in of]
            for of in job.held
        ]
        write_trace(path, job.traces, module=job.module, held=held)
        with pytest.raises(AssertionError):
            check_memory(bundle.module, check_schema(path.read_text()))


def test_control_an_arrow_to_the_wrong_receive_is_seen(tmp_path):
    path = tmp_path / "t.json"
    write_trace(
        path,
        [
            [("0SF0>1", 0.0, 0.1), ("0SF1>1", 0.2, 0.3)],
            [("1RF0<0", 0.1, 0.2), ("1RF1<0", 0.4, 0.5), ("1RF2<0", 0.6, 0.7)],
        ],
    )
    events = check_schema(path.read_text())
    assert check_arrows(events) == 2
    ends = [e for e in events if e["ph"] == "f"]
    ends[0]["ts"], ends[1]["ts"] = ends[1]["ts"], ends[0]["ts"]
    with pytest.raises(AssertionError):
        check_arrows(events)


@settings(deadline=None, max_examples=8)
@given(st.lists(st.tuples(st.integers(0, 2), st.floats(-1e6, 1e6)), min_size=1, max_size=3))
def test_clocks_of_several_hosts_become_that_of_rank_0(hosts):
    hosts = [(0, 0.0), *hosts]
    store, found = dist.HashStore(), {}

    def measure(rank: int) -> None:
        host, shift = hosts[rank]
        group = RankGroup(store, rank, len(hosts), 10.0)
        # A host has one clock.
        shift = next(s for h, s in hosts if h == host)
        found[rank] = measure_offset(group, lambda: time.monotonic() + shift, str(host)), -shift

    threads = [threading.Thread(target=measure, args=(rank,)) for rank in range(len(hosts))]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(20)
    assert len(found) == len(hosts)
    for rank, (offset, expected) in found.items():
        if hosts[rank][0] == 0:
            assert offset == Offset(0.0, 0.0)
        else:
            assert abs(offset.seconds - expected) <= offset.error + 1e-6
