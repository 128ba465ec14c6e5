"""The steps of gpu_first.sh, on a machine with a GPU: `python gpu_first.py PAYLOAD STEP`.

In: the folder of an unpacked payload, as gpu_pack.py makes it, and the name of a step. Out: what was seen, on stdout;
exit code 1 where something is wrong. `--proves` says what a step proves. Nothing is compiled, and TVM is not needed: the
code of the payload and TVM's runtime library in it are used. Every wait is bounded.

Limits: one GPU, so nothing of NCCL and of copies between two GPUs is tried. Memory ends before a run begins, not inside
of one.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from penstock.backends.interface import StageProgram
from penstock.backends.tvm.cuda.devices import CONTEXT, WORKSPACES, find_device
from penstock.backends.tvm.cuda.load import CudaProgram
from penstock.ir.graph import Graph, Value
from penstock.ir.ops import make
from penstock.ir.types import FLOATS, TensorType
from penstock.runtime.checkpoint.finding import find_checkpoint
from penstock.runtime.state.tensors import as_array, fill
from penstock.support.errors import UsageError

# Relative errors of losses of a training, beside those of the interpreter.
TOLERANCE = {"f32": 1e-4, "bf16": 2e-2}
# Seconds that one run may take.
LONGEST = 600.0
# Steps of a run in which a rank says which graphs it could not capture, as each has come often enough by then.
CAPTURED = 40
# Steps of the benchmark that are compared, and that are timed in each of the rounds.
CHECKED, TIMED, ROUNDS = 4, 5, 7


class Wrong(Exception):
    """The end of a step: something is not as it has to be."""


def expect(condition: object, text: str) -> None:
    if not condition:
        raise Wrong(text)


class Payload:
    """The folder of a payload, and the architecture in it that fits the GPU."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self.facts: dict[str, Any] = json.loads((folder / "payload.json").read_text())

    @property
    def architecture(self) -> str:
        capability = torch.cuda.get_device_capability(0)
        fitting = [
            a for a in self.facts["architectures"] if int(a[3:-1]) == capability[0] and int(a[-1]) <= capability[1]
        ]
        expect(
            fitting,
            f"the payload has code for {', '.join(self.facts['architectures'])}; this GPU is sm_{capability[0]}{capability[1]}",
        )
        return str(fitting[-1])

    @property
    def home(self) -> Path:
        return self.folder / self.architecture

    def program(self, library: str, graphs: Sequence[Graph]) -> StageProgram:
        device = find_device(self.architecture, "0", 0)
        carried = [path for path in (self.folder / "runtime").iterdir() if path.suffix == ".so"]
        return CudaProgram(self.home / library, graphs, device, carried=carried)


def tiny_graph() -> Graph:
    """Return the smallest program there is: one kernel."""
    x = Value("x", TensorType("f32", (1000,)))
    op = make("neg", [x], ["y"])
    return Graph("s0.F", (x,), op.outs, (op,))


def row_graphs(kinds: Sequence[str], most: int, library: str = "") -> list[tuple[Any, Graph]]:
    """Return samples of rows of the op table with their graphs, the same here and where they were compiled."""
    from oracles.cuda.products import products
    from samples import samples_of

    pairs = []
    for kind in kinds:
        chosen = [s for s in samples_of(kind) if not library or all(v.type.size for v in (*s.op.ins, *s.op.outs))]
        chosen = [s for s in chosen if not library or s.dtype in FLOATS][:most]
        chosen += products("bf16", "f16") if kind == "matmul" else []
        pairs += [(s, s.graph(f"s0.g{len(pairs) + i}")) for i, s in enumerate(chosen)]
    if not library:
        return pairs
    return [(s, replace(g, ops=tuple(op.with_attrs(library=library) for op in g.ops))) for s, g in pairs]


# ------------------------------------------------------------------------------------------------ steps


def machine(payload: Payload) -> None:
    """the payload is whole; torch opens the GPU, and code in the payload fits it"""
    for name, digest in payload.facts["files"].items():
        found = hashlib.sha256((payload.folder / name).read_bytes()).hexdigest()
        expect(found == digest, f"{name} is not the file that was packed")
    print(
        f"python {sys.version.split()[0]} (packed by {payload.facts['python']}), torch {torch.__version__} ({payload.facts['torch']}), CUDA {torch.version.cuda}"
    )
    expect(sys.version_info[:2] == tuple(map(int, payload.facts["python"].split(".")[:2])), "another version of Python")
    expect(torch.cuda.is_available(), "torch finds no GPU")
    free, total = torch.cuda.mem_get_info(0)
    print(
        f"{torch.cuda.get_device_name(0)}, {free / 1e9:.1f} of {total / 1e9:.1f} GB free, code for {payload.architecture}"
    )


