"""Tiles between unlike meshes, and who sends them.

The cases are the nine of the suite of Alpa's authors for n to m devices, with smaller tensors, and uneven ones. The
oracle of what arrives are NumPy's slices of the whole value, by ceilings of quotients. The oracle of the choice is an
exhaustive search where there are few, and what network cards have to carry at least.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from itertools import product
from math import prod
from typing import NamedTuple

import numpy as np
import pytest

from penstock.ir.cluster.cluster import Cluster, Device, Host
from penstock.ir.graph import Edge, Mesh, Value
from penstock.ir.sharding.tile_messages import TileEnds, TileSender
from penstock.ir.types import parse_type
from penstock.passes.communicate.senders import EXACT, SenderChoice, best_choice, chains
from penstock.passes.sharding.crossings.arrivals import arrival

RATE = 1e8


class Case(NamedTuple):
    """Hosts and devices of each at both ends, and how the value lies: on axes a of hosts and b of devices, or u and v
    where it arrives."""

    source: tuple[int, int]
    target: tuple[int, int]
    before: str
    after: str


SUITE = (
    Case((2, 4), (2, 4), "f32[64/a,64,32]", "f32[64/u,64,32]"),
    Case((2, 4), (2, 4), "f32[64,64,32]", "f32[64/u,64,32]"),
    Case((2, 4), (2, 4), "f32[64,64/a,32]", "f32[64/u,64,32]"),
    Case((2, 4), (2, 4), "f32[64,64/a/b,32]", "f32[64/u/v,64,32]"),
    Case((2, 4), (2, 4), "f32[64/b,64,32]", "f32[64/u,64,32]"),
    Case((2, 4), (3, 4), "f32[192/a,64,10]", "f32[192/u,64,10]"),
    Case((1, 4), (2, 4), "f32[64/b,64,32]", "f32[64,64,32]"),
    Case((1, 4), (2, 4), "f32[64,64/b,32]", "f32[64,64,32]"),
    Case((2, 4), (2, 4), "f32[64,64/a,32]", "f32[64,64,32/u]"),
)
UNEVEN = (
    Case((1, 2), (1, 3), "f32[10/b,7]", "f32[10/v,7]"),
    Case((2, 2), (1, 3), "f32[7/a,5/b]", "f32[7,5/v]"),
    Case((1, 3), (2, 2), "f32[3*5/b,4]", "f32[15/u,4/v]"),
    Case((1, 2), (1, 4), "f32[-2*8/b,3]", "f32[16/v,3]"),
    Case((1, 4), (1, 2), "f32[3/b]", "f32[3/v]"),
)
SMALL = (
    Case((2, 2), (2, 2), "f32[64,64]", "f32[64/u,64]"),
    Case((1, 4), (1, 4), "f32[64,64]", "f32[64,64]"),
    Case((2, 2), (1, 3), "f32[60/a,64]", "f32[60/v,64]"),
    Case((2, 2), (2, 2), "f32[64/b,64]", "f32[64,64/v]"),
    Case((2, 1), (2, 2), "f32[7,64]", "f32[7/u/v,64]"),
)


def _mesh(name: str, axes: str, shape: tuple[int, int]) -> Mesh:
    return Mesh(name, tuple(zip(axes, shape, strict=True)), tuple(f"{name}:{i}" for i in range(prod(shape))))


def _cluster(*meshes: tuple[Mesh, tuple[int, int]]) -> Cluster:
    """Every row of a mesh is a host with one network card."""
    devices = [
        Device(name, host=f"{mesh.name}{i // shape[1]}")
        for mesh, shape in meshes
        for i, name in enumerate(mesh.devices)
    ]
    hosts = tuple(Host(host, nic_bandwidth=RATE) for host in dict.fromkeys(device.host for device in devices))
    return Cluster(tuple(devices), hosts=hosts)


def _ends(case: Case, *, scatter: bool) -> tuple[TileEnds, Cluster]:
    source, target = _mesh("s", "ab", case.source), _mesh("t", "uv", case.target)
    cluster, left = _cluster((source, case.source), (target, case.target)), parse_type(case.before)
    wanted = parse_type(case.after)
    if scatter:
        scattered = arrival(left, wanted, (source, target), cluster)
        wanted = scattered.type if scattered.in_tiles else wanted
    return TileEnds(Edge(0, 1, "F", (Value("x", left),), (wanted,)), source, target), cluster


def _elements(case_type: str, mesh: Mesh, place: int) -> list[list[int]]:
    """The numbers of a place's elements along every dimension, from the words of a type alone; padding is -1."""
    inside, lists = case_type[case_type.index("[") + 1 : case_type.rindex("]")], []
    for text in inside.split(","):
        size, *axes = text.split("/")
        blocks, n = (int(size.split("*")[0]), int(size.split("*")[1])) if "*" in size else (1, int(size))
        parts, index = 1, 0
        for axis in axes:
            parts, index = parts * mesh.sizes[axis], index * mesh.sizes[axis] + mesh.coordinates(place)[axis]
        each = -(-n // parts)
        numbers = []
        for block in range(abs(blocks)):
            at = parts - 1 - index if blocks < 0 and block % 2 else index
            numbers += [block * n + i if i < n else -1 for i in range(at * each, (at + 1) * each)]
        lists.append(numbers)
    return lists


def _part(whole: np.ndarray, numbers: list[list[int]]) -> np.ndarray:
    padded = np.pad(whole, [(0, 1)] * whole.ndim)
    part: np.ndarray = padded[np.ix_(*numbers)]
    return part


@pytest.mark.parametrize("case", [*SUITE, *UNEVEN, *SMALL])
@pytest.mark.parametrize("scatter", [False, True])
def test_what_arrives_are_slices_of_the_whole_value(case: Case, scatter: bool) -> None:
    ends, cluster = _ends(case, scatter=scatter)
    (value,), (arrived,) = ends.edge.values, ends.edge.to
    whole = np.arange(1, value.type.size + 1, dtype=np.float64).reshape(value.type.dims)
    for taker, senders in best_choice(ends, cluster).best().items():
        part = np.zeros(arrived.local(ends.target.sizes).dims)
        for sender, pieces in ends.slices(senders, taker).items():
            held = _part(whole, _elements(*_there(ends, case, str(arrived), sender)))
            for piece in pieces:
                assert not part[piece.put].any(), "sent twice"
                part[piece.put] = held[piece.taken]
            assert pieces
        expected = _part(whole, _elements(str(arrived), ends.target, taker))
        np.testing.assert_array_equal(part, expected)


def _there(ends: TileEnds, case: Case, arrived: str, sender: TileSender) -> tuple[str, Mesh, int]:
    """The layout, mesh and place of what a sender has."""
    return (arrived, ends.target, sender.place) if sender.hands_on else (case.before, ends.source, sender.place)


def _needed(
    ends: TileEnds, cluster: Cluster
) -> tuple[dict[str, set[tuple[int, ...]]], dict[str, set[tuple[int, ...]]]]:
    """The elements that the hosts of both ends have or take, by NumPy."""
    result = []
    for mesh, t in ((ends.source, ends.edge.values[0].type), (ends.target, ends.edge.to[0])):
        hosts: dict[str, set[tuple[int, ...]]] = {}
        for place, name in enumerate(mesh.devices):
            lists = _elements(str(t), mesh, place)
            hosts.setdefault(cluster.device(name).host, set()).update(e for e in product(*lists) if min(e) >= 0)
        result.append(hosts)
    return result[0], result[1]


def _carried_at_least(ends: TileEnds, cluster: Cluster) -> float:
    """The seconds of the busiest network card: each host takes what it needs once, and an element that one host alone
    has leaves it once for each host that takes it."""
    held, taken = _needed(ends, cluster)
    bytes_in = max(4 * len(elements) for elements in taken.values())
    alone = {host: own.difference(*(e for other, e in held.items() if other != host)) for host, own in held.items()}
    bytes_out = max(4 * sum(len(own & elements) for elements in taken.values()) for own in alone.values())
    every = sum(4 * len(elements) for elements in taken.values()) / len(held)
    return max(bytes_in, bytes_out, every) / RATE


@pytest.mark.parametrize("case", SUITE)
def test_network_cards_carry_no_more_than_they_have_to(case: Case) -> None:
    """With shares of what ranks of one host take, every card is as busy as the busiest has to be."""
    ends, cluster = _ends(case._replace(before=_larger(case.before), after=_larger(case.after)), scatter=True)
    choice = SenderChoice(ends, cluster)
    best = choice.best()
    small, _ = _ends(case, scatter=False)
    least = _carried_at_least(small, cluster) * ends.edge.values[0].type.size / small.edge.values[0].type.size
    assert choice.makespan(best) == pytest.approx(least, rel=1e-9)


def _larger(text: str) -> str:
    """The same layout of a tensor with 16 times as many rows, of which a share is worth a collective."""
    first, dot, rest = text.partition("]")[0].removeprefix("f32[").partition(",")
    size, slash, axes = first.partition("/")
    return f"f32[{int(size) * 16}{slash}{axes}{dot}{rest}]"


def _choices(choice: SenderChoice) -> Iterator[tuple[int, ...]]:
    return product(*[task.holders for task in choice.tasks])


@pytest.mark.parametrize("case", [*SMALL, *UNEVEN])
def test_the_choice_is_as_good_as_an_exhaustive_search(case: Case, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also where it is not allowed to be one."""
    ends, cluster = _ends(case, scatter=False)
    exact = SenderChoice(ends, cluster)
    assert prod(len(task.holders) for task in exact.tasks) <= EXACT
    least = min(exact.score(choice)[0] for choice in _choices(exact))
    assert exact.makespan(exact.best()) == pytest.approx(least)
    monkeypatch.setattr("penstock.passes.communicate.senders.EXACT", 0)
    assert exact.makespan(exact.best()) == pytest.approx(least)
    everyone_asks_the_first = exact.score([task.holders[0] for task in exact.tasks])[0]
    assert everyone_asks_the_first >= least
    if case == SMALL[0]:
        assert everyone_asks_the_first >= 2 * least


# ------------------------------------------------------------------------------------------------ chains


def _with_parcels(case: Case) -> Case:
    return case._replace(before=_larger(case.before), after=_larger(case.after))


def _published_at_least(ends: TileEnds, cluster: Cluster) -> float:
    """The least seconds that the solver of Alpa's authors can come to, by its own model: a tile goes from one host to
    all that take it, and keeps all of these busy for as long as its bytes take."""
    held, taken = _needed(ends, cluster)
    hosts_of: list[dict[tuple[int, ...], frozenset[str]]] = [{}, {}]
    for side, hosts in enumerate((held, taken)):
        for element in set().union(*hosts.values()):
            hosts_of[side][element] = frozenset(host for host, own in hosts.items() if element in own)
    sizes: dict[tuple[frozenset[str], frozenset[str]], int] = {}
    for element, takers in hosts_of[1].items():
        key = hosts_of[0][element], takers
        sizes[key] = sizes.get(key, 0) + 4
    tasks = list(sizes.items())
    best = float("inf")
    for senders in product(*[sorted(holders) for (holders, _), _ in tasks]):
        busy: dict[str, float] = {}
        for sender, ((_, takers), nbytes) in zip(senders, tasks, strict=True):
            for host in {sender, *takers}:
                busy[host] = busy.get(host, 0.0) + nbytes / RATE
        best = min(best, max(busy.values()))
    return best


@pytest.mark.parametrize("case", SUITE)
def test_chains_are_done_as_soon_as_the_published_solver_can_be(case: Case) -> None:
    """The busiest card is a bound from below: each host takes what it needs once, and what one host alone has leaves it
    once. Beside the bytes there is the way of the first parcel through the chain."""
    ends, cluster = _ends(_with_parcels(case), scatter=True)
    choice = best_choice(ends, cluster)
    small, _ = _ends(case, scatter=False)
    scale = ends.edge.values[0].type.size / small.edge.values[0].type.size
    held, taken = _needed(small, cluster)
    bytes_in = max(4 * len(elements) for elements in taken.values())
    every = set().union(*taken.values())
    alone = {host: own.difference(*(e for other, e in held.items() if other != host)) for host, own in held.items()}
    bytes_out = max(4 * len(own & every) for own in alone.values())
    seconds = choice.makespan(choice.best())
    assert seconds >= max(bytes_in, bytes_out) * scale / RATE * (1 - 1e-9)
    filling = 1 + case.target[0] / 8
    assert seconds <= _published_at_least(small, cluster) * scale * filling


def _one_to_hosts(count: int, text: str) -> tuple[TileEnds, Cluster]:
    case = Case((1, 1), (count, 1), text, text)
    return _ends(case, scatter=False)


def test_a_chain_of_hosts_takes_a_third_of_one_after_the_other() -> None:
    ends, cluster = _one_to_hosts(3, "f32[2048,1024]")
    once = ends.edge.values[0].type.nbytes / RATE
    apart, chosen = SenderChoice(ends, cluster), best_choice(ends, cluster)
    assert apart.makespan(apart.best()) == pytest.approx(3 * once)
    assert once < chosen.makespan(chosen.best()) < 1.1 * once
    assert chosen.best() == {0: (TileSender(0),), 1: (TileSender(0, True),), 2: (TileSender(1, True),)}


def test_parcels_of_whole_rows_are_counted_as_they_are_sent() -> None:
    """33 rows make 17 parcels of two, not 32: the last host waits for two parcels. The oracle are the slices that are
    sent. The control: as many rows as there are parcels at most."""
    for rows, most in ((33, 2), (32, 1)):
        ends, cluster = _one_to_hosts(3, f"f32[{rows},32800]")
        chosen = best_choice(ends, cluster)
        handed = {(0, ends.arrived(0, 2).ranges)}
        (pieces,) = ends.slices(chosen.best()[2], 2, handed).values()
        assert max(piece.value.type.nbytes for piece in pieces) == most * 4 * 32800
        once = ends.edge.values[0].type.nbytes / RATE
        assert chosen.makespan(chosen.best()) == pytest.approx(once * (1 + 2 * most / rows))


def test_gpus_hand_on_whole_tiles_so_a_chain_wins_nothing() -> None:
    ends, cpus = _one_to_hosts(3, "f32[2048,1024]")
    gpus = replace(cpus, devices=tuple(replace(device, kind="cuda", target="sm_90") for device in cpus.devices))
    chain = SenderChoice(ends, gpus, fellows={1: 0, 2: 1})
    once = ends.edge.values[0].type.nbytes / gpus.path("s:0", "t:0").bandwidth
    assert chain.makespan(chain.best()) == pytest.approx(3 * once)
    assert not any(one.hands_on for line in best_choice(ends, gpus).best().values() for one in line)


def test_small_tiles_are_sent_one_by_one() -> None:
    """They are one parcel, and a chain of whole messages is done no sooner."""
    ends, cluster = _one_to_hosts(3, "f32[16,16]")
    assert not any(one.hands_on for line in best_choice(ends, cluster).best().values() for one in line)


@pytest.mark.parametrize("case", [*SUITE, *UNEVEN, *SMALL, *(_with_parcels(case) for case in (*SUITE, *SMALL))])
def test_what_is_handed_on_are_slices_of_the_whole_value(case: Case) -> None:
    """By every chain, whether it is chosen or not; each place has in full what it hands on."""
    ends, cluster = _ends(case, scatter=False)
    names = [[mesh.devices[i] for i in mesh.teams()[0]] for mesh in (ends.source, ends.target)]
    for fellows in chains(ends, cluster, names):
        handed = {(0, ends.arrived(0, taker).ranges) for taker, fellow in fellows.items() if ends.alike(fellow, taker)}
        for taker, senders in SenderChoice(ends, cluster, None, fellows).best().items():
            come = np.zeros(ends.arrived(0, taker).shape, np.int8)
            for sender, pieces in ends.slices(senders, taker, handed).items():
                assert pieces
                assert not sender.hands_on or ends.arrived(0, sender.place) == ends.arrived(0, taker)
                for piece in pieces:
                    come[piece.put] += 1
                    assert sender.hands_on <= (piece.taken == piece.put)
            assert int(come.sum()) == ends.arrived(0, taker).size
            assert come.max(initial=0) <= 1
