"""Tests of the division of a step: a run that is played by hand, whose parts are known, and refusals."""

from __future__ import annotations

import json
from collections import defaultdict
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path
from zlib import crc32

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.classifier import classifier

from penstock.commands.parser import main
from penstock.inspection.kernels import timing
from penstock.inspection.kernels.kernels import kernel_rows
from penstock.inspection.traces.time import StepTime, step_time
from penstock.inspection.traces.trace import load_trace
from penstock.ir.graph import Module
from penstock.ir.schedule import RECEIVES, SENDS, Action
from penstock.ir.text import print_module
from penstock.passes.kernels.fuse import FuseOptions, fuse
from penstock.runtime.telemetry.trace import Event, write_trace
from penstock.support.errors import UsageError

BATCHES = 7
# Batches 0 and 1 fill the pipeline, the last one empties it.
COUNTED = range(2, BATCHES - 1)


@dataclass
class Played:
    """A run whose times are made up: actions of every rank, and the seconds that each heading must get in a step."""

    module: Module
    seconds: Callable[[Action], float]
    latency: float
    gap: float
    events: list[list[Event]] = field(default_factory=list)
    parts: list[dict[str, float]] = field(default_factory=list)

    def __post_init__(self) -> None:
        schedule = self.module.schedule
        assert schedule is not None
        left = {rank: list(schedule.expand(rank, BATCHES)) for rank in schedule.ranks}
        clock = dict.fromkeys(left, 0.0)
        sent: dict[tuple[str, int, int, int], float] = {}
        self.events, parts = [[] for _ in left], [defaultdict[str, float](float) for _ in left]
        batch = dict.fromkeys(left, 0)
        while any(left.values()):
            for rank, actions in left.items():
                while actions and self._play(rank, actions[0], clock, sent, parts[rank], batch[rank]):
                    batch[rank] += actions.pop(0).kind == "U"
        self.parts = [{name: total / len(COUNTED) for name, total in rank.items()} for rank in parts]

    def _play(
        self,
        rank: int,
        action: Action,
        clock: dict[int, float],
        sent: dict[tuple[str, int, int, int], float],
        parts: dict[str, float],
        batch: int,
    ) -> bool:
        """Play one action if it can end; False where its message was not sent yet."""
        begin, taken, count = clock[rank] + self.gap, self.seconds(action), batch in COUNTED
        found = {}
        if action.kind in RECEIVES:
            assert action.peer is not None
            handed = sent.get((action.phase, action.peer, rank, action.mb))
            if handed is None:
                return False
            end = max(begin, handed + self.latency) + taken
            found["behind"] = max(0.0, handed - begin)
            found["on the way"] = end - begin - found["behind"]
        else:
            if action.kind in SENDS:
                assert action.peer is not None
                sent[action.phase, rank, action.peer, action.mb] = begin
            end = begin + taken
            found[action.kind if action.kind in "FBWU" else "sending" if action.kind in SENDS else "drops"] = taken
        found["between"] = self.gap
        clock[rank] = end
        self.events[rank].append((str(action), begin, end))
        for name, seconds in found.items() if count else ():
            parts[name] += seconds
        return True

    def divided(self, folder: Path) -> StepTime:
        write_trace(folder / "t.json", self.events, module=self.module)
        return step_time(self.module, load_trace(folder / "t.json"))


def shown(times: StepTime, rank: int) -> dict[str, float]:
    found = times.ranks[rank]
    return {graph.graph.partition(".")[2]: graph.run_s for graph in found.graphs} | {
        "behind": found.behind_s,
        "on the way": found.on_the_way_s,
        "sending": found.sending_s,
        "drops": found.drops_s,
        "between": found.between_s,
    }


def constant(forward: float, backward: float) -> Callable[[Action], float]:
    of_kind = {"F": forward, "B": backward, "U": 0.004, "D": 0.001}
    return lambda action: of_kind.get(action.kind, 0.002)


@pytest.fixture(scope="module")
def module() -> Module:
    found = fuse(classifier(2, "1f1b", 3), FuseOptions())
    return found.but(facts=(*found.facts, "fused"))


@pytest.mark.parametrize("schedule", ["1f1b", "gpipe"])
@pytest.mark.parametrize(("forward", "backward"), [(0.010, 0.020), (0.030, 0.005)])
def test_parts_are_those_of_the_run_that_was_played(
    schedule: str, forward: float, backward: float, tmp_path: Path
) -> None:
    played = Played(classifier(2, schedule, 3), constant(forward, backward), latency=0.003, gap=0.0005)
    times = played.divided(tmp_path)
    assert times.steps == len(COUNTED)
    for rank, expected in enumerate(played.parts):
        found = shown(times, rank)
        assert set(expected) <= set(found)
        for name, seconds in found.items():
            assert seconds == pytest.approx(expected.get(name, 0.0), abs=2e-6), (rank, name)


