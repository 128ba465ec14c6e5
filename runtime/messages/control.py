"""Messages between a job and its workers: typed records with raw array bytes behind them, over an inherited socket
pair.

4 bytes: length of the record · 4 bytes: length of the list of arrays · record · list of arrays · the arrays' bytes

Records are msgspec Structs that refuse unknown fields; arrays travel as dtype, shape and bytes. There is no pickle. A
channel is used by one receiving thread at each end. A message goes out whole, from whichever thread.
"""

from __future__ import annotations

import select
import socket
import struct
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from typing import NamedTuple

import msgspec
import numpy as np

from penstock.ir.types import dtype_of, numpy_dtype
from penstock.support.errors import VerifyError

from .defaults import AHEAD, SYNTHETIC, WARN, WRAP
from .ledger import CopyTimes, LedgerEntry

Arrays = dict[str, np.ndarray]
_HEAD = struct.Struct("<II")
# Bytes of a record without its arrays.
_LARGEST = 1 << 28


class Record(msgspec.Struct, forbid_unknown_fields=True, frozen=True, tag=True):
    """Base of all messages."""


class DataSpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True):
    """The source of samples: files (data/files.py) or `synthetic`. `last` says what happens where samples are no
    multiple of a batch: wrap, drop or pad (data/samples.py)."""

    source: str = SYNTHETIC
    shuffle: bool = False
    seed: int = 0
    last: str = WRAP


@dataclass(frozen=True)
class Rank:
    """The start of a rank's process: its number, and the descriptors that become its own."""

    rank: int
    world: int
    threads: int
    control: int
    status: int
    log: int


class Evaluation(NamedTuple):
    """The mean loss of so many samples."""

    loss: float
    samples: int


# ------------------------------------------------------------------------------------------------ to a worker


class Setup(Record, frozen=True):
    """The first message. `resume` is one checkpoint directory. `audit` asks for the version log. `retire` is off only
    in tests that show what retirement is for: buffers then grow and are counted. `pace` (seconds by kind of
    computation, or by stage and kind, runtime/worker/pace.py) and `latency` (seconds from a send until its message
    arrives) are for measuring schedules. `tables` are the elements of the tables by variable. `prefetch` is how many
    microbatches are read ahead of the computation; with 0, data is read when it is asked for. `evaluation` is what
    Evaluate computes the loss of. `offset` is the sample that microbatch 0 would begin with, and `key` is what random
    draws are made from beside the module's seed (runtime/checkpoint/resuming.py). `nan` says what a loss that is not
    finite does: `stop` ends the run, otherwise it goes on. `secret` is what the ranks of this start seal the values of
    their meeting point with."""

    bundle: str
    timeout: float
    data: DataSpec | None = None
    resume: str | None = None
    audit: bool = False
    retire: bool = True
    trace: bool = False
    pace: dict[str, float] = {}
    latency: float = 0.0
    tables: dict[str, tuple[float, ...]] = {}
    prefetch: int = AHEAD
    offset: int = 0
    key: int = 0
    nan: str = WARN
    evaluation: DataSpec | None = None
    secret: str = ""


class Join(Record, frozen=True):
    """The port where the group meets."""

    port: int


class RunCommand(Record, frozen=True):
    """The command to run from an empty pipeline to an empty pipeline. Without `batches`, Batch messages follow, then
    End."""

    first: int
    batches: int | None = None


class Batch(Record, frozen=True):
    """One global batch; its arrays are the inputs that this worker feeds, of the microbatches that it runs."""

    index: int


class End(Record, frozen=True):
    """No more batches in this run."""


class Serve(Record, frozen=True):
    """The command to answer requests, from an empty pipeline to an empty pipeline: RequestBatch messages follow, then
    End. `first` is the first batch, as in RunCommand."""

    first: int


class RequestBatch(Record, frozen=True):
    """One microbatch of requests; its arrays are the inputs that this worker feeds. `rung` is the size of the model
    that computes it, by its name in the ladder; empty where the model has one size."""

    mb: int
    rung: str = ""


