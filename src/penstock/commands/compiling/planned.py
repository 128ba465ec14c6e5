"""The plan that arguments ask for, as `plan`, `compile` and `verify --bisect` make it."""

from __future__ import annotations

from argparse import Namespace
from contextlib import closing
from dataclasses import replace
from math import prod
from typing import TYPE_CHECKING, Any

from penstock.commands.arguments import bounded_dims_of, known_of, settings_from
from penstock.ir.schedule_names import ALL_SYNCHRONOUS, PACKED, TRAINING
from penstock.planning.options import (
    FOLDER_PREFIX,
    GenerationSettings,
    PlanOptions,
    ReadingOptions,
    SearchOptions,
    TrainingOptions,
)
from penstock.support.errors import UsageError
from penstock.support.settings import given
from penstock.support.terminal import Progress, say

if TYPE_CHECKING:
    from penstock.frontends.training import Training
    from penstock.inspection.dump import Dump
    from penstock.ir.cluster.cluster import Cluster
    from penstock.ir.training.optimizers import Optimizer
    from penstock.planning.model import Model, ModelFile
    from penstock.planning.plan import Plan
    from penstock.planning.watching import Feedback


def plan_of(arguments: Namespace, dump: Dump | None) -> Plan:
    """Plan a model as the arguments of `plan` and `compile` ask for it."""
    from penstock.planning.watching import Feedback  # lazy: heavy

    with closing(Progress("passes")) as progress:
        return _planned(arguments, Feedback(dump, progress, say))


def _planned(arguments: Namespace, feedback: Feedback) -> Plan:
    from penstock.planning.model import ModelFile  # lazy: heavy
    from penstock.planning.objectives.choose import plan_for_objective  # lazy: heavy

    training, cluster = training_of(arguments), _cluster(arguments)
    reading = settings_from(ReadingOptions, arguments)
    if arguments.model.startswith(FOLDER_PREFIX) or getattr(arguments, "generate", False):
        return _of_decoder(arguments, reading, cluster, training, feedback)
    source = ModelFile(
        arguments.model, bounded_dims_of(reading.dim), known_of(reading.known), reading.frozen, reading.trained
    )
    bounded = [f"--dim '{name}{size}'" for name, size in source.dims.items() if not isinstance(size, int)]
    if bounded and (arguments.batch is not None or arguments.plan is not None):
        flag = "--batch" if arguments.batch is not None else "--plan"
        raise UsageError(
            f"{', '.join(bounded)} with {flag}: bounds are for inference without a plan", hint="leave one out"
        )
    if arguments.objective and (arguments.batch is not None or arguments.plan is not None):
        flag = "--batch" if arguments.batch is not None else "--plan"
        raise UsageError(f"--objective with {flag}: objectives are for inference without a plan", hint="leave one out")
    if arguments.batch is not None:
        plan = _searched(arguments, source, cluster, training, feedback)
        _report(plan.model)
        return plan
    if arguments.plan is not None:
        return _from_file(arguments, source, cluster, training, feedback)
    if arguments.schedule == "auto":
        raise UsageError(
            "--schedule auto leaves it to the planner, which needs to know the samples of a batch", hint="add --batch"
        )
    model = source.loader(feedback)(None)
    _report(model)
    options = settings_from(PlanOptions, arguments)
    devices_settings = (
        arguments.cluster,
        arguments.devices,
        arguments.replicas,
        options.mesh,
        options.shard,
        options.stages,
        options.objective,
    )
    if options.hints and not any(devices_settings):
        cluster = _of_model(model, cluster)
    return plan_for_objective(model, _measured(arguments, cluster), training, options, feedback)


