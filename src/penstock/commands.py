"""What each command does. A command takes its parsed arguments and gives an exit code (None is 0)."""

from __future__ import annotations

import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Mapping
from contextlib import closing, suppress
from dataclasses import fields, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

import numpy as np

from penstock.backends.registry import check_cache
from penstock.diagnosis import doctor_command as doctor_command
from penstock.inspection.command import diff_command as diff_command
from penstock.inspection.command import inspect_command as inspect_command
from penstock.inspection.subject import load_module
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.files import verify_read
from penstock.ir.text import print_module
from penstock.simulating import simulate_command as simulate_command
from penstock.support.errors import DoesNotFit, PenstockError, UsageError
from penstock.support.terminal import Progress, say
from penstock.verifying import verify_command as verify_command

if TYPE_CHECKING:
    from penstock.api import Plan
    from penstock.frontends.training import Training
    from penstock.inspection.dump import Dump
    from penstock.planning import Load

# ------------------------------------------------------------------------------------------------ plan and compile


def plan_command(arguments: Namespace) -> None:
    from penstock.arguing import as_json, print_argument
    from penstock.placing import check_plan_arguments, plan_workload

    if arguments.grade is not None:
        from penstock.grading import grade_command

        grade_command(arguments)
        return
    if arguments.trace is not None:
        raise UsageError("--trace without --grade", hint="`penstock run --trace` writes one")
    check_plan_arguments(arguments)
    if arguments.workload is not None:
        plan_workload(arguments)
        return
    dump = dump_of(arguments)
    found = plan_of(arguments, dump)
    if dump is not None:
        dump.report(found.module, found.as_dict(), found.predicted)
    if arguments.json:
        print(as_json(found))
    else:
        print_argument(found)


def compile_command(arguments: Namespace) -> None:
    from penstock import api
    from penstock.arguing import print_plan
    from penstock.backends.bundle.writer import check_replaceable

    check_replaceable(Path(arguments.out))
    check_cache(arguments.backend)
    dump = dump_of(arguments)
    found = plan_of(arguments, dump)
    progress = Progress("compile")
    path = api.compile(
        found,
        arguments.out,
        backend=arguments.backend,
        target=arguments.target,
        jobs=arguments.jobs,
        dump=dump,
        progress=progress,
    )
    print_plan(found)
    say(f"wrote {path}")
    if arguments.dump_ir:
        say(f"dumps are in {arguments.dump_ir}")


def plan_of(arguments: Namespace, dump: Dump | None) -> Plan:
    """The plan of a model, as the arguments of `plan` and `compile` ask for it."""
    with closing(Progress("passes")) as progress:
        return _asked_for(arguments, dump, progress)


def _asked_for(arguments: Namespace, dump: Dump | None, progress: Progress) -> Plan:
    from penstock import api

    training = _training(arguments)
    if arguments.cluster:
        cluster = Cluster.load(arguments.cluster)
    elif isinstance(arguments.devices, str):
        cluster = Cluster.listed(arguments.devices)
    else:
        cluster = Cluster.local(arguments.devices or (arguments.stages or 1) * (arguments.replicas or 1))
    dims = dims_of(arguments.dim)
    options: dict[str, Any] = {"cuda_libraries": arguments.cuda_libraries, "progress": progress, "dump": dump}
    if arguments.wire is not None:
        options["wire"] = arguments.wire
    batch_dim = _batch_dimension(arguments, dims)
    load = _loader(arguments, dims, batch_dim, dump)
    if arguments.batch is not None:
        return _best(arguments, load, cluster, training, batch_dim is not None, options)
    if arguments.plan is not None:
        return _planned(arguments, load, cluster, training, batch_dim, options)
    if arguments.schedule == "auto":
        raise UsageError(
            "--schedule auto leaves it to the planner, which needs to know the samples of a batch", hint="add --batch"
        )
    model = load(None)
    for line in model.imported.report:
        say(line)
    return api.plan(
        model,
        cluster,
        training,
        schedule=arguments.schedule or "1f1b",
        stages=arguments.stages,
        split_at=arguments.split_at,
        microbatches=arguments.microbatches or 1,
        replicas=arguments.replicas or 1,
        recompute=arguments.recompute or "auto",
        precision=arguments.precision,
        hints=arguments.hints == "use",
        **options,
    )


def _loader(arguments: Namespace, dims: Mapping[str, int], batch_dim: str | None, dump: Dump | None) -> Load:
    """Imports the model at any size of a microbatch, where that is not given."""
    from penstock import api
    from penstock.inspection.dump import step_of

    def load(size: int | None) -> api.Model:
        own = dims if size is None or batch_dim is None else {**dims, batch_dim: size}
        with step_of(dump, "import") as said:
            model = api.from_onnx(
                arguments.model,
                dims=own,
                known=known_of(arguments.known),
                frozen=arguments.frozen,
                trained=arguments.trained,
            )
            said += model.imported.report
        return model

    return load


