"""Readers of stored weights of few bits: their elements are those that the descriptions of the formats say, bit by bit."""

from __future__ import annotations

import struct
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import onnx
import onnxruntime
import pytest

from penstock.frontends.quantised.gguf import GgufFile
from penstock.frontends.quantised.nbits import read_nbits
from penstock.frontends.quantised.weight import QuantisedWeight
from penstock.frontends.quantised.words import read_awq, read_gptq
from penstock.ir.interpreter.ops.quantised import dequantised
from penstock.support.errors import PenstockError, UnsupportedModel, VerifyError

Array = np.ndarray[Any, Any]
RNG = np.random.default_rng(11)


def elements(weight: QuantisedWeight) -> Array:
    """The matrix [n, k] that `matmul_q` multiplies by, with columns back in the order of the source."""
    parts = [weight.q, weight.scales, *([] if weight.zeros is None else [weight.zeros])]
    matrix = dequantised(parts, {"bits": weight.bits, "group": weight.group}, np.dtype(np.float32))
    if weight.order is None:
        return matrix
    result = np.empty_like(matrix)
    result[:, weight.order] = matrix
    return result


def words(*shape: int) -> Array:
    return RNG.integers(-(2**31), 2**31, shape).astype(np.int32)


def scales(*shape: int) -> Array:
    return RNG.uniform(0.001, 0.1, shape).astype(np.float16)


def field(word: int, place: int, bits: int) -> int:
    return (int(word) % 2**32 >> place * bits) % 2**bits


