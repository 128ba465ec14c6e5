"""What each command does. A command takes its parsed arguments and gives an exit code (None is 0)."""

from __future__ import annotations

import difflib
import re
import sys
from argparse import Namespace
from collections.abc import Iterable, Iterator
from dataclasses import MISSING, fields, replace
from pathlib import Path
from typing import TYPE_CHECKING

import numpy as np

from penstock.ir.cluster import Cluster
from penstock.ir.errors import UsageError
from penstock.ir.graph import GRAD, PARAM, Module
from penstock.ir.schedule import PER_BATCH
from penstock.ir.text import parse_module, print_graph, print_literal, print_module, print_op
from penstock.terminal import Progress, say, size, table, terminal_width

if TYPE_CHECKING:
    from penstock.api import Plan
    from penstock.frontends.training import Training

# ------------------------------------------------------------------------------------------------ plan and compile


def plan_command(arguments: Namespace) -> None:
    found = _plan(arguments)
    if arguments.json:
        print(found.to_json())
    else:
        print_plan(found)


def compile_command(arguments: Namespace) -> None:
    from penstock import api
    from penstock.backends.bundle import check_replaceable

    check_replaceable(Path(arguments.out))
    _check_cache(arguments.backend)
    found = _plan(arguments)
    progress = Progress("compile")
    path = api.compile(
        found,
        arguments.out,
        backend=arguments.backend,
        target=arguments.target,
        jobs=arguments.jobs,
        dump_dir=arguments.dump_ir,
        progress=progress,
    )
    print_plan(found)
    say(f"wrote {path}")
    if arguments.dump_ir:
        say(f"dumps are in {arguments.dump_ir}")


def _check_cache(backend: str) -> None:
    """The settings of the cache, where the back end has one: now, because compiling reads them when much of the work is done."""
    if backend == "tvm":
        from penstock.backends.tvm.store import cache_bound

        cache_bound()


def _plan(arguments: Namespace) -> Plan:
    from penstock import api
    from penstock.passes.manager import Dump

    training = _training(arguments)
    if arguments.cluster:
        cluster = Cluster.load(arguments.cluster)
    elif isinstance(arguments.devices, str):
        cluster = Cluster.listed(arguments.devices)
    else:
        cluster = Cluster.local(arguments.devices or arguments.stages or 1)
    names = {"frozen": arguments.frozen, "trained": arguments.trained}
    model = api.from_onnx(arguments.model, dims=_dims(arguments.dim), known=_known(arguments.known), **names)
    for line in model.imported.report:
        say(line)
    dump = Dump(arguments.dump_ir) if arguments.dump_ir else None
    return api.plan(
        model,
        cluster,
        training,
        schedule=arguments.schedule or "1f1b",
        stages=arguments.stages,
        split_at=arguments.split_at,
        microbatches=arguments.microbatches or 1,
        recompute=arguments.recompute or "auto",
        cuda_libraries=arguments.cuda_libraries,
        precision=arguments.precision,
        hints=arguments.hints == "use",
        dump=dump,
        progress=Progress("passes"),
    )


def _dims(words: Iterable[str]) -> dict[str, int]:
    dims: dict[str, int] = {}
    for word in words:
        name, equals, number = word.partition("=")
        if not equals or not (number.isascii() and number.isdecimal()) or not 1 <= int(number) < 2**31:
            raise UsageError(f"bad --dim {word!r}, expected NAME=INT with a number from 1 to {2**31 - 1}, e.g. --dim batch=4")
        dims[name] = int(number)
    return dims


def _known(words: Iterable[str]) -> dict[str, object]:
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
            raise UsageError(f"bad --known {word!r}: {text!r} is neither numbers between commas nor the path of a .npy file") from None
    return found


def _number(text: str) -> bool | int | float:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else float(text)


def _training(arguments: Namespace) -> Training | None:
    """The training settings of the flags on top of those of the file."""
    from penstock.frontends.training import Training, load_training, optimizer_of
    from penstock.ir.optimizers import parse_groups
    from penstock.ir.rates import parse_rate

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
            raise UsageError(f"{', '.join(given)} without a loss to train on", hint="add --loss, or --train with a file that names one")
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


