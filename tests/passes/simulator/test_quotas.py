"""Devices within quotas of their host's cores: several that are busy at once take no more than their quotas."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path

import pytest

import penstock as ps
from penstock.ir.cluster.cluster import Cluster
from penstock.models import write_mlp
from penstock.passes.simulator import forecast
from penstock.planning.predict import predict

TRAINING = ps.Training(loss="mse", optimizer=ps.AdamW(lr=1e-3), microbatches=4)


@pytest.fixture
def model(tmp_path: Path) -> ps.Model:
    return ps.from_onnx(write_mlp(tmp_path / "mlp.onnx", [256] * 5, batch=64))


def seconds(model: ps.Model, quotas: tuple[float, ...], host: str = "localhost") -> float:
    """Return the prediction of stages on devices of the same rates, whose quotas are these."""
    local = Cluster.local(len(quotas), threads=(1,) * len(quotas))
    devices = tuple(replace(d, host=host, quota=quota) for d, quota in zip(local.devices, quotas, strict=True))
    names = [[device.name] for device in devices]
    return predict(
        ps.plan(model, replace(local, devices=devices), TRAINING, devices=names, schedule="1f1b").module
    ).step


def test_devices_within_quotas_do_not_wait_for_cores(model: ps.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Four of a quarter of a core each, on two cores, take what they take on a host with a core for each. The control:
    four that may have whole cores share the two."""
    monkeypatch.setattr(forecast, "usable_cores", lambda: 2)
    shared, whole = seconds(model, (0.25,) * 4), seconds(model, (1.0,) * 4)
    monkeypatch.setattr(forecast, "usable_cores", lambda: 8)
    assert shared == pytest.approx(seconds(model, (0.25,) * 4), rel=0.01)
    assert whole > 1.2 * shared


def test_quotas_that_are_more_than_the_cores_wait(model: ps.Model, monkeypatch: pytest.MonkeyPatch) -> None:
    """Three devices of 0.9 of a core are more than two cores have."""
    monkeypatch.setattr(forecast, "usable_cores", lambda: 2)
    crowded = seconds(model, (0.9,) * 3)
    monkeypatch.setattr(forecast, "usable_cores", lambda: 8)
    assert crowded > 1.05 * seconds(model, (0.9,) * 3)
