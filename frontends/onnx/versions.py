"""The versions of ONNX that are read, and the conversion of older nodes to their newest form.

Attributes of an operator that are operands in newer opsets become operands. So the rules of the op tables and the
folding of constants see only one form of it. Where an operator of the same form had another meaning (Softmax before 13
flattened its operand), its rule reads the opset. `CHANGED` keeps such nodes from being computed at import with the
newer meaning.

In: a node. Out: nothing; the node's kind, attributes and operands are changed.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

from penstock.frontends.writer import Refused
from penstock.ir.types import numpy_dtype
from penstock.support.errors import UnsupportedModel, UsageError

from .node import OnnxNode
from .source import OnnxFile

OPSETS = range(7, 29)
IR_VERSIONS = range(3, 15)
DOMAINS = ("", "ai.onnx")
# Other domains whose operators have rules, with their versions.
OTHERS = {"com.microsoft": range(1, 2), "ai.onnx.ml": range(1, 6)}


def opsets_of(source: OnnxFile) -> dict[str, int]:
    """Return the opset of each domain of a model. The default domain is called ''.

    A model that names other domains only has the newest opset of the default one, as in onnxruntime.
    """
    model, where = source.model, str(source.path)
    versions = {entry.domain: int(entry.version) for entry in model.opset_import}
    if not versions:
        raise UsageError(f"not a valid ONNX model: {source.check() or 'it names no opset'}", where=where)
    default = next((versions[d] for d in DOMAINS if d in versions), OPSETS[-1])
    if model.ir_version > IR_VERSIONS[-1]:
        raise UnsupportedModel(
            f"IR version {model.ir_version} is not supported, only {IR_VERSIONS[0]} to {IR_VERSIONS[-1]}",
            where=where,
            hint="save the model with an older version of onnx",
        )
    if default not in OPSETS:
        raise UnsupportedModel(
            f"opset {default} is not supported, only {OPSETS[0]} to {OPSETS[-1]}",
            where=where,
            hint="onnx.version_converter can change the opset of a model, or export it again",
        )
    for domain, supported in OTHERS.items():
        if versions.get(domain, supported[0]) not in supported:
            only = " to ".join(map(str, dict.fromkeys((supported[0], supported[-1]))))
            raise UnsupportedModel(
                f"version {versions[domain]} of domain {domain} is not supported, only {only}", where=where
            )
    return {**versions, "": default}


# ---------------------------------------------------------------------------------------- older forms


def _moved(**operands: int) -> Callable[[OnnxNode], None]:
    """Make an upgrade that turns lists of integers into operands."""

    def upgrade(n: OnnxNode) -> None:
        for name, i in operands.items():
            if n.given(name):
                n.add_operand(i, np.array(n.ints_attr(name), np.int64))
                n.drop(name)

    return upgrade


def _clip(n: OnnxNode) -> None:
    for name, i in (("min", 1), ("max", 2)):
        if n.given(name):
            n.add_operand(i, np.array(n.float_attr(name), numpy_dtype(n.type().dtype)))
            n.drop(name)


def _pad(n: OnnxNode) -> None:
    _moved(pads=1)(n)
    n.add_operand(2, np.array(n.float_attr("value"), numpy_dtype(n.type().dtype)))
    n.drop("value")


def _topk(n: OnnxNode) -> None:
    n.add_operand(1, np.array([n.int_attr("k")], np.int64))
    n.drop("k")


def _dropout(n: OnnxNode) -> None:
    n.add_operand(1, np.array(n.float_attr("ratio", 0.5), np.float32))
    n.drop("ratio")


def _spatial(n: OnnxNode) -> None:
    if n.int_attr("spatial", 1) != 1:
        raise Refused("spatial=0 (statistics for every position) is not supported")
    n.drop("spatial")


def _dft(n: OnnxNode) -> None:
    n.add_operand(2, np.array(n.int_attr("axis", 1), np.int64))
    n.drop("axis")


def _scatter(n: OnnxNode) -> None:
    n.kind = "ScatterElements"


def _upsample(n: OnnxNode) -> None:
    n.add_operand(1, np.array(n.floats_attr("scales"), np.float32))
    n.drop("scales")


_AXES = _moved(axes=1)
# operator -> (first opset with the newest form, upgrade of an older node)
UPGRADES: dict[str, tuple[int, Callable[[OnnxNode], None]]] = {
    "Slice": (10, _moved(starts=1, ends=2, axes=3)),
    "TopK": (10, _topk),
    "BatchNormalization": (9, _spatial),
    "Upsample": (9, _upsample),
    "Clip": (11, _clip),
    "Pad": (11, _pad),
    "Scatter": (11, _scatter),
    "Dropout": (12, _dropout),
    "Split": (13, _moved(split=1)),
    "Squeeze": (13, _AXES),
    "Unsqueeze": (13, _AXES),
    "ReduceSum": (13, _AXES),
    **{
        f"Reduce{kind}": (18, _AXES)
        for kind in ("L1", "L2", "LogSum", "LogSumExp", "Max", "Mean", "Min", "Prod", "SumSquare")
    },
    "DFT": (20, _dft),
}

# operator -> first opset of its present meaning (BatchNormalization: the first that onnx.reference computes right)
CHANGED = {
    "Softmax": 13,
    "LogSoftmax": 13,
    "Hardmax": 13,
    "GroupNormalization": 21,
    "Resize": 11,
    "Upsample": 11,
    "Dropout": 10,
    "BatchNormalization": 14,
}


def upgrade(n: OnnxNode) -> int:
    """Convert a node of the default domain to its newest form. Return the opset of that form."""
    first, change = UPGRADES.get(n.kind, (0, None))
    if change is None or n.opset >= first:
        return n.opset
    change(n)
    return first
