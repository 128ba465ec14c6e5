"""Models against the framework they came from, value by value."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import numpy as np
import onnx.parser
import pytest
import torch

import penstock as ps
from penstock.commands.parser import main
from penstock.ir.graph import Op, rewrite
from penstock.support.errors import VerifyError
from penstock.verification.bisect.original import OnnxOriginal
from penstock.verification.bisect.search import Options
from penstock.verification.bisect.torch_original import bisect_torch

from .seeded_bugs import BUGS


class Small(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.inner, self.norm, self.outer = torch.nn.Linear(6, 8), torch.nn.LayerNorm(8), torch.nn.Linear(8, 4)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        a, b = torch.nn.functional.gelu(self.norm(self.inner(x))).chunk(2, dim=1)
        result: torch.Tensor = self.outer(torch.cat([b, a], dim=1)) * 2
        return result


def bisected(**more: object) -> int:
    training = ps.Training(loss="mse", microbatches=2)
    module = Small().eval()
    return bisect_torch(
        module, (torch.randn(3, 6),), cluster=ps.Cluster.local(2), training=training, backend="numpy", **more
    )


def test_a_module_of_torch(capsys: pytest.CaptureFixture[str]) -> None:
    assert bisected(schedule="2bw") == 0
    told = capsys.readouterr().out
    assert f"torch {torch.__version__}" in told
    assert "nothing changes what Small computes" in told


def test_a_call_that_is_imported_wrongly(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    from penstock.frontends.torch.table import ALL_RULES

    monkeypatch.setitem(ALL_RULES, "gelu", lambda node: node.emit("relu", node.value("self")))
    with pytest.raises(VerifyError, match="the import of Small computes something else than torch"):
        bisected(options=Options())
    told = capsys.readouterr().out
    assert "tensor   %gelu of call gelu (aten.gelu.default)" in told


def test_a_pass_of_a_module_of_torch(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    next(bug for bug in BUGS if bug.name == "a lost factor 1/m").patch(monkeypatch)
    with pytest.raises(VerifyError, match="pass autodiff"):
        bisected()
    assert "tensor   %loss.grad" in capsys.readouterr().out


def test_models_that_draw_are_not_compared_with_another_runtime(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Masks of two runtimes are two masks. The control is the same model at rest."""
    for on, code in ((1, 2), (0, 0)):
        text = f"""<ir_version: 8, opset_import: ["" : 13]> m (float[4, 6] x) => (float[4, 6] y) <bool on = {{{on}}}> {{ y = Dropout(x, , on) }}"""
        path = tmp_path / f"{on}.onnx"
        path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
        assert main(["verify", str(path), "--backend", "numpy"]) == code
        assert ("the model draws random numbers (dropout)" in capsys.readouterr().err) == bool(on)
        assert main(["verify", str(path), "--backend", "numpy", "--bisect"]) == 0
        told = capsys.readouterr()
        assert ("its import is not compared" in told.err) == bool(on)
        assert ("onnxruntime" in told.out) != bool(on)


GELU = """<ir_version: 8, opset_import: ["" : 17]> gelu (float[4, 6] x) => (float[4, 6] y)
<float[6, 6] w = {1, 2, 0, 1, 3, 1, 0, 1, 4, 1, 2, 0, 3, 0, 1, 2, 1, 1, 0, 2, 1, 3, 0, 1, 1, 0, 2, 1, 1, 3, 2, 1, 0, 0, 1, 2},
 float root = {ROOT}, float one = {1}, float half = {0.5}> {
    a = MatMul(x, w)  b = Div(a, root)  c = Erf(b)  d = Add(c, one)  e = Mul(a, d)  y = Mul(e, half)
}"""


def test_a_constant_that_was_rounded_is_no_fault_of_a_pass(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """`simplify` knows the formula, and takes the square root of 2 itself. The control is a pass that takes 1.41 for it."""
    from penstock.passes.pipelines import PASSES

    path = tmp_path / "gelu.onnx"
    path.write_bytes(onnx.parser.parse_model(GELU.replace("ROOT", "1.4142135")).SerializeToString())
    words = ["verify", str(path), "--bisect", "--repro", "none", "--backend", "numpy"]
    assert main(words) == 0
    assert "nothing changes what gelu computes" in capsys.readouterr().out
    row = PASSES["simplify"]

    def changed(op: Op) -> list[Op] | None:
        value = op.attrs.get("value")
        return (
            [op.with_attrs(value=1.41)]
            if op.kind == "const" and isinstance(value, float) and 1.4 < value < 1.5
            else None
        )

    monkeypatch.setitem(
        PASSES,
        "simplify",
        replace(row, run=lambda module, options: module.but(graphs={"main": rewrite(module.graphs["main"], changed)})),
    )
    assert main(words) == 5
    assert "first wrong after: simplify" in capsys.readouterr().out


def test_bisect_with_data(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """An import that is wrong for negative numbers is right for others."""
    from penstock.frontends.onnx.table import RULES

    text = """<ir_version: 8, opset_import: ["" : 17]> m (float[4, 6] x) => (float[4, 6] y) { y = Abs(x) }"""
    path = tmp_path / "m.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    source = np.random.default_rng(0)
    for name, low in (("positive", 0.0), ("any", -1.0)):
        np.savez(tmp_path / f"{name}.npz", x=source.uniform(low, 1, (4, 6)).astype(np.float32))
    with pytest.MonkeyPatch.context() as patch:
        patch.setitem(RULES, "Abs", lambda n: n.emit("relu", n.value()))
        words = ["verify", str(path), "--bisect", "--repro", "none", "--backend", "numpy", "--data"]
        assert main([*words, str(tmp_path / "positive.npz")]) == 0
        assert main([*words, str(tmp_path / "any.npz")]) == 5
    assert "first wrong: the import" in capsys.readouterr().out


def test_values_of_a_file_out_of_order_come_in_the_order_of_the_import(tmp_path: Path) -> None:
    text = (
        '<ir_version: 8, opset_import: ["" : 13]> m (float[2] x) => (float[2] y) { y = Neg(b) b = Exp(a) a = Relu(x) }'
    )
    path = tmp_path / "mixed.onnx"
    path.write_bytes(onnx.parser.parse_model(text).SerializeToString())
    x = np.array([1.0, -2.0], np.float32)
    values = dict(OnnxOriginal(path, {}).values({"x": x}))
    assert list(values) == ["a", "b", "y"]
    np.testing.assert_allclose(values["y"], -np.exp(np.maximum(x, 0)), rtol=1e-6)
