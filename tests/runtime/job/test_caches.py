"""Bundles with caches in this process and in workers: turns are whole sequences, and weights are packed once."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from oracles.caches.turns import Array, Sequences, Shape, turn_module, whole_sequence

import penstock as ps
from penstock.backends.bundle.format import open_bundle
from penstock.backends.tvm.run.forms import GraphForms, PackedForm, PackedForms
from penstock.frontends.imported import Imported
from penstock.ir.graph import PARAM, Graph, Module, Op, Value, Var
from penstock.ir.ops import make
from penstock.ir.types import TensorType
from penstock.planning.model import Model
from penstock.runtime.state import held
from penstock.support.errors import VerifyError

SHAPE = Shape(rows=8, sequences=3, blocks=24, heads=4, cache_heads=2, size=16)
LENGTHS = [40, 21, 16]
WIDTH = SHAPE.heads * SHAPE.size


def layer() -> Module:
    """A turn whose result goes through a product."""
    module = turn_module(SHAPE)
    main = module.graphs["main"]
    kind = TensorType("f32", (WIDTH, WIDTH))
    weight = Value("proj", kind)
    flat = make("reshape", main.outs, ["flat"], shape=(SHAPE.rows, WIDTH))
    product = make("matmul", (flat.outs[0], weight), ["out"])
    ops = (*main.ops, Op("read", (), (weight,), {"var": "proj"}), flat, product)
    graph = Graph("main", main.ins, product.outs, ops)
    return replace(
        module, outputs=("out",), vars={**module.vars, "proj": Var("proj", kind, PARAM)}, graphs={"main": graph}
    )


WEIGHT = np.random.default_rng(3).standard_normal((WIDTH, WIDTH)).astype(np.float32)


@pytest.fixture(scope="module")
def bundle(tmp_path_factory: pytest.TempPathFactory) -> Path:
    model = Model(Imported(layer(), {"proj": WEIGHT}, "none"))
    folder = tmp_path_factory.mktemp("caches") / "bundle"
    ps.compile(ps.plan(model, ps.Cluster.local(1, threads=[1])), folder, jobs=1)
    return folder


def worst(sequences: Sequences) -> float:
    errors = []
    for rows, parts in zip(sequences.rows, sequences.found, strict=True):
        expected = whole_sequence(*rows, SHAPE).reshape(len(rows[0]), WIDTH) @ WEIGHT
        errors.append(float(np.abs(np.concatenate(parts) - expected).max()))
    return max(errors)


def played(run) -> Sequences:
    sequences = Sequences(SHAPE, LENGTHS)

    def turn(feed: Mapping[str, Array]) -> list[Array]:
        # Rows of padding go into a product, so they are numbers here.
        return [
            np.array(run({name: np.nan_to_num(x) if x.dtype == np.float32 else x for name, x in feed.items()})["out"])
        ]

    sequences.play(turn)
    return sequences


def counted(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """The graphs whose operands are packed, each time one is."""
    calls: list[str] = []
    plain = PackedForms.__init__

    def init(self: PackedForms, graphs: Mapping[str, GraphForms], *others: Any) -> None:
        def counting(name: str, form: PackedForm) -> PackedForm:
            def pack(*slots: object) -> object:
                calls.append(name)
                return form.pack(*slots)

            return replace(form, pack=pack)

        forms = {
            name: replace(graph, forms=tuple(counting(name, form) for form in graph.forms))
            for name, graph in graphs.items()
        }
        plain(self, forms, *others)

    monkeypatch.setattr(PackedForms, "__init__", init)
    return calls


def test_turns_are_whole_sequences_and_nothing_is_packed_again(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    assert worst(played(ps.load(bundle))) < 1e-4
    assert calls == ["s0.F"]


def test_control_a_condition_on_all_effects_packs_in_every_turn(bundle: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    calls = counted(monkeypatch)
    monkeypatch.setattr(
        held, "changed_vars", lambda graphs: {op.var for graph in graphs for op in graph.ops if op.kind == "put"}
    )
    assert worst(played(ps.load(bundle))) < 1e-4
    assert len(calls) > 3


def test_the_bundle_holds_no_cache(bundle: Path) -> None:
    assert set(open_bundle(bundle).weights()) == {"proj"}


def test_a_cache_is_given_no_weights() -> None:
    module = layer()
    broken = module.but(vars={**module.vars, "l0.k": replace(module.vars["l0.k"], init="file")})
    with pytest.raises(VerifyError, match="is a cache with first elements from file"):
        ps.plan(Model(Imported(broken, {"proj": WEIGHT}, "none")), ps.Cluster.local(1, threads=[1]))