def _of_decoder(
    arguments: Namespace, reading: ReadingOptions, cluster: Cluster, training: Training | None, feedback: Feedback
) -> Plan:
    """Plan a decoder: a folder of Hugging Face, or an ONNX file."""
    from penstock.planning.decoding.folder import load_decoder, plan_decoder  # lazy: heavy
    from penstock.planning.decoding.onnx_file import load_onnx_decoder  # lazy: heavy

    settings = settings_from(GenerationSettings, arguments)
    problems = []
    if not settings.generate:
        problems.append("a folder of Hugging Face is compiled to generate text: add --generate")
    if training is not None or arguments.batch is not None:
        problems.append("a decoder is not trained: leave out --loss, --train and --batch")
    if arguments.objective:
        problems.append("text is generated on one device: leave out --objective")
    if len(cluster.devices) > 1 or arguments.plan is not None:
        problems.append("text is generated on one device: leave out --devices, --stages, --mesh and --plan")
    if flags := given(reading):
        problems.append(f"sizes of a decoder follow from --context and --sequences: leave out {', '.join(flags)}")
    if problems:
        raise UsageError("; ".join(problems), where=arguments.model)
    load = load_decoder if arguments.model.startswith(FOLDER_PREFIX) else load_onnx_decoder
    models = load(arguments.model, settings, feedback)
    _report(models[max(models)])
    return plan_decoder(models, _measured(arguments, cluster), settings_from(PlanOptions, arguments), feedback)


def _of_model(model: Model, cluster: Cluster) -> Cluster:
    """Return as many local devices as the first configuration of the model splits tensors over, if there is one."""
    sizes = [configuration.devices for configuration in model.imported.hints.configurations.values()]
    return type(cluster).local(sizes[0]) if sizes else cluster


def _report(model: Model) -> None:
    for line in model.imported.report:
        say(line)


def _cluster(arguments: Namespace) -> Cluster:
    from penstock.ir.cluster.cluster import Cluster  # lazy: heavy

    if arguments.cluster:
        return Cluster.load(arguments.cluster)
    if isinstance(arguments.devices, str):
        return Cluster.listed(arguments.devices)
    from penstock.passes.sharding.given import stage_meshes  # lazy: heavy

    widths = [prod(mesh.values()) for mesh in stage_meshes(arguments.mesh)] if arguments.mesh else []
    if len(widths) > 1:
        return Cluster.local(arguments.devices or sum(widths))
    of_stage = widths[0] if widths else arguments.replicas or 1
    return Cluster.local(arguments.devices or (arguments.stages or 1) * of_stage)


def _measured(arguments: Namespace, cluster: Cluster) -> Cluster:
    """Return the cluster with measured rates where no file has any. It takes seconds, so errors of the arguments and of
    the model's file are told before; of what is imported only afterwards (--batch), those of its dimensions."""
    from penstock.doctor.local import measured_cluster  # lazy: heavy
    from penstock.planning.pipeline import space_of  # lazy: heavy

    if arguments.cluster:
        return cluster
    cluster, space = measured_cluster(cluster, say), space_of(arguments.spill or "")
    if arguments.offload in (None, "none") or space is None or all(d.kind != "cpu" for d in cluster.devices):
        return cluster
    from penstock.doctor.ways import with_measured_way  # lazy: heavy

    return with_measured_way(cluster, space, say)


def _searched(
    arguments: Namespace, source: ModelFile, cluster: Cluster, training: Training | None, feedback: Feedback
) -> Plan:
    """Choose a plan by the planner for batches of `--batch` samples."""
    from penstock.planning.search import search_file  # lazy: heavy

    source.check()
    if training is None:
        raise UsageError("--batch plans for training", hint="add --loss, or leave --batch out for an inference plan")
    fixed = {
        "--stages": arguments.stages,
        "--packs": arguments.packs,
        "--microbatches": arguments.microbatches,
        "--split-at": arguments.split_at,
        "--split-by": arguments.split_by,
        "--pin": arguments.pin,
    }
    flags = [flag for flag, value in fixed.items() if value]
    if flags:
        raise UsageError(
            f"{', '.join(flags)} with --batch: the planner chooses that",
            hint="leave out one or the other; --dim beside --batch gives the size of a microbatch",
        )
    kinds = {None: ALL_SYNCHRONOUS, "auto": (*TRAINING, *PACKED)}
    schedules = kinds.get(arguments.schedule, (arguments.schedule,))
    settings = settings_from(SearchOptions, arguments, schedules=schedules)
    return search_file(source, _measured(arguments, cluster), training, settings, feedback)


