"""The packed operands of a program: made of variables that keep their values, and shared by all graphs that pack alike.

In: the functions of a library that pack, and what it says of them. Out: packed operands, and stand-ins for variables
that nothing but packed operands is made of. A stand-in has the type of a variable and no memory: all of them lie in one
area of addresses that is never touched.

Limit: an operand is shared while the tensors it was made of are the same objects and were not changed by torch.
"""

from __future__ import annotations

import json
import mmap
import weakref
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from penstock.ir.types import LONG_NAMES, TensorType
from penstock.support.errors import VerifyError

from .large_pages import LargePages

if TYPE_CHECKING:
    import torch

# Linux's number, for versions of Python without a name for it.
_NO_RESERVE = 0x4000


@dataclass(frozen=True)
class PackedForm:
    """A packed operand of a graph: the function that makes it, its key, and the slots that it is made of."""

    pack: Callable[..., Any]
    key: str
    slots: tuple[int, ...]


@dataclass(frozen=True)
class GraphForms:
    """The packed operands of a graph, in order, and the places of slots that are read as they are."""

    forms: tuple[PackedForm, ...]
    plain: frozenset[int]


def forms_of(text: bytes, functions: Callable[[int], Callable[..., Any]]) -> GraphForms:
    """Read the description of a graph's operands, with the function that makes each."""
    content = json.loads(text)
    forms = [
        PackedForm(functions(number), row["key"], tuple(row["slots"])) for number, row in enumerate(content["operands"])
    ]
    return GraphForms(tuple(forms), frozenset(content["plain"]))


@dataclass(frozen=True)
class _MadeOperand:
    """A packed operand with what it was made of: the tensors, and how often torch had changed them."""

    sources: tuple[weakref.ref[torch.Tensor], ...]
    versions: tuple[int, ...]
    operand: Any

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        same = all(ref() is x for ref, x in zip(self.sources, tensors, strict=True))
        return same and self.versions == tuple(x._version for x in tensors)


@dataclass(frozen=True)
class _HeldGraph:
    """The packed operands of a graph, and the addresses of the slots that they are made of, by place."""

    addresses: Mapping[int, int]
    operands: list[Any]


class PackedForms:
    """The packed operands of all graphs of a program."""

    def __init__(self, graphs: Mapping[str, GraphForms], largest: int) -> None:
        self.graphs = graphs
        # The bytes of the largest variable.
        self._largest = largest
        self._made: dict[tuple[str, tuple[int, ...]], _MadeOperand] = {}
        self._held: dict[str, _HeldGraph] = {}
        self._area: Any = None
        self._place = 0
        self._pages = LargePages()

    def hold(self, graph: str, slots: Sequence[torch.Tensor]) -> frozenset[int]:
        """Make the operands of a graph, and keep them. Return the places of slots that are not read as they are."""
        known = self.graphs[graph]
        self._refuse_stand_ins(graph, slots)
        operands = [self._operand(form, [slots[place] for place in form.slots]) for form in known.forms]
        places = {place for form in known.forms for place in form.slots}
        self._held[graph] = _HeldGraph({place: slots[place].data_ptr() for place in sorted(places)}, operands)
        return frozenset(range(len(slots))) - known.plain

    def _operand(self, form: PackedForm, sources: Sequence[torch.Tensor]) -> Any:
        """Return a packed operand, made anew where it is not there yet."""
        key = (form.key, tuple(x.data_ptr() for x in sources))
        known = self._made.get(key) if form.key else None
        if known is not None and known.is_of(sources):
            return known.operand
        versions = tuple(x._version for x in sources)
        operand = self._pages.copied(form.pack(*sources))
        self._made[key] = _MadeOperand(tuple(map(weakref.ref, sources)), versions, operand)
        return operand

    def held(self, graph: str, slots: Sequence[torch.Tensor]) -> list[Any] | None:
        """Return the operands that were made of these slots, or of those that stand-ins are there for; else None. Other
        slots may change, or move."""
        kept = self._held.get(graph)
        if kept is None or not all(self._matches(slots[place], at) for place, at in kept.addresses.items()):
            self._refuse_stand_ins(graph, slots)
            return None
        return kept.operands

    def made(self, graph: str, slots: Sequence[torch.Tensor]) -> list[Any]:
        """Return the operands of a graph for these slots, made anew where they were not held."""
        held = self.held(graph, slots)
        if held is not None:
            return held
        return [form.pack(*(slots[place] for place in form.slots)) for form in self.graphs[graph].forms]

    def stand_in(self, kind: TensorType) -> torch.Tensor:
        """Return a tensor of a type that has no memory, and that must not be read."""
        import torch  # lazy: heavy

        if self._area is None:
            # Pages that nobody touches take no memory, and none is set aside for them.
            flags = mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS | getattr(mmap, "MAP_NORESERVE", _NO_RESERVE)
            self._area = mmap.mmap(-1, max(self._largest, mmap.PAGESIZE), flags=flags)
            self._place = torch.frombuffer(self._area, dtype=torch.uint8, count=1).data_ptr()
        dtype = getattr(torch, LONG_NAMES[kind.dtype])
        return torch.frombuffer(self._area, dtype=dtype, count=kind.size).view(kind.dims)

    def _matches(self, x: torch.Tensor, address: int) -> bool:
        return x.data_ptr() in (address, self._place)

    def _refuse_stand_ins(self, graph: str, slots: Sequence[torch.Tensor]) -> None:
        if self._place and any(x.data_ptr() == self._place for x in slots):
            raise VerifyError("a variable was packed, and its own elements let go", where=f"graph {graph}")
