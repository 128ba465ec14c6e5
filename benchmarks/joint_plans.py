"""Plans with tensor and data parallel degrees from profiles of layers, beside Piper's own programme.

    python benchmarks/joint_plans.py PIPER --json joint_plans.json

PIPER is a checkout of github.com/msr-fiddle/piper, with the profiles and the C++ of its authors. Both run on the same
problems, one after the other, each in a process of its own. The authors' programme is compiled with g++ -O3 behind a
main function that takes a problem from the command line. Seconds are processor time without reading the file. A ratio
of times per sample below 1 says that the plan of Penstock is better. The exit code is 1 where one is above 1 + 1e-6.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import tempfile
import time
from dataclasses import replace
from pathlib import Path
from typing import Any

from machine import write_json

from penstock.passes.placement.joint.reading import read_profiles
from penstock.passes.placement.joint.search import plan_jointly
from penstock.passes.placement.workload import load_json
from penstock.support.errors import DoesNotFit
from penstock.support.terminal import table

BANDWIDTH = 25.0 * 2**30
ROWS = (
    ("bert32a100", 8, 8.0),
    ("bert32a100", 64, 2.0),
    ("bert32a100", 64, 8.0),
    ("bert32a100", 128, 1.0),
    ("bert32a100", 512, 8.0),
    ("bert32a100", 2048, 8.0),
    ("resnet", 16, 2.0),
    ("resnet", 64, 4.0),
    ("resnet", 128, 1.0),
)
MAIN = """
int main(int count, char **words) {
    ifstream file(words[1]);
    json content;
    file >> content;
    Instance problem = content.get<Instance>();
    problem.maxDevices = atoi(words[2]);
    problem.maxMemoryPerDevice = atof(words[3]) * (1 << 30);
    problem.bandwidth = 25.0 * (1LL << 30);
    clock_t begin = clock();
    Graph graph(problem);
    Result result = graph.runDP();
    double value = result.stages.empty() ? -1 : graph.getTPSForResult(result);
    printf("{\\"value\\": %.17g, \\"seconds\\": %.3f}\\n", value, (clock() - begin) * 1.0 / CLOCKS_PER_SEC);
}
"""


def compiled(piper: Path, folder: Path) -> Path:
    """Compile the authors' programme with a main function of ours."""
    source, programme = folder / "piper.cpp", folder / "piper"
    code = (piper / "algo.cpp").read_text(encoding="utf-8")
    headers = "".join(f"#include <{name}>\n" for name in ("algorithm", "cassert", "cmath", "cstdio", "numeric"))
    source.write_text(headers + code[: code.index("int main (")] + MAIN, encoding="utf-8")
    subprocess.run(["g++", "-O3", "-w", f"-I{piper}", str(source), "-o", str(programme)], check=True)
    return programme


def ours(file: Path, devices: int, gib: float) -> dict[str, Any]:
    """Return the time per sample of our plan, its gap, and how long the search took."""
    problem = replace(read_profiles(load_json(file)).problem, devices=devices, memory=gib * 2**30, bandwidth=BANDWIDTH)
    begin = time.process_time()
    try:
        plan = plan_jointly(problem)
    except DoesNotFit:
        return {"value": -1, "gap": 0.0, "seconds": time.process_time() - begin}
    return {"value": plan.value, "gap": plan.gap, "seconds": time.process_time() - begin}


def table_of(rows: list[dict[str, Any]]) -> tuple[list[str], list[list[object]]]:
    """Return heads and cells of the table."""
    heads = ["profile", "devices", "GiB", "time per sample", "beside Piper's", "seconds", "Piper's seconds"]
    lines: list[list[object]] = []
    for row in rows:
        times = (f"{row[key]:.1f}" for key in ("seconds", "piper_seconds"))
        lines.append([row["profile"], row["devices"], row["gib"], f"{row['value']:.6g}", f"{row['ratio']:.7f}", *times])
    return heads, lines


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("piper", type=Path, help="a checkout of Piper")
    parser.add_argument("--json", metavar="FILE")
    parser.add_argument("--only", default="", help="rows of this profile alone")
    parser.add_argument("--one", nargs=2, help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.one is not None:
        print(json.dumps(ours(arguments.piper, int(arguments.one[0]), float(arguments.one[1]))))
        return 0
    results = []
    with tempfile.TemporaryDirectory() as folder:
        programme = compiled(arguments.piper.resolve(), Path(folder))
        for name, devices, gib in ROWS:
            if arguments.only not in name:
                continue
            file = arguments.piper / "inputs" / f"{name}.json"
            commands = (
                [sys.executable, __file__, str(file), "--one", str(devices), str(gib)],
                [str(programme), str(file), str(devices), str(gib)],
            )
            mine, theirs = (
                json.loads(subprocess.run(command, check=True, capture_output=True, text=True).stdout)
                for command in commands
            )
            ratio = mine["value"] / theirs["value"] if theirs["value"] > 0 else 1.0 if mine["value"] < 0 else 0.0
            row = {"profile": name, "devices": devices, "gib": gib, "value": mine["value"], "ratio": ratio}
            results.append(row | {"gap": mine["gap"], "seconds": mine["seconds"], "piper_seconds": theirs["seconds"]})
            print(results[-1], file=sys.stderr)
    print(table(*table_of(results)))
    if arguments.json:
        write_json(arguments.json, {"rows": results})
    return int(any(row["ratio"] > 1 + 1e-6 for row in results))


if __name__ == "__main__":
    sys.exit(main())