def _from_file(
    arguments: Namespace, source: ModelFile, cluster: Cluster, training: Training | None, feedback: Feedback
) -> Plan:
    """Execute the plan of a file."""
    from penstock.ir.batch_shares import microbatch_size  # lazy: heavy
    from penstock.passes.schedules.schedule import SCHEDULES as KINDS  # lazy: heavy
    from penstock.planning.pipeline import plan_model  # lazy: heavy
    from penstock.planning.plan_file import load_plan_file  # lazy: heavy

    source.check()
    fixed = (
        "batch",
        "stages",
        "packs",
        "offload",
        "spill",
        "update_on",
        "microbatches",
        "split_at",
        "split_by",
        "pin",
        "replicas",
        "schedule",
        "recompute",
        "mesh",
        "shard",
        "zero",
    )
    flags = [f"--{name.replace('_', '-')}" for name in fixed if getattr(arguments, name)]
    if flags:
        raise UsageError(
            f"{', '.join(flags)} with --plan: the file says that", where=arguments.plan, hint="edit the file"
        )
    settings, samples = load_plan_file(arguments.plan, [device.name for device in cluster.devices])
    options = replace(settings_from(PlanOptions, arguments), **settings, hints=False)
    if arguments.precision not in (None, options.precision):
        raise UsageError(
            f"--precision {arguments.precision}, but the plan is in {options.precision}", where=arguments.plan
        )
    if arguments.wire not in (None, options.wire):
        raise UsageError(
            f"--wire {arguments.wire}, but values travel as {options.wire} in the plan", where=arguments.plan
        )
    trains = options.schedule in PACKED or KINDS[options.schedule].trains
    if trains != (training is not None):
        what = "is for training, but there is no loss" if training is None else "is for inference, but there is a loss"
        raise UsageError(f"schedule {options.schedule} {what}", where=arguments.plan)
    model = source.loader(feedback)(samples)
    size = microbatch_size(model.module)
    if samples not in (None, size):
        raise UsageError(
            f"the plan is for microbatches of {samples} samples, the model's are of {size}", where=arguments.plan
        )
    _report(model)
    if training is not None:
        training = replace(training, microbatches=options.microbatches)
    return plan_model(model, _measured(arguments, cluster), training, options, feedback)


# ------------------------------------------------------------------------------------------------ training


def training_of(arguments: Namespace) -> Training | None:
    """Read the training settings of the flags on top of those of the file."""
    from penstock.frontends.training import Training, load_training  # lazy: heavy
    from penstock.ir.training.optimizers import parse_groups  # lazy: heavy
    from penstock.ir.training.rates import parse_rate  # lazy: heavy

    options = settings_from(TrainingOptions, arguments)
    settings = load_training(options.train, options.loss) if options.train else None
    if settings is None:
        if options.loss is None:
            _refuse_without_loss(arguments, options)
            return None
        settings = Training(loss=options.loss)
    if (optimizer := _optimizer(options, settings.optimizer if options.train else None)) is not None:
        settings = replace(settings, optimizer=optimizer)
    if options.lr_schedule is not None:
        settings = replace(settings, rate=parse_rate(options.lr_schedule))
    if options.group:
        settings = replace(settings, groups=(*parse_groups(options.group), *settings.groups))
    if options.clip is not None:
        settings = replace(settings, clip=options.clip)
    if options.skip_nonfinite:
        settings = replace(settings, skip_nonfinite=True)
    if arguments.microbatches is not None:
        settings = replace(settings, microbatches=arguments.microbatches)
    return settings


def _refuse_without_loss(arguments: Namespace, options: TrainingOptions) -> None:
    stray = given(options)
    stray += [f"--{name}" for name in ("schedule", "recompute") if getattr(arguments, name) is not None]
    if stray:
        raise UsageError(
            f"{', '.join(stray)} without a loss to train on", hint="add --loss, or --train with a file that names one"
        )


def _optimizer(options: TrainingOptions, settings: Optimizer | None) -> Optimizer | None:
    """Return the optimiser of the flags on top of that of a file."""
    from penstock.ir.training.optimizers import optimizer_of  # lazy: heavy

    flags = {"lr": options.lr, "weight_decay": options.weight_decay}
    changes: dict[str, Any] = {name: value for name, value in flags.items() if value is not None}
    if not options.optimizer and not changes:
        return settings
    if options.optimizer or settings is None:
        return optimizer_of(options.optimizer or "sgd", **changes)
    return replace(settings, **changes)
