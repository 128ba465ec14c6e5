"""Run all examples, or the named ones, one after the other, and print a table of the seconds that each took.

Shows the output of an example only if it failed. Fails if one did. Examples that cannot run here (exit code 77) are
listed with their reason.
"""

from __future__ import annotations

import argparse
import platform
import subprocess
import sys
import tempfile
import time
from pathlib import Path

CANNOT_RUN = 77
HERE = Path(__file__).resolve().parent
EXAMPLES = sorted(path.stem for path in HERE.glob("*.py") if path != Path(__file__).resolve())


def processor() -> str:
    lines = Path("/proc/cpuinfo").read_text().splitlines() if Path("/proc/cpuinfo").exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return f"{len(names)} x {names[0]}" if names else platform.machine()


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help=f"of {', '.join(EXAMPLES)} (default: all)")
    options = parser.parse_args()
    if unknown := [name for name in options.names if name not in EXAMPLES]:
        parser.error(f"unknown: {', '.join(unknown)}; there are {', '.join(EXAMPLES)}")
    rows, failed = [], False
    for name in options.names or EXAMPLES:
        print(f"{name} ...", file=sys.stderr, flush=True)
        with tempfile.TemporaryDirectory() as folder:
            started = time.perf_counter()
            done = subprocess.run(
                [sys.executable, HERE / f"{name}.py"], cwd=folder, capture_output=True, text=True, check=False
            )
            seconds = time.perf_counter() - started
        lines = done.stderr.strip().splitlines() or [""]
        outcome = {0: "ok", CANNOT_RUN: f"not here: {lines[-1]}"}.get(done.returncode, f"FAILED: {lines[-1]}")
        if done.returncode not in (0, CANNOT_RUN):
            failed = True
            sys.stderr.write(done.stdout + done.stderr)
        rows.append(f"| {name} | {seconds:.0f} | {outcome} |")
    print(f"{processor()}, Python {platform.python_version()}\n")
    print("| example | seconds | |\n| --- | --- | --- |")
    print("\n".join(rows))
    sys.exit(failed)


if __name__ == "__main__":
    main()
