"""Tests that every pass has the results of hashes.txt on the corpus, and that the comparison can fail."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.ir.graph import Module
from penstock.passes.pipelines import PASSES
from penstock.passes.schedules.schedule import PACK_SCHEDULES, SCHEDULES
from replay import replay
from replay.corpus import CASES, modules_of
from replay.replay import HASHES, SAME, changed, hashed, hashes_of, keep, main, read_hashes, told, write_hashes

KNOWN = read_hashes()
HOW = """the change is seen with    python tests/replay/replay.py --diff {name}    (--against REV: another commit than the last)
if it is meant, accept it with    python tests/replay/replay.py --accept    and say in the commit why"""


@pytest.mark.filterwarnings("ignore")
@pytest.mark.parametrize("name", CASES)
def test_passes_make_what_they_made(name: str) -> None:
    line = changed(KNOWN.get(name, []), hashes_of(name))
    assert not line, f"{name}: {line}\n{HOW.format(name=name)}"


def test_the_file_has_these_models_and_no_others(tmp_path: Path) -> None:
    assert list(KNOWN) == list(CASES)
    write_hashes(KNOWN, tmp_path / "again.txt")
    assert (tmp_path / "again.txt").read_bytes() == HASHES.read_bytes()


def test_the_corpus_uses_every_pass_and_every_schedule() -> None:
    used = {step.partition(" ")[2] for steps in KNOWN.values() for step, code in steps if code != SAME}
    assert used == {"input", *PASSES}
    assert {case.schedule for case in CASES.values()} == {*SCHEDULES, *PACK_SCHEDULES}


# ---------------------------------------------------------------------------------------- controls

SMALL = "mlp-2bw"


def test_a_changed_pass_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """A pass that gives an operation another attribute, as a refactoring might by mistake."""

    def mutated(module: Module) -> Module:
        graph = module.graphs["s0.F"]
        ops = (*graph.ops[:-1], graph.ops[-1].with_attrs(kernel="another"))
        return module.but(
            graphs={**module.graphs, "s0.F": type(graph)(graph.name, graph.ins, graph.outs, ops, graph.saved)}
        )

    row = PASSES["fuse"]
    monkeypatch.setitem(
        PASSES, "fuse", type(row)(row.name, lambda m, o: mutated(row.run(m, o)), row.options, row.needs, row.gives)
    )
    assert changed(KNOWN[SMALL], hashes_of(SMALL)) == "first change: 12 fuse"


def test_a_pass_that_is_left_out_is_named() -> None:
    assert changed(KNOWN[SMALL], KNOWN[SMALL][:-1]) == "the pipeline has other passes: - 13 lifetimes"


def test_a_pass_that_does_nothing_any_more_is_named() -> None:
    modules = list(modules_of(CASES[SMALL]))
    number = [call.partition("{")[0] for call, _ in modules].index("simplify", 2)
    idle = [(call, modules[number - 1][1] if i == number else module) for i, (call, module) in enumerate(modules)]
    assert changed(KNOWN[SMALL], hashed(idle)) == f"first change: {KNOWN[SMALL][number][0]}"


def test_what_changed_is_told(tmp_path: Path) -> None:
    """By name where both texts parse; line by line where one does not."""
    for folder in ("before", "now", "old"):
        keep(SMALL, tmp_path / folder)
    assert list(told(tmp_path / "before", tmp_path / "now")) == ["no step that both have differs"]
    file = next((tmp_path / "before").glob("*_schedule.ir"))
    text = file.read_text()
    file.write_text(text.replace("flops=50000000000.0", "flops=60000000000.0"))
    assert file.read_text() != text
    assert next(iter(told(tmp_path / "before", tmp_path / "now"))) == file.name
    assert any("[-flops=60000000000.0" in line for line in told(tmp_path / "before", tmp_path / "now"))
    (tmp_path / "old" / file.name).write_text(text.replace("module @", "modul @"))
    assert "+module @model" in "\n".join(told(tmp_path / "old", tmp_path / "now"))


def test_the_command_says_what_changed_and_accepts_it(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(replay, "HASHES", tmp_path / "hashes.txt")
    monkeypatch.setattr(replay, "CASES", {SMALL: CASES[SMALL]})
    monkeypatch.setattr(write_hashes, "__defaults__", (tmp_path / "hashes.txt",))
    monkeypatch.setattr(read_hashes, "__defaults__", (tmp_path / "hashes.txt",))
    write_hashes({SMALL: [*KNOWN[SMALL][:-1], ("13 lifetimes", "0" * 16)], "other": []})
    assert main([]) == 1
    assert capsys.readouterr().out == f"{SMALL}: first change: 13 lifetimes\nother: gone\n"
    assert main(["--accept"]) == 0
    capsys.readouterr()
    assert main([]) == 0
    assert capsys.readouterr().out == ""


def test_hashes_depend_on_nothing_around(tmp_path: Path) -> None:
    """Another order of sets, another place to work in, other cores and other instructions of the processor."""
    code = "\n".join(
        [
            "import os, sys",
            "os.sched_setaffinity(0, [min(os.sched_getaffinity(0))])",
            "from replay.replay import hashes_of",
            "for name in ('mlp-unequal', 'gpt-little-memory', 'resnet-1f1b', 'gru-1f1b', 'rich-1f1b'): print(name, hashes_of(name))",
        ]
    )
    paths = os.pathsep.join([str(Path(__file__).parents[1]), *filter(None, sys.path)])
    others = {
        "PYTHONHASHSEED": "4711",
        "NPY_DISABLE_CPU_FEATURES": "AVX2 FMA3",
        "PENSTOCK_CACHE": str(tmp_path),
        "LC_ALL": "C",
        "TZ": "Asia/Tokyo",
    }
    done = subprocess.run(
        [sys.executable, "-W", "ignore", "-c", code],
        cwd=tmp_path,
        env={**os.environ, **others, "PYTHONPATH": paths},
        text=True,
        capture_output=True,
        timeout=300,
    )
    assert done.returncode == 0, done.stderr
    for line in done.stdout.splitlines():
        name, _, steps = line.partition(" ")
        assert steps == str(KNOWN[name]), name
    assert len(done.stdout.splitlines()) == 5
