"""`penstock verify`: compare results of Penstock with references that do not share its fast path.

The judge is the interpreter in float64. A model is run forward by onnxruntime, without its optimiser, and by compiled
stages on one device, and both are compared with it: does the import mean what the file says, and does the code compute
it? A training bundle is run by its real worker processes. Every microbatch loss is compared with the sequential
recurrence W(t+1) = W(t) - upd(grad f(W(t - delay))), on the model before it was cut into stages. An inference bundle is
compared with that model. Where tensors are split, every value of every rank is compared first (parts.py).
Errors are relative to the largest magnitude of the expected array.

A result may be 1e-5 off where everything is computed in f32 or f64. For 16-bit floats, of unit roundoff u (2^-8 for
bf16, 2^-11 for f16), no fixed number would do, because roundings add up along the model. So the interpreter runs such a
model twice: in float64, and rounding every result as the IR says. The distance of the two is the effect of these
roundings on this model. Compiled stages round at no more places than that (values that travel in 16 bits are rounded
there, too) but add up in another order. They may be MARGIN times as far off, or u, whichever is more.

A result that is further off is compared with two more that are right, too: the interpreter's when it rounds as the
types say, and onnxruntime's. Then rounding is asked for its effect on these very inputs, and verdicts.py decides. In a
training rounding grows from step to step: a loss may be off by what those before it are. `--tolerance` overrides all
this.
"""

from __future__ import annotations

import tempfile
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from functools import partial
from itertools import count
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.bundle.format import Bundle, open_bundle
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.graph import Graph, Module, Op
from penstock.ir.interpreter.graphs import Noise, run_graph
from penstock.ir.interpreter.ops import F64, TYPED
from penstock.ir.interpreter.recurrence import run_recurrence
from penstock.ir.interpreter.store import DictStore, initial_arrays
from penstock.ir.names import shown
from penstock.ir.types import UNIT_ROUNDOFF
from penstock.ir.verify.verifier import check
from penstock.passes.communicate.wire import round_trips
from penstock.passes.schedules import schedule as schedules
from penstock.planning.build import build
from penstock.planning.model import from_onnx
from penstock.planning.options import BuildOptions
from penstock.runtime.job.job import open as open_job
from penstock.support.errors import UsageError, VerifyError
from penstock.support.terminal import PATIENCE, Progress, onnxruntime_warnings_counted, say
from penstock.support.words import counted

from .bisect.original import OnnxOriginal, first_difference
from .inputs import batches_of
from .parts import PartsComparison
from .quantisation import is_constant, step_share, step_values, told_steps
from .roundings import Distance, RoundingNoise, relative_error
from .sizes import compared_sizes, sizes_to_check
from .verdicts import OK, UNTOLD, Comparison, Judge, report

if TYPE_CHECKING:
    from penstock.planning.model import Model

Arrays = Mapping[str, np.ndarray]
TOLERANCE = 1e-5
# Two runs whose roundings differ only in some places may still differ by more than one of them from the exact result.
MARGIN = 4.0


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
    """Compare the forward pass of an ONNX file in onnxruntime and in a compiled bundle of one stage with float64.

    `data` names files with inputs, as `run` takes them, or those of a reproducer; without it they are drawn.
    """
    with onnxruntime_warnings_counted():  # its import looks for devices
        import onnxruntime

    from penstock.planning.pipeline import plan_model  # lazy: heavy

    model = from_onnx(path, dims, known=known)
    module, graph = model.module, model.module.graphs["main"]
    if module.draws:
        raise UsageError(
            "the model draws random numbers (dropout), and no two runtimes draw the same",
            where=path,
            hint="export it at rest: module.eval() before torch.onnx.export",
        )
    inputs = batches_of(module, 1, 1, seed, data, model.imported.names)[0]
    expected = _of_onnxruntime(path, model, inputs)
    say(f"{module.name}: comparing {len(expected)} outputs with onnxruntime {onnxruntime.__version__}")
    kept: dict[str, np.ndarray] = {}
    scales = step_values(graph)

    def keep(op: Op, results: tuple[np.ndarray, ...]) -> None:
        kept.update((v.name, x) for v, x in zip(op.outs, results, strict=True) if v in scales.values())

    exact, rounded, noisy = _runs(graph, module, model.imported.weights, inputs, keep)
    judge = Judge(exact, rounded, noisy, seed)
    with tempfile.TemporaryDirectory(prefix="penstock-") as folder:
        bundle = build(plan_model(model, Cluster.local(1)), Path(folder) / "bundle", BuildOptions(backend))
        computed = _one_microbatch(open_bundle(bundle), inputs)
    limit = allowed_error(module, tolerance, lambda: _errors(judge.rounded, exact))
    steps = {name: np.ones(()) if v is None else kept.get(v.name, np.zeros(())) for name, v in scales.items()}
    theirs = shown(module.outputs, model.imported.names)
    compare = partial(_compared, judge, limit=limit, asked=tolerance is not None, steps=steps)
    fused = _of_onnxruntime(path, model, inputs, fused=True) if steps else {}
    # As `--bisect` does it: a result that is not in steps tells more than those that are.
    also = fused if tolerance is None and steps.keys() == set(module.outputs) else {}
    rows = [_imported(compare, f"interpreter: {theirs[name]}", name, expected, also) for name in module.outputs]
    rows = _looked_into(rows, path, model, inputs)
    rows += [
        compare(f"{backend}: {theirs[name]}", name, computed[name], also=[expected[name]]) for name in module.outputs
    ]
    for name, step in steps.items():
        if apart := told_steps(fused[name], expected[name], step):
            say(f"{theirs[name]}: onnxruntime with its optimiser {apart}, compared with itself without")
    return report(rows)


