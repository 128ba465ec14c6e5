"""Weights of a folder that are stored in 8 or 4 bits: which ones, and products that read them as they are.

`quantization_config` says how they are stored: GPTQ, also gptq_v2, or AWQ in its order of columns `gemm`. The module is
exported as if it had all elements. Afterwards the products by such a weight become `matmul_q`, with the whole numbers,
scales and zeros of the folder, which nothing rounds again. Other methods are refused by name.

Limit: numbers are unpacked when the folder is read, and held in memory until the bundle is written.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from penstock.frontends.imported import Imported
from penstock.frontends.quantised.weight import QuantisedWeight
from penstock.frontends.quantised.words import read_awq, read_gptq
from penstock.ir.graph import BUFFER, Op, Value, Var
from penstock.ir.ops import make
from penstock.ir.types import TensorType, dtype_of
from penstock.support.errors import UnsupportedModel, UsageError

from .folder import ModelFolder

_PARTS = ("qweight", "qzeros", "scales", "g_idx")


def check_method(folder: ModelFolder) -> None:
    """Raise UnsupportedModel unless the weights are stored in a way that is read."""
    config, where = folder.config.get("quantization_config"), str(folder.path)
    if config is None:
        return
    if not isinstance(config, Mapping):
        raise UsageError(f"quantization_config is {config!r}, expected an object", where=where)
    method = config.get("quant_method")
    if method not in ("gptq", "awq"):
        raise UnsupportedModel(
            f"weights quantised by {method!r} are not read",
            where=where,
            hint="gptq and awq are; the model it was made of may do with --weights int8 or int4",
        )
    form, known = (
        (str(config.get("version", "gemm")).lower(), ("gemm",))
        if method == "awq"
        else (str(config.get("checkpoint_format", "gptq")), ("gptq", "gptq_v2"))
    )
    if form not in known:
        raise UnsupportedModel(f"the form {form!r} of {method} is not read", where=where, hint=f"{known} are")


def read_codes(folder: ModelFolder, names: list[str]) -> QuantisedWeight | None:
    """Return a weight by the names that files may have for it, None where it is not stored in few bits."""
    config = folder.config.get("quantization_config")
    if config is None:
        return None
    for name in names:
        base = name.removesuffix("weight")
        if f"{base}qweight" not in folder.tensors:
            continue
        parts: dict[str, Any] = {
            part: folder.tensors[base + part].mapped() for part in _PARTS if base + part in folder.tensors
        }
        bits, where = config.get("bits", 4), f"{folder.path}: {base.removesuffix('.')}"
        if config["quant_method"] == "awq":
            return read_awq(parts, bits, where=where)
        return read_gptq(parts, bits, exact_zeros=config.get("checkpoint_format") == "gptq_v2", where=where)
    return None


def with_codes(imported: Imported, codes: Mapping[str, QuantisedWeight], where: str) -> Imported:
    """Replace products by weights that are stored in few bits. Raise UnsupportedModel where one is read otherwise."""
    module, weights = imported.module, dict(imported.weights)
    known = {name: weight for name, weight in codes.items() if name in module.vars}
    if not known:
        return imported
    rewriting = _Rewriting(known)
    graph = module.graphs["main"]
    ops = [new for op in graph.ops for new in rewriting.take(op)]
    if rewriting.others:
        listed = ", ".join(sorted(rewriting.others))
        raise UnsupportedModel(f"quantised weights are read by other operations than products: {listed}", where=where)
    variables = {name: var for name, var in module.vars.items() if name not in known} | rewriting.vars
    for name in known:
        weights.pop(name, None)
    weights |= rewriting.arrays
    main = replace(graph, ops=tuple(ops))
    return replace(imported, module=module.but(vars=variables, graphs={**module.graphs, "main": main}), weights=weights)


class _Rewriting:
    """The operations of a graph one after the other, with those that read coded weights written anew."""

    def __init__(self, codes: Mapping[str, QuantisedWeight]) -> None:
        self.codes = codes
        self.vars: dict[str, Var] = {}
        self.arrays: dict[str, np.ndarray] = {}
        self.others: set[str] = set()
        # The values that stand for a weight, and those for its transpose.
        self._stand: dict[Value, tuple[str, bool]] = {}
        self._reads: dict[str, Value] = {}

    def take(self, op: Op) -> list[Op]:
        """Return the operations in place of one."""
        if op.kind == "read" and op.var in self.codes:
            self._stand[op.outs[0]] = op.var, False
            return []
        stand = [self._stand.get(value) for value in op.ins]
        if not any(stand):
            return [op]
        if op.kind == "transpose" and stand[0] is not None and op.attrs["perm"] == (1, 0):
            self._stand[op.outs[0]] = stand[0][0], not stand[0][1]
            return []
        second = stand[1] if op.kind == "matmul" else None
        straight = second is not None and bool(op.attrs.get("tb", False)) != second[1]
        if second is None or stand[0] is not None or not straight or op.attrs.get("ta", False):
            self.others.add(f"{op.kind} {op.loc}".strip())
            return [op]
        return self._product(op, second[0])

    def _product(self, op: Op, name: str) -> list[Op]:
        weight, x, ops = self.codes[name], op.ins[0], list[Op]()
        if weight.order is not None:
            order = self._read(f"{name}.order", weight.order.astype(np.int32), ops)
            ops.append(make("gather", (x, order), (f"{op.outs[0].name}.ordered",), op.loc, axis=x.type.rank - 1))
            x = ops[-1].outs[0]
        parts = {"q": weight.q, "scales": weight.scales, "zeros": weight.zeros}
        operands = [self._read(f"{name}.{part}", a, ops) for part, a in parts.items() if a is not None]
        out = (op.outs[0].name,)
        ops.append(make("matmul_q", (x, *operands), out, op.loc, bits=weight.bits, group=weight.group))
        return ops

    def _read(self, name: str, array: np.ndarray, ops: list[Op]) -> Value:
        """Return the value that reads a variable, which is added with its first use."""
        if name not in self._reads:
            value = Value(name, TensorType(dtype_of(array.dtype), array.shape))
            self.vars[name], self.arrays[name] = Var(name, value.type, BUFFER), array
            ops.append(Op("read", (), (value,), {"var": name}, name))
            self._reads[name] = value
        return self._reads[name]
