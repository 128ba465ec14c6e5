"""Compiling once: what counts as the same kernel, and the cache that keeps it.

The oracle for code is TVM's own build of a whole stage in one module; for the rest, counts and bytes.
"""

from __future__ import annotations

import hashlib
import os
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import tvm
from tvm import relax
from tvm_ffi import structural_equal

import penstock as ps
from penstock.backends.interface import CompileOptions, stage_graphs
from penstock.backends.tvm import fingerprint
from penstock.backends.tvm.compile.build import Built, Counts, LibraryBuilder, LibraryPart, build_graphs
from penstock.backends.tvm.compile.pool import BuildError
from penstock.backends.tvm.group import Fusion, parameters_of, parse_group, rename
from penstock.backends.tvm.lower.lower import make_kernel, plan_kernels, relax_module
from penstock.backends.tvm.lower.plan import Lowered
from penstock.backends.tvm.pipeline import PIPELINE
from penstock.backends.tvm.run.load import TvmProgram
from penstock.backends.tvm.target import machine_of, tvm_target
from penstock.ir.graph import Graph, signature
from penstock.ir.ops import make
from penstock.ir.training.optimizers import optimizer_of
from penstock.models import write_cnn, write_gpt, write_mlp
from penstock.support import cache as store
from penstock.support.cache import Cache
from penstock.support.errors import UsageError

from ..cases import chain, difference, make_args, tensors_of, value


def build_counted(
    folder: Path, *graphs: Graph, apart: bool = True, jobs: int | None = None
) -> tuple[list[Built], Counts]:
    """One library per graph, or one for all."""
    parts = (
        [LibraryPart((g,), folder / f"{i}.so") for i, g in enumerate(graphs)]
        if apart
        else [LibraryPart(graphs, folder / "all.so")]
    )
    with LibraryBuilder(CompileOptions(jobs=jobs)) as builder:
        return builder.build(parts), builder.counts


# ------------------------------------------------------------------------------------------------ the same kernel


def planned(folder: Path, which: str) -> list[Graph]:
    writers: dict[str, Callable[[], Path]] = {
        "gpt": lambda: write_gpt(folder / "m.onnx", layers=2, width=48, heads=3, vocab=61, positions=20, seed=1),
        "mlp": lambda: write_mlp(folder / "m.onnx", [20, 48, 10], seed=1),
        "cnn": lambda: write_cnn(folder / "m.onnx", seed=1),
    }
    optimizer = {"gpt": "adamw", "mlp": "sgd", "cnn": "momentum"}[which]
    training = ps.Training(loss="cross_entropy", optimizer=optimizer_of(optimizer, lr=1e-2), microbatches=2)
    module = ps.plan(
        ps.from_onnx(writers[which](), dims={"batch": 3}), ps.Cluster.local(2), training, schedule="2bw"
    ).module
    return [graph for stage in (0, 1) for graph in stage_graphs(module, stage)]


@pytest.mark.parametrize("which", ["gpt", "mlp", "cnn"])
def test_the_text_of_a_group_gives_its_code_and_nothing_else(which: str, tmp_path: Path) -> None:
    """Renaming changes no statement, and what differs in statements or parameters differs in text."""
    machine = machine_of("host")
    by_text: dict[str, Any] = {}
    for graph in planned(tmp_path, which):
        for step in plan_kernels(graph, machine).steps:
            renamed = rename(step.group)
            again = parse_group(renamed.text)
            assert rename(again).text == renamed.text
            kernel = make_kernel(again, machine)
            assert structural_equal(kernel.function, step.kernel.function)
            named = renamed.kernel(parameters_of(kernel))
            assert (named.ins, named.slots, named.outs) == (step.kernel.ins, step.kernel.slots, step.kernel.outs)
            by_text[renamed.text] = kernel.function
    assert len(by_text) > 3


def test_texts_differ_where_code_does() -> None:
    def text(graph: Graph) -> str:
        return rename(Fusion(graph.ops, graph.outs)).text

    plain = text(chain("a", "exp", "softmax", axis=1))
    assert text(chain("b", "exp", "softmax", prefix="other.", axis=1)) == plain
    assert text(chain("a", "exp", "softmax", type="f32[4,21]", axis=1)) != plain
    assert text(chain("a", "exp", "softmax", type="f64[4,20]", axis=1)) != plain
    assert text(chain("a", "exp", "softmax", axis=0)) != plain
    assert text(chain("a", "tanh", "softmax", axis=1)) != plain


