"""Layouts of whole programs: what is given spreads, collectives are few, and the program means what it meant."""

from __future__ import annotations

import re
from collections import Counter
from functools import cache
from pathlib import Path

import numpy as np
import pytest
import torch
from oracles.sharding.drawn_programs import laid_program
from oracles.sharding.laid_out import cut_out, put_together
from oracles.sharding.team_runs import differences
from oracles.sharding.training_case import training_module

import penstock as ps
from penstock.ir.graph import Mesh, Module, Stage
from penstock.ir.interpreter.graphs import run_graph, run_team
from penstock.ir.interpreter.store import DictStore, initial_arrays
from penstock.ir.verify.verifier import verify
from penstock.models import write_cnn, write_gpt, write_mlp, write_resnet
from penstock.passes.partition.partition import PartitionOptions, partition
from penstock.passes.partition.split import SplitOptions, split
from penstock.passes.sharding import presets
from penstock.passes.sharding.localize import localize
from penstock.passes.sharding.shard import ShardOptions, shard
from penstock.planning.options import PlanOptions
from penstock.planning.pipeline import before_partition
from penstock.support.errors import UsageError

VOCABULARY = 38
COLLECTIVES = ("all_reduce", "all_gather", "reduce_scatter", "all_to_all", "shift")


@cache
def model(name: str, folder: Path) -> ps.Model:
    path = folder / f"{name}.onnx"
    if name == "gpt":
        write_gpt(path, layers=2, width=24, heads=6, vocab=VOCABULARY, positions=8, batch=4)
    elif name == "wide":
        write_mlp(path, [512, 512, 512, 8], 512)
    elif name == "mlp":
        write_mlp(path, [12, 40, 24, 5], 6)
    elif name == "resnet":
        write_resnet(path, 2, blocks=(1, 1), width=4, size=32, classes=5)
    else:
        write_cnn(path, 4, size=8)
    return ps.from_onnx(path)


@cache
def whole_program(name: str, folder: Path) -> Module:
    training = ps.Training("cross_entropy", ps.AdamW(lr=1e-2), 1)
    return before_partition(model(name, folder), ps.Cluster.local(1), training)


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def staged(module: Module) -> Module:
    return split(partition(module.but(cluster=ps.Cluster.local(1)), PartitionOptions(stages=1)), SplitOptions())


def local_program(laid: Module, mesh: Mesh) -> Module:
    """Return the program of one device of a mesh, with all facts checked on the way."""
    module = staged(laid).but(
        meshes=(mesh,), stages=(Stage(0, mesh.name),), cluster=ps.Cluster.local(len(mesh.devices))
    )
    module = module.but(facts=(*module.facts, "sharded"))
    verify(module)
    local = localize(module)
    verify(local)
    return local


def laid_out(module: Module, axes: dict[str, int], given: list[str]) -> tuple[Module, Module, Mesh]:
    laid = shard(module, ShardOptions(",".join(f"{axis}={n}" for axis, n in axes.items()), tuple(given)))
    mesh = Mesh("s0", tuple(axes.items()), tuple(f"cpu:{i}" for i in range(int(np.prod(list(axes.values()))))))
    return laid, local_program(laid, mesh), mesh


def counted(local: Module) -> Counter[str]:
    return Counter(op.kind for g in local.graphs.values() for op in g.ops if op.kind in COLLECTIVES)


def feed_of(module: Module) -> dict[str, np.ndarray]:
    rng = np.random.default_rng(0)
    return {
        v.name: rng.integers(0, 5, v.type.dims) if v.type.dtype == "i64" else rng.normal(size=v.type.dims)
        for v in module.inputs
    }


