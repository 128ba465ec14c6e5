"""All benchmarks in one run: every section is a script of this folder, with settings for its scale.

    python benchmarks/run.py                                             short: a few minutes
    python benchmarks/run.py --scale full --json benchmarks/results/full.json          half an hour on two cores
    python benchmarks/run.py --scale tiny --sections transport startup   only to see that it runs
    python benchmarks/run.py --read benchmarks/results/full.json         the page of a run that was written

In: the sections and their scale. Out: one page of Markdown, and JSON {"scale", "machine", "sections": {name:
{"command", "seconds", "exit", "load before", "load after", "found"}}}, where `found` is the script's --json, less
single calls of kernels. The file is written after every section, so a run that is ended keeps the sections it has. The
exit code is 1 where a section failed; its own exit code and its last lines are kept in the place of its result.

Sections run one after the other, nothing beside them. Within a section contenders take turns (turns.py), each on as
many threads as the others.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import signal
import statistics
import subprocess
import sys
import tempfile
import threading
import time
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from machine import load, processor, system, versions, write_json
from processes import allowed_cores

HERE = Path(__file__).resolve().parent
SCALES = ("tiny", "short", "full")
PACKAGES = ("penstock", "torch", "apache-tvm", "onnx", "onnxruntime", "openvino", "deepspeed", "numpy")
# A section that hangs must not prevent the others.
LIMIT_S = 900
KEPT_LINES = 12


@dataclass(frozen=True)
class Section:
    """A script and its arguments by scale. `digest` shortens its result."""

    script: str
    tiny: str
    short: str
    full: str
    digest: Callable[[Any], Any] = lambda found: found

    def words(self, scale: str) -> list[str]:
        return [str(HERE / self.script), *shlex.split(getattr(self, scale))]


def without_calls(result: dict[str, Any]) -> dict[str, Any]:
    """Replace the calls of kernels by their median and their number."""

    def short(side: dict[str, Any]) -> dict[str, Any]:
        clocks = {name: statistics.median(side[name]) for name in ("cpu_s", "wall_s") if side[name]}
        return {"error": side["error"], "calls": len(side["cpu_s"]), **clocks}

    return result | {"rows": [row | {side: short(row[side]) for side in ("ours", "theirs")} for row in result["rows"]]}


_LITTLE = "--layers 2 --width 64 --heads 2 --vocab 256 --positions 32"
_SMALL = "--layers 2 --width 128 --heads 4 --vocab 4096 --positions 64"
_LITTLE_IMAGES = "--model resnet --blocks 1 1 --width 8 --size 32 --classes 10"
_QUICK = "--steps 1 --rounds 2 --torch-single accumulated-passive"
# One or two kernels of each family, at the sizes of GPT-2 small and ResNet-50.
_KERNELS = (
    "gemm NN 512x768x3072|gemm NT 512x3072x768|gemm TN 768x3072x512|gemm NT 128x50257x768"
    "|attention .* 512|conv .* 64->64|conv .* 256->512|layer_norm|softmax .* 12x|gelu .* tanh"
    "|cross_entropy .* 512x|embedding gradient 512|adamw 124 M parameters$|pooling max gradient"
)
# The forms of torch in one process whose idle threads sleep: trying all four takes longer.
_FORMS = "--trial-steps 1 --torch-single whole-passive accumulated-passive"
_TURNS = f"--steps 3 --rounds 3 {_FORMS}"
# More turns for the goal with the least margin: torch in one process varies most from run to run.
_MORE_TURNS = f"--steps 3 --rounds 5 {_FORMS}"
# Sections with goals come first.
SECTIONS = {
    "training-gpt": Section("training.py", f"{_LITTLE} {_QUICK}", f"{_SMALL} {_TURNS}", _MORE_TURNS),
    "training-bert": Section(
        "training.py", f"--model bert {_LITTLE} {_QUICK}", f"--model bert {_SMALL} {_TURNS}", f"--model bert {_TURNS}"
    ),
    "training-resnet": Section(
        "training.py",
        f"{_LITTLE_IMAGES} {_QUICK}",
        f"--model resnet --size 64 --classes 10 {_TURNS}",
        f"--model resnet {_TURNS}",
    ),
    "inference": Section(
        "models.py",
        "--only infer --tiny --threads 2 --rounds 2 --compile-limit 0",
        "--threads 2 --rounds 5 --compile-limit 0 --models resnet50-infer mlp-infer cnn-infer",
        "--only infer --threads 2 --rounds 9 --compile-limit 60",
    ),
    "startup": Section("startup.py", "--rounds 1 --ranks --limit 60", "--rounds 5", "--rounds 11"),
    "compiling": Section("compile_time.py", f"{_LITTLE} --tvm --run", f"{_SMALL} --tvm --torch", "--tvm --torch"),
    "transport": Section(
        "transport.py",
        "--sizes 8192 --schedules 2bw --rounds 2",
        "--sizes 65536 --schedules 2bw --rounds 3",
        "--sizes 65536 16777216 --rounds 5",
    ),
    "planner": Section(
        "planner.py",
        "--hosts 1 --batch 16 --layers 6 --width 512",
        "--hosts 8 --batch 512 --layers 24",
        "--hosts 8 --batch 512",
    ),
    "report": Section(
        "report.py", f"{_LITTLE} --deep 0 --rounds 1 --backend numpy", f"{_SMALL} --deep 0 --rounds 3", "--rounds 3"
    ),
    "kernels": Section(
        "kernels.py",
        "--only 'gemm NN 97x131x53' --repeats 3",
        "--only 'softmax|layer_norm|gelu'",
        f"--only '{_KERNELS}'",
        without_calls,
    ),
}


def main() -> int:
    arguments = _arguments()
    if arguments.read:
        result = json.loads(arguments.read.read_text(encoding="utf-8"))
    else:
        for out in (arguments.json, arguments.markdown):
            if out is not None:
                out.parent.mkdir(parents=True, exist_ok=True)
        # Being terminated ends the section that runs, too.
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(128 + number))
        result = _run(arguments.scale, arguments.sections, arguments.json)
    from page import page

    text = page(result)
    if arguments.markdown:
        arguments.markdown.write_text(text, encoding="utf-8")
    else:
        print(text, end="")
    return int(any(section["exit"] for section in result["sections"].values()))


def _arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--scale", choices=SCALES, default="short", help="default: short")
    parser.add_argument(
        "--sections",
        nargs="+",
        choices=SECTIONS,
        default=list(SECTIONS),
        metavar="NAME",
        help=f"of {', '.join(SECTIONS)}",
    )
    parser.add_argument(
        "--json",
        type=Path,
        metavar="FILE",
        help="write everything; sections of the same scale that it has and that do not run stay",
    )
    parser.add_argument("--markdown", type=Path, metavar="FILE", help="write the page here (default: print it)")
    parser.add_argument("--read", type=Path, metavar="FILE", help="measure nothing, show this run")
    return parser.parse_args()


def _run(scale: str, names: list[str], out: Path | None) -> dict[str, Any]:
    machine = {"processor": processor(allowed_cores()), "system": system(), "versions": versions(*PACKAGES)}
    before = json.loads(out.read_text(encoding="utf-8")) if out is not None and out.exists() else {}
    kept = before["sections"] if before.get("scale") == scale else {}
    result: dict[str, Any] = {"scale": scale, "machine": machine, "sections": kept}
    for name in (name for name in SECTIONS if name in names):
        sections = kept | {name: _run_section(name, SECTIONS[name], scale)}
        result["sections"] = kept = {name: sections[name] for name in SECTIONS if name in sections}
        write_json(out, result)
    return result


def _run_section(name: str, section: Section, scale: str) -> dict[str, Any]:
    words, first = section.words(scale), load()
    print(f"{name}: {shlex.join(words)}", file=sys.stderr, flush=True)
    begin = time.perf_counter()
    with tempfile.TemporaryDirectory(prefix="benchmarks-") as folder:
        report = Path(folder) / "report.json"
        code, said = _follow([sys.executable, *words, "--json", str(report)])
        result = section.digest(json.loads(report.read_text(encoding="utf-8"))) if report.exists() else {"said": said}
    seconds = time.perf_counter() - begin
    print(f"{name}: exit code {code} after {seconds:.0f} s", file=sys.stderr, flush=True)
    command = f"python benchmarks/{section.script} {getattr(section, scale)}"
    return {
        "command": command,
        "seconds": round(seconds, 1),
        "exit": code,
        "load before": first,
        "load after": load(),
        "found": result,
    }


def _follow(command: list[str]) -> tuple[int, list[str]]:
    """Run a command, show its output, and return its exit code and its last lines.

    A section past its time, or one whose benchmark is interrupted, is killed with the processes it started.
    """
    running = subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        errors="replace",
        start_new_session=True,
    )
    assert running.stdout is not None
    said: deque[str] = deque(maxlen=KEPT_LINES)
    limit = threading.Timer(LIMIT_S, os.killpg, (running.pid, signal.SIGKILL))
    limit.start()
    try:
        for line in running.stdout:
            sys.stderr.write(line)
            said.append(line.rstrip("\n"))
        return running.wait(), list(said)
    except BaseException:
        os.killpg(running.pid, signal.SIGKILL)
        running.wait()
        raise
    finally:
        limit.cancel()


if __name__ == "__main__":
    sys.exit(main())