def test_equal_kernels_are_compiled_once(kept: Path, tmp_path: Path) -> None:
    """Over the steps of a graph, graphs and stages, and over builds; a kernel that differs is compiled."""
    same = [chain("s0.F", "exp", "tanh", "exp"), chain("s1.F", "tanh", "exp", prefix="h.")]
    built, counts = build_counted(tmp_path / "a", *same)
    assert (counts.kernels, counts.compiled) == (2, 2)
    assert not any(library.cached for library in built)
    built, counts = build_counted(tmp_path / "b", chain("s0.F", "tanh", "sqrt", "exp"), same[0])
    assert (counts.kernels, counts.compiled) == (3, 1)
    assert [library.cached for library in built] == [False, True]
    (library,), counts = build_counted(tmp_path / "c", *same, apart=False)
    assert (counts.kernels, counts.compiled) == (2, 0)
    assert not library.cached
    x = torch.rand(4, 20)
    for graph in same:
        (found,) = TvmProgram(library.path, same).call(graph.name, [x])
        kinds = [op.kind for op in graph.ops]
        expected = x
        for kind in kinds:
            expected = getattr(torch, kind)(expected)
        assert torch.allclose(found, expected, rtol=1e-6)


def test_what_cannot_be_one_kernel_is_known_the_next_time(kept: Path, tmp_path: Path) -> None:
    """Two products in one kernel are refused and split; the refusal is an entry like any other."""
    x, y = value("x", "f32[20,20]"), value("y", "f32[20,20]")
    first = make("matmul", [x, y], ["a"], "").with_attrs(kernel="k")
    second = make("matmul", [*first.outs, y], ["b"], "").with_attrs(kernel="k")
    graph = Graph("s0.F", (x, y), second.outs, (first, second))
    (built,), counts = build_counted(tmp_path / "a", graph)
    assert (counts.kernels, counts.compiled) == (2, 2)  # the pair, and one product twice
    args = [torch.rand(20, 20), torch.rand(20, 20)]
    (found,) = TvmProgram(built.path, [graph]).call("s0.F", args)
    assert torch.allclose(found, args[0] @ args[1] @ args[1], rtol=1e-5)
    _, counts = build_counted(tmp_path / "b", replace(graph, name="s1.F"))
    assert (counts.kernels, counts.compiled) == (2, 0)


def test_without_a_linker_nothing_is_begun(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))
    monkeypatch.delenv("CC", raising=False)
    monkeypatch.delenv("CXX", raising=False)
    with pytest.raises(BuildError, match="no C\\+\\+ compiler"):
        build_graphs([chain("s0.F", "exp")], tmp_path / "a.so")
    monkeypatch.setenv("CXX", str(tmp_path / "nothing"))
    with pytest.raises(BuildError, match="nothing"):
        build_graphs([chain("s0.F", "exp")], tmp_path / "a.so")


def whole_module(graphs: Sequence[Graph], out: Path) -> Path:
    """A stage as TVM builds it by itself: all kernels in the module of its Relax functions."""
    machine = machine_of("host")
    module = relax_module([plan_kernels(graph, machine) for graph in graphs], declared=False)
    tvm.compile(
        module, target=tvm_target(machine.name), relax_pipeline="default_build", tir_pipeline=PIPELINE
    ).export_library(str(out))
    return out


@pytest.mark.parametrize("which", [pytest.param("gpt", marks=pytest.mark.slow), "cnn"])
def test_linked_kernels_give_what_a_module_built_whole_gives(which: str, tmp_path: Path) -> None:
    """Up to the last bits: beside other functions, LLVM may join other multiplications and additions into one rounding."""
    graphs = planned(tmp_path, which)[:3]
    ours = TvmProgram(build_graphs(graphs, tmp_path / "ours.so").path, graphs)
    whole = TvmProgram(whole_module(graphs, tmp_path / "whole.so"), graphs)
    for graph in graphs:
        arrays, sig = make_args(graph, np.random.default_rng(3)), signature(graph)
        args = [tensors_of(sig, arrays, True) for _ in range(2)]
        results = [program.call(graph.name, given) for program, given in zip((ours, whole), args, strict=True)]
        for a, b in zip([*results[0], *args[0]], [*results[1], *args[1]], strict=True):
            assert not difference(a, b)


