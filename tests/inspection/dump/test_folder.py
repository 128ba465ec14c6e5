"""Tests of the dump folder: its files come from the module, can be read again, and record all passes. Oracles are the
module itself, and a whole dump for one that leaves things out."""

from __future__ import annotations

import json
import re
import subprocess
import sys
from collections.abc import Callable
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.drawn_modules import modules

import penstock as ps
from penstock.commands.parser import main
from penstock.inspection.diff import differences
from penstock.inspection.dump import Dump, step_of
from penstock.inspection.dump.parts import excerpt
from penstock.ir.graph import Graph, Module, Op, Value
from penstock.ir.schedule import Action
from penstock.ir.text import parse_module, print_module, print_op
from penstock.ir.types import TensorType
from penstock.ir.verify.verifier import verify
from penstock.models import write_mlp
from penstock.support.errors import UsageError


def compiled(folder: Path, dump: Dump) -> ps.Plan:
    """A small model for two stages, one of two ranks, compiled without a compiler."""
    with step_of(dump, "import"):
        model = ps.from_onnx(write_mlp(folder / "mlp.onnx", [8, 16, 4]), dims={"batch": 2})
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.1), microbatches=4)
    plan = ps.plan(
        model, ps.Cluster.local(3), training, schedule="2bw", devices=[["cpu:0", "cpu:1"], ["cpu:2"]], dump=dump
    )
    ps.compile(plan, folder / "bundle", backend="numpy", dump=dump)
    return plan


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Module]:
    folder = tmp_path_factory.mktemp("whole")
    return folder / "d", compiled(folder, Dump(folder / "d")).module


def load(path: Path) -> Module:
    return parse_module(path.read_text(encoding="utf-8"), str(path))


def passes_of(folder: Path) -> list[Path]:
    return sorted(folder.glob("[0-9][0-9]_*.ir"))


def test_every_module_is_one(whole: tuple[Path, Module]) -> None:
    files = sorted(whole[0].rglob("*.ir"))
    assert len(files) > 12
    for path in files:
        module = load(path)
        verify(module)
        assert print_module(module) == path.read_text(encoding="utf-8")


def test_parts_make_up_the_module(whole: tuple[Path, Module]) -> None:
    folder, module = whole
    stages = [load(path) for path in sorted(folder.glob("stages/*/module.ir"))]
    ranks = {int(path.parent.name[1:]): load(path) for path in folder.glob("ranks/*/module.ir")}
    assert {name: graph for part in stages for name, graph in part.graphs.items()} == module.graphs
    assert sum(len(part.graphs) for part in stages) == len(module.graphs)
    assert {name: var for part in stages for name, var in part.vars.items()} == module.vars
    assert {edge for part in stages for edge in part.edges} == {*module.edges}
    assert module.schedule is not None
    assert {rank: part.schedule.ranks for rank, part in ranks.items() if part.schedule} == {
        rank: {rank: program} for rank, program in module.schedule.ranks.items()
    }
    assert [list(ranks[rank].graphs) for rank in (0, 1)] == [list(stages[0].graphs)] * 2
    # The control: one stage is not the module.
    assert stages[0].graphs != module.graphs
    for rank, program in module.schedule.ranks.items():
        rows = [line.split("\t") for line in (folder / f"ranks/r{rank}/actions.tsv").read_text().splitlines()[1:]]
        assert [(row[0], Action.parse(row[1])) for row in rows] == [
            *(("start", a) for a in program.start),
            *(("batch", a) for a in program.batch),
        ]
        edges = [edge for edge in module.edges if edge.phase == "F"]
        sent = [row[2] for row in rows if Action.parse(row[1]).kind == "SF"]
        assert all(f"send to rank 2: %{edges[0].values[0].name} of microbatch" in does for does in sent)


