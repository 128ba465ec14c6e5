"""The report on kernels: it accounts for every operation once, its kernels put together compute what the graph computes, and it can be measured."""

from __future__ import annotations

import json
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

import numpy as np
import pytest
import torch

from penstock.backends.bundle.format import open_bundle
from penstock.backends.numpy_backend import NumpyProgram
from penstock.commands.parser import main
from penstock.inspection.kernels import timing as kernel_timing
from penstock.inspection.kernels.kernels import KernelRow, kernel_rows
from penstock.inspection.kernels.timing import random_arguments
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Graph, Module, Op, Slot, Stage, Value, signature
from penstock.ir.ops import cost_of, make
from penstock.ir.text import print_module
from penstock.ir.types import parse_type
from penstock.models import write_gpt
from penstock.passes.kernels.divide import KernelCutter, bytes_moved, divide
from penstock.support.errors import UsageError

GRAPHS = [f"s{stage}.{kind}" for stage in (0, 1) for kind in "FBU"]


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("kernels")
    write_gpt(folder / "gpt.onnx", layers=2, width=16, heads=2, vocab=20, positions=6)
    words = f"compile {folder}/gpt.onnx -o {folder}/bundle --devices 2 --dim batch=2 --loss cross_entropy --optimizer adamw --lr 0.01"
    assert (
        main(
            [
                *words.split(),
                "--microbatches",
                "3",
                "--schedule",
                "2bw",
                "--backend",
                "numpy",
                "--split-at",
                "h.1.attn.residual",
            ]
        )
        == 0
    )
    return folder / "bundle"


@pytest.fixture(scope="module")
def module(bundle: Path) -> Module:
    return open_bundle(bundle).module


def rows_of(module: Module, graph: str) -> list[KernelRow]:
    return [row for row in kernel_rows(module) if row.graph == graph]


@pytest.mark.parametrize("name", GRAPHS)
def test_every_operation_is_accounted_for_once(module: Module, name: str) -> None:
    graph, rows = module.graphs[name], rows_of(module, name)
    division = divide(graph)
    named = [n for row in rows for n in row.names]
    assert sorted(named) == sorted(division.kernels)
    inside = sum(len(row.ops) * len(row.names) for row in rows)
    assert inside + len(division.inline) + len(division.reads) == len(graph.ops)
    expected = sum(cost_of(op).flops for op in graph.ops)
    assert sum(row.flops * len(row.names) for row in rows) == pytest.approx(expected, rel=1e-12)
    assert not any(cost_of(op).flops for op in division.inline)
    # The control: an operation that is left out is missed.
    less = replace(graph, ops=tuple(op for op in graph.ops if op.kind not in ("matmul", "adamw")))
    assert sum(cost_of(op).flops for ops in divide(less).kernels.values() for op in ops) < 0.9 * expected


def test_alike_kernels_differ_in_names_only(module: Module) -> None:
    several = [row for row in kernel_rows(module) if len(row.names) > 1]
    assert several, "two layers must share kernels"
    for row in several:
        division = divide(module.graphs[row.graph])
        for name in row.names:
            assert [op.kind for op in division.kernels[name]] == [op.kind for op in row.ops]
            assert sum(cost_of(op).flops for op in division.kernels[name]) == row.flops


def test_forward_and_backward_run_per_microbatch_and_updates_once(module: Module) -> None:
    for row in kernel_rows(module):
        assert row.calls_per_batch == len(row.names) * (1 if row.graph.endswith("U") else 3)


# ------------------------------------------------------------------------------------------------ kernels put together


def arguments(graph: Graph, module: Module) -> tuple[dict[Value, torch.Tensor], dict[Slot, torch.Tensor]]:
    sig, args = signature(graph), random_arguments(graph, module)
    return dict(zip(sig.ins, args, strict=False)), dict(zip(sig.slots, args[len(sig.ins) :], strict=True))


def run_apart(
    bodies: list[Graph], values: Mapping[Value, torch.Tensor], slots: Mapping[Slot, torch.Tensor]
) -> dict[Value, torch.Tensor]:
    """Run kernels one by one, each as soon as its inputs are there."""
    known, waiting = dict(values), list(bodies)
    while waiting:
        body = next(b for b in waiting if all(v in known for v in b.ins))
        waiting.remove(body)
        sig = signature(body)
        found = NumpyProgram([body]).call(body.name, [*(known[v] for v in sig.ins), *(slots[s] for s in sig.slots)])
        known |= dict(zip(sig.results, found, strict=True))
    return known


