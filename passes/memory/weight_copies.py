"""Weights in 16 bits that the update writes, for products that would round them in every microbatch: `weight-copies`.

In: a scheduled module whose versions are chosen. Out: variables of role `copy`. Where forward or backward of a stage
only rounds a parameter, they read the copy, and the update that writes the parameter writes the copy too:

    var @w : f32[64,64] stage 0 param
    var @w.bf16 : bf16[64,64] stage 0 copy versions 2 from @w as bf16
    graph @s0.F { %w.bf16 : bf16[64,64] = read(@w.bf16, version=mb) ... }
    graph @s0.U { ... write(%w.new, @w)  %w.new.bf16 : bf16[64,64] = cast(%w.new)  write(%w.new.bf16, @w.bf16) }

The copy has as many versions as the parameter had. A parameter that updates alone read then needs one. A bundle and a
checkpoint hold no copies: they are made of the parameters as these are loaded.

Left alone: stages on CPUs, whose kernels round weights as they pack them (`devices=all` takes them, too); stages with a
variable that has a home elsewhere; parameters that ranks gather before they are rounded; and all of it where the
memory of a device would not do.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from penstock.ir.action_kinds import UPDATE
from penstock.ir.graph import COPY, PARAM, Graph, Module, Namer, Op, Value, Var, stage_vars, stepped_vars, substitute
from penstock.ir.memory.predict import measure_memory
from penstock.ir.schedule import READERS
from penstock.passes.kernels.fuse import FuseOptions, fuse
from penstock.support.errors import UsageError
from penstock.support.words import counted, shown_bytes

from .lifetimes import lifetimes

DEVICES = ("cuda", "all")
_NARROW = ("bf16", "f16")


@dataclass(frozen=True, slots=True)
class WeightCopiesOptions:
    """Options of `weight-copies`. `devices` is cuda, for stages on GPUs alone, or all."""

    devices: str = "cuda"


def weight_copies(module: Module, options: WeightCopiesOptions = WeightCopiesOptions()) -> Module:
    """Let updates write the weights in 16 bits that forward and backward would round."""
    if options.devices not in DEVICES:
        raise UsageError(f"unknown devices {options.devices!r}", hint=f"one of {', '.join(DEVICES)}")
    if module.schedule is None or module.cluster is None:
        return module
    stages = [s.index for s in module.stages if options.devices == "all" or _is_on_gpu(module, s.index)]
    rounded = {stage: names for stage in stages if (names := dict(_rounded(module, stage)))}
    if not rounded:
        return module
    copied = _Copies(module, rounded).result()
    added = sum(var.type.nbytes for var in copied.vars.values() if var.role == COPY)
    number = counted(sum(var.role == COPY for var in copied.vars.values()), "weight")
    if not _fits(module, copied):
        return module.noted(
            "weight-copies", f"{number} rounded in every microbatch: no memory for {shown_bytes(added)}"
        )
    return copied.noted("weight-copies", f"{number} in 16 bits, {shown_bytes(added)} a version, written by updates")


def _is_on_gpu(module: Module, stage: int) -> bool:
    assert module.cluster is not None
    return all(module.cluster.device(name).kind == "cuda" for name in module.devices_of(stage))


def _rounded(module: Module, stage: int) -> Iterator[tuple[str, str]]:
    """Yield the parameters that forward or backward of a stage rounds and its update writes, with the element type."""
    variables, update = stage_vars(module, stage), module.stage_graph(stage, UPDATE)
    if update is None or any(var.home for var in variables.values()):
        return
    written = {op.var for op in update.ops if op.kind == "write"} & stepped_vars(module)
    for graph in _readers(module, stage):
        read = {op.outs[0]: op.var for op in graph.ops if op.kind == "read" and op.var in written}
        for op in graph.ops:
            name = read.get(op.ins[0], "") if op.kind == "cast" and op.outs[0].type.dtype in _NARROW else ""
            if name and variables[name].role == PARAM:
                yield name, op.outs[0].type.dtype


def _readers(module: Module, stage: int) -> list[Graph]:
    return [graph for kind in READERS if (graph := module.stage_graph(stage, kind)) is not None]


def _fits(before: Module, after: Module) -> bool:
    """Return whether no device lacks memory for what updates write besides."""
    cluster, devices, used = after.cluster, after.rank_devices(), Counter[str]()
    assert cluster is not None
    if not any(cluster.device(name).memory for name in devices):
        return True
    for rank, memory in measure_memory(lifetimes(fuse(after, FuseOptions()))).items():
        used[devices[rank]] += memory.peak + cluster.device(devices[rank]).taken
    return all(used[name] <= (cluster.device(name).memory or used[name]) for name in used)


class _Copies:
    """The rewriting of graphs and variables. `rounded` are the parameters of each stage, with the type of the copy."""

    def __init__(self, module: Module, rounded: Mapping[int, Mapping[str, str]]) -> None:
        self.module, self.rounded = module, rounded
        names = Namer(module.vars)
        kinds = {name: dtype for names in rounded.values() for name, dtype in names.items()}
        self.copies = {name: self._copy(module.vars[name], dtype, names) for name, dtype in kinds.items()}
        self.namer = Namer.of(*module.graphs.values())
        # Of copies on several stages the values have one name, too.
        self.names: dict[tuple[Value, str], str] = {}

    def _copy(self, var: Var, dtype: str, names: Namer) -> Var:
        name = names.fresh(f"{var.name}.{dtype}")
        return Var(name, var.type.with_dtype(dtype), COPY, var.stage, var.versions, source=var.name, form=dtype)

    def result(self) -> Module:
        graphs = dict(self.module.graphs)
        for stage, names in self.rounded.items():
            for graph in _readers(self.module, stage):
                graphs[graph.name] = self._with_reads(graph, names)
            update = self.module.stage_graph(stage, UPDATE)
            assert update is not None
            graphs[update.name] = self._with_writes(update, names)
        after = self.module.but(graphs=graphs)
        still = stepped_vars(after)
        variables: dict[str, Var] = {}
        for name, var in self.module.vars.items():
            variables[name] = replace(var, versions=1) if name in self.copies and name not in still else var
            variables |= {self.copies[name].name: self.copies[name]} if name in self.copies else {}
        return after.but(vars=variables)

    def _with_reads(self, graph: Graph, names: Mapping[str, str]) -> Graph:
        reads = {op.outs[0]: op for op in graph.ops if op.kind == "read" and op.var in names}
        ops: list[Op] = []
        table: dict[Value, Value] = {}
        copied: dict[str, Value] = {}
        for op in graph.ops:
            op = op.with_ins(substitute(op.ins, table))
            read = reads.get(op.ins[0]) if op.kind == "cast" else None
            if read is None or op.outs[0].type.dtype != names[read.var]:
                ops.append(op)
            elif read.var in copied:
                table[op.outs[0]] = copied[read.var]
            else:
                copied[read.var] = op.outs[0]
                attrs = {**read.attrs, "var": self.copies[read.var].name}
                ops.append(Op("read", (), op.outs, attrs, op.loc))
        used = {v for op in ops for v in op.ins} | {*graph.outs, *graph.saved}
        ops = [op for op in ops if op.kind != "read" or op.outs[0] in used]
        outs, saved = substitute(graph.outs, table), substitute(graph.saved, table)
        return replace(graph, ops=tuple(ops), outs=outs, saved=saved)

    def _with_writes(self, graph: Graph, names: Mapping[str, str]) -> Graph:
        ops: list[Op] = []
        for op in graph.ops:
            ops.append(op)
            if op.kind == "write" and op.var in names:
                (new,), dtype = op.ins, names[op.var]
                if (new, dtype) not in self.names:
                    self.names[new, dtype] = self.namer.fresh(f"{new.name}.{dtype}")
                low = Value(self.names[new, dtype], new.type.with_dtype(dtype))
                ops.append(Op("cast", (new,), (low,), {"dtype": dtype}, op.loc))
                ops.append(Op("write", (low,), (), {"var": self.copies[op.var].name}, op.loc))
        return replace(graph, ops=tuple(ops))
