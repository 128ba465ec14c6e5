"""The way from planned graphs to TVM: the TIR function of one group, and the Relax functions that call kernels.

In: groups (`make_kernel`), or graphs with their kernels in order (`relax_module`). Out: Kernels with TIR functions, or
an IRModule with one Relax function per graph, whose parameters follow `penstock.ir.graph.signature`. After those come
the operands that kernels take in an order of their own. Functions of the graph with `_pack` and a number to their names
make them of the graph's slots (see group.PackedWeight).

The virtual machine finds kernels by name, so the module that plans memory needs only the parameters of a kernel.
`declaration` gives a function with those and an empty body. TVM's passes treat calls of it like any others (in-place
updates, reuse of memory). It is removed before code is made, and the compiled kernel of that name is linked in.

Limit: Relax functions are built on one stack for the whole process; callers take turns.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import numpy as np
import tvm
from tvm import relax, tirx

from penstock.backends.tvm.group import (
    BEGIN,
    EFFECTS,
    WAIT,
    Fusion,
    GeneratedKernel,
    LibraryCall,
    NotOneKernel,
    PackedWeight,
    name_of,
)
from penstock.backends.tvm.kernels.tools.emit import TVM_DTYPES
from penstock.backends.tvm.symbols import function_name, has_packed, pack_name
from penstock.backends.tvm.target import TargetMachine
from penstock.ir.graph import Graph, Op, Slot, Value, signature, slot_of, slot_types
from penstock.ir.memory.workspace import is_table
from penstock.ir.types import TensorType, numpy_dtype

from .generate import generate, generate_effect
from .plan import KernelCallStep, Lowered, plan_graphs

# Packed operands, by what they are made of and the kernel that takes each, in the order of the parameters.
Packed = Mapping[tuple[Value, str, tuple[Value, ...]], PackedWeight]


def make_kernel(group: Fusion, machine: TargetMachine) -> GeneratedKernel:
    """Generate the TIR of a group; NotOneKernel when it needs several kernels, which never happens to a group of one
    operation."""
    try:
        return generate(group, machine)
    except NotOneKernel:
        if len(group.ops) > 1 or group.ops[0].kind not in EFFECTS:
            raise
    return generate_effect(group, machine)


def plan_kernels(graph: Graph, machine: TargetMachine) -> Lowered:
    """Return the kernels of a graph with their TIR, in the order they run: for readers and tests. Nothing is
    compiled."""

    def make(groups: Sequence[Fusion]) -> list[tuple[str, GeneratedKernel] | NotOneKernel]:
        kernels: list[tuple[str, GeneratedKernel] | NotOneKernel] = []
        for group in groups:
            try:
                kernels.append((name_of(group), make_kernel(group, machine)))
            except NotOneKernel as refusal:
                kernels.append(refusal)
        return kernels

    return plan_graphs([graph], make)[0]


# ---------------------------------------------------------------------------------------- Relax


def relax_type(t: TensorType) -> Any:
    return relax.TensorType(t.dims, TVM_DTYPES[t.dtype])


def _table(op: Op) -> Any:
    t = op.outs[0].type
    values = np.array(op.attrs["value"], numpy_dtype(t.dtype)).reshape(t.dims)
    return relax.const(values, TVM_DTYPES[t.dtype])


def relax_module(lowered: Sequence[Lowered], *, declared: bool, called: list[str] | None = None) -> Any:
    """Build one Relax function per graph, `s0.F` as `s0_F`. Either with the TIR of every kernel, or `declared`: then
    steps of one name are one kernel. Names under which steps call kernels, one for each step, are put into `called`."""
    builder = relax.BlockBuilder()
    declarations: dict[str, Any] = {}

    def function_of(step: KernelCallStep, types: Mapping[Slot, TensorType]) -> Any:
        if isinstance(step.kernel.function, LibraryCall):
            if called is not None:
                called.append(step.kernel.function.name)
            return step.kernel.function
        if not declared:
            function = builder.add_func(step.kernel.function, step.name)
            if called is not None:
                called.append(str(function.name_hint))
            return function
        kernel = step.kernel
        if step.name not in declarations:
            params = [*(v.type for v in kernel.ins), *(types[s] for s in kernel.slots), *(v.type for v in kernel.outs)]
            declarations[step.name] = builder.add_func(declaration(step.name, params), step.name)
        return declarations[step.name]

    for plan in lowered:
        name = function_name(plan.graph.name)
        packed = _packed(plan)
        if has_packed(plan.graph):
            _emit_packing(builder, plan, name, packed, declared)
        _emit_function(builder, plan, name, function_of, packed, trusting=declared)
    module = builder.get()
    assert isinstance(module, tvm.IRModule)
    return module


def declaration(name: str, params: Sequence[TensorType]) -> Any:
    """Return a function with the parameters of a kernel and an empty body. It contains its name: TVM takes equal
    functions for one."""
    buffers = [tirx.decl_buffer(t.dims, TVM_DTYPES[t.dtype], name=f"b{i}") for i, t in enumerate(params)]
    function = tirx.PrimFunc(buffers, tirx.Evaluate(tirx.IntImm("int32", 0)))
    return function.with_attr({"s_tir": True, "tirx.is_scheduled": True, "op_pattern": 8, "penstock.kernel": name})


def _packed(lowered: Lowered) -> Packed:
    return {(p.value, step.name, p.sources): p for step in lowered.steps if (p := step.kernel.packing) is not None}


def _emit_packing(builder: Any, lowered: Lowered, name: str, packed: Packed, declared: bool) -> None:
    """Emit a function for each packed operand, from the slots that it is made of, in the order in which the graph's
    function takes operands. One more gives a description (run/forms.py): what packs alike, and which slots are read as
    they are."""
    types = slot_types(lowered.graph)
    slots = signature(lowered.graph).slots
    reads = {op.outs[0]: slot for op in lowered.graph.ops if op.kind == "read" and (slot := slot_of(op)) is not None}
    rows: list[dict[str, Any]] = []
    for number, ((value, kernel, _), packing) in enumerate(packed.items()):
        function = (
            declaration(pack_name(kernel), [*(v.type for v in packing.sources), value.type])
            if declared
            else packing.function
        )
        sources = [reads[v] for v in packing.sources]
        params = [relax.Var(function_name(f"{s.var}_{s.slot or 'acc'}"), relax_type(types[s])) for s in sources]
        with builder.function(pack_name(name, number), params):
            call = relax.op.call_tir(builder.add_func(function, pack_name(kernel)), params, relax_type(value.type))
            builder.emit_func_output(builder.emit(call))
        rows.append({"key": packing.key, "slots": [slots.index(s) for s in sources]})
    plain = {reads[v] for step in lowered.steps for v in step.kernel.ins if v in reads}
    plain |= {slot for step in lowered.steps for slot in step.kernel.slots}
    text = json.dumps({"operands": rows, "plain": sorted(slots.index(s) for s in plain)})
    with builder.function(pack_name(name), []):
        builder.emit_func_output(builder.emit(relax.const(np.frombuffer(text.encode(), np.uint8), "uint8")))


def _emit_function(
    builder: Any,
    lowered: Lowered,
    name: str,
    function_of: Callable[[KernelCallStep, Mapping[Slot, TensorType]], Any],
    packed: Packed,
    *,
    trusting: bool,
) -> None:
    """Emit the function of a graph. With `trusting`, as kernels of a CPU are (pipeline.py), it checks its inputs
    before it does anything. The caller checks slots (run/load.py), as it does once for many calls."""
    graph = lowered.graph
    sig = signature(graph)
    types = slot_types(graph)
    params = [relax.Var(function_name(v.name), relax_type(v.type)) for v in sig.ins]
    slots = {s: relax.Var(function_name(f"{s.var}_{s.slot or 'acc'}"), relax_type(types[s])) for s in sig.slots}
    forms = {key: relax.Var(f"packed{i}", relax_type(key[0].type)) for i, key in enumerate(packed)}
    env: dict[Value, Any] = dict(zip(sig.ins, params, strict=True))
    for op in graph.ops:
        slot = slot_of(op)
        if op.kind in ("read", "take", "put"):
            assert slot is not None
            env[op.outs[0]] = slots[slot]
        elif is_table(op):
            env[op.outs[0]] = _table(op)
    # TVM checks the types of what is declared an input. Where kernels check their operands, that is no parameter.
    with builder.function(
        name, [*params, *slots.values(), *forms.values()], attrs={"num_input": len(sig.ins) if trusting else 0}
    ):
        meetings = _Meetings(builder, graph.name, env)
        for step in lowered.steps:
            made_of = step.kernel.packing.sources if step.kernel.packing is not None else ()
            of_step = {v: form for (v, kernel, of), form in forms.items() if (kernel, of) == (step.name, made_of)}
            meetings.finish(step.kernel, slots)
            function = meetings.call_of(step.kernel, function_of(step, types))
            _emit_call(builder, step, function, env, of_step, slots)
        meetings.finish_all()
        results = [env[v] for v in sig.results]
        # One result is returned without a tuple: taking it out of one costs as much as a small kernel.
        builder.emit_func_output(results[0] if len(results) == 1 else relax.Tuple(results))


class _Meetings:
    """The collectives of a function that have begun. The call that waits takes operand and result, so that TVM's memory
    planner leaves both alone until then."""

    def __init__(self, builder: Any, graph: str, env: Mapping[Value, Any]) -> None:
        self._builder, self._graph, self._env = builder, graph, env
        # Results by the operands of their collectives, in the order in which they began.
        self._begun: dict[Value, Value] = {}

    def call_of(self, kernel: GeneratedKernel, function: Any) -> Any:
        """Return the function of a step, which says its collective if it begins one."""
        if not isinstance(function, LibraryCall) or function.name != BEGIN:
            return function
        self._begun[kernel.outs[0]] = kernel.ins[0]
        return LibraryCall(BEGIN, self._key(kernel.outs[0]))

    def finish(self, kernel: GeneratedKernel, slots: Mapping[Slot, Any]) -> None:
        """Emit waits in front of a kernel that reads results, or changes what is being sent."""
        changed = [slots[slot] for slot in kernel.slots]
        for result, operand in list(self._begun.items()):
            sent = self._env[operand]
            if result in kernel.ins or any(sent is slot for slot in changed):
                self._wait(result)

    def finish_all(self) -> None:
        """Emit the waits for results that no kernel reads."""
        for result in list(self._begun):
            self._wait(result)

    def _wait(self, result: Value) -> None:
        operand = self._begun.pop(result)
        call = relax.op.call_pure_packed(
            WAIT,
            self._env[result],
            self._env[operand],
            tvm.ir.StringImm(self._key(result)),
            ty_args=[relax.TupleType([])],
        )
        self._builder.emit(call)

    def _key(self, result: Value) -> str:
        return f"{self._graph} {result.name}"


def _emit_call(
    builder: Any,
    step: KernelCallStep,
    function: Any,
    env: dict[Value, Any],
    packed: Mapping[Value, Any],
    slots: Mapping[Slot, Any],
) -> None:
    kernel = step.kernel
    args = [packed[v] if v in packed else env[v] for v in kernel.ins] + [slots[s] for s in kernel.slots]
    types = [relax_type(v.type) for v in kernel.outs]
    if isinstance(function, LibraryCall):
        said = [*args, tvm.ir.StringImm(function.text)]
        call = (
            relax.op.call_dps_packed(function.name, said, types)
            if types
            else relax.op.call_pure_packed(function.name, *said, ty_args=[relax.TupleType([])])
        )
    elif kernel.slots:
        in_place = list(range(len(kernel.ins), len(args)))
        call = relax.op.call_tir_inplace(
            function, args, in_place + [-1] * len(types), [args[i].ty for i in in_place] + types
        )
    else:
        call = relax.op.call_tir(function, args, types if len(types) > 1 else types[0])
    result = builder.emit(call)
    count = len(kernel.slots) + len(kernel.outs)
    for i, v in enumerate(kernel.outs):
        env[v] = result if count == 1 else builder.emit(relax.TupleGetItem(result, len(kernel.slots) + i))


def kernel_texts(module: Any) -> dict[str, str]:
    """Print the TIR of every kernel of a module."""
    kernels = {str(v.name_hint): f for v, f in module.functions_items() if isinstance(f, tirx.PrimFunc)}
    return {name: kernel_text({name: f}) for name, f in sorted(kernels.items())}


def kernel_text(functions: Mapping[str, Any]) -> str:
    """Print the TIR of functions that belong together."""
    return str(tvm.IRModule({tvm.ir.GlobalVar(name): function for name, function in functions.items()}).script()) + "\n"


def functions_text(module: Any) -> str:
    """Print the Relax functions of a module, which call kernels by name; the kernels are printed apart."""
    return (
        str(tvm.IRModule({v: f for v, f in module.functions_items() if isinstance(f, relax.Function)}).script()) + "\n"
    )
