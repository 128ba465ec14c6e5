"""Tests of opening libraries: a path that has another file than before gives the code of that file. Interrupts come out of calls."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import pytest
import torch

import penstock as ps
from penstock.backends.tvm.run import machine
from penstock.backends.tvm.run.runtime_library import load_runtime


class _Power(torch.nn.Module):
    def __init__(self, exponent: int) -> None:
        super().__init__()
        self.exponent = exponent

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x**self.exponent


def _loaded(exponent: int, out: Path) -> ps.LoadedModel:
    model = ps.from_torch(_Power(exponent), (torch.zeros(2, 4),))
    return ps.load(ps.compile(ps.plan(model, ps.Cluster.local(threads=[1])), out, jobs=1))


def _answer(loaded: ps.LoadedModel) -> float:
    (y,) = loaded({"x": np.full((2, 4), 3.0, np.float32)}).values()
    return float(y[0, 0])


def test_a_bundle_that_was_compiled_again_is_loaded_again(tmp_path: Path) -> None:
    first = _loaded(2, tmp_path / "bundle")
    second = _loaded(3, tmp_path / "bundle")
    assert (_answer(first), _answer(second)) == (9.0, 27.0)
    assert _answer(_loaded(3, tmp_path / "bundle")) == 27.0


def test_control_the_plain_path_gives_the_code_of_before(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "_spelled", str)
    assert _answer(_loaded(2, tmp_path / "bundle")) == 9.0
    assert _answer(_loaded(3, tmp_path / "bundle")) == 9.0


@pytest.mark.parametrize("kind", [KeyboardInterrupt, SystemExit])
def test_what_ends_a_call_from_python_comes_out_as_it_was(kind: type[BaseException]) -> None:
    """The control: TVM makes other ends an error, which a handler of errors would take for one."""
    load_runtime()
    import tvm_ffi

    def call(kind: type[BaseException]) -> None:
        def end() -> None:
            raise kind

        tvm_ffi.convert(end)()

    with pytest.raises(kind):
        call(kind)
    with pytest.raises(RuntimeError):
        call(GeneratorExit)


@pytest.mark.parametrize("codes", [(143,), (0,), (-1,), (None,), (), ("no room",)])
def test_an_end_comes_out_with_its_code(codes: tuple[int | str | None, ...]) -> None:
    """A command that is terminated ends with 143, not with a text."""
    load_runtime()
    import tvm_ffi

    def end() -> None:
        raise SystemExit(*codes)

    with pytest.raises(SystemExit) as found:
        tvm_ffi.convert(end)()
    assert found.value.code == SystemExit(*codes).code
