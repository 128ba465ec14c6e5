"""What compiled code cannot hold is refused before anything is compiled, by name, with the exit code for such models."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.backends.tvm_backend import MOST_ELEMENTS, TvmBackend
from penstock.ir.text import parse_module
from penstock.support.errors import UnsupportedModel

TEXT = """module @large {{
  device cpu:0 kind=cpu host=localhost target=native threads=1 flops=50000000000.0 bandwidth=10000000000.0 ram:999999999999
  stage 0 on cpu:0
  input %x : u8[2,{half}]
  output %y
  graph @s0.F(%x : u8[2,{half}]) {{
    %y : u8[{half},2] = transpose(%x, perm=[1,0])
    return %y
  }}
}}
"""


def compile_transpose(half: int, folder: Path) -> None:
    TvmBackend().compile_stages(parse_module(TEXT.format(half=half)), [0], folder)


def test_tensors_of_more_elements_than_loops_count(tmp_path: Path) -> None:
    half = (MOST_ELEMENTS + 1) // 2
    with pytest.raises(UnsupportedModel, match=r"(?s)more than 2147483647 elements:.*x : u8.*y : u8") as caught:
        compile_transpose(half, tmp_path)
    assert caught.value.exit_code == 3
    assert list(tmp_path.iterdir()) == []
    compile_transpose(half - 1, tmp_path)
    assert list(tmp_path.iterdir())