def print_plan(found: Plan) -> None:
    from penstock.passes.lifetimes import memory_table

    module = found.module
    assert module.schedule is not None
    memory = memory_table(module)
    columns = list(next(iter(memory.values())))
    rows = [[s.index, s.place, *(size(memory[s.index][c]) for c in columns)] for s in module.stages]
    print(f"{module.name}: schedule {module.schedule.name}, {module.schedule.microbatches} microbatches per batch, predicted peak memory")
    print(table(["stage", "device", *columns], rows))
    for note in module.notes:
        if note.origin in ("placement", "partition", "schedule", "recompute"):
            print(f"{note.origin}: {note.text}")


# ------------------------------------------------------------------------------------------------ run and demo


def run_command(arguments: Namespace) -> None:
    from penstock.runtime.job import run_bundle

    run_bundle(
        arguments.bundle,
        data=arguments.data,
        steps=arguments.steps,
        shuffle=arguments.shuffle,
        seed=arguments.seed,
        metrics=arguments.metrics,
        lr=arguments.lr,
        rate=arguments.lr_schedule,
        checkpoint=arguments.checkpoint,
        checkpoint_every=arguments.checkpoint_every,
        resume=arguments.resume,
        timeout=arguments.timeout,
        trace=arguments.trace,
    )


def infer_command(arguments: Namespace) -> None:
    from penstock.runtime.data import read_npz, write_npz
    from penstock.runtime.job import open as open_job
    from penstock.runtime.options import file_problem

    output = Path(arguments.output)
    # Now, because nobody wants to hear of it when the work is done.
    if problem := file_problem(str(output)):
        raise UsageError(f"cannot write the outputs: {problem}", where=arguments.output)
    inputs = read_npz(Path(arguments.input))
    with open_job(arguments.bundle, timeout=arguments.timeout) as job:
        outputs = job.infer(inputs)
    try:
        output.parent.mkdir(parents=True, exist_ok=True)
        with output.open("wb") as file:
            write_npz(file, outputs)
    except OSError as error:
        raise UsageError(f"cannot write the outputs: {error}", where=arguments.output) from error
    for name, array in outputs.items():
        say(f"{name}: {array.dtype} {list(array.shape)}")


def export_command(arguments: Namespace) -> None:
    from penstock.exporting import export

    done = export(arguments.source, onnx=arguments.onnx, safetensors=arguments.safetensors, checkpoint=arguments.checkpoint)
    age = "as compiled" if done.step is None else f"after {done.step} steps"
    say(f"wrote {', '.join(map(str, done.files))}: {done.tensors} tensors {age}")


def demo_command(arguments: Namespace) -> int:
    from penstock.demo import run_demo

    _check_cache(arguments.backend)
    return run_demo(Path(arguments.out), steps=arguments.steps, schedule=arguments.schedule, backend=arguments.backend)


# ------------------------------------------------------------------------------------------------ looking


def load_module(path: str) -> Module:
    """The module of a bundle directory or of an IR file."""
    if Path(path).is_dir():
        from penstock.backends.bundle import open_bundle

        return open_bundle(path).module
    try:
        text = Path(path).read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise UsageError(f"cannot read {path}: {error}", hint="expected a bundle directory or an IR file") from error
    return parse_module(text, path)


def inspect_command(arguments: Namespace) -> None:
    if arguments.json and not (arguments.kernels or arguments.measure):
        raise UsageError("--json is for --kernels", hint="add --kernels")
    module = load_module(arguments.file)
    shown = False
    if arguments.graph:
        graph = module.graphs.get(arguments.graph)
        if graph is None:
            raise UsageError(f"no graph {arguments.graph!r}", hint=f"there are {', '.join(module.graphs)}")
        print("\n".join(print_graph(graph)))
        shown = True
    if arguments.op:
        _print_matching(module, arguments.op)
        shown = True
    if arguments.schedule:
        _print_schedule(module, arguments.batches)
        shown = True
    if arguments.memory:
        _print_memory(module)
        shown = True
    if arguments.params:
        rows = [
            [v.name, v.role, "-" if v.stage is None else v.stage, str(v.type), v.versions, size(v.type.nbytes * v.versions)]
            for v in module.vars.values()
        ]
        print(table(["variable", "role", "stage", "type", "versions", "size"], rows))
        shown = True
    if arguments.kernels or arguments.measure or arguments.source:
        _print_kernels(module, arguments)
        shown = True
    if not shown:
        _print_summary(module)