def test_a_slower_link_is_not_a_slower_rank(module: Module, tmp_path: Path) -> None:
    """The control: a link of 50 ms shows on the way, a forward of 50 ms behind, and neither as the other."""
    link = Played(module, constant(0.010, 0.010), latency=0.050, gap=0.0).divided(tmp_path).ranks[1]
    slow = Played(module, constant(0.050, 0.010), latency=0.001, gap=0.0).divided(tmp_path).ranks[1]
    assert link.on_the_way_s > 0.050 > 0.030 > slow.on_the_way_s
    assert slow.behind_s > 0.045


@settings(max_examples=25, deadline=None, derandomize=True)
@given(seconds=st.lists(st.floats(1e-5, 0.1), min_size=12, max_size=12), gap=st.floats(0.0, 0.01))
def test_parts_add_up_to_the_time_between_updates(
    seconds: list[float], gap: float, module: Module, tmp_path_factory: pytest.TempPathFactory
) -> None:
    played = Played(module, lambda action: seconds[crc32(str(action).encode()) % 12], latency=0.0, gap=gap)
    times = played.divided(tmp_path_factory.mktemp("t"))
    for rank, events in zip(times.ranks, played.events, strict=True):
        ends = [end for text, _, end in events if "U" in text]
        assert rank.step_s == pytest.approx((ends[-2] - ends[1]) / times.steps, rel=1e-4)
        assert rank.between_s >= -1e-6


def test_kernels_divide_what_is_computed(module: Module, tmp_path: Path) -> None:
    """Rows with made-up times: each graph gets those of its own kernels, times its calls."""
    played = Played(module, constant(0.010, 0.020), latency=0.0, gap=0.0)
    played.divided(tmp_path)
    rows = [replace(row, measured_s=0.002, roofline_s=0.0015) for row in kernel_rows(module)]
    times = step_time(module, load_trace(tmp_path / "t.json"), rows)
    kernels = defaultdict[str, int](int)
    for row in rows:
        kernels[row.graph] += len(row.names)
    for rank in times.ranks:
        for graph in rank.graphs:
            assert graph.alone_s == pytest.approx(0.002 * graph.calls * kernels[graph.graph])
            assert graph.full_rate_s == pytest.approx(0.0015 * graph.calls * kernels[graph.graph])
    assert sum(kernel.alone_s for kernel in times.kernels) == pytest.approx(
        sum(graph.alone_s or 0.0 for rank in times.ranks for graph in rank.graphs)
    )
    above = [kernel.above_s for kernel in times.kernels]
    assert above == sorted(above, reverse=True)


def test_what_is_no_trace_of_this_module(module: Module, tmp_path: Path) -> None:
    played = Played(module, constant(0.01, 0.01), latency=0.0, gap=0.0)
    played.divided(tmp_path)
    with pytest.raises(UsageError, match="the trace has 2 ranks, and the module 3"):
        step_time(classifier(3, "1f1b", 3), load_trace(tmp_path / "t.json"))
    short = [
        [event for event in rank if int(event[0].strip("01FBWUDSR<>").partition("@")[0] or 0) < 0]
        for rank in played.events
    ]
    write_trace(tmp_path / "s.json", short, module=module)
    with pytest.raises(UsageError, match="rank 0 did 0 steps in this trace"):
        step_time(module, load_trace(tmp_path / "s.json"))
    write_trace(tmp_path / "w.json", [[("hello", 0.0, 1.0)]] * 2, module=module)
    with pytest.raises(UsageError, match="bad action 'hello'"):
        step_time(module, load_trace(tmp_path / "w.json"))


def test_the_command(
    module: Module, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name, value in {"_SECONDS": 0.0, "_SIDE": 64, "_LENGTH": 1 << 12}.items():
        monkeypatch.setattr(timing, name, value)
    played = Played(module, constant(0.010, 0.020), latency=0.003, gap=0.0005)
    played.divided(tmp_path)
    (tmp_path / "m.ir").write_text(print_module(module))
    words = ["inspect", str(tmp_path / "m.ir"), "--where-time-goes"]
    assert main(words) == 2
    assert "--where-time-goes needs --trace FILE" in capsys.readouterr().err
    words += ["--trace", str(tmp_path / "t.json")]
    assert main(words) == 0
    out = capsys.readouterr().out
    assert "waiting for messages on the way" in out
    assert "--measure says how fast" in out
    assert main([*words, "--json"]) == 0
    plain = json.loads(capsys.readouterr().out)
    assert [graph["run_s"] for graph in plain["ranks"][0]["graphs"]] == pytest.approx([0.030, 0.060, 0.004], abs=1e-6)
    assert main([*words, "--measure"]) == 0
    out = capsys.readouterr().out
    assert "at full rate" in out
    assert "kernels with the most time above full rate" in out
