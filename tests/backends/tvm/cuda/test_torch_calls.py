"""The calls of libraries as a GPU gets them: torch's fake tensors on `cuda` go through the same code, and every operation of torch is recorded."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Sequence
from typing import Any

import pytest
import torch
from torch._subclasses.fake_tensor import FakeTensorMode
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from penstock.backends.tvm.cuda import torch_attention, torch_calls

TYPES = {"f16": torch.float16, "bf16": torch.bfloat16, "f32": torch.float32}
# Operations of torch that make scores of their own.
PRODUCTS = {"bmm", "baddbmm", "_scaled_dot_product_attention_math"}


class Record(TorchDispatchMode):
    """The names of torch's operations, and what they get."""

    def __init__(self) -> None:
        super().__init__()
        self.calls: list[tuple[str, tuple[Any, ...]]] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.calls.append((func.overloadpacket.__name__, args))
        return func(*args, **(kwargs or {}))

    @property
    def names(self) -> list[str]:
        return [name for name, _ in self.calls]


class Copies(TorchFunctionMode):
    """Copies past the binding of a method that looks for the device itself, which a torch without CUDA refuses."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        return (torch.ops.aten.copy_.default if func is torch.Tensor.copy_ else func)(*args, **(kwargs or {}))


class Sums(TorchFunctionMode):
    """Sums in place, past bindings that look for the device themselves: what is added to is the result."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        given = dict(kwargs or {})
        if func is torch.addmm:
            assert given.pop("out") is args[0]
        return (torch.ops.aten.add_.Tensor if func is torch.Tensor.add_ else func)(*args, **given)


def record(kind: str, attrs: dict[str, Any], ins: Sequence[Any], outs: Sequence[Any]) -> Record:
    """What torch does for a call with operands and results of these shapes and types on a GPU."""
    with FakeTensorMode():
        operands, results = ([torch.empty(s, dtype=t, device="cuda") for s, t in side] for side in (ins, outs))
        with Copies(), Record() as seen:
            torch_calls.CALLS[kind](attrs, results, *operands)
    return seen


def both_passes(dtype: str, head: int, mask: Any = None, causal: bool = True) -> tuple[Record, Record]:
    t, shape, rows = TYPES[dtype], (2, 3, 33, head), (2, 3, 33)
    attrs = {"scale": 0.3, "causal": causal}
    statistics = [(rows, torch.float32)] * 2
    masks = [mask] if mask else []
    qkv = [(shape, t)] * 3
    forward = record("attention", attrs, [*qkv, *masks], [(shape, t), *statistics])
    return forward, record("attention_grad", attrs, [(shape, t), *qkv, (shape, t), *statistics, *masks], qkv)


@pytest.fixture(autouse=True)
def _of_hopper(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "_capability", lambda device: (9, 0))


@pytest.mark.parametrize("head", [64, 20])
@pytest.mark.parametrize(
    ("dtype", "mask", "kernel"),
    [
        ("bf16", None, "flash"),
        ("f16", None, "flash"),
        ("f32", None, "efficient"),
        ("bf16", ((33, 33), torch.bool), "efficient"),
        ("f16", ((2, 1, 1, 33), torch.float16), "efficient"),
        ("f32", ((33, 33), torch.float32), "efficient"),
    ],
)
def test_attention_runs_one_kernel_each_way(dtype: str, mask: Any, kernel: str, head: int) -> None:
    name = f"_scaled_dot_product_{kernel}_attention"
    forward, backward = both_passes(dtype, head, mask)
    assert forward.names.count(name) == 1
    assert backward.names.count(f"{name}_backward") == 1
    # Neither pass makes scores by itself, and the backward pass runs no forward pass.
    assert PRODUCTS.isdisjoint(forward.names + backward.names)
    assert name not in backward.names
    for seen in (forward, backward):
        (args,) = (args for called, args in seen.calls if called.startswith(name))
        assert all(x.shape[-1] % 8 == 0 for x in args[:3])
        if kernel == "efficient" and mask is not None:
            bias = args[4 if seen is backward else 3]
            assert tuple(bias.shape) == (2, 3, 33, 33)
            assert bias.stride()[2] % 16 == 0 or bias.stride()[2] == 0
        if kernel == "efficient" and seen is backward:
            assert args[6].shape[-1] == 64  # lines of statistics, to a multiple of 32


def test_what_no_kernel_takes_is_done_with_scores() -> None:
    """The control: float64 has no kernel, and the record shows its scores."""
    wide, rows = ((2, 3, 33, 16), torch.float64), ((2, 3, 33), torch.float64)
    seen = record("attention", {"scale": 0.3, "causal": True}, [wide] * 3, [wide, rows, rows])
    assert not PRODUCTS.isdisjoint(seen.names)


def test_older_gpus_have_no_flash(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_attention, "_capability", lambda device: (7, 5))
    forward, backward = both_passes("f16", 64)
    assert "_scaled_dot_product_efficient_attention" in forward.names
    assert "_scaled_dot_product_efficient_attention_backward" in backward.names


def product(dtype: str, x: tuple[int, ...], y: tuple[int, ...], ta: bool = False, tb: bool = False) -> Record:
    rows, columns = x[-1 if ta else -2], y[-2 if tb else -1]
    out = (*max(x[:-2], y[:-2], key=len), rows, columns)
    t = TYPES[dtype]
    return record("matmul", {"ta": ta, "tb": tb}, [(x, t), (y, t)], [(out, t)])


