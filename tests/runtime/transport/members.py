"""Processes that do collectives with each other; test_collectives.py has them forked from one that has imported this."""

from __future__ import annotations

import contextlib
import itertools
import os
import sys
import time
from dataclasses import replace
from pathlib import Path

import numpy as np
import torch

from penstock.backends.registry import backend_of
from penstock.ir.collective_calls import calls_of, group_of, groups_of, kept_parts, kept_slices, kept_sums, sent_bytes
from penstock.ir.graph import GRAD, Graph, Mesh, Module, Op, Stage, Value, Var, signature
from penstock.ir.interpreter.collectives import COLLECTIVES
from penstock.ir.ops import make
from penstock.ir.schedule import Action
from penstock.ir.text import parse_module
from penstock.ir.types import TensorType, numpy_dtype
from penstock.runtime.group.group import RankGroup, join_store
from penstock.runtime.state.store import Store, SummedGradients
from penstock.runtime.state.tensors import as_array
from penstock.runtime.transport.carriers import Carriers
from penstock.runtime.transport.collectives import RankExchange
from penstock.runtime.transport.library_group import LibraryGroup
from penstock.runtime.transport.overdue import Overdue
from penstock.support.errors import PenstockError

DTYPES = ("f32", "f64", "i32", "i64", "bf16", "f16")
# Small, odd, empty, and large enough to go by parts.
SHAPES = ((5, 6), (1, 4), (3, 0), (7, 12), (121, 122))


def mesh_module(axes, graph):
    """A module of one stage on a mesh with these axes."""
    count = int(np.prod([size for _, size in axes]))
    mesh = Mesh("s0", axes, tuple(f"cpu:{i}" for i in range(count)))
    return Module("m", meshes=(mesh,), stages=(Stage(0, "s0"),), graphs={graph.name: graph})


def all_collectives(axes, dtypes=DTYPES):
    """A graph with collectives of all kinds over all groups of a mesh."""
    sizes, ops, ins = dict(axes), [], []
    names = [name for name, size in axes if size > 1]
    overs = [*names, *(tuple(order) for order in itertools.permutations(names, 2))]
    for dtype, shape in itertools.product(dtypes, SHAPES):
        x = Value(f"{dtype}.{'x'.join(map(str, shape))}", TensorType(dtype, shape))
        ins.append(x)
        for over in overs:
            n = int(np.prod([sizes[name] for name in ([over] if isinstance(over, str) else over)]))
            for i, (kind, attrs) in enumerate(_kinds(shape, n)):
                tag = over if isinstance(over, str) else "_".join(over)
                ops.append(make(kind, [x], [f"{x.name}.{i}.{tag}"], over=over, **attrs))
    return Graph("s0.F", tuple(ins), tuple(v for op in ops for v in op.outs), tuple(ops))


def _kinds(shape, n):
    """Collectives of a shape in a group of n, with parts that are uneven where that is possible."""
    rows, columns = shape
    less = 1 if rows > 1 else 0
    return [
        ("all_reduce", {}),
        ("all_reduce", {"by": "max"}),
        ("reduce_scatter", {"axis": 0, "parts": n}),
        ("reduce_scatter", {"axis": 1, "parts": n, "blocks": 2}),
        ("all_gather", {"axis": 0, "size": n * rows - less}),
        ("all_gather", {"axis": -1, "size": n * columns, "blocks": 2}),
        ("all_to_all", {"split": 0, "join": 1, "parts": n, "size": n * columns - (1 if columns > 1 else 0)}),
        ("shift", {"by": 1}),
        ("shift", {"by": -2}),
    ]


def operand(call, rank, salt=0):
    """The operand of one rank: what every rank knows of every other."""
    x = call.op.ins[0].type
    draw = np.random.default_rng([rank, call.number, salt]).standard_normal(x.dims) * 9
    return draw.astype(numpy_dtype(x.dtype))


def tensor(array):
    return (
        torch.from_numpy(array.view(np.int16)).view(torch.bfloat16)
        if array.dtype == numpy_dtype("bf16")
        else torch.from_numpy(array)
    )


def expected(module, rank, call, salt=0):
    """The result of a collective by the interpreter."""
    ranks = group_of(module, rank, call.over)
    return COLLECTIVES[call.op.kind]([operand(call, other, salt) for other in ranks], call.attrs)[ranks.index(rank)]


class Member:
    """One rank with its exchange: over shared memory or, if it is not `near`, over gloo."""

    def __init__(self, module, rank, group, near=True, seconds=10):
        if not near:
            os.environ["PENSTOCK_SHARED_MEMORY"] = "0"
            group.connect()
        self.module, self.rank = module, rank
        self.exchange = RankExchange(module, rank, seconds)
        circles = group.form_circles(groups_of(module), torch.device("cpu"))
        self.carriers = Carriers(circles, rank, seconds, Overdue(seconds, group.lost))
        self.exchange.join(self.carriers.groups, self.carriers.devices)
        assert all(bool(circle.lines) == near for circle in circles)

    def begin(self, call, salt=0):
        x, out = (
            operand(call, self.rank, salt),
            np.empty(call.op.outs[0].type.dims, numpy_dtype(call.op.ins[0].type.dtype)),
        )
        held = tensor(x), tensor(out)
        self.exchange.begin(call, *held)
        return held

    def run(self, call, salt=0):
        _, out = self.begin(call, salt)
        self.exchange.wait(call)
        return as_array(out)


