"""The model of a turn: a decoder's nodes with attention over caches in place of its own, fed by the inputs of a turn.

In: a file, its attentions, sizes. Out: a file whose inputs are those of a turn (runtime/generation/turn.py). Tokens and
positions become [1, tokens]; each attention becomes a node `Attend` of domain `penstock`, and what only its mask needed
is gone. The rows that choose tokens are taken before the head, and `Pick` chooses (rules.py).

What is left may depend on the length of the past in two ways: not at all, or as the positions of the tokens. Both are
found by computing it at two lengths (lengths.py). All else is refused by name.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import numpy as np
import onnx
from onnx.helper import make_node, make_tensor_value_info

from penstock.frontends.decoder_sizes import DecoderSizes
from penstock.frontends.imported import Unimported
from penstock.frontends.onnx.report import CannotImport, problem_of
from penstock.frontends.onnx.source import OnnxFile, names_taken, node_name

from .head import rows_before
from .interface import TURN, Attention, DecoderNames
from .lengths import LengthSample, by_length, needed_for, values_at

DOMAIN = "penstock"
PASTS = (19, 37)
_INT32, _INT64, _UINT64, _FLOAT = (
    onnx.TensorProto.INT32,
    onnx.TensorProto.INT64,
    onnx.TensorProto.UINT64,
    onnx.TensorProto.FLOAT,
)


@dataclass(frozen=True)
class Decoding:
    """A decoder as read: its file, names, and attentions by the names of their results."""

    source: OnnxFile
    names: DecoderNames
    attentions: Mapping[str, Attention]

    @property
    def where(self) -> str:
        return str(self.source.path)


def turn_inputs(tokens: int, sizes: DecoderSizes) -> list[onnx.ValueInfoProto]:
    """Return the inputs of a turn of so many tokens."""
    count = min(tokens, sizes.sequences)
    shapes = {
        "tokens": (_INT64, (tokens,)),
        "positions": (_INT64, (tokens,)),
        "places": (_INT32, (tokens,)),
        "starts": (_INT32, (count + 1,)),
        "lengths": (_INT32, (count,)),
        "table": (_INT32, (count, sizes.blocks_each)),
        "chosen": (_INT32, (count,)),
        "draws": (_UINT64, (count, 2)),
        "temperature": (_FLOAT, (count,)),
        "top_k": (_INT32, (count,)),
        "top_p": (_FLOAT, (count,)),
    }
    return [make_tensor_value_info(TURN + name, *kind) for name, kind in shapes.items()]


def turn_of(decoding: Decoding, tokens: int, sizes: DecoderSizes) -> OnnxFile:
    """Return the model of a turn of so many tokens. Raise CannotImport where something else depends on lengths."""
    writer = _TurnWriter(decoding, tokens, sizes)
    nodes = writer.nodes()
    outputs = [make_tensor_value_info(f"{TURN}picked", _INT64, None)]
    if sizes.logits:
        outputs.append(make_tensor_value_info(f"{TURN}logits", _FLOAT, None))
    return decoding.source.part(nodes, turn_inputs(tokens, sizes), outputs, writer.tensors)


class _TurnWriter:
    """The nodes of a turn under construction, and the tensors that they take besides those of the file."""

    def __init__(self, decoding: Decoding, tokens: int, sizes: DecoderSizes) -> None:
        self.decoding, self.tokens, self.sizes = decoding, tokens, sizes
        self.tensors: dict[str, np.ndarray] = {}
        self._tables: dict[str, onnx.NodeProto] = {}

    def nodes(self) -> list[onnx.NodeProto]:
        """Return the nodes of a turn in their order."""
        names, source = self.decoding.names, self.decoding.source
        attentions = self.decoding.attentions
        replaced = []
        for layer, node in enumerate_attentions(source.model.graph.node, attentions):
            replaced.append(node if layer is None else self._attend(attentions[node.output[0]], layer))
        self._hold("axis", np.array([0], np.int64))
        first = [
            make_node("Unsqueeze", [f"{TURN}tokens", f"{TURN}axis"], [names.tokens], "turn.tokens"),
            make_node("Unsqueeze", [f"{TURN}positions", f"{TURN}axis"], [names.positions], "turn.positions"),
            *self._tables.values(),
        ]
        body, logits = rows_before(needed_for(replaced, [names.logits]), source, names.logits, f"{TURN}chosen")
        body = self._without_lengths(body)
        last = [
            make_node("Cast", [logits], [f"{TURN}wide"], "turn.wide", to=_FLOAT),
            make_node("Squeeze", [f"{TURN}wide", f"{TURN}axis"], [f"{TURN}logits"], "turn.logits"),
            make_node(
                "Pick",
                [TURN + name for name in ("logits", "draws", "temperature", "top_k", "top_p")],
                [f"{TURN}picked"],
                "turn.pick",
                domain=DOMAIN,
            ),
        ]
        return needed_for([*first, *body, *last], [f"{TURN}picked"])

    def _hold(self, name: str, array: np.ndarray) -> str:
        self.tensors[TURN + name] = array
        return TURN + name

    def _attend(self, attention: Attention, layer: int) -> onnx.NodeProto:
        tables = [self._by_position(name) if name else "" for name in (attention.cosines, attention.sines)]
        places = [TURN + name for name in ("places", "starts", "lengths", "table")]
        return make_node(
            "Attend",
            [attention.queries, attention.keys, attention.values, *tables, *places],
            [attention.result],
            attention.node,
            domain=DOMAIN,
            layer=layer,
            blocks=self.sizes.blocks,
            cache=self.sizes.cache,
            heads=attention.heads,
            key_heads=attention.key_heads,
            size=attention.size,
            scale=attention.scale,
            window=attention.window,
            cap=attention.cap,
            interleaved=int(attention.interleaved),
            written=int(attention.written is not None),
        )

    def _by_position(self, table: str) -> str:
        """Return the rows of a table at the positions of the tokens. All attentions share them."""
        name = f"{TURN}rows.{table}"
        self._tables[table] = make_node("Gather", [table, f"{TURN}positions"], [name], name, axis=0)
        return name

    # ------------------------------------------------------------------------------------ lengths

    def _without_lengths(self, nodes: Sequence[onnx.NodeProto]) -> list[onnx.NodeProto]:
        """Replace what follows from the length of the past by numbers, or by the positions of the tokens."""
        names, source = self.decoding.names, self.decoding.source
        lengths = {names.mask, *(past for a in self.decoding.attentions.values() for past in a.pasts)}
        tainted = set(lengths)
        for node in nodes:
            if not tainted.isdisjoint(names_taken(node)):
                tainted.update(node.output)
        if not tainted - lengths:
            return list(nodes)
        samples = [LengthSample(past, self.tokens) for past in PASTS]
        values = [(sample, values_at(source, nodes, names, tainted, sample)) for sample in samples]
        body, problems = list[onnx.NodeProto](), list[Unimported]()
        replaced: dict[str, list[onnx.NodeProto]] = {}
        for number, node in enumerate(nodes):
            dependent = tainted.intersection(names_taken(node))
            if not dependent or all(name in values[0][1] for name in node.output):
                body += [] if dependent else [node]
                continue
            for name in sorted(dependent - replaced.keys()):
                read = by_length(values, name)
                if name in lengths or (read is None and name in values[0][1]):
                    reason = f"takes {name}, which depends on the length of the past otherwise than as positions do"
                    problems.append(problem_of(node_name(node, number), node, reason))
                elif read is not None:
                    replaced[name] = self._known(name, read, values[0][1][name])
                    body += replaced[name]
            body.append(node)
        if problems:
            raise CannotImport(self.decoding.where, problems)
        return body

    def _known(self, name: str, read: np.ndarray | tuple[int, ...], array: np.ndarray) -> list[onnx.NodeProto]:
        """Write a value that does not depend on the past, or the positions of the tokens in its shape and type."""
        if isinstance(read, np.ndarray):
            self.tensors[name] = read
            return []
        shape = self._hold(f"{name}.shape", np.array(read, np.int64))
        kind = onnx.helper.np_dtype_to_tensor_dtype(array.dtype)
        return [
            make_node("Reshape", [f"{TURN}positions", shape], [f"{TURN}{name}.shaped"], f"{TURN}{name}.shaped"),
            make_node("Cast", [f"{TURN}{name}.shaped"], [name], f"{TURN}{name}.cast", to=kind),
        ]


def enumerate_attentions(
    nodes: Sequence[onnx.NodeProto], attentions: Mapping[str, Attention]
) -> list[tuple[int | None, onnx.NodeProto]]:
    """Return the nodes, each with the number of the attention whose result it gives, or None."""
    numbered, layer = list[tuple[int | None, onnx.NodeProto]](), 0
    for node in nodes:
        gives = any(name in attentions for name in node.output[:1])
        numbered.append((layer if gives else None, node))
        layer += gives
    return numbered