def test_events_say_what_the_table_says_and_what_passes_noted(whole: tuple[Path, Module]) -> None:
    folder, module = whole
    events = [json.loads(line) for line in (folder / "events.jsonl").read_text().splitlines()]
    passes, steps = ([e for e in events if e["event"] == kind] for kind in ("pass", "step"))
    assert [step["name"] for step in steps] == ["import", "parts", "bundle", "report"]
    assert [e["start"] for e in events] == sorted(e["start"] for e in events)
    rows = [line.split("\t") for line in (folder / "passes.tsv").read_text().splitlines()[2:]]
    assert [[str(e["number"]), e["call"], str(e["ops_before"]), str(e["ops_after"]), e["rest"]] for e in passes] == [
        [row[0], row[1], row[3], row[4], row[6]] for row in rows
    ]
    assert [e["file"] for e in passes if e["changed"]] == [path.name for path in passes_of(folder)[1:]]
    before = len(load(folder / "00_input.ir").notes)
    assert [text for e in passes for text in e["said"]] == [note.text for note in module.notes[before:]]
    assert json.loads((folder / "plan.json").read_text()) == json.loads(
        (folder.parent / "bundle" / "plan.json").read_text()
    )
    assert (folder / "schedule.svg").read_text().startswith("<svg ")


def test_a_filter_keeps_the_lines_that_match(whole: tuple[Path, Module], tmp_path: Path) -> None:
    pattern = r"(_autodiff|_fuse|^stages/s0/module) @(s0[.])?F .* = matmul"
    compiled(tmp_path, Dump(tmp_path / "d", only=pattern))
    lines: dict[str, list[str]] = {}
    for path in sorted(whole[0].rglob("*.ir")):
        stem = path.relative_to(whole[0]).as_posix().removesuffix(".ir")
        for name, graph in load(path).graphs.items():
            lines[stem] = lines.get(stem, []) + [
                print_op(op) for op in graph.ops if re.search(pattern, f"{stem} @{name} {print_op(op)}")
            ]
    found = {
        path.relative_to(tmp_path / "d").as_posix().removesuffix(".ir"): [
            print_op(op) for g in load(path).graphs.values() for op in g.ops
        ]
        for path in (tmp_path / "d").rglob("*.ir")
    }
    assert found == {stem: kept for stem, kept in lines.items() if kept}
    assert [stem.partition("_")[2] or stem for stem in sorted(found)] == ["autodiff", "fuse", "stages/s0/module"]
    assert sum(map(len, found.values())) >= 3
    for path in (tmp_path / "d").rglob("*.ir"):
        verify(load(path))
    # What was not written is said to be so.
    events = [json.loads(line) for line in (tmp_path / "d" / "events.jsonl").read_text().splitlines()]
    assert [e["name"] for e in events if e.get("file")] == ["autodiff", "fuse"]


