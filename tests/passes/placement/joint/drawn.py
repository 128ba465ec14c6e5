"""Random joint problems, files of them, and the optimum by trying every plan.

`try_all_plans` knows nothing of closed sets, bounds or relaxations. It cuts every order of the layers everywhere, gives
stages all degrees and layers all options, and asks the definition for the time of each stage.
"""

from __future__ import annotations

import random
from itertools import combinations, pairwise, permutations, product
from math import inf

from penstock.passes.placement.joint.profiles import JointProblem, JointStage, LayerOption, LayerProfile, stage_costs


def draw_joint_problem(seed: int) -> JointProblem:
    """Draw at most four layers, devices and microbatches, and up to three options for a degree. Memory often binds."""
    rng = random.Random(seed)
    count = rng.randint(1, 4)
    edges = {(i, j): float(rng.randint(0, 8)) for i in range(count) for j in range(i + 1, count) if rng.random() < 0.5}
    layers = []
    for v in range(count):
        degrees = {
            t: tuple(_option(rng, v, t, k, edges) for k in range(rng.choice((1, 2, 2, 3))))
            for t in (1, 2)
            if rng.random() < (0.9 if t == 1 else 0.6)
        }
        layers.append(LayerProfile(f"layer {v}", degrees))
    return JointProblem(
        rng.randint(1, 4), rng.choice((1e6, 60.0, 90.0, 150.0)), 4.0, rng.choice((1, 2, 3, 4)), tuple(layers), edges
    )


def _option(rng: random.Random, v: int, t: int, k: int, edges: dict[tuple[int, int], float]) -> LayerOption:
    extra = rng.random() < 0.3
    sides = ({i: 0.0 for i, j in edges if j == v}, {j: 0.0 for i, j in edges if i == v})
    incoming, outgoing = ({end: float(rng.randint(0, 6)) if extra else 0.0 for end in side} for side in sides)
    return LayerOption(
        f"option {k}",
        rng.randint(1, 30) / t,
        float(rng.randint(0, 20)),
        float(rng.randint(0, 20)),
        float(rng.randint(0, 30)),
        incoming,
        outgoing,
    )


def as_profiles(problem: JointProblem) -> dict[str, object]:
    """Return the content of a file; the id of a layer is ten times its position."""
    nodes = [
        {
            "id": 10 * v,
            "name": layer.name,
            "TMPCs": {
                str(t): [
                    {
                        "id": option.name,
                        "timePerSample": option.time,
                        "parameterSize": option.parameters,
                        "memoryUsageA": option.saved,
                        "memoryUsageB": option.fixed,
                        "syncTimeFw": {str(10 * end): moved for end, moved in option.incoming.items()},
                        "syncTimeBw": {str(10 * end): moved for end, moved in option.outgoing.items()},
                    }
                    for option in options
                ]
                for t, options in layer.options.items()
            },
        }
        for v, layer in enumerate(problem.layers)
    ]
    edges = [
        {"sourceId": 10 * source, "destId": 10 * target, "communicationCost": moved}
        for (source, target), moved in problem.edges.items()
    ]
    return {
        "maxMemoryPerDevice": problem.memory,
        "maxDevices": problem.devices,
        "bandwidth": problem.bandwidth,
        "mbsInBatch": problem.microbatches,
        "nodes": nodes,
        "edges": edges,
    }


def try_all_plans(problem: JointProblem) -> float:
    """Return the least time per sample of all plans, infinity where none is allowed."""
    best: dict[tuple[frozenset[int], int, int, int], float] = {}

    def stage(layers: frozenset[int], t: int, d: int, following: int) -> float:
        """Return the least time of a stage before others with so large a sum of degrees, over all options."""
        key = (layers, t, d, following)
        if key not in best:
            names = [[(v, option.name) for option in problem.layers[v].options.get(t, ())] for v in sorted(layers)]
            after = [JointStage(1, following, {})] if following else []
            costs = [stage_costs(problem, [JointStage(t, d, dict(picks)), *after])[0] for picks in product(*names)]
            best[key] = min((cost.total for cost in costs if problem.holds(cost.memory)), default=inf)
        return best[key]

    least = inf
    for sets in _sequences(problem):
        for degrees in product(product(range(1, problem.devices + 1), repeat=2), repeat=len(sets)):
            data = [d for _, d in degrees]
            if sum(t * d for t, d in degrees) > problem.devices or any(problem.microbatches % d for d in data):
                continue
            if sum(data) <= problem.microbatches:
                each = (stage(sets[i], t, d, sum(data[i + 1 :])) for i, (t, d) in enumerate(degrees))
                least = min(least, max(each))
    return least


def _sequences(problem: JointProblem) -> set[tuple[frozenset[int], ...]]:
    """Return all layers in sets one after the other, so that no edge leads back."""
    count = len(problem.layers)
    sequences = set()
    for order in permutations(range(count)):
        if all(order.index(source) < order.index(target) for source, target in problem.edges):
            for cuts in range(count):
                for ends in combinations(range(1, count), cuts):
                    bounds = (0, *ends, count)
                    sequences.add(tuple(frozenset(order[a:b]) for a, b in pairwise(bounds)))
    return sequences
