"""Decoders of ONNX with random weights, in the parts that onnxruntime-genai's builder writes.

    input_ids, attention_mask, past_key_values.N.key/value -> logits, present.N.key/value

Layers have RMS norms joined with the residual, GroupQueryAttention with packed or separate operands, and a gated
product. With `bits` weights of products are MatMulNBits.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
import onnx
from onnx import TensorProto, helper, numpy_helper

CONTEXT, WORDS, BLOCK = 96, 61, 32


@dataclass(frozen=True)
class DecoderForm:
    """The form of a decoder. `attention` are attributes of all GroupQueryAttention nodes, `windows` those of layers."""

    words: int = WORDS
    context: int = CONTEXT
    layers: int = 2
    heads: int = 4
    key_heads: int = 2
    size: int = 16
    bits: int = 0
    level: int = 0
    packed: bool = True
    rotary: bool = True
    windows: tuple[int, ...] = (-1, -1)
    attention: dict[str, Any] = field(default_factory=dict)
    capped_head: float = 0.0
    positions: bool = False
    bias: bool = False
    # What the lengths of the mask are less than the number of keys; rotations by nodes of their own; learned positions,
    # counted from the length of the past.
    late: int = 1
    turned: bool = False
    learned: bool = False

    @property
    def width(self) -> int:
        return self.heads * self.size


class _DecoderWriter:
    """The nodes and tensors of a decoder under construction."""

    def __init__(self, form: DecoderForm, seed: int) -> None:
        self.form = form
        self.nodes: list[onnx.NodeProto] = []
        self.tensors: list[onnx.TensorProto] = []
        self._draw = np.random.default_rng(seed)

    def tensor(self, name: str, array: np.ndarray) -> str:
        self.tensors.append(numpy_helper.from_array(array, name))
        return name

    def drawn(self, name: str, *shape: int, scale: float = 0.2, around: float = 0.0) -> str:
        return self.tensor(name, (around + scale * self._draw.standard_normal(shape)).astype(np.float32))

    def node(self, kind: str, ins: list[str], outs: list[str], domain: str = "", **attrs: Any) -> str:
        self.nodes.append(helper.make_node(kind, ins, outs, f"/{outs[0] or kind}", domain=domain, **attrs))
        return outs[0]

    def product(self, x: str, name: str, rows: int, columns: int) -> str:
        """Multiply by a weight, as stored in floats or in few bits."""
        form, out = self.form, f"{name}/out"
        if form.bits:
            blocks = columns // BLOCK
            q = self._draw.integers(0, 256, (rows, blocks, BLOCK * form.bits // 8)).astype(np.uint8)
            scale = self._draw.uniform(0.02, 0.06, rows * blocks) * (1.0 if form.bits == 4 else 1 / 16)
            weight = [self.tensor(f"{name}.weight_Q4", q), self.tensor(f"{name}.scales", scale.astype(np.float32))]
            sizes = {"K": columns, "N": rows, "bits": form.bits, "block_size": BLOCK, "accuracy_level": form.level}
            self.node("MatMulNBits", [x, *weight], [out], "com.microsoft", **sizes)
        else:
            self.node("MatMul", [x, self.drawn(f"{name}.weight", columns, rows)], [out])
        if not form.bias:
            return out
        return self.node("Add", [out, self.drawn(f"{name}.bias", rows)], [f"{name}/sum"])

    def lengths(self) -> list[str]:
        """Write the lengths as the builder does: the sum of the mask less one, and its width."""
        one = self.tensor("one", np.array([1], np.int64))
        self.node("ReduceSum", ["attention_mask", one], ["mask/sum"], keepdims=0)
        self.node("Sub", ["mask/sum", one if self.form.late == 1 else self.tensor("late", np.array([self.form.late]))],
                  ["mask/last"])  # fmt: skip
        self.node("Cast", ["mask/last"], ["seqlens_k"], to=TensorProto.INT32)
        self.node("Shape", ["attention_mask"], ["mask/shape"])
        self.node("Gather", ["mask/shape", self.tensor("axis", np.array(1, np.int64))], ["mask/total"])
        self.node("Cast", ["mask/total"], ["total"], to=TensorProto.INT32)
        return ["seqlens_k", "total"]

    def attention(self, x: str, layer: int, lengths: list[str], tables: list[str]) -> str:
        form, at = self.form, f"layers.{layer}.attn"
        inner = form.key_heads * form.size
        if form.packed:
            operands = [self.product(x, f"{at}.qkv", form.width + 2 * inner, form.width), "", ""]
        else:
            rows = {"q": form.width, "k": inner, "v": inner}
            operands = [self.product(x, f"{at}.{what}", n, form.width) for what, n in rows.items()]
        if form.turned:
            operands[:2] = [self.turned(operands[i], tables, f"{at}.{what}") for i, what in enumerate("qk")]
            tables = []
        pasts = [f"past_key_values.{layer}.{what}" for what in ("key", "value")]
        positions = ["position_ids"] if form.positions and not form.turned else []
        sizes = {
            "num_heads": form.heads,
            "kv_num_heads": form.key_heads,
            "do_rotary": int(form.rotary and not form.turned),
            "local_window_size": form.windows[layer],
        }
        ins = [*operands, *pasts, *lengths, *tables, *positions]
        outs = [f"{at}/out", f"present.{layer}.key", f"present.{layer}.value"]
        self.node("GroupQueryAttention", ins, outs, "com.microsoft", **{**sizes, **form.attention})
        return self.product(outs[0], f"{at}.o", form.width, form.width)

    def turned(self, x: str, tables: list[str], name: str) -> str:
        """Rotate all heads by a node, at the positions that the model is given."""
        return self.node("RotaryEmbedding", [x, "position_ids", *tables], [f"{name}/turned"], "com.microsoft")

    def learned(self) -> str:
        """Look up rows of a table from the length of the past on."""
        axis = {"past": 2, "new": 1}
        for name, of in (("past", "past_key_values.0.key"), ("new", "input_ids")):
            self.node("Shape", [of], [f"{name}/shape"])
            at = self.tensor(f"{name}/axis", np.array(axis[name], np.int64))
            self.node("Gather", [f"{name}/shape", at], [name])
        self.node("Add", ["past", "new"], ["end"])
        self.node("Range", ["past", "end", self.tensor("step", np.array(1, np.int64))], ["range"])
        table = self.drawn("places", self.form.context - 10, self.form.width)
        return self.node("Gather", [table, "range"], ["places/rows"])

    def model(self) -> onnx.ModelProto:
        form, lengths, tables = self.form, self.lengths(), list[str]()
        if form.rotary:
            angles = np.arange(form.context)[:, None] / 100.0 ** (np.arange(form.size // 2) / (form.size // 2))
            tables = [self.tensor(f"{f.__name__}_cache", f(angles).astype(np.float32)) for f in (np.cos, np.sin)]
        x = self.node("Gather", [self.drawn("embed", form.words, form.width, scale=1.0), "input_ids"], ["embedded"])
        x = self.node("Add", [x, self.learned()], ["placed"]) if form.learned else x
        y = self.node(
            "SimplifiedLayerNormalization", [x, self.norm("norm")], ["normed"], axis=-1, epsilon=1e-6, stash_type=1
        )
        for layer in range(form.layers):
            y, x = self.joined(x, self.attention(y, layer, lengths, tables), f"layers.{layer}.post")
            gate, up = (self.product(y, f"layers.{layer}.{what}", 64, form.width) for what in ("gate", "up"))
            self.node("Sigmoid", [gate], [f"{gate}.s"])
            self.node("Mul", [gate, f"{gate}.s"], [f"{gate}.a"])
            self.node("Mul", [f"{gate}.a", up], [f"{up}.m"])
            y, x = self.joined(x, self.product(f"{up}.m", f"layers.{layer}.down", form.width, 64), f"layers.{layer}.in")
        logits = self.product(y, "head", form.words, form.width)
        if form.capped_head:
            cap = self.tensor("cap", np.array(form.capped_head, np.float32))
            self.node("Div", [logits, cap], ["capped/in"])
            logits = self.node("Mul", [self.node("Tanh", ["capped/in"], ["capped"]), cap], ["capped/out"])
        self.node("Identity", [logits], ["logits"])
        return self._finished()

    def norm(self, name: str) -> str:
        return self.drawn(f"{name}.scale", self.form.width, around=1.0)

    def joined(self, x: str, y: str, name: str) -> tuple[str, str]:
        """Add the residual, and normalise the sum. Return both."""
        outs = [f"{name}/normed", "", "", f"{name}/sum"]
        self.node("SkipSimplifiedLayerNormalization", [x, y, self.norm(name)], outs, "com.microsoft", epsilon=1e-6)
        return outs[0], outs[3]

    def _finished(self) -> onnx.ModelProto:
        form = self.form
        ids = {"input_ids": "new", "attention_mask": "total"} | ({"position_ids": "new"} if form.positions else {})
        ins = [helper.make_tensor_value_info(n, TensorProto.INT64, ["batch", dim]) for n, dim in ids.items()]
        outs = [helper.make_tensor_value_info("logits", TensorProto.FLOAT, ["batch", "new", form.words])]
        for layer in range(form.layers):
            for what in ("key", "value"):
                shape: list[Any] = ["batch", form.key_heads, "past", form.size]
                past = f"past_key_values.{layer}.{what}"
                ins.append(helper.make_tensor_value_info(past, TensorProto.FLOAT, shape))
                shape[2] = "total"
                outs.append(helper.make_tensor_value_info(f"present.{layer}.{what}", TensorProto.FLOAT, shape))
        graph = helper.make_graph(self.nodes, "decoder", ins, outs, self.tensors)
        opsets = [helper.make_opsetid("", 21), helper.make_opsetid("com.microsoft", 1)]
        return helper.make_model(graph, opset_imports=opsets, ir_version=10)


def write_decoder(path: Path, form: DecoderForm, seed: int = 0) -> Path:
    """Write a decoder of random weights, and return its path."""
    onnx.save(_DecoderWriter(form, seed).model(), path)
    return path


def write_plain(path: Path) -> Path:
    """Write a model that is no decoder, and return its path."""
    shape = [1, 4]
    ins, outs = (helper.make_tensor_value_info(name, TensorProto.FLOAT, shape) for name in ("x", "y"))
    graph = helper.make_graph([helper.make_node("Relu", ["x"], ["y"])], "plain", [ins], [outs])
    onnx.save(helper.make_model(graph, opset_imports=[helper.make_opsetid("", 21)], ir_version=10), path)
    return path
