"""Making the module of a folder takes no memory for its parameters, and leaves its other tensors as they are."""

from __future__ import annotations

from typing import Any

import pytest

pytest.importorskip("transformers")

import torch
from samples.huggingface.folders import FAMILIES
from torch._subclasses.fake_tensor import FakeTensor
from torch.utils._python_dispatch import TorchDispatchMode
from transformers import AutoConfig

from penstock.frontends.huggingface import export

WORDS = 8192


class LargestTensor(TorchDispatchMode):
    """The most elements that a tensor in memory had."""

    elements = 0

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        made = func(*args, **(kwargs or {}))
        in_memory = isinstance(made, torch.Tensor) and not isinstance(made, FakeTensor) and made.device.type == "cpu"
        if in_memory:
            self.elements = max(self.elements, made.numel())
        return made


@pytest.mark.parametrize("family", sorted(FAMILIES))
def test_parameters_are_never_in_memory(family: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: without the mode, each table of words is in memory once."""
    config = AutoConfig.for_model(family, **{**FAMILIES[family], "vocab_size": WORDS}).to_dict()
    buffers, largest = [], []
    for least in (64, 1 << 60):
        monkeypatch.setattr(export, "_LARGE", least)
        with LargestTensor() as seen:
            module = export.make_module(config, "here")
        largest.append(seen.elements)
        buffers.append(dict(module.named_buffers()))
    ours, plain = buffers
    assert largest[0] < WORDS < 32 * WORDS <= largest[1]
    assert ours.keys() == plain.keys()
    assert all(torch.equal(ours[name], plain[name]) for name in ours)
