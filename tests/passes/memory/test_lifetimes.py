"""Drops and predicted memory, against a count by hand and a brute-force walk."""

from __future__ import annotations

import pytest

from penstock.ir.memory.predict import BATCHES, measure_memory, memory_curve
from penstock.ir.memory.workspace import planned_blocks
from penstock.ir.text import parse_module
from penstock.passes.communicate.communicate import communicate
from penstock.passes.memory.lifetimes import COLUMNS, lifetimes, memory_table
from penstock.passes.partition.split_backward import split_backward
from penstock.passes.schedules.schedule import SCHEDULES, ScheduleOptions, schedule
from penstock.passes.schedules.weight_versions import weight_versions
from penstock.support.errors import UsageError

VALUE = 16  # bytes of f32[4], the type of every value in the toy


def pipeline(module, kind, m):
    module = split_backward(module) if SCHEDULES[kind].splits else module
    return lifetimes(communicate(weight_versions(schedule(module, ScheduleOptions(kind, m)))))


@pytest.mark.parametrize("kind", SCHEDULES)
@pytest.mark.parametrize(("d", "m"), [(1, 1), (2, 3), (4, 3), (4, 6)])
def test_each_microbatch_is_dropped_once_right_after_its_last_action(toy, kind, d, m):
    m = max(m, 2 * d - 2) if kind == "eager-2bw" else m
    module = pipeline(toy(d, skip=True, trains=SCHEDULES[kind].trains), kind, m)
    for actions in module.schedule.expand_all(3).values():
        drops = [a.mb for a in actions if a.kind == "D"]
        assert sorted(drops) == list(range(3 * m))
        for i, a in enumerate(actions):
            if a.kind == "D":
                assert actions[i - 1].mb == a.mb
                assert not any(b.mb == a.mb for b in actions[i + 1 :] if b.kind not in ("U", "AR"))


@pytest.mark.parametrize("kind", ["1f1b", "gpipe", "2bw", "eager-2bw"])
@pytest.mark.parametrize(("d", "m"), [(2, 1), (4, 3), (4, 6)])
def test_activations_are_the_formula_times_what_a_microbatch_saves(toy, kind, d, m):
    """The toy saves one value per stage, on stage 0 the input of the module: it counts too."""
    m = max(m, 2 * d - 2) if kind == "eager-2bw" else m
    module = pipeline(toy(d), kind, m)
    for s, memory in measure_memory(module).items():
        in_flight = {"1f1b": min(d - s, m), "gpipe": m, "2bw": d - s, "eager-2bw": 2 * (d - s) - 1}[kind]
        assert memory.activations == in_flight * VALUE
        assert memory.weights == (1 + SCHEDULES[kind].delay) * VALUE
        assert memory.gradients == VALUE
        assert memory.state == memory.buffers == 0


def test_the_peak_of_a_stage_by_hand(toy):
    """Stage 1 of 3 under 1f1b with 2 microbatches, in the third batch. Fixed: weight and gradient. Messages: at the first backward of the batch before %h0 of both
    microbatches is saved, %h1.grad received, and receives are posted for %h1.grad of the other one and %h0 of the first of the next batch. Made: at the last
    backward there are %h0.grad and in the graph %dw1; and all that was sent so far, as nobody notices that small messages have arrived before there are eight
    in a direction: six %h1 and five %h0.grad."""
    memory = measure_memory(pipeline(toy(3), "1f1b", 2))[1]
    assert (memory.fixed, memory.activations) == (2 * VALUE, 2 * VALUE)
    messages, made, sent = 2 + 1 + 2, 2, 6 + 5
    assert memory.peak == memory.fixed + (messages + made + sent) * VALUE
    assert memory.in_flight == 2


def test_workspace_is_what_the_planner_of_tvm_takes():
    module = parse_module(
        """module @m {
  input %x : f32[4]
  var @w : f32[4] param
  graph @main(%x : f32[4]) {
    %w : f32[4] = read(@w)
    %a : f32[4] = mul(%x, %w)
    %b : f32[4] = neg(%a)
    %c : f32[4] = add(%b, %x)
    %d : f32[4] = add(%c, %b)
    %y : f32[4] = neg(%d)
    return %y
  }
}
"""
    )
    # %a %b | %b %c | %b %c %d: the worst moment is when %d is made from %c and %b
    assert planned_blocks(module.graphs["main"]) == [VALUE] * 3


def test_more_microbatches_in_flight_need_more_memory(toy):
    """A control: the prediction tells gpipe from 1f1b, and 2bw from both."""
    peaks = {kind: measure_memory(pipeline(toy(4), kind, 8))[0].peak for kind in ("1f1b", "gpipe", "2bw")}
    assert peaks["1f1b"] + VALUE == peaks["2bw"] < peaks["gpipe"]


def test_the_table_and_the_notes_say_the_same(toy):
    module = pipeline(toy(2), "2bw", 2)
    table = memory_table(module)
    assert list(table) == [0, 1]
    assert tuple(table[0]) == COLUMNS
    assert all(row["peak"] <= sum(n for name, n in row.items() if name != "peak") for row in table.values())
    notes = [note.text for note in module.notes if note.origin == "lifetimes"]
    assert notes[0].startswith(f"rank 0: peak {table[0]['peak']} B (weights 32 B, gradients 16 B, activations 32 B")
    assert notes[0].endswith("2 microbatches in flight")
    assert notes[1].endswith("1 microbatch in flight")


def test_memory_is_known_before_drops_are_placed(toy):
    for kind in SCHEDULES:
        with_drops = pipeline(toy(3, trains=SCHEDULES[kind].trains), kind, 4)
        without = with_drops.but(schedule=with_drops.schedule.rewrite(lambda a: () if a.kind == "D" else (a,)))
        assert memory_table(without) == memory_table(with_drops)


@pytest.mark.parametrize("kind", ["1f1b", "2bw", "zb-1f1b"])
def test_the_curve_over_a_run_ends_at_the_peak(toy, kind):
    module = pipeline(toy(3), kind, 4)
    for rank, row in measure_memory(module).items():
        curve = list(memory_curve(module, rank, BATCHES))
        assert [action for action, _, _ in curve] == list(module.schedule.expand(rank, BATCHES))
        assert all(row.fixed + row.data <= live <= held for _, live, held in curve)
        held = [held for _, _, held in curve]
        assert held == sorted(held)
        assert held[-1] == row.peak
        # At the end of the run nothing of a microbatch is left.
        assert curve[-1][1] == row.fixed + row.data


def test_order_of_passes_is_checked(toy):
    with pytest.raises(UsageError, match="no schedule"):
        lifetimes(toy(2))
    with pytest.raises(UsageError, match="already has drops"):
        lifetimes(pipeline(toy(2), "1f1b", 2))