def _imported(compare: Callable[..., Comparison], what: str, name: str, expected: Arrays, fused: Arrays) -> Comparison:
    """Judge an import by onnxruntime without its optimiser; results in steps also by onnxruntime with it.

    Sums of bytes times factors can lie exactly half-way between two steps. Floats fall to one side all together, where
    no noise moves the bytes. Both are onnxruntime's results.
    """
    row = compare(what, name, expected[name])
    if row.verdict == OK or name not in fused:
        return row
    other = compare(what, name, fused[name])
    if other.verdict != OK or is_constant(fused[name]):
        return row
    remark = "; ".join(filter(None, ("as onnxruntime with its optimiser", row.remark)))
    return replace(other, remark=remark)


def _compared(
    judge: Judge[str],
    what: str,
    name: str,
    result: np.ndarray,
    *,
    limit: float,
    asked: bool,
    steps: Arrays,
    also: Sequence[np.ndarray] = (),
) -> Comparison:
    """Judge an output, and say how many steps of quantisation it is off, if it has any."""
    exact, step = judge.exact[name], steps.get(name, np.zeros(()))
    row = judge.compare(what, name, result, limit, asked=asked, also=also, step=step_share(step, exact))
    return replace(row, remark=told_steps(result, exact, step) or row.remark)


def _looked_into(rows: list[Comparison], path: str, model: Model, inputs: Arrays) -> list[Comparison]:
    """Let values on the way judge an import of which the outputs cannot tell.

    A wrong import may be one that rounding moves more than it moves the model. Before that, some value of it is off.
    """
    if all(row.verdict != UNTOLD for row in rows):
        return rows
    original = OnnxOriginal(Path(path), model.imported.names, model.imported.bound)
    spot = first_difference(original, model.module, model.imported.weights, inputs, None).first
    if spot is None:
        return rows
    remark = f"{spot.tensor} on the way to it is off by {spot.error:.2g}, of {spot.allowed.error:.2g} allowed"
    return [
        replace(row, limit=Distance(), empty=False, remark=remark) if row.verdict == UNTOLD else row for row in rows
    ]


def _of_onnxruntime(path: str, model: Model, inputs: Arrays, *, fused: bool = False) -> dict[str, np.ndarray]:
    """Return the outputs of onnxruntime by our names, without its optimiser where it runs the model so."""
    import onnxruntime

    names = model.imported.names
    feeds = {**model.imported.bound, **{names.get(name, name): array for name, array in inputs.items()}}
    options = onnxruntime.SessionOptions()
    if fused:
        options.log_severity_level = 3  # the run without the optimiser has warned already
    else:
        options.graph_optimization_level = onnxruntime.GraphOptimizationLevel.ORT_DISABLE_ALL
    outputs = [names.get(name, name) for name in model.module.outputs]
    with onnxruntime_warnings_counted():
        session = onnxruntime.InferenceSession(path, options, providers=["CPUExecutionProvider"])
        results = session.run(outputs, feeds)
    return dict(zip(model.module.outputs, results, strict=True))


