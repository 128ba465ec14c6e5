"""`penstock verify`: compare results of Penstock with references that do not share its fast path.

A model is run forward by onnxruntime, by the interpreter, and by compiled stages on one device. A training bundle is
run by its real worker processes. Every microbatch loss is compared with the sequential recurrence W(t+1) = W(t) -
upd(grad f(W(t - delay))). The interpreter computes it in float64 on the model before it was cut into stages. An
inference bundle is compared with the interpreter. Errors are relative to the largest magnitude of the expected array.

The limit is 1e-5 where everything is computed in f32 or f64. For 16-bit floats, of unit roundoff u (2^-8 for bf16,
2^-11 for f16), no fixed number would do, because roundings add up along the model. So the interpreter runs such a model
twice: in float64, and rounding every result as the IR says. The distance of the two is the effect of these roundings on
this model. Compiled stages round at no more places than that (values that travel in 16 bits are rounded there, too) but
add up in another order. They may be MARGIN times as far off, or u, whichever is more.

Training can make one rounding large: AdamW divides by what may be almost nothing, and a rate that is too high amplifies
every difference. Where losses of a training in f32 or f64 exceed the limit, the interpreter runs the recurrence RUNS
times more, in the declared types. Weights and inputs are then each changed by one rounding. The error of a loss, or of
one before it, in these runs is the effect of rounding alone: MARGIN times that is allowed, up to WIDEST. A fault that
shows before roundings have grown is found as before. `--tolerance` overrides all this.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path

import numpy as np

from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Module
from penstock.ir.interpreter.graphs import run_graph
from penstock.ir.interpreter.ops import F64, TYPED
from penstock.ir.interpreter.recurrence import run_recurrence
from penstock.ir.interpreter.store import DictStore, initial_arrays
from penstock.ir.names import shown
from penstock.ir.types import UNIT_ROUNDOFF
from penstock.ir.verify.verifier import check
from penstock.passes.communicate.wire import round_trips
from penstock.passes.schedules.schedule import SCHEDULES
from penstock.planning.build import build
from penstock.planning.model import from_onnx
from penstock.planning.options import BuildOptions
from penstock.runtime.data.samples import SyntheticSamples
from penstock.support.errors import UsageError, VerifyError
from penstock.support.terminal import onnxruntime_warnings_counted, say, table
from penstock.verification.bisect.data import read_data

Arrays = Mapping[str, np.ndarray]
TOLERANCE = 1e-5
# Two runs whose roundings differ only in some places may still differ by more than one of them from the exact result.
MARGIN = 4.0
# The runs that show the effect of rounding on a training, and the largest error that counts as such.
RUNS, WIDEST = 8, 1e-2


def relative_error(computed: np.ndarray, expected: np.ndarray) -> float:
    """Return the largest difference over the largest magnitude.

    It is infinite when shapes or non-finite elements differ, or when nothing is finite.
    """
    a, b = np.asarray(computed, dtype=np.float64), np.asarray(expected, dtype=np.float64)
    if a.shape != b.shape or not np.array_equal(np.isfinite(a), np.isfinite(b)):
        return float("inf")
    finite = np.isfinite(b)
    if not finite.any():
        return 0.0 if not finite.size else float("inf")
    scale = float(np.abs(b[finite]).max())
    return float(np.abs(a[finite] - b[finite]).max()) / (scale or 1.0)


def coarsest_roundoff(module: Module) -> float | None:
    """Return the unit roundoff of the shortest float of a module, if it has 16-bit floats."""
    dtypes = {v.type.dtype for graph in module.graphs.values() for op in graph.ops for v in (*op.ins, *op.outs)}
    return max((UNIT_ROUNDOFF[dtype] for dtype in dtypes & {"bf16", "f16"}), default=None)


def allowed_error(module: Module, tolerance: float | None, roundings: Callable[[], list[float]]) -> float:
    """Return the largest error that passes.

    `roundings` runs the interpreter in the declared types, and returns its errors.
    """
    u = coarsest_roundoff(module)
    if tolerance is not None or u is None:
        return TOLERANCE if tolerance is None else tolerance
    rounding = max(roundings(), default=0.0)
    limit = max(u, MARGIN * rounding)
    say(
        f"16-bit floats, unit roundoff {u:.1e}: the interpreter, rounding as the IR says, is off by "
        f"{rounding:.1e}; up to {limit:.1e} is allowed"
    )
    return limit


def synthetic_batch(module: Module, microbatches: int, seed: int, batch: int = 0) -> dict[str, np.ndarray]:
    """Return one global batch of seeded noise, as `penstock run --data synthetic` feeds it."""
    samples = SyntheticSamples(module, seed)
    parts = range(batch * microbatches, (batch + 1) * microbatches)
    pieces = {v.name: [samples.microbatch(mb, v.name) for mb in parts] for v in module.data_inputs}
    # Every microbatch gets the whole scalar input.
    return {name: np.concatenate(arrays) if arrays[0].ndim else arrays[0] for name, arrays in pieces.items()}


def changed_by(roundoff: float, array: np.ndarray, source: np.random.Generator) -> np.ndarray:
    """Return each number a little more or less, in float64; arrays without floats stay."""
    if array.dtype.kind != "f" and array.dtype.name != "bfloat16":
        return array
    moved: np.ndarray = array.astype(np.float64) * (1 + roundoff * source.choice([-1.0, 1.0], array.shape))
    return moved


def _report(rows: list[tuple[str, float]], limits: Sequence[float], hint: str = "") -> int:
    """Print the comparisons; raise VerifyError where one error is above its limit. Limits that differ are shown."""
    verdicts = ["ok" if error <= limit else "FAILED" for (_, error), limit in zip(rows, limits, strict=True)]
    shown = [[f"{limit:.1e}"] for limit in limits] if len(set(limits)) > 1 else [[] for _ in limits]
    cells = [
        [what, f"{error:.2e}", *limit, verdict]
        for (what, error), limit, verdict in zip(rows, shown, verdicts, strict=True)
    ]
    print(table(["compared", "relative error", *(["allowed"] if len(set(limits)) > 1 else []), "verdict"], cells))
    failed = [what for (what, _), verdict in zip(rows, verdicts, strict=True) if verdict != "ok"]
    if failed:
        most = f"more than {limits[0]:g}" if len(set(limits)) == 1 else "more than is allowed"
        raise VerifyError(
            f"{len(failed)} of {len(rows)} comparisons are off by {most}: {', '.join(failed[:5])}", hint=hint
        )
    return 0


# ------------------------------------------------------------------------------------------------ models


def verify_model(
    path: str,
    *,
    dims: Mapping[str, int],
    known: Mapping[str, object],
    seed: int,
    tolerance: float | None,
    backend: str,
    data: str | None = None,
) -> int:
    """Compare the forward pass of an ONNX file: onnxruntime against the interpreter, and against a compiled bundle of
    one stage.

    `data` has inputs as a reproducer has them; without it they are drawn.
    """
    with onnxruntime_warnings_counted():  # its import looks for devices
        import onnxruntime

    from penstock.planning.pipeline import plan_model  # lazy: heavy

    model = from_onnx(path, dims, known=known)
    module = model.module
    if module.draws:
        raise UsageError(
            "the model draws random numbers (dropout), and no two runtimes draw the same",
            where=path,
            hint="export it at rest: module.eval() before torch.onnx.export",
        )
    inputs = synthetic_batch(module, 1, seed) if data is None else _given_inputs(data)
    originals = model.imported.names
    names = [originals.get(name, name) for name in module.outputs]
    fed = {**model.imported.bound, **{originals.get(name, name): array for name, array in inputs.items()}}
    with onnxruntime_warnings_counted():
        session = onnxruntime.InferenceSession(path, providers=["CPUExecutionProvider"])
        expected = session.run(names, fed)
    say(f"{module.name}: comparing {len(names)} outputs with onnxruntime {onnxruntime.__version__}")
    store = DictStore(initial_arrays(module, model.imported.weights, list(module.vars), TYPED))
    rows, theirs = [], shown(module.outputs, originals)
    interpreted = run_graph(module.graphs["main"], inputs, store)
    rows += [
        (f"interpreter: {theirs[name]}", relative_error(a, b))
        for name, a, b in zip(module.outputs, interpreted, expected, strict=True)
    ]
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        bundle = build(plan_model(model, Cluster.local(1)), Path(folder) / "bundle", BuildOptions(backend))
        computed = _one_microbatch(open_bundle(bundle), inputs)
    rows += [
        (f"{backend}: {theirs[name]}", relative_error(computed[name], b))
        for name, b in zip(module.outputs, expected, strict=True)
    ]

    def roundings() -> list[float]:
        wide = DictStore(initial_arrays(module, model.imported.weights, list(module.vars), F64))
        exact = run_graph(module.graphs["main"], inputs, wide, precision=F64)
        return [relative_error(a, b) for a, b in zip(interpreted, exact, strict=True)]

    return _report(rows, [allowed_error(module, tolerance, roundings)] * len(rows))


def _one_microbatch(bundle: Bundle, inputs: Arrays) -> dict[str, np.ndarray]:
    """Return the outputs of a bundle for the inputs of one microbatch, by the names and in the shapes of its module."""
    from penstock.runtime.job.job import open as open_job  # lazy: heavy

    with open_job(bundle.path) as job:
        answer = job.infer(inputs)
    outside = shown(bundle.module.outputs, bundle.renamed)
    arrays = {name: answer[outside[name]] for name in bundle.module.outputs}
    # The answer to a request has the scalars of all its microbatches in a row, here of one.
    ranks = {v.name: v.type.rank for graph in bundle.module.graphs.values() for v in graph.outs}
    return {name: array if ranks[name] else array.reshape(()) for name, array in arrays.items()}


def _given_inputs(path: str) -> dict[str, np.ndarray]:
    _, batches = read_data(path)
    return batches[0] if batches else {}


# ------------------------------------------------------------------------------------------------ bundles


def verify_bundle(path: str, *, steps: int, seed: int, tolerance: float | None) -> int:
    """Run a bundle for real, and compare with the interpreter in float64."""
    bundle = open_bundle(path)
    reference = bundle.reference
    if reference is None:
        raise VerifyError("the bundle holds no reference model to compare with", where=path, hint="compile it again")
    for module in (bundle.module, reference):
        check(module, tuple(dict.fromkeys(("typed", *module.facts))))
    weights = bundle.weights()
    if "B" in reference.graphs:
        return _verify_training(bundle, reference, weights, steps, seed, tolerance)
    return _verify_inference(bundle, reference, weights, seed, tolerance)


def delay_of(module: Module) -> int:
    """Return the number of updates that the weights of a microbatch are behind, by the schedule of the module."""
    assert module.schedule is not None
    return SCHEDULES[module.schedule.name].delay


def _verify_training(
    bundle: Bundle, reference: Module, weights: Arrays, steps: int, seed: int, tolerance: float | None
) -> int:
    from penstock.runtime.job.job import open as open_job  # lazy: heavy

    schedule = bundle.module.schedule
    assert schedule is not None
    delay, rounding = delay_of(bundle.module), round_trips(reference, bundle.module)
    batches = [synthetic_batch(bundle.module, schedule.microbatches, seed, t) for t in range(steps)]
    say(
        f"{bundle.module.name}: {steps} steps of {schedule.name}, every microbatch loss against the float64 "
        f"recurrence with delay {delay}"
    )
    expected = run_recurrence(reference, weights, batches, delay=delay, precision=F64).losses
    with open_job(bundle.path) as job:
        losses_of_run = [loss for step in job.steps(batches) for loss in step.losses]
    rows = [
        (
            f"step {i // schedule.microbatches} microbatch {i % schedule.microbatches} loss {b:.6f}",
            relative_error(np.array(a), np.array(b)),
        )
        for i, (a, b) in enumerate(zip(losses_of_run, expected, strict=True))
    ]

    def roundings() -> list[float]:
        losses = run_recurrence(rounding, weights, batches, delay=delay, precision=TYPED).losses
        return [relative_error(np.array(a), np.array(b)) for a, b in zip(losses, expected, strict=True)]

    limits = [allowed_error(rounding, tolerance, roundings)] * len(rows)
    if tolerance is None and coarsest_roundoff(rounding) is None and any(not error <= limits[0] for _, error in rows):
        limits = _allowed_by_rounding(reference, weights, batches, expected, delay, seed)
    hint = (
        "--bisect looks for the pass or the kernel; where it finds none, roundings grow in this training: look "
        "at --steps 2, or at "
        "other seeds"
    )
    return _report(rows, limits, hint)


def _allowed_by_rounding(
    reference: Module,
    weights: Arrays,
    batches: list[dict[str, np.ndarray]],
    expected: Sequence[float],
    delay: int,
    seed: int,
) -> list[float]:
    """Return the limit of each loss: the largest error, up to its step, in runs that round otherwise."""
    moves = np.zeros(len(expected))
    for run in range(RUNS):
        source = np.random.default_rng([seed, run])

        def shake(array: np.ndarray, source: np.random.Generator = source) -> np.ndarray:
            return (
                changed_by(float(np.finfo(array.dtype).eps), array, source).astype(array.dtype)
                if array.dtype.kind == "f"
                else array
            )

        shaken = [{name: shake(np.asarray(array)) for name, array in arrays.items()} for arrays in (weights, *batches)]
        losses = run_recurrence(reference, shaken[0], shaken[1:], delay=delay, precision=TYPED).losses
        moves = np.maximum(
            moves, [relative_error(np.array(a), np.array(b)) for a, b in zip(losses, expected, strict=True)]
        )
    # All microbatches of a step have the same weights.
    of_steps = np.maximum.accumulate(moves.reshape(len(batches), -1).max(axis=1))
    say(
        f"the interpreter, rounding as the IR says, is off by up to {of_steps[-1]:.1e} in {RUNS} runs from "
        "numbers changed by one rounding"
    )
    return [
        min(max(TOLERANCE, MARGIN * float(move)), WIDEST) for move in of_steps.repeat(len(expected) // len(batches))
    ]


def _verify_inference(bundle: Bundle, reference: Module, weights: Arrays, seed: int, tolerance: float | None) -> int:
    inputs, rounding = synthetic_batch(bundle.module, 1, seed), round_trips(reference, bundle.module)
    store = DictStore(initial_arrays(reference, weights, list(reference.vars), F64))
    expected = run_graph(reference.graphs["main"], inputs, store, precision=F64)
    outputs = _one_microbatch(bundle, inputs)
    say(f"{bundle.module.name}: outputs of the pipeline against the interpreter in float64")

    def roundings() -> list[float]:
        typed = DictStore(initial_arrays(reference, weights, list(reference.vars), TYPED))
        rounded = run_graph(rounding.graphs["main"], inputs, typed, precision=TYPED)
        return [relative_error(a, b) for a, b in zip(rounded, expected, strict=True)]

    theirs = shown(reference.outputs, bundle.renamed)
    rows = [
        (theirs[name], relative_error(outputs[name], b)) for name, b in zip(reference.outputs, expected, strict=True)
    ]
    return _report(rows, [allowed_error(rounding, tolerance, roundings)] * len(rows))
