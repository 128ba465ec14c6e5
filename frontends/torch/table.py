"""All rules by ATen operation and overload. To support an operation, add its row to the family it belongs to.

torch decomposes operations without a row before they get here. The operations of `WHOLE` have rows and are not
decomposed, because the pieces would be slower, lose precision, or be another graph for every size.
"""

from __future__ import annotations

from .node import Rule
from .rules import (
    attention,
    bags,
    bits,
    decoding,
    distances,
    draws,
    elementwise,
    indexing,
    layout,
    norms,
    products,
    recurrent,
    reductions,
    resizing,
    windows,
)

_FAMILIES = (
    elementwise,
    bits,
    draws,
    layout,
    indexing,
    reductions,
    distances,
    products,
    windows,
    resizing,
    norms,
    bags,
    attention,
    recurrent,
)

RULES: dict[str, Rule] = {name: rule for family in _FAMILIES for name, rule in family.RULES.items()}
assert len(RULES) == sum(len(family.RULES) for family in _FAMILIES), "two rows have one name"
# With operations of our own, which are none of ATen's.
ALL_RULES = {**RULES, **decoding.RULES}

# fmt: off
WHOLE = frozenset({
    "linear", "matmul", "mv", "dot", "baddbmm", "addcmul", "addcdiv",
    "gelu", "silu", "mish", "selu", "relu6", "hardsigmoid", "hardswish", "softplus", "erfc",
    "softmax.int", "log_softmax.int", "logsumexp", "layer_norm", "rms_norm", "group_norm", "std.correction",
    "std_mean.correction", "embedding_bag", "embedding_bag.padding_idx", "scaled_dot_product_attention",
    "lstm.input", "gru.input", "rnn_tanh.input", "rnn_relu.input",
    "upsample_nearest1d.vec", "upsample_nearest3d.vec", "upsample_linear1d.vec", "upsample_trilinear3d.vec",
    "upsample_bicubic2d.vec",
    "pixel_shuffle", "roll", "detach", "all", "all.dim", "copy", "_euclidean_dist",
})
# Checks of facts that torch has established. They compute nothing.
CHECKS = frozenset({
    "_assert_tensor_metadata", "_assert_async.msg", "_assert_scalar", "sym_constrain_range_for_size",
    "sym_constrain_range",
})
# fmt: on


def name_of(target: object) -> str:
    """Return the name of an operation of ATen or of ours in the tables, "" for anything else."""
    text = str(target)
    if text.startswith("penstock."):
        return text.removesuffix(".default")
    return text.removeprefix("aten.").removesuffix(".default") if text.startswith("aten.") else ""