def load(payload: Payload) -> None:
    """the driver takes our machine code, TVM's runtime works beside torch's CUDA, one kernel gives the right numbers"""
    program = payload.program("tiny.so", [tiny_graph()])
    x = torch.arange(1000, dtype=torch.float32)
    (y,) = program.call("s0.F", [fill(torch.empty(1000, device=program.device), x.numpy())])
    expect(torch.equal(y.cpu(), -x), "the numbers are wrong")


def kernels(payload: Payload) -> None:
    """every row of the op table computes on this GPU what the interpreter computes, and the same bits twice"""
    judge_rows(payload, "rows", "")


def libraries(payload: Payload) -> None:
    """products, convolutions and attention by cuBLAS, cuDNN and flash through torch are what the interpreter computes"""
    judge_rows(payload, "calls", "torch")


def judge_rows(payload: Payload, name: str, library: str) -> None:
    from oracles.judge import to_tensor, wrong_results

    facts = payload.facts[name]
    pairs = row_graphs(facts["kinds"], facts["most"], library)
    wrong, other = [], []
    program = payload.program(f"{name}.so", [graph for _, graph in pairs])
    with np.errstate(all="ignore"):
        for sample, graph in pairs:
            wrong += [f"{sample} {text}" for text in wrong_results(program, graph, sample.arrays())]
            runs = [program.call(graph.name, [to_tensor(a, program.device) for a in sample.arrays()]) for _ in range(2)]
            if [as_array(x).tobytes() for x in runs[0]] != [as_array(x).tobytes() for x in runs[1]]:
                other.append(str(sample))
    print(
        f"{len(pairs)} samples of {len(facts['kinds'])} rows, {len(wrong)} wrong, {len(other)} with other bits in a second call"
    )
    for line in [*wrong[:40], *(f"other bits: {text}" for text in other[:40])]:
        print(line)
    expect(not wrong, "kernels are wrong")
    expect(library or not other, "kernels of ours are not the same in every run")


def training(payload: Payload) -> None:
    """training on the GPU, in float32 and bfloat16, by our kernels and by libraries, has the losses of the interpreter"""
    for name in payload.facts["trainings"]:
        if not name.startswith("two"):
            compare(payload, name, run(payload, name, payload.facts["steps"]))


def two_ranks(payload: Payload) -> None:
    """two ranks in processes of their own share the GPU: edges between processes, two contexts, the same losses"""
    for name in payload.facts["trainings"]:
        if name.startswith("two"):
            compare(payload, name, run(payload, name, payload.facts["steps"]))


def graphs(payload: Payload) -> None:
    """calls that are captured as CUDA graphs have the bits of calls kernel by kernel, in one rank and in two"""
    for name in payload.facts["trainings"]:
        direct, graph = (run(payload, name, CAPTURED, captured=each) for each in (False, True))
        expect(direct == graph, f"{name}: losses {direct} kernel by kernel, {graph} as graphs")
        print(f"{name}: the losses of {CAPTURED} steps are the same bits")


def kill(payload: Payload) -> None:
    """a rank with a GPU that dies ends the run with words, leaves no process behind, and the run goes on from a checkpoint"""
    name = next(name for name in payload.facts["trainings"] if name.startswith("two"))
    folder = scratch(payload, "kill")
    words = ["--steps", "1000000", "--checkpoint", str(folder / "saved"), "--checkpoint-every", "2"]
    process = begin(payload, name, [*words, "--metrics", str(folder / "metrics.jsonl")])
    try:
        wait_for(lambda: losses_in(folder / "metrics.jsonl") >= 6, process, "six steps")
        ranks = [rank for server in children(process.pid) for rank in children(server)]
        expect(len(ranks) == 2, f"{len(ranks)} ranks, not 2")
        os.kill(ranks[1], signal.SIGKILL)
        said = process.communicate(timeout=120)[0]
    finally:
        process.kill()
    print("\n".join(f"    {line}" for line in said.splitlines()[-6:]))
    expect(process.returncode not in (0, -9), f"the run ended with {process.returncode}")
    expect("rank 1" in said, "the error does not name the rank")
    wait_for(lambda: not any(Path(f"/proc/{rank}").exists() for rank in ranks), None, "the end of all ranks")
    saved = int(find_checkpoint(folder / "saved").name.rpartition("-")[2])
    resumed = run(payload, name, 4, ["--resume", str(folder / "saved")])
    whole = run(payload, name, saved + 4)
    print(f"resumed at step {saved}: losses {resumed}, without the failure {whole[saved:]}")
    expect(resumed == whole[saved:], "a resumed run has other losses")


