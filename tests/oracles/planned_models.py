"""Common data of tests of plans and of their grades: a small model, its training, and words of a command."""

from __future__ import annotations

SIZES = [64, 256, 256, 256, 8]
TRAIN = ("--loss", "mse", "--optimizer", "momentum", "--lr", "0.01")
# Without tensor parallelism, whose plans take most of a search.
UNSPLIT = (*TRAIN, "--shard", "none")


def command(*words):
    """Return the words of a command as strings."""
    return [str(word) for word in words]
