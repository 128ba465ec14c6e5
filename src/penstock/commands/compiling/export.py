"""`penstock export`: the weights of a bundle or a checkpoint, in files that other programs read."""

from __future__ import annotations

from argparse import ArgumentParser, Namespace

from penstock.support.terminal import say


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of `penstock export`."""
    parser.add_argument(
        "source", metavar="BUNDLE|CHECKPOINT", help="a bundle, or a checkpoint whose bundle stands where it stood"
    )
    parser.add_argument(
        "--onnx", metavar="OUT.onnx", help="the model that was compiled, with these weights and its own names"
    )
    parser.add_argument("--safetensors", metavar="OUT.safetensors", help="the weights alone, by the model's own names")
    parser.add_argument(
        "--checkpoint",
        metavar="DIR",
        help="take the weights of this checkpoint, or of the newest one in this directory; with 2bw the newer of its "
        "two versions (default: the weights that the model had when it was compiled)",
    )


def run(arguments: Namespace) -> None:
    """Write the files."""
    from penstock.inspection.exports.weights import export  # lazy: heavy

    done = export(
        arguments.source, onnx=arguments.onnx, safetensors=arguments.safetensors, checkpoint=arguments.checkpoint
    )
    age = "as compiled" if done.step is None else f"after {done.step} steps"
    say(f"wrote {', '.join(map(str, done.files))}: {done.tensors} tensors {age}")
