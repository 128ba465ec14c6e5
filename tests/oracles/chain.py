"""A model of four layers, cut by the passes into any number of stages, and its training by torch in float64."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from pathlib import Path
from tempfile import TemporaryDirectory

import numpy as np
import torch

from penstock.backends.bundle.format import Bundle
from penstock.backends.bundle.writer import write_bundle
from penstock.backends.registry import backend_of
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.text import parse_module
from penstock.passes.manager import run_passes
from penstock.passes.pipelines import PASSES, PipelineOptions, training_pipeline

WIDTH, LAYERS, LR, BETA = 8, 4, 0.1, 0.9


def chain_weights() -> dict[str, np.ndarray]:
    """Return the initial weights of the layers, drawn from fixed seeds."""
    return {
        f"w{i}": np.random.default_rng(i).standard_normal((WIDTH, WIDTH)).astype(np.float32) * 0.5
        for i in range(LAYERS)
    }


def chain_bundle(folder: Path, stages: int, kind: str, m: int = 4, rows: int = 4, backend: str = "numpy") -> Bundle:
    """Write a bundle of the model, compiled for `stages` stages."""
    x, labels = f"f32[{rows},{WIDTH}]", f"i64[{rows}]"
    lines = ["module @chain {", f"  input %x : {x}", f"  input %labels : {labels}", "  output %loss"]
    lines += [f"  var @w{i} : f32[8,8] param" for i in range(LAYERS)] + [
        f"  graph @main(%x : {x}, %labels : {labels}) {{"
    ]
    for i in range(LAYERS):
        source = f"h{i - 1}" if i else "x"
        lines += [
            f"    %p{i} : f32[8,8] = read(@w{i})",
            f"    %z{i} : {x} = matmul(%{source}, %p{i})",
            f"    %h{i} : {x} = relu(%z{i})",
        ]
    lines += [
        f"    %loss : f32[], %lse : f32[{rows}] = cross_entropy(%h{LAYERS - 1}, %labels)",
        "    return %loss",
        "  }",
        "}",
    ]
    module = parse_module("\n".join(lines), "chain.ir").but(cluster=Cluster.local(stages))
    cuts = tuple(f"z{i * LAYERS // stages}" for i in range(1, stages))
    module = run_passes(
        module,
        training_pipeline(
            {"kind": "momentum", "lr": LR},
            {"stages": stages, "split_at": cuts},
            PipelineOptions(schedule=kind, microbatches=m),
        ),
        PASSES,
    )
    if backend == "numpy":
        return write_bundle(folder, module, {}, chain_weights(), backend=backend)
    with TemporaryDirectory() as place:
        names = backend_of(backend).compile_stages(module, range(stages), Path(place))
        files = {stage: [Path(place) / name for name in stage_files] for stage, stage_files in names.items()}
        return write_bundle(folder, module, files, chain_weights(), backend=backend)


class Recurrence:
    """The recurrence W(t+1) = W(t) - upd(grad f(W(max(t - delay, first)))), where `first` is the oldest existing
    version.
    """

    def __init__(self) -> None:
        self.versions = [{n: torch.tensor(w, dtype=torch.float64) for n, w in chain_weights().items()}]
        self.momentum = {n: torch.zeros(WIDTH, WIDTH, dtype=torch.float64) for n in self.versions[0]}

    def copy(self) -> Recurrence:
        """Return a copy that can be trained apart."""
        other = Recurrence()
        other.versions, other.momentum = list(self.versions), dict(self.momentum)
        return other

    def train(self, batches: Sequence[dict[str, np.ndarray]], delay: int, first: int) -> Iterator[float]:
        """Train on batches and yield their losses."""
        for batch in batches:
            step = len(self.versions) - 1
            leaves = {n: w.clone().requires_grad_() for n, w in self.versions[max(step - delay, first)].items()}
            h = torch.tensor(batch["x"], dtype=torch.float64)
            for i in range(LAYERS):
                h = torch.relu(h @ leaves[f"w{i}"])
            loss = torch.nn.functional.cross_entropy(h, torch.tensor(batch["labels"]))
            loss.backward()
            for name, leaf in leaves.items():
                assert leaf.grad is not None
                self.momentum[name] = BETA * self.momentum[name] + leaf.grad
            self.versions.append({n: w - LR * self.momentum[n] for n, w in self.versions[-1].items()})
            yield float(loss.detach())
