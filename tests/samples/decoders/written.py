"""Decoders whose attention is written out, with random weights, as torch exports them to ONNX.

input_ids, attention_mask, position_ids, past_key_values.N.key/value -> logits, present.N.key/value
"""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from pathlib import Path

import torch
from torch import Tensor, nn

CONTEXT, WORDS = 96, 61


@dataclass(frozen=True)
class WrittenForm:
    """The form of a decoder. The last group is what no attention over caches has."""

    layers: int = 2
    heads: int = 4
    key_heads: int = 2
    size: int = 16
    window: int = 0
    cap: float = 0.0
    rotary: bool = True
    # Where the scale stands: behind the product, or a part of it at queries and at keys; no dimension of sequences in
    # the products; hidden scores that a number is added to.
    shared_scale: bool = False
    merged: bool = False
    added: bool = False
    # A bias for each distance, rows that see the next key, keys that are turned behind the caches, values times a score.
    distances: bool = False
    ahead: int = 0
    turned_late: bool = False
    squared: bool = False
    # Rows that see the keys of their own piece of so many; scores that grow from row 48 on.
    pieces: int = 0
    stretched: bool = False

    @property
    def width(self) -> int:
        return self.heads * self.size


def _turned(x: Tensor, at: Tensor) -> Tensor:
    """Rotate the halves of [batch, heads, tokens, size] by the positions [batch, tokens]."""
    half = x.shape[-1] // 2
    angles = at[:, None, :, None].to(x.dtype) * 100.0 ** (-torch.arange(half, dtype=x.dtype) / half)
    a, b = x[..., :half], x[..., half:]
    return torch.cat([a * angles.cos() - b * angles.sin(), b * angles.cos() + a * angles.sin()], -1)


class _WrittenLayer(nn.Module):
    def __init__(self, form: WrittenForm) -> None:
        super().__init__()
        self.form = form
        inner = form.key_heads * form.size
        self.q, self.k, self.v = (nn.Linear(form.width, n) for n in (form.width, inner, inner))
        self.o, self.norm = nn.Linear(form.width, form.width), nn.LayerNorm(form.width)
        self.up, self.down = nn.Linear(form.width, 64), nn.Linear(64, form.width)

    def forward(self, x: Tensor, mask: Tensor, at: Tensor, k_past: Tensor, v_past: Tensor) -> tuple[Tensor, ...]:
        form, y = self.form, self.norm(x)
        q, k, v = (
            part(y).view(*y.shape[:2], heads, form.size).transpose(1, 2)
            for part, heads in ((self.q, form.heads), (self.k, form.key_heads), (self.v, form.key_heads))
        )
        if form.rotary:
            q = _turned(q, at)
            k = k if form.turned_late else _turned(k, at)
        keys, values = torch.cat([k_past, k], 2), torch.cat([v_past, v], 2)
        mixed = self.attended(q, keys, values, mask)
        x = x + self.o(mixed.transpose(1, 2).reshape(*x.shape))
        return x + self.down(torch.nn.functional.gelu(self.up(x))), keys, values

    def attended(self, q: Tensor, keys: Tensor, values: Tensor, mask: Tensor) -> Tensor:
        form, total = self.form, keys.shape[2]
        if form.turned_late:
            keys = _turned(keys, torch.arange(total)[None])
        each = form.heads // form.key_heads
        if each > 1:
            keys, values = (
                t[:, :, None].expand(-1, -1, each, -1, -1).reshape(t.shape[0], form.heads, total, form.size)
                for t in (keys, values)
            )
        scale = form.size**-0.5
        if form.shared_scale:
            q, keys, scale = q * scale**0.5, keys * scale**0.5, 1.0
        if form.merged:
            q, keys, values = q[0], keys[0], values[0]
        scores = q @ keys.transpose(-1, -2) * scale
        if form.cap:
            scores = form.cap * torch.tanh(scores / form.cap)
        row = torch.arange(q.shape[-2])[:, None] + total - q.shape[-2]
        key = torch.arange(total)[None]
        if form.distances:
            scores = scores - 0.1 * (row - key)
        seen = (key <= row + form.ahead) & (mask[:, None, :] > 0)
        if form.window:
            seen = seen & (key > row - form.window)
        if form.pieces:
            seen = seen & (row // form.pieces == key // form.pieces)
        if form.stretched:
            scores = scores * ((row + 1).to(scores.dtype) / 48).clamp(min=1.0)
        if form.added:
            scores = scores + (1.0 - seen.to(scores.dtype)) * torch.finfo(torch.float32).min
        else:
            scores = scores.masked_fill(~seen, torch.finfo(torch.float32).min)
        shares = scores.softmax(-1)
        mixed = (shares * shares if form.squared else shares) @ values
        return mixed[None] if form.merged else mixed


class WrittenDecoder(nn.Module):
    """A decoder with past keys and values as inputs."""

    def __init__(self, form: WrittenForm) -> None:
        super().__init__()
        self.embed, self.head = nn.Embedding(WORDS, form.width), nn.Linear(form.width, WORDS)
        self.places = None if form.rotary else nn.Embedding(CONTEXT, form.width)
        self.layers = nn.ModuleList(_WrittenLayer(form) for _ in range(form.layers))

    def forward(self, ids: Tensor, mask: Tensor, at: Tensor, *pasts: Tensor) -> tuple[Tensor, ...]:
        x, presents = self.embed(ids), list[Tensor]()
        x = x if self.places is None else x + self.places(at)
        for number, layer in enumerate(self.layers):
            x, *held = layer(x, mask, at, *pasts[2 * number : 2 * number + 2])
            presents += held
        return self.head(x), *presents


def write_written(path: Path, form: WrittenForm, seed: int = 0) -> Path:
    """Write a decoder of random weights, and return its path."""
    torch.manual_seed(seed)
    model = WrittenDecoder(form).eval()
    for parameter in model.parameters():
        parameter.data += 0.2 * torch.randn_like(parameter)
    past, new = 5, 3
    pasts = [torch.randn(1, form.key_heads, past, form.size) for _ in range(2 * form.layers)]
    ids, mask = torch.zeros(1, new, dtype=torch.long), torch.ones(1, past + new, dtype=torch.long)
    keys = [f"{n}.{what}" for n in range(form.layers) for what in ("key", "value")]
    names = ["input_ids", "attention_mask", "position_ids", *(f"past_key_values.{key}" for key in keys)]
    outs = ["logits", *(f"present.{key}" for key in keys)]
    axes = {name: {1: "new"} for name in (*names[:3:2], "logits")} | {"attention_mask": {1: "total"}}
    axes |= {name: {2: "past"} for name in names[3:]} | {name: {2: "total"} for name in outs[1:]}
    with warnings.catch_warnings(), torch.no_grad():
        warnings.simplefilter("ignore")
        at = torch.arange(past, past + new)[None]
        torch.onnx.export(
            model, (ids, mask, at, *pasts), str(path), input_names=names, output_names=outs, dynamic_axes=axes,
            dynamo=False, opset_version=17,
        )  # fmt: skip
    return path
