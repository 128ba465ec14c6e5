"""Penstock compiles an ONNX or torch model into a multi-device pipeline bundle.

It trains and runs the bundle on unequal devices.

    import penstock as ps
    model = ps.from_onnx("model.onnx", dims={"batch": 4})
    train = ps.Training(loss="cross_entropy", optimizer=ps.AdamW(lr=3e-4), microbatches=4)
    plan = ps.plan(model, ps.Cluster.local(2), train, schedule="2bw")
    ps.compile(plan, "bundle/")
    with ps.open("bundle/") as job:
        for batch in batches:
            loss = job.step(batch)
        job.save("ckpt/")
    ps.export("bundle/", checkpoint="ckpt/", onnx="trained.onnx")

Names are imported when they are first used, so that `import penstock` is quick.
"""

from __future__ import annotations

from importlib import import_module
from typing import TYPE_CHECKING, Any

from penstock.version import __version__ as __version__

_HOMES = {
    "from_onnx": "penstock.api",
    "from_torch": "penstock.api",
    "plan": "penstock.api",
    "plan_best": "penstock.api",
    "compile": "penstock.api",
    "export": "penstock.inspection.exports.weights",
    "load_trace": "penstock.inspection.traces.trace",
    "Model": "penstock.api",
    "Plan": "penstock.api",
    "Dump": "penstock.inspection.dump",
    "load": "penstock.runtime.job.rungs",
    "open": "penstock.runtime.job.job",
    "run_bundle": "penstock.runtime.job.run",
    "Cluster": "penstock.ir.cluster.cluster",
    "Training": "penstock.frontends.training",
    **dict.fromkeys(
        ("SGD", "Momentum", "Adam", "AdamW", "Adagrad", "Lion", "Muon", "Group"), "penstock.ir.training.optimizers"
    ),
    **dict.fromkeys(("Constant", "Linear", "Cosine", "Steps"), "penstock.ir.training.rates"),
    "PenstockError": "penstock.support.errors",
}

if TYPE_CHECKING:
    from penstock.api import Model, Plan, compile, from_onnx, from_torch, plan, plan_best
    from penstock.frontends.training import Training
    from penstock.inspection.dump import Dump
    from penstock.inspection.exports.weights import export
    from penstock.inspection.traces.trace import load_trace
    from penstock.ir.cluster.cluster import Cluster
    from penstock.ir.training.optimizers import SGD, Adagrad, Adam, AdamW, Group, Lion, Momentum, Muon
    from penstock.ir.training.rates import Constant, Cosine, Linear, Steps
    from penstock.runtime.job.job import open
    from penstock.runtime.job.run import run_bundle
    from penstock.runtime.job.rungs import load
    from penstock.support.errors import PenstockError

__all__ = [
    "SGD",
    "Adagrad",
    "Adam",
    "AdamW",
    "Cluster",
    "Constant",
    "Cosine",
    "Dump",
    "Group",
    "Linear",
    "Lion",
    "Model",
    "Momentum",
    "Muon",
    "PenstockError",
    "Plan",
    "Steps",
    "Training",
    "compile",
    "export",
    "from_onnx",
    "from_torch",
    "load",
    "load_trace",
    "open",
    "plan",
    "plan_best",
    "run_bundle",
]


def __getattr__(name: str) -> Any:
    if name not in _HOMES:
        raise AttributeError(f"module 'penstock' has no attribute {name!r}")
    return getattr(import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return [*__all__, "__version__"]
