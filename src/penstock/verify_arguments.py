"""Arguments of `penstock verify` beside those of a model. Which of them go together is for verifying.py."""

from __future__ import annotations

import argparse

from penstock.argument_types import positive_number, seed_number


def add_verify_arguments(parser: argparse.ArgumentParser) -> None:
    checks = parser.add_argument_group("checking")
    checks.add_argument(
        "--steps",
        type=positive_number,
        metavar="N",
        help="optimiser steps for a training bundle (default: 4; with --bisect and -p 3, with --parity 200)",
    )
    checks.add_argument("--seed", type=seed_number, metavar="N", help="for the random inputs (default: 0)")
    checks.add_argument(
        "--tolerance",
        type=float,
        metavar="X",
        help="largest relative error that passes (default: 1e-5; with 16-bit floats what their roundings do to this model; with --bisect "
        "and FILE.ir what rounding explains, which is printed)",
    )
    checks.add_argument(
        "--backend", choices=("tvm", "numpy"), help="what to check a model or an IR file with (default: tvm)"
    )
    bisect = parser.add_argument_group("with --bisect (and the arguments of `compile`, for a model)")
    bisect.add_argument(
        "--bisect",
        action="store_true",
        help="name the first pass, stage, operation and tensor that is wrong: the import against onnxruntime, the module after each "
        "pass, then the kernels of each stage against the interpreter",
    )
    bisect.add_argument(
        "--repro",
        metavar="DIR",
        help="where the smallest reproducer of what is wrong goes, or none (default: the name of what is checked, with .repro)",
    )
    bisect.add_argument(
        "--shrink",
        type=float,
        metavar="S",
        help="how many seconds to make the reproducer smaller (default: 60; 0: leave it as it is)",
    )
    files = parser.add_argument_group("with FILE.ir")
    files.add_argument(
        "-p",
        "--passes",
        metavar="PIPELINE",
        help="run these passes, and compare what the module computes before and after",
    )
    parity = parser.add_argument_group("with --parity (and --loss, --microbatches and --devices)")
    parity.add_argument(
        "--parity",
        action="store_true",
        help="train a model under 1f1b and under 2bw, several times, and print the gap between the final losses",
    )
    parity.add_argument(
        "--data",
        metavar="FILE|synthetic",
        help="npz with one array per input, shuffled (default: synthetic); with a model or FILE.ir the inputs.safetensors of a reproducer",
    )
    parity.add_argument(
        "--optimizers", metavar="LIST", help="kinds, each perhaps with its learning rate (default: momentum,adamw,muon)"
    )
    parity.add_argument(
        "--seeds",
        type=positive_number,
        metavar="N",
        help="runs of each, with other dropout and orders of samples (default: 3)",
    )
