"""The gate on the resources of kernels: what the assembler says of every kernel of four models in their real widths, and occupancy by formula."""

from __future__ import annotations

import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from oracles.cuda.resources import checked, excesses
from replay.models import Llama

from penstock import api
from penstock.backends.interface import CompileOptions, StageSources, stage_graphs
from penstock.backends.tvm.cuda.build import build_graphs, known_architectures
from penstock.backends.tvm.cuda.resources import Assembled, loosened, occupancy, read_assembled
from penstock.commands.parser import main
from penstock.frontends.training import Training
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.ir.text import print_module
from penstock.ir.training.optimizers import AdamW
from penstock.models import write_bert, write_gpt, write_resnet

from ..cases import OpCase, Shown

needs_nvcc = pytest.mark.skipif(shutil.which("ptxas") is None, reason="ptxas is not on the PATH")
ARCHITECTURES = ("sm_80", "sm_90")


def gpt(folder: Path) -> api.Model:
    sizes = {"layers": 1, "width": 768, "heads": 12, "vocab": 50257, "positions": 1024}
    return api.from_onnx(write_gpt(folder / "gpt.onnx", batch=8, **sizes))


def bert(folder: Path) -> api.Model:
    return api.from_onnx(write_bert(folder / "bert.onnx", 64, layers=1))


def resnet(folder: Path) -> api.Model:
    return api.from_onnx(write_resnet(folder / "resnet.onnx", 64))


def llama(folder: Path) -> api.Model:
    return api.from_torch(Llama(512, 32000, 512), (torch.zeros(4, 512, dtype=torch.int64),))


def tiny(folder: Path) -> api.Model:
    sizes = {"layers": 1, "width": 16, "heads": 2, "vocab": 20, "positions": 8}
    return api.from_onnx(write_gpt(folder / "gpt.onnx", batch=2, **sizes))


MODELS: dict[str, Callable[[Path], api.Model]] = {"gpt": gpt, "bert": bert, "resnet": resnet, "llama": llama}


def planned(model: api.Model, precision: str = "bf16", library: str = "none", devices: str = "sm_90") -> Module:
    how = Training(loss="cross_entropy", optimizer=AdamW(lr=0.1), microbatches=1)
    return api.plan(model, Cluster.listed(devices), how, precision=precision, cuda_libraries=library).module


def built(module: Module, architecture: str, folder: Path) -> Shown:
    viewer = Shown()
    build_graphs(stage_graphs(module, 0), folder / "s0.so", CompileOptions(architecture, viewer=viewer))
    return viewer


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("precision", ["f32", "bf16", "f16"])
@pytest.mark.parametrize("model", MODELS)
def test_no_kernel_of_a_model_spills(model: str, precision: str, architecture: str, tmp_path: Path) -> None:
    if architecture not in known_architectures():
        pytest.skip(f"nvcc makes no code for {architecture}")
    read = MODELS[model](tmp_path)
    for library in ("none", "torch"):
        sources = built(planned(read, precision, library), architecture, tmp_path).stages["s0"]
        rows = checked(sources)
        assert len(rows) > 20
        assert not excesses(rows)
        # Products of 16 bits are on tensor cores, unless a library makes them.
        assert ("mma_sync" in sources.device) == (library == "none" and precision != "f32")


@needs_nvcc
def test_control_a_kernel_with_too_few_registers_is_noticed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvcc that leaves a thread 32 registers: products of f64 spill, and nothing else of this graph does."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    graphs = [
        OpCase("matmul", ("f64[300,200]", "f64[200,300]"), {}).graph("s0.F"),
        OpCase("gelu", ("f32[70]",), {}).graph("s0.B"),
    ]
    library, options = tmp_path / "s0.so", CompileOptions("sm_90", viewer=(viewer := Shown()))
    build_graphs(graphs, library, options)
    assert not excesses(checked(viewer.stages["s0"]))
    (tmp_path / "bin").mkdir()
    fake = tmp_path / "bin" / "nvcc"
    fake.write_text(
        '#!/bin/sh\ncase "$1" in --cubin) sed "s/__launch_bounds__(256[^)]*)/__launch_bounds__(256, 8)/" kernels.cu > fewer.cu\n'
        f'set -- $(echo "$@" | sed "s/kernels.cu$/fewer.cu/");; esac\nexec {shutil.which("nvcc")} "$@"\n'
    )
    fake.chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake.parent}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "other"))
    build_graphs(graphs, library, options)
    (excess,) = excesses(checked(viewer.stages["s0"]))
    assert "matmul_kernel" in excess


