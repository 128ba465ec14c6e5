"""Which version every computation uses: v(k) = max(k // m - delay, 0), on every stage, in forward and backward."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest

from penstock.ir.text import parse_module, print_module
from penstock.passes.communicate.communicate import communicate
from penstock.passes.partition.split_backward import split_backward
from penstock.passes.schedules.schedule import SCHEDULES, ScheduleOptions, schedule
from penstock.passes.schedules.weight_versions import WeightVersionsOptions, weight_versions
from penstock.support.errors import UsageError


@pytest.mark.parametrize("kind", [kind for kind, row in SCHEDULES.items() if row.trains])
@pytest.mark.parametrize(("d", "m"), [(1, 1), (2, 1), (3, 2), (4, 3), (4, 8), (6, 12)])
def test_versions_follow_the_formula(toy, kind, d, m):
    delay, m = SCHEDULES[kind].delay, max(m, 2 * d - 2) if kind == "eager-2bw" else m
    module = split_backward(toy(d)) if SCHEDULES[kind].splits else toy(d)
    module = weight_versions(schedule(module, ScheduleOptions(kind, m)))
    for first in (0, 1, 3):
        for actions in module.schedule.expand_all(4, first).values():
            for a in actions:
                assert a.version == (a.mb + 1 if a.kind == "U" else max(a.mb // m - delay, 0)), a
    assert {v.versions for v in module.vars.values() if v.role == "param"} == {delay + 1}
    assert {v.versions for v in module.vars.values() if v.role == "grad"} == {1}


def test_forward_and_backward_read_the_microbatchs_version_and_update_the_latest(toy):
    before = schedule(toy(2), ScheduleOptions("2bw", 2))
    after = weight_versions(before)
    for name, graph in after.graphs.items():
        versions = {op.attrs.get("version", "latest") for op in graph.ops if op.kind == "read"}
        assert versions == {"latest" if name.endswith(".U") else "mb"}
    assert after.graphs["s0.U"] is before.graphs["s0.U"]


def test_the_difference_is_nothing_but_versions(toy):
    """A diff of the dumps around the pass shows just the versions."""
    before = schedule(toy(3), ScheduleOptions("2bw", 4))
    old, new = print_module(before).splitlines(), print_module(weight_versions(before)).splitlines()
    assert old != new
    assert [re.sub(r", version=mb| versions \d+|(?<=[FBU]\d)@\d+", "", line) for line in new] == old


def test_parameters_that_never_change_keep_one_version(toy):
    module = schedule(toy(2), ScheduleOptions("2bw", 2))
    graphs = {n: g for n, g in module.graphs.items() if n != "s1.U"}
    graphs["s1.B"] = replace(graphs["s1.B"], ops=tuple(op for op in graphs["s1.B"].ops if op.kind != "accum"))
    found = module.schedule.rewrite(lambda a: () if (a.stage, a.kind) == (1, "U") else (a,))
    after = weight_versions(module.but(graphs=graphs, schedule=found))
    assert after.vars["w0"].versions == 2
    assert after.vars["w1"].versions == 1
    assert after.graphs["s1.F"] is module.graphs["s1.F"]


def test_inference_has_no_versions(toy):
    module = schedule(toy(2, trains=False), ScheduleOptions("forward", 2))
    assert weight_versions(module) is module


def test_versions_survive_the_text_form_and_later_passes(toy):
    module = communicate(weight_versions(schedule(toy(3), ScheduleOptions("2bw", 3))))
    assert parse_module(print_module(module)) == module


def test_options(toy):
    module = schedule(toy(3), ScheduleOptions("2bw", 2))
    forced = weight_versions(module, WeightVersionsOptions(delay=0, versions=3, checked=False))
    assert next(a.version for a in forced.schedule.expand(0, 3) if (a.kind, a.mb) == ("F", 4)) == 2
    assert forced.vars["w0"].versions == 3
    with pytest.raises(UsageError, match="delay must be 0 or 1, got 2"):
        weight_versions(module, WeightVersionsOptions(delay=2))
    with pytest.raises(UsageError, match="versions must be at least 1, got 0"):
        weight_versions(module, WeightVersionsOptions(versions=0))
    with pytest.raises(UsageError, match="the module has no schedule"):
        weight_versions(toy(2))
    renamed = module.but(schedule=replace(module.schedule, name="mine"))
    with pytest.raises(UsageError, match="schedule 'mine' is not known, so its delay must be given"):
        weight_versions(renamed)
    assert weight_versions(renamed, WeightVersionsOptions(delay=1)).vars["w0"].versions == 2
