"""Pipelines: their text, facts, dumps that can be continued, and the reproducer of a failure."""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import pytest

from penstock.inspection.dump import Dump
from penstock.ir.graph import Graph, Module, Value
from penstock.ir.ops import make
from penstock.ir.text import parse_module, print_module
from penstock.ir.types import parse_type
from penstock.passes.manager import Call, Pass, parse_pipeline, print_pipeline, run_passes
from penstock.passes.pipelines import PASSES
from penstock.support.errors import UsageError, VerifyError


@dataclass(frozen=True, slots=True)
class Options:
    needed: int
    name: str = "x"
    scale: float = 1.0
    names: tuple[str, ...] = ()
    on: bool = False


@dataclass(frozen=True, slots=True)
class Nothing:
    pass


def note(module: Module, options: Options) -> Module:
    """Leave a note."""
    return module.noted("note", f"{options.name} {options.needed}")


def idle(module: Module, options: Nothing) -> Module:
    """Change nothing."""
    return module


def wreck(module: Module, options: Nothing) -> Module:
    """Drop the operations of every graph: a broken pass."""
    return module.but(graphs={n: Graph(n, g.ins, g.outs, ()) for n, g in module.graphs.items()})


TABLE = {
    row.name: row
    for row in (
        Pass("note", note, Options),
        Pass("idle", idle, Nothing),
        Pass("wreck", wreck, Nothing),
        Pass("need", idle, Nothing, needs=("typed",)),
        Pass("give", idle, Nothing, gives=("typed",)),
    )
}


def module() -> Module:
    x = Value("x", parse_type("f32[2]"))
    op = make("relu", (x,), ["y"])
    return Module("m", (x,), ("y",), graphs={"main": Graph("main", (x,), op.outs, (op,))})


def test_pipeline_text_round_trips_and_hides_defaults() -> None:
    text = 'note{needed=3,name="a,b}",scale=2.0,names=[p,q]},idle,note{needed=1}'
    calls = parse_pipeline(text, TABLE)
    assert calls[0] == Call("note", Options(3, "a,b}", 2.0, ("p", "q")))
    assert print_pipeline(calls) == text
    assert parse_pipeline(" note{ needed=1 , on=false } , idle{} ", TABLE) == parse_pipeline(
        "note{needed=1},idle", TABLE
    )
    assert parse_pipeline("", TABLE) == []
    assert str(parse_pipeline("note{needed=1,name=2bw}", TABLE)[0]) == "note{needed=1,name=2bw}"
    assert parse_pipeline('note{needed=1,name="true"}', TABLE)[0].options.name == "true"


def test_all_problems_of_a_pipeline_are_listed_at_once() -> None:
    with pytest.raises(UsageError) as caught:
        parse_pipeline("nope,note{size=3},note{needed=1,on=3},idle{x=1}", TABLE)
    message = str(caught.value)
    for part in (
        "unknown pass 'nope'",
        "unknown option 'size'",
        "option needed is missing",
        "option on must be bool, got 3",
        "idle: unknown option 'x'",
    ):
        assert part in message


def test_passes_must_agree_on_the_number_of_microbatches() -> None:
    """Gradients are divided by the number of one pass and added up as often as another says."""
    text = "autodiff{microbatches=4},split,schedule{kind=gpipe,microbatches=2}"
    with pytest.raises(
        UsageError, match="microbatches must be one number in all passes: autodiff has 4, schedule has 2"
    ):
        parse_pipeline(text, PASSES)
    assert len(parse_pipeline(text.replace("=2", "=4"), PASSES)) == 3
    with pytest.raises(UsageError, match="autodiff has 1, schedule has 2"):
        parse_pipeline("autodiff,split,schedule{microbatches=2}", PASSES)


@pytest.mark.parametrize("text", ["note{needed=1", "note needed", "{a=1}", "note{needed=1}}"])
def test_unreadable_pipelines(text: str) -> None:
    with pytest.raises(UsageError, match="cannot read the pipeline"):
        parse_pipeline(text, TABLE)


def test_facts_are_needed_and_given() -> None:
    with pytest.raises(UsageError, match="needs the fact 'typed'") as caught:
        run_passes(module(), parse_pipeline("need", TABLE), TABLE)
    assert "run give before it" in str(caught.value)
    assert run_passes(module(), parse_pipeline("give,need", TABLE), TABLE).facts == ("typed",)


def test_every_dump_parses_and_can_be_continued(tmp_path: Path) -> None:
    final = run_passes(
        module(), parse_pipeline("note{needed=1},idle,note{needed=2},give", TABLE), TABLE, dump=Dump(tmp_path)
    )
    assert sorted(p.name for p in tmp_path.glob("*.ir")) == ["00_input.ir", "01_note.ir", "03_note.ir", "04_give.ir"]
    rows = [line.split("\t") for line in (tmp_path / "passes.tsv").read_text().splitlines()[1:]]
    for row in rows:
        path = tmp_path / f"{int(row[0]):02d}_{row[1].split('{')[0]}.ir"
        if not path.exists():
            assert row[5] == "no"
            continue
        text = path.read_text()
        assert print_module(parse_module(text)) == text
        assert run_passes(parse_module(text), parse_pipeline(row[6], TABLE), TABLE) == final
    events = [json.loads(line) for line in (tmp_path / "events.jsonl").read_text().splitlines()]
    assert [e["changed"] for e in events] == [True, False, True, True]


def test_a_broken_pass_is_named_and_leaves_a_reproducer(tmp_path: Path) -> None:
    with pytest.raises(VerifyError) as caught:
        run_passes(module(), parse_pipeline("note{needed=1},wreck,idle", TABLE), TABLE, dump=Dump(tmp_path))
    assert "pass wreck" in str(caught.value)
    text = (tmp_path / "repro.ir").read_text()
    assert text.startswith("// penstock opt repro.ir -p 'wreck'\n")
    before = parse_module(text)
    assert before.notes[0].text == "x 1"
    with pytest.raises(VerifyError):
        run_passes(before, parse_pipeline("wreck", TABLE), TABLE)


def test_a_new_dump_replaces_an_old_one(tmp_path: Path) -> None:
    run_passes(module(), parse_pipeline("note{needed=1},give", TABLE), TABLE, dump=Dump(tmp_path))
    run_passes(module(), parse_pipeline("give", TABLE), TABLE, dump=Dump(tmp_path))
    assert sorted(p.name for p in tmp_path.glob("*.ir")) == ["00_input.ir", "01_give.ir"]
