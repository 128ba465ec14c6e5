"""Random modules with every part of the text form: well-formed text, not meaningful programs."""

from __future__ import annotations

from hypothesis import strategies as st

from penstock.ir.action_kinds import ACTION_KINDS, CHUNK_ITEM, STATE_ITEM
from penstock.ir.cluster.cluster import Cluster, Device, Link
from penstock.ir.cluster.spaces import Space, SpaceWay
from penstock.ir.graph import ROLES, Edge, Graph, Mesh, Module, Note, Op, Stage, Value, Var
from penstock.ir.schedule import KINDS, MESSAGES, Action, Program, Schedule
from penstock.ir.types import DTYPES, TensorType

names = st.from_regex(r"[A-Za-z0-9_./:\-]{1,8}", fullmatch=True)
words = st.from_regex(r"[a-z][a-z_]{0,6}", fullmatch=True)
lines = st.text(st.characters(codec="utf-8", exclude_categories=("C", "Z")), max_size=12)
scalars = st.one_of(st.booleans(), st.integers(-(10**12), 10**12), st.floats(allow_nan=False), st.text(max_size=8))
literals = st.one_of(scalars, st.lists(scalars, max_size=4).map(tuple))


@st.composite
def types(draw: st.DrawFn) -> TensorType:
    shape = tuple(draw(st.lists(st.one_of(st.integers(0, 512), st.sampled_from(["B", "seq_len"])), max_size=4)))
    axes = tuple(tuple(draw(st.lists(st.sampled_from(["dp", "tp"]), max_size=2, unique=True))) for _ in shape)
    partial = tuple(sorted(draw(st.lists(st.sampled_from(["dp", "tp"]), max_size=2, unique=True))))
    return TensorType(draw(st.sampled_from(DTYPES)), shape, axes if any(axes) else (), partial)


@st.composite
def graphs(draw: st.DrawFn, name: str) -> Graph:
    pool = draw(st.lists(names, min_size=1, max_size=12, unique=True))
    values = [Value(n, draw(types())) for n in pool]
    count = draw(st.integers(0, len(values)))
    known, unused, ops = list(values[:count]), list(values[count:]), []
    while unused:
        outs = [unused.pop() for _ in range(draw(st.integers(1, len(unused))))]
        ins = draw(st.lists(st.sampled_from(known), max_size=3)) if known else []
        attrs = draw(st.dictionaries(words.filter(lambda w: w != "var"), literals, max_size=3))
        if draw(st.booleans()):
            attrs = {"var": draw(names), **attrs}
        ops.append(Op(draw(words), tuple(ins), tuple(outs), attrs, draw(lines)))
        known += outs
    some = st.lists(st.sampled_from(known), max_size=3, unique=True) if known else st.just([])
    return Graph(name, tuple(values[:count]), tuple(draw(some)), tuple(ops), tuple(draw(some)))


@st.composite
def actions(draw: st.DrawFn) -> Action:
    kind, peer, end = draw(st.sampled_from(KINDS)), None, None
    if kind in MESSAGES:
        peer, end = draw(st.integers(0, 99)), draw(st.none() | st.integers(0, 99))
    stage, number, version = (
        draw(st.integers(0, 99)),
        draw(st.integers(0, 10**6)),
        draw(st.none() | st.integers(0, 999)),
    )
    named = (STATE_ITEM, f"{CHUNK_ITEM}0", f"{CHUNK_ITEM}12")
    items = {"": st.just(""), "may": st.sampled_from(("", *named)), "must": st.sampled_from(named)}
    return Action(kind, stage, number, version, peer, end, draw(items[ACTION_KINDS[kind].item]))


@st.composite
def modules(draw: st.DrawFn) -> Module:
    unique = st.lists(names, max_size=3, unique=True)
    cluster = None
    if draw(st.booleans()):
        spaces = tuple((n, draw(st.integers(1, 2**40))) for n in draw(st.lists(words, max_size=2, unique=True)))
        rate = draw(st.floats(1, 1e15))
        cluster = Cluster(
            (Device("cpu:0", spaces=spaces, flops=rate), Device("b", "cuda", host="x.y")),
            (Link("cpu:0", "b", nic="eth0"),),
            spaces=draw(
                st.sampled_from([(), (Space("disk"), Space("ssd", "x.y", bytes=9, path="/mnt/a-b", bandwidth=rate))])
            ),
            ways=draw(
                st.sampled_from([(), (SpaceWay("cpu:0", "disk", rate, nic="eth0"), SpaceWay("b", "ssd", rate, 1e-5))])
            ),
        )
    vars = {
        n: Var(n, draw(types()), draw(st.sampled_from(ROLES)), draw(st.none() | st.integers(0, 9)), draw(st.integers(1, 3)), draw(st.sampled_from(["", "2bw"])), draw(st.sampled_from(["file", "zeros"])), **dict(zip(("home", "chunk"), draw(st.sampled_from([("", None), ("disk", None), ("disk", 3)])), strict=True)))
        for n in draw(unique)
    }  # fmt: skip
    schedule = None
    if draw(st.booleans()):
        part = st.lists(actions(), max_size=5).map(tuple)
        schedule = Schedule(
            draw(names),
            draw(st.integers(1, 64)),
            {r: Program(draw(part), draw(part)) for r in range(draw(st.integers(0, 3)))},
        )
    edge = [Edge(0, 1, draw(st.sampled_from("FB")), (Value("h", draw(types())),))] if draw(st.booleans()) else []
    return Module(
        draw(names),
        tuple(Value(n, draw(types())) for n in draw(unique)),
        tuple(draw(unique)),
        cluster,
        (Mesh("m", (("dp", 2), ("tp", 1)), ("cpu:0", "b")),) if draw(st.booleans()) else (),
        tuple(Stage(i, draw(names)) for i in range(draw(st.integers(0, 3)))),
        vars,
        {n: draw(graphs(n)) for n in draw(unique)},
        tuple(edge),
        schedule,
        tuple(draw(st.lists(words, max_size=3))),
        tuple(Note(draw(names), draw(lines.filter(bool))) for _ in range(draw(st.integers(0, 2)))),
    )
