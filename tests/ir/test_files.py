"""What is read as a module is one, as far as its words go."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.cli import main
from penstock.ir.errors import UsageError, VerifyError
from penstock.ir.files import read_module
from penstock.ir.graph import Attr, Graph, Module, Op, Value
from penstock.ir.text import print_module
from penstock.ir.types import TensorType


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
    assert "unknown operation 'rule'" in str(caught.value)
    assert "neg has no attribute 'twice'" in str(caught.value)


@pytest.mark.parametrize("command", ["inspect", "verify", "simulate"])
def test_what_is_no_text_is_told_so(tmp_path: Path, command: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([command, str(write(tmp_path, b"module \xff {"))]) == UsageError.exit_code
    assert "m.ir: it is no text, at byte 7" in capsys.readouterr().err


def test_what_is_not_there(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="No such file"):
        read_module(tmp_path / "none.ir")