@pytest.mark.parametrize(
    ("x", "y", "ta", "tb"),
    [((512, 768), (768, 50257), 0, 0), ((512, 50257), (768, 50257), 0, 1), ((512, 768), (512, 50257), 1, 0)],
)
def test_products_of_16_bits_have_sizes_that_are_multiples_of_8(x: Any, y: Any, ta: int, tb: int) -> None:
    seen = product("bf16", x, y, bool(ta), bool(tb))
    ((_, args),) = [(name, args) for name, args in seen.calls if name in ("mm", "bmm")]
    assert all(n % 8 == 0 for a in args[:2] for n in a.shape[-2:])
    # The control: what needs no zeros, or gains nothing by them, is multiplied as it is.
    plain = product("f32", x, y, bool(ta), bool(tb))
    ((_, args),) = [(name, args) for name, args in plain.calls if name in ("mm", "bmm")]
    assert any(n % 8 for a in args[:2] for n in a.shape[-2:])


@pytest.mark.parametrize(
    ("dtype", "columns", "wanted"),
    [("bf16", 96, ["addmm"]), ("f16", 96, ["addmm"]), ("f32", 96, ["addmm"]), ("bf16", 91, ["mm", "add_"])],
)
def test_a_product_is_added_to_a_variable_in_one_call(dtype: str, columns: int, wanted: list[str]) -> None:
    """In float32 throughout; with zeros around it, in two calls."""
    with FakeTensorMode():
        x, y = (torch.empty(s, dtype=TYPES[dtype], device="cuda") for s in ((512, 64), (512, columns)))
        total = torch.empty(64, columns, device="cuda")
        with Sums(), Record() as seen:
            torch_calls.ADDED["matmul"]({"ta": True, "tb": False}, total, x, y)
    assert [name for name in seen.names if name in ("mm", "addmm", "add_", "copy_", "_to_copy")] == wanted
    (args,) = (args for name, args in seen.calls if name == wanted[0])
    assert dtype == "f32" or torch.float32 in args


@pytest.mark.parametrize("x", [(5, 96, 77), (96, 77)])
def test_zeros_around_a_product_change_nothing(x: tuple[int, ...], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch_calls, "pads", lambda x, y: True)
    torch.manual_seed(3)
    for ta, tb in ((False, False), (True, False), (False, True), (True, True)):
        a, b = torch.randn(x), torch.randn(*x[:-2], 77, 101)
        given = (a.mT.contiguous() if ta else a), (b.mT.contiguous() if tb else b)
        out = torch.empty(*x[:-1], 101)
        torch_calls.CALLS["matmul"]({"ta": ta, "tb": tb}, [out], *given)
        assert torch.allclose(out, a @ b, atol=1e-5)


@pytest.mark.parametrize("causal", [False, True])
@pytest.mark.parametrize("dtype", ["f16", "bf16", "f32"])
def test_a_row_that_sees_nothing_sees_all_alike(dtype: str, causal: bool) -> None:
    """The result and the gradients, against a formula in float64 with the lowest number in place of hidden scores."""
    torch.manual_seed(5)
    t = TYPES[dtype]
    q, k, v, dy = (torch.randn(1, 2, 6, 8).to(t) for _ in range(4))
    mask = torch.rand(6, 6) > 0.5
    mask[2], mask[4] = False, False
    mask[5, 0] = True
    wide = [x.double().requires_grad_() for x in (q, k, v)]
    scores = torch.where(mask, wide[0] @ wide[1].mT * 0.4, torch.finfo(t).min)
    later = torch.ones(6, 6, dtype=torch.bool).triu(1)
    scores = scores.masked_fill(later, -torch.inf) if causal else scores
    y = torch.softmax(scores, -1) @ wide[2]
    expected = [y.detach(), *torch.autograd.grad(y, wide, dy.double())]
    attrs, outs = {"scale": 0.4, "causal": causal}, [torch.empty_like(q) for _ in range(4)]
    statistics = [torch.empty(1, 2, 6) for _ in range(2)]
    torch_calls.CALLS["attention"](attrs, [outs[0], *statistics], q, k, v, mask)
    torch_calls.CALLS["attention_grad"](attrs, outs[1:], dy, q, k, v, outs[0], *statistics, mask)
    limit = {"f16": 4e-3, "bf16": 3e-2, "f32": 1e-5}[dtype]
    assert all((found.double() - right).abs().max() < limit for found, right in zip(outs, expected, strict=True))


_ROUNDING = """
import sys
import torch

from penstock.backends.tvm.cuda.torch_calls import keep_float32

before, after = sys.argv[1:]
exec(before)
keep_float32()
exec(after)
kinds = torch.backends.cudnn.conv, torch.backends.cudnn.rnn, torch.backends.cuda.matmul
print(*(kind.fp32_precision for kind in kinds), torch.backends.cudnn.allow_tf32, torch.get_float32_matmul_precision())
with torch.backends.cudnn.flags(enabled=True, deterministic=True):
    assert not torch.backends.cuda.matmul.allow_tf32
"""


@pytest.mark.parametrize(
    "before", ["", "torch.set_float32_matmul_precision('high')", "torch.backends.fp32_precision = 'tf32'"]
)
def test_a_process_can_ask_torch_how_it_rounds(before: str) -> None:
    """A bundle for inference runs in the process of its caller, whose programs may ask. The control: one of torch's
    names by itself makes that an error."""

    def rounding(after: str) -> subprocess.CompletedProcess[str]:
        command = [sys.executable, "-c", _ROUNDING, before, after]
        return subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)

    found = rounding("")
    assert (found.returncode, found.stdout) == (0, "ieee ieee ieee False highest\n"), found.stderr
    control = rounding("torch.backends.cudnn.conv.fp32_precision = 'tf32'")
    assert control.returncode
    assert "mix of the legacy and new APIs" in control.stderr