def _runs(
    graph: Graph,
    module: Module,
    weights: Arrays,
    inputs: Arrays,
    keep: Callable[[Op, tuple[np.ndarray, ...]], None] | None = None,
    rounding: Graph | None = None,
) -> tuple[
    dict[str, np.ndarray], Callable[[], dict[str, np.ndarray]], Callable[[RoundingNoise], dict[str, np.ndarray]]
]:
    """Return the results of a graph in float64, and functions that run it as its types say, and with noise.

    `rounding` is the graph with more roundings, where there are some.
    """

    progress = Progress("verify", after=PATIENCE)

    def run(graph: Graph, precision: str, noise: Noise | None = None) -> dict[str, np.ndarray]:
        done = count(1)
        what = "operations, rounded as their types say" if precision == TYPED else "operations in float64"

        def watch(op: Op, results: tuple[np.ndarray, ...]) -> None:
            # A run may be short, and is followed by others: its end is worth no line.
            progress(min(next(done), len(graph.ops) - 1), len(graph.ops), f"{what}, with noise" if noise else what)
            if keep is not None and precision != TYPED and noise is None:
                keep(op, results)

        store = DictStore(initial_arrays(module, weights, list(module.vars), precision))
        results = run_graph(graph, inputs, store, precision, watch, noise)
        progress.close()
        return {v.name: np.asarray(x) for v, x in zip(graph.results, results, strict=True)}

    rounding = rounding or graph
    outputs = run(graph, F64)
    return outputs, lambda: run(rounding, TYPED), lambda noise: run(rounding, F64, noise)


def _errors(computed: Arrays, exact: Arrays) -> list[float]:
    return [relative_error(computed[name], array) for name, array in exact.items()]


def _one_microbatch(bundle: Bundle, inputs: Arrays) -> dict[str, np.ndarray]:
    """Return the outputs of a bundle for the inputs of one microbatch, by the names and in the shapes of its module."""

    with open_job(bundle.path) as job:
        answer = job.infer(inputs)
    outside = shown(bundle.module.outputs, bundle.renamed)
    arrays = {name: answer[outside[name]] for name in bundle.module.outputs}
    # The answer to a request has the scalars of all its microbatches in a row, here of one.
    ranks = {v.name: v.type.rank for graph in bundle.module.graphs.values() for v in graph.outs}
    return {name: array if ranks[name] else array.reshape(()) for name, array in arrays.items()}


# ------------------------------------------------------------------------------------------------ bundles


def verify_bundle(
    path: str,
    *,
    steps: int,
    seed: int,
    tolerance: float | None,
    data: str | None = None,
    dims: Mapping[str, int] | None = None,
) -> int:
    """Run a bundle for real, and compare with the interpreter in float64. `dims` choose one size of bounded dimensions,
    of which otherwise all rungs are run."""
    bundle = open_bundle(path)
    reference = bundle.reference
    if reference is None:
        raise VerifyError("the bundle holds no reference model to compare with", where=path, hint="compile it again")
    for module in (bundle.module, reference):
        check(module, tuple(dict.fromkeys(("typed", *module.facts))))
    weights, schedule = bundle.weights(), bundle.module.schedule
    trains = "B" in reference.graphs
    assert schedule is not None
    if dims and not bundle.module.bounds:
        raise UsageError("--dim: the bundle has no bounded dimension", where=path, hint="leave it out")
    if bundle.module.bounds:
        return _verify_sizes(bundle, reference, weights, seed, tolerance, dims or {})
    if bundle.module.is_local:
        batch = batches_of(bundle.module, 1, schedule.microbatches, seed, data, bundle.renamed)[0]
        _verify_parts(bundle, reference, weights, batch, seed)
    batches = batches_of(
        bundle.module,
        steps if trains else 1,
        schedule.microbatches if trains else 1,
        seed,
        data,
        bundle.renamed,
    )
    if trains:
        return _verify_training(bundle, reference, weights, batches, seed, tolerance)
    return _verify_inference(bundle, reference, weights, batches[0], seed, tolerance)


def _verify_parts(bundle: Bundle, reference: Module, weights: Arrays, batch: Arrays, seed: int) -> None:
    """Compare every value of every rank in float64 with the whole program; raise VerifyError for the first that is
    off."""
    comparison = PartsComparison(bundle.module, reference)
    off = comparison.first_off(weights, batch, seed)
    if off is not None:
        raise VerifyError(str(off), where=str(bundle.path), hint="--bisect looks for the pass")
    say(
        f"{bundle.module.name}: {counted(comparison.compared, 'value')} of {counted(len(comparison.teams), 'rank')} in "
        "float64 are those of the whole program"
    )


