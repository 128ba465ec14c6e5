"""Kernel fusion: choose the operations of a stage graph that run as one kernel. Writes `kernel` annotations, changes
nothing else.

In: stage graphs. Out: the same graphs where every operation except `read` names its kernel. Operations with the same
name become one kernel. A name that starts with `inline` means that the value has no memory at all: each reader computes
it (constants, the index arithmetic of layouts, and what widening.py and picking.py find). A group is

  * one operation that has loops (matrix product, convolution, row operation, reduction), or the first of an elementwise
    chain,
  * keys of random numbers, all that a graph needs,
  * elementwise operations behind it that read its result at the same element, with any number of results,
  * sums over the same axes of values that the group reads or makes elementwise, so that one sweep over memory gives all
    of them, and sums of columns beside the gradient of a layer norm,
  * reshapes and transpositions of a result that nothing else reads: it is stored in the new layout; results that are
    known at different points (the gradients of attention) also as the parts of their concatenation,
  * all steps of a recurrence but the first (ir/ops/recurrences.py), in a module that does not train: one loop,
  * `accum` and `write` of its results, which are then done where the value is computed, and `take` of a gradient that
    only it reads. A collective is a group by itself, and its operand lies in memory. So is what a library computes, but
    for a product that it adds to a variable.

`packed` on a product or convolution says that its weights never change in this module. The kernel may then read them in
a packed order, made once when they are loaded, or computed of variables then (ahead.py). Only without training: there
they change with every batch, and each order needs memory.

Invariant: kernels can be ordered. An operation joins a group only if no other operand comes from a kernel that needs
the group. The same holds for the order of effects on one variable: readers come before the operation that writes it.

Deterministic: decided in the order of operations, without costs. Limit: a value is never computed twice, except
layouts and floats made of bytes.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, replace

from penstock.ir.graph import Graph, Module, Op, Value, graph_stage
from penstock.ir.memory.workspace import INLINE, exchanged_values
from penstock.ir.ops import OPS, VIEWS, complete_attrs, ints, table_of
from penstock.ir.ops.recurrences import find_recurrence

from .ahead import made_ahead
from .groups import OPEN, SUMS, KernelGroup, can_sweep, may_look_up_packed, passes_by, swept_by
from .libraries import adds_to_variable
from .picking import picked_later
from .widening import widened_later

_EFFECTS = ("accum", "write", "take")
_HALVES = ("f16", "bf16")
# Operations that read each operand once, into packed panels; a library reads memory instead.
_PACKING = ("matmul", "conv", "conv_grad_input")
# The operations of which only the first result stands in registers: the other results are finished earlier.
_FIRST_ONLY = ("layer_norm", "attention")
# Results that are known at different points of the kernel: each can be stored in another layout, and as a part of a
# concatenation.
_APART = ("attention_grad",)
# The gradient of a lookup is scattered: it can be added to its variable, nothing else.
_SCATTERED = ("gather_grad",)
# Operations with a weight behind the first operand that their kernels read in a packed order.
_PACKABLE = ("matmul", "conv", "matmul_q", "matmul_bytes", "conv_bytes")
# Keys are made of the same few numbers. All keys of a graph are in one kernel: otherwise each kernel that reads one
# would be compiled by itself.
_KEYS = ("random_key",)
# Past this size a kernel gains nothing and takes longer to compile.
_LARGEST = 24


@dataclass(frozen=True, slots=True)
class FuseOptions:
    """Options of `fuse`. `chains` joins operations into kernels, `layouts` does without memory for layout changes. Both
    off: one kernel per operation."""

    chains: bool = True
    layouts: bool = True


def fuse(module: Module, options: FuseOptions) -> Module:
    """Choose which operations of each stage graph run as one kernel."""
    graphs = dict(module.graphs)
    fixed = _never_changed(module)
    notes = []
    for name, graph in module.graphs.items():
        if "." not in name:
            continue
        fused = _Fuser(graph, options, fixed if _on_cpu(module, name) else frozenset()).run()
        if fused.ops != graph.ops:
            graphs[name] = fused
        kernels = {op.attrs["kernel"] for op in fused.ops if "kernel" in op.attrs}
        kept = [k for k in kernels if not str(k).startswith(INLINE)]
        packed = sum("packed" in op.attrs for op in fused.ops)
        what = f", {packed} of them with weights packed ahead" if packed else ""
        notes.append(f"@{name}: {len(fused.ops)} operations in {len(kept)} kernels{what}")
    if all(graphs[n] is module.graphs[n] for n in graphs):
        return module
    return module.but(graphs=graphs).noted("fuse", *notes)


def choose_kernels(graph: Graph) -> Graph:
    """Choose the kernels of one graph, with no weights packed ahead. The graph may also be that of a model that is not
    cut into stages."""
    return _Fuser(graph, FuseOptions(), None).run()


def _never_changed(module: Module) -> frozenset[str]:
    """Return the variables of a module that computes and does not train."""
    changed = {op.var for graph in module.graphs.values() for op in graph.ops if op.kind in _EFFECTS}
    return frozenset() if changed else frozenset(module.vars)


def _on_cpu(module: Module, graph: str) -> bool:
    stage = graph_stage(graph)
    if module.cluster is None or stage is None or stage not in {placed.index for placed in module.stages}:
        return True
    return module.cluster.device(module.devices_of(stage)[0]).kind == "cpu"


class _Fuser:
    """The choice of the kernels of one graph, made in one walk over its operations."""

    def __init__(self, graph: Graph, options: FuseOptions, fixed: frozenset[str] | None) -> None:
        self.graph, self.options, self.fixed = graph, options, fixed or frozenset()
        # Values that lie in memory, whatever reads them here.
        self.results = {*graph.results, *exchanged_values(graph)}
        self.makers = graph.producers()
        self.readers: dict[Value, list[Op]] = {}
        for op in graph.ops:
            for v in op.ins:
                self.readers.setdefault(v, []).append(op)
        self.groups: list[KernelGroup] = []
        self.of: dict[int, KernelGroup] = {}
        self.inlined: dict[Value, Op] = {}
        both = options.chains and options.layouts
        self.widened = widened_later(graph.ops, self.makers, self.readers, self.results) if both else frozenset()
        self.ahead = made_ahead(graph.ops, self.readers, self.results, fixed) if both else frozenset()
        self.picked = picked_later(graph.ops, self.readers, self.results) if options.layouts else frozenset()
        # Recurrences: the group of each of their operations, and layout changes inside of them.
        self.recurrent: dict[int, KernelGroup] = {}
        self.between: set[int] = set()
        # Kernels that read a variable, and the one that changed it last.
        self.var_readers: dict[str, set[int]] = {}
        self.var_changer: dict[str, int] = {}

    # ------------------------------------------------------------------------------ the walk

    def run(self) -> Graph:
        self._find_recurrences()
        for op in self.graph.ops:
            if op.kind in ("read", "take"):
                continue
            if id(op) in self.between or (id(op) not in self.recurrent and self._is_inline(op)):
                self.inlined[op.outs[0]] = op
                continue
            group = self.recurrent.get(id(op))
            if group is None:
                self._join(self._home(op) or self._new(), op)
                continue
            self._join(group, op)
            # Nothing goes on with a result while its loops run.
            group.reached.clear()
        self._place_takes()
        return replace(self.graph, ops=tuple(self._annotated()))

    def _find_recurrences(self) -> None:
        """Make a kernel of each recurrence, where the module computes and does not train."""
        for op in self.graph.ops if self.fixed and self.options.chains else ():
            recurrence = find_recurrence(op, self.graph.ops, self.makers, self.readers, self.results)
            if recurrence is not None:
                self.recurrent |= dict.fromkeys(map(id, recurrence.ops), self._new())
                self.between |= set(map(id, recurrence.views))

    def _annotated(self) -> Iterable[Op]:
        names: dict[int, str] = {}
        inline = 0
        for op in self.graph.ops:
            group = self.of.get(id(op))
            if group is not None:
                packed = True if self._is_packed(op) else None
                yield op.with_attrs(kernel=names.setdefault(group.number, f"k{len(names)}"), packed=packed)
            elif op.kind == "read":
                yield op.with_attrs(kernel=None) if "kernel" in op.attrs else op
            else:
                yield op.with_attrs(kernel=f"{INLINE}{inline}")
                inline += 1

    def _is_packed(self, op: Op) -> bool:
        """Return whether the second operand is a variable that never changes, whatever its layout; of a lookup, the
        first, where a product reads the same table."""
        if op.kind in ("gather", "gather_q"):
            return self._looks_up_weight(op)
        if op.kind not in _PACKABLE:
            return False
        return all(self._is_fixed_weight(value) for value in (op.ins[1:] if op.kind == "matmul_q" else op.ins[1:2]))

    def _looks_up_weight(self, op: Op) -> bool:
        """Return whether rows are looked up in a table that a product reads packed, and nothing else does."""
        fixed = all(self._is_fixed(self.makers.get(value)) for value in table_of(op))
        by_rows = op.kind == "gather_q" or complete_attrs(op)["axis"] in (0, -2)
        return fixed and by_rows and may_look_up_packed(op, self.readers)

    def _is_fixed_weight(self, value: Value) -> bool:
        if value in self.ahead:
            return True
        maker = self.makers.get(value)
        while maker is not None and maker.outs[0] in self.inlined and maker.kind in (*VIEWS, "concat", "cast"):
            maker = self.makers.get(maker.ins[0])
        return self._is_fixed(maker)

    def _is_fixed(self, maker: Op | None) -> bool:
        return maker is not None and maker.kind == "read" and maker.var in self.fixed

    def _reorders_weight(self, op: Op) -> bool:
        """Return whether a concatenation of parts of one fixed variable is read by products alone, which pack it."""
        homes = set()
        for value in op.ins:
            while (maker := self.makers.get(value)) is not None and value in self.inlined and maker.kind in VIEWS:
                value = maker.ins[0]
            homes.add(value)
        return (
            len(homes) == 1
            and self._is_fixed(self.makers.get(next(iter(homes))))
            and all(u.kind == "matmul" and u.ins[1] is op.outs[0] for u in self.readers.get(op.outs[0], []))
        )

    def _new(self) -> KernelGroup:
        self.groups.append(KernelGroup(len(self.groups)))
        return self.groups[-1]

    def _join(self, group: KernelGroup, op: Op) -> None:
        self.of[id(op)] = group
        fresh = not group.ops
        group.ops.append(op)
        sources, variables = self._sources(op.ins)
        needed = sources - {group.number} | self._order_before(op, group)
        self._add_needs(group, needed)
        for var in variables:
            self.var_readers.setdefault(var, set()).add(group.number)
        if op.kind in _EFFECTS:
            self.var_changer[op.var] = group.number
        if "library" in op.attrs:
            # A library stores its results, or adds them to a variable: nothing can go on with them in registers.
            if fresh and adds_to_variable(op):
                group.added = op.outs[0]
            return
        if op.kind in SUMS:
            group.swept = swept_by(op)
        if op.kind in _SCATTERED:
            group.scattered = True
        elif op.kind in _APART or group.apart.intersection(op.ins):
            group.apart |= set(op.outs)
        elif op.kind in _FIRST_ONLY:
            group.reached.add(op.outs[0])
        elif not fresh or op.kind in OPEN or OPS[op.kind].family in ("elementwise", "optimizer"):
            group.reached |= set(op.outs)

    def _place_takes(self) -> None:
        """Assign each `take` to a kernel: that of its only reader, if it is elementwise, else a new one behind all
        readers."""
        for op in self.graph.ops:
            if op.kind != "take":
                continue
            value = op.outs[0]
            users = self.readers.get(value, [])
            homes = {id(self.of.get(id(u))) for u in users}
            group = self.of.get(id(users[0])) if users else None
            fits = group is not None and len(homes) == 1 and value not in self.results and self.options.chains
            if fits and group is not None and all(OPS[u.kind].family in ("elementwise", "optimizer") for u in users):
                same = all(u.outs[0].type.shape == value.type.shape for u in users)
                plain = all(OPS[o.kind].family in ("elementwise", "optimizer", "state") for o in group.ops)
                if same and plain:
                    self.of[id(op)] = group
                    continue
            self.of[id(op)] = self._new()

    # ------------------------------------------------------------------------------ where an operation may go

    def _is_inline(self, op: Op) -> bool:
        if not op.outs or op.outs[0] in self.results:
            return False
        if op.kind == "const":
            return not isinstance(op.attrs["value"], tuple)
        if op.kind == "iota" or any(op.outs[0] in later for later in (self.widened, self.ahead, self.picked)):
            return True
        if op.kind == "cast" and self.options.layouts:
            return self._is_inline_cast(op)
        if op.kind == "concat" and self.options.layouts:
            return self._reorders_weight(op)
        if op.kind not in VIEWS or not self.options.layouts:
            return False
        if self._stores_in_layout(op) is not None:
            return False
        users = self.readers.get(op.outs[0], [])
        if op.kind == "transpose" and not _keeps_last(op):
            # Strided reads are fine for packing loops, otherwise only for a value that is read once anyway.
            return all(u.kind == "matmul" for u in users) or len(users) == 1
        return True

    def _is_inline_cast(self, op: Op) -> bool:
        """Return whether a cast needs no memory for its result.

        Widening a 16-bit float costs its readers nothing where it would be in memory anyway, and memory in 16 bits is
        half as much. Rounding a variable that only products read costs nothing either, as they pack it. A library
        takes operands from memory, so nothing is computed for it on the way.
        """
        source = op.ins[0]
        if self._library_reads(op.outs[0]):
            return False
        widens, rounds = source.type.dtype in _HALVES, op.outs[0].type.dtype in _HALVES
        maker = self.makers.get(source)
        if widens and op.outs[0].type.dtype == "f32":
            alone = len(self.readers.get(source, [])) == 1 and source not in self.results
            followed = all(
                OPS[u.kind].family == "elementwise" or u.kind in _EFFECTS for u in self.readers.get(op.outs[0], [])
            )
            return not (
                alone and followed and self.options.chains and maker is not None and source in self._in_registers(maker)
            )
        return (
            rounds
            and maker is not None
            and maker.kind == "read"
            and all(self._packs(u) for u in self.readers.get(op.outs[0], []))
        )

    def _in_registers(self, maker: Op) -> set[Value]:
        """Return the results of an operation that stand in registers where its kernel could go on."""
        group = self.of.get(id(maker))
        return group.reached if group is not None and len(group.ops) < _LARGEST else set()

    def _packs(self, op: Op) -> bool:
        """Return whether an operation reads its operands in packing loops, be it through layout changes."""
        if op.kind in VIEWS and self._is_inline(op):
            return all(self._packs(u) for u in self.readers.get(op.outs[0], []))
        return op.kind in _PACKING and "library" not in op.attrs

    def _library_reads(self, value: Value) -> bool:
        """Return whether a library reads the value, be it through layout changes."""
        return any(
            "library" in u.attrs or (u.kind in VIEWS and self._library_reads(u.outs[0]))
            for u in self.readers.get(value, [])
        )

    def _stores_in_layout(self, op: Op) -> KernelGroup | None:
        """Return the group that can store its result in the layout that `op` makes."""
        if op.kind not in ("reshape", "transpose") or not self.options.chains or op.ins[0] in self.results:
            return None
        maker = self.makers.get(op.ins[0])
        group = self.of.get(id(maker)) if maker is not None else None
        if group is None or op.ins[0] not in group.reached | group.apart or len(self.readers.get(op.ins[0], [])) != 1:
            return None
        if passes_by(op.ins[0], group):
            return None
        if op.kind == "transpose" and not _keeps_last(op):
            return None
        return group if len(group.ops) < _LARGEST else None

    def _stores_in_parts(self, op: Op) -> KernelGroup | None:
        """Return the group that makes all parts of a concatenation, and can store each of them in its place."""
        homes = [self.of.get(id(self.makers[v])) if v in self.makers else None for v in op.ins]
        group = homes[0]
        if group is None or any(home is not group for home in homes) or len(set(op.ins)) < len(op.ins):
            return None
        alone = all(v in group.apart and v not in self.results and len(self.readers.get(v, [])) == 1 for v in op.ins)
        return group if alone and len(group.ops) < _LARGEST else None

    def _home(self, op: Op) -> KernelGroup | None:
        """Return the group that `op` joins, or None if it begins a new one."""
        if not self.options.chains:
            return None
        if op.kind == "accum" and (group := self._adds_up(op)) is not None:
            return group
        stored = self._stores_in_parts(op) if op.kind == "concat" else self._stores_in_layout(op)
        if stored is not None:
            return stored
        if op.kind in SUMS:
            return self._sweep_of(op)
        if op.kind in _KEYS:
            return next(
                (
                    g
                    for g in reversed(self.groups)
                    if g.ops[0].kind in _KEYS and g.ops[0].ins == op.ins and len(g.ops) < _LARGEST
                ),
                None,
            )
        family = OPS[op.kind].family
        if family not in ("elementwise", "optimizer") and op.kind not in ("accum", "write"):
            return None
        candidates = {}
        for v in op.ins:
            maker = self.makers.get(v)
            group = self.of.get(id(maker)) if maker is not None else None
            if group is not None:
                candidates[group.number] = group
        for number in sorted(candidates, reverse=True):
            if self._fits(op, candidates[number]):
                return candidates[number]
        return None

    def _adds_up(self, op: Op) -> KernelGroup | None:
        """Return the group of a library that can add its result, widened or not, to the variable of `op`."""
        value = op.ins[0]
        if value in self.inlined and self.makers[value].kind == "cast" and len(self.readers[value]) == 1:
            value = self.makers[value].ins[0]
        group = self.of.get(id(self.makers.get(value)))
        if group is None or group.added is not value or len(group.ops) > 1:
            return None
        if len(self.readers[value]) > 1 or value in self.results:
            return None
        before = self._order_before(op, group)
        return None if any(self.groups[n].needs & 1 << group.number for n in before) else group

    def _sweep_of(self, op: Op) -> KernelGroup | None:
        """Return a group with loops that pass over the operands of the sum `op` anyway."""
        sweep = swept_by(op)
        candidates = {}
        for v in op.ins:
            if v.type.dims != sweep[0]:
                continue
            for other in (self.makers.get(v), *self.readers[v]):
                group = self.of.get(id(other))
                if group is not None:
                    candidates[group.number] = group
        for number in sorted(candidates, reverse=True):
            group = candidates[number]
            if len(group.ops) < _LARGEST and can_sweep(group, op, sweep) and not self._waits(op, group):
                return group
        return None

    def _waits(self, op: Op, group: KernelGroup) -> bool:
        """Return whether an operand of `op` needs the group, but not at the element the group is at."""
        through = {n for v in op.ins if v in self.inlined for n in self._sources((v,))[0]}
        if group.number in through:
            return True
        others = self._sources(op.ins)[0] - {group.number} | self._order_before(op, group)
        return any(self.groups[n].needs & 1 << group.number for n in others)

    def _fits(self, op: Op, group: KernelGroup) -> bool:
        if len(group.ops) >= _LARGEST:
            return False
        shape = (op.outs or op.ins)[0].type.shape
        if group.scattered:
            alone = len(group.ops) == 1 and len(self.readers.get(op.ins[0], [])) == 1 and op.ins[0] not in self.results
            if not (op.kind == "accum" and alone):
                return False
        else:
            inside = [v for v in op.ins if v in self.makers and self.of.get(id(self.makers[v])) is group]
            if not inside or not all(v in group.reached and v.type.shape == shape for v in inside):
                return False
            if op.kind in _EFFECTS and passes_by(op.ins[0], group):
                return False
        return not self._waits(op, group)

    # ------------------------------------------------------------------------------ dependencies

    def _sources(self, values: Iterable[Value]) -> tuple[set[int], set[str]]:
        """Return the kernels and variables that values come from, looking through what is computed where it is read."""
        kernels: set[int] = set()
        variables: set[str] = set()
        stack, seen = list(values), set()
        while stack:
            v = stack.pop()
            if v in seen or v not in self.makers:
                continue
            seen.add(v)
            maker = self.makers[v]
            if maker.kind in ("read", "take"):
                variables.add(maker.var)
            elif v in self.inlined:
                stack += maker.ins
            else:
                kernels.add(self.of[id(maker)].number)
        return kernels, variables

    def _order_before(self, op: Op, group: KernelGroup) -> set[int]:
        """Return the kernels that must run first because of the effect of `op` on its variable."""
        before: set[int] = set()
        if op.kind in _EFFECTS:
            before |= self.var_readers.get(op.var, set())
            if op.var in self.var_changer:
                before.add(self.var_changer[op.var])
        return before - {group.number}

    def _add_needs(self, group: KernelGroup, kernels: set[int]) -> None:
        """Record direct dependencies, and hand them on to every kernel that needs this one."""
        added = 0
        for n in kernels:
            added |= 1 << n | self.groups[n].needs
        if not added & ~group.needs:
            return
        group.needs |= added
        bit = 1 << group.number
        assert not group.needs & bit, "kernels that need each other"
        for other in self.groups:
            if other.needs & bit:
                other.needs |= added


def _keeps_last(op: Op) -> bool:
    perm = ints(complete_attrs(op)["perm"])
    return not perm or perm[-1] == len(perm) - 1
