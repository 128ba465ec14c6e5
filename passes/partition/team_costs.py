"""The seconds of collectives between the devices of a stage, where stages have a mesh each.

In: the whole program with its reshards, the mesh of every stage, and the cluster. Out: for each stage and graph the
seconds of each operation in collectives, which are 0 of all that is no reshard. What one mesh splits may be whole on
the next one, so stages pay for the same reshard unlike.

Known limits: kernels hide nothing of a collective here. Own forms of operations count as if they had none.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from penstock.ir.action_kinds import BACKWARD
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Graph, Mesh, Module, Op, Value
from penstock.ir.sharding.paths import moves
from penstock.passes.simulator.exchanges import mesh_seconds
from penstock.passes.simulator.machine import machine_of

from .chain import forward_graph

# By the name of a graph, the seconds of each operation in collectives.
TeamSeconds = Mapping[str, Sequence[float]]


def team_seconds(module: Module, meshes: Sequence[Mesh], cluster: Cluster) -> list[TeamSeconds]:
    """Return for each stage and graph the seconds of each operation in collectives."""
    graphs = [forward_graph(module), *(graph for graph in (module.graphs.get(BACKWARD),) if graph is not None)]
    axes = {axis: 1 for mesh in meshes for axis in mesh.sizes}
    known: dict[Mesh, TeamSeconds] = {}
    for mesh in meshes:
        if mesh not in known:
            known[mesh] = {graph.name: _of_graph(graph, mesh, axes | mesh.sizes, cluster) for graph in graphs}
    return [known[mesh] for mesh in meshes]


def _of_graph(graph: Graph, mesh: Mesh, sizes: Mapping[str, int], cluster: Cluster) -> list[float]:
    route = machine_of(cluster, dict(enumerate(mesh.devices))).route

    def seconds(op: Op) -> float:
        before, after = op.ins[0].type, op.outs[0].type
        total, at = 0.0, before
        for move in moves(before, after, sizes) if before != after else ():
            if move.sent:
                exchange = Op(move.kind, (Value("part", at.local(sizes)),), (), {"over": move.over})
                total += mesh_seconds(mesh, exchange, route)
            at = move.after
        return total

    return [seconds(op) if op.kind == "reshard" else 0.0 for op in graph.ops]
