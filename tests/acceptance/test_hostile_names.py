"""A model whose names would steer a terminal is planned, compiled, run and looked at, and none of that reaches the terminal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import numpy as np
import onnx
import pytest
from acceptance.malformed_case import HOSTILE, obeyed
from onnx import TensorProto, helper, numpy_helper

from penstock.commands.parser import main


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with a model and its data; every name in it is hostile."""
    folder = tmp_path_factory.mktemp("hostile") / HOSTILE
    folder.mkdir()
    name = {
        what: f"{HOSTILE}{what}"
        for what in ("in", "w", "v", "h", "r", "out", "first", "second", "third", "graph", "rows")
    }
    random = np.random.default_rng(0)
    weights = [numpy_helper.from_array(random.standard_normal((8, 8)).astype(np.float32), name[key]) for key in "wv"]
    nodes = [
        helper.make_node("MatMul", [name["in"], name["w"]], [name["h"]], name=name["first"]),
        helper.make_node("Relu", [name["h"]], [name["r"]], name=name["second"]),
        helper.make_node("MatMul", [name["r"], name["v"]], [name["out"]], name=name["third"]),
    ]
    ends = [helper.make_tensor_value_info(name[key], TensorProto.FLOAT, [name["rows"], 8]) for key in ("in", "out")]
    graph = helper.make_graph(nodes, name["graph"], ends[:1], ends[1:], weights, doc_string=HOSTILE)
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10, producer_name=HOSTILE)
    onnx.save(model, folder / "model.onnx")
    np.savez(folder / "d.npz", **{name["in"]: np.zeros((16, 8), np.float32), "labels": np.zeros(16, np.int64)})
    return folder


def _commands(place: Path) -> Iterator[list[str]]:
    """In an order in which each finds what it needs."""
    model, bundle, data = str(place / "model.onnx"), str(place / "bundle"), str(place / "d.npz")
    training = ["--dim", f"{HOSTILE}rows=4", "--devices", "2", "--loss", "cross_entropy", "--microbatches", "2"]
    yield ["plan", model, *training]
    yield ["plan", model, *training, "--json"]
    yield ["compile", model, *training, "--backend", "numpy", "-o", bundle, "--dump-ir", str(place / "dumps")]
    yield ["verify", bundle]
    running = ["--metrics", str(place / "m.jsonl"), "--checkpoint", str(place / "c"), "--trace", str(place / "t.json")]
    yield ["run", bundle, "--data", data, "--steps", "2", "--timeout", "60", *running]
    for more in (
        [],
        ["--params"],
        ["--memory"],
        ["--schedule"],
        ["--kernels"],
        ["--op", "."],
        ["--flow", "s0.F"],
        ["--graph", "s0"],
        ["--json"],
    ):
        yield ["inspect", bundle, *more]
    yield ["inspect", bundle, "--params", "--checkpoint", str(place / "c")]
    yield ["inspect", bundle, "--why", f"{HOSTILE}first"]
    yield ["inspect", str(place / "dumps")]
    yield [
        "inspect",
        bundle,
        "--html",
        str(place / "r.html"),
        "--export",
        str(place / "g.dot"),
        "--export",
        str(place / "n.onnx"),
    ]
    yield ["diff", bundle, str(next((place / "dumps").glob("*_split.ir")))]
    yield ["simulate", bundle]
    yield ["plan", bundle, "--grade", str(place / "m.jsonl")]
    yield ["checkpoint", "ls", str(place / "c")]
    yield ["checkpoint", "verify", str(place / "c")]
    yield ["checkpoint", "export", str(place / "c"), "--to", str(place / "w.safetensors")]
    yield ["export", bundle, "--checkpoint", str(place / "c"), "--onnx", str(place / "after.onnx")]


def test_nothing_that_is_accepted_steers_a_terminal(place: Path, capfd: pytest.CaptureFixture[str]) -> None:
    wrong, printed = [], ""
    for words in _commands(place):
        code = main(words)
        heard = capfd.readouterr()
        printed += heard.out + heard.err
        if code or obeyed(heard.out) or obeyed(heard.err):
            said = (heard.out + heard.err)[-600:] if code else ""
            wrong.append(
                f"{words[0]} {' '.join(words[2:])!r}: {code}, {obeyed(heard.out)!r}, {obeyed(heard.err)!r} {said!r}"
            )
    assert not wrong, "\n".join(wrong)
    # The control: the names are there, in the form in which they do no harm.
    assert "\\x1b[31mb" in printed