def storages(lowered: Sequence[Lowered], declared: bool) -> list[str]:
    """The blocks of memory that Relax plans, and what is put into each, without the names of kernels."""
    module = relax_module(lowered, declared=declared)
    with tvm_target(machine_of("host").name):
        text = relax.get_pipeline("default_build")(module).script()
    return [line.strip() for line in text.splitlines() if "alloc_storage" in line or "alloc_tensor" in line]


def test_memory_is_planned_without_the_code_as_with_it(tmp_path: Path) -> None:
    machine, graphs = machine_of("host"), planned(tmp_path, "gpt")[:2]
    lowered = [plan_kernels(graph, machine) for graph in graphs]
    named = [
        replace(
            p,
            steps=tuple(replace(s, name=f"k{hashlib.md5(rename(s.group).text.encode()).hexdigest()}") for s in p.steps),
        )
        for p in lowered
    ]
    whole = storages(lowered, declared=False)
    assert storages(named, declared=True) == whole
    kernels_results = sum(len(step.kernel.outs) for plan in lowered for step in plan.steps)
    blocks = sum("alloc_storage" in line for line in whole)
    assert 0 < blocks < kernels_results, "memory is used again"


def test_progress_counts_kernels_and_libraries(tmp_path: Path) -> None:
    seen: list[tuple[int, int, str]] = []
    build_graphs(
        [chain("s0.F", "exp", "tanh", "sqrt", "exp")],
        tmp_path / "a.so",
        CompileOptions(progress=lambda *x: seen.append(x)),
    )
    assert [done for done, _, _ in seen] == [0, 1, 2, 3, 4]
    assert {total for _, total, _ in seen[1:]} == {4}
    assert sorted(what for _, _, what in seen[1:-1]) == ["kernel exp", "kernel sqrt", "kernel tanh"]
    assert "compiled 3 of 3 kernels" in seen[-1][2]


# ------------------------------------------------------------------------------------------------ the cache


