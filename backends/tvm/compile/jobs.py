"""The execution of one job: the only place where TVM makes code. Runs in a worker process, or in the compiling process
itself.

In: a job (messages.py). Out: its answer; files are written to the paths that the job names. The same job gives the same
bytes.

    MakeKernel   text -> group -> TIR (lower/generate.py) -> LLVM -> one object file
    LinkStage    graphs and calls -> Relax with declarations of the kernels -> memory plan and bytecode
                 -> g++ links it with the objects

The Relax pipeline of TVM sees calls of functions whose parameters it knows and plans memory as if it had their code.
After it, the declarations are dropped; bytecode calls kernels by name, and the linker brings the objects in.
"""

from __future__ import annotations

import threading
import traceback
from dataclasses import replace
from hashlib import sha256
from pathlib import Path
from tempfile import TemporaryDirectory

import tvm
from tvm import relax
from tvm.relax import _ffi_api as relax_ffi

from penstock.backends.tvm.group import (
    BEGIN,
    Fusion,
    LibraryCall,
    NotOneKernel,
    RuleFailed,
    kernel_of,
    parameters_of,
    parse_graphs,
    parse_group,
    rules_of,
)
from penstock.backends.tvm.lower.lower import functions_text, kernel_text, make_kernel, relax_module
from penstock.backends.tvm.lower.plan import KernelCallStep, Lowered
from penstock.backends.tvm.messages import (
    Answer,
    GroupRefused,
    Job,
    JobFailed,
    KernelMade,
    KernelStep,
    Linked,
    LinkStage,
    MakeKernel,
    Named,
    NameTarget,
)
from penstock.backends.tvm.pipeline import PIPELINE
from penstock.backends.tvm.symbols import pack_name
from penstock.backends.tvm.target import TargetMachine, machine_of, tvm_target
from penstock.ir.graph import Graph
from penstock.support.errors import UsageError
from penstock.support.out_of_memory import is_out_of_memory

# TVM has one stack of builders for the whole process.
ONE_AT_A_TIME = threading.Lock()


def do(job: Job) -> Answer:
    """Execute a job and return its answer; errors are answers."""
    try:
        with ONE_AT_A_TIME:
            match job:
                case NameTarget():
                    return Named(machine_of(job.target).name)
                case MakeKernel():
                    return compile_kernel(job)
                case LinkStage():
                    return link_stage(job)
    except UsageError as error:
        return JobFailed(error.what, error.hint, usage=True)
    except Exception as error:
        return _failed(error)


def _failed(error: Exception) -> JobFailed:
    if is_out_of_memory(error):
        return JobFailed("the system gave no more memory", "`--jobs 1` compiles one kernel at a time", memory=True)
    if isinstance(error, RuleFailed):
        trace = "".join(traceback.format_exception(error.__cause__))
        return JobFailed(str(error), "-v shows where; `--backend numpy` compiles nothing", rule=True, traceback=trace)
    if isinstance(error, RuntimeError):
        lines = str(error).strip().splitlines() or [type(error).__name__]
        return JobFailed(f"TVM: {lines[-1]}", "g++ must be on the PATH")
    if isinstance(error, OSError):
        return JobFailed(f"{error}", "is there room in the folder for temporary files, and a compiler to link with?")
    return JobFailed(f"{type(error).__name__}: {error}", traceback="".join(traceback.format_exception(error)))


def compile_kernel(job: MakeKernel) -> KernelMade | GroupRefused:
    """Compile one kernel for one target."""
    machine = machine_of(job.target)
    group = parse_group(job.group)
    with rules_of(group.ops):
        return _compiled(job, group, machine)


def _compiled(job: MakeKernel, group: Fusion, machine: TargetMachine) -> KernelMade | GroupRefused:
    try:
        kernel = make_kernel(group, machine)
    except NotOneKernel as refusal:
        return GroupRefused(str(refusal))
    functions = {job.symbol: kernel.function}
    if kernel.packing is not None:
        text = kernel_text({pack_name("kernel"): kernel.packing.function})
        kernel = replace(kernel, packing=replace(kernel.packing, key=sha256(text.encode()).hexdigest()[:16]))
        assert kernel.packing is not None
        functions[pack_name(job.symbol)] = kernel.packing.function
    module = tvm.IRModule(
        {tvm.ir.GlobalVar(name): function.with_attr("global_symbol", name) for name, function in functions.items()}
    )
    if job.source:
        Path(job.source).write_text(kernel_text(functions), encoding="utf-8")
    if job.path:
        tvm.tirx.build(module, target=tvm_target(machine.name), pipeline=PIPELINE).write_to_file(job.path)
    return KernelMade(parameters_of(kernel))


def link_stage(job: LinkStage) -> Linked:
    """Build the library of one stage."""
    graphs = parse_graphs(job.graphs)
    lowered = [Lowered(graph, tuple(_steps(graph, calls))) for graph, calls in zip(graphs, job.calls, strict=True)]
    target = tvm_target(job.target)
    module = relax_module(lowered, declared=True)
    if job.source:
        Path(job.source).write_text(functions_text(module), encoding="utf-8")
    if not job.path:
        return Linked()
    with target:
        module = relax.get_pipeline("default_build")(module)
    builder = relax.ExecBuilder()
    relax_ffi.VMCodeGen(builder, module)
    packed = {step.name for plan in lowered for step in plan.steps if step.kernel.packing is not None}
    kernels = [
        tvm.runtime.load_static_library(path, [symbol, pack_name(symbol)] if symbol in packed else [symbol])
        for symbol, path in job.objects
    ]
    constants = (
        dict(module.attrs["const_name_to_constant"])
        if module.attrs and "const_name_to_constant" in module.attrs
        else {}
    )
    executable = relax.VMExecutable(relax_ffi.VMLink(builder, target, None, kernels, constants))
    out = Path(job.path)
    with TemporaryDirectory(dir=out.parent) as scratch:
        part = Path(scratch) / "stage.so"
        executable.export_library(str(part), workspace_dir=scratch, options=["-Wl,--build-id=none"])
        part.replace(out)
    return Linked()


def _steps(graph: Graph, calls: tuple[KernelStep, ...]) -> list[KernelCallStep]:
    values = {v.name: v for v in (*graph.ins, *(v for op in graph.ops for v in op.outs))}
    steps = []
    for call in calls:
        kernel = kernel_of(call.parameters, values)
        if call.symbol == BEGIN:
            kernel = replace(kernel, function=LibraryCall(BEGIN, ""))
        steps.append(KernelCallStep(Fusion((), ()), kernel, call.symbol))
    return steps