class SaveCommand(Record, frozen=True):
    """The command to write a checkpoint after `step` steps into `directory`, together. In the `background` it is
    answered when the state is copied. `keep_last` is how many checkpoints are kept in all."""

    directory: str
    step: int
    background: bool = False
    keep_last: int | None = None


class Evaluate(Record, frozen=True):
    """The command to compute the loss of that many samples of the evaluation data, between two runs."""

    samples: int


class FetchParameters(Record, frozen=True):
    """The command to send the newest parameters of this stage."""


class FetchAudit(Record, frozen=True):
    """The command to send counts of live versions and the version log."""


class Stop(Record, frozen=True):
    """The command to leave the group and end."""


class Alive(Record, frozen=True):
    """A keeper's sign of life; `busy` are the seconds that each rank has computed, where they are known."""

    busy: tuple[float, ...] = ()


# ------------------------------------------------------------------------------------------------ from a worker


class Hosting(Record, frozen=True):
    """The port where rank 0 listens for the group."""

    port: int


class Ready(Record, frozen=True):
    """The group stands, the stage is loaded."""


class Step(Record, frozen=True):
    """A finished optimiser step. `at` is the monotonic clock of the host, `losses` are those of the microbatches.
    `grad_norm` is the norm of the gradient where the update looks at it."""

    step: int
    loss: float
    losses: tuple[float, ...]
    lr: float | None
    at: float
    grad_norm: float | None = None


class Output(Record, frozen=True):
    """Results of one microbatch in inference; the arrays are module outputs."""

    mb: int


class Done(Record, frozen=True):
    """The end of a RunCommand, SaveCommand or Stop. `peak_bytes` is the largest resident size of the process so far,
    without memory of other ranks that it reads in place.
    `base_bytes` is its size before it had any variable: the interpreter, torch, the back end's libraries and the
    stage's code. `waited` is how many seconds a SaveCommand waited for the one before. `device_bytes` is the most
    memory of the rank's GPU in use, by all processes, at the end of a batch, `captured_bytes` what captured calls keep
    of it."""

    peak_bytes: int = 0
    base_bytes: int = 0
    waited: float = 0.0
    device_bytes: int = 0
    captured_bytes: int = 0


class Parameters(Record, frozen=True):
    """Answer to FetchParameters; the arrays are the parameters."""


class Gathered(Record, frozen=True):
    """To a keeper: the addresses where the keepers of all ranks listen, by rank, the processes of the ranks, and the
    token of this start."""

    hosts: tuple[str, ...]
    addresses: tuple[str, ...]
    ports: tuple[int, ...]
    processes: tuple[int, ...]
    token: str


class Planned(Record, frozen=True):
    """To a keeper: the bundle that runs in the place of the one it was started for."""

    bundle: str


class LogEntry(msgspec.Struct, forbid_unknown_fields=True, frozen=True, array_like=True):
    """Weight version that a stage used (phase F or B) or made (phase U; `mb` is then the batch)."""

    stage: int
    mb: int
    phase: str
    version: int


class Audit(Record, frozen=True):
    """The counts of one rank's store: versions alive at once per variable (largest ever), buffers per variable,
    activation bytes."""

    live_versions: dict[str, int]
    buffers: dict[str, int]
    activation_bytes: int
    log: tuple[LogEntry, ...]


class Evaluated(Record, frozen=True):
    """Losses of portions (worker/evaluation.py) by their number, of a rank that computes losses."""

    losses: dict[int, float]


class TraceRecord(Record, frozen=True):
    """Actions with start and end on the host's monotonic clock, sent with the end of a RunCommand when tracing. `held`
    are the entries of its rank's memory. `collectives` have a text, and the times at which each began, the program
    waited, and went on. `copies` are those between the device and other memory spaces."""

    events: tuple[tuple[str, float, float], ...]
    held: tuple[LedgerEntry, ...] = ()
    collectives: tuple[tuple[str, float, float, float], ...] = ()
    copies: tuple[CopyTimes, ...] = ()