def gptq(tensors: dict[str, Array], bits: int, one_less: int) -> Array:
    """One element after the other, as the format says it."""
    k, n, per = tensors["qweight"].shape[0] * 32 // bits, tensors["qweight"].shape[1], 32 // bits
    group = k // tensors["scales"].shape[0]
    result = np.zeros((n, k), np.float32)
    for i in range(k):
        g = int(tensors["g_idx"][i]) if "g_idx" in tensors else i // group
        for j in range(n):
            q = field(tensors["qweight"][i // per, j], i % per, bits)
            zero = field(tensors["qzeros"][g, j // per], j % per, bits) + one_less
            result[j, i] = np.float32(q - zero) * np.float32(tensors["scales"][g, j])
    return result


@pytest.mark.parametrize("exact_zeros", [False, True])
@pytest.mark.parametrize("ordered", [True, False])
def test_gptq(exact_zeros: bool, ordered: bool) -> None:
    k, n, groups = 128, 16, 4
    tensors = {"qweight": words(k // 8, n), "qzeros": words(groups, n // 8), "scales": scales(groups, n)}
    if not ordered:
        tensors["g_idx"] = RNG.permutation(np.repeat(np.arange(groups), k // groups)).astype(np.int32)
    weight = read_gptq(tensors, 4, exact_zeros=exact_zeros)
    assert (weight.order is None) == ordered
    assert np.array_equal(elements(weight), gptq(tensors, 4, 0 if exact_zeros else 1))
    # The control: zeros of the other version.
    assert not np.array_equal(elements(weight), gptq(tensors, 4, 1 if exact_zeros else 0))


def test_gptq_of_8_bits_with_its_usual_zero() -> None:
    tensors = {"qweight": words(16, 8), "qzeros": np.full((2, 2), 0x7F7F7F7F, np.int32), "scales": scales(2, 8)}
    weight = read_gptq(tensors, 8)
    assert weight.zeros is None
    assert np.array_equal(elements(weight), gptq(tensors, 8, 1))
    with pytest.raises(UnsupportedModel, match="zeros of 8 bits below 128"):
        read_gptq({**tensors, "qzeros": np.zeros((2, 2), np.int32)}, 8)


def test_awq() -> None:
    k, n, groups = 64, 24, 2
    tensors = {"qweight": words(k, n // 8), "qzeros": words(groups, n // 8), "scales": scales(groups, n)}
    places = {column: place for place, column in enumerate((0, 2, 4, 6, 1, 3, 5, 7))}
    expected = np.zeros((n, k), np.float32)
    for i in range(k):
        for j in range(n):
            g, place = i // (k // groups), places[j % 8]
            q, zero = (field(tensors[name][row, j // 8], place, 4) for name, row in (("qweight", i), ("qzeros", g)))
            expected[j, i] = np.float32(q - zero) * np.float32(tensors["scales"][g, j])
    assert np.array_equal(elements(read_awq(tensors)), expected)
    in_order = elements(read_awq({**tensors, "qweight": tensors["qweight"][:, ::-1].copy()}))
    assert not np.array_equal(in_order, expected)


@pytest.mark.parametrize("zeros", ["none", "packed", "floats"])
@pytest.mark.parametrize("block", [32, 128, 256])
def test_nbits_beside_onnxruntime(zeros: str, block: int) -> None:
    """The rows of a unit matrix times the weight, in onnxruntime, are its columns."""
    k, n = 256, 6
    blocks = k // block
    b = RNG.integers(0, 256, (n, blocks, block // 2)).astype(np.uint8)
    s = RNG.uniform(0.01, 0.1, (n, blocks)).astype(np.float32)
    z = {
        "none": None,
        "packed": RNG.integers(0, 256, (n, -(-blocks // 2))).astype(np.uint8),
        "floats": RNG.integers(0, 16, (n, blocks)).astype(np.float32),
    }[zeros]
    ours = elements(read_nbits(b, s, z, k=k, bits=4, block=block))
    given = {"b": b.reshape(n, blocks, -1), "s": s.reshape(-1)} | ({} if z is None else {"z": z.reshape(-1)})
    node = onnx.helper.make_node(
        "MatMulNBits", ["x", *given], ["y"], domain="com.microsoft", K=k, N=n, bits=4, block_size=block
    )
    graph = onnx.helper.make_graph(
        [node],
        "g",
        [onnx.helper.make_tensor_value_info("x", 1, [k, k])],
        [onnx.helper.make_tensor_value_info("y", 1, [k, n])],
        [onnx.numpy_helper.from_array(array, name) for name, array in given.items()],
    )
    imports = [onnx.helper.make_opsetid("", 17), onnx.helper.make_opsetid("com.microsoft", 1)]
    model = onnx.helper.make_model(graph, opset_imports=imports, ir_version=8)
    session = onnxruntime.InferenceSession(model.SerializeToString(), providers=["CPUExecutionProvider"])
    (theirs,) = session.run(None, {"x": np.eye(k, dtype=np.float32)})
    np.testing.assert_allclose(ours.T, theirs, rtol=1e-6, atol=1e-7)
    halves = elements(read_nbits(b >> 4 | b << 4, s, z, k=k, bits=4, block=block))
    assert not np.allclose(halves.T, theirs, rtol=1e-2)


def test_nbits_that_the_form_cannot_hold() -> None:
    b, s = np.zeros((2, 4, 8), np.uint8), np.ones((2, 4), np.float32)
    with pytest.raises(UnsupportedModel, match="groups of 16"):
        read_nbits(b, s, None, k=64, bits=4, block=16)
    with pytest.raises(UnsupportedModel, match="no whole numbers"):
        read_nbits(np.zeros((2, 2, 16), np.uint8), s[:, :2], s[:, :2] * 0.5, k=64, bits=4, block=32)
    with pytest.raises(UnsupportedModel, match="expected u8"):
        read_nbits(b, s, None, k=64, bits=4, block=32)


# ---------------------------------------------------------------------------------------- GGUF


def text(value: str) -> bytes:
    return struct.pack("<Q", len(value.encode())) + value.encode()


def gguf(tensors: dict[str, tuple[int, tuple[int, ...], bytes]], version: int = 3, alignment: int = 64) -> bytes:
    """A file, written from the description of the format: (type, shape, bytes) by name."""
    pairs = text("general.alignment") + struct.pack("<II", 4, alignment)
    pairs += text("general.name") + struct.pack("<I", 8) + text("ä model")
    pairs += text("words") + struct.pack("<IIQ", 9, 8, 2) + text("a") + text("b")
    head, body = b"GGUF" + struct.pack("<IQQ", version, len(tensors), 3) + pairs, b""
    for name, (kind, shape, data) in tensors.items():
        head += text(name) + struct.pack("<I", len(shape)) + struct.pack(f"<{len(shape)}Q", *shape[::-1])
        head += struct.pack("<IQ", kind, len(body))
        body += data + bytes(-len(data) % alignment)
    return head + bytes(-len(head) % alignment) + body


def blocks(rows: int, columns: int, nbytes: int) -> tuple[bytes, Array, Array]:
    """Blocks of 32 numbers: a file's bytes, the scales and the bytes of numbers."""
    of_scales = scales(rows, columns // 32)
    numbers = RNG.integers(0, 256, (rows, columns // 32, nbytes)).astype(np.uint8)
    parts = [of_scales[i, j].tobytes() + numbers[i, j].tobytes() for i in range(rows) for j in range(columns // 32)]
    return b"".join(parts), of_scales, numbers


def test_gguf(tmp_path: Path) -> None:
    q8, s8, n8 = blocks(5, 96, 32)
    q4, s4, n4 = blocks(3, 64, 16)
    floats = RNG.standard_normal((2, 3)).astype(np.float32)
    path = tmp_path / "m.gguf"
    path.write_bytes(gguf({"a": (8, (5, 96), q8), "b": (2, (3, 64), q4), "c": (0, (2, 3), floats.tobytes())}))
    with GgufFile(path) as file:
        assert file.values["general.name"] == "ä model"
        assert file.values["words"] == ["a", "b"]
        a, b = file.weight("a"), file.weight("b")
        assert np.array_equal(file.array("c"), floats)
        with pytest.raises(UnsupportedModel, match="not floats"):
            file.array("a")
        with pytest.raises(UnsupportedModel, match="not q8_0 or q4_0"):
            file.weight("c")
        with pytest.raises(VerifyError, match="no tensor 'd'"):
            file.array("d")
    expected = (n8.view(np.int8).astype(np.float32) * s8.astype(np.float32)[..., None]).reshape(5, 96)
    assert np.array_equal(elements(a), expected)
    expected = np.zeros((3, 2, 32), np.float32)
    for i, g, k in np.ndindex(3, 2, 32):
        byte = int(n4[i, g, k % 16])
        number = byte % 16 if k < 16 else byte // 16
        expected[i, g, k] = np.float32(number - 8) * np.float32(s4[i, g])
    assert np.array_equal(elements(b), expected.reshape(3, 64))


def broken(change: Callable[[bytes], bytes]) -> bytes:
    return change(gguf({"a": (8, (2, 32), bytes(68)), "b": (0, (4,), bytes(16))}))


@pytest.mark.parametrize(
    ("data", "message"),
    [
        (b"", "does not begin"),
        (broken(lambda d: b"GGML" + d[4:]), "does not begin"),
        (broken(lambda d: d[:4] + struct.pack("<I", 1) + d[8:]), "version 1"),
        (broken(lambda d: d[:8] + struct.pack("<Q", 1 << 60) + d[16:]), "tensors"),
        (broken(lambda d: d[:40]), "it ends at byte 40"),
        (broken(lambda d: d[:-80]), "ends behind the file"),
        (broken(lambda d: d.replace(text("b") + struct.pack("<I", 1), text("a") + struct.pack("<I", 1))), "twice"),
        (broken(lambda d: d.replace(struct.pack("<II", 4, 64), struct.pack("<II", 4, 48))), "alignment is 48"),
        (broken(lambda d: d.replace(struct.pack("<IQ", 0, 128), struct.pack("<IQ", 0, 120))), "not on a boundary"),
        (
            broken(lambda d: d.replace(struct.pack("<IQQ", 2, 32, 2), struct.pack("<IQQ", 2, 33, 2))),
            "no multiple of 32",
        ),
        (broken(lambda d: d.replace(text("general.name")[:9], struct.pack("<Q", 1 << 62) + b"g")), "bytes of a string"),
    ],
)
def test_files_that_are_no_gguf_are_one_error(data: bytes, message: str, tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(data)
    with pytest.raises(PenstockError, match=message):
        GgufFile(path)


def test_control_a_whole_file_is_read(tmp_path: Path) -> None:
    path = tmp_path / "m.gguf"
    path.write_bytes(broken(lambda d: d))
    with GgufFile(path) as file:
        assert set(file.tensors) == {"a", "b"}
