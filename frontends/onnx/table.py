"""All rules by ONNX operator type (default domain, opsets 7 to 28). To support an operator, add its row to the family it belongs to."""

from __future__ import annotations

from . import attention, elementwise, images, indexing, layout, losses, neural, sequences
from .node import Rule

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **layout.RULES,
    **indexing.RULES,
    **neural.RULES,
    **attention.RULES,
    **losses.RULES,
    **images.RULES,
    **sequences.RULES,
}

# fmt: off
# Operators without a rule whose results may still be computed at import, when all their operands are known.
FOLD_ONLY = frozenset({
    "Acos", "Acosh", "Asin", "Asinh", "Atan", "Atanh", "BitShift", "BitwiseAnd", "BitwiseNot", "BitwiseOr", "BitwiseXor",
    "Compress", "Cosh", "CumProd", "DepthToSpace", "Einsum", "EyeLike", "IsInf", "Mod", "NonZero",
    "ReverseSequence", "Shrink", "Sinh", "SpaceToDepth", "Tan", "Unique",
})
# Operators whose results are no arrays: onnx.reference must not compute them.
UNFOLDED = frozenset(sequences.RULES)
