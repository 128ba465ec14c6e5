"""Tests of reading modules: text that is read as a module is a well-formed one."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.commands.parser import main
from penstock.ir.attrs import Attr
from penstock.ir.files import read_module
from penstock.ir.graph import Graph, Module, Op, Value
from penstock.ir.text import print_module
from penstock.ir.types import TensorType
from penstock.support.errors import UsageError, VerifyError


def write(tmp_path: Path, text: str | bytes) -> Path:
    path = tmp_path / "m.ir"
    path.write_bytes(text.encode() if isinstance(text, str) else text)
    return path


def test_operations_and_attributes_that_there_are_not_are_told_at_once(tmp_path: Path) -> None:
    x = Value("x", TensorType("f32", (2,)))
    y, z = (Value(name, x.type) for name in "yz")

    def text(first: str, attrs: dict[str, Attr]) -> str:
        graph = Graph("main", (x,), (z,), (Op(first, (x,), (y,)), Op("neg", (y,), (z,), attrs)))
        return print_module(Module("m", graphs={"main": graph}, inputs=(x,), outputs=("z",)))

    assert read_module(write(tmp_path, text("relu", {}))).graphs
    strange = text("rule", {"twice": 1})
    with pytest.raises(VerifyError) as caught:
        read_module(write(tmp_path, strange))
    assert caught.value.where == f"{tmp_path / 'm.ir'}: @m"
    assert "unknown operation 'rule'" in str(caught.value)
    assert "neg has no attribute 'twice'" in str(caught.value)


@pytest.mark.parametrize("command", ["inspect", "verify", "simulate"])
def test_what_is_no_text_is_told_so(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(write(tmp_path, b"module \xff {"))]) == UsageError.exit_code
    assert "m.ir: it is no text, at byte 7" in capsys.readouterr().err


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_module(tmp_path / "none.ir")


MODULE = """module @m {
  input %x : f32[2]
  output %y
  graph @main(%x : f32[2]) {
    %y : f32[2] = neg(%x) ; here
    return %y
  }
  note simplify: said
}
"""


@pytest.mark.parametrize("char", ["\x1b[2J", "\x07", "\x7f", "\x9b31m", "\x85"])
@pytest.mark.parametrize("word", ["here", "said"])
def test_what_a_terminal_would_obey_is_refused_and_shown_as_an_escape(
    word: str, char: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    place = write(tmp_path, MODULE.replace(word, f"{word}{char}."))
    assert main(["inspect", str(place)]) == 2
    told = capsys.readouterr().err
    assert "control character \\x" in told
    assert char not in told
    # Control: other letters, tabs and ends of lines of other systems are nobody's concern.
    assert read_module(write(tmp_path, MODULE.replace(word, f"{word}\tö.").replace("\n", "\r\n"))).notes


def test_notes_are_written_so_that_they_can_be_read(tmp_path: Path) -> None:
    module = read_module(write(tmp_path, MODULE)).noted("partition", "a\x1b[2Jb\nc\x85", "plain: ö")
    again = read_module(write(tmp_path, print_module(module)))
    assert [note.text for note in again.notes[1:]] == ["a\\x1b[2Jb\\nc\\x85", "plain: ö"]
