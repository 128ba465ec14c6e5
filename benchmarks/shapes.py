"""Chains of transformer shape, computed from their sizes, for the planner's benchmarks."""

from __future__ import annotations

from dataclasses import replace

from penstock.passes.planner.chain import Amount, Chain, Layer, PhaseWork


def gpt_chain(
    blocks: int,
    width: int,
    *,
    positions: int,
    vocabulary: int,
    heads: int = 0,
    optimizer_bytes: int = 12,
    efficiency: float = 1.0,
) -> Chain:
    """Make the chain of a GPT in 16 bits with a 32-bit optimiser.

    Per parameter there are 2 bytes of weights, 2 of gradients and `optimizer_bytes` of master weight and moments. Per
    block and position: 24 width^2 + 4 positions * width operations forward and twice as many backward. Saved are 34
    bytes * width per position, and where attention stores its scores (with `heads`) 5 bytes * heads * positions more
    (Korthikanti et al., 2022). 2 bytes * width cross to the next block. `efficiency` is the share of a device's rate
    that products reach.
    """
    params, tokens = 12 * width * width, positions
    flops = round((2 * params * tokens + 4 * positions * tokens * width) / efficiency)
    ends = vocabulary * width
    crossing = Amount(0, 2 * tokens * width)
    block = Layer(
        "",
        2 * params,
        2 * params,
        optimizer_bytes * params,
        Amount(0, 34 * tokens * width + 5 * heads * tokens * tokens),
        crossing,
        crossing,
        forward=PhaseWork(Amount(0, flops), Amount(2 * params, 34 * tokens * width)),
        backward=PhaseWork(Amount(0, 2 * flops), Amount(4 * params, 68 * tokens * width)),
        weight=PhaseWork(Amount(0, flops), Amount(2 * params)),
    )
    embedding = Layer(
        "embedding",
        2 * ends,
        2 * ends,
        optimizer_bytes * ends,
        Amount(0, 8 * tokens),
        crossing,
        crossing,
        forward=PhaseWork(Amount(), Amount(0, 4 * tokens * width)),
        backward=PhaseWork(Amount(), Amount(2 * ends, 4 * tokens * width)),
    )
    product = round(2 * ends * tokens / efficiency)
    head = Layer(
        "head",
        2 * ends,
        2 * ends,
        optimizer_bytes * ends,
        Amount(0, 4 * tokens * vocabulary),
        forward=PhaseWork(Amount(0, product), Amount(2 * ends, 4 * tokens * vocabulary)),
        backward=PhaseWork(Amount(0, 2 * product), Amount(4 * ends, 8 * tokens * vocabulary)),
        weight=PhaseWork(Amount(0, product), Amount(2 * ends)),
    )
    return Chain(
        (embedding, *(replace(block, name=f"block {i}") for i in range(blocks)), head), entry=Amount(0, 8 * tokens)
    )
