"""Operations of decoders for programs of torch: attention over a cache, and the choice of a token.

They have types and no meaning here: torch.export follows them, and rules/decoding.py gives them to the IR. A turn is
what a decoder gets at once: some rows, each a token of a sequence. Importing this module declares the operations.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

# torch gives its library no types.
_TORCH: Any = torch.library
_LIBRARY = _TORCH.Library("penstock", "FRAGMENT")
_LIBRARY.define(
    "attend(Tensor query, Tensor key, Tensor value, Tensor places, Tensor starts, Tensor lengths, Tensor table, "
    "int layer, int blocks, float scale, int window, float cap) -> Tensor"
)
_LIBRARY.define("pick(Tensor logits, Tensor draws, Tensor temperature, Tensor top_k, Tensor top_p) -> Tensor")


def _attended(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, *rest: object) -> torch.Tensor:
    batch, heads, rows, _ = query.shape
    return query.new_empty((batch, rows, heads, value.shape[3]))


def _picked(logits: torch.Tensor, *rest: object) -> torch.Tensor:
    return logits.new_empty((logits.shape[0],), dtype=torch.int64)


_TORCH.register_fake("penstock::attend", _attended)
_TORCH.register_fake("penstock::pick", _picked)


@dataclass(frozen=True)
class CachePlaces:
    """The tensors of a turn that say where its rows belong, and how many blocks the caches have."""

    places: torch.Tensor
    starts: torch.Tensor
    lengths: torch.Tensor
    table: torch.Tensor
    blocks: int


def attend(
    turn: CachePlaces,
    layer: int,
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    scale: float,
    window: int = 0,
    cap: float = 0.0,
) -> torch.Tensor:
    """Store keys and values of [1, heads, rows, size] in the caches of a layer, and attend to all of their sequences.

    Return [1, rows, heads, size].
    """
    where = (turn.places, turn.starts, turn.lengths, turn.table)
    result: torch.Tensor = torch.ops.penstock.attend(query, key, value, *where, layer, turn.blocks, scale, window, cap)
    return result


def pick(
    logits: torch.Tensor,
    draws: torch.Tensor,
    temperature: torch.Tensor,
    top_k: torch.Tensor,
    top_p: torch.Tensor,
) -> torch.Tensor:
    """Choose a token for each row of logits."""
    result: torch.Tensor = torch.ops.penstock.pick(logits, draws, temperature, top_k, top_p)
    return result