def compare(name: str, folder: Path, axes: dict[str, int], given: list[str], tolerance: float = 1e-10) -> Counter[str]:
    """Run a step on one device and on a mesh: loss and all variables are equal, and so are replicas of a part."""
    source = whole_program(name, folder)
    weights = {key: np.asarray(x, np.float64) for key, x in model(name, folder).imported.weights.items()}
    _, local, mesh = laid_out(source, axes, given)
    whole, feed = staged(source), feed_of(source)
    arrays = initial_arrays(whole, weights, list(whole.vars), "f64")
    store, env = DictStore(arrays), dict(feed)
    stores = [
        DictStore({key: cut_out(np.asarray(x), local.vars[key].type, mesh, p) for key, x in arrays.items()})
        for p in range(len(mesh.devices))
    ]
    inputs = {v.name: v.type for v in local.inputs}
    envs = [{key: cut_out(x, inputs[key], mesh, p) for key, x in feed.items()} for p in range(len(mesh.devices))]
    for kind in "FBNU":
        graph, part = whole.stage_graph(0, kind), local.stage_graph(0, kind)
        if graph is None or part is None:
            continue
        env |= zip((v.name for v in graph.results), run_graph(graph, env, store, "f64"), strict=True)
        results = run_team(part, envs, mesh, stores, "f64")
        envs = [
            e | dict(zip((v.name for v in part.results), r, strict=True)) for e, r in zip(envs, results, strict=True)
        ]
    assert all(abs(float(e[source.outputs[0]]) - float(env[source.outputs[0]])) < tolerance for e in envs)
    for key, array in store.arrays.items():
        got = put_together([np.asarray(s.arrays[key]) for s in stores], local.vars[key].type, mesh)
        np.testing.assert_allclose(np.asarray(got, float), array, rtol=tolerance, atol=tolerance, err_msg=key)
    return counted(local)


MEGATRON = [
    "h.*.qkv.weight=[_,3*/tp]",
    "h.*.attn.proj.weight=[/tp,_]",
    "h.*.fc.weight=[_,/tp]",
    "h.*.mlp.proj.weight=[/tp,_]",
]


@pytest.mark.parametrize(
    ("name", "axes", "given"),
    [
        ("mlp", {"tp": 2}, ["fc1.weight=[_,/tp]", "fc2.weight=[/tp,_]"]),
        ("mlp", {"tp": 3}, ["fc1.weight=[_,/tp]", "y.weight=[_,/tp]"]),
        ("mlp", {"bp": 4}, ["x=[/bp,_]"]),
        ("mlp", {"bp": 2, "tp": 2}, ["x=[/bp,_]", "fc1.weight=[_,/tp]"]),
        ("mlp", {"a": 2, "b": 2}, ["fc1.weight=[/a,/b]", "fc2.weight=[/b/a,_]"]),
        ("gpt", {"tp": 2}, MEGATRON),
        ("gpt", {"tp": 3}, ["preset:sequence"]),
        ("gpt", {"tp": 4}, ["h.*.fc.weight=[_,/tp]", "wte.weight=[/tp,_]", "lm_head.weight=[_,/tp]"]),
        ("gpt", {"tp": 2, "bp": 2}, [*MEGATRON, "tokens=[/bp,_]"]),
        ("gpt", {"tp": 2, "e": 2}, [*MEGATRON, "wpe.weight=[_,/e]"]),
        ("gpt", {"sp": 2}, ["preset:context"]),
        ("gpt", {"cp": 2, "tp": 2}, ["preset:context", *MEGATRON]),
        ("gpt", {"cp": 4}, ["tokens=[_,/cp]"]),
        ("cnn", {"bp": 3}, ["preset:batch"]),
        ("cnn", {"tp": 2}, ["the first convolution"]),
        ("cnn", {"tp": 2}, ["preset:spatial"]),
        ("cnn", {"tp": 3}, ["preset:spatial"]),
        ("cnn", {"bp": 2, "tp": 2}, ["preset:spatial", "x=[/bp,?,/tp,?]"]),
        ("resnet", {"tp": 2}, ["preset:spatial"]),
        ("resnet", {"tp": 3}, ["preset:spatial"]),
    ],
)
def test_programs_on_a_mesh_compute_what_one_device_does(name, axes, given, folder, monkeypatch) -> None:
    monkeypatch.setattr(presets, "VOCABULARY", VOCABULARY - 2)
    if given == ["the first convolution"]:
        first = next(
            v.name for v in whole_program(name, folder).vars.values() if v.role == "param" and v.type.rank == 4
        )
        given = [f"{first}=[/tp,_,_,_]"]
    compare(name, folder, axes, given)


