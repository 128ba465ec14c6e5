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
import threading
import weakref
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import NamedTuple

import numpy as np
import torch

from penstock.ir.collective_calls import JointSum
from penstock.ir.graph import COPY, GRAD, Slot, Var
from penstock.ir.memory.items import Image, images_of
from penstock.ir.types import LONG_NAMES, TensorType, numpy_dtype
from penstock.runtime.messages.ledger import Ledger
from penstock.support.errors import VerifyError

from .homes import HomedItem

TORCH_DTYPES: dict[str, torch.dtype] = {ours: getattr(torch, name) for ours, name in LONG_NAMES.items()}
_ALIGNMENT = 64
CPU = torch.device("cpu")
# The buffer of a parameter that is at home.
_AWAY = torch.empty(0)


def allocate(type: TensorType, device: torch.device = CPU) -> torch.Tensor:
    """Return an uninitialised tensor, aligned for vector loads."""
    tensor = torch.empty(type.dims, dtype=TORCH_DTYPES[type.dtype], device=device)
    assert tensor.numel() == 0 or tensor.data_ptr() % _ALIGNMENT == 0, "the allocator does not align to 64 bytes"
    return tensor


@dataclass(slots=True)
class _MemoryBlock:
    """A block of memory and its user, an array of it. That is alive as long as any tensor has its memory, whichever
    tensor was made from which."""

    memory: np.ndarray
    user: Callable[[], np.ndarray | None] = lambda: None


class Recycled:
    """Tensors whose memory is used again, by size, once no tensor holds it. Freed and allocated anew for each
    microbatch, aligned blocks leave holes in glibc's heap (a fifth of a worker's memory). Else the system maps and
    clears them every time. On GPUs torch does this itself. `memory` makes new blocks of so many bytes, if not the
    allocator. Tensors of several sizes take turns in blocks of one size, `room`. Several threads may ask for tensors:
    no other one sees a block between the look at its user and the mark of the new one."""

    def __init__(
        self, device: torch.device = CPU, pinned: bool = False, memory: Callable[[int], np.ndarray] | None = None
    ) -> None:
        self.device, self.pinned = device, pinned
        self._memory = memory or self._allocate
        self._blocks: dict[int, list[_MemoryBlock]] = {}
        self._lock = threading.Lock()
        self._lenders: dict[tuple[TensorType, int], Callable[[], torch.Tensor]] = {}

    def tensor(self, type: TensorType, room: int = 0) -> torch.Tensor:
        """Return an uninitialised tensor."""
        return self.lender(type, room)()

    def lender(self, type: TensorType, room: int = 0) -> Callable[[], torch.Tensor]:
        """Return a function that gives uninitialised tensors of a type, for callers that want many."""
        if (type, room) not in self._lenders:
            self._lenders[type, room] = self._make_lender(type, max(room, type.nbytes))
        return self._lenders[type, room]

    def _make_lender(self, type: TensorType, room: int) -> Callable[[], torch.Tensor]:
        if self.device != CPU or not type.nbytes:
            return lambda: allocate(type, self.device)
        blocks, brain = self._blocks.setdefault(room, []), type.dtype == "bf16"
        # NumPy and torch share no bfloat16.
        like = np.dtype(np.int16) if brain else numpy_dtype(type.dtype)
        # Blocks as arrays of the type, by their place in the list.
        arrays: dict[int, np.ndarray] = {}

        def lend() -> torch.Tensor:
            with self._lock:
                place = 0
                while place < len(blocks) and blocks[place].user() is not None:
                    place += 1
                if place == len(blocks):
                    blocks.append(_MemoryBlock(self._memory(room)))
                if place not in arrays:
                    arrays[place] = blocks[place].memory[: type.nbytes].view(like).reshape(type.dims)
                lent = arrays[place][...]
                blocks[place].user = weakref.ref(lent)
            return torch.from_numpy(lent).view(torch.bfloat16) if brain else torch.from_numpy(lent)

        return lend

    def _allocate(self, nbytes: int) -> np.ndarray:
        memory = allocate(TensorType("u8", (nbytes,)))
        return (memory.pin_memory() if self.pinned else memory).numpy()


def fill(tensor: torch.Tensor, array: np.ndarray) -> torch.Tensor:
    """Copy an array of the same type into a tensor; bf16 goes through its bits, which torch does not share with
    NumPy."""
    if tensor.device != CPU:
        # The array may change once this returns, so the copy is not left to run on.
        tensor.copy_(fill(torch.empty(tensor.shape, dtype=tensor.dtype), array))
    elif tensor.dtype == torch.bfloat16:
        tensor.view(torch.int16).numpy()[...] = array.view(np.int16)
    else:
        tensor.numpy()[...] = array
    return tensor


def as_array(tensor: torch.Tensor) -> np.ndarray:
    """Return the tensor's memory as an array; a copy of it if it is on another device."""
    tensor = tensor.detach().cpu()
    if tensor.dtype == torch.bfloat16:
        import ml_dtypes

        return tensor.view(torch.int16).numpy().view(ml_dtypes.bfloat16)
    return tensor.numpy()


