"""Small networks that several tests of the torch frontend import."""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor, nn


class Block(nn.Module):
    def __init__(self, width: int, heads: int) -> None:
        super().__init__()
        self.heads = heads
        self.norm1, self.norm2 = nn.LayerNorm(width), nn.LayerNorm(width)
        self.qkv, self.out = nn.Linear(width, 3 * width), nn.Linear(width, width)
        self.up, self.down = nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x: Tensor) -> Tensor:
        q, k, v = (
            part.unflatten(-1, (self.heads, -1)).transpose(1, 2) for part in self.qkv(self.norm1(x)).chunk(3, -1)
        )
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True).transpose(1, 2).flatten(2)
        x = x + self.out(y)
        return x + self.down(F.gelu(self.up(self.norm2(x)), approximate="tanh"))


class GPT(nn.Module):
    """With the head tied to the embedding, and a buffer of positions that is not in the state dict."""

    def __init__(self, vocab: int = 23, width: int = 16, positions: int = 8) -> None:
        super().__init__()
        self.wte, self.wpe = nn.Embedding(vocab, width), nn.Embedding(positions, width)
        self.blocks = nn.ModuleList([Block(width, 2) for _ in range(2)])
        self.norm = nn.LayerNorm(width)
        self.head = nn.Linear(width, vocab, bias=False)
        self.head.weight = self.wte.weight
        self.register_buffer("order", torch.arange(positions), persistent=False)

    def forward(self, tokens: Tensor) -> Tensor:
        x = self.wte(tokens) + self.wpe(self.order[: tokens.shape[1]])
        for block in self.blocks:
            x = block(x)
        return self.head(self.norm(x))


class Conv(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.conv1, self.norm1 = nn.Conv2d(3, 8, 3, stride=2, padding=1, bias=False), nn.BatchNorm2d(8)
        self.conv2, self.norm2 = nn.Conv2d(8, 8, 3, padding="same", groups=2), nn.BatchNorm2d(8)
        self.head = nn.Linear(8, 5)

    def forward(self, image: Tensor) -> Tensor:
        x = F.max_pool2d(F.relu(self.norm1(self.conv1(image))), 2)
        x = x + F.silu(self.norm2(self.conv2(x)))
        return self.head(F.adaptive_avg_pool2d(x, 1).flatten(1))


def tokens(batch: int = 2, length: int = 8) -> Tensor:
    return torch.randint(0, 23, (batch, length))
