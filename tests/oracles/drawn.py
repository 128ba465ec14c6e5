"""Dropout in torch with the masks that Penstock draws: the oracle of models that are trained with dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor

from oracles.torch_meaning import MEANING


@dataclass
class Draws:
    """The masks of torch's dropout: use after use of one microbatch, in the order of the calls."""

    seed: int = 0
    microbatch: int = 0
    use: int = 0

    def begin(self, microbatch: int) -> None:
        """Start a microbatch."""
        self.microbatch, self.use = microbatch, 0

    def kept(self, shape: torch.Size, p: float) -> Tensor:
        """Draw the mask of the next use."""
        key = MEANING["random_key"](torch.tensor(self.microbatch), number=self.use, seed=self.seed)
        self.use += 1
        number = MEANING["random"](torch.arange(shape.numel()).reshape(shape), key)
        assert isinstance(number, Tensor)
        return number >= torch.tensor(p, dtype=torch.float32)

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        """Apply dropout with the next mask."""
        return torch.where(self.kept(x.shape, p), x / (1 - p), 0.0) if training and p else x


@contextmanager
def drawn(seed: int = 0) -> Iterator[Draws]:
    """Make torch.nn.functional.dropout, which modules call, draw as Penstock does."""
    draws = Draws(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", draws.dropout)
        yield draws