@pytest.mark.parametrize("damage", ["flip", "truncate", "remove", "empty"])
def test_damaged_entries_are_made_again(damage: str, kept: Path, tmp_path: Path) -> None:
    graph = chain("s0.F", "exp", "tanh")
    good = build_graphs([graph], tmp_path / "a.so")
    entries = sorted(kept.iterdir())
    assert len(entries) == 4  # two kernels, the library, the name of the target
    for entry in entries:
        content = bytearray(entry.read_bytes())
        if damage == "flip":
            content[len(content) // 2] ^= 1
            entry.write_bytes(content)
        elif damage == "remove":
            entry.unlink()
        else:
            entry.write_bytes(content[: len(content) // 2] if damage == "truncate" else b"")
    (again,), counts = build_counted(tmp_path, graph)
    assert not again.cached
    assert counts.compiled == 2
    assert again.sha256 == good.sha256
    assert build_graphs([graph], tmp_path / "c.so").cached


def test_without_the_check_damage_would_be_used(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The negative control of the test above: an entry whose hash was made to fit is taken."""
    graph = chain("s0.F", "exp")
    build_graphs([graph], tmp_path / "a.so")
    for entry in kept.iterdir():
        content = entry.read_bytes()[32:]
        if content.startswith(b"\x7fELF"):
            changed = content + b"\0"
            entry.write_bytes(hashlib.sha256(changed).digest() + changed)
    taken = build_graphs([graph], tmp_path / "b.so")
    assert taken.cached
    assert taken.path.read_bytes().endswith(b"\0")


def test_the_least_recently_used_entries_go_first(tmp_path: Path) -> None:
    cache = Cache(tmp_path, bound=3 * 132, part="tvm")
    now = time.time()
    for i in range(5):
        cache.put(f"k{i}", bytes([i]) * 100)
        os.utime(tmp_path / "tvm" / f"k{i}", (now - 1000 + i, now - 1000 + i))
    (tmp_path / "tvm" / "old.part").write_bytes(b"left behind")
    os.utime(tmp_path / "tvm" / "old.part", (now - 9999, now - 9999))
    (tmp_path / "tvm" / "new.part").write_bytes(b"being written")
    assert cache.get("k0") == bytes(100)  # used, so it is now the newest
    cache.trim()
    assert sorted(path.name for path in (tmp_path / "tvm").iterdir()) == ["k0", "k4", "new.part"]
    assert cache.get("k4") == b"\4" * 100
    assert cache.get("k1") is None
    assert not cache.trouble


def test_a_build_keeps_the_cache_within_its_bound(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_SIZE", "40KiB")
    for i, kind in enumerate(("exp", "tanh", "sqrt", "sigmoid")):
        build_graphs([chain("s0.F", kind)], tmp_path / f"{i}.so")
        assert sum(path.stat().st_size for path in kept.iterdir()) <= 40 << 10
    assert build_graphs([chain("s0.F", "sigmoid")], tmp_path / "last.so").path.stat().st_size > 0


@pytest.mark.parametrize(("text", "expected"), [("", 1 << 30), ("7", 7), ("3 MiB", 3 << 20), ("2GiB", 2 << 30)])
def test_the_bound_is_read_from_the_environment(text: str, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PENSTOCK_CACHE_SIZE", text)
    assert store.cache_bound() == expected
    monkeypatch.setenv("PENSTOCK_CACHE_SIZE", "much")
    with pytest.raises(UsageError, match="PENSTOCK_CACHE_SIZE 'much'"):
        store.cache_bound()


def test_a_cache_that_cannot_be_written_is_said_and_done_without(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "file").write_text("no folder")
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "file" / "cache"))
    said: list[str] = []
    graph = chain("s0.F", "exp")
    for name in ("a.so", "b.so"):
        built = build_graphs(
            [graph], tmp_path / name, CompileOptions(progress=lambda done, total, what: said.append(what))
        )
        assert not built.cached
        assert "the cache cannot be" in said[-1]
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))
    build_graphs([graph], tmp_path / "c.so", CompileOptions(progress=lambda done, total, what: said.append(what)))
    assert "the cache cannot be" not in said[-1]


def test_the_fingerprint_covers_sources_and_tools(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    package = fingerprint.package_folder()
    for root in (package / "backends" / "tvm", package / "ir"):
        for path in root.rglob("*.py"):
            copy = tmp_path / "a" / path.relative_to(package)
            copy.parent.mkdir(parents=True, exist_ok=True)
            copy.write_bytes(path.read_bytes())

    def found() -> str:
        return fingerprint.source_fingerprint.__wrapped__()

    now = found()
    monkeypatch.setattr(fingerprint, "package_folder", lambda: tmp_path / "a")
    assert found() == now
    for name in ("backends/tvm/kernels/product/product.py", "backends/tvm/target.py", "ir/types.py"):
        path = tmp_path / "a" / name
        text = path.read_text()
        path.write_text(text + "#")
        assert found() != now
        path.write_text(text)
    assert found() == now
    version = fingerprint.metadata.version
    monkeypatch.setattr(fingerprint.metadata.PathDistribution, "version", property(lambda self: "0.28"))
    assert version
    assert found() != now


def test_the_same_graph_gives_the_same_bytes(kept: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small = chain("s0.F", "exp")
    first = build_graphs([small], tmp_path / "c.so")
    assert not first.cached
    hit = build_graphs([small], tmp_path / "elsewhere" / "d.so")
    assert hit.cached
    assert hit.path.read_bytes() == first.path.read_bytes()
    assert not build_graphs([small], tmp_path / "e.so", CompileOptions("portable")).cached
    monkeypatch.setenv("PENSTOCK_CACHE", "off")
    again = build_graphs([small], tmp_path / "a" / "s.so")
    assert not again.cached
    assert again.sha256 == first.sha256 == hit.sha256


def test_the_kept_name_of_the_host_depends_on_leave_to_use_tiles(kept: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for leave in (True, False, True):
        for module in ("compile.build", "target"):
            monkeypatch.setattr(f"penstock.backends.tvm.{module}.allow_tiles", lambda leave=leave: leave)
        with LibraryBuilder(CompileOptions()) as builder:
            assert ("+amx" in builder.cpu) == leave
