"""`penstock verify`: choose one of its questions, and check that the options go together.

In: parsed arguments. Out: the exit code of verification/checks.py, verification/parity.py or verification/bisect/.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.commands.arguments import add_model_arguments, add_settings, dims_of, known_of, settings_from
from penstock.commands.compiling.planned import plan_of
from penstock.commands.rare import show_rarely
from penstock.planning.options import PlanOptions, TrainingOptions
from penstock.support.errors import UsageError
from penstock.support.settings import POSITIVE, SEED, given, setting, settings_of

if TYPE_CHECKING:
    from penstock.planning.model import Model
    from penstock.verification.bisect.steps import Trail


# Arguments of `compile`, which --bisect takes for a model; these three --parity takes, too.
_SHARED = ("loss", "microbatches", "devices")
_OF_COMPILE = (
    *("cluster", "frozen", "trained", "precision", "wire"),
    *(name for name in settings_of(TrainingOptions) if name not in _SHARED),
    *("batch", "plan", *(name for name in settings_of(PlanOptions) if name not in (*_SHARED, "weights", "shares"))),
)


# Flags of a plan that have a default on the command line.
_UNASKED = {"mesh": "", "hints": "use", "cuda_libraries": "torch"}
_USUAL = ("help", "verbose", "model", "dim", "devices", "loss")


@dataclass(frozen=True)
class VerifyOptions:
    """Settings of a check; each question fills in those that are None."""

    steps: int | None = setting(
        None,
        "optimiser steps for a training bundle (default: 4; with --bisect and -p 3, with --parity 200)",
        check=POSITIVE,
        shown="N",
    )
    seed: int | None = setting(None, "for the random inputs (default: 0)", check=SEED, shown="N")
    tolerance: float | None = setting(
        None,
        "largest relative error that passes (default: 1e-5, with 16-bit floats what their roundings do to this model, "
        "or what rounding explains on these inputs; with --bisect and FILE.ir the latter, which is printed)",
        read=float,
        shown="X",
    )
    data: str | None = setting(
        None,
        "inputs, as `run --data` takes them (default: synthetic), with a model or FILE.ir also the inputs.safetensors "
        "of a reproducer; with --parity an npz, shuffled",
        shown="FILE|synthetic",
    )
    backend: str | None = setting(
        None, "what to check a model or an IR file with (default: tvm)", choices=("tvm", "numpy")
    )


@dataclass(frozen=True)
class BisectOptions:
    """Settings of the search for what is wrong."""

    repro: str | None = setting(
        None,
        "where the smallest reproducer of what is wrong goes, or none (default: the name of what is checked, with "
        ".repro)",
        shown="DIR",
        rare=True,
    )
    shrink: float = setting(
        60.0,
        "how many seconds to make the reproducer smaller (default: 60; 0: leave it as it is)",
        read=float,
        shown="S",
        rare=True,
    )


@dataclass(frozen=True)
class ParityOptions:
    """Settings of the comparison of late updates with plain training."""

    optimizers: str | None = setting(
        None, "kinds, each perhaps with its learning rate (default: momentum,adamw,muon)", shown="LIST", rare=True
    )
    seeds: int | None = setting(
        None,
        "runs of each, with other dropout and orders of samples (default: 3)",
        check=POSITIVE,
        shown="N",
        rare=True,
    )


def add_arguments(parser: ArgumentParser) -> None:
    """Add the arguments of a model, and those of each question."""
    add_model_arguments(parser, metavar="MODEL.onnx|BUNDLE|DUMPS|FILE.ir")
    # What a question takes from `compile` says more beside the others of `compile`.
    show_rarely(*(action for action in parser._actions if action.dest not in _USUAL))
    add_settings(parser.add_argument_group("checking"), VerifyOptions)
    bisect = parser.add_argument_group("with --bisect (and the arguments of `compile`, for a model)")
    bisect.add_argument(
        "--bisect",
        action="store_true",
        help="name the first pass, stage, operation and tensor that is wrong: the import against onnxruntime, the "
        "module after each pass, then the kernels of each stage against the interpreter",
    )
    add_settings(bisect, BisectOptions)
    _add_parity(parser)


def _add_parity(parser: ArgumentParser) -> None:
    """Add the arguments of the questions after FILE.ir and after late updates."""
    files = parser.add_argument_group("with FILE.ir")
    files.add_argument(
        "-p",
        "--passes",
        metavar="PIPELINE",
        help="run these passes, and compare what the module computes before and after",
    )
    parity = parser.add_argument_group("with --parity (and --loss, --microbatches and --devices)")
    parity.add_argument(
        "--parity",
        action="store_true",
        help="train a model under 1f1b and under 2bw, several times, and print the gap between the final losses",
    )
    add_settings(parity, ParityOptions)


def run(arguments: Namespace) -> int:
    """Run the check that the arguments name, and return its exit code."""
    if arguments.parity and arguments.bisect:
        raise UsageError("--parity and --bisect are two questions: ask one of them")
    path, options = Path(arguments.model), settings_from(VerifyOptions, arguments)
    kind = "FILE.ir" if path.suffix == ".ir" else "a folder" if path.is_dir() else "a model"
    _refuse(arguments, ("optimizers", "seeds"), not arguments.parity, "without --parity")
    if not arguments.bisect and (flags := given(settings_from(BisectOptions, arguments))):
        raise UsageError(f"{', '.join(flags)} without --bisect")
    _refuse(arguments, _SHARED, not (arguments.parity or arguments.bisect), "without --parity or --bisect")
    _refuse(arguments, _OF_COMPILE, not arguments.bisect or kind != "a model", "without --bisect of a model")
    _refuse(arguments, ("passes",), kind != "FILE.ir", "without FILE.ir")
    if arguments.parity:
        return _verify_parity(arguments, options)
    if kind == "FILE.ir":
        return _verify_ir(arguments, options)
    if arguments.bisect:
        return _bisect(arguments, options)
    return _verify_folder(arguments, options) if kind == "a folder" else _verify_model(arguments, options)


def _given(arguments: Namespace, names: tuple[str, ...]) -> list[str]:
    """Name the flags of those that were given: counts that were not are 0, lists empty, all others None, False or at a
    default."""
    values = {name: getattr(arguments, name) for name in names}
    return [
        f"--{name.replace('_', '-')}"
        for name, value in values.items()
        if value not in (None, [], _UNASKED.get(name)) and not (type(value) in (int, bool) and not value)
    ]


def _refuse(arguments: Namespace, names: tuple[str, ...], when: bool, why: str) -> None:
    if when and (flags := _given(arguments, names)):
        raise UsageError(f"{', '.join(flags)} {why}")


def _verify_folder(arguments: Namespace, options: VerifyOptions) -> int:
    from penstock.runtime.generation.facts import generates  # lazy: heavy
    from penstock.verification.checks import verify_bundle  # lazy: heavy

    if arguments.known or options.backend:
        raise UsageError("--known and --backend are for models; a bundle has them built in")
    if generates(Path(arguments.model)):
        from penstock.backends.bundle.format import open_bundle  # lazy: heavy
        from penstock.verification.texts import verify_text  # lazy: heavy

        _refuse(arguments, ("dim", "data", "steps"), True, "of a bundle that generates text: turns choose their sizes")
        return verify_text(open_bundle(arguments.model), options.seed or 0, options.tolerance)
    return verify_bundle(
        arguments.model,
        steps=options.steps or 4,
        seed=options.seed or 0,
        tolerance=options.tolerance,
        data=arguments.data,
        dims=dims_of(arguments.dim),
    )


def _verify_model(arguments: Namespace, options: VerifyOptions) -> int:
    from penstock.backends.registry import check_cache  # lazy: heavy
    from penstock.verification.checks import verify_model  # lazy: heavy

    backend = options.backend or "tvm"
    check_cache(backend)
    return verify_model(
        arguments.model,
        dims=dims_of(arguments.dim),
        known=known_of(arguments.known),
        seed=options.seed or 0,
        tolerance=options.tolerance,
        backend=backend,
        data=arguments.data,
    )


def _verify_ir(arguments: Namespace, options: VerifyOptions) -> int:
    from penstock.backends.registry import check_cache  # lazy: heavy
    from penstock.verification.bisect.reproducer import verify_ir  # lazy: heavy

    if arguments.bisect or arguments.dim or arguments.known:
        raise UsageError(
            "--bisect, --dim and --known are for models; an IR file is compared with -p, or with its compiled kernels"
        )
    backend = options.backend or "tvm"
    if arguments.passes is None:
        check_cache(backend)
    return verify_ir(
        arguments.model,
        passes=arguments.passes,
        data=arguments.data,
        steps=options.steps or 3,
        seed=options.seed or 0,
        tolerance=options.tolerance,
        backend=backend,
    )


def _verify_parity(arguments: Namespace, options: VerifyOptions) -> int:
    from penstock.backends.registry import check_cache  # lazy: heavy
    from penstock.planning.model import from_onnx  # lazy: heavy
    from penstock.verification.parity import ParitySetting, optimizers_of, verify_parity  # lazy: heavy

    if Path(arguments.model).is_dir():
        raise UsageError("--parity trains a model, not a bundle", where=arguments.model)
    flags = [f"--{name}" for name in ("seed", "tolerance") if getattr(options, name) is not None]
    if flags:
        raise UsageError(
            f"{', '.join(flags)} with --parity",
            hint="--seeds says how many runs there are of each; a gap is reported, not judged",
        )
    if arguments.loss is None:
        raise UsageError("--parity needs a loss to train on", hint="add --loss")
    if isinstance(arguments.devices, str):
        raise UsageError(
            f"--devices {arguments.devices} with --parity", hint="a number of CPU devices, one for each stage"
        )
    backend = options.backend or "tvm"
    check_cache(backend)
    optimizers = optimizers_of(arguments.optimizers or "momentum,adamw,muon")
    model = from_onnx(arguments.model, dims=dims_of(arguments.dim), known=known_of(arguments.known))
    setting = ParitySetting(
        arguments.loss,
        arguments.data or "synthetic",
        options.steps or 200,
        arguments.microbatches or 4,
        arguments.devices or 2,
        backend=backend,
    )
    return verify_parity(lambda seed: model, optimizers, setting, arguments.seeds or 3)


# ------------------------------------------------------------------------------------------------ bisect


def _bisect(arguments: Namespace, options: VerifyOptions) -> int:
    from penstock.verification.bisect.reproducer import check_place  # lazy: heavy
    from penstock.verification.bisect.search import Options, bisect  # lazy: heavy

    path, reproducer = Path(arguments.model), settings_from(BisectOptions, arguments)
    place = path.with_name(f"{path.name}.repro") if reproducer.repro is None else Path(reproducer.repro)
    repro = None if reproducer.repro == "none" else place
    if repro is not None:
        check_place(repro)
    if not reproducer.shrink >= 0:
        raise UsageError(f"--shrink {reproducer.shrink}", hint="a number of seconds, from 0 on")
    with _trail(arguments, options) as trail:
        return bisect(
            trail,
            Options(options.steps or 3, options.seed or 0, options.tolerance, repro, reproducer.shrink, arguments.data),
        )


def _trail(arguments: Namespace, options: VerifyOptions) -> AbstractContextManager[Trail]:
    from penstock.backends.bundle.format import MANIFEST, open_bundle  # lazy: heavy
    from penstock.backends.registry import check_cache  # lazy: heavy
    from penstock.verification.bisect.sources import bundle_trail, dumps_trail  # lazy: heavy

    path = Path(arguments.model)
    if not path.is_dir():
        return _of_model(arguments, options)
    flags = _given(arguments, (*_SHARED, "dim", "known"))
    if flags:
        raise UsageError(f"{', '.join(flags)} are for models; a folder has them built in", where=str(path))
    if (path / MANIFEST).exists():
        if options.backend:
            raise UsageError("--backend is for models and dumps; a bundle has it built in", where=str(path))
        return bundle_trail(open_bundle(path))
    check_cache(options.backend or "tvm")
    return dumps_trail(path, options.backend)


@contextmanager
def _of_model(arguments: Namespace, options: VerifyOptions) -> Iterator[Trail]:
    import tempfile  # lazy: heavy

    from penstock.backends.registry import check_cache  # lazy: heavy
    from penstock.inspection.dump import Dump  # lazy: heavy
    from penstock.planning.model import from_onnx  # lazy: heavy
    from penstock.verification.bisect.sources import model_trail  # lazy: heavy

    check_cache(options.backend or "tvm")
    names = {"frozen": arguments.frozen, "trained": arguments.trained}
    flags = _given(arguments, ("dump_ir_filter",)) + (["--dump-ir-changed"] if arguments.dump_ir_changed else [])
    if flags:
        raise UsageError(f"{', '.join(flags)} with --bisect, which reads whole modules")
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
        folder = Path(arguments.dump_ir or Path(scratch) / "dumps")

        def load() -> Model:
            return from_onnx(arguments.model, dims=dims_of(arguments.dim), known=known_of(arguments.known), **names)

        with model_trail(
            arguments.model, lambda: plan_of(arguments, Dump(folder)), load, folder, options.backend
        ) as trail:
            yield trail
