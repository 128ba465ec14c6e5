"""From settings to a program of torch: a decoder of transformers, exported with attention over caches.

The module is made without memory for its parameters: they are tensors without elements (`FakeTensorMode`), while
buffers, such as the frequencies of rotary embeddings, have theirs. Its attention is `penstock::attend`
(frontends/torch/decoding.py), which transformers calls by the name `penstock` in its table of attention functions. The
mask function of that name gives None: lengths say what a row may see.

Inputs are those of a turn, `TURN`. The tokens of a turn are a dynamic dimension of the program; all others are numbers.
"""

from __future__ import annotations

import os
import types
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.export import Dim, ExportedProgram
from torch.fx.experimental.symbolic_shapes import ShapeEnv
from torch.overrides import TorchFunctionMode

from penstock.frontends.torch.decoding import CachePlaces, attend, pick
from penstock.support.errors import UnsupportedModel, UsageError

ATTENTION = "penstock"
# What transformers hands to attention besides, and what does not change it here.
_HARMLESS = ("dropout", "position_ids", "use_cache", "output_attentions", "output_router_logits", "cache_position")

# Elements. Smaller tensors may be those that are filled by hand.
_LARGE = 1 << 16


@dataclass(frozen=True)
class TurnShape:
    """The sizes of a turn but its tokens: sequences, blocks that one of them has at most, and blocks of the caches."""

    sequences: int
    blocks_each: int
    blocks: int


def make_module(config: Mapping[str, Any], where: str) -> nn.Module:
    """Make the module of a config without memory for its parameters."""
    os.environ.setdefault("HF_HUB_OFFLINE", "1")
    from transformers import AttentionInterface, AutoConfig, AutoModelForCausalLM  # lazy: heavy
    from transformers.masking_utils import AttentionMaskInterface  # lazy: heavy

    AttentionInterface.register(ATTENTION, _attention)
    AttentionMaskInterface.register(ATTENTION, _no_mask)
    settings = {name: value for name, value in config.items() if name not in ("model_type", "quantization_config")}
    try:
        read = AutoConfig.for_model(config["model_type"], **settings)
        with _UnfilledOnMeta(), _parameters_on_meta():
            module = AutoModelForCausalLM.from_config(read, attn_implementation=ATTENTION, dtype=torch.float32)
    except Exception as error:  # transformers raises errors of its own kinds for settings that make no sense
        raise UsageError(
            f"transformers cannot make the model: {type(error).__name__}: {' '.join(str(error).split())[:300]}",
            where=where,
        ) from error
    _without_elements(module)
    return module.eval()  # type: ignore[no-any-return]


