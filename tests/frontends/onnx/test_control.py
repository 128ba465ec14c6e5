"""Branches, loops, scans, sequences and optionals against onnxruntime; what they must refuse; and that the comparison can fail."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import onnx
import pytest
import torch

from penstock.frontends.onnx import CannotImport, control, import_onnx
from penstock.support.errors import UnsupportedModel

from .cases import compare, draw, judge, run

F32 = np.dtype(np.float32)

# opset | inputs => outputs | nodes, as in rules/test_rules.py.
CASES = """
13 | float[2,3] x => float[2,3] y | c = Constant<value = bool {1}>() y = If(c)<then_branch = a () => (float[2,3] t) { t = Relu(x) }, else_branch = b () => (float[2,3] e) { e = Neg(x) }>
11 | float[2,3] x => float[2,3] y, float[3] z | c = Constant<value = bool[1] {0}>() y, z = If(c)<then_branch = a () => (float[2,3] t, float[3] u) { t = Relu(x) u = ReduceSum<axes = [0], keepdims = 0>(x) }, else_branch = b () => (float[2,3] e, float[3] f) { h = Neg(x) e = Exp(h) f = ReduceMax<axes = [0], keepdims = 0>(h) }>
16 | float[2,3] x => float[2,3] y | s = Shape(x) k = Constant<value = int64[2] {2, 3}>() q = Equal(s, k) i = Cast<to = 6>(q) m = ReduceMin<keepdims = 0>(i) c = Cast<to = 9>(m) y = If(c)<then_branch = a () => (float[2,3] t) { t = Relu(x) }, else_branch = b () => (float[2,3] e) { e = Neg(x) }>
16 | float[2,3] x, bool c => float[2,3] y | y = If(c)<then_branch = a () => (float[2,3] t) { t = Relu(x) }, else_branch = b () => (float[2,3] e) { e = Neg(x) }>
16 | float[2,3] x, bool c, bool d => float[2,3] y | y = If(c)<then_branch = a () => (float[2,3] t) { t = Relu(x) }, else_branch = b () => (float[2,3] e) { h = Neg(x) e = If(d)<then_branch = p () => (float[2,3] u) { u = Add(h, x) }, else_branch = q () => (float[2,3] v) { v = Mul(h, x) }> }>
13 | float[2,3] x, float[3] w => float[2,3] y | n = Constant<value = int64 {3}>() y = Loop(n, , x)<body = b (int64 i, bool c, float[2,3] s) => (bool d, float[2,3] t) { d = Identity(c) f = Cast<to = 1>(i) g = Mul(s, w) t = Add(g, f) }>
13 | float[2,3] x => float[2,3] y, float[k,2] z | n = Constant<value = int64 {3}>() y, z = Loop(n, , x)<body = b (int64 i, bool c, float[2,3] s) => (bool d, float[2,3] t, float[2] u) { d = Identity(c) t = Sin(s) m = Constant<value = int64[1] {1}>() u = ReduceSum<keepdims = 0>(t, m) }>
13 | float[2] x => float[2] y, int64[k] z | n = Constant<value = int64 {9}>() c0 = Constant<value = bool {1}>() y, z = Loop(n, c0, x)<body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t, int64 u) { k = Constant<value = int64 {3}>() d = Less(i, k) t = Add(s, s) u = Identity(i) }>
13 | float[2] x => float[2] y | c0 = Constant<value = bool {1}>() k0 = Constant<value = int64 {0}>() y, k = Loop( , c0, x, k0)<body = b (int64 i, bool c, float[2] s, int64 a) => (bool d, float[2] t, int64 e) { one = Constant<value = int64 {1}>() four = Constant<value = int64 {4}>() e = Add(a, one) d = Less(e, four) t = Add(s, s) }>
13 | float[2] x => float[2] y, float[0,2] z | n = Constant<value = int64 {0}>() y, z = Loop(n, , x)<body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t, float[2] u) { d = Identity(c) t = Add(s, s) u = Identity(s) }>
13 | float[2] x => float[2] y | n = Constant<value = int64 {6}>() c0 = Constant<value = bool {1}>() y = Loop(n, c0, x)<body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t) { a = Abs(s) m = ReduceMax<keepdims = 0>(a) k = Constant<value = float {2.0}>() d = Less(m, k) t = Add(s, s) }>
13 | float[2] x, bool c0 => float[2] y | n = Constant<value = int64 {2}>() y = Loop(n, c0, x)<body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t) { d = Identity(c) t = Add(s, s) }>
13 | float[2] x => float[2] y | n = Constant<value = int64 {2}>() y = Loop(n, , x)<body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t) { d = Identity(c) t = Loop(i, , s)<body = q (int64 j, bool e, float[2] u) => (bool f, float[2] v) { f = Identity(e) g = Add(i, j) h = Cast<to = 1>(g) k = Add(u, x) v = Add(k, h) }> }>
9 | float[2,5] x, float[2] z => float[2] y, float[5,2] u | y, u = Scan(z, x)<num_scan_inputs = 1, scan_input_axes = [1], body = b (float[2] s, float[2] e) => (float[2] t, float[2] o) { t = Add(s, e) o = Mul(t, e) }>
11 | float[5,2] x, float[2] z => float[2] y, float[2,5] u | y, u = Scan(z, x)<num_scan_inputs = 1, scan_input_directions = [1], scan_output_axes = [-1], scan_output_directions = [1], body = b (float[2] s, float[2] e) => (float[2] t, float[2] o) { t = Add(s, e) o = Mul(t, e) }>
16 | float[4,2] x, float[3,4] w => float[4,2] u | u = Scan(x, w)<num_scan_inputs = 2, scan_input_axes = [0, 1], scan_input_directions = [0, 1], body = b (float[2] e, float[3] f) => (float[2] o) { g = ReduceSum<keepdims = 1>(f) o = Mul(e, g) }>
13 | float[2,3] x, float[2,3] z => float[2,6] y, float[2,2,3] u, int64 k | s = SequenceConstruct(x, z) y = ConcatFromSequence<axis = 1>(s) u = ConcatFromSequence<axis = 1, new_axis = 1>(s) k = SequenceLength(s)
13 | float[2,3] x, float[2,3] z => float[2,3] y | e = SequenceEmpty() a = SequenceInsert(e, x) k = Constant<value = int64 {0}>() b = SequenceInsert(a, z, k) m = Constant<value = int64 {-1}>() c = SequenceInsert(b, z, m) d = SequenceErase(c, k) y = SequenceAt(d, m)
13 | float[5,3] x => float[2,3] y, int64 n | k = Constant<value = int64 {2}>() s = SplitToSequence(x, k) z = Constant<value = int64 {1}>() y = SequenceAt(s, z) n = SequenceLength(s)
13 | float[2,3] x => float[2] y | s = SplitToSequence<axis = 1, keepdims = 0>(x) z = Constant<value = int64 {-1}>() y = SequenceAt(s, z)
13 | float[2,3] x => float[2,1] y | k = Constant<value = int64[2] {2, 1}>() s = SplitToSequence<axis = 1>(x, k) z = Constant<value = int64 {1}>() y = SequenceAt(s, z)
17 | float[2,3] x, float[3] w => float[4,3] y | k = Constant<value = int64 {1}>() s = SplitToSequence(x, k) m = SequenceMap(s, w)<body = b (float[1,3] e, float[3] v) => (float[2,3] o) { a = Mul(e, v) o = Concat<axis = 0>(a, e) }> y = ConcatFromSequence<axis = 0>(m)
13 | float[2,3] x => float[3,2,3] y | e = SequenceEmpty() n = Constant<value = int64 {3}>() s = Loop(n, , e)<body = b (int64 i, bool c, seq(float) q) => (bool d, seq(float) r) { d = Identity(c) f = Cast<to = 1>(i) a = Add(x, f) r = SequenceInsert(q, a) }> y = ConcatFromSequence<axis = 0, new_axis = 1>(s)
18 | float[2,3] x => float[2,3] y, bool b | o = Optional(x) b = OptionalHasElement(o) y = OptionalGetElement(o)
18 | float[2,3] x => bool b | b = OptionalHasElement()
"""
ROWS = [tuple(part.strip() for part in line.split("|")) for line in CASES.strip().splitlines()]


@pytest.mark.parametrize(
    ("opset", "signature", "body"), ROWS, ids=[f"{opset}-{i}" for i, (opset, _, _) in enumerate(ROWS)]
)
def test_written_out_it_agrees_with_onnxruntime(tmp_path: Path, opset: str, signature: str, body: str) -> None:
    ins, outs = signature.split("=>")
    path = _written(tmp_path, f"({ins}) => ({outs}) {{ {body} }}", int(opset))
    model = onnx.load(path)
    kinds = {v.name: v.type.tensor_type for v in model.graph.input}
    feeds = {
        name: draw(
            name,
            np.dtype(onnx.helper.tensor_dtype_to_np_dtype(kind.elem_type)),
            tuple(d.dim_value for d in kind.shape.dim),
        )
        for name, kind in kinds.items()
    }
    conditions = [name for name, array in feeds.items() if array.dtype == np.bool_]
    for value in range(2 ** len(conditions)):  # every way that conditions may turn out
        feeds |= {name: np.array(bool(value >> i & 1)) for i, name in enumerate(conditions)}
        compare(path, feeds)


def _written(folder: Path, text: str, opset: int = 16, arrays=None) -> Path:
    """As write_model, but without shape inference, which does not take all of these."""
    path = folder / "mini.onnx"
    ir = 8 if opset < 20 else 10
    model = onnx.parser.parse_model(f'<ir_version: {ir}, opset_import: ["" : {opset}]> mini {text}')
    for name, array in (arrays or {}).items():
        model.graph.initializer.append(onnx.numpy_helper.from_array(array, name))
    onnx.save(model, path)
    return path


def test_a_loop_that_masks_wrongly_is_caught(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    signature, body = next((s, b) for _, s, b in ROWS if "bool c0" in s)
    ins, outs = signature.split("=>")
    path = _written(tmp_path, f"({ins}) => ({outs}) {{ {body} }}")
    feeds = {"x": draw("x", F32, (2,)), "c0": np.array(False)}
    compare(path, feeds)
    monkeypatch.setattr(control, "_choose", lambda n, condition, yes, no: yes)
    with pytest.raises(AssertionError, match="Not equal to tolerance"):
        compare(path, feeds)


def test_a_known_condition_imports_its_branch_alone(tmp_path: Path) -> None:
    text = "(float[2] x, bool c) => (float[2] y) { y = If(c)<then_branch = a () => (float[2] t) { t = Relu(x) }, else_branch = b () => (float[2] e) { e = Neg(x) }> }"
    path = _written(tmp_path, text)
    assert [op.kind for op in import_onnx(path, known={"c": True}).module.graphs["main"].ops] == ["relu"]
    assert [op.kind for op in import_onnx(path, known={"c": False}).module.graphs["main"].ops] == ["neg"]
    both = import_onnx(path).module.graphs["main"].ops
    assert [(op.kind, op.loc) for op in both] == [
        ("relu", "If_0/then/Relu_0"),
        ("neg", "If_0/else/Neg_0"),
        ("where", "If_0"),
    ]


def test_weights_of_a_body_are_one_variable_over_all_iterations(tmp_path: Path) -> None:
    text = """(float[2,3] x) => (float[2,3] y) { n = Constant<value = int64 {2}>() y = Loop(n, , x)<body = b (int64 i, bool c, float[2,3] s) => (bool d, float[2,3] t)
      <float[3] w = {1, 2, 3}> { d = Identity(c) t = Loop(n, , s)<body = q (int64 j, bool e, float[2,3] u) => (bool f, float[2,3] v) <float[3] r = {4, 5, 6}, float[3] outer = {4, 5, 6}> {
        f = Identity(e) a = Mul(u, w) v = Add(a, r) }> }> }"""
    imported = compare(_written(tmp_path, text), {"x": draw("x", F32, (2, 3))})
    assert {var.name: var.role for var in imported.module.vars.values()} == {"w": "param", "r": "param"}
    assert [op.kind for op in imported.module.graphs["main"].ops].count("read") == 2
    frozen = import_onnx(tmp_path / "mini.onnx", frozen="^r$")
    assert set(frozen.module.vars) == {"w"}


LOOP = "{0} {{ y = Loop(n, {1}, x)<body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t) {{ {2} }}> }}"


@pytest.mark.parametrize(
    ("text", "said", "needs"),
    [
        (
            LOOP.format("(float[2] x, int64 n) => (float[2] y)", "", "d = Identity(c) t = Add(s, s)"),
            "the number of iterations is computed at run time from n",
            ("n",),
        ),
        (
            LOOP.format("(float[2] x) => (float[2] y) <int64 n = {1000000}>", "", "d = Identity(c) t = Add(s, s)"),
            "more than 10000 nodes",
            (),
        ),
        (
            LOOP.format(
                "(float[2] x) => (float[2] y) <int64 n = {3}>",
                "",
                "d = Identity(c) t = MaxRoiPool<pooled_shape = [1, 1]>(s, s)",
            ),
            r"Loop_0/0/MaxRoiPool_1 \(ai.onnx MaxRoiPool\): no rule",
            (),
        ),
        (
            LOOP.format(
                "(float[2] x, bool k) => (float[2] y) <int64 n = {3}>",
                "k",
                "d = Identity(c) t = Concat<axis = 0>(s, s)",
            ),
            r"a condition at run time chooses between f32\[4\] and f32\[2\]",
            (),
        ),
        (
            "(float[2] x, bool k) => (float[2] y, float[m,2] z) { n = Constant<value = int64 {2}>() y, z = Loop(n, k, x)<body = b (int64 i, bool c, float[2] s) => (bool d, float[2] t, float[2] u) { d = Identity(c) t = Add(s, s) u = Identity(s) }> }",
            "the condition of a loop that collects results is computed at run time from k",
            ("k",),
        ),
        (
            "(float[2] x, bool k) => (float[a] y) { y = If(k)<then_branch = p () => (float[2] t) { t = Relu(x) }, else_branch = q () => (float[4] e) { e = Concat<axis = 0>(x, x) }> }",
            r"chooses between f32\[2\] and f32\[4\]; the condition is computed at run time from k",
            ("k",),
        ),
        (
            "(float[2] x, int64 k) => (float[2] y) { s = SequenceConstruct(x, x) y = SequenceAt(s, k) }",
            "the position in the sequence is computed at run time from k",
            ("k",),
        ),
        (
            "(float[2] x) => (seq(float[2]) s) { s = SequenceConstruct(x, x) }",
            "output s: sequences and optionals cannot be results",
            (),
        ),
        (
            "(float[2] x) => (float[2] y) { s = SequenceConstruct(x, x) y = Relu(s) }",
            "not a valid ONNX model|operand 0 is a sequence",
            (),
        ),
    ],
)
def test_what_cannot_be_written_out_says_why(tmp_path: Path, text: str, said: str, needs: tuple[str, ...]) -> None:
    path = _written(tmp_path, text)
    with pytest.raises(UnsupportedModel, match=said) as caught:
        import_onnx(path)
    assert isinstance(caught.value, CannotImport)
    assert caught.value.needs == needs
    assert len(caught.value.what.splitlines()) == 2  # an iteration that fails is reported once


BRANCH = """(float[2] x, bool c, bool k) => (float[2] y) { h = And(c, k)
  y = If(h)<then_branch = p () => (float[2] t) { t = Relu(x) }, else_branch = q () => (float[2] e) { e = acme.Swirl(x) }> }"""
INNER = """(float[2] x, bool c, bool k) => (float[2] y) {
  y = If(c)<then_branch = p () => (float[2] t) { t = If(k)<then_branch = r () => (float[2] u) { u = acme.Swirl(x) },
  else_branch = s () => (float[2] v) { v = Neg(x) }> }, else_branch = q () => (float[2] e) { e = Relu(x) }> }"""
ITERATION = """(float[2] x, bool c) => (float[2] y) <int64 n = {3}> {
  y = Loop(n, c, x)<body = b (int64 i, bool q, float[2] s) => (bool d, float[2] t) { d = Identity(q) t = acme.Swirl(s) }> }"""


@pytest.mark.parametrize(
    ("text", "flags", "known"),
    [
        (BRANCH, "--known c=VALUE --known k=VALUE decides at import which part of If_1 runs", {"c": True, "k": True}),
        (INNER, "--known c=VALUE decides at import which part of If_0 runs", {"c": False}),
        (INNER, "--known k=VALUE decides at import which part of If_0/then/If_0 runs", {"k": False}),
        (ITERATION, "--known c=VALUE decides at import which part of Loop_0 runs", {"c": False}),
    ],
    ids=["branch", "outer", "inner", "loop"],
)
def test_a_fault_in_a_body_that_an_input_chooses_names_the_input(
    tmp_path: Path, text: str, flags: str, known: dict[str, bool]
) -> None:
    """Binding it as the hint says imports the rest."""
    path = tmp_path / "mini.onnx"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20, "acme" : 1]> g {text}'), path)
    with pytest.raises(CannotImport, match="Swirl") as caught:
        import_onnx(path)
    assert flags in caught.value.hint
    assert set(known) <= set(caught.value.needs)
    import_onnx(path, known=known)


def test_a_fault_that_no_input_chooses_gets_no_such_hint(tmp_path: Path) -> None:
    path = tmp_path / "mini.onnx"
    text = """(float[2] x, bool c) => (float[2] y) { h = acme.Swirl(x) k = Constant<value = bool {1}>()
      z = If(k)<then_branch = p () => (float[2] t) { t = acme.Swirl(x) }, else_branch = q () => (float[2] e) { e = Relu(x) }>
      y = If(c)<then_branch = p () => (float[2] u) { u = Relu(h) }, else_branch = q () => (float[2] v) { v = Relu(z) }> }"""
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20, "acme" : 1]> g {text}'), path)
    with pytest.raises(CannotImport) as caught:
        import_onnx(path)
    assert "--known" not in caught.value.hint
    assert caught.value.needs == ()


def test_faults_of_both_branches_are_listed(tmp_path: Path) -> None:
    path = tmp_path / "mini.onnx"
    text = "(float[2] x, bool c) => (float[2] y) { y = If(c)<then_branch = p () => (float[2] t) { t = acme.Left(x) }, else_branch = q () => (float[2] e) { e = acme.Right(x) }> }"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 10, opset_import: ["" : 20, "acme" : 1]> g {text}'), path)
    with pytest.raises(CannotImport, match=r"If_0/then/Left_0 (.|\n)*If_0/else/Right_0 "):
        import_onnx(path)


def test_inputs_that_are_sequences_are_bound_to_lists(tmp_path: Path) -> None:
    path = _written(
        tmp_path,
        "(seq(float[2]) s, float[2] x) => (float[2,3] y) { t = SequenceInsert(s, x) y = ConcatFromSequence<axis = 1, new_axis = 1>(t) }",
    )
    arrays = [draw(name, F32, (2,)) for name in "abc"]
    imported = import_onnx(path, known={"s": arrays[:2]})
    np.testing.assert_array_equal(run(imported, {"x": arrays[2]})[0], np.stack(arrays, 1))


def test_a_sum_of_embeddings_as_torch_exports_it(tmp_path: Path) -> None:
    """EmbeddingBag: a loop over bags with slices, a branch and a sequence."""
    pytest.importorskip("onnxscript")
    bag = torch.nn.EmbeddingBag(11, 4, mode="sum")
    ids, offsets = torch.randint(0, 11, (7,)), torch.tensor([0, 2, 2, 5])
    path = tmp_path / "bag.onnx"
    torch.onnx.export(bag, (ids, offsets), str(path), input_names=["ids", "offsets"], dynamo=True, verbose=False)
    imported = import_onnx(path, known={"offsets": offsets.numpy()})
    expected = judge(path, {"ids": ids.numpy(), "offsets": offsets.numpy()})
    np.testing.assert_allclose(run(imported, {"ids": ids.numpy()})[0], expected[0], rtol=1e-6)
    assert imported.module.vars["weight"].role == "param"


@pytest.mark.parametrize(("limit", "iterations"), [(0.9, 1), (0.6, 4), (0.76, 2)])
def test_training_through_a_loop_that_ends_early(tmp_path: Path, limit: float, iterations: int) -> None:
    """A step of gradient descent through iterations that run-time conditions end, against torch."""
    import penstock as ps

    text = f"""(float[4,3] x) => (float loss) <int64 n = {{4}}> {{
      k = Constant<value = bool {{1}}>()
      y = Loop(n, k, x)<body = b (int64 i, bool c, float[4,3] s) => (bool d, float[4,3] t) {{
        m = MatMul(s, w) t = Tanh(m) a = Abs(t) q = ReduceMax<keepdims = 0>(a) lim = Constant<value = float {{{limit}}}>() d = Less(lim, q) }}>
      z = Mul(y, y) loss = ReduceMean<keepdims = 0>(z) }}"""
    w = np.array([[0.1, 0.2, -0.3], [0.4, 0.5, -0.6], [0.7, 0.8, 0.9]], np.float32)
    path = _written(tmp_path, text, arrays={"w": w})
    x = draw("x", F32, (4, 3))

    weight, state, ran, more = torch.tensor(w, requires_grad=True), torch.tensor(x), 0, True
    while more and ran < 4:
        state = torch.tanh(state @ weight)
        more, ran = bool(state.abs().max() > limit), ran + 1
    loss = (state * state).mean()
    loss.backward()
    assert ran == iterations

    training = ps.Training(loss="output:loss", optimizer=ps.SGD(lr=0.1), microbatches=1)
    bundle = ps.compile(
        ps.plan(ps.from_onnx(path), ps.Cluster.local(1), training), tmp_path / "bundle", backend="numpy"
    )
    with ps.open(bundle) as job:
        assert job.step({"x": x}) == pytest.approx(loss.item(), rel=1e-6)
        np.testing.assert_allclose(job.parameters()["w"], (weight - 0.1 * weight.grad).detach().numpy(), rtol=1e-5)
