"""Bugs put into passes one at a time: each is refused by the verifier, or `verify --bisect` names the pass and the value where it shows first."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from penstock.cli import main
from penstock.ir.graph import Graph, Module, Op, Value, substitute
from penstock.models import write_gpt
from penstock.passes.pipelines import PASSES

Break = Callable[[Module], Module]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("bisect") / "gpt.onnx"
    return write_gpt(path, layers=2, width=8, heads=2, vocab=12, positions=5)


def compiled(model: Path, folder: Path) -> int:
    words = [
        "compile",
        model,
        "-o",
        folder / "bundle",
        "--devices",
        "2",
        "--dim",
        "batch=2",
        "--loss",
        "cross_entropy",
        "--optimizer",
        "adamw",
    ]
    words += ["--weight-decay", "0.1", "--microbatches", "2", "--schedule", "2bw", "--backend", "numpy", "--dump-ir", folder / "dumps"]
    return main([str(word) for word in words])


def bisected(folder: Path) -> int:
    return main(["verify", str(folder / "dumps"), "--bisect", "--steps", "3"])


# ------------------------------------------------------------------------------------------------ bugs


def in_graph(name: str, change: Callable[[list[Op]], list[Op]]) -> Break:
    def broken(module: Module) -> Module:
        graph = module.graphs[name]
        ops = change(list(graph.ops))
        assert ops != list(graph.ops), "nothing was broken"
        return module.with_graph(Graph(graph.name, graph.ins, graph.outs, tuple(ops), graph.saved))

    return broken


def at(ops: list[Op], name: str) -> int:
    """The operation that makes a value, or works on a variable."""
    return next(i for i, op in enumerate(ops) if name in (*(v.name for v in op.outs), op.attrs.get("var") if not op.outs else None))


def changed(name: str, **attrs: object) -> Callable[[list[Op]], list[Op]]:
    """Other attributes."""

    def change(ops: list[Op]) -> list[Op]:
        i = at(ops, name)
        ops[i] = ops[i].with_attrs(**attrs)  # type: ignore[arg-type]
        return ops

    return change


def dropped(name: str) -> Callable[[list[Op]], list[Op]]:
    def change(ops: list[Op]) -> list[Op]:
        del ops[at(ops, name)]
        return ops

    return change


def passed_by(name: str, operand: int = 0) -> Callable[[list[Op]], list[Op]]:
    """Who reads a value reads an operand of its operation instead."""

    def change(ops: list[Op]) -> list[Op]:
        i = at(ops, name)
        instead = {ops[i].outs[0]: ops[i].ins[operand]}
        later = [Op(op.kind, substitute(op.ins, instead), op.outs, op.attrs, op.loc) for op in ops[i + 1 :]]
        return [*ops[:i], *later]

    return change


def negated(name: str) -> Callable[[list[Op]], list[Op]]:
    def change(ops: list[Op]) -> list[Op]:
        i = at(ops, name)
        op = ops[i]
        plain = Value(f"{name}.plain", op.outs[0].type)
        of = {k: v for k, v in op.attrs.items() if k == "of"}
        return [*ops[:i], Op(op.kind, op.ins, (plain,), op.attrs, op.loc), Op("neg", (plain,), op.outs, of, op.loc), *ops[i + 1 :]]

    return change


def swapped(name: str) -> Callable[[list[Op]], list[Op]]:
    def change(ops: list[Op]) -> list[Op]:
        i = at(ops, name)
        ops[i] = Op(ops[i].kind, ops[i].ins[::-1], ops[i].outs, ops[i].attrs, ops[i].loc)
        return ops

    return change


def shifted(name: str) -> Callable[[list[Op]], list[Op]]:
    """A value twice as large."""

    def change(ops: list[Op]) -> list[Op]:
        i = at(ops, name)
        op = ops[i]
        plain = Value(f"{name}.plain", op.outs[0].type)
        rest = {k: v for k, v in op.attrs.items() if k in ("of", "kernel")}
        return [*ops[:i], Op(op.kind, op.ins, (plain,), op.attrs, op.loc), Op("add", (plain, plain), op.outs, rest, op.loc), *ops[i + 1 :]]

    return change


def latest(ops: list[Op]) -> list[Op]:
    """All reads of the newest version."""
    return [op.with_attrs(version="latest") if op.kind == "read" else op for op in ops]


BUGS = {
    "a layer without its activation": ("simplify", in_graph("main", passed_by("h.1.mlp.gelu")), "h.1.mlp.proj.product"),
    "a missing residual": ("simplify", in_graph("main", passed_by("h.0.mlp.residual", 1)), "h.1.ln_1"),
    "a missing bias": ("simplify", in_graph("main", passed_by("h.0.attn.qkv")), "h.0.attn.q"),
    "a wrong epsilon": ("decompose", in_graph("main", changed("h.1.ln_1", eps=0.1)), "h.1.ln_1"),
    "a wrong mask": ("decompose", in_graph("main", changed("h.0.attn.mix", causal=False)), "h.0.attn.mix"),
    "a wrong sign of a derivative": ("autodiff", in_graph("B", negated("h.1.mlp.fc.grad")), "h.1.mlp.fc.grad"),
    "a wrong factor of the loss": ("autodiff", in_graph("B", changed("loss.grad", value=1.0)), "loss.grad"),
    "the derivative of another function": ("autodiff", in_graph("B", changed("h.0.mlp.fc.grad", approximate="none")), "h.0.mlp.fc.grad"),
    "a gradient that is not added up": ("autodiff", in_graph("B", dropped("h.0.mlp.fc.bias.grad")), ""),
    "a gradient that is added up twice": ("split", in_graph("s0.B", shifted("h.1.mlp.fc.weight.grad")), "h.1.mlp.fc.weight.grad"),
    "operands the wrong way round": ("split", in_graph("s0.B", swapped("h.1.attn.proj.weight.grad")), "h.1.attn.proj.weight.grad"),
    "a decay that was lost": ("split", in_graph("s0.U", changed("lm_head.weight.next", weight_decay=0.0)), "lm_head.weight.next"),
    "the wrong version of a weight": ("weight-versions", in_graph("s0.B", latest), ""),
    "a kernel with another function": ("fuse", in_graph("s0.F", changed("h.0.mlp.gelu", approximate="none")), "h.0.mlp.gelu"),
    "an epilogue that is done twice": ("fuse", in_graph("s0.F", shifted("h.1.mlp.proj")), "h.1.mlp.proj"),
}
# What the verifier sees by itself.
REFUSED = ("a missing bias", "a gradient that is not added up", "the wrong version of a weight")


@pytest.mark.parametrize("bug", BUGS)
def test_a_bug_in_a_pass_is_found(
    bug: str, model: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    name, broken, value = BUGS[bug]
    row = PASSES[name]
    times = []

    def run(module: Module, options: object) -> Module:
        times.append(name)
        return broken(row.run(module, options)) if len(times) == 1 else row.run(module, options)

    monkeypatch.setitem(PASSES, name, replace(row, run=run))
    code = compiled(model, tmp_path)
    if code:
        # Refused by the verifier, at the latest where a later pass needs what is missing; what went into that one is kept.
        assert code == 5
        assert "error: pass " in capsys.readouterr().err
        assert bug in REFUSED
        assert (tmp_path / "dumps" / "repro.ir").exists()
        return
    capsys.readouterr()
    assert bisected(tmp_path) == 5
    told = capsys.readouterr()
    assert f"pass {name}" in told.err
    assert f"first wrong after: {name}" in told.out
    first = told.out.partition("first value that is off: ")[2]
    assert value in first.partition(" of ")[0], first


def test_what_is_right_passes_and_other_folders_are_refused(model: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert compiled(model, tmp_path) == 0
    capsys.readouterr()
    assert bisected(tmp_path) == 0
    assert "no pass changes what gpt computes" in capsys.readouterr().out
    assert main(["verify", str(tmp_path / "bundle"), "--bisect"]) == 2
    assert "there is no 00_input.ir" in capsys.readouterr().err
    assert main(["verify", str(tmp_path / "dumps"), "--bisect", "--parity"]) == 2