def most_blocks(threads: int, registers: int, shared: int, limits: tuple[int, int, int]) -> int:
    """The most blocks of a multiprocessor, by putting in one after the other: its four parts have 64 KB of registers each, warps go round."""
    most_threads, blocks, memory = limits
    parts, placed = [65536 // 4] * 4, 0
    while placed < blocks:
        memory -= -(-(shared + 1024) // 128) * 128
        most_threads -= -(-threads // 32) * 32
        for _ in range(-(-threads // 32)):
            part = max(range(4), key=lambda i: parts[i])
            parts[part] -= -(-registers * 32 // 256) * 256
        if memory < 0 or most_threads < 0 or min(parts) < 0:
            break
        placed += 1
    return placed


@pytest.mark.parametrize(
    ("architecture", "limits"),
    [("sm_80", (2048, 32, 164 << 10)), ("sm_90a", (2048, 32, 228 << 10)), ("sm_86", (1536, 16, 100 << 10))],
)
def test_occupancy_is_what_blocks_one_after_the_other_fill(architecture: str, limits: tuple[int, int, int]) -> None:
    for threads in (32, 64, 128, 256, 512, 1024):
        for registers in (8, 16, 31, 32, 33, 40, 64, 65, 96, 128, 255):
            for shared in (0, 512, 8320, 33000, 48 << 10):
                if threads * registers > 65536:
                    continue
                fits = most_blocks(threads, registers, shared, limits)
                assert occupancy(architecture, threads, registers, shared) == fits * threads / limits[0]
    assert occupancy("sm_999", 256, 32, 0) is None


def test_the_words_of_the_assembler_are_read() -> None:
    text = """ptxas info    : 0 bytes gmem
ptxas info    : Compiling entry function 'a_kernel_1' for 'sm_90'
ptxas info    : Function properties for a_kernel_1
    40 bytes stack frame, 8 bytes spill stores, 12 bytes spill loads
ptxas info    : Used 76 registers, used 1 barriers, 512 bytes smem, 400 bytes cmem[0]
ptxas info    : Compiling entry function 'b_kernel' for 'sm_90'
ptxas info    : Function properties for b_kernel
    0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads
ptxas info    : Used 12 registers, used 0 barriers
"""
    assert read_assembled(text) == [Assembled("a_kernel_1", 76, 40, 20, 512), Assembled("b_kernel", 12, 0, 0, 0)]
    assert read_assembled("") == []


def test_kernels_that_spill_get_more_registers_and_no_others_do() -> None:
    source = "".join(f"__global__ void __launch_bounds__(256) {name}(float* x);\n" for name in ("a_kernel", "b_kernel"))
    seen = [source]
    while (wider := loosened(seen[-1], {"a_kernel"})) != seen[-1]:
        seen.append(wider)
    assert seen == [source, *(source.replace("(256) a", f"(256, {blocks}) a") for blocks in (4, 2, 1))]
    assert loosened(source, ()) == source


def test_kernels_of_one_thread_are_among_the_rows() -> None:
    """Their source has no bounds. The control: one that the assembler says nothing of is no row."""
    parameters = "(float* __restrict__ x)"
    kernels = [
        f"{bounds}{name}_kernel{parameters}" for bounds, name in (("__launch_bounds__(64) ", "neg"), ("", "sum1"))
    ]
    device = "".join(f'extern "C" __global__ void {kernel};\n' for kernel in kernels)
    device += "".join(
        f'extern "C" __global__ void {kernel} {{\n}}\n' for kernel in [*kernels, f"abs_kernel{parameters}"]
    )
    said = "".join(
        f"ptxas info : Compiling entry function '{name}_kernel' for 'sm_90'\n"
        "0 bytes stack frame, 0 bytes spill stores, 0 bytes spill loads\nptxas info : Used 8 registers\n"
        for name in ("neg", "sum1")
    )
    rows = checked(StageSources("sm_90", (), {"sum1": "blockIdx"}, "", device, said))
    assert [(row.kernel.name, row.threads) for row in rows] == [("neg_kernel", 64), ("sum1_kernel", 1)]


@needs_nvcc
def test_inspect_prints_resources(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # Names of kernels are cut to the width of a terminal.
    monkeypatch.setenv("COLUMNS", "300")
    file = tmp_path / "module.ir"
    model = api.from_torch(torch.nn.Sequential(torch.nn.LayerNorm(16), torch.nn.GELU()), (torch.zeros(4, 16),))
    file.write_text(print_module(api.plan(model, Cluster.listed("sm_90"), cuda_libraries="none").module))
    assert main(["inspect", str(file), "--kernels", "--ptxas"]) == 0
    out = capsys.readouterr().out
    assert "0 with spilled registers" in out
    assert "sm_80" not in out
    assert main(["inspect", str(file), "--kernels", "--ptxas", "sm_80,sm_90", "--json"]) == 0
    rows = json.loads(capsys.readouterr().out)
    assert {row["architecture"] for row in rows} == set(ARCHITECTURES)
    (norm, *_) = (row for row in rows if row["operations"] and row["operations"][0].endswith(" = layer_norm"))
    assert 0 < norm["registers"] <= 64
    assert 0 < norm["occupancy"] <= 1
    assert all(f"  {row['kernel']}" in out for row in rows)


def test_inspect_refuses_resources_of_nothing(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "module.ir"
    file.write_text(print_module(planned(tiny(tmp_path), devices="cpu")))
    assert main(["inspect", str(file), "--kernels", "--ptxas"]) == 2
    assert "no stage is on a CUDA device" in capsys.readouterr().err
    assert main(["inspect", str(file), "--ptxas"]) == 2
    assert "--ptxas goes with --kernels alone" in capsys.readouterr().err