def delay_of(module: Module) -> int:
    """Return the number of updates that the weights of a microbatch are behind, by the schedule of the module."""
    assert module.schedule is not None
    return schedules.delay_of(module.schedule.name)


def _verify_training(
    bundle: Bundle,
    reference: Module,
    weights: Arrays,
    batches: Sequence[Arrays],
    seed: int,
    tolerance: float | None,
) -> int:

    schedule = bundle.module.schedule
    assert schedule is not None
    delay, rounding = delay_of(bundle.module), round_trips(reference, bundle.module)
    say(
        f"{bundle.module.name}: {len(batches)} steps of {schedule.name}, every microbatch loss against the float64 "
        f"recurrence with delay {delay}"
    )

    def losses(module: Module, precision: str, noise: Noise | None = None) -> dict[int, np.ndarray]:
        run = run_recurrence(module, weights, batches, delay=delay, precision=precision, noise=noise)
        return {i: np.array(loss) for i, loss in enumerate(run.losses)}

    def grown(spread: Mapping[int, Distance]) -> Mapping[int, Distance]:
        """Give every loss of a step the largest effect up to there: all have the weights of one step."""
        so_far, limits = Distance(), dict[int, Distance]()
        for first in range(0, len(spread), schedule.microbatches):
            of_step = range(first, first + schedule.microbatches)
            for i in of_step:
                so_far |= spread[i]
            limits |= dict.fromkeys(of_step, so_far)
        return limits

    exact = losses(reference, F64)
    judge = Judge(
        exact,
        lambda: losses(rounding, TYPED),
        lambda noise: losses(rounding, F64, noise),
        seed,
        grown=grown,
    )
    with open_job(bundle.path) as job:
        losses_of_run = [loss for step in job.steps(batches) for loss in step.losses]

    def roundings() -> list[float]:
        return [relative_error(judge.rounded[i], loss) for i, loss in exact.items()]

    limit = allowed_error(rounding, tolerance, roundings)
    rows = [
        judge.compare(
            f"step {i // schedule.microbatches} microbatch {i % schedule.microbatches} loss {float(exact[i]):.6f}",
            i,
            np.array(loss),
            limit,
            asked=tolerance is not None,
        )
        for i, loss in enumerate(losses_of_run)
    ]
    return report(rows, "--bisect looks for the pass or the kernel")


def _verify_sizes(
    bundle: Bundle,
    reference: Module,
    weights: Arrays,
    seed: int,
    tolerance: float | None,
    dims: Mapping[str, int],
) -> int:
    sizes, rounding = sizes_to_check(bundle, dims), round_trips(reference, bundle.module)
    say(f"{bundle.module.name}: outputs at {counted(len(sizes), 'size')} against the interpreter in float64")
    limits: list[float] = []

    def runs(inputs: Arrays) -> Any:
        return _runs(reference.graphs["main"], reference, weights, inputs, rounding=rounding.graphs["main"])

    def compare(judge: Judge[str], what: str, name: str, result: np.ndarray) -> Comparison:
        if not limits:
            limits.append(allowed_error(rounding, tolerance, lambda: _errors(judge.rounded, judge.exact)))
        return judge.compare(what, name, result, limits[0], asked=tolerance is not None)

    return report(compared_sizes(bundle, reference, sizes, seed, runs, compare))


def _verify_inference(
    bundle: Bundle, reference: Module, weights: Arrays, inputs: Arrays, seed: int, tolerance: float | None
) -> int:
    rounding = round_trips(reference, bundle.module)
    exact, rounded, noisy = _runs(
        reference.graphs["main"], reference, weights, inputs, rounding=rounding.graphs["main"]
    )
    judge = Judge(exact, rounded, noisy, seed)
    outputs, theirs = _one_microbatch(bundle, inputs), shown(reference.outputs, bundle.renamed)
    say(f"{bundle.module.name}: outputs of the pipeline against the interpreter in float64")
    limit = allowed_error(rounding, tolerance, lambda: _errors(judge.rounded, exact))
    return report(
        [
            judge.compare(theirs[name], name, outputs[name], limit, asked=tolerance is not None)
            for name in reference.outputs
        ]
    )
