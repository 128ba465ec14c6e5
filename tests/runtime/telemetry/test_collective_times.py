"""Totals of collectives, of events whose sums are known."""

from __future__ import annotations

import json

import pytest
from oracles.sharding.local_modules import local_mlp

from penstock.ir.collective_calls import calls_of, sent_bytes
from penstock.runtime.messages.control import Step
from penstock.runtime.telemetry.collective_times import by_name, collective_totals
from penstock.runtime.telemetry.memory_trace import read_trace
from penstock.runtime.telemetry.metrics import Metrics
from penstock.runtime.telemetry.trace import write_trace


@pytest.fixture(scope="module")
def module():
    return local_mlp("1f1b", 1, 1, 2).local


def done_of(module):
    """Both ranks do the first collective of the forward twice and that of the backward once."""
    texts = [
        f"0{kind}{mb}, {calls_of(module.stage_graph(0, kind))[0]} #0" for kind, mb in (("F", 0), ("F", 1), ("B", 0))
    ]
    return [
        [(text, start, start + 0.5, start + 0.5 + 0.125 * rank) for start, text in enumerate(texts)] for rank in (0, 1)
    ]


def test_totals_are_sums_of_all_ranks(module):
    totals = collective_totals(done_of(module), module)
    assert [(one.graph, one.count) for one in totals] == [("s0.F", 2), ("s0.B", 1)]
    for one in totals:
        op = calls_of(module.graphs[one.graph])[0].op
        assert one.nbytes == one.count * 2 * sent_bytes(op, 2)
        assert one.seconds == pytest.approx(one.count * (0.5 + 0.625))
        assert one.exposed == pytest.approx(one.count * 0.125)
    (both,) = by_name(totals).values()
    assert (both.name, both.count) == (f"all_reduce_{totals[0].over[0]}", 3)
    # The control: a collective that is none of the program's.
    with pytest.raises(ValueError, match="no collective of the program"):
        collective_totals([[("0F0, %y = all_reduce(%p, over=tp) #99", 0.0, 0.0, 0.0)]], module)


def test_a_trace_and_metrics_have_them(module, tmp_path, capsys):
    done = done_of(module)
    actions = [[("0F0", 0.0, 4.0)], [("0F0", 0.0, 4.0)]]
    write_trace(tmp_path / "trace.json", actions, module=module, collectives=done)
    again = [trace.collectives for trace in read_trace(tmp_path / "trace.json")]
    for one, other in zip(collective_totals(done, module), collective_totals(again, module), strict=True):
        assert (one.count, one.nbytes) == (other.count, other.nbytes)
        assert (one.seconds, one.exposed) == pytest.approx((other.seconds, other.exposed), abs=1e-5)
    metrics = Metrics(tmp_path / "metrics.jsonl", 4, 0, 1, progress=False)
    metrics.start()
    metrics.add(Step(0, 1.0, (1.0,), 0.1, 0.0))
    metrics.exchanged(1, collective_totals(done, module))
    metrics.close()
    row = json.loads((tmp_path / "metrics.jsonl").read_text().splitlines()[-1])
    name = by_name(collective_totals(done, module)).popitem()[0]
    assert row["step"] == 0
    assert (row[name], row[f"{name}_s"], row[f"{name}_exposed_s"]) == (3, pytest.approx(3.375), pytest.approx(0.375))
    assert "of which ranks waited 0.375 s" in capsys.readouterr().err
