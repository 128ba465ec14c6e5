"""Operations of decoders that keep keys and values: rows stored into caches, attention over them, and drawn tokens.

They are operations of our own, which frontends/torch/decoding.py declares to torch. In: rows of a turn, and where they
belong. Out: `put`, `attend` and `pick`. Each layer gets two variables of role `cache`, `layers.N.keys` and
`layers.N.values`.
"""

from __future__ import annotations

from penstock.frontends.formulas.layout import reshape
from penstock.frontends.torch.node import Result, Rule, TorchNode
from penstock.ir.graph import Value
from penstock.ir.ops.caches import BLOCK


def _rows(n: TorchNode, x: Value) -> Value:
    """Turn [1, heads, rows, size] into [rows, heads, size]."""
    _, heads, rows, size = x.type.dims
    return reshape(n, n.emit("transpose", x, perm=(0, 2, 1, 3)), (rows, heads, size))


def _attend(n: TorchNode) -> Result:
    q, k, v = (_rows(n, n.value(name)) for name in ("query", "key", "value"))
    places, starts, lengths, table = (n.value(name) for name in ("places", "starts", "lengths", "table"))
    layer, blocks = int(n.arg("layer")), int(n.arg("blocks"))
    keys, values = (
        n.put(rows, places, n.cache(f"layers.{layer}.{what}", (blocks, BLOCK, *rows.type.dims[1:])))
        for what, rows in (("keys", k), ("values", v))
    )
    y = n.emit(
        "attend",
        q,
        keys,
        values,
        starts,
        lengths,
        table,
        scale=float(n.arg("scale")),
        window=int(n.arg("window", 0)),
        cap=float(n.arg("cap", 0.0)),
    )
    return reshape(n, y, (1, *y.type.dims))


def _pick(n: TorchNode) -> Result:
    return n.emit("pick", *(n.value(name) for name in ("logits", "draws", "temperature", "top_k", "top_p")))


RULES: dict[str, Rule] = {"penstock.attend": _attend, "penstock.pick": _pick}
