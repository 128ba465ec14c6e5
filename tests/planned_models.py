"""What tests of plans and of their grades share: the sizes of a small model, how it is trained, and words of a command."""

from __future__ import annotations

SIZES = [64, 256, 256, 256, 8]
TRAIN = ("--loss", "mse", "--optimizer", "momentum", "--lr", "0.01")


def command(*words):
    return [str(word) for word in words]
