"""Arguments that commands have in common which compile a model: the model and its inputs, devices, training, schedule. Help texts and
checks of single values; what they mean together is for commands.py."""

from __future__ import annotations

import argparse
import os

from penstock.argument_types import device_list, positive_number
from penstock.ir.schedule_names import TRAINING

RATE_HELP = "how the learning rate changes, e.g. constant{warmup=100}, linear{steps=1000}, cosine{steps=1000,warmup=100,end=0.1} or step{every=300}"


def add_model_arguments(parser: argparse.ArgumentParser, optional: bool = False, metavar: str = "MODEL.onnx") -> None:
    """What `plan` and `compile` take, and `verify`, which takes more than models."""
    _add_reading(parser, optional, metavar)
    _add_training(parser)
    _add_dividing(parser)
    add_dump_arguments(parser, default=os.environ.get("PENSTOCK_DUMP"))


def _add_reading(parser: argparse.ArgumentParser, optional: bool, metavar: str) -> None:
    """The model, what it is read with, and the devices."""
    parser.add_argument("model", metavar=metavar, nargs="?" if optional else None)
    devices = parser.add_mutually_exclusive_group()
    devices.add_argument("--cluster", metavar="FILE", help="cluster file, TOML or YAML (.yaml, .yml)")
    devices.add_argument(
        "--devices",
        type=device_list,
        metavar="N|LIST",
        help="N equal CPU devices on this machine, or a list of `cpu` and CUDA architectures, e.g. cpu,sm_90 (default: 1)",
    )
    parser.add_argument(
        "--dim",
        action="append",
        default=[],
        metavar="NAME=INT",
        help="bind a symbolic dimension; the batch dimension is one microbatch",
    )
    parser.add_argument(
        "--known",
        action="append",
        default=[],
        metavar="NAME=VALUES",
        help="bind an input to numbers between commas or to FILE.npy, for models that take shapes, axes or counts as inputs",
    )
    parser.add_argument("--frozen", metavar="REGEX", help="parameters that are not trained")
    parser.add_argument(
        "--trained", metavar="REGEX", help="initializers that are trained although they hold a single number"
    )
    parser.add_argument(
        "--precision",
        choices=("f32", "bf16", "f16"),
        help="element type of activations and products; weights, sums and losses stay f32; with f16 the loss is scaled in training "
        "(default: f32)",
    )
    parser.add_argument(
        "--wire",
        choices=("f32", "bf16", "f16"),
        help="element type of float32 activations and gradients on their way between stages: half the bytes for a rounding at each "
        "boundary (default: f32)",
    )


def _add_training(parser: argparse.ArgumentParser) -> None:
    training = parser.add_argument_group("training (without a loss, the bundle is for inference)")
    training.add_argument("--train", metavar="FILE", help="training settings (TOML); the flags below override it")
    training.add_argument("--loss", metavar="L", help="cross_entropy or mse on the first output, or output:NAME")
    training.add_argument(
        "--optimizer",
        metavar="O",
        help="sgd, momentum, adam, adamw, adagrad, lion or muon, with settings e.g. 'momentum{nesterov=true}' (default: sgd)",
    )
    training.add_argument("--lr", type=float, metavar="X", help="learning rate")
    training.add_argument("--lr-schedule", metavar="R", help=RATE_HELP + " (default: constant)")
    training.add_argument(
        "--group",
        action="append",
        default=[],
        metavar="G",
        help="parameters whose name matches a pattern, and what is different for them: kind, lr (a factor), weight_decay, frozen; "
        "e.g. 'embed{kind=adamw,weight_decay=0}'; the first that matches counts",
    )
    training.add_argument("--weight-decay", type=float, metavar="X")
    training.add_argument(
        "--clip", type=float, metavar="X", help="scale the gradient down to this norm where it is longer"
    )
    training.add_argument(
        "--skip-nonfinite",
        action="store_true",
        default=None,
        help="leave out updates whose gradient is infinite or nan (with --clip and in f16 that is done in any case)",
    )
    training.add_argument(
        "--microbatches", type=positive_number, metavar="M", help="microbatches per batch (default: 1)"
    )
    training.add_argument(
        "--batch",
        type=positive_number,
        metavar="N",
        help="samples per update: the planner then chooses stages, their devices and shares, microbatches, schedule and recomputation; a "
        "symbolic first dimension of the inputs is left to it as well",
    )
    training.add_argument(
        "--schedule",
        choices=(*TRAINING, "auto"),
        help="default: 1f1b, which equals plain training; with --batch the fastest that does; auto, with --batch: the fastest of all",
    )
    training.add_argument(
        "--recompute",
        choices=("auto", "none", "all"),
        help="what is computed again in the backward pass instead of saved: what the memory of the devices asks for, nothing, or all "
        "(default: auto)",
    )


def _add_dividing(parser: argparse.ArgumentParser) -> None:
    """Who computes what: libraries, stages, their devices, and where stages begin."""
    parser.add_argument(
        "--cuda-libraries",
        choices=("torch", "none"),
        default="torch",
        help="who computes products, convolutions and attention on GPUs: the vendor's libraries through torch, or kernels of ours "
        "(default: torch)",
    )
    parser.add_argument(
        "--plan",
        metavar="FILE.json",
        help="carry out this plan: what `penstock plan --json` printed, or the plan.json of a bundle, perhaps edited",
    )
    parser.add_argument(
        "--stages",
        type=positive_number,
        default=0,
        metavar="N",
        help="pipeline stages (default: as many as the devices make)",
    )
    parser.add_argument(
        "--replicas",
        type=positive_number,
        default=0,
        metavar="N",
        help="devices per stage: they share the microbatches of a batch out among them, faster ones take more (default: 1; with --batch, "
        "the most of one stage, by default any number)",
    )
    parser.add_argument(
        "--split-at",
        action="append",
        default=[],
        metavar="NODE",
        help="start a new stage at this node or value instead of searching",
    )
    parser.add_argument(
        "--hints",
        choices=("use", "ignore"),
        default="use",
        help="placement hints in the model (pipeline stages, layer_ann): follow them where they fit, or ignore them (default: use)",
    )


def add_dump_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """What commands take that run passes; `default` is the folder if none is named."""
    dumping = parser.add_argument_group("dumps (docs/debugging.md)")
    dumping.add_argument(
        "--dump-ir",
        metavar="DIR",
        default=default,
        help="dump the module after every pass that changes it, and what is made of it"
        + (" (default: $PENSTOCK_DUMP, else no dump)" if parser.prog.endswith(("plan", "compile")) else ""),
    )
    dumping.add_argument(
        "--dump-ir-filter",
        metavar="REGEX",
        help="dump only operations whose line FILE @GRAPH OPERATION matches, e.g. '_fuse @' for a pass, '@s0[.]F ' for a graph, '= matmul'",
    )
    dumping.add_argument(
        "--dump-ir-changed",
        action="store_true",
        help="dump what each pass changed, by name, in place of whole modules; without --dump-ir print it on stderr",
    )
