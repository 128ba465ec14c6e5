"""`penstock run`: train with a bundle."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from penstock.commands.arguments import RATE_HELP
from penstock.commands.types import positive_number, seed_number, whole_number


def add_arguments(parser: ArgumentParser) -> None:
    """Add the data and how to train on it; saving, the ends of a run, and showing."""
    parser.add_argument("bundle", metavar="BUNDLE")
    parser.add_argument(
        "--data",
        default="synthetic",
        metavar="FILE|synthetic",
        help="samples: .npz, .safetensors, .parquet, a folder of .npy, FILE:u16 of tokens, or INPUT=FILE,... "
        "(docs/data.md; default: synthetic)",
    )
    parser.add_argument(
        "--steps", type=positive_number, default=10, metavar="N", help="optimiser steps in this run (default: 10)"
    )
    parser.add_argument("--shuffle", action="store_true", help="visit samples in a new order every epoch")
    parser.add_argument(
        "--seed", type=seed_number, default=0, metavar="N", help="for --shuffle and synthetic data (default: 0)"
    )
    parser.add_argument(
        "--last-batch",
        choices=("wrap", "drop", "pad"),
        default="wrap",
        help="where samples are no multiple of a batch: go on with the next epoch, drop the rest, or fill up from the "
        "same epoch (default: wrap)",
    )
    parser.add_argument(
        "--eval-data",
        metavar="FILE",
        help="samples to compute the mean loss of, without training on them (docs/data.md)",
    )
    parser.add_argument(
        "--eval-every", type=positive_number, metavar="N", help="steps between evaluations (default: one at the end)"
    )
    parser.add_argument(
        "--lr", type=float, metavar="X", help="learning rate, in place of the one the bundle was compiled with"
    )
    parser.add_argument(
        "--lr-schedule", metavar="R", help=RATE_HELP + ", in place of the one the bundle was compiled with"
    )
    _add_saving(parser)
    _add_failing(parser)
    _add_showing(parser)


def _add_saving(parser: ArgumentParser) -> None:
    """Add the files that a run writes to go on from."""
    parser.add_argument("--metrics", metavar="FILE", help="write one JSON object per step")
    parser.add_argument(
        "--checkpoint", metavar="DIR", help="write checkpoints here, at the end and every --checkpoint-every steps"
    )
    parser.add_argument("--checkpoint-every", type=positive_number, metavar="N", help="steps between checkpoints")
    parser.add_argument(
        "--keep-last",
        type=positive_number,
        metavar="N",
        help="remove older checkpoints, but for the newest N (default: keep all)",
    )
    parser.add_argument(
        "--checkpoint-wait",
        action="store_true",
        help="let training wait while a checkpoint is written, which needs no memory for a copy of the state",
    )
    parser.add_argument(
        "--resume",
        metavar="DIR",
        help="go on from the newest whole checkpoint in this directory, or from this checkpoint",
    )


def _add_failing(parser: ArgumentParser) -> None:
    """Add the reasons for which a run gives up, and its reaction."""
    parser.add_argument(
        "--heartbeat",
        type=float,
        default=10.0,
        metavar="S",
        help="a rank without a sign of life for so long is lost; 0: never (default: 10)",
    )
    parser.add_argument(
        "--timeout",
        type=float,
        default=600.0,
        metavar="S",
        help="give up when a peer that lives keeps a rank waiting this long (default: 600)",
    )
    parser.add_argument(
        "--nan",
        choices=("stop", "skip", "warn"),
        default="warn",
        help="a loss or gradient that is not finite: end the run, insist on a bundle that leaves such updates out, or "
        "warn (default: warn)",
    )
    parser.add_argument(
        "--max-restarts",
        type=whole_number,
        default=0,
        metavar="N",
        help="start the workers again after a failure, from the newest checkpoint, up to N times (default: 0; under "
        "torchrun that is its option)",
    )
    parser.add_argument(
        "--elastic",
        action="store_true",
        help="with fewer devices than before plan anew on those that are left, and go on (default: end with an error)",
    )


def _add_showing(parser: ArgumentParser) -> None:
    """Add the places where a run shows its work, and the secrets of a group."""
    parser.add_argument("--trace", metavar="FILE", help="write a Chrome trace of every action")
    parser.add_argument(
        "--log",
        action="append",
        default=[],
        metavar="KIND:WHERE",
        help="send metrics there, too: tensorboard:DIR, wandb:PROJECT, mlflow:EXPERIMENT, prometheus:[HOST:]PORT or "
        "prometheus:FILE.prom; may be given several times",
    )
    parser.add_argument(
        "--log-ranks",
        default="0",
        metavar="LIST",
        help="whose processes' own output to show, with rank and stage before each line: all, none, or numbers such "
        "as 0,2; errors are shown in any case (default: 0)",
    )
    parser.add_argument(
        "--secret",
        metavar="FILE",
        help="in a group: what its ranks have in common and nobody else has, at least 32 bytes (docs/security.md)",
    )
    parser.add_argument(
        "--tls",
        metavar="DIR",
        help="in a group: let the keepers of the ranks speak over TLS, with cert.pem and key.pem of this directory",
    )


def run(arguments: Namespace) -> None:
    """Train, or join a group as one rank."""
    from penstock.runtime.job.run import run_bundle  # lazy: heavy

    run_bundle(
        arguments.bundle,
        data=arguments.data,
        steps=arguments.steps,
        shuffle=arguments.shuffle,
        seed=arguments.seed,
        last=arguments.last_batch,
        eval_data=arguments.eval_data,
        eval_every=arguments.eval_every,
        metrics=arguments.metrics,
        lr=arguments.lr,
        rate=arguments.lr_schedule,
        checkpoint=arguments.checkpoint,
        checkpoint_every=arguments.checkpoint_every,
        checkpoint_wait=arguments.checkpoint_wait,
        keep_last=arguments.keep_last,
        resume=arguments.resume,
        timeout=arguments.timeout,
        heartbeat=arguments.heartbeat,
        nan=arguments.nan,
        max_restarts=arguments.max_restarts,
        elastic=arguments.elastic,
        log=arguments.log,
        log_ranks=arguments.log_ranks,
        secret=arguments.secret,
        tls=arguments.tls,
        trace=arguments.trace,
    )
