"""What compiled code cannot hold is refused before anything is compiled, by name, with the exit code for such models."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from penstock.backends.tvm.cuda.target import device_machine
from penstock.backends.tvm.lower.lower import plan_kernels
from penstock.backends.tvm.lower.plan import MOST_ELEMENTS
from penstock.backends.tvm_backend import TvmBackend
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


SUM = """module @sum {
  device cpu:0 kind=cpu host=localhost target=native threads=1 flops=50000000000.0 bandwidth=10000000000.0
  stage 0 on cpu:0
  input %x : f32[65536,1]
  input %z : f32[1,65536]
  output %y
  graph @s0.F(%x : f32[65536,1], %z : f32[1,65536]) {
    %a : f32[65536,65536] = add(%x, %z, kernel="k0")
    %y : f32[65536] = max(%a, axes=[1], kernel="k0")
    return %y
  }
}
"""


def test_what_stays_inside_of_a_kernel_may_be_larger(tmp_path: Path) -> None:
    module = parse_module(SUM)
    (library,) = TvmBackend().compile_stages(module, [0], tmp_path)[0]
    stage = TvmBackend().load_stage(module, 0, [tmp_path / library])
    x, z = torch.randn(65536, 1), torch.randn(1, 65536)
    (y,) = stage.call("s0.F", [x, z])
    assert torch.equal(y, x[:, 0] + z.max())
    # Control: as two kernels the sum would be stored.
    apart = parse_module(SUM.replace('"k0"', '"k1"', 1))
    with pytest.raises(UnsupportedModel, match="a : f32"):
        TvmBackend().compile_stages(apart, [0], tmp_path / "apart")


def test_kernels_of_gpus_have_the_same_limit() -> None:
    half = (MOST_ELEMENTS + 1) // 2
    (graph,) = parse_module(TEXT.format(half=half)).graphs.values()
    with pytest.raises(UnsupportedModel, match=r"(?s)more than 2147483647 elements:.*x : u8.*y : u8"):
        plan_kernels(graph, device_machine("sm_90"))
    # Control: one column less.
    (fitting,) = parse_module(TEXT.format(half=half - 1)).graphs.values()
    plan_kernels(fitting, device_machine("sm_90"))