@pytest.mark.parametrize("name", [n for n in GRAPHS if n[-1] != "U"])
def test_kernels_put_together_compute_the_graph(module: Module, name: str) -> None:
    graph = module.graphs[name]
    bodies = KernelCutter(graph, divide(graph))
    apart = [bodies.body(kernel) for kernel in divide(graph).kernels]
    values, slots = arguments(graph, module)
    kept = {slot: x.clone() for slot, x in slots.items()}
    expected = NumpyProgram([graph]).call(name, [*values.values(), *kept.values()])
    found = run_apart(apart, values, slots)
    for value, tensor in zip(graph.results, expected, strict=True):
        torch.testing.assert_close(found[value], tensor)
    for slot, tensor in kept.items():
        torch.testing.assert_close(slots[slot], tensor)
    # The control: a kernel with one operation changed gives other results.
    values, slots = arguments(graph, module)
    at = next(i for i, body in enumerate(apart) if any(op.kind == "add" for op in body.ops))
    wrong = tuple(Op("sub", op.ins, op.outs, op.attrs) if op.kind == "add" else op for op in apart[at].ops)
    changed = run_apart([*apart[:at], replace(apart[at], ops=wrong), *apart[at + 1 :]], values, slots)
    same = [torch.equal(changed[v], x) for v, x in zip(graph.results, expected, strict=True)]
    same += [torch.equal(slots[s], x) for s, x in kept.items()]
    assert not all(same)


# ------------------------------------------------------------------------------------------------ bytes


def kernel_of(*ops: Op, outs: tuple[Value, ...]) -> tuple[Graph, tuple[Op, ...]]:
    made = {v for op in ops for v in op.outs}
    ins = tuple(dict.fromkeys(v for op in ops for v in op.ins if v not in made))
    main = tuple(op for op in ops if not str(op.attrs.get("kernel", "")).startswith("inline") and op.kind != "read")
    return Graph("k", ins, outs, ops), main


def test_bytes_by_hand() -> None:
    x, y = Value("x", parse_type("f32[8,16]")), Value("y", parse_type("f32[16]"))
    add = make("add", (x, y), ("s",))
    double = make("mul", (add.outs[0], x), ("d",))
    # x once although read twice, y, and the result; the sum stays in registers.
    assert bytes_moved(*kernel_of(add, double, outs=double.outs)) == 4 * (128 + 16 + 128)
    assert bytes_moved(*kernel_of(add, double, outs=(*add.outs, *double.outs))) == 4 * (128 + 16 + 128 + 128)
    part = make("slice", (x,), ("p",), start=(0, 0), stop=(2, 16), step=(1, 1), kernel="inline0")
    negated = make("neg", part.outs, ("n",))
    assert bytes_moved(*kernel_of(part, negated, outs=negated.outs)) == 4 * (32 + 32)
    wide = make("broadcast", (y,), ("b",), shape=(8, 16), kernel="inline0")
    negated = make("neg", wide.outs, ("n",))
    assert bytes_moved(*kernel_of(wide, negated, outs=negated.outs)) == 4 * (16 + 128)
    added = Op("accum", double.outs, (), {"var": "g"})
    assert bytes_moved(*kernel_of(add, double, added, outs=())) == 4 * (128 + 16 + 2 * 128)
    indices = Value("i", parse_type("i64[3]"))
    looked_up = make("gather", (x, indices), ("r",))
    assert bytes_moved(*kernel_of(looked_up, outs=looked_up.outs)) == 4 * (48 + 48) + 8 * 3
    scattered = make("gather_grad", (looked_up.outs[0], indices), ("t",), shape=(8, 16))
    added = Op("accum", scattered.outs, (), {"var": "g"})
    assert bytes_moved(*kernel_of(scattered, added, outs=())) == 4 * (48 + 2 * 48) + 8 * 3


# ------------------------------------------------------------------------------------------------ arguments


def test_indices_are_in_range_and_slots_of_one_version_are_one_tensor(module: Module) -> None:
    table, raw = Value("table", parse_type("f32[7,2]")), Value("raw", parse_type("i64[500]"))
    cast = make("cast", (raw,), ("c",), dtype="i32")
    graph = Graph("k", (table, raw), (), (cast, make("gather", (table, cast.outs[0]), ("r",))))
    drawn = random_arguments(graph, module)[1]
    assert (int(drawn.min()), int(drawn.max())) == (0, 6)
    update = next(row.body for row in kernel_rows(module) if any(op.kind == "adamw" for op in row.ops))
    by_var: dict[str, list[torch.Tensor]] = {}
    for slot, x in zip(signature(update).slots, random_arguments(update, module)[len(update.ins) :], strict=True):
        by_var.setdefault(slot.var, []).append(x)
    pairs = {var: found[0] is found[1] for var, found in by_var.items() if len(found) == 2}
    assert len(pairs) == 3
    for var, single in pairs.items():
        assert single == (module.vars[var].versions == 1)


