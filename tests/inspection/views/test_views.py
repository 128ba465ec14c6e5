"""Tests of the output of `penstock inspect`: colours change no letter, numbers are those of the module, curves those of
the simulation."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from pathlib import Path

import pytest
from hypothesis import given, settings
from oracles.drawn_modules import modules

from penstock.commands.parser import main
from penstock.inspection.memory.curves import memory_curves
from penstock.inspection.subject import Subject, load_module
from penstock.inspection.summary import summarize
from penstock.inspection.views import colours
from penstock.inspection.views.schedule_grid import format_grid
from penstock.inspection.views.text import _heights, show_memory
from penstock.ir.graph import Module
from penstock.ir.memory.predict import measure_memory
from penstock.ir.ops import cost_of
from penstock.ir.text import print_module
from penstock.passes.costs.prices import rank_seconds
from penstock.passes.simulator.forecast import forecast, seconds_of


def _plain(text: str) -> str:
    """Text without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


@settings(max_examples=30, deadline=None)
@given(modules())
def test_colours_change_no_letter(module: Module) -> None:
    text = print_module(module)
    painted = colours.paint_ir(text)
    assert _plain(painted) == text
    assert painted != text
    assert _plain(colours.paint_schedule(text)) == text
    assert _plain(colours.paint_changes(text)) == text