def _planned(
    arguments: Namespace,
    load: Load,
    cluster: Cluster,
    training: Training | None,
    batch_dim: str | None,
    options: dict[str, Any],
) -> Plan:
    """What a plan file says."""
    from penstock import api
    from penstock.ir.batch_shares import microbatch_size
    from penstock.passes.schedules.schedule import SCHEDULES
    from penstock.plan_file import load_plan_file

    fixed = ("batch", "stages", "microbatches", "split_at", "replicas", "schedule", "recompute")
    given = [f"--{name.replace('_', '-')}" for name in fixed if getattr(arguments, name)]
    if given:
        raise UsageError(
            f"{', '.join(given)} with --plan: the file says that", where=arguments.plan, hint="edit the file"
        )
    asked, samples = load_plan_file(arguments.plan, [device.name for device in cluster.devices])
    if arguments.precision is not None and asked.setdefault("precision", arguments.precision) != arguments.precision:
        raise UsageError(
            f"--precision {arguments.precision}, but the plan is in {asked['precision']}", where=arguments.plan
        )
    if options.get("wire", wire := asked.setdefault("wire", options.get("wire", "f32"))) != wire:
        raise UsageError(f"--wire {options['wire']}, but values travel as {wire} in the plan", where=arguments.plan)
    if SCHEDULES[asked["schedule"]].trains != (training is not None):
        what = "is for training, but there is no loss" if training is None else "is for inference, but there is a loss"
        raise UsageError(f"schedule {asked['schedule']} {what}", where=arguments.plan)
    model = load(samples if batch_dim is not None else None)
    found = microbatch_size(model.module)
    if samples not in (None, found):
        raise UsageError(
            f"the plan is for microbatches of {samples} samples, the model's are of {found}", where=arguments.plan
        )
    for line in model.imported.report:
        say(line)
    if training is not None:
        training = replace(training, microbatches=asked["microbatches"])
    return api.plan(model, cluster, training, **(options | asked), hints=False)


def _batch_dimension(arguments: Namespace, dims: dict[str, int]) -> str | None:
    """The symbolic dimension that samples are counted along, where the planner may choose how many make a microbatch."""
    from penstock.frontends.onnx import open_dimensions

    if arguments.batch is None and arguments.plan is None:
        return None
    first, others = open_dimensions(arguments.model, dims, known_of(arguments.known))
    return first if first is not None and not others else None


def _best(
    arguments: Namespace, load: Load, cluster: Cluster, training: Training | None, free: bool, options: dict[str, Any]
) -> Plan:
    """What the planner chooses for batches of `--batch` samples."""
    from penstock.ir.schedule_names import TRAINING
    from penstock.passes.schedules.schedule import SYNCHRONOUS
    from penstock.planning import other_sizes, plan_best, sizes_of

    if training is None:
        raise UsageError("--batch plans for training", hint="add --loss, or leave --batch out for an inference plan")
    fixed = {"--stages": arguments.stages, "--microbatches": arguments.microbatches, "--split-at": arguments.split_at}
    given = [flag for flag, value in fixed.items() if value]
    if given:
        raise UsageError(
            f"{', '.join(given)} with --batch: the planner chooses that",
            hint="leave out one or the other; --dim beside --batch gives the size of a microbatch",
        )
    schedules = {None: SYNCHRONOUS, "auto": TRAINING}.get(arguments.schedule, (arguments.schedule,))
    asked: dict[str, Any] = {
        "batch": arguments.batch,
        "schedules": schedules,
        "recompute": arguments.recompute or "auto",
    }
    asked |= {"replicas": arguments.replicas, "precision": arguments.precision}
    try:
        plan = plan_best(
            load, cluster, training, sizes=sizes_of(arguments.batch, None) if free else (None,), **asked, **options
        )
    except DoesNotFit as error:
        others = other_sizes(arguments.batch) if free else ()
        found = None
        if others:
            say(
                f"no plan fits with the sizes of microbatches that were tried first; trying {', '.join(map(str, others))}"
            )
            with suppress(DoesNotFit):
                found = plan_best(load, cluster, training, sizes=others, explained=False, **asked, **options)
        elif not free and (smaller := _smaller_size(arguments, cluster, training, asked, options)):
            error.hint = f"{smaller}, smaller microbatches, for which there is a plan; or {error.hint}"
        if found is None:
            raise
        plan = found
    for line in plan.model.imported.report:
        say(line)
    return plan


