"""Machine code for GPUs, made where there is none: what is in the library, what is not, and what is said when something is missing."""

from __future__ import annotations

import os
import shutil
import struct
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from oracles.cuda.resources import checked, excesses
from samples import SAMPLES

from penstock.backends.interface import CompileOptions
from penstock.backends.registry import backend_of
from penstock.backends.tvm.compile.build import Built
from penstock.backends.tvm.compile.pool import BuildError
from penstock.backends.tvm.cuda import build as cuda_build
from penstock.backends.tvm.cuda.compiler import DRIVER_SYMBOLS
from penstock.backends.tvm.run.runtime_library import load_cuda_runtime
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Graph, Module, Stage
from penstock.ir.ops import make
from penstock.support.errors import UsageError

from ..cases import OpCase, Shown, value

needs_nvcc = pytest.mark.skipif(shutil.which("nvcc") is None, reason="nvcc is not on the PATH")

_CUDA_MACHINE = 190


def device_code(library: Path) -> Iterator[tuple[int, list[str]]]:
    """Every CUDA ELF image inside a library: its architecture, and the kernels in it that have instructions."""
    data = library.read_bytes()
    at = 0
    while (at := data.find(b"\x7fELF", at)) >= 0:
        if struct.unpack_from("<H", data, at + 18)[0] == _CUDA_MACHINE:
            (flags,) = struct.unpack_from("<I", data, at + 48)
            (sections,) = struct.unpack_from("<Q", data, at + 40)
            size, count, names_at = struct.unpack_from("<HHH", data, at + 58)
            rows = [struct.unpack_from("<IIQQQQ", data, at + sections + i * size) for i in range(count)]
            start = at + rows[names_at][4]
            names = [(data[start + row[0] : data.index(b"\0", start + row[0])].decode(), row[5]) for row in rows]
            yield (
                flags >> 8 & 0xFF,
                [name.removeprefix(".text.") for name, length in names if name.startswith(".text.") and length],
            )
        at += 4


def chain(name: str = "s0.F") -> Graph:
    x, y = value("x", "f32[8,300]"), value("y", "f32[300]")
    total = make(
        "add",
        [x, y],
        ["t"],
        "",
    )
    return Graph(name, (x, y), (out := make("gelu", [total.outs[0]], ["z"])).outs, (total, out))


