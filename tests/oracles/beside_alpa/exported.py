"""Problems of layouts as the planner makes them of models: three that Alpa's solver gets, too."""

from __future__ import annotations

import tempfile
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import penstock as ps
from penstock.ir.cluster.cluster import OTHER_HOST, Cluster, Device, LinkClass
from penstock.models import write_cnn, write_gpt, write_mlp
from penstock.planning.layouts.choose import layout_model
from penstock.planning.layouts.search import LayoutCosts
from penstock.planning.options import PlanOptions

from .problems import apart

# What writes a model, its devices, bytes per second and seconds of a link, and the part of the bytes that fit.
_MODELS: dict[str, tuple[Callable[[Path], Path], int, tuple[float, float], float]] = {
    "gpt": (
        lambda path: write_gpt(path, layers=2, width=64, heads=4, vocab=256, positions=16, batch=8),
        2,
        (1.25e9, 1e-6),
        1.0,
    ),
    "cnn": (lambda path: write_cnn(path, 16, size=24), 4, (1.25e9, 1e-6), 1.0),
    "mlp": (lambda path: write_mlp(path, [64, 256, 64, 256, 64], 16), 2, (1.25e8, 1e-5), 0.7),
}


def exported() -> dict[str, LayoutCosts]:
    """Return the costs of the layouts of three models, the last with little memory."""
    problems = {}
    for name, (write, devices, link, part) in _MODELS.items():
        with tempfile.TemporaryDirectory() as folder:
            model = ps.from_onnx(write(Path(folder) / "model.onnx"))
        cluster = Cluster(
            tuple(Device(f"cpu:{i}", host=f"h{i}") for i in range(devices)),
            classes=(LinkClass(OTHER_HOST, *link),),
        )
        training = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=0.1), microbatches=2)
        options = PlanOptions(mesh=f"tp={devices}", shard=("auto",))
        costs = apart(layout_model(model, cluster, training, options).costs())
        if part < 1:
            whole = costs.held([0] * len(costs.seconds))
            costs = replace(costs, room=part * whole)
        problems[name] = costs
    return problems