def _smaller_size(
    arguments: Namespace, cluster: Cluster, training: Training, asked: Mapping[str, Any], options: Mapping[str, Any]
) -> str:
    """The option for smaller microbatches that there is a plan for, where an option gave their size; else nothing."""
    from penstock.planning import plan_best, sizes_of

    dims = dims_of(arguments.dim)
    for name, given in dims.items():
        others = {other: size for other, size in dims.items() if other != name}
        sizes = [size for size in sizes_of(given, None) if size < given]
        if not sizes or _batch_dimension(arguments, others) != name:
            continue
        try:
            quiet = {**options, "progress": None, "dump": None}
            found = plan_best(
                _loader(arguments, others, name, None),
                cluster,
                training,
                sizes=sizes,
                explained=False,
                **asked,
                **quiet,
            )
        except PenstockError:
            return ""  # nothing is proposed that has not been planned; the error that is being told is of what was asked for
        assert found.search is not None
        return f"--dim {name}={found.search.chosen.plan.size}"
    return ""


def dims_of(words: Iterable[str]) -> dict[str, int]:
    dims: dict[str, int] = {}
    for word in words:
        name, equals, number = word.partition("=")
        if not equals or not (number.isascii() and number.isdecimal()) or not 1 <= int(number) < 2**31:
            raise UsageError(
                f"bad --dim {word!r}, expected NAME=INT with a number from 1 to {2**31 - 1}, e.g. --dim batch=4"
            )
        dims[name] = int(number)
    return dims


def known_of(words: Iterable[str]) -> dict[str, object]:
    """Values of inputs: numbers between commas, or the path of an array file."""
    found: dict[str, object] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not name or not equals:
            raise UsageError(f"bad --known {word!r}, expected NAME=NUMBERS or NAME=FILE.npy, e.g. --known axes=0,1")
        if text.endswith(".npy"):
            try:
                found[name] = np.load(text, allow_pickle=False)
            except (OSError, ValueError) as error:
                raise UsageError(f"--known {name}: {text} cannot be read: {error}") from error
            continue
        try:
            found[name] = [_number(part.strip()) for part in text.split(",")] if text else []
        except ValueError:
            raise UsageError(
                f"bad --known {word!r}: {text!r} is neither numbers between commas nor the path of a .npy file"
            ) from None
    return found


def _number(text: str) -> bool | int | float:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else float(text)


def _training(arguments: Namespace) -> Training | None:
    """The training settings of the flags on top of those of the file."""
    from penstock.frontends.training import Training, load_training
    from penstock.ir.training.optimizers import optimizer_of, parse_groups
    from penstock.ir.training.rates import parse_rate

    settings = load_training(arguments.train, arguments.loss) if arguments.train else None
    if settings is None and arguments.loss is None:
        flags = {
            "--optimizer": arguments.optimizer,
            "--lr": arguments.lr,
            "--weight-decay": arguments.weight_decay,
            "--lr-schedule": arguments.lr_schedule,
            "--group": arguments.group or None,
            "--clip": arguments.clip,
            "--skip-nonfinite": arguments.skip_nonfinite,
            "--schedule": arguments.schedule,
            "--recompute": arguments.recompute,
        }
        given = [flag for flag, value in flags.items() if value is not None]
        if given:
            raise UsageError(
                f"{', '.join(given)} without a loss to train on",
                hint="add --loss, or --train with a file that names one",
            )
        return None
    optimizer = settings.optimizer if settings is not None else None
    if arguments.optimizer or arguments.lr is not None or arguments.weight_decay is not None:
        own = {"lr": arguments.lr, "weight_decay": arguments.weight_decay}
        changes = {k: v for k, v in own.items() if v is not None}
        if arguments.optimizer or optimizer is None:
            optimizer = optimizer_of(arguments.optimizer or "sgd", **changes)
        else:
            optimizer = replace(optimizer, **changes)
    settings = settings or Training(loss=arguments.loss)
    if optimizer is not None:
        settings = replace(settings, optimizer=optimizer)
    if arguments.lr_schedule is not None:
        settings = replace(settings, rate=parse_rate(arguments.lr_schedule))
    if arguments.group:
        settings = replace(settings, groups=(*parse_groups(arguments.group), *settings.groups))
    asked = {"clip": arguments.clip, "skip_nonfinite": arguments.skip_nonfinite}
    settings = replace(settings, **{k: v for k, v in asked.items() if v is not None})
    if arguments.microbatches is not None:
        settings = replace(settings, microbatches=arguments.microbatches)
    return settings


# ------------------------------------------------------------------------------------------------ run and demo


