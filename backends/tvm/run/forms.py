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
from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.ir.types import LONG_NAMES, TensorType
from penstock.support.errors import VerifyError

from .large_pages import LargePages
from .machine import give_back

if TYPE_CHECKING:
    import torch

# The machine keeps memory for results of a size, of which none follow: up to so many bytes before it gives them back.
_KEPT = 16 << 20
# What a slot is called by whoever holds its graph.
Name = TypeVar("Name", bound=Hashable)
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


@dataclass
class _MadeOperand:
    """A packed operand with what it was made of: the tensors, and how often torch had changed them."""

    sources: tuple[weakref.ref[torch.Tensor], ...]
    versions: tuple[int, ...]
    operand: Any
    is_in_pages: bool = False

    def move(self, pages: LargePages) -> int:
        """Put the operand into large pages, if it is not there yet. Return the bytes that were let go of elsewhere."""
        if self.is_in_pages:
            return 0
        before, self.operand, self.is_in_pages = self.operand, pages.copied(self.operand), True
        return 0 if self.operand is before else int(before.nbytes)

    def is_of(self, tensors: Sequence[torch.Tensor]) -> bool:
        same = all(ref() is x for ref, x in zip(self.sources, tensors, strict=True))
        return same and self.versions == tuple(x._version for x in tensors)


@dataclass(frozen=True)
class _HeldGraph:
    """The packed operands of a graph, and the addresses of the slots that they are made of, by place."""

    addresses: Mapping[int, int]
    operands: list[Any]


class PackedForms:
    """The packed operands of all graphs of a program. `sizes` are the bytes of the slots of each graph; `forget` calls
    the machine for a small result."""

    def __init__(
        self, graphs: Mapping[str, GraphForms], sizes: Mapping[str, Sequence[int]], forget: Callable[[], object]
    ) -> None:
        self.graphs, self._sizes, self._forget = graphs, sizes, forget
        self._made: dict[tuple[str, tuple[int, ...]], _MadeOperand] = {}
        self._held: dict[str, _HeldGraph] = {}
        self._area: Any = None
        self._place = 0
        self._pages = LargePages()

    def hold(self, graph: str, slots: Sequence[torch.Tensor]) -> frozenset[int]:
        """Make the operands of a graph, and keep them. Return the places of slots that are not read as they are."""
        for _ in self.hold_all({graph: range(len(slots))}, slots.__getitem__):
            pass
        return frozenset(range(len(slots))) - self.graphs[graph].plain

    def unread(self, slots: Mapping[str, Sequence[Name]]) -> set[Name]:
        """Return the variables that these graphs do not read as they are, by the names of their slots."""
        read = {names[place] for graph, names in slots.items() for place in self.graphs[graph].plain}
        return {name for names in slots.values() for name in names} - read

    def hold_all(self, slots: Mapping[str, Sequence[Name]], tensor: Callable[[Name], torch.Tensor]) -> Iterator[Name]:
        """Make the operands of graphs, and keep them. Yield each variable that is not read as it is as soon as all
        that is made of it is there: one after the other they can be let go. `tensor` gives a variable's elements."""
        tasks = self._tasks(slots)
        operands: dict[str, list[Any]] = {graph: [None] * len(self.graphs[graph].forms) for graph in slots}
        left = Counter(name for _, names in tasks for name in set(names))
        unread = self.unread(slots)
        addresses: dict[Name, int] = {}
        kept = 0
        yield from unread - left.keys()
        for (_, names), places in tasks.items():
            graph, number = places[0]
            sources = [tensor(name) for name in names]
            self._refuse_stand_ins(graph, sources)
            addresses.update((name, x.data_ptr()) for name, x in zip(names, sources, strict=True))
            operand = self._operand(self.graphs[graph].forms[number], sources)
            del sources
            left.subtract(set(names))
            yield from (name for name in dict.fromkeys(names) if not left[name] and name in unread)
            # A variable was let go before there is a second copy of what was made of it.
            kept += operand.move(self._pages)
            if kept > _KEPT:
                self._give_back()
                kept = 0
            for graph, number in places:
                operands[graph][number] = operand.operand
        if kept:
            self._give_back()
        for graph, listed in slots.items():
            at = {place: addresses[listed[place]] for form in self.graphs[graph].forms for place in form.slots}
            self._held[graph] = _HeldGraph(dict(sorted(at.items())), operands[graph])

    def _give_back(self) -> None:
        """Give back memory in which no operand is any more. A machine holds its last result until the next one."""
        self._forget()
        give_back()

    def _tasks(self, slots: Mapping[str, Sequence[Name]]) -> dict[tuple[str, tuple[Name, ...]], list[tuple[str, int]]]:
        """Return the operands to be made, by key and variables, each with the places that take it. Those of the largest
        variables come first, when little else is there."""
        tasks: dict[tuple[str, tuple[Name, ...]], list[tuple[str, int]]] = {}
        bytes_of: dict[tuple[str, tuple[Name, ...]], int] = {}
        for graph, names in slots.items():
            for number, form in enumerate(self.graphs[graph].forms):
                key = form.key or f"{graph} {number}"
                task = key, tuple(names[place] for place in form.slots)
                tasks.setdefault(task, []).append((graph, number))
                bytes_of[task] = sum(self._sizes[graph][place] for place in form.slots)
        return dict(sorted(tasks.items(), key=lambda item: -bytes_of[item[0]]))

    def _operand(self, form: PackedForm, sources: Sequence[torch.Tensor]) -> _MadeOperand:
        """Return a packed operand, made anew where it is not there yet."""
        key = (form.key, tuple(x.data_ptr() for x in sources))
        known = self._made.get(key) if form.key else None
        if known is not None and known.is_of(sources):
            return known
        versions = tuple(x._version for x in sources)
        self._made[key] = _MadeOperand(tuple(map(weakref.ref, sources)), versions, form.pack(*sources))
        return self._made[key]

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
            largest = max(max(sizes, default=0) for sizes in self._sizes.values())
            self._area = mmap.mmap(-1, max(largest, mmap.PAGESIZE), flags=flags)
            self._place = torch.frombuffer(self._area, dtype=torch.uint8, count=1).data_ptr()
        dtype = getattr(torch, LONG_NAMES[kind.dtype])
        return torch.frombuffer(self._area, dtype=dtype, count=kind.size).view(kind.dims)

    def _matches(self, x: torch.Tensor, address: int) -> bool:
        return x.data_ptr() in (address, self._place)

    def _refuse_stand_ins(self, graph: str, slots: Sequence[torch.Tensor]) -> None:
        if self._place and any(x.data_ptr() == self._place for x in slots):
            raise VerifyError("a variable was packed, and its own elements let go", where=f"graph {graph}")
