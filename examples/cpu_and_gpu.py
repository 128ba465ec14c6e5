"""Train one model on a CPU and a GPU together: a pipeline with a stage on each.

Plans a small GPT for a cluster file with one CPU and one GPU, and compiles both stages. Where there is a GPU, it trains
on the two. Where there is none, the bundle for them is still compiled if nvcc is there, and a second CPU replaces the
GPU: the same cut, the same schedule, and code for CPUs.

Prints the plan, the targets compiled for, the devices used, and the losses. Fails unless the losses are those of the
same model on one CPU, within 1e-4 (1e-3 with a GPU), and fell.

Takes about a minute on two cores (README.md).
"""

from __future__ import annotations

import argparse
import shutil
import sys
import tempfile
from contextlib import nullcontext
from pathlib import Path

import numpy as np
import torch

import penstock as ps
from penstock.models import write_gpt

CLUSTER = """
[[device]]
name = "processor"
threads = 1
memory = "4 GiB"

[[device]]
name = "graphics"
kind = "cuda"
target = "{architecture}"
memory = "8 GiB"
flops = "{rate} GFLOP/s"

[[link]]
a = "processor"
b = "graphics"
bandwidth = "10 GB/s"
latency = "50 us"
"""


def arguments() -> argparse.Namespace:
    usual = "sm_{}{}".format(*torch.cuda.get_device_capability()) if torch.cuda.is_available() else "sm_90"
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="keep model, cluster file, data and bundles in this folder (default: keep nothing)"
    )
    parser.add_argument("--architecture", default=usual, help=f"of the GPU (here: {usual})")
    parser.add_argument(
        "--rate",
        type=float,
        default=100,
        help="GFLOP/s of the GPU; a CPU has 50 per thread, and the cut follows from both",
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument(
        "--backend",
        default="tvm",
        choices=("tvm", "numpy"),
        help="numpy interprets stages instead of compiling them: slow steps, at once",
    )
    return parser.parse_args()


def main() -> None:
    gpu = torch.cuda.is_available()
    options = arguments()

    with tempfile.TemporaryDirectory() if options.out is None else nullcontext(options.out) as place:
        folder = Path(place)
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cluster.toml").write_text(CLUSTER.format(architecture=options.architecture, rate=options.rate))
        sizes = {"layers": options.layers, "width": options.width, "heads": 4, "vocab": 64, "positions": 32}
        model = ps.from_onnx(write_gpt(folder / "gpt.onnx", batch=4, **sizes))
        lines = np.random.default_rng(0).integers(0, 64, (16 * options.steps, 1)) + 3 * np.arange(33)
        np.savez(folder / "data.npz", tokens=lines[:, :-1] % 64, labels=lines[:, 1:] % 64)
        training = ps.Training("cross_entropy", ps.AdamW(lr=2e-3), microbatches=4)

        def losses(bundle: Path) -> np.ndarray:
            return np.array(ps.run_bundle(bundle, data=folder / "data.npz", steps=options.steps).losses)

        mixed = ps.plan(model, ps.Cluster.load(folder / "cluster.toml"), training)
        facts = mixed.as_dict()["stages"]
        for stage in facts:
            print(f"stage {stage['stage']} on {stage['devices'][0]}, from {stage['starts_at'] or 'the input'} on")
        if shutil.which("nvcc"):
            print(f"compiling for a CPU and {options.architecture}", file=sys.stderr)
            bundle = ps.compile(mixed, folder / "mixed")
            print(f"compiled both stages, the one for the GPU with nvcc for {options.architecture}")
        elif gpu:
            sys.exit("there is a GPU, but no nvcc on the PATH to compile for it: install CUDA's compiler")
        else:
            print("not compiled for the GPU: there is no nvcc on the PATH")
        if gpu:
            ran, allowed = f"a CPU and {torch.cuda.get_device_name()}", 1e-3
        else:
            ran, allowed = "two CPUs: there is no GPU here, and nothing ran on one", 1e-4
            stand_in = ps.plan(model, ps.Cluster.local(2), training, split_at=[facts[1]["starts_at"]])
            bundle = ps.compile(stand_in, folder / "stand-in", backend=options.backend)
        piped = losses(bundle)
        alone = losses(
            ps.compile(ps.plan(model, ps.Cluster.local(1), training), folder / "alone", backend=options.backend)
        )

    off = float((abs(piped - alone) / alone).max())
    print(f"ran on {ran}")
    print(f"{options.steps} steps: loss {piped[0]:.3f} -> {piped[-1]:.3f}, at most {off:.1e} from those on one CPU")
    if off > allowed:
        sys.exit("losses are not those on one CPU")
    if piped[-1] > 0.8 * piped[0]:
        sys.exit("the loss did not fall by a fifth: train for more --steps")


if __name__ == "__main__":
    main()
