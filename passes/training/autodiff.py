"""Reverse-mode differentiation: graph main becomes the graphs F and B, and every parameter gets a gradient variable.

In: `main`, whose output `module.outputs[0]` is the scalar loss of one microbatch. Out:

    F    the same operations; saves what B needs
    B    takes exactly what F saves, in that order; adds to @w.grad the gradient of loss / microbatches, once per
         parameter; no results

After the `microbatches` of a batch @w.grad holds the gradient of the mean loss. With `loss_scale` each gradient is that
of the loss times @loss.scale / microbatches, a factor that is added to @loss.scale.sum. So the gradient of the mean
loss is @w.grad / @loss.scale.sum, whichever versions of the scale were used. Updates divide, once a batch, and a
product that makes a gradient adds to it directly. Parameters are the variables with role param; nothing is computed for
other variables. The gradient of %x is called %x.grad (or it is the very value that was passed on, as by `add`), partial
sums %x.grad.N, helpers %y.vjp.N. Gradients of a value with several uses are added in reverse order of use.

Every operation of B carries the loc of its forward operation, and `of=` names that operation's first result. Without
`of` are: constants and values that depend on constants and variables only (any stage can compute them), sums of
gradients, and `accum`. What is added to @loss.scale.sum depends on variables only, and every stage adds it for itself.

F saves what B needs, except values that depend on constants and variables only, and layout changes, which cost nothing
where they are read. The former are computed again in B (a read in B gives the version that F read). For the latter:

  * of a reshape, a broadcast, the widening of a 16-bit float, a transposition that keeps rows whole, or a slice of what
    is split up entirely, the operand is saved and the operation is repeated;
  * a result that is only transposed (result of attention, say) is saved in its last layout, which is how a kernel
    stores it, and transposed back in B.

Buffers that main writes (running statistics) stay in F. They move once per microbatch, and no gradient passes through
their new values. Values that depend on them are saved, because the buffers have moved on when B runs.

Known limits: first derivatives only; one loss; a parameter is read, never written, by main. Integers and booleans carry
no gradient. A float path from a parameter to the loss through floor, sign or argmax is an error, as is an operation
without a rule.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

from penstock.ir.attrs import Attr
from penstock.ir.graph import GRAD, PARAM, STATE, Graph, Module, Namer, Op, Value, Var
from penstock.ir.liveness import from_state_alone
from penstock.ir.ops import OPS, VIEWS, infer_op, ints, make
from penstock.ir.types import FLOATS, TensorType
from penstock.support.errors import UnsupportedModel, UsageError
from penstock.support.words import itemised

from .vjp import FLAT, STATISTICS, STOPS, VJP, sum_to

# The variable of the loss scale, the factor on all gradients; state, which the update may change. And the sum of the
# factors of a batch.
LOSS_SCALE, SCALE_SUM = "loss.scale", "loss.scale.sum"


def is_repeated(op: Op) -> bool:
    """Return whether it is cheaper to do an operation again than to keep its result: it only makes a copy, or one of
    twice the size."""
    widens = op.kind == "cast" and op.ins[0].type.dtype in ("f16", "bf16") and op.outs[0].type.dtype == "f32"
    return widens or op.kind in ("reshape", "broadcast") or _keeps_rows(op)


@dataclass(frozen=True, slots=True)
class AutodiffOptions:
    """Options of `autodiff`.

    `microbatches` are those per batch: the loss of each counts 1 / microbatches. `loss_scale` is the first factor on
    gradients, which updates divide by; 0 for none.
    """

    microbatches: int = 1
    loss_scale: float = 0.0


def autodiff(module: Module, options: AutodiffOptions) -> Module:
    """Derive a forward graph F and a backward graph B from the model and its loss."""
    main = module.graphs.get("main")
    if main is None:
        raise UsageError(
            f"there is no graph main to differentiate, only {', '.join(module.graphs)}", where=f"@{module.name}"
        )
    if options.microbatches < 1:
        raise UsageError(f"microbatches must be at least 1, got {options.microbatches}", where="autodiff")
    if not 0 <= options.loss_scale < math.inf:
        raise UsageError(f"loss_scale must be 0 or more, got {options.loss_scale}", where="autodiff")
    loss = _loss_of(module, main)
    params = {op.outs[0]: op.var for op in main.ops if op.kind == "read" and module.vars[op.var].role == PARAM}
    differentiated = _carriers(main, loss, params)
    builder = _Backward(main, params, differentiated)
    builder.run(loss, 1.0 / options.microbatches, scaled=options.loss_scale > 0)
    backward, saved = builder.finish()
    forward = Graph("F", main.ins, main.outs, main.ops, saved)
    reached = builder.accumulated
    scalar = TensorType("f32", ())
    scale = (
        {
            LOSS_SCALE: Var(LOSS_SCALE, scalar, STATE, init=(options.loss_scale,)),
            SCALE_SUM: Var(SCALE_SUM, scalar, GRAD, init="zeros"),
        }
        if options.loss_scale
        else {}
    )
    clashes = [f"@{name}" for name in (*(f"{name}.grad" for name in reached), *scale) if name in module.vars]
    if clashes:
        raise UsageError(
            f"gradients need the names {', '.join(clashes)}, which the model uses already",
            hint="rename them in the model",
        )
    grads = {
        f"{name}.grad": Var(f"{name}.grad", module.vars[name].type, GRAD, module.vars[name].stage, init="zeros")
        for name in reached
    }
    graphs: dict[str, Graph] = {}
    for name, graph in module.graphs.items():
        graphs |= {"F": forward, "B": backward} if name == "main" else {name: graph}
    untouched = [name for name, var in module.vars.items() if var.role == PARAM and name not in reached]
    notes = [f"the loss does not depend on @{name}: it stays as it is" for name in untouched]
    return module.but(graphs=graphs, vars={**module.vars, **grads, **scale}).noted("autodiff", *notes)


def _loss_of(module: Module, main: Graph) -> Value:
    loss = next((v for v in main.outs if module.outputs and v.name == module.outputs[0]), None)
    if loss is None or loss.type.shape != () or loss.type.dtype not in FLOATS:
        what = "no output" if loss is None else repr(loss)
        raise UsageError(
            f"the first output must be a floating-point scalar, the loss; it is {what}",
            hint="attach a loss to the model",
        )
    return loss


def _carriers(main: Graph, loss: Value, params: Iterable[Value]) -> set[Value]:
    """Return the values that need a gradient: those on a float path from a parameter to the loss. One error lists all
    operations that break one."""
    useful, passed = {loss}, {loss}  # the values that the loss depends on, and those of them that a gradient gets to
    for op in reversed(main.ops):
        if useful.intersection(op.outs):
            useful.update(op.ins)
        if op.kind in VJP and passed.intersection(op.outs):
            passed.update(v for v in op.ins if v.type.dtype in FLOATS)
    carriers, flat, unknown, rows = {v for v in params if v.type.dtype in FLOATS}, [], [], []
    for op in main.ops:
        if not (carriers.intersection(op.ins) and useful.intersection(op.outs)):
            continue
        place = f"{op.kind} %{op.outs[0].name}" + (f" ({op.loc})" if op.loc else "")
        truncates = op.kind == "cast" and op.outs[0].type.dtype not in (*FLOATS, "bool")
        if op.kind in STOPS:
            continue
        if op.kind in FLAT or truncates:
            flat.append(place)
        elif op.outs[0].type.dtype not in FLOATS:
            continue  # a comparison: the choice it makes has no gradient
        elif op.kind not in VJP:
            unknown.append(place)
        else:
            carriers.update(v for v in op.outs if v in useful)
            rows += [f"%{op.outs[i].name} of {place}" for i in STATISTICS.get(op.kind, ()) if op.outs[i] in passed]
    problems = [f"{place} lies between parameters and the loss, and its gradient is zero" for place in flat]
    problems += [f"{place} has no gradient rule" for place in unknown]
    problems += [
        f"{place}, a statistic of its rows, has no gradient: `decompose{{keep=[]}}` before autodiff makes one"
        for place in rows
    ]
    if problems:
        hint = "freeze the parameters before it, or remove it from the model"
        raise UnsupportedModel("cannot differentiate the model:" + itemised(problems), where=f"@{main.name}", hint=hint)
    if loss not in carriers:
        hint = "tensors of an ONNX file's Constant nodes are no parameters: docs/frontends.md, What becomes a parameter"
        what = "the loss depends on no parameter, there is nothing to train"
        raise UsageError(what, where=f"@{main.name}", hint=hint)
    return carriers & useful


def _keeps_rows(op: Op) -> bool:
    """Return whether a transposition leaves the last dimension where it is: rows are read as fast as before."""
    return op.kind == "transpose" and ints(op.attrs["perm"])[-1:] == (op.outs[0].type.rank - 1,)


def _only_turned(
    main: Graph, readers: Mapping[Value, Sequence[Op]], free: set[Value]
) -> tuple[dict[Value, Sequence[Op]], set[Value]]:
    """Find results with a transposition as their only reader, perhaps with reshapes around it.

    Return the layout changes from each of them to the end of the chain, and the ends.
    """
    turned: dict[Value, Sequence[Op]] = {}
    ends: set[Value] = set()
    for op in main.ops:
        if op.kind in VIEWS or free.issuperset(op.outs):
            continue
        for value in op.outs:
            steps: list[Op] = []
            while len(readers.get(value, ())) == 1 and value not in main.outs:
                step = readers[value][0]
                if step.kind != "reshape" and not _keeps_rows(step):
                    break
                steps.append(step)
                value = step.outs[0]
            if any(step.kind == "transpose" for step in steps):
                turned |= {step.ins[0]: steps[i:] for i, step in enumerate(steps)}
                ends.add(value)
    return turned, ends


class _Backward:
    """The emitter of B, the backward graph. Results get provisional names (no legal ones), so that a gradient can be
    named when it turns out to be complete."""

    def __init__(self, main: Graph, params: dict[Value, str], differentiated: set[Value]) -> None:
        self.main, self.params, self.differentiated = main, params, differentiated
        self.producers = main.producers()
        self.free = from_state_alone(main)
        self.readers: dict[Value, list[Op]] = {}
        for op in main.ops:
            for value in op.ins:
                self.readers.setdefault(value, []).append(op)
        self.turned, self.ends = _only_turned(main, self.readers, self.free)
        self.ops: list[Op] = []
        self.bases: dict[Value, str] = {}  # the final form of a provisional name; forward values keep their names
        self.final: dict[Value, str] = {}
        self.available: set[Value] = set()
        self.saved: set[Value] = set()
        self.grads: dict[Value, Value] = {}
        self.accumulated: list[str] = []
        self.constants: dict[tuple[float, str], Value] = {}
        self.origin: Op | None = None

    # emitting: the interface of gradient rules

    def emit(self, kind: str, *ins: Value, **attrs: Attr) -> Value:
        (out,) = self.emit_all(kind, *ins, **attrs)
        return out

    def emit_all(self, kind: str, *ins: Value, **attrs: Attr) -> tuple[Value, ...]:
        for value in ins:
            self._need(value)
        origin = self.origin
        annotations: dict[str, Attr] = {}
        if origin is not None:
            if origin.outs[0] not in self.free and kind != "const":
                annotations["of"] = origin.outs[0].name
            if "stage" in origin.attrs:
                annotations["stage"] = origin.attrs["stage"]
        defaults = OPS[kind].attrs
        given_attrs = {k: v for k, v in attrs.items() if v != defaults[k]}
        count = len(infer_op(Op(kind, ins, (), given_attrs), {}))
        names = [f"%{len(self.bases) + i}" for i in range(count)]
        op = make(kind, ins, names, origin.loc if origin else "", **given_attrs, **annotations)
        self.ops.append(op)
        base = f"{origin.outs[0].name}.vjp" if origin is not None else "grad"
        self.bases |= dict.fromkeys(op.outs, base)
        return op.outs

    def scalar(self, number: float, like: Value) -> Value:
        key = (number, like.type.dtype)
        if key not in self.constants:
            self.constants[key] = self.emit("const", value=float(number), dtype=like.type.dtype)
        return self.constants[key]

    def _need(self, value: Value) -> None:
        """Make a forward value available here: saved by F, or computed again."""
        if value in self.bases or value in self.available or value in self.saved:
            return
        op = self.producers.get(value)
        if value in self.turned:
            self._turn_back(self.turned[value])
        elif op is None or value in self.ends or not (value in self.free or self._repeats(op)):
            self.saved.add(value)
        else:
            for operand in op.ins:
                self._need(operand)
            self.available.update(op.outs)
            self.ops.append(op if value in self.free else op.with_attrs(of=op.outs[0].name))

    def _repeats(self, op: Op) -> bool:
        """Return whether an operation is done again in B, and its operand saved. Slices are if they divide up the whole
        operand."""
        if op.kind == "slice":
            parts = [reader for reader in self.readers[op.ins[0]] if reader.kind == "slice"]
            return sum(part.outs[0].type.size for part in parts) >= op.ins[0].type.size
        return is_repeated(op)

    def _turn_back(self, steps: Sequence[Op]) -> None:
        """Make a value available from the end of the layout changes that only it goes through."""
        self._need(steps[-1].outs[0])
        for step in reversed(steps):
            value, turned = step.ins[0], step.outs[0]
            if value in self.available:
                continue
            attrs: dict[str, Attr] = {"shape": value.type.dims}
            if step.kind == "transpose":
                perm = ints(step.attrs["perm"])
                attrs = {"perm": tuple(perm.index(i) for i in range(len(perm)))}
            attrs |= {"of": turned.name} | {k: v for k, v in step.attrs.items() if k == "stage"}
            self.ops.append(Op(step.kind, (turned,), (value,), attrs, step.loc))
            self.available.add(value)

    # the walk

    def run(self, loss: Value, seed: float, *, scaled: bool) -> None:
        first_use = {v: i for i, op in reversed(list(enumerate(self.main.ops))) for v in op.ins}
        reads: dict[str, list[Value]] = {}
        for value, name in self.params.items():
            if value in self.differentiated:
                reads.setdefault(name, []).append(value)
        complete_at: dict[int, list[str]] = {}
        for name, values in reads.items():
            complete_at.setdefault(min(first_use.get(v, 0) for v in values), []).append(name)
        self.grads[loss] = self.emit("const", value=seed, dtype=loss.type.dtype)
        if scaled:
            scale = self._new("loss.scale", TensorType("f32", ()))
            self.ops.append(Op("read", (), (scale,), {"var": LOSS_SCALE}))
            factor = self.grads[loss] = self.emit("mul", self.grads[loss], self._like(scale, loss))
            self.ops.append(Op("accum", (self._like(factor, scale),), (), {"var": SCALE_SUM}))
        for i in reversed(range(len(self.main.ops))):
            op = self.main.ops[i]
            if op.kind in VJP and self.differentiated.intersection(op.outs):
                self._differentiate(op)
            for name in complete_at.get(i, ()):
                self._accumulate(name, reads[name])

    def _differentiate(self, op: Op) -> None:
        grads = [self._complete(v) for v in op.outs]
        if all(g is None for g in grads):
            return
        self.origin = op
        for operand, rule in zip(op.ins, VJP[op.kind](self, op, *grads), strict=True):
            if operand not in self.differentiated or rule is None:
                continue
            self._contribute(operand, sum_to(self, rule(), operand))
        self.origin = None

    def _contribute(self, value: Value, grad: Value) -> None:
        if grad not in self.final:
            self.bases[grad] = f"{value.name}.grad"
        if value in self.grads:
            origin, self.origin = self.origin, None  # a sum belongs to no single forward operation
            total = self.emit("add", self.grads[value], grad)
            self.bases[total], self.origin = f"{value.name}.grad", origin
            self.ops[-1] = Op("add", self.ops[-1].ins, self.ops[-1].outs, {}, self._loc_of(value))
            grad = total
        self.grads[value] = grad

    def _loc_of(self, value: Value) -> str:
        op = self.producers.get(value)
        return op.loc if op is not None else ""

    def _complete(self, value: Value) -> Value | None:
        """Return the gradient of a value whose uses were all visited, and give it its final name."""
        grad = self.grads.get(value)
        if grad is not None:
            self.final.setdefault(grad, f"{value.name}.grad")
        return grad

    def _new(self, base: str, type: TensorType) -> Value:
        """Make a value with a provisional name."""
        value = Value(f"%{len(self.bases)}", type)
        self.bases[value] = base
        return value

    def _like(self, scalar: Value, value: Value) -> Value:
        return scalar if scalar.type.dtype == value.type.dtype else self.emit("cast", scalar, dtype=value.type.dtype)

    def _accumulate(self, name: str, reads: list[Value]) -> None:
        """Add the gradient of one parameter, over all its reads, to its variable."""
        for other in reads[:0:-1]:
            grad = self._complete(other)
            if grad is not None:
                self._contribute(reads[0], grad)
        total = self._complete(reads[0])
        if total is not None:
            self.ops.append(Op("accum", (total,), (), {"var": f"{name}.grad"}, self._loc_of(reads[0])))
            self.accumulated.append(name)

    # naming

    def finish(self) -> tuple[Graph, tuple[Value, ...]]:
        """Return B with its final names, and the values that F has to save, in the order of F."""
        namer = Namer.of(self.main)
        names = {value: namer.fresh(name) for value, name in self.final.items()}
        table: dict[Value, Value] = {}
        for op in self.ops:
            for out in op.outs:
                if out in self.bases:
                    table[out] = Value(names.get(out) or namer.fresh(self.bases[out]), out.type)
        ops = tuple(op.renamed(table) for op in self.ops)
        order = (*self.main.ins, *(v for op in self.main.ops for v in op.outs))
        saved = tuple(v for v in order if v in self.saved)
        return Graph("B", saved, (), ops), saved
