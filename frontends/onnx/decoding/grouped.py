"""Attention of decoders that is one operator: GroupQueryAttention of com.microsoft, with past keys and values.

In: a node of it, and the values that its lengths have at two sizes. Out: what it computes for one sequence, or why it
cannot be had.
Its lengths have to be those of all keys: `seqlens_k` one less than past and new ones together, `total_sequence_length`
as many. That is computed, at sizes where nothing else fits (lengths.py).
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import numpy as np
import onnx

from penstock.frontends.writer import Refused

from .interface import Attention, head_size
from .lengths import LengthSample

KIND = "GroupQueryAttention"
# Operands by number that change the result in ways that attention over caches does not have.
_REFUSED = {10: "a bias of scores", 11: "sinks", 12: "quantised caches", 13: "quantised caches"}
_READ = ("num_heads", "kv_num_heads", "scale", "local_window_size", "softcap", "do_rotary", "rotary_interleaved")
# Attributes that must have the value of their absence.
_ABSENT = {
    "smooth_softmax": 0,
    "qk_output": 0,
    "k_quant_type": b"NONE",
    "v_quant_type": b"NONE",
    "kv_cache_bit_width": 0,
}
POSITIONS = 9


def is_grouped(node: onnx.NodeProto) -> bool:
    return bool(node.domain == "com.microsoft" and node.op_type == KIND)


def lengths_of(node: onnx.NodeProto) -> list[str]:
    """Return the names of the operands that say how long sequences are, and of the positions, where there are some."""
    return [name for name in (_operand(node, i) for i in (5, 6, POSITIONS)) if name]


def read_grouped(
    node: onnx.NodeProto,
    name: str,
    inputs: Mapping[str, onnx.ValueInfoProto],
    samples: Sequence[tuple[LengthSample, Mapping[str, np.ndarray]]],
) -> Attention:
    """Return what a node computes. Raise Refused where it is something else than attention over caches.

    `inputs` are those of the model. `samples` are sizes, each with the values that lengths have there.
    """
    attributes = {a.name: onnx.helper.get_attribute_value(a) for a in node.attribute}
    for attribute, value in attributes.items():
        if attribute not in _READ and value != _ABSENT.get(attribute):
            raise Refused(f"attribute {attribute}={value!r} is not supported over caches")
    for i, what in _REFUSED.items():
        if _operand(node, i):
            raise Refused(f"operand {i}, {what}, is not supported over caches")
    pasts = (_operand(node, 3), _operand(node, 4))
    if not all(past in inputs for past in pasts):
        raise Refused("past keys and values are no inputs of the model")
    heads, key_heads = int(attributes.get("num_heads", 0)), int(attributes.get("kv_num_heads", 0))
    if not 0 < key_heads <= heads or heads % key_heads:
        raise Refused(f"{heads} heads of queries do not divide into {key_heads} of keys")
    _check_lengths(node, samples)
    turned = bool(attributes.get("do_rotary", 0))
    tables = (_operand(node, 7), _operand(node, 8)) if turned else ("", "")
    if turned and not all(tables):
        raise Refused("do_rotary without tables of cosines and sines")
    queries, keys, values = (_operand(node, i) for i in range(3))
    return Attention(
        name,
        node.output[0],
        queries,
        keys,
        values,
        heads,
        key_heads,
        scale=float(attributes.get("scale", 0.0)),
        window=max(int(attributes.get("local_window_size", -1)), 0),
        cap=float(attributes.get("softcap", 0.0)),
        cosines=tables[0],
        sines=tables[1],
        interleaved=bool(attributes.get("rotary_interleaved", 0)),
        size=head_size(inputs[pasts[0]]),
        pasts=pasts,
        presents=tuple(filter(None, node.output[1:3])),
    )


def _operand(node: onnx.NodeProto, i: int) -> str:
    return str(node.input[i]) if i < len(node.input) else ""


def _check_lengths(node: onnx.NodeProto, samples: Sequence[tuple[LengthSample, Mapping[str, np.ndarray]]]) -> None:
    for sample, values in samples:
        total = sample.past + sample.tokens
        expected = {
            5: ("the number of keys less one", np.array(total - 1)),
            6: ("the number of keys", np.array(total)),
            POSITIONS: ("the position of each token", np.arange(sample.past, total)),
        }
        for i, (what, wanted) in expected.items():
            operand = _operand(node, i)
            if not operand and i == POSITIONS:
                continue
            got = values.get(operand)
            if got is None or not np.array_equal(got.reshape(-1), wanted.reshape(-1)):
                shown = "unknown" if got is None else got.reshape(-1)[:4].tolist()
                raise Refused(
                    f"operand {i}, {operand or 'which is missing'}, is {shown} for {sample.past} past and "
                    f"{sample.tokens} new tokens, expected {what}"
                )