def test_a_pair_of_products_costs_one_sum_forward_and_one_backward(folder) -> None:
    """Two layers with two pairs each: what Megatron-LM needs (Shoeybi and others, 2019, section 3)."""
    assert compare("gpt", folder, {"tp": 2}, MEGATRON) == {"all_reduce": 8}
    laid = shard(whole_program("gpt", folder), ShardOptions("tp=2", tuple(MEGATRON)))
    assert str(laid.vars["h.0.attn.qkv.bias"].type) == "f32[3*24/tp]"
    assert str(laid.vars["h.0.mlp.fc.weight.adam_m"].type) == "f32[24,96/tp]"
    assert laid.vars["h.0.ln_1.weight"].type.is_plain


def test_the_preset_finds_what_is_written_by_hand(folder) -> None:
    program = whole_program("gpt", folder)
    assert shard(program, ShardOptions("tp=2", ("preset:megatron",))) == shard(
        program, ShardOptions("tp=2", tuple(MEGATRON))
    )


@pytest.mark.parametrize("precision", ["bf16", "f16"])
def test_the_preset_finds_the_same_in_16_bits(precision, folder) -> None:
    """Products then take casts of parameters."""
    program, given = whole_program("gpt", folder), ShardOptions("tp=2", ("preset:megatron",))
    training = ps.Training("cross_entropy", ps.AdamW(lr=1e-2), 1)
    cast = before_partition(model("gpt", folder), ps.Cluster.local(1), training, PlanOptions(precision=precision))
    assert any(op.kind == "cast" for op in cast.graphs["F"].ops)
    types = [{v.name: v.type for v in shard(m, given).vars.values() if v.role == "param"} for m in (cast, program)]
    assert types[0] == types[1]


def test_the_preset_finds_products_with_dropout_in_between(folder) -> None:
    """The draws of a mask are split as the hidden units are: nothing but the pair's own sum is added up."""
    torch.manual_seed(0)
    layers = torch.nn.Sequential(torch.nn.Linear(4, 6), torch.nn.Dropout(0.5), torch.nn.Linear(6, 4))
    imported = ps.from_torch(layers.train(), (torch.zeros(3, 4),))
    program = before_partition(imported, ps.Cluster.local(1), ps.Training("mse", ps.SGD(lr=0.1)))
    assert any(op.kind == "random" for op in program.graphs["F"].ops)
    laid, local, _ = laid_out(program, {"tp": 2}, ["preset:megatron"])
    assert [str(laid.vars[name].type) for name in ("0.weight", "0.bias", "2.weight")] == [
        "f32[6/tp,4]",
        "f32[6/tp]",
        "f32[4,6/tp]",
    ]
    assert counted(local) == {"all_reduce": 1}


def test_a_name_has_one_layout_in_all_graphs(folder) -> None:
    """Views that the backward graph makes again may lie in another way there: under names of their own."""
    laid = shard(whole_program("gpt", folder), ShardOptions("tp=5", ("preset:sequence",)))
    lying: dict[str, set[str]] = {}
    for graph in laid.graphs.values():
        for value in (*graph.ins, *(v for op in graph.ops for v in op.outs)):
            lying.setdefault(value.name, set()).add(str(value.type))
    assert {name: types for name, types in lying.items() if len(types) > 1} == {}
    assert any(name.endswith(".again") for name in lying)


def test_sequence_splits_scatter_sums_and_gather_what_products_need(folder) -> None:
    kinds = compare("gpt", folder, {"tp": 2}, ["preset:sequence"])
    assert kinds["reduce_scatter"] == 8
    laid = shard(whole_program("gpt", folder), ShardOptions("tp=2", ("preset:sequence",)))
    norms = [v for op in laid.graphs["F"].ops if op.kind == "layer_norm" for v in op.outs[:1]]
    assert {str(v.type) for v in norms} == {"f32[4,8/tp,24]"}


