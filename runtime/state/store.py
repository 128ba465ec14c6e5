"""The state of one rank: variables in versioned buffers, and per microbatch the values that are still needed.

A parameter's version v lives in buffer v mod n, n = `Var.versions`. An update reads the newest version and writes
the next one, in place when n is 1. A version is *live* from the update that makes it until it is *retired*, after the
last microbatch that reads it. The newest version is live in any case. An update may only write over a retired version.
Otherwise it is refused, naming the variable and the versions present. With `grow` it gets one more buffer, which is
counted: the control of the claim that n buffers are enough.

Gradients have as many copies as their variable says, and those of batch t are summed in copy t mod n. Optimiser state
and buffers have one. Gradients that the ranks of a stage sum up lie one behind the other, so that they are summed in
one piece; those of which ranks keep parts lie in memory that is lent, where there is such. Parameters that no update
writes are the same in all versions. All tensors start at a multiple of 64 bytes, which is what torch's allocator gives.
They are in the memory of the stage's device, but for an item with a home (homes.py), which is there while an update
needs it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from typing import NamedTuple

import numpy as np
import torch

from penstock.ir.collective_calls import JointSum
from penstock.ir.graph import COPY, GRAD, Slot, Var
from penstock.ir.memory.items import Image, images_of
from penstock.ir.types import TensorType
from penstock.runtime.messages.ledger import Ledger
from penstock.support.errors import VerifyError

from .homes import HomedItem
from .tensors import ALIGNMENT, CPU, TORCH_DTYPES, allocate
from .versions import Versions

# The buffer of a parameter that is at home.
_AWAY = torch.empty(0)


class SummedGradients(NamedTuple):
    """The gradients that are summed up over ranks: those of which each has the whole sum, and those of which each keeps
    its part. `lend` gives memory for so many bytes of the latter, where others can read it."""

    whole: Sequence[str] = ()
    kept: Sequence[JointSum] = ()
    lend: Callable[[JointSum, int], np.ndarray | None] = lambda call, nbytes: None


NO_SUMS = SummedGradients()


class Store:
    """All state of one rank, with the types of what it has of each variable. `stepped` are the variables that have
    versions; `homed` makes the item of those with a home."""

    def __init__(
        self,
        variables: Mapping[str, Var],
        stepped: Iterable[str],
        *,
        version: int = 0,
        grow: bool = False,
        device: torch.device = CPU,
        summed: SummedGradients = NO_SUMS,
        homed: Callable[[Image], HomedItem] | None = None,
    ) -> None:
        stepped, images = set(stepped), {} if homed is None else images_of(variables)
        # Items by name, and by the place of a version.
        self.items: dict[str, list[HomedItem]] = {}
        if homed is not None:
            self.items = {item: [homed(image) for _ in range(image.versions)] for item, image in images.items()}
        self._item_of = {name: item for item, image in images.items() for name in image.variables}
        self.variables = dict(variables)
        self.grow = grow
        self.version = version
        self.device = device
        self.versioned: dict[str, Versions] = {}
        self.single: dict[str, torch.Tensor] = {}
        self.gradients: dict[str, list[torch.Tensor]] = {}
        # By element type and number of copies: each copy of all of them in one tensor.
        self._sums: list[list[torch.Tensor]] = []
        self._lay_out([variables[name] for name in summed.whole])
        self._kept = [(call, self._lent_copies(call, summed)) for call in summed.kept]
        for name, var in variables.items():
            if name in self._item_of and name in stepped:
                first = version % var.versions
                buffers = [_AWAY] * var.versions
                self.versioned[name] = Versions(var, buffers, {first: version}, device, newest=version, most_live=1)
            if name in self.gradients or name in self._item_of:
                continue
            if var.role == GRAD:
                self.gradients[name] = [allocate(var.type, device).zero_() for _ in range(var.versions)]
            elif name in stepped:
                # Untouched memory costs nothing, so that a second buffer exists only from the first update on.
                buffers, first = [allocate(var.type, device) for _ in range(var.versions)], version % var.versions
                self.versioned[name] = Versions(var, buffers, {first: version}, device, newest=version, most_live=1)
            else:
                self.single[name] = allocate(var.type, device)
        # Batches so far apart use the same copies of all gradients.
        self._turns = math.lcm(*(len(copies) for copies in self.gradients.values()))
        # The results of `buffers` since versions last changed, by graph, version and turn.
        self._by_turn: dict[tuple[str, int | None, int], list[torch.Tensor]] = {}
        self.values: dict[int, dict[str, torch.Tensor]] = {}
        self.value_bytes = self.most_value_bytes = 0
        self.ledger: Ledger | None = None
        # Variables whose memory was given back, and what reads one of them again.
        self._gone: set[str] = set()
        self.reread: Callable[[str], torch.Tensor] | None = None
        # Variables without elements so far, and what fills one of them in a store, which it does not keep.
        self.late = set[str]()
        self.fill: Callable[[Store, str], None] | None = None

    # -------------------------------------------------------------------------------------------- variables

    def _lay_out(self, summed: list[Var]) -> None:
        alike: dict[tuple[str, int], list[Var]] = {}
        for var in summed:
            alike.setdefault((var.type.dtype, var.versions), []).append(var)
        for (dtype, copies), group in alike.items():
            places, total = [], 0
            for var in group:
                places.append(total)
                step = ALIGNMENT // TORCH_DTYPES[dtype].itemsize
                total += -(-var.type.size // step) * step
            blocks = [allocate(TensorType(dtype, (total,)), self.device).zero_() for _ in range(copies)]
            self._sums.append(blocks)
            for var, place in zip(group, places, strict=True):
                self.gradients[var.name] = [copy[place : place + var.type.size].view(var.type.dims) for copy in blocks]

    def _lent_copies(self, call: JointSum, summed: SummedGradients) -> list[torch.Tensor]:
        dtype, size = call.op.ins[0].type.dtype, call.places[-1]
        block = TensorType(dtype, (size,))
        copies = []
        for _ in range(call.copies):
            lent = summed.lend(call, block.nbytes) if self.device == CPU else None
            memory = allocate(block, self.device) if lent is None else torch.from_numpy(lent).view(TORCH_DTYPES[dtype])
            copies.append(memory.zero_())
        for (name, t), first in zip(call.types.items(), call.places, strict=False):
            self.gradients[name] = [copy[first : first + t.size].view(t.dims) for copy in copies]
        return copies

    def kept(self, batch: int) -> list[tuple[JointSum, torch.Tensor]]:
        """Return the gradients of a batch of whose sums ranks keep parts, in whole pieces with what AR does."""
        return [(call, copies[batch % len(copies)]) for call, copies in self._kept]

    def sums(self, batch: int) -> list[torch.Tensor]:
        """Return the gradients of a batch that are summed up over ranks, in whole pieces."""
        return [copies[batch % len(copies)] for copies in self._sums]

    def newest(self, name: str) -> torch.Tensor:
        """Return the buffer with the newest contents of a variable, read again if its memory was given back."""
        if name in self._gone and self.reread is not None:
            return self.reread(name)
        if name in self.versioned:
            return self.of_version(name, self.versioned[name].newest)
        return self._homed(self._item_of[name]).newest(name) if name in self._item_of else self.single[name]

    def of_version(self, name: str, version: int) -> torch.Tensor:
        """Return a live version of a parameter, on the device or at home."""
        there = self.versioned[name].place(version)
        return self._homed(self._item_of[name], version).newest(name) if name in self._item_of else there

    def apart(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return what is at home in copies that nothing changes, by version; they take no memory of the device. What
        has no versions counts as of the newest."""
        copies: dict[int, dict[str, torch.Tensor]] = {}
        for name, of_places in self.items.items():
            live = {
                v for var in of_places[0].image.variables if var in self.versioned for v in self.versioned[var].live()
            }
            for version in live or {self.version}:
                copies.setdefault(version, {}).update(self._homed(name, version).apart())
        return copies

    def bring(self, name: str, text: str, version: int | None = None) -> None:
        """Begin to bring an item to the device, the newest version if not another. `text` names the copy."""
        version = self.version if version is None else version
        item = self._homed(name, version)
        if item.claim(text, version, filled=version <= self.version):
            self._place_item(item, version)
            self._note_item("own", item, version)

    def store(self, name: str, text: str, version: int | None = None) -> None:
        """Begin to copy an item to its home."""
        self._homed(name, version).store(text)

    def let_item_go(self, name: str, version: int | None = None) -> None:
        """Give the memory of an item back, once it is at home and nothing else claims it."""
        version = self.version if version is None else version
        item = self._homed(name, version)
        if item.give_up():
            self._place_item(item, version)
            self._note_item("give", item, version)

    def _place_item(self, item: HomedItem, version: int) -> None:
        """Let graphs have the variables of an item that came, or nothing of one that went."""
        self._by_turn.clear()
        for name in item.image.variables:
            if name in self.versioned:
                place = version % item.image.versions
                self.versioned[name].buffers[place] = item.tensor(name) if item.is_here else _AWAY

    def await_items(self, names: Iterable[str], version: int | None = None) -> None:
        """Wait for items that a computation touches, if they are on their way to the device."""
        for name in names:
            self._homed(name, version).wait()

    def settle(self) -> None:
        """Wait for copies of items to their homes."""
        for item in self.every_item():
            item.settle()

    def every_item(self) -> Iterator[HomedItem]:
        """Yield the items that have a home, each version by itself."""
        for of_places in self.items.values():
            yield from of_places

    def away(self, names: Iterable[str]) -> list[str]:
        """List those of some items whose newest version is not on the device."""
        return [name for name in names if not self._homed(name).is_here]

    @contextmanager
    def filling(self, name: str, *, older: bool) -> Iterator[None]:
        """Let an item be filled on the device for the first time, `older` versions of it as well."""
        of_places = self._items(name)
        with ExitStack() as stack:
            for item in of_places if older else (self._homed(name),):
                stack.enter_context(item.filling())
            yield

    def _items(self, name: str) -> list[HomedItem]:
        if name not in self.items:
            raise VerifyError(f"no item {name} has a home that could be moved")
        return self.items[name]

    def _homed(self, name: str, version: int | None = None) -> HomedItem:
        """Return an item in a version, the newest if not another."""
        of_places = self._items(name)
        return of_places[(self.version if version is None else version) % len(of_places)]

    def fill_late(self, name: str) -> None:
        """Give a variable its elements, if it has none yet."""
        if name in self.late and self.fill is not None:
            self.fill(self, name)
            self.late.remove(name)

    def let_go(self, name: str, stand_in: torch.Tensor) -> None:
        """Give back the memory of a variable that has one version and can be read again, and that no graph reads any
        more."""
        if name in self.single and self.reread is not None:
            self.single[name] = stand_in
            self._gone.add(name)
            self._by_turn.clear()

    def clear(self, name: str) -> None:
        """Fill the buffers of a variable with zeros, for padding that stays so. Those of items begin with zeros."""
        if name not in self._item_of:
            for buffer in self.versioned[name].buffers if name in self.versioned else [self.single[name]]:
                buffer.zero_()

    def older(self) -> dict[int, dict[str, torch.Tensor]]:
        """Return live versions other than the newest, with their parameters. A copy that alone has them is widened."""
        parameters: dict[int, dict[str, torch.Tensor]] = {}
        for name, versions in self.versioned.items():
            source = self.single.get(versions.var.source)
            for version in versions.live() if versions.var.role != COPY or source is not None else ():
                if version != versions.newest:
                    tensor = self.of_version(name, version)
                    kept = {name: tensor} if source is None else {versions.var.source: tensor.to(source.dtype)}
                    parameters.setdefault(version, {}).update(kept)
        return parameters

    def restore_older(self, version: int, name: str) -> torch.Tensor:
        """Make an older version live again and return its buffer, to be filled from a checkpoint."""
        self._by_turn.clear()
        versions = self.versioned[name]
        buffer = version % versions.var.versions
        if versions.held.get(buffer) is not None:
            raise VerifyError(f"has no room for version {version} beside version {versions.newest}", where=f"@{name}")
        versions.held[buffer] = version
        versions.most_live = max(versions.most_live, len(versions.live()))
        return self.of_version(name, version)

    def buffer(self, slot: Slot, version: int | None, batch: int = 0) -> torch.Tensor:
        """Return the tensor for one slot of a graph's signature. `version` is that of the action; for an update, the
        version it makes. `batch` is the one whose gradients are meant."""
        if slot.var in self._item_of and slot.var not in self.versioned:
            return self._homed(self._item_of[slot.var]).tensor(slot.var)
        if slot.var in self.gradients:
            buffers = self.gradients[slot.var]
            return buffers[batch % len(buffers)]
        versions = self.versioned.get(slot.var)
        if versions is None:
            return self.single[slot.var]
        match slot.slot:
            case "mb" if version is not None:
                tensor = versions.place(version)
            case "next":
                tensor = versions.target(self.version + 1, self.grow)
            case _:
                tensor = versions.place(versions.newest)
        if tensor is _AWAY:
            raise VerifyError("is asked for on the device, and is at home", where=f"@{slot.var}")
        return tensor

    def buffers(self, graph: str, slots: Sequence[Slot], version: int | None, batch: int) -> list[torch.Tensor]:
        """Return the tensors for all slots of a graph; between two changes of versions they are looked up once."""
        key = (graph, version, batch % self._turns)
        tensors = self._by_turn.get(key)
        if tensors is None:
            tensors = self._by_turn[key] = [self.buffer(slot, version, batch) for slot in slots]
        return tensors

    def start_update(self, version: int) -> None:
        """Begin the update to a version. Versions are made one after the other; anything else is a broken schedule."""
        if version != self.version + 1:
            raise VerifyError(f"an update makes version {version}, the newest one is {self.version}")
        self._by_turn.clear()
        for versions in self.versioned.values():
            versions.start(version, self.grow)

    def finish_update(self, version: int) -> None:
        self._by_turn.clear()
        for name, versions in self.versioned.items():
            versions.finish(version, self.grow)
            self._note_version("write", name, versions, version)
        self.version = version

    def retire(self, version: int) -> None:
        """Retire a version: no microbatch will read it again."""
        self._by_turn.clear()
        for name, versions in self.versioned.items():
            if version in versions.held.values():
                versions.retired.add(version)
                self._note_version("retire", name, versions, version)

    def trace(self, ledger: Ledger) -> None:
        """Write down from here on what comes and goes, and at once what is there already."""
        self.ledger = ledger
        for name, versions in self.versioned.items():
            for buffer, tensor in enumerate(versions.buffers):
                ledger.variable("own", name, buffer, tensor.nbytes, versions.held.get(buffer))
        for name, copies in {**self.gradients, **{name: [tensor] for name, tensor in self.single.items()}}.items():
            for buffer, tensor in enumerate(copies):
                ledger.variable("own", name, buffer, tensor.nbytes, None)

    def _note_item(self, what: str, item: HomedItem, version: int) -> None:
        if self.ledger is not None:
            for name, var in item.image.variables.items():
                self.ledger.variable(what, name, version % item.image.versions, var.type.nbytes, None)

    def _note_version(self, what: str, name: str, versions: Versions, version: int) -> None:
        if self.ledger is not None:
            buffer = next(buffer for buffer, held in versions.held.items() if held == version)
            self.ledger.variable(what, name, buffer, versions.buffers[buffer].nbytes, version)

    # ---------------------------------------------------------------------------- values of microbatches

    def put(self, mb: int, name: str, tensor: torch.Tensor) -> None:
        held = self.values.setdefault(mb, {})
        if name in held:
            self._let_go(mb, name, held[name])
        self.value_bytes += tensor.nbytes
        if self.ledger is not None:
            self.ledger.value("keep", name, mb, tensor)
        held[name] = tensor
        self.most_value_bytes = max(self.most_value_bytes, self.value_bytes)

    def put_all(self, mb: int, tensors: Mapping[str, torch.Tensor]) -> None:
        for name, tensor in tensors.items():
            self.put(mb, name, tensor)

    def get(self, mb: int, name: str) -> torch.Tensor | None:
        return self.values.get(mb, {}).get(name)

    def keep_only(self, mb: int, names: frozenset[str]) -> None:
        """Release every other value of a microbatch."""
        held = self.values.get(mb, {})
        for name in [n for n in held if n not in names]:
            self._let_go(mb, name, held.pop(name))
        if not held:
            self.values.pop(mb, None)

    def _let_go(self, mb: int, name: str, tensor: torch.Tensor) -> None:
        self.value_bytes -= tensor.nbytes
        if self.ledger is not None:
            self.ledger.value("drop", name, mb, tensor)
