"""Tests of the output of notebooks: read by an HTML parser, names that look like markup are text, and plain text says
it in a line."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from html.parser import HTMLParser
from pathlib import Path

import pytest
from hypothesis import given, settings
from oracles.drawn_modules import modules

import penstock as ps
from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.commands.parser import main
from penstock.inspection import html
from penstock.inspection.notebook import plan_html
from penstock.inspection.subject import Subject
from penstock.inspection.traces.trace import ActionSpan, RankRow, Trace, load_trace
from penstock.ir.graph import Graph, Module, Note, Op, Value, Var
from penstock.ir.text import print_module
from penstock.ir.types import parse_type
from penstock.planning.plan import plan_line

_KNOWN = {
    "div",
    "b",
    "table",
    "thead",
    "tbody",
    "tr",
    "th",
    "td",
    "details",
    "summary",
    "pre",
    "svg",
    "text",
    "rect",
    "title",
}
HOSTILE = '<script>alert(1)</script><img src=x onerror="alert(2)">&amp;\'"'


class Reader(HTMLParser):
    """Whether every element that is opened is closed; kinds of elements, their attributes, and the text."""

    def __init__(self, text: str) -> None:
        super().__init__(convert_charrefs=True)
        self.open: list[str] = []
        self.balanced = True
        self.kinds: set[str] = set()
        self.attributes: set[str] = set()
        self.said: list[str] = []
        self.feed(text)
        self.close()
        self.balanced &= not self.open

    def handle_starttag(self, tag: str, attrs: Sequence[tuple[str, str | None]]) -> None:
        self.open.append(tag)
        self.kinds.add(tag)
        self.attributes |= {name for name, _ in attrs}

    def handle_endtag(self, tag: str) -> None:
        self.balanced &= bool(self.open) and self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        self.said.append(data)

    @property
    def text(self) -> str:
        return "".join(self.said)

    @property
    def is_inert(self) -> bool:
        return (
            self.balanced
            and self.kinds <= _KNOWN
            and not any(name.startswith("on") or name in ("src", "href", "style") for name in self.attributes)
        )


def hostile_module() -> Module:
    """Names that no parser would let through, but Python does."""
    value = Value(HOSTILE, parse_type("f32[2]"))
    graph = Graph(
        HOSTILE, (value,), (value,), (Op(HOSTILE, (value,), (Value("y", value.type),), {"a": HOSTILE}, HOSTILE),)
    )
    return Module(
        HOSTILE,
        (value,),
        (HOSTILE,),
        vars={HOSTILE: Var(HOSTILE, value.type, "param")},
        graphs={HOSTILE: graph},
        notes=(Note("partition", HOSTILE),),
    )


@pytest.mark.parametrize("show", [Module._repr_html_, plan_html])
def test_names_are_text_whatever_they_look_like(show) -> None:  # type: ignore[no-untyped-def]
    found = Reader(show(hostile_module()))
    assert found.is_inert
    assert HOSTILE in found.text
    # The control: without escaping it is not.
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(html, "escape", lambda text: text)
        assert not Reader(html.module_html(hostile_module())).is_inert


def test_a_trace_is_text_whatever_it_says() -> None:
    trace = Trace(Path(HOSTILE), (RankRow(HOSTILE, (ActionSpan(HOSTILE, "F", 0.0, 1.0),)),))
    found = Reader(trace._repr_html_())
    assert found.is_inert
    assert found.text.count(HOSTILE) >= 3


@settings(max_examples=25, deadline=None)
@given(modules())
def test_every_module_can_be_shown(module: Module) -> None:
    found = Reader(module._repr_html_())
    assert found.is_inert
    assert "\n" not in repr(module)
    assert len(repr(module)) < 1000
    if len(print_module(module).splitlines()) <= 300:
        assert print_module(module).strip() in found.text


def test_a_large_module_is_cut() -> None:
    value = parse_type("f32[2]")
    ops = tuple(Op("relu", (Value(f"v{i}", value),), (Value(f"v{i + 1}", value),)) for i in range(50_000))
    module = Module(
        "large", graphs={f"g{i}": Graph(f"g{i}", (Value("v0", value),), (), ops if not i else ()) for i in range(100)}
    )
    shown = module._repr_html_()
    assert len(shown) < 100_000
    assert "and 40 more rows" in shown
    assert "more lines" in shown


def test_a_bundle_shows_its_ranks_and_a_broken_one_what_is_wrong(built: Path) -> None:
    bundle = open_bundle(built / "bundle")
    found = Reader(bundle._repr_html_())
    assert found.is_inert
    assert "cpu:1" in found.text
    assert "back end numpy, 2 ranks" in repr(bundle)
    broken = Bundle(built / "dumps", bundle.manifest)
    (built / "dumps" / "module.ir").write_text("nonsense")
    try:
        assert "expected 'module @name" in Reader(broken._repr_html_()).text
    finally:
        (built / "dumps" / "module.ir").unlink()


def test_a_plan_shows_what_inspect_does(built: Path, bundle: Subject) -> None:
    model = ps.from_onnx(built / "gpt.onnx", dims={"batch": 2})
    training = ps.Training(loss="cross_entropy", microbatches=2)
    plan = ps.plan(model, ps.Cluster.local(2), training)
    text = Reader(plan._repr_html_()).text
    assert "stage 1 on cpu:1" in text
    assert "partition: stage 0 on cpu:0" in text
    assert repr(plan) == f"<{plan_line(plan.module)}>"
    assert repr(model).startswith("<imported module gpt: ")
    assert Reader(model._repr_html_()).is_inert


def test_a_trace_of_a_simulated_run(built: Path, tmp_path: Path) -> None:
    assert main(["inspect", str(built / "bundle"), "--export", str(tmp_path / "t.json")]) == 0
    trace = load_trace(tmp_path / "t.json")
    assert [row.name for row in trace.rows] == ["rank 0 (stage 0, cpu:0)", "rank 1 (stage 1, cpu:1)"]
    boxes = [span for row in trace.rows for span in row.spans if span.kind in ("F", "B", "U")]
    assert trace._repr_html_().count("<rect") == len(boxes) > 10
    assert "2 ranks" in repr(trace)
    for text in ("[]", "{", '{"traceEvents": [{"ph": "X"}]}', '{"traceEvents": 3}'):
        (tmp_path / "wrong.json").write_text(text)
        with pytest.raises(ps.PenstockError, match="cannot read it as a trace"):
            load_trace(tmp_path / "wrong.json")


def test_what_is_equal_is_still_equal(bundle: Subject) -> None:
    """Showing is all that changed: modules are compared by what they hold."""
    assert replace(bundle.module) == bundle.module
    assert bundle.module.but(name="other") != bundle.module