def test_operands_are_centred_unless_they_must_be_positive() -> None:
    """A product that is drawn around 0 has sums of about 1; what goes under a root or a logarithm is positive, also where it is computed first."""
    a, b, c = (
        Value("a", parse_type("f32[64,1024]")),
        Value("b", parse_type("f32[32,1024]")),
        Value("c", parse_type("f32[64,32]")),
    )
    turned = make("transpose", (b,), ["t"], "", perm=(1, 0))
    product = make("matmul", (a, turned.outs[0]), ["y"])
    root = make("sqrt", make("add", (c, c), ["d"]).outs, ["r"])
    square = make("sqrt", make("mul", (a, a), ["q"]).outs, ["w"])
    ops = (turned, product, make("add", (c, c), ["d"]), root, make("mul", (a, a), ["q"]), square)
    graph = Graph("k", (a, b, c), (*product.outs, *root.outs, *square.outs), ops)
    x, y, z = random_arguments(graph, Module("m"))
    for drawn in (x, y):
        assert abs(drawn.mean()) < 0.01
        assert drawn.min() < 0 < drawn.max() < 0.35
    assert 0.1 <= z.min() < z.max() < 1
    sums, roots, squares = NumpyProgram([graph]).call("k", [x, y, z])
    assert 0.9 < sums.std() < 1.1
    assert roots.isfinite().all()
    assert squares.isfinite().all()
    # The control: what was drawn before.
    assert (
        np.std(
            np.random.default_rng(0).uniform(0.1, 1, (64, 1024)) @ np.random.default_rng(1).uniform(0.1, 1, (1024, 32))
        )
        > 3
    )


def test_all_operands_of_a_model_are_legal(module: Module) -> None:
    for row in kernel_rows(module):
        sig = signature(row.body)
        results = NumpyProgram([row.body]).call(row.body.name, random_arguments(row.body, module))
        for value, found in zip(sig.results, results, strict=True):
            assert found.isfinite().all(), (row.label, value)


# ------------------------------------------------------------------------------------------------ the command


def test_inspect_lists_kernels_by_share(bundle: Path, module: Module, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["inspect", str(bundle), "--kernels"]) == 0
    out = capsys.readouterr().out
    first = out.split("stage 1 on")[0].splitlines()
    shares = [float(line.split()[-1].rstrip("%")) for line in first if line.endswith("%")]
    assert len(shares) == sum(row.stage == 0 for row in kernel_rows(module))
    assert shares == sorted(shares, reverse=True)
    assert sum(shares) == pytest.approx(100, abs=0.1 * len(shares))
    assert f"s1.B: {len(module.graphs['s1.B'].ops)} operations" in out
    assert "measured" not in out


