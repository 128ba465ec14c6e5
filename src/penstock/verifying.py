"""`penstock verify`: which of its questions is asked, and whether the options go together. In: parsed arguments. Out: the exit code
of checks.py, parity.py or bisecting."""

from __future__ import annotations

import tempfile
from argparse import Namespace
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.backends.registry import check_cache
from penstock.support.errors import UsageError

if TYPE_CHECKING:
    from penstock.verification.bisect.steps import Trail

# What only a question of its own makes sense of.
_OF_PARITY = ("optimizers", "seeds")
_OF_BISECT = ("repro", "shrink")
# Arguments of `compile`, which --bisect takes for a model; these three --parity takes, too.
_SHARED = ("loss", "microbatches", "devices")
_OF_COMPILE = (
    *(
        "cluster",
        "frozen",
        "trained",
        "precision",
        "wire",
        "train",
        "optimizer",
        "lr",
        "lr_schedule",
        "group",
        "weight_decay",
        "clip",
    ),
    *("skip_nonfinite", "batch", "schedule", "recompute", "plan", "stages", "replicas", "split_at"),
)


def verify_command(arguments: Namespace) -> int:
    if arguments.parity and arguments.bisect:
        raise UsageError("--parity and --bisect are two questions: ask one of them")
    path = Path(arguments.model)
    kind = "FILE.ir" if path.suffix == ".ir" else "a folder" if path.is_dir() else "a model"
    _refuse(arguments, _OF_PARITY, not arguments.parity, "without --parity")
    _refuse(arguments, _OF_BISECT, not arguments.bisect, "without --bisect")
    _refuse(arguments, _SHARED, not (arguments.parity or arguments.bisect), "without --parity or --bisect")
    _refuse(arguments, _OF_COMPILE, not arguments.bisect or kind != "a model", "without --bisect of a model")
    _refuse(arguments, ("passes",), kind != "FILE.ir", "without FILE.ir")
    _refuse(arguments, ("data",), kind == "a folder" or arguments.bisect, "with what has no use for it")
    if arguments.parity:
        return _verify_parity(arguments)
    if kind == "FILE.ir":
        return _verify_ir(arguments)
    if arguments.bisect:
        return _bisect(arguments)
    return _verify_folder(arguments) if kind == "a folder" else _verify_model(arguments)


def _given(arguments: Namespace, names: tuple[str, ...]) -> list[str]:
    """The flags of those that were given: counts that were not are 0, lists empty, all others None."""
    values = {name: getattr(arguments, name) for name in names}
    return [
        f"--{name.replace('_', '-')}"
        for name, value in values.items()
        if value not in (None, []) and not (type(value) is int and value == 0)
    ]


def _refuse(arguments: Namespace, names: tuple[str, ...], when: bool, why: str) -> None:
    if when and (given := _given(arguments, names)):
        raise UsageError(f"{', '.join(given)} {why}")


def _verify_folder(arguments: Namespace) -> int:
    from penstock.verification.checks import verify_bundle

    if arguments.dim or arguments.known or arguments.backend:
        raise UsageError("--dim, --known and --backend are for models; a bundle has them built in")
    return verify_bundle(
        arguments.model, steps=arguments.steps or 4, seed=arguments.seed or 0, tolerance=arguments.tolerance
    )


def _verify_model(arguments: Namespace) -> int:
    from penstock.commands import dims_of, known_of
    from penstock.verification.checks import verify_model

    backend = arguments.backend or "tvm"
    check_cache(backend)
    return verify_model(
        arguments.model,
        dims=dims_of(arguments.dim),
        known=known_of(arguments.known),
        seed=arguments.seed or 0,
        tolerance=arguments.tolerance,
        backend=backend,
        data=arguments.data,
    )


def _verify_ir(arguments: Namespace) -> int:
    from penstock.verification.bisect.reproducer import verify_ir

    if arguments.bisect or arguments.dim or arguments.known:
        raise UsageError(
            "--bisect, --dim and --known are for models; an IR file is compared with -p, or with its compiled kernels"
        )
    backend = arguments.backend or "tvm"
    if arguments.passes is None:
        check_cache(backend)
    return verify_ir(
        arguments.model,
        passes=arguments.passes,
        data=arguments.data,
        steps=arguments.steps or 3,
        seed=arguments.seed or 0,
        tolerance=arguments.tolerance,
        backend=backend,
    )