def _print_kernels(module: Module, arguments: Namespace) -> None:
    from penstock import kernel_report

    rows = kernel_report.kernel_rows(module)
    if arguments.measure:
        from penstock.kernel_timing import check_devices, measure_rows

        backend, threads = _measured_with(arguments.file)
        _check_cache(backend)
        check_devices(rows, module, backend)
        say(f"measuring {len(rows)} kernels on this machine, one by one, back end {backend}, threads: {threads}")
        rows = measure_rows(rows, module, backend, threads, Progress("kernels"))
    if arguments.json:
        print(kernel_report.report_json(rows))
    elif arguments.kernels or arguments.measure:
        print(kernel_report.format_report(rows, module, terminal_width()))
    if arguments.source:
        print(kernel_report.kernel_source(rows, arguments.source))


def _measured_with(path: str) -> tuple[str, int]:
    """The back end of a bundle, and the smallest number of threads any of its ranks has, as this process has one number of them only."""
    if not Path(path).is_dir():
        return "tvm", 1
    from penstock.backends.bundle import open_bundle

    manifest = open_bundle(path).manifest
    return manifest.backend, min(rank.threads for rank in manifest.ranks)


def _print_matching(module: Module, pattern: str) -> None:
    try:
        regex = re.compile(pattern)
    except re.error as error:
        raise UsageError(f"bad pattern {pattern!r}: {error}") from error
    for graph in module.graphs.values():
        for number, op in enumerate(graph.ops):
            text = print_op(op)
            if regex.search(text):
                print(f"@{graph.name} {number}: {text}")


def _print_schedule(module: Module, batches: int) -> None:
    from penstock.ir.simulate import format_grid

    if module.schedule is None:
        raise UsageError("the module has no schedule yet", hint="inspect a dump after the pass `schedule`, or a bundle")
    print(format_grid(module.schedule, batches))
    for rank, actions in module.schedule.expand_all(batches).items():
        print(f"rank {rank}: {' '.join(map(str, actions))}")


def _print_memory(module: Module) -> None:
    from penstock.passes.lifetimes import memory_table

    if module.schedule is None:
        raise UsageError("the module has no schedule yet", hint="inspect a dump after the pass `lifetimes`, or a bundle")
    memory = memory_table(module)
    columns = list(next(iter(memory.values())))
    print(table(["rank", *columns], [[rank, *(size(row[c]) for c in columns)] for rank, row in memory.items()]))


def _print_summary(module: Module) -> None:
    from penstock.backends.bundle import stage_vars

    params = [v for v in module.vars.values() if v.role == PARAM]
    count = sum(v.type.size for v in params)
    print(f"module {module.name}: {len(params)} parameter tensors with {count:,} elements, facts: {', '.join(module.facts) or 'none'}")
    for value in module.inputs:
        print(f"input {value.name}: {value.type}" + ("" if value in module.data_inputs else ", which the runtime gives"))
    for name in module.outputs:
        print(f"output {name}")
    rows = []
    for graph in module.graphs.values():
        kernels = len({op.attrs["kernel"] for op in graph.ops if "kernel" in op.attrs})
        saved = sum(v.type.nbytes for v in graph.saved)
        rows.append([graph.name, len(graph.ops), kernels or "-", len(graph.ins), len(graph.outs), size(saved)])
    print(table(["graph", "ops", "kernels", "inputs", "outputs", "saved"], rows))
    for stage in module.stages:
        own = [v for v in stage_vars(module, stage.index).values() if v.role != GRAD]
        print(f"stage {stage.index} on {stage.place}: {size(sum(v.type.nbytes * v.versions for v in own))} of parameters and state")
    for edge in module.edges:
        unit = "batch" if edge.phase in PER_BATCH else "microbatch"
        values = ", ".join(f"%{v.name} {v.type}" for v in edge.values)
        print(f"edge {edge.src}>{edge.dst} {edge.phase}: {size(sum(v.type.nbytes for v in edge.values))} per {unit} ({values})")
    if module.schedule is not None:
        print(f"schedule {module.schedule.name}: {module.schedule.microbatches} microbatches per batch, {len(module.schedule.ranks)} ranks")
    for note in module.notes:
        print(f"note {note.origin}: {note.text}")


def diff_command(arguments: Namespace) -> None:
    a, b = (print_module(load_module(path)).splitlines() for path in (arguments.a, arguments.b))
    found = False
    lines = difflib.unified_diff(a, b, arguments.a, arguments.b, lineterm="", n=3) if arguments.lines else _word_diff(a, b)
    for line in lines:
        found = True
        print(line)
    if not found:
        say("no difference")


