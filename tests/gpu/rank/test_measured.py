"""GPUs are measured as `penstock doctor` does, on devices of straw: with torch's stand-in and TVM's own runtime. Their times mean nothing; that there is one
for everything, and what is said where launches cannot be measured, is tested here, the arithmetic in tests/doctor/test_gpu_rates.py."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from penstock.doctor.gpu_rates import work


def test_gpus_are_measured_as_stages_use_them(program: Callable[..., Any]) -> None:
    said = program("gpu.rank.measured", devices=2)
    measured, refused = said["measured"], said["refused"]
    assert measured["problems"] == []
    assert set(measured["rates"]) == {"0", "1"}
    for rates in measured["rates"].values():
        assert rates["efficiency"].keys() == work(128).keys() - {"flops"}
        assert all(rate > 0 for rate in (rates["flops"], rates["bandwidth"], *rates["efficiency"].values()))
        assert rates["call_overhead"] > 0
    assert [(edge["source"], edge["target"]) for edge in measured["edges"]] == [(0, 1)]
    assert measured["edges"][0]["bandwidth"] > 0
    assert [text.split(":")[1] for text in refused["problems"]] == ["0", "1"]
    assert all("launches were not measured" in text for text in refused["problems"])
    for rates in refused["rates"].values():
        assert rates["flops"] > 0
        assert rates["call_overhead"] == rates["overhead"] == 0
