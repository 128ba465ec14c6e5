"""Checks of a run before it starts: every failure that can be known then is refused.

In: options, the bundle's module, the place of this process in a group. Out: one UsageError with all problems. Places to
write to are tried without leaving a trace.
"""

from __future__ import annotations

import os
from dataclasses import fields

from penstock.backends.bundle.format import Bundle
from penstock.ir.graph import NORM, Module
from penstock.runtime.data.samples import data_spec
from penstock.runtime.group.hosts import in_group, place_of
from penstock.runtime.group.trust import trust_problems
from penstock.runtime.messages.control import DataSpec, SaveCommand
from penstock.runtime.telemetry.sinks import sink_problems
from penstock.runtime.worker.pace import pace_problems
from penstock.support.errors import UsageError
from penstock.support.paths import directory_problem, file_problem, is_inside, name_problem
from penstock.support.settings import flags_of, problems_of, settings_of
from penstock.support.words import visible

from .options import JobOptions, OpenOptions, RunOptions


def check_run(options: RunOptions) -> None:
    """Refuse a run whose options cannot be carried out."""
    problems = problems_of(options) + _group_problems(options) + _path_problems(options) + _name_problems(options)
    # Rank 0 writes them, and other hosts need no packages for it.
    problems += sink_problems(options.log) if not in_group() or place_of().rank == 0 else []
    if problems:
        raise UsageError("; ".join(problems), where="run")


def check_job(options: JobOptions, bundle: Bundle) -> None:
    """Refuse a job whose options cannot be carried out."""
    check_names(bundle.path, *([] if options.resume is None else [options.resume]))
    problems = problems_of(options) + _guard_problems(options.nan, bundle.module)
    stages = len(bundle.module.stages)
    if problems := problems + list(pace_problems(options.pace or {}, stages, options.latency, options.timeout)):
        raise UsageError("; ".join(problems))


def check_names(*paths: str | os.PathLike[str]) -> None:
    """Refuse paths that ranks cannot be told."""
    for path in paths:
        if problem := name_problem(os.path.abspath(path)):
            raise UsageError(problem, where=visible(os.fspath(path)))


def job_options(options: OpenOptions) -> JobOptions:
    """Return the options of a job, its sources of samples by absolute paths."""
    shared = {field.name: getattr(options, field.name) for field in fields(JobOptions) if hasattr(options, field.name)}
    sources = {
        "data": None if options.data is None else data_spec(options.data, options.shuffle, options.seed, options.last),
        "evaluation": None if options.eval_data is None else data_spec(options.eval_data, False, 0),
    }
    return JobOptions(**shared | sources)


def training_data(options: RunOptions) -> DataSpec:
    """Return the samples that a run trains on."""
    return DataSpec(options.data, options.shuffle, options.seed, options.last)


def evaluation_data(options: RunOptions) -> DataSpec | None:
    """Return the samples that a run evaluates on: each once, in order."""
    return None if options.eval_data is None else DataSpec(options.eval_data)


def save_after(options: RunOptions, step: int, end: int) -> SaveCommand:
    """Return the save of a step; the last one is waited for."""
    assert options.checkpoint is not None
    return SaveCommand(options.checkpoint, step, step < end and not options.checkpoint_wait, options.keep_last)


def _guard_problems(policy: str, module: Module) -> list[str]:
    guarded = any(value.name == NORM for graph in module.graphs.values() for op in graph.ops for value in op.outs)
    what = "--nan skip: the bundle leaves no update out; compile it with --skip-nonfinite, --clip or --precision f16"
    return [] if policy != "skip" or guarded else [what]


def _group_problems(options: RunOptions) -> list[str]:
    """List the options that need a group, or that a group's launcher takes the place of."""
    problems = []
    if options.max_restarts and in_group():
        problems.append("--max-restarts is for local runs; here the launcher starts again (torchrun --max-restarts)")
    for flag, path in (("--secret", options.secret), ("--tls", options.tls)):
        if path is not None and not in_group():
            problems.append(
                f"{flag} is for groups that a launcher starts; ranks of a local run are reached over "
                "inherited connections"
            )
    problems += trust_problems(options.secret, options.tls)
    if options.elastic and not options.max_restarts and not in_group():
        problems.append(
            "--elastic needs --max-restarts N: a device is given up when a start after a failure fails on it, too"
        )
    return problems


def _name_problems(options: RunOptions) -> list[str]:
    """List the paths that ranks, files and messages cannot name."""
    names = ("bundle", "data", "eval_data", "checkpoint", "resume")
    paths = {name: getattr(options, name) for name in names if getattr(options, name) is not None}
    described = settings_of(RunOptions)
    shown = {name: flags_of(name, described[name])[0] + " " if name in described else "" for name in paths}
    return [
        f"{shown[name]}{visible(path)}: {problem}" for name, path in paths.items() if (problem := name_problem(path))
    ]


def _path_problems(options: RunOptions) -> list[str]:
    problems = []
    # Other ranks of a group may run on hosts where the files of rank 0 have no place.
    files = {"--metrics": options.metrics, "--trace": options.trace} if not in_group() or place_of().rank == 0 else {}
    named = {flag: path for flag, path in (files | {"--checkpoint": options.checkpoint}).items() if path is not None}
    for flag, path in named.items():
        problem = directory_problem(path) if flag == "--checkpoint" else file_problem(path)
        if is_inside(path, options.bundle):
            problem = "lies in the bundle, which holds nothing but what its manifest lists"
        if problem:
            problems.append(f"{flag} {path}: {problem}")
    for flag in files.keys() & named.keys():
        inside = [f"{other} {path}" for other, path in named.items() if other != flag and is_inside(path, named[flag])]
        problems += [f"{flag} {named[flag]} cannot be a file and the place of {other}" for other in inside]
    return sorted(problems)
