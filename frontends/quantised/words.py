"""Weights of GPTQ and AWQ: whole numbers in words of 32 bits, as safetensors of Hugging Face folders hold them.

GPTQ packs along the sum: `qweight` i32[k * bits / 32, n], the lowest bits first, `qzeros` i32[groups, n * bits / 32],
`scales` f16[groups, n]. A stored zero is one less than what is meant (`checkpoint_format` gptq), or what is meant
(gptq_v2). `g_idx` says the group of each of the k elements. Where that is not in order, columns are sorted by group,
and the weight has an `order`.

AWQ packs along columns: `qweight` i32[k, n / 8], `qzeros` i32[groups, n / 8], `scales` f16[groups, n]. The eight
numbers of a word, from the lowest on, are those of columns 0, 2, 4, 6, 1, 3, 5, 7.
"""

from __future__ import annotations

from collections.abc import Mapping

import numpy as np

from .weight import Array, QuantisedWeight, refuse_unless, unpacked, weight_of

_AWQ_PLACES = (0, 2, 4, 6, 1, 3, 5, 7)


def read_gptq(
    tensors: Mapping[str, Array], bits: int, *, exact_zeros: bool = False, where: str = "gptq"
) -> QuantisedWeight:
    """Return a weight from the tensors `qweight`, `qzeros`, `scales` and, if there is one, `g_idx` of a module. With
    `exact_zeros` zeros are those of gptq_v2."""
    _check(tensors, where)
    refuse_unless(bits in (4, 8), f"has {bits} bits, only 4 and 8 are read", where)
    qweight, scales = tensors["qweight"], np.asarray(tensors["scales"])
    numbers = unpacked(qweight, bits, 0).T
    zeros = unpacked(tensors["qzeros"], bits, 1).T.astype(np.int32) + (0 if exact_zeros else 1)
    refuse_unless(zeros.shape == scales.T.shape, f"{list(zeros.shape)} zeros for scales {list(scales.T.shape)}", where)
    order = _order_of(tensors.get("g_idx"), numbers.shape[1], scales.shape[0], where)
    if order is not None:
        numbers = numbers[:, order]
    weight = weight_of(np.ascontiguousarray(numbers), np.ascontiguousarray(scales.T), zeros, bits, where)
    return QuantisedWeight(weight.q, weight.scales, weight.zeros, weight.bits, weight.group, order)


def read_awq(tensors: Mapping[str, Array], bits: int = 4, *, where: str = "awq") -> QuantisedWeight:
    """Return a weight from the tensors `qweight`, `qzeros` and `scales` of a module."""
    _check(tensors, where)
    refuse_unless(bits == 4, f"has {bits} bits, AWQ has 4", where)
    numbers = _in_place(unpacked(tensors["qweight"], bits, 1))
    zeros = _in_place(unpacked(tensors["qzeros"], bits, 1))
    scales = np.asarray(tensors["scales"])
    refuse_unless(
        zeros.shape == scales.shape and numbers.shape[1] == scales.shape[1],
        f"{list(zeros.shape)} zeros and scales {list(scales.shape)} for {list(numbers.shape)} numbers",
        where,
    )
    return weight_of(
        np.ascontiguousarray(numbers.T), np.ascontiguousarray(scales.T), zeros.T.astype(np.int32), bits, where
    )


def _check(tensors: Mapping[str, Array], where: str) -> None:
    missing = [name for name in ("qweight", "qzeros", "scales") if name not in tensors]
    refuse_unless(not missing, f"has no {', '.join(missing)}", where)
    for name in ("qweight", "qzeros"):
        x = tensors[name]
        refuse_unless(
            x.dtype == np.int32 and x.ndim == 2, f"{name} is {x.dtype}{list(x.shape)}, not a matrix i32", where
        )
    scales = tensors["scales"]
    refuse_unless(
        scales.dtype in (np.float16, np.float32) and scales.ndim == 2,
        f"scales are {scales.dtype}{list(scales.shape)}, not a matrix of f16 or f32",
        where,
    )


def _order_of(groups: Array | None, k: int, count: int, where: str) -> Array | None:
    """Return the order that sorts columns by group, or None where they lie so."""
    if groups is None:
        return None
    groups = np.asarray(groups).astype(np.int64)
    refuse_unless(
        groups.shape == (k,)
        and k % count == 0
        and np.array_equal(np.bincount(groups, minlength=count), [k // count] * count),
        f"g_idx does not deal {k} elements into {count} equal groups",
        where,
    )
    order = np.argsort(groups, kind="stable")
    return None if np.array_equal(order, np.arange(k)) else order


def _in_place(numbers: Array) -> Array:
    """Return the columns of AWQ in their order."""
    blocks = numbers.reshape(numbers.shape[0], -1, len(_AWQ_PLACES))
    result = np.empty_like(blocks)
    result[..., list(_AWQ_PLACES)] = blocks
    return result.reshape(numbers.shape)