@pytest.mark.parametrize("backend", ["numpy", "tvm"])
def test_inspect_measures(
    backend: str,
    bundle: Path,
    module: Module,
    tmp_path: Path,
    capsys: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in {
        "_SECONDS": 0.0,
        "_SIDE": 64,
        "_LENGTH": 1 << 12,
    }.items():  # how exactly is the business of others
        monkeypatch.setattr(kernel_timing, name, value)
    target = bundle
    if backend == "tvm":
        # An IR file is measured with the compiler.
        target = tmp_path / "module.ir"
        target.write_text((bundle / "module.ir").read_text())
    assert main(["inspect", str(target), "--measure", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    for plain, row in zip(found, kernel_rows(module), strict=True):
        # By what this machine can do, and not by what the plan says of the device.
        assert plain["roofline_s"] == pytest.approx(
            max(row.flops / plain["flops_per_s"], row.moved / plain["bytes_per_s"])
        )
        assert plain["flops_per_s"] != row.device.flops
        assert plain["measured_s"] > 0
    assert main(["inspect", str(target), "--measure"]) == 0
    shown = capsys.readouterr()
    assert shown.out.count("(measured: ") == 2
    assert shown.out.count("measured ms") == 2
    assert f"back end {backend}" in shown.err
    lines = [line for line in shown.out.splitlines() if line.endswith("%")]
    assert len(lines) == len(kernel_rows(module))
    assert all(float(line.split()[-3]) > 0 for line in lines)


@pytest.mark.skipif(torch.cuda.is_available(), reason="this host has a GPU")
@pytest.mark.parametrize("devices", ["cpu,sm_90", "cpu,cpu"])
def test_a_missing_gpu_is_said_before_anything_is_compiled(
    devices: str, module: Module, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def work(*given: object) -> None:
        raise UsageError("the work began")

    monkeypatch.setattr("penstock.backends.tvm_backend.TvmBackend.compile_stages", work)
    cluster = Cluster.listed(devices)
    stages = tuple(Stage(i, device.name) for i, device in enumerate(cluster.devices))
    (tmp_path / "m.ir").write_text(print_module(module.but(cluster=cluster, stages=stages)))
    assert main(["inspect", str(tmp_path / "m.ir"), "--measure"]) == 2
    said = capsys.readouterr().err
    assert ("the work began" in said) == ("measuring" in said) == ("sm_90" not in devices)
    assert ("stage 1: wants cuda sm_90; this host has none" in said) == ("sm_90" in devices)


def test_tables_fit_the_terminal_and_json_has_it_all(
    bundle: Path, module: Module, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shapes are cut before operations, figures never; what goes to a file is not cut, and the JSON has every type of every operation."""
    monkeypatch.delenv("COLUMNS", raising=False)
    assert main(["inspect", str(bundle), "--kernels"]) == 0
    whole = [line for line in capsys.readouterr().out.splitlines() if line.endswith("%")]
    assert max(map(len, whole)) > 130
    assert not any("..." in line.split("->")[-1] for line in whole)
    monkeypatch.setenv("COLUMNS", "120")
    assert main(["inspect", str(bundle), "--kernels"]) == 0
    fitted = [line for line in capsys.readouterr().out.splitlines() if line.endswith("%")]
    assert max(map(len, fitted)) <= 120
    assert [line.split()[-2:] for line in fitted] == [line.split()[-2:] for line in whole]
    assert main(["inspect", str(bundle), "--kernels", "--json"]) == 0
    found = json.loads(capsys.readouterr().out)
    rows = kernel_rows(module)
    assert [row["kernels"] for row in found] == [list(row.names) for row in rows]
    for plain, row in zip(found, rows, strict=True):
        assert plain["roofline_s"] == row.roofline_s
        assert plain["measured_s"] is None
        assert [op["ins"] for op in plain["operations"]] == [[str(v.type) for v in op.ins] for op in row.ops]
    assert main(["inspect", str(bundle), "--schedule", "--json"]) == 2
    assert "--json is of one thing" in capsys.readouterr().err


def test_measured_is_processor_time(module: Module, monkeypatch: pytest.MonkeyPatch) -> None:
    """A kernel that sleeps costs nothing, one that works does."""

    class Program:
        device = torch.device("cpu")

        def __init__(self, work: Callable[[], object]) -> None:
            self.work = work

        def hold(self, graph: str, slots: Sequence[torch.Tensor]) -> None:
            pass

        def call(self, graph: str, args: Sequence[torch.Tensor]) -> list[torch.Tensor]:
            self.work()
            return []

    def spin() -> None:
        end = time.process_time() + 0.01
        while time.process_time() < end:
            pass

    row = kernel_rows(module)[0]

    def took(work: Callable[[], object]) -> float:
        program = Program(work)
        return kernel_timing._median_call(program, row.body, module, kernel_timing._clock_of(program, 1))

    monkeypatch.setattr(kernel_timing, "_SECONDS", 0.0)
    assert took(lambda: time.sleep(0.01)) < 0.005
    assert took(spin) >= 0.01


def test_inspect_prints_the_source_of_one_kernel(
    bundle: Path, module: Module, capsys: pytest.CaptureFixture[str]
) -> None:
    row = next(row for row in kernel_rows(module) if any(op.kind == "layer_norm" for op in row.ops))
    assert main(["inspect", str(bundle), "--source", row.label]) == 0
    out = capsys.readouterr().out
    assert "prim_func" in out
    assert "layer_norm" in out.splitlines()[0]
    assert main(["inspect", str(bundle), "--source", "s0.F/k999"]) == 2
    assert "s0.F/k0" in capsys.readouterr().err
    assert main(["inspect", str(bundle), "--source", "k0"]) == 2
    assert "graphs have a kernel 'k0'" in capsys.readouterr().err


def test_a_module_without_kernels_says_which_pass_is_missing(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    path = tmp_path / "m.ir"
    path.write_text("module @m {\n}\n")
    assert main(["inspect", str(path), "--kernels"]) == 2
    assert "fuse" in capsys.readouterr().err


def test_random_arguments_give_no_nan(module: Module) -> None:
    for row in kernel_rows(module):
        for tensor in NumpyProgram([row.body]).call(row.body.name, random_arguments(row.body, module)):
            assert not np.isnan(tensor.double().numpy()).any(), row.label
