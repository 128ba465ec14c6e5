"""How long planning takes: a GPT-3-shaped chain (96 blocks, width 12288, and both ends) on 64 and on 1024 devices, every schedule.

    python benchmarks/planner.py [--hosts 8 128] [--width 12288] [--batch 512 1536]

Prints one line per cluster and schedule: seconds of this process's processor time, and what was found. The models and devices are stated in
`gpt_chain` and `A100`; nothing is measured but the planner itself.
"""

from __future__ import annotations

import argparse
import time

from shapes import gpt_chain

from penstock.ir.cluster import Device
from penstock.passes.planner.fleet import equal_hosts, fleet_of
from penstock.passes.planner.plan import SCHEDULES, Wanted
from penstock.passes.planner.planner import Planner

# Half of the data sheet's rate of 16-bit products; 80 GiB; NVLink inside a host, 25 GB/s between hosts.
A100 = Device("", "cuda", target="sm_80", flops=1.5e14, bandwidth=1.5e12, spaces=(("hbm", 80 * 2**30),))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--hosts", type=int, nargs="+", default=[8, 128], help="hosts of eight devices")
    parser.add_argument("--batch", type=int, nargs="+", default=[512, 1536], help="samples per batch, for each number of hosts")
    parser.add_argument("--layers", type=int, default=96)
    parser.add_argument("--width", type=int, default=12288)
    parser.add_argument("--schedules", nargs="+", default=list(SCHEDULES))
    given = parser.parse_args()
    chain = gpt_chain(given.layers, given.width, positions=2048, vocabulary=50257)
    print("| devices | schedule | planned in | batch takes | of the bound | stages | replicas | microbatches | stages that recompute |")
    print("| --- | --- | --- | --- | --- | --- | --- | --- | --- |")
    for hosts, batch in zip(given.hosts, given.batch, strict=True):
        fleet = fleet_of(equal_hosts(hosts, 8, A100, (2.5e11, 5e-6), (2.5e10, 1e-5)))
        planner, total = Planner(chain, fleet, Wanted(batch)), 0.0
        for schedule in given.schedules:
            start = time.process_time()
            found = planner.best(schedule)
            taken = time.process_time() - start
            total += taken
            if found is None:
                print(f"| {len(fleet)} | {schedule} | {taken:.1f} s | no plan is legal and fits | | | | | |", flush=True)
                continue
            plan = found.plan
            replicas = sorted({len(stage.devices) for stage in plan.stages})
            again = sum(stage.recompute for stage in plan.stages)
            print(
                f"| {len(fleet)} | {schedule} | {taken:.1f} s | {found.step:.2f} s | {found.bound / found.step:.0%} | {len(plan.stages)} "
                f"| {', '.join(map(str, replicas))} | {plan.count} of {plan.size} | {again} |",
                flush=True,
            )
        print(f"| {len(fleet)} | all | {total:.1f} s | | | | | | |", flush=True)


if __name__ == "__main__":
    main()