def _word_diff(a: list[str], b: list[str]) -> Iterator[str]:
    """Removed lines with -, new lines with +, and changed lines once, with the words that changed marked [-old-] {+new+}."""
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(None, a, b, autojunk=False).get_opcodes():
        if tag == "equal":
            continue
        pairs = min(i_end - i, j_end - j)
        for old, new in zip(a[i : i + pairs], b[j : j + pairs], strict=True):
            yield f"~ {_mark_words(old.split(' '), new.split(' '))}"
        yield from (f"- {line}" for line in a[i + pairs : i_end])
        yield from (f"+ {line}" for line in b[j + pairs : j_end])


def _mark_words(old: list[str], new: list[str]) -> str:
    parts: list[str] = []
    for tag, i, i_end, j, j_end in difflib.SequenceMatcher(None, old, new, autojunk=False).get_opcodes():
        if tag == "equal":
            same = old[i:i_end]
            parts += same if len(same) <= _SAME_WORDS else [*same[: _SAME_WORDS // 2], "...", *same[-_SAME_WORDS // 2 :]]
        else:
            parts += [f"[-{' '.join(old[i:i_end])}-]"] * (i < i_end) + [f"{{+{' '.join(new[j:j_end])}+}}"] * (j < j_end)
    return " ".join(parts)


# Longer stretches of unchanged words are cut in the middle.
_SAME_WORDS = 12


# ------------------------------------------------------------------------------------------------ passes


def opt_command(arguments: Namespace) -> None:
    from penstock.passes.manager import Dump, parse_pipeline, run_passes
    from penstock.passes.pipelines import PASSES

    calls = parse_pipeline(arguments.passes, PASSES)
    dump = Dump(arguments.dump_ir) if arguments.dump_ir else None
    module = run_passes(load_module(arguments.file), calls, PASSES, dump=dump)
    text = print_module(module)
    if arguments.out:
        Path(arguments.out).write_text(text, encoding="utf-8")
    else:
        sys.stdout.write(text)


def passes_command(arguments: Namespace) -> None:
    from penstock.passes.pipelines import PASSES

    for row in PASSES.values():
        options = [f.name if f.default is MISSING else f"{f.name}={print_literal(f.default)}" for f in fields(row.options)]
        facts = [f"{word} {', '.join(names)}" for word, names in (("needs", row.needs), ("gives", row.gives)) if names]
        print(f"{row.name}{{{','.join(options)}}}" + (f"  [{'; '.join(facts)}]" if facts else ""))
        print(f"    {row.doc}")


def ops_command(arguments: Namespace) -> None:
    from penstock.coverage import coverage

    header, rows = coverage()
    print(table(header, rows))


# ------------------------------------------------------------------------------------------------ verify


def verify_command(arguments: Namespace) -> int:
    from penstock.checks import verify_bundle, verify_model

    if arguments.parity:
        return _verify_parity(arguments)
    flags = ("loss", "data", "optimizers", "seeds", "microbatches", "devices")
    given = [f"--{name}" for name in flags if getattr(arguments, name) is not None]
    if given:
        raise UsageError(f"{', '.join(given)} without --parity")
    if Path(arguments.file).is_dir():
        if arguments.dim or arguments.known or arguments.backend:
            raise UsageError("--dim, --known and --backend are for models; a bundle has them built in")
        return verify_bundle(arguments.file, steps=arguments.steps or 4, seed=arguments.seed, tolerance=arguments.tolerance)
    backend = arguments.backend or "tvm"
    _check_cache(backend)
    dims, known = _dims(arguments.dim), _known(arguments.known)
    return verify_model(arguments.file, dims=dims, known=known, seed=arguments.seed, tolerance=arguments.tolerance, backend=backend)


def _verify_parity(arguments: Namespace) -> int:
    from penstock import api
    from penstock.parity import Setting, optimizers_of, verify_parity

    if Path(arguments.file).is_dir():
        raise UsageError("--parity trains a model, not a bundle", where=arguments.file)
    if arguments.loss is None:
        raise UsageError("--parity needs a loss to train on", hint="add --loss")
    backend = arguments.backend or "tvm"
    _check_cache(backend)
    optimizers = optimizers_of(arguments.optimizers or "momentum,adamw,muon")
    model = api.from_onnx(arguments.file, dims=_dims(arguments.dim), known=_known(arguments.known))
    setting = Setting(
        arguments.loss,
        arguments.data or "synthetic",
        arguments.steps or 200,
        arguments.microbatches or 4,
        arguments.devices or 2,
        backend=backend,
    )
    return verify_parity(lambda seed: model, optimizers, setting, arguments.seeds or 3)


__all__ = [name for name in dir() if name.endswith("_command")] + ["load_module"]