@needs_nvcc
@pytest.mark.parametrize("architecture", [pytest.param("sm_80", marks=pytest.mark.slow), "sm_90"])
def test_the_library_holds_machine_code_of_that_architecture_and_no_source(
    architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if architecture not in cuda_build.known_architectures():
        pytest.skip(f"{cuda_build.nvcc_version()} makes no code for {architecture}")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    graphs = [chain(), OpCase("softmax", ("f32[6,37]",), {}).graph("s0.B")]
    viewer, library = Shown(), tmp_path / "out" / "s0.so"
    built = cuda_build.build_graphs(graphs, library, CompileOptions(architecture, viewer=viewer))
    images = list(device_code(built.path))
    assert [arch for arch, _ in images] == [int(architecture.removeprefix("sm_"))]
    assert {name.split("_kernel")[0] for name in images[0][1]} == {"add", "gelu", "softmax"}
    content = built.path.read_bytes()
    for text in (b"__global__", b"__launch_bounds__", b".visible .entry", b".target sm"):
        assert text not in content
    # Nothing of the compiler's stand-in for the driver, nor of its folder, stays behind.
    assert sorted(p.name for p in library.parent.iterdir()) == ["s0.so"]
    assert not any(symbol.encode() in content for symbol in DRIVER_SYMBOLS)
    check_sources(graphs, built, viewer, library, architecture)


def check_sources(graphs: list[Graph], built: Built, viewer: Shown, library: Path, architecture: str) -> None:
    """Sources come from the compiler, and the second time from the cache, the same."""
    again = Shown()
    assert not built.cached
    assert cuda_build.build_graphs(graphs, library, CompileOptions(architecture, viewer=again)).cached
    assert [v.steps for v in (viewer, again)] == [["kernels", "nvcc"], []]
    assert viewer.stages == again.stages
    found = viewer.stages["s0"]
    assert {call.source for call in found.calls} == {*found.kernels}
    assert all(f"def {name}(" in text and f"{name}_kernel" in found.device for name, text in found.kernels.items())
    assert "T.prim_func" not in found.functions


def test_a_missing_compiler_is_said_once(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    cuda_build.nvcc_version.cache_clear()
    cuda_build.known_architectures.cache_clear()
    monkeypatch.setenv("PATH", str(tmp_path))
    with pytest.raises(UsageError, match="nvcc, which is not on the PATH"):
        cuda_build.build_graphs([chain()], tmp_path / "stage.so", CompileOptions("sm_90"))
    assert not list(tmp_path.iterdir())


@pytest.mark.slow
@needs_nvcc
def test_a_cache_that_cannot_be_written_is_said_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    said: list[str] = []
    for folder, troubled in ((tmp_path / "file" / "cache", True), (tmp_path / "cache", False)):
        monkeypatch.setenv("PENSTOCK_CACHE", str(folder))
        built = cuda_build.build_graphs(
            [chain()], tmp_path / "a.so", CompileOptions("sm_90", progress=lambda *x: said.append(x[2]))
        )
        assert not built.cached
        assert said[-1].startswith("compiled s0.F")
        assert ("(the cache cannot be" in said[-1]) == troubled


@needs_nvcc
def test_architectures_that_nvcc_does_not_know_are_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no code for 'sm_99'"):
        cuda_build.build_graphs([chain()], tmp_path / "stage.so", CompileOptions("sm_99"))
    with pytest.raises(UsageError, match="unknown CUDA architecture 'sm_35'"):
        cuda_build.build_graphs([chain()], tmp_path / "stage.so", CompileOptions("sm_35"))


@needs_nvcc
def test_what_nvcc_says_is_handed_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """An nvcc that fails: its message, and the graphs it was about, come out as one error."""
    fake = tmp_path / "bin"
    fake.mkdir()
    script = (
        f'#!/bin/sh\ncase "$1" in --cubin) echo "no room left" >&2; exit 3;; esac\nexec {shutil.which("nvcc")} "$@"\n'
    )
    (fake / "nvcc").write_text(script)
    (fake / "nvcc").chmod(0o755)
    monkeypatch.setenv("PATH", f"{fake}{os.pathsep}{os.environ['PATH']}")
    viewer = Shown()
    with pytest.raises(BuildError, match="no room left") as caught:
        cuda_build.build_graphs([chain()], tmp_path / "s0.sm_90.so", CompileOptions("sm_90", viewer=viewer))
    assert caught.value.where == "s0.F"
    assert not (tmp_path / "s0.sm_90.so").exists()
    # What it was given is there to be looked at.
    assert "__global__" in viewer.stages["s0"].device


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_a_stage_for_a_gpu_is_refused_where_there_is_none(tmp_path: Path) -> None:
    module = Module("m", cluster=Cluster.listed("cpu,sm_90"), stages=(Stage(0, "cpu:0"), Stage(1, "cuda:0")))
    with pytest.raises(UsageError, match=r"stage 1: wants cuda sm_90; this host has none"):
        backend_of("tvm").load_stage(module, 1, [tmp_path / "s1.sm_90.so"])


@pytest.mark.slow
@needs_nvcc
@pytest.mark.parametrize("architecture", ["sm_80", "sm_90"])
@pytest.mark.parametrize("part", range(8))
def test_every_sample_of_every_row_compiles_and_spills_nothing(architecture: str, part: int, tmp_path: Path) -> None:
    if architecture not in cuda_build.known_architectures():
        pytest.skip(f"{cuda_build.nvcc_version()} makes no code for {architecture}")
    graphs = [s.graph(f"s0.g{i}") for i, s in enumerate(SAMPLES[part::8])]
    viewer = Shown()
    built = cuda_build.build_graphs(graphs, tmp_path / "stage.so", CompileOptions(architecture, viewer=viewer))
    (image,) = device_code(built.path)
    assert len(image[1]) > len(graphs) // 2
    rows = checked(viewer.stages["stage"])
    assert sorted(row.kernel.name for row in rows) == sorted(image[1])
    assert not excesses(rows)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
def test_a_missing_driver_is_said() -> None:
    with pytest.raises(UsageError, match="TVM's CUDA runtime cannot be loaded") as caught:
        load_cuda_runtime()
    assert "NVIDIA driver" in caught.value.hint
