"""The text form: every module prints, parses back equal, and prints the same; errors name the line."""

from __future__ import annotations

import math

import pytest
from hypothesis import given, settings
from oracles.drawn_modules import actions, literals, modules, types

from penstock.ir.attrs import parse_literal, print_literal
from penstock.ir.graph import Graph, Module
from penstock.ir.ops import make
from penstock.ir.schedule import Action
from penstock.ir.text import parse_module, print_module
from penstock.ir.types import TensorType, parse_type
from penstock.support.errors import ParseError


@given(modules())
@settings(max_examples=60, deadline=None)
def test_print_and_parse_are_inverse(module: Module) -> None:
    text = print_module(module)
    again = parse_module(text)
    assert again == module
    assert print_module(again) == text


@given(types())
def test_types_round_trip(t: TensorType) -> None:
    assert parse_type(str(t)) == t


@given(literals)
def test_literals_round_trip_with_their_python_type(value: object) -> None:
    again = parse_literal(print_literal(value))  # type: ignore[arg-type]
    assert again == value
    assert type(again) is type(value)


def test_operations_that_hold_not_a_number_are_equal_where_they_print_alike() -> None:
    for value in (float("nan"), (1.0, float("nan"))):
        op = make("const", (), ["c"], value=value, dtype="f32", shape=() if isinstance(value, float) else (2,))
        module = Module("m", outputs=("c",), graphs={"main": Graph("main", (), op.outs, (op,))})
        assert parse_module(print_module(module)) == module


def test_not_a_number_round_trips() -> None:
    assert math.isnan(parse_literal(print_literal(float("nan"))))  # type: ignore[arg-type]
    assert parse_literal(print_literal("nan")) == "nan"


@given(actions())
def test_actions_round_trip(action: Action) -> None:
    assert Action.parse(str(action)) == action


@pytest.mark.parametrize(
    "text", ["", "F", "0F", "0X1", "0F1@", "0SF1", "0SF1<2", "0RF1>2", "0F1>2", "0F1@-1", " 0F1", "0F1 "]
)
def test_bad_actions_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="bad action"):
        Action.parse(text)


GOOD = """module @m facts(typed) {
  input %x : f32[2,3]
  output %y
  var @w : f32[3,3] param
  graph @main(%x : f32[2,3]) {
    %w : f32[3,3] = read(@w)
    %y : f32[2,3] = matmul(%x, %w) ; /fc (1)
    return %y
  }
  schedule 1f1b microbatches 2 {
    rank 0 start:
    rank 0 batch: 0F2 0B2
  }
  note partition: all on one
}
"""


def test_a_written_module_is_canonical() -> None:
    assert print_module(parse_module(GOOD)) == GOOD


def test_comments_and_blank_lines_do_not_matter() -> None:
    assert print_module(parse_module("// first\n\n" + GOOD.replace("  graph", "\n   // here\n\tgraph"))) == GOOD


@pytest.mark.parametrize(
    ("old", "new", "line", "what"),
    [
        ("matmul(%x, %w)", "matmul(%x, %v)", 7, "%v is not defined above this line"),
        ("%y : f32[2,3] = matmul", "%x : f32[2,3] = matmul", 7, "%x is defined twice"),
        ("f32[3,3] param", "f33[3,3] param", 4, "bad tensor type"),
        ("f32[3,3] param", "f32[3,3] parameter", 4, "expected 'var @name"),
        ("0B2", "0Q2", 12, "bad action"),
        ("    return %y\n", "", 8, "ends without return"),
        ("  note", "  nota", 14, "expected one of links, host, space, device"),
        ("module @m", "modul @m", 1, "expected 'module @name"),
        ("matmul(%x, %w)", "matmul(%x, ta=[1,[2]])", 7, "lists do not nest"),
        ("matmul(%x, %w)", "matmul(%x, ta=1, ta=2)", 7, "given twice"),
        ("output %y", "output y", 3, "expected 'output %name'"),
    ],
)
def test_errors_name_the_line_and_show_it(old: str, new: str, line: int, what: str) -> None:
    with pytest.raises(ParseError) as caught:
        parse_module(GOOD.replace(old, new, 1), "bad.ir")
    message = str(caught.value)
    assert message.startswith(f"bad.ir:{line}: ")
    assert what in message
    assert f"> {line:5d} | " in message


def test_a_truncated_module_is_refused() -> None:
    whole = GOOD.rstrip("\n")
    for end in range(0, len(whole), 7):
        with pytest.raises(ParseError):
            parse_module(whole[:end])


def test_the_former_word_for_settings_is_read() -> None:
    text = "module @m {\n  var @lr : f64[] WORD init [0.1]\n}\n"
    module = parse_module(text.replace("WORD", "table"))
    assert module == parse_module(text.replace("WORD", "setting"))
    assert "f64[] setting init" in print_module(module)
    with pytest.raises(ParseError):
        parse_module(text.replace("WORD", "tables"))


@pytest.mark.parametrize(
    ("text", "local"),
    [
        ("f32[64,512/tp]", "f32[64,256]"),
        ("f32[8,-2*4/tp]", "f32[8,4]"),
        ("f32[7/tp]", "f32[4]"),
        ("f32[3*7/tp,2/dp/tp]", "f32[12,1]"),
        ("f32[8/dp/tp]+sp", "f32[1]"),
        ("i64[5/none]", "i64[5]"),
    ],
)
def test_types_with_a_layout_print_and_say_what_one_device_has(text: str, local: str) -> None:
    parsed = parse_type(text)
    assert str(parsed) == text
    assert str(parsed.local({"tp": 2, "dp": 4})) == local
    assert parsed.plain.is_plain
    assert parsed.plain.local({"tp": 2}) == parsed.plain


@pytest.mark.parametrize("text", ["f32[3*8]", "f32[1*8/tp]", "f32[0*8/tp]", "f32[3*B/tp]", "f32[8]+tp+dp", "f32[8/]"])
def test_layouts_that_say_nothing_are_refused(text: str) -> None:
    with pytest.raises(ValueError, match="bad"):
        parse_type(text)