def every_kind(rank, group, axes, near):
    """All collectives, each by itself and several under way, are those of the interpreter to the bit, twice."""
    module = mesh_module(axes, all_collectives(axes, DTYPES if near and len(axes) == 1 else ("f32", "bf16")))
    member = Member(module, rank, group, near)
    calls = calls_of(module.graphs["s0.F"])
    sent = 0
    for salt in (0, 1, 0):
        member.exchange.enter(Action("F", 0, salt))
        for call in calls:
            assert member.run(call, salt).tobytes() == expected(module, rank, call, salt).tobytes(), str(call)
            sent += sent_bytes(call.op, len(group_of(module, rank, call.over)))
    assert (member.exchange.sent, member.exchange.count) == (sent, 3 * len(calls))
    for first in range(0, len(calls), 7):
        some = calls[first : first + 7]
        outs = [(call, member.begin(call)[1]) for call in some]
        for call, out in outs:
            member.exchange.wait(call)
            assert as_array(out).tobytes() == expected(module, rank, call).tobytes(), str(call)
    group.gather("end", b"")


def keep_parts(rank, group, members, near, reach=0):
    """AR leaves each member the sums of its parts, in the order of ranks, and touches nothing else; the sums of two
    batches are under way at once. `reach`: the part that is looked at is that of another member."""
    shapes = {"f32": ((7, 3), (1, 5), (4,), (64, 65)), "bf16": ((6, 2),), "f64": ((5,),)}
    names = {f"{dtype}.{i}": TensorType(dtype, s) for dtype, listed in shapes.items() for i, s in enumerate(listed)}
    variables = {
        name: Var(name, t.laid((), ("dp",)), GRAD, stage=0, versions=2, init="zeros") for name, t in names.items()
    }
    adding = [Op("accum", (Value(f"of.{name}", t),), (), {"var": name}) for name, t in names.items()]
    meeting = _one_sum("dp").ops
    ins = tuple(v for op in (*adding, *meeting) for v in op.ins)
    graph = Graph("s0.B", ins, meeting[0].outs, (*adding, *meeting))
    module = mesh_module((("dp", members),), graph).but(vars=variables)
    exchange = Member(module, rank, group, near).exchange
    calls = kept_sums(module, 0)
    local = {name: replace(var, type=names[name]) for name, var in variables.items()}
    store = Store(local, (), summed=SummedGradients(kept=calls, lend=exchange.lend))
    drawn = lambda batch, place, number, t: (  # noqa: E731
        np.random.default_rng([batch, place, number]).standard_normal(t.dims).astype(numpy_dtype(t.dtype))
    )
    for batch in (0, 1, 2, 3):
        for number, (name, t) in enumerate(names.items()):
            store.gradients[name][batch % 2].copy_(tensor(drawn(batch, rank, number, t)))
        exchange.enter(Action("AR", 0, batch))
        for call, gradients in store.kept(batch):
            exchange.begin(call, gradients, gradients)
        for ready in (batch - 1, batch) if batch % 2 else ():
            for call, _ in store.kept(ready):
                exchange.wait(call)
            for number, part in enumerate(kept_parts(module, 0)):
                name, t = part.op.ins[0].name, part.op.ins[0].type
                own = kept_slices(part, (rank + reach) % members, members)
                mine = drawn(ready, rank, list(names).index(name), t)
                expected_sum = mine[own].astype("f4" if t.dtype == "bf16" else mine.dtype) * 0
                for place in range(members):
                    expected_sum += drawn(ready, place, list(names).index(name), t)[own].astype(expected_sum.dtype)
                mine[own] = expected_sum.astype(mine.dtype)
                assert as_array(store.gradients[name][ready % 2]).tobytes() == mine.tobytes(), (name, number)
    sent = sum(sent_bytes(call.op, members) for call in kept_parts(module, 0))
    assert exchange.sent == 4 * sent
    assert {call.key in exchange._lent for call in calls} == {near}
    group.gather("end", b"")


def speak(scenario, rank, world, port, log, arguments):
    """Run a scenario as one rank; what it says, and its error, go to a file."""
    with open(log, "w", buffering=1) as said, contextlib.redirect_stdout(said), contextlib.redirect_stderr(said):
        try:
            group = RankGroup(join_store(port, world, 30), rank, world, 30)
            globals()[scenario](rank, group, *arguments)
            code = 0
        except PenstockError as error:
            print(type(error).__name__, error)
            code = error.exit_code
        except BaseException as error:
            import traceback

            traceback.print_exc()
            code = 1 if not isinstance(error, SystemExit) else 2
        sys.stdout.flush()
    os._exit(code)