def _verify_parity(arguments: Namespace) -> int:
    from penstock import api
    from penstock.commands import dims_of, known_of
    from penstock.verification.parity import Setting, optimizers_of, verify_parity

    if Path(arguments.model).is_dir():
        raise UsageError("--parity trains a model, not a bundle", where=arguments.model)
    given = [f"--{name}" for name in ("seed", "tolerance") if getattr(arguments, name) is not None]
    if given:
        raise UsageError(
            f"{', '.join(given)} with --parity",
            hint="--seeds says how many runs there are of each; a gap is reported, not judged",
        )
    if arguments.loss is None:
        raise UsageError("--parity needs a loss to train on", hint="add --loss")
    if isinstance(arguments.devices, str):
        raise UsageError(
            f"--devices {arguments.devices} with --parity", hint="a number of CPU devices, one for each stage"
        )
    backend = arguments.backend or "tvm"
    check_cache(backend)
    optimizers = optimizers_of(arguments.optimizers or "momentum,adamw,muon")
    model = api.from_onnx(arguments.model, dims=dims_of(arguments.dim), known=known_of(arguments.known))
    setting = Setting(
        arguments.loss,
        arguments.data or "synthetic",
        arguments.steps or 200,
        arguments.microbatches or 4,
        arguments.devices or 2,
        backend=backend,
    )
    return verify_parity(lambda seed: model, optimizers, setting, arguments.seeds or 3)


# ------------------------------------------------------------------------------------------------ bisect


def _bisect(arguments: Namespace) -> int:
    from penstock.verification.bisect.reproducer import check_place
    from penstock.verification.bisect.search import Options, bisect

    path = Path(arguments.model)
    place = path.with_name(f"{path.name}.repro") if arguments.repro is None else Path(arguments.repro)
    repro = None if arguments.repro == "none" else place
    if repro is not None:
        check_place(repro)
    if arguments.shrink is not None and not arguments.shrink >= 0:
        raise UsageError(f"--shrink {arguments.shrink}", hint="a number of seconds, from 0 on")
    seconds = 60.0 if arguments.shrink is None else arguments.shrink
    with _trail(arguments) as trail:
        return bisect(trail, Options(arguments.steps or 3, arguments.seed or 0, arguments.tolerance, repro, seconds))


def _trail(arguments: Namespace) -> AbstractContextManager[Trail]:
    from penstock.backends.bundle.format import MANIFEST, open_bundle
    from penstock.verification.bisect.sources import bundle_trail, dumps_trail

    path = Path(arguments.model)
    if not path.is_dir():
        return _of_model(arguments)
    given = _given(arguments, (*_SHARED, "dim", "known"))
    if given:
        raise UsageError(f"{', '.join(given)} are for models; a folder has them built in", where=str(path))
    if (path / MANIFEST).exists():
        if arguments.backend:
            raise UsageError("--backend is for models and dumps; a bundle has it built in", where=str(path))
        return bundle_trail(open_bundle(path))
    check_cache(arguments.backend or "tvm")
    return dumps_trail(path, arguments.backend)


@contextmanager
def _of_model(arguments: Namespace) -> Iterator[Trail]:
    from penstock import api
    from penstock.commands import dims_of, known_of, plan_of
    from penstock.inspection.dump import Dump
    from penstock.verification.bisect.sources import model_trail

    check_cache(arguments.backend or "tvm")
    names = {"frozen": arguments.frozen, "trained": arguments.trained}
    given = _given(arguments, ("dump_ir_filter",)) + (["--dump-ir-changed"] if arguments.dump_ir_changed else [])
    if given:
        raise UsageError(f"{', '.join(given)} with --bisect, which reads whole modules")
    with tempfile.TemporaryDirectory(prefix="penstock-") as scratch:
        folder = Path(arguments.dump_ir or Path(scratch) / "dumps")

        def load() -> api.Model:
            return api.from_onnx(arguments.model, dims=dims_of(arguments.dim), known=known_of(arguments.known), **names)

        with model_trail(
            arguments.model, lambda: plan_of(arguments, Dump(folder)), load, folder, arguments.backend
        ) as trail:
            yield trail


__all__ = ["verify_command"]
