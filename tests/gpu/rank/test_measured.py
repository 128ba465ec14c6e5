"""GPUs are measured as `penstock doctor` does, on devices of straw: with torch's stand-in and TVM's own runtime. Their times mean nothing; that there is one
for everything, on which GPU, and what is said of what fails, is tested here, the arithmetic in tests/doctor/test_gpu_rates.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.doctor.gpu_rates import work

SHARES = work(128).keys() - {"flops"}


def test_gpus_are_measured_as_stages_use_them(program: Callable[..., Any]) -> None:
    said = program("gpu.rank.measured", devices=2)
    measured = said["measured"]
    without_nvcc, unknown = measured["problems"]
    assert without_nvcc.startswith("GPUs: launches on sm_75 were not measured: ")
    assert unknown.startswith(
        "cuda:2: not measured: wants cuda sm_75, device GPU-77 of its host; this host has 2: 0 is"
    )
    assert set(measured["rates"]) == {"0", "1"}
    for rates in measured["rates"].values():
        assert rates["efficiency"].keys() == SHARES
        assert all(rate > 0 for rate in (rates["flops"], rates["bandwidth"], *rates["efficiency"].values()))
        assert rates["call_overhead"] is not None
        assert rates["overhead"] is not None
    assert [(edge["source"], edge["target"]) for edge in measured["edges"]] == [(0, 1)]
    assert measured["edges"][0]["bandwidth"] > 0
    # No launch that is measured is a graph's. The control: with captures the same program has some.
    assert said["captured"]["graphs"] == 2
    assert said["captured"]["measured"] == 0
    assert said["captured"]["with captures"] > 0
    assert min(measured["copies"]) > 0
    # A GPU by the number under which torch opens it: one that is full fails, and the other one is not taken for it.
    (fine, nothing), (copies, problems) = said["copies"]
    assert min(fine) > 0
    assert nothing == []
    assert copies is None
    assert problems == ["cuda:3: copies to and from the host not measured: CUDA error: out of memory"]
    # Stages round float32 as what is measured does. The control: torch by itself does not.
    assert said["rounded"] == ["tf32", "ieee", "ieee"]
    check_refused(said["refused"], said["seen"]["refused"])
    check_faults(said)


def check_refused(refused: dict[str, Any], seen: list[list[Any]]) -> None:
    """The GPU that is as the driver says is measured, at torch's number, and no other one."""
    assert set(refused["rates"]) == {"1"}
    assert refused["edges"] == []
    assert {index for _, _, index, _ in seen} == {0}
    assert not any(alike for *_, alike in seen)
    wrong, unknown = refused["problems"]
    assert wrong == "cuda:0: not measured: wants cuda sm_80; device 1 of this host is Straw, sm_90"
    assert unknown.startswith(
        "cuda:2: not measured: wants cuda sm_90, device GPU-77 of its host; this host has 2: 0 is"
    )


def check_faults(said: dict[str, Any]) -> None:
    """What fails is left out, and nothing else."""
    attention, products = said["attention"], said["products"]
    # The driver's first GPU is torch's second one.
    assert attention["problems"] == ["cuda:0: attention in bf16 not measured: RuntimeError"]
    assert attention["rates"]["0"]["efficiency"].keys() == SHARES - {"attention.bf16"}
    assert attention["rates"]["1"]["efficiency"].keys() == SHARES
    assert len(attention["edges"]) == 1
    for rates in attention["rates"].values():
        assert rates["call_overhead"] is rates["overhead"] is None
    # Without the product that all shares are of, a GPU has no rates and no edges; the other one has its own.
    assert products["problems"] == [
        "cuda:0: flops in f32 not measured: CUDA error: out of patience",
        "cuda:0: products in f32 not measured: CUDA error: out of patience",
        "cuda:0: not measured: no rates without flops",
    ]
    assert set(products["rates"]) == {"1"}
    assert products["rates"]["1"]["efficiency"].keys() == SHARES
    assert products["edges"] == []
