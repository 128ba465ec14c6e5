"""The sample table itself: no row without samples, every element type that a row claims, and refusals with a reason."""

from __future__ import annotations

import re
from pathlib import Path

import numpy as np
import pytest
import samples
from samples import FAMILIES, REFUSED, SAMPLES, Refused, Sample, fill, is_open, refuse, samples_of, unsampled

from penstock.ir.graph import Graph, Module, Op, Value
from penstock.ir.ops import OPS, complete_attrs, infer_op
from penstock.ir.types import DTYPES, numpy_dtype, parse_type
from penstock.ir.verify.verifier import check
from penstock.support.errors import VerifyError

PURE = [name for name, row in OPS.items() if row.family not in ("state", "collective")]


def test_every_row_is_sampled_and_refuses_something() -> None:
    assert not unsampled(PURE)
    assert {s.kind for s in SAMPLES} == set(PURE), "samples of a row that is gone"
    assert {r.kind for r in REFUSED} == set(PURE)


def test_every_file_of_samples_is_read() -> None:
    files = {path.stem for path in Path(samples.__file__).parent.glob("*.py")} - {
        "__init__",
        "data",
        "related",
        "table",
    }
    assert files == {family.__name__.rpartition(".")[2] for family in FAMILIES}


def test_control_a_row_without_samples_is_noticed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(OPS, "cube", OPS["neg"])
    assert unsampled(name for name, row in OPS.items() if row.family not in ("state", "collective")) == {"cube"}


def _accepts(s: Sample, dtype: str) -> bool:
    """Whether type inference takes the sample with another element type."""
    types, attrs = fill(s.pattern, dtype)
    ins = tuple(Value(f"x{i}", parse_type(t)) for i, t in enumerate(types))
    try:
        infer_op(Op(s.kind, ins, (), attrs), {})  # type: ignore[arg-type]
    except TypeError:
        return False
    return True


@pytest.mark.parametrize("kind", PURE)
def test_every_element_type_a_row_claims_is_sampled(kind: str) -> None:
    if kind == "cast":  # from anything to anything
        pairs = {(s.dtype, s.attrs["dtype"]) for s in samples_of(kind)}
        assert pairs == {(a, b) for a in DTYPES for b in DTYPES}
        return
    open_samples = [s for s in samples_of(kind) if is_open(s)]
    assert open_samples, "no sample of this row is open in its element type"
    claimed = {d for d in DTYPES if any(_accepts(s, d) for s in open_samples)}
    assert claimed == {s.dtype for s in samples_of(kind)}


# The rows that have no operand of any size.
@pytest.mark.parametrize("kind", [k for k in PURE if k not in ("const", "iota", "ramp")])
def test_every_row_is_sampled_with_nothing_in_it(kind: str) -> None:
    assert any(0 in v.type.dims for s in samples_of(kind) for v in (*s.op.ins, *s.op.outs))


@pytest.mark.parametrize("kind", PURE)
def test_every_attribute_of_a_row_is_set_by_a_sample(kind: str) -> None:
    assert not set(OPS[kind].attrs) - {name for s in samples_of(kind) for name in s.attrs}


def _refusal(r: Refused) -> str:
    ins = tuple(Value(f"x{i}", parse_type(t)) for i, t in enumerate(r.types))
    try:
        found = infer_op(Op(r.kind, ins, (), r.attrs), {})
    except TypeError as error:
        return str(error)
    pytest.fail(f"{r} was not refused but gives {', '.join(map(str, found))}")


@pytest.mark.parametrize("case", REFUSED, ids=str)
def test_wrong_types_and_attributes_are_refused_with_a_reason(case: Refused) -> None:
    message = _refusal(case)
    assert re.search(case.message, message), message


def test_the_verifier_says_where_a_refused_operation_stands() -> None:
    case = next(r for r in REFUSED if r.kind == "matmul")
    ins = tuple(Value(f"x{i}", parse_type(t)) for i, t in enumerate(case.types))
    op = Op("matmul", ins, (Value("y", parse_type("f32[3,6]")),), case.attrs, "/layer/MatMul")
    module = Module("m", ins, ("y",), graphs={"main": Graph("main", ins, op.outs, (op,))})
    with pytest.raises(VerifyError, match=case.message) as error:
        check(module, ("typed",))
    assert "/layer/MatMul" in str(error.value)


def test_control_an_operation_that_works_is_not_taken_for_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("samples.table.REFUSED", [])
    refuse("neg", "f32[3]", because="never")
    from samples.table import REFUSED as added

    with pytest.raises(pytest.fail.Exception, match="was not refused but gives f32"):
        _refusal(added[0])


def test_a_sample_always_draws_the_same_operands() -> None:
    for s in SAMPLES[::20]:
        for a, b, t in zip(s.arrays(), s.arrays(), s.types, strict=True):
            assert a.dtype == numpy_dtype(parse_type(t).dtype)
            assert a.tobytes() == b.tobytes()
    assert complete_attrs(SAMPLES[0].op)
    assert np.isnan(
        next(s for s in SAMPLES if s.kind == "maximum" and s.draws and s.draws[0].__name__ == "nasty").arrays()[0]
    ).any()