class Wake(Record, frozen=True):
    """A message that no rank sent: the launcher puts it among those of its workers, so that a thread that waits for
    them looks up."""


class Failed(Record, frozen=True):
    """The error that a worker ends with. `error` is the class of penstock.support.errors, or Internal."""

    error: str
    what: str
    where: str = ""
    hint: str = ""


Message = (
    Setup | Join | RunCommand | Batch | End | Serve | RequestBatch | SaveCommand | Evaluate | FetchParameters
    | FetchAudit | Stop | Alive | Gathered | Planned | Hosting | Ready | Step | Output | Done | Parameters | Audit
    | Evaluated | TraceRecord | Wake | Failed
)  # fmt: skip


class ArraySpec(msgspec.Struct, forbid_unknown_fields=True, frozen=True, array_like=True):
    name: str
    dtype: str
    shape: tuple[int, ...]


class Channel:
    """One end of the socket pair."""

    def __init__(self, connection: socket.socket) -> None:
        self._socket = connection
        self._sending = threading.Lock()
        self._encode = msgspec.msgpack.Encoder().encode
        self._decode = msgspec.msgpack.Decoder(Message).decode
        self._decode_specs = msgspec.msgpack.Decoder(tuple[ArraySpec, ...]).decode

    def send(self, message: Record, arrays: Mapping[str, np.ndarray] | None = None) -> None:
        contiguous = {name: np.ascontiguousarray(array) for name, array in (arrays or {}).items()}
        record = self._encode(message)
        specs = self._encode(
            [ArraySpec(name, dtype_of(a.dtype), (arrays or {})[name].shape) for name, a in contiguous.items()]
        )
        with self._sending:
            self._socket.sendall(_HEAD.pack(len(record), len(specs)) + record + specs)
            for array in contiguous.values():
                if array.nbytes:
                    self._socket.sendall(array.reshape(-1).view(np.uint8).data)

    def offer(self, message: Record) -> bool:
        """Send a short message if there is room, so that an end that does not read holds no sender up. Return whether
        it was sent."""
        room = select.poll()
        room.register(self._socket, select.POLLOUT)
        if not room.poll(0):
            return False
        self.send(message)
        return True

    def receive(self) -> tuple[Message, Arrays] | None:
        """Return the next message; None when the other end is closed. VerifyError for what is no message."""
        try:
            return self._receive()
        except (msgspec.MsgspecError, ValueError, KeyError, OverflowError, MemoryError) as error:
            raise VerifyError(f"a damaged message: {error}", where="control connection") from error

    def _receive(self) -> tuple[Message, Arrays] | None:
        head = self._read(_HEAD.size)
        if head is None:
            return None
        length, specs_length = _HEAD.unpack(head)
        if max(length, specs_length) > _LARGEST:
            raise ValueError(f"a record of {max(length, specs_length)} bytes, at most {_LARGEST} are expected")
        record, listed = self._read(length), self._read(specs_length)
        if record is None or listed is None:
            return None
        arrays: Arrays = {}
        for spec in self._decode_specs(listed):
            array = np.empty(spec.shape, numpy_dtype(spec.dtype))
            if array.nbytes and not self._fill(array.reshape(-1).view(np.uint8).data):
                return None
            arrays[spec.name] = array
        return self._decode(record), arrays

    def close(self) -> None:
        self._socket.close()

    def _read(self, size: int) -> bytes | None:
        data = bytearray(size)
        return bytes(data) if self._fill(memoryview(data)) else None

    def _fill(self, view: memoryview) -> bool:
        while len(view):
            try:
                count = self._socket.recv_into(view)
            except ConnectionError:
                return False
            if count == 0:
                return False
            view = view[count:]
        return True