@dataclass
class Versions:
    """The buffers of one parameter. `held` says which version each buffer holds."""

    var: Var
    buffers: list[torch.Tensor]
    held: dict[int, int] = field(default_factory=dict)
    device: torch.device = CPU
    retired: set[int] = field(default_factory=set)
    newest: int = 0
    most_live: int = 0

    def live(self) -> list[int]:
        return sorted(v for v in self.held.values() if v not in self.retired or v == self.newest)

    def place(self, version: int) -> torch.Tensor:
        """Return the buffer that holds a version."""
        for buffer, held in self.held.items():
            if held == version and (version not in self.retired or version == self.newest):
                return self.buffers[buffer]
        present = ", ".join(map(str, self.live()))
        raise VerifyError(f"version {version} was asked for, versions present: {present}", where=f"@{self.var.name}")

    def target(self, version: int, grow: bool) -> torch.Tensor:
        """Return the buffer that an update may write a new version to."""
        return self.buffers[self._free_buffer(version, grow)]

    def _free_buffer(self, version: int, grow: bool) -> int:
        buffer = version % self.var.versions
        if self.held.get(buffer) is None or self.held[buffer] in self.retired:
            return buffer
        if not grow:
            raise VerifyError(
                f"version {version} would overwrite version {self.held[buffer]}, which still has readers; "
                f"versions present: {', '.join(map(str, self.live()))}",
                where=f"@{self.var.name}",
            )
        free = [b for b, held in self.held.items() if held in self.retired and held != self.newest]
        spare = [b for b in range(len(self.buffers)) if b not in self.held]
        if not (free or spare):
            self.buffers.append(allocate(self.var.type, self.device))
            spare = [len(self.buffers) - 1]
        return (free + spare)[0]

    def start(self, version: int, grow: bool) -> None:
        """Begin an update: from here on the new version is alive beside the others."""
        buffer = self._free_buffer(version, grow)
        self.most_live = max(self.most_live, len([v for v in self.live() if v != self.held.get(buffer)]) + 1)

    def finish(self, version: int, grow: bool) -> None:
        """End an update: the old contents of its buffer are gone."""
        buffer = self._free_buffer(version, grow)
        self.retired.discard(self.held.get(buffer, version))
        self.held[buffer] = version
        self.newest = version
        self.most_live = max(self.most_live, len(self.live()))


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
        stepped, images = set(stepped), images_of(variables) if homed is not None else {}
        self.items = {} if homed is None else {name: homed(image) for name, image in images.items()}
        self._item_of = {name: self.items[item] for item, image in images.items() for name in image.variables}
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
                self.versioned[name] = Versions(var, [_AWAY], {first: version}, device, newest=version, most_live=1)
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
                step = _ALIGNMENT // TORCH_DTYPES[dtype].itemsize
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
        if name in self._item_of:
            return self._item_of[name].newest(name)
        if name in self.versioned:
            return self.versioned[name].place(self.versioned[name].newest)
        return self.single[name]

    def apart(self) -> dict[str, torch.Tensor]:
        """Return what is at home in copies that nothing changes; they take no memory of the device."""
        return {name: tensor for item in self.items.values() for name, tensor in item.apart().items()}

    def bring(self, name: str, text: str) -> None:
        """Begin to bring an item to the device. `text` names the copy."""
        item = self._homed(name)
        item.bring(text)
        self._by_turn.clear()
        for var in item.image.variables:
            if var in self.versioned:
                self.versioned[var].buffers[0] = item.tensor(var)
        self._note_item("own", name)

    def store(self, name: str, text: str) -> None:
        """Begin to copy an item to its home."""
        self._homed(name).store(text)

    def let_item_go(self, name: str) -> None:
        """Give the memory of an item back, once it is at home."""
        self._by_turn.clear()
        for var in self._homed(name).image.variables:
            if var in self.versioned:
                self.versioned[var].buffers[0] = _AWAY
        self._homed(name).let_go()
        self._note_item("give", name)

    def await_items(self, names: Iterable[str]) -> None:
        """Wait for items that a computation touches, if they are on their way to the device."""
        for name in names:
            self.items[name].wait()

    def settle(self) -> None:
        """Wait for copies of items to their homes."""
        for item in self.items.values():
            item.settle()

    def _homed(self, name: str) -> HomedItem:
        if name not in self.items:
            raise VerifyError(f"no item {name} has a home that could be moved")
        return self.items[name]

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
                    tensor = versions.place(version)
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
        return versions.buffers[buffer]

    def buffer(self, slot: Slot, version: int | None, batch: int = 0) -> torch.Tensor:
        """Return the tensor for one slot of a graph's signature. `version` is that of the action; for an update, the
        version it makes. `batch` is the one whose gradients are meant."""
        if slot.var in self._item_of:
            # One that is at home is an error here.
            tensor = self._item_of[slot.var].tensor(slot.var)
            if slot.var not in self.versioned:
                return tensor
        if slot.var in self.gradients:
            buffers = self.gradients[slot.var]
            return buffers[batch % len(buffers)]
        versions = self.versioned.get(slot.var)
        if versions is None:
            return self.single[slot.var]
        match slot.slot:
            case "mb" if version is not None:
                return versions.place(version)
            case "next":
                return versions.target(self.version + 1, self.grow)
        return versions.place(versions.newest)

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

    def _note_item(self, what: str, item: str) -> None:
        if self.ledger is not None:
            for name, var in self._homed(item).image.variables.items():
                self.ledger.variable(what, name, 0, var.type.nbytes, None)

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