def test_spatial_splits_move_rows_of_neighbours_alone(folder) -> None:
    """Two 3x3 convolutions with pools by 2: two strips each for the convolution, its gradient for the weight, and that
    for the image of the second. All else that is exchanged are sums of parameters, of the last product and the loss."""
    laid, local, _ = laid_out(whole_program("cnn", folder), {"tp": 2}, ["preset:spatial"])
    images = [
        v for g in laid.graphs.values() for op in g.ops for v in op.outs if v.type.rank == 4 and 4 in v.type.dims[:1]
    ]
    assert len(images) > 15
    assert all(v.type.axes_of(2) == ("tp",) for v in images)
    assert counted(local) == {"shift": 10, "all_reduce": 9}


def test_images_with_too_few_rows_are_refused(folder) -> None:
    with pytest.raises(UsageError, match="too few rows for 9 devices"):
        shard(whole_program("cnn", folder), ShardOptions("tp=9", ("preset:spatial",)))


def test_positions_are_split_in_folded_order_where_attention_is_causal(folder) -> None:
    """The whole model follows: forward nothing but keys, values and the loss is exchanged."""
    laid, local, _ = laid_out(whole_program("gpt", folder), {"cp": 2}, ["preset:context"])
    assert {str(v.type) for v in laid.inputs} >= {"i64[4,-2*4/cp]"}
    forward = [(op.kind, op.outs[0].type.dims) for op in local.graphs["s0.F"].ops if op.kind in COLLECTIVES]
    assert [dims for kind, dims in forward if kind != "shift"] == [()]
    # Keys and values of two layers, between two ranks.
    assert len(forward) == 1 + 2 * 2
    with pytest.raises(UsageError, match="has 8 positions, which are not 6 equal parts"):
        shard(whole_program("gpt", folder), ShardOptions("cp=3", ("preset:context",)))


