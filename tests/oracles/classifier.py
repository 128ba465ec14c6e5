"""A small classifier, cut by hand into stages, and its training in plain NumPy: the oracle of the runtime."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from penstock.backends.bundle.format import Bundle
from penstock.backends.bundle.writer import Provenance, write_bundle
from penstock.backends.registry import backend_of
from penstock.ir.attrs import print_literal
from penstock.ir.graph import Module
from penstock.ir.text import parse_module
from penstock.ir.training.rates import Constant
from penstock.passes.communicate.communicate import communicate
from penstock.passes.memory.lifetimes import lifetimes
from penstock.passes.partition.split_backward import split_backward
from penstock.passes.schedules.schedule import SCHEDULES, ScheduleOptions, schedule
from penstock.passes.schedules.weight_versions import WeightVersionsOptions, weight_versions

ROWS, WIDTH, CLASSES, RATE, BETA = 4, 8, 5, 0.1, 0.9


def classifier_text(stages: int, m: int, trains: bool = True) -> str:
    """h(i) = relu(h(i-1) w(i)), the last stage gives logits, loss = cross_entropy(logits, labels); momentum."""
    last = stages - 1
    h = f"f32[{ROWS},{WIDTH}]"
    wide = [CLASSES if i == last else WIDTH for i in range(stages)]
    lines = [f"module @classifier facts({'differentiated, ' if trains else ''}staged) {{"]
    lines += [f"  device cpu:{i}" for i in range(stages)] + [f"  stage {i} on cpu:{i}" for i in range(stages)]
    lines += (
        [f"  input %x : {h}"]
        + ([f"  input %labels : i64[{ROWS}]", "  output %loss"] if trains else [])
        + ["  output %logits"]
    )
    for i in range(stages):
        lines.append(f"  var @w{i} : f32[{WIDTH},{wide[i]}] stage {i} param")
        if trains:
            lines += [
                f"  var @w{i}.{role} : f32[{WIDTH},{wide[i]}] stage {i} {kind} init zeros"
                for role, kind in (("grad", "grad"), ("momentum", "state"))
            ]
    if trains:
        lines += [f"  var @lr : f64[] setting init {print_literal((RATE,))}"]
        lines += [
            f"  var @lr.curve : f64[4,5] setting init {print_literal(Constant().table())}",
            "  var @step : i64[] state init zeros",
        ]
    for i in range(stages):
        w, z, source = f"f32[{WIDTH},{wide[i]}]", f"f32[{ROWS},{wide[i]}]", "x" if i == 0 else f"h{i - 1}"
        product = "logits" if i == last else f"z{i}"
        labels = f", %labels : i64[{ROWS}]" if trains and i == last else ""
        lines += [
            f"  graph @s{i}.F(%{source} : {h}{labels}) {{",
            f"    %w : {w} = read(@w{i})",
            f"    %{product} : {z} = matmul(%{source}, %w)",
        ]
        if i < last:
            lines.append(f"    %h{i} : {h} = relu(%z{i})")
        elif trains:
            lines.append(f"    %loss : f32[], %lse : f32[{ROWS}] = cross_entropy(%logits, %labels)")
        if trains:
            lines.append(f"    save %{source}, " + ("%labels, %logits, %lse" if i == last else f"%z{i}"))
        lines += ["    return " + (f"%h{i}" if i < last else "%loss, %logits" if trains else "%logits"), "  }"]
        if not trains:
            continue
        given = (
            f"%labels : i64[{ROWS}], %logits : {z}, %lse : f32[{ROWS}]"
            if i == last
            else f"%z{i} : {z}, %h{i}.grad : {h}"
        )
        lines.append(f"  graph @s{i}.B(%{source} : {h}, {given}) {{")
        if i == last:
            lines.append(f"    %one : f32[] = const(value={1 / m!r}, shape=[], dtype=f32)")
            lines.append(f"    %dz : {z} = cross_entropy_grad(%logits, %labels, %lse, %one)")
        else:
            lines.append(f"    %dz : {z} = relu_grad(%z{i}, %h{i}.grad)")
        lines += [f"    %dw : {w} = matmul(%{source}, %dz, ta=true)", f"    accum(%dw, @w{i}.grad)"]
        if i:
            lines += [
                f"    %w : {w} = read(@w{i})",
                f"    %h{i - 1}.grad : {h} = matmul(%dz, %w, tb=true)",
                f"    return %h{i - 1}.grad",
                "  }",
            ]
        else:
            lines += ["    return", "  }"]
        lines += [
            f"  graph @s{i}.U() {{",
            f"    %w : {w} = read(@w{i})",
            f"    %g : {w} = take(@w{i}.grad)",
            f"    %m : {w} = read(@w{i}.momentum)",
        ]
        lines += [
            "    %base : f64[] = read(@lr)",
            "    %curve : f64[4,5] = read(@lr.curve)",
            "    %step : i64[] = read(@step)",
            "    %time : f64[] = cast(%step, dtype=f64)",
            "    %part : f64[] = ramp(%curve, %time)",
            "    %wide : f64[] = mul(%base, %part)",
            "    %lr : f32[] = cast(%wide, dtype=f32)",
            "    %one : i64[] = const(value=1, dtype=i64)",
            "    %after : i64[] = add(%step, %one)",
            f"    %w1 : {w}, %m1 : {w} = momentum(%w, %g, %m, %lr, beta={BETA})",
        ]
        lines += [
            f"    write(%w1, @w{i})",
            f"    write(%m1, @w{i}.momentum)",
            "    write(%after, @step)",
            "    return",
            "  }",
        ]
    return "\n".join([*lines, "}"]) + "\n"


def classifier(stages: int, kind: str, m: int) -> Module:
    module = parse_module(classifier_text(stages, m, kind != "forward"), "classifier.ir")
    module = split_backward(module) if SCHEDULES[kind].splits else module
    module = weight_versions(schedule(module, ScheduleOptions(kind=kind, microbatches=m)), WeightVersionsOptions())
    return lifetimes(communicate(module))


def initial_weights(stages: int) -> dict[str, np.ndarray]:
    random = np.random.default_rng(7)
    sizes = [CLASSES if i == stages - 1 else WIDTH for i in range(stages)]
    return {f"w{i}": (random.standard_normal((WIDTH, n)) * 0.4).astype(np.float32) for i, n in enumerate(sizes)}


def write_classifier(folder: Path, stages: int, kind: str, m: int) -> Bundle:
    module = classifier(stages, kind, m)
    compiled = folder / "compiled"
    files = {}
    for i in range(stages):
        (compiled / str(i)).mkdir(parents=True)
        files[i] = [
            compiled / str(i) / name for name in backend_of("numpy").compile_stages(module, [i], compiled / str(i))[i]
        ]
    return write_bundle(
        folder / "bundle",
        module,
        files,
        initial_weights(stages),
        backend="numpy",
        plan={"stages": stages},
        provenance=Provenance("0" * 64),
    )


def make_batches(count: int, m: int, seed: int = 0) -> list[dict[str, np.ndarray]]:
    random = np.random.default_rng(seed)
    rows = ROWS * m
    return [
        {"x": random.standard_normal((rows, WIDTH)).astype(np.float32), "labels": random.integers(0, CLASSES, rows)}
        for _ in range(count)
    ]


def train_plainly(stages: int, batches: list[dict[str, np.ndarray]], m: int, delay: int) -> list[float]:
    """W(t+1) = W(t) - upd(grad f(W(t - delay))) in float64, one process, no pipeline: the loss of every microbatch."""
    weights = [[w.astype(np.float64) for w in initial_weights(stages).values()]]
    momentum = [np.zeros_like(w) for w in weights[0]]
    losses = []
    for t, batch in enumerate(batches):
        used = weights[max(t - delay, 0)]
        sums = [np.zeros_like(w) for w in used]
        for k in range(m):
            rows = slice(k * ROWS, (k + 1) * ROWS)
            hs, zs, labels = [batch["x"][rows].astype(np.float64)], [], batch["labels"][rows]
            for i, w in enumerate(used):
                zs.append(hs[-1] @ w)
                hs.append(np.maximum(zs[-1], 0) if i < stages - 1 else zs[-1])
            shifted = np.exp(zs[-1] - zs[-1].max(1, keepdims=True))
            p = shifted / shifted.sum(1, keepdims=True)
            losses.append(float(-np.log(p[np.arange(ROWS), labels]).mean()))
            p[np.arange(ROWS), labels] -= 1
            dz = p / ROWS / m
            for i in reversed(range(stages)):
                sums[i] += hs[i].T @ dz
                dz = (dz @ used[i].T) * (zs[i - 1] > 0) if i else dz
        momentum = [BETA * v + g for v, g in zip(momentum, sums, strict=True)]
        weights.append([w - RATE * v for w, v in zip(weights[-1], momentum, strict=True)])
    return losses
