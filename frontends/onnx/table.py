"""All rules by ONNX operator type (default domain, opsets 7 to 28; com.microsoft, ai.onnx.ml).

To support an operator, add its row to the family it belongs to.
"""

from __future__ import annotations

import onnx

from .node import Rule
from .rules import (
    attention,
    draws,
    elementwise,
    images,
    indexing,
    layout,
    microsoft,
    neural,
    pooling,
    quantised,
    recurrent,
    reductions,
    scattering,
    sequences,
    signals,
)
from .rules.ml import encoders, features, linear, trees, vectors
from .versions import DOMAINS

RULES: dict[str, Rule] = {
    **elementwise.RULES,
    **layout.RULES,
    **indexing.RULES,
    **neural.RULES,
    **attention.RULES,
    **draws.RULES,
    **images.RULES,
    **sequences.RULES,
    **scattering.RULES,
    **pooling.RULES,
    **recurrent.RULES,
    **reductions.RULES,
    **signals.RULES,
    **quantised.RULES,
}

OTHERS: dict[str, dict[str, Rule]] = {
    "com.microsoft": {**quantised.MICROSOFT, **microsoft.RULES},
    "ai.onnx.ml": {**encoders.RULES, **features.RULES, **linear.RULES, **trees.RULES, **vectors.RULES},
}


# Operators of ai.onnx.ml that cannot have a rule, and why. `{}` stands for the first operand.
_NO_STRINGS = "there are no strings here: encode them before the model"
_NO_MAPS = "there are no maps here: give the model a tensor of their values"
WITHOUT_RULE = {
    "ZipMap": "there are no maps here: make {}, the tensor before it, an output instead (skl2onnx: zipmap=False)",
    "CategoryMapper": _NO_STRINGS,
    "CastMap": _NO_MAPS,
    "DictVectorizer": _NO_MAPS,
}


def why_without_rule(node: onnx.NodeProto) -> str:
    """Explain why there is no rule for an operator."""
    reason = WITHOUT_RULE.get(node.op_type, "") if node.domain == "ai.onnx.ml" else ""
    return reason.format(node.input[0] if node.input else "its operand") if reason else "no rule for this operator"


def rule_of(domain: str, kind: str) -> Rule | None:
    return (RULES if domain in DOMAINS else OTHERS.get(domain, {})).get(kind)


# fmt: off
# Operators without a rule whose results may still be computed at import, when all their operands are known.
FOLD_ONLY = frozenset({
    "BlackmanWindow", "HammingWindow", "HannWindow", "MelWeightMatrix", "NonMaxSuppression", "NonZero",
    "TfIdfVectorizer", "Unique",
})
# onnx.reference must not compute these: their results are no arrays, or are random, and one draw at import would stand
# for all.
UNFOLDED = frozenset({*sequences.RULES, "Bernoulli", "Dropout", "Multinomial", "RandomNormalLike", "RandomUniformLike"})