@pytest.mark.parametrize("causal", [(True, False), (False, True)])
def test_folded_order_is_taken_where_one_attention_of_two_is_causal(causal: tuple[bool, bool]) -> None:
    class Two(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.qkv, self.head = torch.nn.Embedding(9, 8), torch.nn.Linear(8, 24), torch.nn.Linear(8, 9)

        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            x = self.table(tokens)
            for is_causal in causal:
                q, k, v = (part.unsqueeze(1) for part in self.qkv(x).split(8, 2))
                x = x + torch.nn.functional.scaled_dot_product_attention(q, k, v, is_causal=is_causal).squeeze(1)
            return self.head(x)

    model = ps.from_torch(Two(), (torch.zeros(2, 12, dtype=torch.int64),))
    training = ps.Training("cross_entropy", ps.SGD(lr=0.1), microbatches=1)
    plan = ps.plan(model, ps.Cluster.local(2), training, mesh="cp=2", shard=["preset:context"])
    assert str(plan.module.data_inputs[0].type) == "i64[2,-2*6/cp]"


def test_own_forms_that_count_from_an_offset_take_no_blocks() -> None:
    """A table of which each of three blocks is split: looked up whole, and its gradient is that of one device."""
    case = laid_program(training_module(), "a=2", ("table=[3*/a,_]",))
    assert str(case.sharded.vars["table"].type) == "f64[3*2/a,4]"
    assert differences(case) == []


def test_work_is_divided_by_the_devices(folder) -> None:
    """Products whose operands are wide enough that moving them costs less than computing twice: a quarter each."""
    program = whole_program("wide", folder)
    given = ["fc1.weight=[_,/tp]", "fc2.weight=[/tp,_]", "x=[/bp,_]"]
    _, local, _ = laid_out(program, {"tp": 2, "bp": 2}, given)

    def work(module: Module, prefix: str) -> list[float]:
        ops = [op for op in module.graphs[prefix].ops if op.kind == "matmul" and "fc" in op.loc]
        return [op.outs[0].type.size * op.ins[0].type.dims[-2 if op.attrs.get("ta") else -1] for op in ops]

    assert work(local, "s0.F") == [n / 4 for n in work(program, "F")]
    assert work(local, "s0.B") == [n / 4 for n in work(program, "B")]


@pytest.mark.parametrize(
    ("mesh", "given", "words"),
    [
        ("tp=2", ["fc1.weight=[_,/pp]"], "there is no axis pp, the mesh has tp"),
        ("tp=2,dp=2", ["fc1.weight=[_,/dp]"], "microbatches are dealt out along dp"),
        ("tp=2", ["fc1.weight=[/tp,/tp]"], "axis tp splits two dimensions"),
        ("tp=2", ["fc1.weight=[/tp]"], "f32.12,40. has 2 dimensions, the layout 1"),
        ("tp=9", ["y.weight=[_,/tp]"], "dimension 1 has 5 elements for 9 devices"),
        ("tp=3", ["fc1.weight=[_,2*/tp]"], "are not 2 blocks of 3 equal parts"),
        ("tp=2", ["fc9.weight=[_,/tp]"], "fits no name"),
        ("tp=2", ["*.weight=[_,?]", "fc1.weight=[/tp]"], "f32.12,40. has 2 dimensions, the layout 1"),
        ("tp=2", ["fc?.weight=[_,?]", "fc1.*=[_,/tp]", "fc?.weight=[_,/pp]"], "there is no axis pp"),
        ("tp=2", ["fc1.weight=[_,tp]"], "has the dimension 'tp', expected _"),
        ("tp=2", ["fc1.weight=[_,-3*/tp]"], "has the dimension '-3./tp', expected _"),
        ("tp=3", ["fc1.weight=[_,-2*/tp]"], "are not 2 blocks of 3 equal parts"),
        ("tp=2", ["fc1.weight"], "is no PATTERN="),
        ("tp", [], "cannot read the mesh"),
        ("", ["fc1.weight=[_,/tp]"], "layouts are given, but no mesh"),
        ("tp=2", ["preset:megatrom"], "did you mean 'megatron'|megatron"),
        ("a=2,b=2", ["preset:megatron"], "needs one axis beside dp"),
        ("dp=2", ["preset:megatron"], "needs one axis beside dp, the mesh has none"),
        ("tp=7", ["preset:batch"], "too few samples for 7 devices"),
        ("tp=2", ["preset:spatial"], "finds no input that a convolution takes"),
        ("tp=2", ["preset:context"], "finds no attention of a sequence to itself"),
    ],
)
def test_mistakes_are_refused_with_both_facts(mesh, given, words, folder) -> None:
    with pytest.raises(UsageError) as error:
        shard(whole_program("mlp", folder), ShardOptions(mesh, tuple(given)))
    assert re.search(words, str(error.value) + str(error.value.hint)), str(error.value)


def test_a_pattern_whose_names_are_all_laid_out_has_to_be_right_for_one_of_them(folder) -> None:
    program, given = whole_program("mlp", folder), ["fc1.weight=[_,/tp]", "fc1.bias=[/tp]"]
    assert shard(program, ShardOptions("tp=2", (*given, "fc1.*=[/tp]"))) == shard(
        program, ShardOptions("tp=2", tuple(given))
    )


def test_all_mistakes_are_in_one_error(folder) -> None:
    with pytest.raises(UsageError) as error:
        shard(whole_program("mlp", folder), ShardOptions("tp=2", ("fc1.weight=[/pp,_]", "nothing=[_]", "fc2.*=[/tp]")))
    assert all(word in str(error.value) for word in ("axis pp", "nothing", "fc2.weight"))


def test_without_a_mesh_nothing_changes(folder) -> None:
    program = whole_program("mlp", folder)
    assert shard(program, ShardOptions()) is program


def test_control_a_wrong_variable_tile_is_noticed(folder, monkeypatch) -> None:
    """Ranks that have each other's part of one weight."""
    from oracles.sharding import laid_out as oracle

    right = oracle.cut_out

    def wrong(whole, t, mesh, place):
        return right(whole, t, mesh, 1 - place if whole.shape == (12, 40) else place)

    monkeypatch.setitem(globals(), "cut_out", wrong)
    with pytest.raises(AssertionError):
        compare("mlp", folder, {"tp": 2}, ["fc1.weight=[_,/tp]", "fc2.weight=[/tp,_]"])