def test_changes_are_the_differences_of_the_modules(
    whole: tuple[Path, Module], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    compiled(tmp_path, Dump(tmp_path / "d", changed=True))
    assert [path.name for path in passes_of(tmp_path / "d")] == ["00_input.ir"]
    dumps = [load(path) for path in passes_of(whole[0])]
    expected = ["\n".join(differences(a, b)) + "\n" for a, b in pairwise(dumps)]
    written = sorted((tmp_path / "d").glob("*.diff"))
    assert [path.read_text() for path in written] == expected
    assert [path.stem for path in written] == [path.stem for path in passes_of(whole[0])[1:]]
    compiled(tmp_path, Dump(None, changed=True))
    printed = capsys.readouterr().err
    assert printed == "".join(f"--- {path.stem}\n{text}" for path, text in zip(written, expected, strict=True))


@given(modules(), st.data())
@settings(max_examples=40, deadline=None)
def test_an_excerpt_has_what_was_wanted_and_stands_alone(module: Module, data: st.DataObject) -> None:
    ops = [op for graph in module.graphs.values() for op in graph.ops]
    wanted = data.draw(st.integers(0, 2 ** len(ops) - 1))
    kept = {id(op) for i, op in enumerate(ops) if wanted >> i & 1}
    part = excerpt(module, lambda graph, op: id(op) in kept)
    for name, graph in module.graphs.items():
        own = [op for op in graph.ops if id(op) in kept]
        if name in part.graphs:
            assert list(part.graphs[name].ops) == own
        else:
            assert not own
    for name, graph in part.graphs.items():
        used = {v for op in graph.ops for v in op.ins}
        assert graph is module.graphs[name] or all(v in used or v in graph.outs for op in graph.ops for v in op.outs)
    # What a graph uses and does not make is an input of it: the parser refuses anything else.
    assert parse_module(print_module(part)) == part
    if len(kept) == len(ops):
        assert part is module


def test_an_excerpt_changes_no_graph_of_which_all_is_wanted() -> None:
    x, y = (Value(name, TensorType("f32", (4,))) for name in "xy")
    graph = Graph("f", (x,), (x,), (Op("relu", (x,), (y,)),), (y,))
    cut = Graph("g", (x,), (y,), (Op("relu", (x,), (y,)), Op("exp", (y,), (Value("z", y.type),))))
    part = excerpt(Module("m", graphs={"f": graph, "g": cut}), lambda name, op: name == "f" or op.kind == "exp")
    assert part.graphs["f"] is graph
    assert print_module(part).splitlines()[6:10] == [
        "  graph @g(%y : f32[4]) {",
        "    %z : f32[4] = exp(%y)",
        "    return %z",
        "  }",
    ]


def test_a_dump_replaces_the_one_before_it_and_nothing_else(whole: tuple[Path, Module], tmp_path: Path) -> None:
    place = tmp_path / "d"
    place.mkdir()
    (place / "notes.txt").write_text("mine")
    compiled(tmp_path, Dump(place))
    Dump(place)
    assert [path.name for path in place.iterdir()] == ["notes.txt"]
    with pytest.raises(UsageError, match="is a bundle"):
        Dump(whole[0].parent / "bundle")
    assert (whole[0].parent / "bundle" / "manifest.json").exists()
    with pytest.raises(UsageError, match="cannot be written"):
        Dump(place / "notes.txt")


def tree(folder: Path) -> dict[str, str | None]:
    return {
        path.relative_to(folder).as_posix(): path.read_text() if path.is_file() else None for path in folder.rglob("*")
    }


MINE = (
    "mine.txt",
    "stages/notes.txt",
    "stages/s0/notes.txt",
    "stages/s0/kernels/notes.txt",
    "stages/s9.so",
    "ranks/old/module.ir",
    "1_a.ir",
)


def test_files_of_others_stay_whatever_dumps_come_and_go(whole: tuple[Path, Module], tmp_path: Path) -> None:
    """Also those in the folders of dumps, and folders that were there before; a dump that begins again is its own older one."""
    place = tmp_path / "d"
    for name in ("ranks/r0", "stages/s0/kernels"):
        (place / name).mkdir(parents=True)
    before = tree(place)
    dump = Dump(place)
    for _ in range(2):
        dump.begin(Module("m"), "")
        dump.write("stages/s0/module.ir", "x")
        dump.write("stages/s1/module.ir", "x")
        dump.write("ranks/r1/module.ir", "x")
    listed = {line for line in (place / "dump-files.txt").read_text().splitlines()[1:] if line[-1] != "/"}
    assert listed == {name for name, text in tree(place).items() if text is not None}
    Dump(place)
    assert tree(place) == before
    for round in range(3):
        dump = Dump(place)
        dump.write("stages/s0/kernels/k.py", "x")
        dump.write("events.jsonl", "x")
        for name in MINE if round == 0 else ():
            (place / name).parent.mkdir(parents=True, exist_ok=True)
            (place / name).write_text("mine")
        assert tree(place)["stages/s0/kernels/k.py"] == "x"
    Dump(place)
    after = tree(place)
    assert {name for name, text in after.items() if text == "mine"} == {*MINE}
    assert all(text is None for name, text in after.items() if name not in MINE)
    # The whole dump lists what it has.
    assert {line for line in (whole[0] / "dump-files.txt").read_text().splitlines()[1:] if line[-1] != "/"} == {
        name for name, text in tree(whole[0]).items() if text is not None
    }


@pytest.mark.parametrize("dumped", [False, True])
@pytest.mark.parametrize(
    "name",
    [
        *(
            "index.html",
            "plan.json",
            "schedule.svg",
            "passes.tsv",
            "repro.ir",
            "10_notes.ir",
            "03_a.diff",
            "stages",
            "ranks/r0",
        ),
        *("stages/s0/module.ir", "stages/s7/kernels/mine.py", "ranks/r0/actions.tsv"),
        *("events.jsonl", "dump-files.txt"),
    ],
)
def test_a_dump_writes_over_nothing_of_others(
    tmp_path: Path, name: str, dumped: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    place, model = tmp_path / "d", write_mlp(tmp_path / "mlp.onnx", [8, 4], batch=2)
    place.mkdir()
    if dumped:
        Dump(place).write("00_input.ir", "x")
    (place / name).parent.mkdir(parents=True, exist_ok=True)
    (place / name).write_text("mine")
    before = tree(place)
    words = [
        "compile",
        str(model),
        "-o",
        str(tmp_path / "bundle"),
        "--devices",
        "1",
        "--loss",
        "mse",
        "--dump-ir",
        str(place),
    ]
    assert main(words) == 2
    assert (
        f"would write over {'00_input.ir, ' if name == 'dump-files.txt' and dumped else ''}{name}"
        in capsys.readouterr().err
    )
    assert tree(place) == before
    assert not (tmp_path / "bundle").exists()


def test_lists_of_strangers_do_not_lead_out_of_the_folder(tmp_path: Path) -> None:
    place, other = tmp_path / "d", tmp_path / "stages"
    Dump(place).write("events.jsonl", "x")
    (other / "s0").mkdir(parents=True)
    names = [
        "../stages/s0/module.ir",
        str(other / "s0/module.ir"),
        "stages/s0/../../../stages/s0/module.ir",
        "notes.txt",
        "stages/s0/module.ir",
    ]
    for path in (other / "s0/module.ir", place / "notes.txt"):
        path.write_text("mine")
    with (place / "dump-files.txt").open("a") as file:
        file.write("".join(f"{line}\n" for name in names for line in (name, str(Path(name).parent) + "/")))
    (place / "stages").symlink_to(other)
    with pytest.raises(UsageError, match="would write over stages,"):
        Dump(place)
    (place / "stages").unlink()
    (place / "stages/s0").mkdir(parents=True)
    (place / "stages/s0/module.ir").symlink_to(other / "s0/module.ir")
    with pytest.raises(UsageError, match=r"would write over stages/s0/module\.ir,"):
        Dump(place)
    assert (place / "events.jsonl").exists()
    (place / "stages/s0/module.ir").unlink()
    Dump(place)
    assert tree(place) == {"notes.txt": "mine", "stages": None}
    assert (other / "s0/module.ir").read_text() == "mine"


def test_a_failed_step_is_in_the_events(tmp_path: Path) -> None:
    def read_half(dump: Dump) -> None:
        with dump.step("import") as said:
            said.append("read half of it")
            raise UsageError("no such file")

    with pytest.raises(UsageError):
        read_half(Dump(tmp_path))
    (event,) = map(json.loads, (tmp_path / "events.jsonl").read_text().splitlines())
    assert (event["name"], event["said"]) == ("import", ["read half of it", "failed: no such file"])


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (lambda d: ["--dump-ir-filter", "x"], "without a dump to filter"),
        (lambda d: ["--dump-ir", d / "out", "--dump-ir-filter", "("], "bad pattern '('"),
        (lambda d: ["--dump-ir", d], "a dump may take its place"),
    ],
)
def test_what_makes_no_sense_is_said_before_anything_is_touched(
    whole: tuple[Path, Module], words: Callable[[Path], list[str | Path]], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    before = sorted(whole[0].rglob("*"))
    file = next(whole[0].glob("*_split.ir"))
    assert main(["opt", str(file), "-p", "schedule{kind=2bw,microbatches=4}", *map(str, words(whole[0]))]) == 2
    assert part in capsys.readouterr().err
    assert sorted(whole[0].rglob("*")) == before


def test_nothing_is_loaded_where_nothing_is_dumped(tmp_path: Path) -> None:
    code = f"""
import sys, penstock as ps
from penstock.models import write_mlp
model = ps.from_onnx(write_mlp({str(tmp_path / "m.onnx")!r}, [4, 4, 2]), dims={{"batch": 2}})
ps.compile(ps.plan(model, ps.Cluster.local(1), ps.Training(loss="mse")), {str(tmp_path / "b")!r}, backend="numpy")
print("penstock.inspection.dump" in sys.modules)
"""
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=True)
    assert done.stdout.splitlines()[-1] == "False"