def memory(payload: Payload) -> None:
    """where another program holds the GPU's memory, a run ends before it begins, and says how much it needs"""
    name = payload.facts["trainings"][0]
    free, _ = torch.cuda.mem_get_info(0)
    leave = CONTEXT // 4 + WORKSPACES // 2
    expect(free > leave, "the GPU is full already")
    with holding(free - leave):
        process = begin(payload, name, ["--steps", "2"])
        said = process.communicate(timeout=LONGEST)[0]
    print("\n".join(f"    {line}" for line in said.splitlines()[-4:]))
    expect(process.returncode not in (0, None), "the run did not end with an error")
    expect("are free" in said, "the error does not say what is free")
    compare(payload, name, run(payload, name, payload.facts["steps"]))


def speed(payload: Payload) -> None:
    """the speed of a training step beside eager torch and torch.compile; losses agree (nothing is promised of the ratio)"""
    import gpu_first_speed

    for line in gpu_first_speed.measure(payload, CHECKED, TIMED, ROUNDS):
        print(line)


STEPS: dict[str, Callable[[Payload], None]] = {
    "machine": machine,
    "load": load,
    "kernels": kernels,
    "libraries": libraries,
    "training": training,
    "two-ranks": two_ranks,
    "graphs": graphs,
    "kill": kill,
    "memory": memory,
    "speed": speed,
}


# ------------------------------------------------------------------------------------------------ runs


def scratch(payload: Payload, name: str) -> Path:
    folder = payload.folder / "scratch" / f"{name}-{time.time_ns()}"
    folder.mkdir(parents=True)
    return folder


def begin(payload: Payload, name: str, words: Sequence[str], captured: bool = False) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "penstock", "run", str(payload.home / name), *words]
    how = {**os.environ, "PENSTOCK_CUDA_GRAPHS": str(int(captured))}
    return subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, env=how)


def run(payload: Payload, name: str, steps: int, words: Sequence[str] = (), captured: bool = False) -> list[float]:
    """Train, and return the losses. With `captured` all that a rank says of graphs is printed."""
    metrics = scratch(payload, name) / "metrics.jsonl"
    process = begin(payload, name, ["--steps", str(steps), "--metrics", str(metrics), *words], captured)
    try:
        said = process.communicate(timeout=LONGEST)[0]
    finally:
        process.kill()
    if process.returncode:
        print(said[-4000:])
        raise Wrong(f"{name} ended with {process.returncode}")
    if captured:
        for line in said.splitlines():
            if "kernel by kernel" in line:
                print(f"    {name}: {line}")
                expect("could not be captured" not in line, "a capture failed")
    rows = [json.loads(line) for line in metrics.read_text().splitlines()]
    return [float(row["loss"]) for row in rows if "loss" in row]


def compare(payload: Payload, name: str, losses: Sequence[float]) -> None:
    expected, tolerance = payload.facts["losses"][name], TOLERANCE[payload.facts["precisions"][name]]
    print(f"{name}: losses {losses}, expected {expected}")
    expect(len(losses) == len(expected), f"{name}: {len(losses)} losses")
    expect(np.allclose(losses, expected, rtol=tolerance), f"{name}: losses differ by more than {tolerance:g}")


def children(pid: int) -> list[int]:
    try:
        return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]
    except OSError:
        return []


def losses_in(path: Path) -> int:
    return path.read_text().count('"loss"') if path.exists() else 0


def wait_for(condition: Callable[[], bool], process: subprocess.Popen[str] | None, what: str) -> None:
    end = time.monotonic() + 120
    while not condition():
        if process is not None and process.poll() is not None:
            raise Wrong(f"the run ended before {what}: {process.communicate()[0][-3000:]}")
        expect(time.monotonic() < end, f"no {what} within 120 s")
        time.sleep(0.02)


@contextmanager
def holding(nbytes: int) -> Iterator[None]:
    """Let another process hold memory of the GPU."""
    text = (
        f"import torch; x = torch.empty({nbytes}, dtype=torch.uint8, device='cuda'); print('held', flush=True); input()"
    )
    command = [sys.executable, "-c", text]
    process = subprocess.Popen(command, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True)
    try:
        assert process.stdout is not None
        expect(process.stdout.readline().strip() == "held", "no process could hold the memory")
        yield
    finally:
        process.communicate("\n", timeout=60)


def main(words: Sequence[str] | None = None) -> int:
    """Do one step; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("payload", type=Path)
    parser.add_argument("step", choices=list(STEPS))
    parser.add_argument("--proves", action="store_true", help="only say what the step proves")
    arguments = parser.parse_args(words)
    step = STEPS[arguments.step]
    if arguments.proves:
        print(step.__doc__)
        return 0
    begin = time.perf_counter()
    try:
        step(Payload(arguments.payload))
    except (Wrong, UsageError) as error:
        print(f"WRONG: {error}")
        return 1
    print(f"{time.perf_counter() - begin:.1f} s")
    return 0


if __name__ == "__main__":
    sys.exit(main())
