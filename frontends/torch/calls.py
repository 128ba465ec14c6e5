"""Import of one call after the other: computed at import, written by its rule, or recorded as a problem.

The result of a call is compared with the type that torch gives it. torch itself computes a call whose operands are all
known, unless the result is large. The result of a call that cannot be imported is `Lost`, so that one error lists all
problems.
"""

from __future__ import annotations

import operator
import re
from collections.abc import Sequence
from pathlib import PurePath
from typing import Any

import torch
from torch.fx import Node as Call
from torch.utils import _pytree as pytree

from penstock.frontends.imported import Unimported, refusal
from penstock.frontends.writer import LARGEST, Lost, Refused
from penstock.ir.graph import Value
from penstock.ir.types import TensorType
from penstock.support.errors import UnsupportedModel

from .arrays import our_dtype
from .node import Absent, KnownElements, TorchBuilder, TorchNode, TorchWeight
from .source import SymbolSizes
from .table import ALL_RULES, CHECKS, name_of

# Their rules write these even where all operands are known: torch returns uninitialised memory.
_UNSET = "empty"


class Caller:
    """An importer of calls in order."""

    def __init__(self, builder: TorchBuilder, sizes: SymbolSizes, problems: list[Unimported | str]) -> None:
        self.builder = builder
        self.sizes = sizes
        self.problems = problems
        self.folded: list[str] = []

    def take(self, call: Call) -> None:
        env = self.builder.env
        node: TorchNode | None = None
        try:
            if isinstance(call.target, torch._ops.OpOverload):
                if name_of(call.target) in CHECKS:
                    env[call] = None
                    return
                if self._lacks_types(call):
                    env[call] = self._lost(call)
                    return
                node = TorchNode(self.builder, call, location(call))
                env[call] = self._result(node)
            else:
                env[call] = self._other(call)
        except (Refused, TypeError) as error:
            if node is not None:
                node.abandon()
            self.problems.append(Unimported(location(call), _called(call), str(error), _line(call)))
            env[call] = self._lost(call)

    def _result(self, node: TorchNode) -> Any:
        call = node.call
        name = name_of(call.target)
        draws = torch.Tag.nondeterministic_seeded in call.target.tags  # type: ignore[union-attr]
        if draws and name not in ALL_RULES:
            raise Refused("random numbers of this kind are not supported")
        operands = node.operands()
        if not draws and _plain(operands) and not name.startswith(_UNSET) and self._small(call):
            result = _computed(call, operands)
            if isinstance(result, torch.Tensor | tuple | list):
                self.folded.append(call.name)
        elif name in ALL_RULES:
            result = ALL_RULES[name](node)
            unread = node.unread()
            if unread:
                raise Refused(f"argument {', '.join(unread)} is not supported")
        else:
            raise Refused(_missing(call))
        self._compare(call, result)
        return node.finish(result)

    def _other(self, call: Call) -> Any:
        """Import what is no operation of ATen: picking one of several results, and computing with sizes."""
        arguments: list[Any] = [self.builder.env[a] if isinstance(a, Call) else a for a in call.args]
        if call.target is operator.getitem:
            tensor = arguments[0]
            return self._lost(call) if isinstance(tensor, Lost) else tensor[arguments[1]]
        if call.op == "call_function" and all(isinstance(a, bool | int | float) for a in arguments) and not call.kwargs:
            return call.target(*arguments)  # type: ignore[operator]
        if (
            getattr(call.target, "__name__", "") == "with_effects"
        ):  # the order of operations with effects, and one of these
            if any(isinstance(a, Lost) for a in pytree.tree_leaves(arguments)):
                return Lost(None)
            raise Refused(f"{arguments[1]} has effects besides its results")
        if call.op == "get_attr":  # the body of a call of control flow, which reports the problem
            return Lost(None)
        if (
            any(isinstance(a, Lost) and a.type is None for a in arguments)
            and "higher_order" not in type(call.target).__module__
        ):
            return Lost(None)
        raise Refused("control flow is not supported" if "higher_order" in str(type(call.target)).lower() else _NO_RULE)

    # ------------------------------------------------------------------------------------ types

    def _lacks_types(self, call: Call) -> bool:
        """Return whether the call cannot be judged, because the type of an operand was lost with another call."""
        operands = (self.builder.env[a] for a in call.all_input_nodes)
        return any(isinstance(operand, Lost) and operand.type is None for operand in operands)

    def _promised(self, meta: object) -> TensorType | None:
        """Return the type that torch gives a result, or None where it is unknown or has no counterpart."""
        if not isinstance(meta, torch.Tensor):
            return None
        shape = self.sizes.shape(meta)
        try:
            return None if -1 in shape else TensorType(our_dtype(meta.dtype), shape)
        except ValueError:
            return None

    def _lost(self, call: Call) -> Any:
        meta = call.meta.get("val")
        if isinstance(meta, tuple | list):
            return tuple(Lost(self._promised(result)) for result in meta)
        return Lost(self._promised(meta))

    def _small(self, call: Call) -> bool:
        meta = call.meta.get("val")
        kinds = [self._promised(result) for result in (meta if isinstance(meta, tuple | list) else (meta,))]
        return all(kind is None or kind.size <= LARGEST for kind in kinds)

    def _compare(self, call: Call, result: Any) -> None:
        """Compare each result with the type that torch gives it."""
        metas = call.meta.get("val")
        pairs = zip(metas, result, strict=False) if isinstance(metas, tuple | list) else [(metas, result)]
        for i, (meta, computed) in enumerate(pairs):
            promised = self._promised(meta)
            if isinstance(computed, KnownElements | TorchWeight):
                computed = computed.tensor
            if promised is None or not isinstance(computed, Value | torch.Tensor):
                continue
            actual = (
                computed.type
                if isinstance(computed, Value)
                else TensorType(our_dtype(computed.dtype), tuple(computed.shape))
            )
            if actual != promised:
                raise Refused(f"result {i} comes out as {actual}, but torch says {promised}")