class _UnfilledOnMeta(TorchFunctionMode):
    """Make large tensors that nothing fills yet on the device meta: the parameters of layers, before they are drawn.

    Were they made in memory and let go one by one, the heap could grow by all of them: small objects are put where a
    parameter was, and the next one of its size does not fit there any more.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch.empty:
            without_memory = func(*args, **{**(kwargs or {}), "device": "meta"})
            if without_memory.numel() >= _LARGE:
                return without_memory
        return func(*args, **(kwargs or {}))


@contextmanager
def _parameters_on_meta() -> Iterator[None]:
    """Move each parameter that is filled when it is made, such as ones, to the device meta."""
    register = nn.Module.register_parameter

    def register_without_memory(self: nn.Module, name: str, param: nn.Parameter | None) -> None:
        if param is not None and param.device.type != "meta":
            param = nn.Parameter(param.detach().to("meta"), requires_grad=param.requires_grad)
        register(self, name, param)

    nn.Module.register_parameter = register_without_memory  # type: ignore[method-assign]
    try:
        yield
    finally:
        nn.Module.register_parameter = register  # type: ignore[method-assign]


def _without_elements(module: nn.Module) -> None:
    """Put tensors of the CPU without elements in place of parameters on meta; tied ones stay one."""
    mode = FakeTensorMode(allow_non_fake_inputs=True, shape_env=ShapeEnv())
    without: dict[nn.Parameter, nn.Parameter] = {}
    for part in module.modules():
        for name, param in part._parameters.items():
            if param is None:
                continue
            if param not in without:
                with mode:
                    without[param] = nn.Parameter(torch.empty(param.shape, dtype=param.dtype), requires_grad=False)
            part._parameters[name] = without[param]
    module.fake_mode = mode  # type: ignore[assignment]


def export_decoder(module: nn.Module, shape: TurnShape, most_tokens: int, logits: bool, where: str) -> ExportedProgram:
    """Export the module as a function of a turn, whose tokens are a dimension from 1 to `most_tokens`."""
    forward = _with_logits if logits else _picked
    module.forward = types.MethodType(_turn(shape.blocks, forward), module)
    tokens = Dim("tokens", min=1, max=max(most_tokens, 2))
    example = min(4, max(most_tokens, 2))
    inputs = {name: make(example, shape) for name, make in TURN.items()}
    dynamic = {name: {0: tokens} if name in BY_TOKEN else None for name in TURN}
    mode: Any = module.fake_mode
    try:
        fed = {name: mode.from_tensor(tensor) for name, tensor in inputs.items()}
        program = torch.export.export(module, (fed,), strict=False, dynamic_shapes=(dynamic,))
    except Exception as error:  # torch raises errors of its own, of the model's code, and of tensors
        what = " ".join(str(error).split())[:300]
        raise UnsupportedModel(f"torch.export cannot export it: {type(error).__name__}: {what}", where=where) from error
    return program


def _int32(*shape: int) -> torch.Tensor:
    return torch.zeros(shape, dtype=torch.int32)


# The inputs of a turn, by the names of the arguments, with examples. `turn.` before them are their names in the module.
TURN: dict[str, Callable[[int, TurnShape], torch.Tensor]] = {
    "tokens": lambda tokens, shape: _int32(tokens).long(),
    "positions": lambda tokens, shape: _int32(tokens).long(),
    "places": lambda tokens, shape: _int32(tokens),
    "starts": lambda tokens, shape: _int32(shape.sequences + 1),
    "lengths": lambda tokens, shape: _int32(shape.sequences),
    "table": lambda tokens, shape: _int32(shape.sequences, shape.blocks_each),
    "chosen": lambda tokens, shape: _int32(shape.sequences),
    "draws": lambda tokens, shape: torch.zeros(shape.sequences, 2, dtype=torch.uint64),
    "temperature": lambda tokens, shape: torch.zeros(shape.sequences),
    "top_k": lambda tokens, shape: _int32(shape.sequences),
    "top_p": lambda tokens, shape: torch.zeros(shape.sequences),
}
BY_TOKEN = ("tokens", "positions", "places")


def _picked(logits: torch.Tensor, *how: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"turn.picked": pick(logits, *how)}


def _with_logits(logits: torch.Tensor, *how: torch.Tensor) -> dict[str, torch.Tensor]:
    return {"turn.picked": pick(logits, *how), "turn.logits": logits}


def _turn(blocks: int, results: Callable[..., dict[str, torch.Tensor]]) -> Callable[..., dict[str, torch.Tensor]]:
    """Return a forward that takes a turn."""

    def forward(self: Any, turn: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
        places = CachePlaces(turn["places"], turn["starts"], turn["lengths"], turn["table"], blocks)
        for part in self.modules():
            part.penstock_turn = places
        inputs = {"input_ids": turn["tokens"][None], "position_ids": turn["positions"][None], "use_cache": False}
        logits = type(self).forward(self, **inputs, logits_to_keep=turn["chosen"].to(torch.int64)).logits
        return results(logits[0], turn["draws"], turn["temperature"], turn["top_k"], turn["top_p"])

    return forward


def _no_mask(*args: Any, **kwargs: Any) -> None:
    """Give no mask: lengths say what a row may see."""


def _attention(
    module: nn.Module,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attention_mask: torch.Tensor | None,
    scaling: float | None = None,
    **more: Any,
) -> tuple[torch.Tensor, None]:
    """Attend over the caches of a layer, as transformers asks for it."""
    window, cap = int(more.pop("sliding_window", None) or 0), float(more.pop("softcap", None) or 0.0)
    strange = [name for name, value in more.items() if value is not None and name not in _HARMLESS]
    if strange or attention_mask is not None:
        raise UnsupportedModel(f"attention with {', '.join(strange) or 'a mask'} is not supported")
    scale = query.shape[-1] ** -0.5 if scaling is None else float(scaling)
    turn: Any = module.penstock_turn
    layer: Any = module.layer_idx
    return attend(turn, int(layer), query, key, value, scale, window, cap), None
