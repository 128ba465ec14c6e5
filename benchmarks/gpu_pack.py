"""Packs what gpu_first.sh needs on a machine with one GPU, Python, torch with CUDA, and no network.

    python benchmarks/gpu_pack.py gpu-first.tar.gz                     here: nvcc, and no GPU
    python benchmarks/gpu_pack.py OUT --architectures sm_90 --samples 8 --tiny    less of everything: what the tests try

In: this repository and its environment. Out: one compressed file below 64 MB with

    src, benchmarks, tests     Penstock, the steps, the samples of all rows of the op table and their judge
    packages                   TVM's FFI, numpy and four small packages, for Pythons of this version
    runtime                    TVM's runtime libraries, as `compile --with-runtime` carries them
    sm_80, sm_90               machine code: every sample, small trainings as bundles, one training of GPT-2 small
    payload.json               losses that the interpreter has for the trainings, and hashes of all files

Limits: the machine needs the same minor version of Python. Dimensions of what is compiled are fixed here.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import platform
import re
import shutil
import subprocess
import sys
import tarfile
import tempfile
from collections.abc import Sequence
from dataclasses import dataclass, replace
from importlib import metadata
from pathlib import Path
from typing import Any

import torch

import penstock as ps
from penstock.backends.interface import CompileOptions, stage_graphs
from penstock.backends.tvm.cuda.build import build_graphs
from penstock.backends.tvm.cuda.kernels.generate import KINDS
from penstock.backends.tvm.cuda.torch_calls import CALLS
from penstock.backends.tvm.run.runtime_library import carried_files
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.text import print_module
from penstock.models import write_gpt
from penstock.runtime.job.run import run_bundle

ROOT = Path(__file__).resolve().parents[1]
# Samples of operations, and the steps. Behind the imports above: a folder of tests has the name of a benchmark.
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "benchmarks")]

import gpu_first  # noqa: E402

MOST_BYTES = 64 << 20
STEPS = 6
# The name that a package is imported by, and that of its distribution.
PACKAGES = {
    "tvm_ffi": "apache-tvm-ffi",
    "numpy": "numpy",
    "ml_dtypes": "ml_dtypes",
    "safetensors": "safetensors",
    "msgspec": "msgspec",
    "typing_extensions": "typing_extensions",
}
_LEFT_OUT = re.compile(r"(^|/)(include|3rdparty|tests|__pycache__|cython|src)(/|$)|\.(pyc|a|pxd|pyx)$")
_GPT = {"layers": 12, "width": 768, "heads": 12, "vocab": 50257, "positions": 1024}
_TINY = {"layers": 1, "width": 32, "heads": 2, "vocab": 50, "positions": 16}


@dataclass(frozen=True)
class Training:
    """A small training: devices for each stage, all on the first GPU."""

    stages: int = 1
    precision: str = "f32"
    library: str = "torch"
    schedule: str = "1f1b"


TRAININGS = {
    "own-f32": Training(library="none"),
    "torch-f32": Training(),
    "torch-bf16": Training(precision="bf16"),
    "own-bf16": Training(precision="bf16", library="none"),
    "two-1f1b": Training(2, library="none"),
    "two-2bw": Training(2, schedule="2bw"),
}


def copy_sources(folder: Path) -> None:
    """Copy Penstock, the steps, and what judges kernels."""
    no_caches = shutil.ignore_patterns("__pycache__", "*.egg-info")
    shutil.copytree(ROOT / "src" / "penstock", folder / "src" / "penstock", ignore=no_caches)
    for name in ("samples", "oracles"):
        shutil.copytree(ROOT / "tests" / name, folder / "tests" / name, ignore=no_caches)
    (folder / "benchmarks").mkdir()
    for name in ("gpu_first.py", "gpu_first_speed.py", "torch_models.py"):
        shutil.copyfile(ROOT / "benchmarks" / name, folder / "benchmarks" / name)
    shutil.copyfile(ROOT / "benchmarks" / "gpu_first.sh", folder / "gpu_first.sh")
    for name in ("LICENSE", "NOTICE"):
        shutil.copyfile(ROOT / name, folder / name)


def copy_packages(folder: Path) -> None:
    """Copy installed packages, each into a folder of its own, without what only compilers read."""
    for name, distribution in PACKAGES.items():
        installed = metadata.distribution(distribution)
        for file in installed.files or ():
            if ".." in file.parts or _LEFT_OUT.search(str(file)):
                continue
            target = folder / "packages" / name / file
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copyfile(str(installed.locate_file(file)), target)


def write_model(folder: Path, tiny: bool) -> Path:
    width, vocab, positions = (16, 20, 8) if tiny else (32, 40, 16)
    return write_gpt(folder / "gpt.onnx", layers=2, width=width, heads=2, vocab=vocab, positions=positions)


def plan_of(training: Training, file: Path, devices: str) -> ps.Plan:
    """Plan a training; all GPUs are the first one."""
    listed = Cluster.listed(devices)
    cluster = replace(listed, devices=tuple(replace(d, gpu="0") if d.kind == "cuda" else d for d in listed.devices))
    how = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-3), microbatches=4)
    return ps.plan(
        ps.from_onnx(file, dims={"batch": 4}),
        cluster,
        how,
        schedule=training.schedule,
        precision=training.precision,
        cuda_libraries=training.library,
    )


def expected_losses(training: Training, file: Path, folder: Path) -> list[float]:
    """Return the losses of a training by the interpreter."""
    folder.mkdir()
    plan = plan_of(training, file, ",".join(["cpu"] * training.stages))
    bundle = ps.compile(plan, folder / "bundle", backend="numpy")
    run_bundle(bundle, data="synthetic", steps=STEPS, metrics=folder / "metrics.jsonl", progress=False)
    return [float(json.loads(line)["loss"]) for line in (folder / "metrics.jsonl").read_text().splitlines()]


def build_rows(home: Path, architecture: str, rows: dict[str, Any], library: str) -> None:
    """Compile samples of rows of the op table into one library."""
    graphs = [graph for _, graph in gpu_first.row_graphs(rows["kinds"], rows["most"], library)]
    build_graphs(graphs, home / ("calls.so" if library else "rows.so"), CompileOptions(architecture))


def build_speed(home: Path, architecture: str, sizes: dict[str, int], batch: int) -> None:
    """Compile the training whose speed is measured; its weights are drawn where it runs."""
    with tempfile.TemporaryDirectory() as scratch:
        file = write_gpt(Path(scratch) / "gpt.onnx", batch=batch, **sizes)
        how = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=1e-5, weight_decay=0.01))
        module = ps.plan(ps.from_onnx(file), Cluster.listed(architecture), how, precision="bf16").module
    (home / "speed.ir").write_text(print_module(module))
    build_graphs(stage_graphs(module, 0), home / "speed.so", CompileOptions(architecture))


def fill_payload(folder: Path, arguments: argparse.Namespace) -> None:
    """Make everything that the payload holds."""
    copy_sources(folder)
    copy_packages(folder)
    carried_files(folder / "runtime", on_gpus=True)
    sizes, batch = (_TINY, 2) if arguments.tiny else (_GPT, 8)
    names = [name for name in TRAININGS if not arguments.tiny or name in ("own-f32", "two-1f1b")]
    rows = {
        "rows": {"kinds": arguments.rows or sorted(KINDS), "most": arguments.samples},
        "calls": {"kinds": sorted(set(CALLS) & set(arguments.rows or CALLS)), "most": arguments.samples},
    }
    for architecture in arguments.architectures:
        say(f"compiling for {architecture}")
        home = folder / architecture
        home.mkdir()
        build_graphs([gpu_first.tiny_graph()], home / "tiny.so", CompileOptions(architecture))
        build_rows(home, architecture, rows["rows"], "")
        build_rows(home, architecture, rows["calls"], "torch")
        build_speed(home, architecture, sizes, batch)
    losses = {}
    with tempfile.TemporaryDirectory() as scratch:
        file = write_model(Path(scratch), arguments.tiny)
        for name in names:
            say(f"training {name}")
            training = TRAININGS[name]
            losses[name] = expected_losses(training, file, Path(scratch) / name)
            for architecture in arguments.architectures:
                plan = plan_of(training, file, ",".join([architecture] * training.stages))
                ps.compile(plan, folder / architecture / name, with_runtime=True)
    revision = subprocess.run(
        ["git", "describe", "--always", "--dirty"], cwd=ROOT, capture_output=True, text=True, check=False
    ).stdout.strip()
    (folder / "revision.txt").write_text((revision or "unknown revision") + "\n")
    facts = {
        "python": platform.python_version(),
        "torch": torch.__version__,
        "architectures": sorted(arguments.architectures),
        **rows,
        "trainings": names,
        "precisions": {name: TRAININGS[name].precision for name in names},
        "losses": losses,
        "steps": STEPS,
        "speed": {
            "sizes": sizes,
            "batch": batch,
            "optimizer": {"lr": 1e-5, "weight_decay": 0.01},
            "contenders": 0 if arguments.tiny else 2,
        },
        "files": {
            str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
            for path in sorted(folder.rglob("*"))
            if path.is_file()
        },
    }
    (folder / "payload.json").write_text(json.dumps(facts, indent=1))


def say(text: str) -> None:
    print(text, flush=True)


def main(words: Sequence[str] | None = None) -> int:
    """Pack; return the exit code."""
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("out", type=Path, help="the file to write, .tar.gz")
    parser.add_argument("--architectures", nargs="+", default=["sm_80", "sm_90"], metavar="ARCH")
    parser.add_argument("--samples", type=int, default=1000, help="at most so many of each row (default: all)")
    parser.add_argument("--rows", nargs="+", default=[], help="only these rows")
    parser.add_argument(
        "--tiny", action="store_true", help="two small trainings, and a benchmark of a tiny model by itself"
    )
    arguments = parser.parse_args(words)
    with tempfile.TemporaryDirectory() as scratch:
        folder = Path(scratch) / "gpu-first"
        folder.mkdir()
        fill_payload(folder, arguments)
        with tarfile.open(arguments.out, "w:gz") as archive:
            archive.add(folder, folder.name)
    size = arguments.out.stat().st_size
    say(f"wrote {arguments.out}, {size / 1e6:.1f} MB")
    if size > MOST_BYTES:
        say(f"that is more than {MOST_BYTES / 1e6:.1f} MB: --samples, --architectures")
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