def run_command(arguments: Namespace) -> None:
    from penstock.runtime.job.run import run_bundle

    run_bundle(
        arguments.bundle,
        data=arguments.data,
        steps=arguments.steps,
        shuffle=arguments.shuffle,
        seed=arguments.seed,
        last=arguments.last_batch,
        eval_data=arguments.eval_data,
        eval_every=arguments.eval_every,
        metrics=arguments.metrics,
        lr=arguments.lr,
        rate=arguments.lr_schedule,
        checkpoint=arguments.checkpoint,
        checkpoint_every=arguments.checkpoint_every,
        checkpoint_wait=arguments.checkpoint_wait,
        keep_last=arguments.keep_last,
        resume=arguments.resume,
        timeout=arguments.timeout,
        heartbeat=arguments.heartbeat,
        nan=arguments.nan,
        max_restarts=arguments.max_restarts,
        elastic=arguments.elastic,
        log=arguments.log,
        log_ranks=arguments.log_ranks,
        secret=arguments.secret,
        tls=arguments.tls,
        trace=arguments.trace,
    )


def infer_command(arguments: Namespace) -> None:
    from penstock.inferring import InferOptions, infer

    infer(InferOptions(**{field.name: getattr(arguments, field.name) for field in fields(InferOptions)}))


def checkpoint_command(arguments: Namespace) -> None:
    from penstock.keeping import checkpoint_command

    checkpoint_command(arguments)


def export_command(arguments: Namespace) -> None:
    from penstock.inspection.exports.weights import export

    done = export(
        arguments.source, onnx=arguments.onnx, safetensors=arguments.safetensors, checkpoint=arguments.checkpoint
    )
    age = "as compiled" if done.step is None else f"after {done.step} steps"
    say(f"wrote {', '.join(map(str, done.files))}: {done.tensors} tensors {age}")


def sign_command(arguments: Namespace) -> None:
    from penstock.backends.bundle.format import MANIFEST, open_bundle
    from penstock.backends.bundle.signing import check_signature, read_key
    from penstock.backends.bundle.writer import sign_bundle

    key = read_key(arguments.key)
    if arguments.check:
        root = open_bundle(arguments.bundle, unsigned=True).path
        check_signature(root, (root / MANIFEST).read_bytes(), key)
        say(f"{arguments.bundle}: whole, and signed with this key")
    else:
        say(f"wrote {sign_bundle(arguments.bundle, key)}")


def demo_command(arguments: Namespace) -> int:
    from penstock.demo import run_demo

    check_cache(arguments.backend)
    return run_demo(Path(arguments.out), steps=arguments.steps, schedule=arguments.schedule, backend=arguments.backend)


# ------------------------------------------------------------------------------------------------ passes


def dump_of(arguments: Namespace) -> Dump | None:
    """The dump that was asked for."""
    from penstock.inspection.dump import Dump

    if arguments.dump_ir or arguments.dump_ir_changed:
        return Dump(arguments.dump_ir or None, only=arguments.dump_ir_filter, changed=arguments.dump_ir_changed)
    if arguments.dump_ir_filter is not None:
        raise UsageError("--dump-ir-filter without a dump to filter", hint="add --dump-ir DIR, or --dump-ir-changed")
    return None


def _pipeline_of(arguments: Namespace) -> tuple[str, str]:
    """The text of a pipeline, and where it is from: the command line, or a file."""
    path = arguments.pipeline or (arguments.passes[1:] if arguments.passes.startswith("@") else None)
    if path is None:
        return arguments.passes, "-p"
    try:
        return Path(path).read_text(encoding="utf-8"), path
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot be read: {error}", where=path, hint="expected a file with a pipeline") from error


def opt_command(arguments: Namespace) -> None:
    from penstock.inspection.dump.program import dump_program
    from penstock.passes.manager import parse_pipeline, run_passes
    from penstock.passes.pipelines import PASSES

    text, where = _pipeline_of(arguments)
    calls = parse_pipeline(text, PASSES, where)
    before = load_module(arguments.file)
    if arguments.dump_ir and Path(arguments.file).resolve().parent == Path(arguments.dump_ir).resolve():
        raise UsageError(
            f"{arguments.file} lies in it, and a dump may take its place", where="--dump-ir", hint="give another folder"
        )
    verify_read(before, arguments.file)
    dump = dump_of(arguments)
    module = run_passes(before, calls, PASSES, dump=dump)
    if dump is not None:
        dump_program(dump, module)
        dump.report(module)
    text = print_module(module)
    if arguments.out:
        Path(arguments.out).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


def passes_command(arguments: Namespace) -> None:
    from penstock.inspection.reference.passes import passes_command

    passes_command(arguments)


def ops_command(arguments: Namespace) -> None:
    from penstock.inspection.reference.ops import ops_command

    ops_command(arguments)


def completion_command(arguments: Namespace) -> None:
    from penstock.inspection.reference.completion import completion_command

    completion_command(arguments)


__all__ = [name for name in dir() if name.endswith("_command")] + ["load_module"]
