"""The interface of a decoder in an ONNX file: which inputs and outputs are tokens, masks, keys and values, and logits.

    input_ids [batch, new], attention_mask [batch, past + new], position_ids [batch, new] (where there is one)
    past keys and values [batch, heads, past, size], two for each attention
    logits [batch, new, words], and present keys and values [batch, heads, past + new, size]

Keys and values have any names: the attention that takes them says what they are.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection
from dataclasses import dataclass

import onnx

TURN = "turn."


@dataclass(frozen=True)
class DecoderNames:
    """The names of the inputs and the output of a decoder that no operator tells."""

    tokens: str = "input_ids"
    mask: str = "attention_mask"
    positions: str = "position_ids"
    logits: str = "logits"


@dataclass(frozen=True)
class HeadShapes:
    """The heads of an attention, and the sizes of keys and values. Queries that are `merged` have no dimension of
    sequences."""

    heads: int
    key_heads: int
    size: int
    value_size: int
    merged: bool

    def of_new(self, tokens: int) -> list[tuple[int, ...]]:
        """Return the shapes of queries, keys and values of so many tokens."""
        queries = (self.heads, tokens, self.size)
        return [
            queries if self.merged else (1, *queries),
            (1, self.key_heads, tokens, self.size),
            (1, self.key_heads, tokens, self.value_size),
        ]


@dataclass(frozen=True)
class JoinedTensor:
    """Past keys or values with new ones behind them: the name of the result, and those of both."""

    past: str
    new: str
    result: str


@dataclass(frozen=True)
class WrittenOut:
    """An attention by the names of its tensors. `at` is the number of the node that gives the result.

    The `shapes` are known once it was read.
    """

    at: int
    result: str
    queries: str
    keys: JoinedTensor
    values: JoinedTensor
    shapes: HeadShapes | None = None

    @property
    def fed(self) -> tuple[str, str, str]:
        return self.queries, self.keys.new, self.values.new


@dataclass(frozen=True)
class Attention:
    """An attention of a decoder. `node` is its name, and `result` that of its result.

    The queries have four dimensions, or three, with all heads in one. Without `keys` and `values` these are packed
    behind them. With `cosines` and `sines`, tables by position, queries and keys are turned. `size` is that of a head,
    0 where the file leaves it open. One that is `written` out gives its result head by head, as its queries are.
    """

    node: str
    result: str
    queries: str
    keys: str
    values: str
    heads: int
    key_heads: int
    scale: float
    window: int = 0
    cap: float = 0.0
    cosines: str = ""
    sines: str = ""
    interleaved: bool = False
    size: int = 0
    pasts: tuple[str, ...] = ()
    presents: tuple[str, ...] = ()
    written: WrittenOut | None = None


def fed_inputs(graph: onnx.GraphProto) -> dict[str, onnx.ValueInfoProto]:
    """Return the inputs of a graph that no initializer stands for."""
    stored = {tensor.name for tensor in graph.initializer}
    return {value.name: value for value in graph.input if value.name not in stored}


def head_size(value: onnx.ValueInfoProto) -> int:
    """Return the size of a head of past keys or values, 0 where the file leaves it open."""
    dims = value.type.tensor_type.shape.dim
    return int(dims[3].dim_value) if len(dims) == 4 else 0


def interface_problems(graph: onnx.GraphProto, names: DecoderNames, attentions: Collection[Attention]) -> list[str]:
    """List what a graph lacks of the interface, and what it has besides."""
    inputs, outputs = fed_inputs(graph), [value.name for value in graph.output]
    known = {names.tokens, names.mask, names.positions, *(name for a in attentions for name in a.pasts)}
    problems = [
        f"input {name}: neither tokens, mask or positions, nor the past keys or values of an attention"
        for name in inputs
        if name not in known
    ]
    uses = Counter(name for attention in attentions for name in attention.pasts)
    problems += [f"input {name}: taken by {n} attentions, supported is one" for name, n in uses.items() if n > 1]
    if names.tokens not in inputs:
        problems.append(f"no input is called {names.tokens}, as the tokens of a decoder are")
    if names.logits not in outputs:
        problems.append(f"no output is called {names.logits}, as the logits of a decoder are")
    presents = {name for a in attentions for name in a.presents}
    problems += [
        f"output {name}: neither logits, nor the present keys or values of an attention"
        for name in outputs
        if name not in presents | {names.logits}
    ]
    named = [name for node in graph.node for name in node.output if name.startswith(TURN)]
    named += [name for name in (*inputs, *(tensor.name for tensor in graph.initializer)) if name.startswith(TURN)]
    problems += [f"tensor {name}: its name begins with {TURN}, as inputs of turns do" for name in named]
    return problems