def late(rank, group, near):
    """Rank 1 never comes."""
    module = mesh_module((("tp", 2),), _one_sum())
    member = Member(module, rank, group, near, seconds=1)
    (call,) = calls_of(module.graphs["s0.F"])
    member.exchange.enter(Action("F", 0, 3) if rank == 0 else Action("B", 0, 1))
    if rank == 0:
        member.run(call)
    else:
        time.sleep(3)


def killed(rank, group, near):
    """Rank 1 ends in the middle of it."""
    module = mesh_module((("tp", 2),), _one_sum())
    member = Member(module, rank, group, near)
    (call,) = calls_of(module.graphs["s0.F"])
    member.exchange.enter(Action("F", 0, 3))
    member.run(call)
    if rank == 1:
        os._exit(9)
    member.run(call)


def elsewhere(rank, group, near):
    """Rank 1 runs another action, with a collective of the same size."""
    graph = _one_sum()
    module = mesh_module((("tp", 2),), graph)
    if rank:
        other = make("all_reduce", [Value("q", TensorType("f32", (4,)))], ["z"], over="tp")
        module = mesh_module((("tp", 2),), Graph("s0.B", other.ins, other.outs, (other,)))
    member = Member(module, rank, group, near)
    (call,) = calls_of(next(iter(module.graphs.values())))
    member.exchange.enter(Action("F", 0, 3) if rank == 0 else Action("B", 0, 1))
    try:
        member.run(call)
    finally:
        group.gather("end", b"")


def by_library(rank, group, axes):
    """The calls of a library, with gloo in place of NCCL: sums are in its own order, so they are compared roughly."""
    group.connect()
    module = mesh_module(axes, all_collectives(axes, ("f32",)))
    exchange = RankExchange(module, rank, 10)
    os.environ["PENSTOCK_SHARED_MEMORY"] = "0"
    for circle in group.form_circles(groups_of(module), torch.device("cpu")):
        exchange.join({}, {circle.ranks: LibraryGroup(circle.group, circle.ranks, rank, Overdue(20, group.lost))})
    member = object.__new__(Member)
    member.module, member.rank, member.exchange = module, rank, exchange
    for call in calls_of(module.graphs["s0.F"]):
        if call.op.outs[0].type.size:
            np.testing.assert_allclose(member.run(call), expected(module, rank, call), rtol=1e-5, atol=1e-5)
    group.gather("end", b"")


def _one_sum(over="tp"):
    op = make("all_reduce", [Value("p", TensorType("f32", (4,)))], ["y"], over=over)
    return Graph("s0.F", op.ins, op.outs, (op,))


def stage(rank, group, path, backend, files, folder):
    """Run the graphs of a stage forward and backward, twice; keep the results."""
    module = parse_module(Path(path).read_text(), "local.ir")
    member = Member(module, rank, group)
    program = backend_of(backend).load_stage(module, 0, [Path(name) for name in files], exchange=member.exchange)
    runs = []
    for _ in range(2):
        values, slots = stage_inputs(module, rank)
        for kind in ("F", "B"):
            graph = module.stage_graph(0, kind)
            called = signature(graph)
            member.exchange.enter(Action(kind, 0, 0))
            args = [tensor(values[v.name]) for v in called.ins] + [tensor(slots[slot.var]) for slot in called.slots]
            results = program.call(graph.name, args)
            values |= {v.name: as_array(x).copy() for v, x in zip(called.results, results, strict=True)}
        runs.append(values | {f"@{name}": array for name, array in slots.items()})
    assert all(runs[0][name].tobytes() == runs[1][name].tobytes() for name in runs[0]), "not repeatable"
    np.savez(Path(folder) / f"{backend}{rank}.npz", **{name.replace("/", "|"): x for name, x in runs[0].items()})
    group.gather("end", b"")


def stage_inputs(module, rank):
    """Return the inputs of a stage, the same on all ranks, and the variables of one rank: parameters that are split
    differ."""
    shared = np.random.default_rng(0)
    values = {}
    for v in module.inputs:
        whole = v.type.dtype == "i64"
        values[v.name] = shared.integers(0, 3, v.type.dims) if whole else shared.standard_normal(v.type.dims)
        values[v.name] = values[v.name].astype(numpy_dtype(v.type.dtype))
    slots = {}
    for number, (name, var) in enumerate(module.vars.items()):
        type = module.local_type(var.type, 0)
        drawn = np.random.default_rng([number, 0 if var.type.is_plain else 1 + rank]).standard_normal(type.dims)
        slots[name] = np.array(0 * drawn if var.role == "grad" else drawn, numpy_dtype(type.dtype))
    return values, slots