def _plain(operands: Sequence[Any]) -> bool:
    """Return whether no argument is computed at run time or trained."""
    return all(
        _plain(a) if isinstance(a, list | tuple) else not isinstance(a, Value | TorchWeight | Lost | Absent)
        for a in operands
    )


def _computed(call: Call, operands: Sequence[Any]) -> Any:
    def elements(value: Any) -> Any:
        if isinstance(value, KnownElements):
            return value.tensor
        return [elements(v) for v in value] if isinstance(value, list | tuple) else value

    schema = call.target._schema.arguments  # type: ignore[union-attr]
    arguments = [(a, elements(v)) for a, v in zip(schema, operands, strict=True)]
    try:
        with torch.no_grad():
            return call.target(
                *(v for a, v in arguments if not a.kwarg_only), **{a.name: v for a, v in arguments if a.kwarg_only}
            )  # type: ignore[operator]
    except (RuntimeError, IndexError, NotImplementedError, ValueError) as error:
        raise Refused(f"cannot be computed at import: {str(error).splitlines()[0]}") from error


# ---------------------------------------------------------------------------------------- words


_NO_RULE = "no rule for this operation"


def location(call: Call) -> str:
    """Return the place of a call in the module: the path of the submodule and the call's own name."""
    stack = call.meta.get("nn_module_stack") or {}
    path = next((str(p) for p, _ in reversed(list(stack.values())) if p), "")
    path = re.sub(r"^L\['self'\]\.?|^L__self___?", "", path)
    return f"{path}/{call.name}" if path else call.name


def _called(call: Call) -> str:
    return str(call.target) if call.op == "call_function" else call.op


def _missing(call: Call) -> str:
    """Explain why there is no rule."""
    metas = pytree.tree_leaves([node.meta.get("val") for node in (call, *call.all_input_nodes)])
    if any(isinstance(meta, torch.Tensor) and meta.is_complex() for meta in metas):
        return "there are no complex numbers here; a model may compute their real and imaginary parts apart"
    return _NO_RULE


_FRAME = re.compile(r'File "([^"]+)", line (\d+)')


def _line(call: Call) -> str:
    """Return the innermost line of the model's own code, or of its library's, that made the call."""
    frames = _FRAME.findall(call.meta.get("stack_trace") or "")
    outside = [frame for frame in frames if "torch" not in PurePath(frame[0]).parts] or frames
    return f" at {PurePath(outside[-1][0]).name}:{outside[-1][1]}" if outside else ""


def complain(where: str, problems: Sequence[Unimported | str]) -> UnsupportedModel:
    unknown = any(str(problem).endswith(_NO_RULE) for problem in problems)
    return UnsupportedModel(
        refusal(problems),
        where=where,
        hint="docs/frontends.md lists the operations of ATen that are supported" if unknown else "",
    )
