"""Dropout in torch with the masks that are drawn here: the oracle of models that are trained with dropout."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass

import pytest
import torch
from torch import Tensor
from torch_meaning import MEANING


@dataclass
class Draws:
    """What torch's dropout gives: use after use of one microbatch, in the order in which they are called."""

    seed: int = 0
    microbatch: int = 0
    use: int = 0

    def begin(self, microbatch: int) -> None:
        self.microbatch, self.use = microbatch, 0

    def kept(self, shape: torch.Size, p: float) -> Tensor:
        key = MEANING["random_key"](torch.tensor(self.microbatch), number=self.use, seed=self.seed)
        self.use += 1
        number = MEANING["random"](torch.arange(shape.numel()).reshape(shape), key)
        assert isinstance(number, Tensor)
        return number >= torch.tensor(p, dtype=torch.float32)

    def dropout(self, x: Tensor, p: float = 0.5, training: bool = True, inplace: bool = False) -> Tensor:
        return torch.where(self.kept(x.shape, p), x / (1 - p), 0.0) if training and p else x


@contextmanager
def drawn(seed: int = 0) -> Iterator[Draws]:
    """Within, torch.nn.functional.dropout, which modules call, draws as Penstock does."""
    draws = Draws(seed)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch.nn.functional, "dropout", draws.dropout)
        yield draws