@pytest.mark.parametrize(
    ("no_color", "term", "expected"), [("", "xterm", True), ("1", "xterm", False), ("", "dumb", False)]
)
def test_colours_are_for_terminals_that_want_them(
    no_color: str,
    term: str,
    expected: bool,
    built: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    monkeypatch.setenv("NO_COLOR", no_color)
    monkeypatch.setenv("TERM", term)
    words = ["inspect", str(built / "bundle"), "--graph", "s0.F"]
    assert main(words) == 0
    assert "\x1b" not in capsys.readouterr().out, "no terminal"
    monkeypatch.setenv("COLUMNS", "150")
    monkeypatch.setattr("sys.stdout.isatty", lambda: True)
    assert main(words) == 0
    assert ("\x1b" in capsys.readouterr().out) == expected


def test_the_summary_counts_what_is_there(bundle: Subject) -> None:
    module, facts = bundle.module, summarize(bundle.module)
    assert module.schedule is not None
    for row in facts.stages:
        graphs = [g for name, g in module.graphs.items() if name.startswith(f"s{row.stage}.")]
        assert row.operations == sum(len(g.ops) for g in graphs)
        work = sum(cost_of(op).flops * (1 if g.name.endswith("U") else 3) for g in graphs for op in g.ops)
        assert row.flops == pytest.approx(work, rel=1e-12)
        assert row.peak == measure_memory(module)[row.stage].peak
        assert row.seconds == pytest.approx(bundle.plan["predicted"]["busy_s"][str(row.stage)], rel=1e-12)
    assert [(m.source, m.target, m.nbytes) for m in facts.messages] == [
        (e.src, e.dst, sum(v.type.nbytes for v in e.values)) for e in module.edges
    ]


def test_every_view_of_every_dump(built: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for path in sorted((built / "dumps").glob("*.ir")):
        assert main(["inspect", str(path)]) == 0
        assert main(["inspect", str(path), "--params", "--op", "matmul"]) == 0
    # From the pass `schedule` on: what a plan that does not fit leaves ends before drops are known.
    curves = {
        path.name: main(["inspect", str(path), "--memory"]) for path in sorted((built / "dumps").glob("[01][0-9]_*.ir"))
    }
    first = next(i for i, name in enumerate(curves) if "_schedule" in name)
    assert list(curves.values()) == [2] * first + [0] * (len(curves) - first)
    capsys.readouterr()
    assert main(["inspect", str(built / "dumps")]) == 0
    last = capsys.readouterr().out
    assert main(["inspect", str(built / "bundle" / "module.ir")]) == 0
    assert last.endswith(capsys.readouterr().out)
    for words in (["--json"], ["--memory", "--json"], ["--kernels", "--json"], ["--params", "--json"]):
        assert main(["inspect", str(built / "bundle"), *words]) == 0
        assert json.loads(capsys.readouterr().out)


def test_curves_are_those_of_the_simulation(bundle: Subject) -> None:
    module = bundle.module
    made = forecast(module, seconds_of(module, rank_seconds(module)), 2)
    for curve in memory_curves(module, 2):
        assert [(p.seconds, float(p.live)) for p in curve.points] == made.curves()[curve.rank]
        assert max(p.held for p in curve.points) <= curve.memory.peak
    # Before messages are made there are no times, but the same actions.
    untimed = memory_curves(module.but(cluster=None), 2)
    assert [[p.action for p in c.points] for c in untimed] == [
        [p.action for p in c.points] for c in memory_curves(module, 2)
    ]
    assert not untimed[0].timed


def test_a_plot_misses_no_peak(bundle: Subject) -> None:
    for curve in memory_curves(bundle.module, 2):
        for columns in (3, 17, 80):
            heights = _heights([(point.seconds, point.live) for point in curve.points], columns)
            assert max(heights) == curve.most_live.live
            assert 0 not in heights
    text = show_memory(memory_curves(bundle.module, 2), 80)
    assert max(map(len, (line for line in text.splitlines() if "┤" in line))) <= 80


def test_a_grid_that_is_too_wide_goes_on_below(bundle: Subject) -> None:
    schedule = bundle.module.schedule
    assert schedule is not None
    whole, wrapped = format_grid(schedule, 3), format_grid(schedule, 3, width=60)
    assert max(map(len, wrapped.splitlines()[:-1])) <= 60 < max(map(len, whole.splitlines()))
    for rank in schedule.ranks:
        cells = [
            " ".join(x.partition("| ")[2] for x in text.splitlines() if x.startswith(f"rank {rank} |")).split()
            for text in (whole, wrapped)
        ]
        assert cells[0] == cells[1]


def test_looking_loads_none_of_the_heavy_libraries(built: Path) -> None:
    """In one fresh process; the control is a view that has to read the source model."""
    code = (
        "import sys\nfrom penstock.commands.parser import main\n"
        "def heavy(): return [n for n in ('torch', 'tvm', 'onnx', 'onnxruntime') if n in sys.modules]\n"
        f"look = lambda *words: main(['inspect', {str(built / 'bundle')!r}, *words])\n"
        "assert [look(*v) for v in ((), ('--memory',), ('--schedule',), ('--params',), ('--kernels',), ('--flow', 's0.F'))] == [0] * 6\n"
        f"assert look('--export', {str(built / 'light.dot')!r}, '--export', {str(built / 'light.csv')!r}) == 0\n"
        "assert not heavy(), heavy()\n"
        "assert look('--why', 'h.0.mlp.gelu') == 0\n"
        "assert heavy() == ['onnx'], heavy()\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr


def test_stages_on_several_devices_and_programs_that_do_not_train(
    built: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    common = ["compile", str(built / "gpt.onnx"), "--dim", "batch=2", "--backend", "numpy"]
    training = ["--loss", "mse", "--devices", "4", "--stages", "2", "--replicas", "2", "--microbatches", "4"]
    assert main([*common, *training, "-o", str(tmp_path / "replicas")]) == 0
    assert main([*common, "--devices", "2", "-o", str(tmp_path / "forward")]) == 0
    module = load_module(tmp_path / "replicas")
    facts = summarize(module)
    assert [row.devices for row in facts.stages] == [("cpu:0", "cpu:1"), ("cpu:2", "cpu:3")]
    assert [curve.device for curve in memory_curves(module, 1)] == ["cpu:0", "cpu:1", "cpu:2", "cpu:3"]
    for name in ("replicas", "forward"):
        exported = [
            word
            for suffix in ("dot", "onnx", "csv", "json")
            for word in ("--export", str(tmp_path / f"{name}.{suffix}"))
        ]
        assert (
            main(
                [
                    "inspect",
                    str(tmp_path / name),
                    "--memory",
                    "--params",
                    "--schedule",
                    "--flow",
                    "s1",
                    "--why",
                    "logits",
                    *exported,
                ]
            )
            == 0
        )
        out = capsys.readouterr().out
        assert "@s1.F" in out
        assert "partition" in out
