"""Random chains and fleets, small enough to look at every plan."""

from __future__ import annotations

from random import Random

from penstock.ir.cluster.cluster import Cluster, Device, Link
from penstock.passes.planner.chain import Amount, Chain, Layer, PhaseWork
from penstock.passes.planner.fleet import Fleet, fleet_of


def draw_chain(rng: Random, layers: int) -> Chain:
    def work(flops: tuple[int, int]) -> PhaseWork:
        return PhaseWork(
            Amount(rng.randrange(0, 10**6), rng.randint(*flops)),
            Amount(rng.randrange(0, 10**5), rng.randrange(10**4, 10**6)),
        )

    made = []
    for i in range(layers):
        params, size = rng.randrange(1, 40) * 10_000, rng.randrange(1, 60) * 1000
        made.append(
            Layer(
                f"layer{i}",
                params,
                params,
                2 * params,
                saved=Amount(rng.randrange(1000), rng.randrange(1, 200) * 1000),
                out=Amount(0, size if rng.random() < 0.95 else 0),
                back=Amount(0, size if rng.random() < 0.8 else 0),
                workspace=Amount(0, rng.randrange(100) * 1000),
                cut=rng.random() < 0.9,
                late=params // 3 if i % 2 else 0,
                pieces=(20_000,) * (params // 20_000) + (10_000,) * (params // 10_000 % 2),
                forward=work((10**6, 3 * 10**7)),
                backward=work((10**6, 6 * 10**7)),
                weight=work((10**5, 2 * 10**7)),
            )
        )
    return Chain(tuple(made), entry=Amount(0, 5000))


def draw_fleet(rng: Random, devices: int, nics: bool) -> Fleet:
    kinds = [
        Device(
            "",
            target=f"kind{k}",
            flops=rng.choice([5e8, 1e9, 2e9, 3.3e9]),
            bandwidth=rng.choice([1e8, 4e8]),
            spaces=(("ram", size),) if size else (),
        )
        for k, size in enumerate(rng.choice([0, 3, 4, 5, 6, 9]) * 500_000 for _ in range(rng.randint(1, 3)))
    ]
    hosts = rng.randint(1, 2)
    made = []
    for i in range(devices):
        kind = rng.choice(kinds)
        made.append(
            Device(
                f"d{i}",
                host=f"h{rng.randrange(hosts)}",
                target=kind.target,
                flops=kind.flops,
                bandwidth=kind.bandwidth,
                spaces=kind.spaces,
            )
        )
    links = []
    few = rng.random() < 0.5
    speeds = [rng.choice([1e6, 1e7, 1e8, 1e9]) for _ in range(2 if few else 8)]
    for i in range(devices):
        for j in range(i + 1, devices):
            across = made[i].host != made[j].host
            speed = speeds[across] if few else rng.choice(speeds)
            links.append(
                Link(
                    f"d{i}",
                    f"d{j}",
                    speed,
                    rng.choice([0.0, 1e-3]) if not few else 1e-4,
                    "nic" if nics and across else "",
                )
            )
    return fleet_of(Cluster(tuple(made), tuple(links)))
