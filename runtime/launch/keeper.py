"""The keeper of one rank of a group: the process that torchrun or srun started.

In: options, a place. Out: an exit code, and one message of the whole group when something fails. The keeper starts
the rank's worker (joined.py), watches it, and speaks with the keepers of the other ranks (peers.py).

A keeper imports nothing heavy and does nothing but wait, so it lives when its worker does not. It sees how the
worker died, that it stopped, what it reports. Keepers tell each other, and find out which ranks cannot be reached.
After a failure, the lowest rank that lives waits a little for the cause: a broken connection is noticed sooner than
what broke it. It says the cause once, and tells the other keepers, which end quietly. Where it does not, the next one
does. In each half of a cut network that is one rank. Every keeper kills its worker before it ends.

    died error    the worker ended, or reported an exception       silent       the worker has no heartbeat
    closed        the keeper of a rank is gone                     unreachable  nothing is heard of a rank: a cut, a
                                                                                host that is down
    ended         the launcher ended a rank                        abandoned    the launcher is gone
    symptom       a rank lost a peer; a rank with any other trouble is the cause
"""

from __future__ import annotations

import contextlib
import json
import os
import queue
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
from collections.abc import Mapping
from dataclasses import dataclass
from types import FrameType

import msgspec

from penstock.backends.bundle.format import Bundle, listed_ranks, open_bundle
from penstock.ir.graph import Module
from penstock.runtime.group.hosts import Interface, ProcessPlace, check_world, choose_interface, place_of, same_host
from penstock.runtime.group.trust import open_trust
from penstock.runtime.messages.control import Alive, Channel, Done, Failed, Gathered, Message, Planned
from penstock.runtime.messages.status import Deadline, Patience, StatusBoard, await_saves, describe_line, is_stopped
from penstock.support.errors import PeerLost, PenstockError, UsageError, VerifyError
from penstock.support.processes import command_of
from penstock.support.terminal import say_as_is

from .failures import ending, error_of, named, newest_checkpoint, others, place, reached
from .local import START_SECONDS, thread_environment
from .logs import Follower, chosen_ranks, tail
from .options import RunOptions
from .peers import Bye, JobVerdict, Peers, Pulse, Said, Told
from .spawning import spawn

# Stronger evidence comes first: the report of a rank on itself before observations of other ranks.
KINDS = ("error", "died", "silent", "closed", "unreachable", "ended", "abandoned", "symptom")
_TICK_SECONDS = 0.1
_PULSE_SECONDS = 0.5
# The seconds to look for the cause after the first sign of a failure. The second number is the wait of each further
# rank for the rank before it.
_CAUSE_SECONDS, _TURN_SECONDS = 1.5, 2.0
# A worker may be stopped for so long before it begins, where there is no heartbeat.
_STOPPED_SECONDS = 10.0
_END_SECONDS, _KILL_SECONDS = 2.0, 10.0
# The worker misses its keeper while that connects, so this is less than any heartbeat.
_CONNECT_SECONDS = 0.75


def become_rank(options: RunOptions) -> None:
    """Run as the keeper of a rank of the group until it ends; does not return."""
    seat = place_of()
    try:
        # Before any rank looks for its files, which a rank too many would not find.
        check_world(options.bundle, listed_ranks(options.bundle), seat, options.elastic)
    except UsageError as error:
        # All ranks have the same error, and one rank of each host prints it. torchrun may end that rank before, so it
        # gets the error from the rank that ends first.
        _tell_torchrun(str(error))
        if seat.local_rank == 0:
            raise
        sys.exit(error.exit_code)
    bundle = open_bundle(options.bundle, seat.rank)
    interface = choose_interface(seat, _planned_interface(bundle, seat))
    try:
        keeper = Keeper(options, bundle, seat, interface)
    except PeerLost as error:  # of the start of its worker
        _tell_torchrun(str(error))
        raise
    for number in (signal.SIGTERM, signal.SIGINT):
        signal.signal(number, keeper.note_signal)
    try:
        code = keeper.keep()
    finally:
        keeper.end()
    keeper.tell_end(code)
    sys.stdout.flush()
    sys.exit(code)


def _planned_interface(bundle: Bundle, seat: ProcessPlace) -> str:
    """Return the interface that the bundle's cluster file names for the host that a rank is planned for, if this is
    it."""
    cluster, name = bundle.module.cluster, bundle.rank(seat.rank).host
    names = [host.interface for host in cluster.hosts if host.name == name] if cluster is not None else []
    return names[0] if names and same_host(name, seat.host) else ""


@dataclass(frozen=True)
class Trouble:
    """The failure of a rank, as this keeper knows it."""

    kind: str
    since: float
    doing: str
    error: str
    what: str
    where: str = ""
    hint: str = ""


class Keeper:
    """The worker of one rank, and what is known of the other ranks."""

    def __init__(self, options: RunOptions, bundle: Bundle, seat: ProcessPlace, interface: Interface) -> None:
        self.options, self.bundle, self.seat, self.rank = options, bundle, seat, seat.rank
        self.module: Module = bundle.module
        self._trust = open_trust(options.secret, options.tls)
        self._board = StatusBoard(1)
        self._patience = Patience(options.heartbeat)
        self._messages: queue.SimpleQueue[Message | None] = queue.SimpleQueue()
        self._mesh: Peers | None = None
        self._group: Gathered | None = None
        self._heard: dict[int, float] = {}
        self._doing: dict[int, str] = {}
        self._busy: dict[int, float] = {}
        self._steps = 0
        self._left: set[int] = set()
        self._troubles: dict[int, Trouble] = {}
        self._signal: int | None = None
        self._launcher = launcher_of(os.environ)
        # When the worker was last seen to run.
        self._ran = time.monotonic()
        self._reported = False
        self._log_ranks = chosen_ranks(options.log_ranks, bundle.world_size)
        # Rank 0 speaks for the run. `end` closes the file.
        self._log = tempfile.TemporaryFile(prefix="penstock-worker-") if self.rank else None  # noqa: SIM115
        self._listener = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
        self._listener.bind((interface.address, 0))
        self._listener.listen(max(128, seat.world))
        self._start(interface)

    def _start(self, interface: Interface) -> None:
        threads = self.bundle.rank(self.rank).threads
        ours, theirs = socket.socketpair()
        flags = {
            "threads": str(threads),
            "control": str(theirs.fileno()),
            "status": str(self._board.descriptor),
            "parent": str(os.getpid()),
            "watch": str(self._listener.getsockname()[1]),
            "interface": msgspec.json.encode(interface).decode(),
            "options": msgspec.json.encode(self.options).decode(),
        }
        command = [*command_of("join"), *(part for name, value in flags.items() for part in (f"--{name}", value))]
        with theirs:
            self._process = spawn(
                command,
                f"the worker of rank {self.rank}",
                self.options.heartbeat or _STOPPED_SECONDS,
                env=os.environ | thread_environment(threads),
                pass_fds=(theirs.fileno(), self._board.descriptor),
                stdin=subprocess.DEVNULL,
                stdout=self._log,
                stderr=self._log,
            )
        files = {} if self._log is None else {self.rank: self._log}
        self._follower = Follower(files, {self.rank: self.bundle.rank(self.rank).stages}, self._log_ranks)
        self._channel = Channel(ours)
        # For the first sign of life.
        self._start_limit = START_SECONDS + self.options.timeout
        self._starting = Deadline(self._start_limit)
        self._reader = threading.Thread(target=self._read, name="worker", daemon=True)
        self._reader.start()

    def _read(self) -> None:
        try:
            while (received := self._channel.receive()) is not None:
                self._messages.put(received[0])
        except VerifyError as error:
            self._messages.put(Failed(VerifyError.__name__, f"what its worker says cannot be understood: {error}"))
        self._messages.put(None)

    def note_signal(self, number: int, frame: FrameType | None) -> None:
        self._signal = number

    # -------------------------------------------------------------------------------------------- the loop

    def keep(self) -> int:
        """Watch until the end; return the exit code."""
        pulsed = 0.0
        while True:
            if self._mesh is None:
                time.sleep(_TICK_SECONDS)
            for rank, record in self._mesh.hear(_TICK_SECONDS) if self._mesh is not None else ():
                if isinstance(record, JobVerdict):
                    return record.code
                self._hear(rank, record)
            self._patience.look()
            self._look_at_worker()
            if self.rank not in self._troubles and self._process.poll() == 0:
                if self._mesh is not None:
                    self._mesh.send_all(Bye())
                return 0
            self._look_around()
            if self._signal is not None:
                self._own(
                    "ended", PeerLost.__name__, f"was ended by {signal.Signals(self._signal).name} from its launcher"
                )
                if self._mesh is None or self._is_settled(0.5):
                    self._pulse()
                    return 128 + self._signal
            if self._launcher is not None and os.getppid() != self._launcher:
                self._own(
                    "abandoned", PeerLost.__name__, f"has no launcher any longer: process {self._launcher} is gone"
                )
            if time.monotonic() - pulsed > _PULSE_SECONDS:
                pulsed = time.monotonic()
                self._pulse()
            if self._troubles and self._is_my_turn():
                error = self._verdict()
                if self._mesh is not None:
                    self._mesh.send_all(JobVerdict(error.exit_code))
                say_as_is(f"penstock: error: {error}")
                _tell_torchrun(str(error))
                return error.exit_code

    def _pulse(self) -> None:
        doing = self._own_doing()
        if self._mesh is not None:
            self._mesh.send_all(Pulse(doing, self._own_steps(), self._board.busy(0)))
        self._answer()

    def _answer(self) -> None:
        """Send the worker a sign of life. One that is stopped does not read, and must not stop its keeper."""
        try:
            known = {**self._busy, self.rank: self._board.busy(0)}
            all_addresses = tuple(known[rank] for rank in sorted(known)) if len(known) == self.seat.world else ()
            self._channel.offer(Alive(all_addresses))
        except OSError:
            return  # it has ended, which `_look_at_worker` notices

    def end(self) -> None:
        """End the worker, whatever it is doing; but a checkpoint that is being written is waited for, as long as it
        gets on."""
        lost = self._troubles.get(0)
        if lost is None or lost.kind in ("error", "ended", "abandoned", "symptom"):
            await_saves(
                lambda: (
                    [self._board.save_of(0)]
                    if self._process.poll() is None and not is_stopped(self._process.pid)
                    else []
                )
            )
        if self._process.poll() is None:
            self._process.kill()
        # It is stuck in the kernel, in a file server perhaps, if it is there even then.
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_KILL_SECONDS)
        self._follower.close()
        if self._log is not None:
            self._log.close()
        if self._mesh is not None:
            self._mesh.close()
        self._listener.close()
        self._channel.close()

    def tell_end(self, code: int) -> None:
        """Report once for all ranks what is left of a run that its launcher ended. That happens when the checkpoint
        that was being saved is complete."""
        failed = any(trouble.kind in ("error", "died", "silent") for trouble in self._troubles.values())
        if self._signal is None or code != 128 + self._signal or self.rank or failed:
            return
        steps, directory = max(self._steps, self._own_steps()), self.options.checkpoint
        summary = reached(steps - 1 if steps else None, directory)
        if directory is None:
            summary += "; nothing was saved, because no --checkpoint was given"
        elif newest_checkpoint(directory) is not None:
            summary += f"; --resume {directory} goes on from there, as does a start under the name of this run"
        say_as_is(f"penstock: ended by {signal.Signals(self._signal).name}: {summary}")

    # -------------------------------------------------------------------------------------------- what is seen

    def _look_at_worker(self) -> None:
        code = self._process.poll()
        if code is not None:
            self._reader.join(_END_SECONDS)
        while not self._messages.empty():
            message = self._messages.get()
            match message:
                case Gathered():
                    self._group = message
                    now = time.monotonic()
                    self._heard = {rank: now for rank in range(len(message.hosts)) if rank != self.rank}
                    addresses = list(zip(message.addresses, message.ports, strict=True))
                    self._mesh = Peers(
                        self._listener, self.rank, addresses, message.token, _CONNECT_SECONDS, self._trust
                    )
                case Planned(path):
                    self.bundle = open_bundle(path, self.rank)
                case Done():
                    self._answer()
                case Failed(error, what, where, hint):
                    self._own("symptom" if error == PeerLost.__name__ else "error", error, what, where, hint)
        if code is not None and code != 0:
            if (
                self._log is not None
                and self.rank not in self._troubles
                and self.rank not in self._log_ranks
                and (output := tail(self._log))
            ):
                say_as_is(f"what rank {self.rank} wrote last:\n{output}")
            hint = "if memory ran out, use more stages or smaller microbatches" if code == -signal.SIGKILL else ""
            self._own("died", PeerLost.__name__, ending(code), hint=hint)
        beat = self._board.last_beat(0)
        if code is None and not beat:
            # It has no heart yet that could stop. Starting takes any time, but a process that is stopped takes none.
            if not is_stopped(self._process.pid):
                self._ran = time.monotonic()
            elif self._patience.over(self._ran):
                self._own("silent", PeerLost.__name__, f"has been stopped for {time.monotonic() - self._ran:.0f} s")
        if code is None and not beat and self._starting.is_over():
            self._own("silent", PeerLost.__name__, f"gave no sign of life within {self._start_limit:g} s")
        if code is None and beat and self._patience.over(beat):
            state = "is stopped" if is_stopped(self._process.pid) else "hangs"
            seconds = time.monotonic() - beat
            self._own("silent", PeerLost.__name__, f"{state}: no sign of life for {seconds:.0f} s")

    def _own(self, kind: str, error: str, what: str, where: str = "", hint: str = "") -> None:
        """Record a failure of this rank; the first one counts. But the end of a launcher takes the store with it, where
        the group meets, and so the workers notice it first."""
        known = self._troubles.get(self.rank)
        if known is not None and (known.kind, kind) != ("symptom", "abandoned"):
            return
        trouble = Trouble(kind, time.monotonic(), self._own_doing(), error, what, where, hint)
        self._troubles[self.rank] = trouble
        if self._mesh is not None:
            # How far this rank came: no other rank may know.
            self._mesh.send_all(Pulse(trouble.doing, self._own_steps(), self._board.busy(0)))
            self._mesh.send_all(Told(kind, trouble.doing, error, what, where, hint))

    def _hear(self, rank: int, record: Said | str | None) -> None:
        now = time.monotonic()
        self._heard[rank] = now
        match record:
            case Pulse(doing, steps, busy):
                self._busy[rank] = busy
                self._doing[rank] = doing
                self._steps = max(self._steps, steps)
            case Told(kind, doing, error, what, where, hint):
                # The report of a rank on itself is better than an observation of it.
                self._troubles[rank] = Trouble(kind if kind in KINDS else "error", now, doing, error, what, where, hint)
                self._doing[rank] = doing
            case Bye():
                self._left.add(rank)
            case str():
                what = f"sent what is no message: {record}"
                self._troubles.setdefault(
                    rank, Trouble("closed", now, self._doing.get(rank, ""), PeerLost.__name__, what)
                )
            case None if rank not in self._left:
                what = "ended without a word: its processes were killed, or its host went down"
                self._troubles.setdefault(
                    rank, Trouble("closed", now, self._doing.get(rank, ""), PeerLost.__name__, what)
                )

    def _look_around(self) -> None:
        for rank, heard in self._heard.items():
            if rank not in self._left and rank not in self._troubles and self._patience.over(heard):
                seconds = time.monotonic() - heard
                self._troubles[rank] = Trouble(
                    "unreachable",
                    time.monotonic(),
                    self._doing.get(rank, ""),
                    PeerLost.__name__,
                    f"nothing was heard of it for {seconds:.0f} s",
                )

    # -------------------------------------------------------------------------------------------- the verdict

    def _is_settled(self, seconds: float) -> bool:
        return time.monotonic() - min(trouble.since for trouble in self._troubles.values()) > seconds

    def _is_my_turn(self) -> bool:
        """Return whether it is time for a verdict, and this keeper's to give it."""
        if self._mesh is None:
            return True  # no other keeper knows of it
        strong = [trouble.since for trouble in self._troubles.values() if trouble.kind != "symptom"]
        # The cause of a symptom shows at the latest when a heartbeat is missed.
        wait = _CAUSE_SECONDS if strong else _CAUSE_SECONDS + self.options.heartbeat
        since = min(strong or [trouble.since for trouble in self._troubles.values()])
        lost = {rank for rank, trouble in self._troubles.items() if trouble.kind in ("closed", "unreachable", "ended")}
        before = len([rank for rank in self._heard if rank < self.rank and rank not in lost and rank not in self._left])
        return time.monotonic() - since > wait + _TURN_SECONDS * min(before, 3)

    def _verdict(self) -> PenstockError:
        """Return the error of the group, as far as it is known here."""
        doing = {rank: text or "starting" for rank, text in {**self._doing, self.rank: self._own_doing()}.items()}
        doing |= {rank: trouble.doing or "starting" for rank, trouble in self._troubles.items()}
        steps = max(self._steps, self._own_steps())
        note = reached(steps - 1 if steps else None, self.options.checkpoint)
        rank = min(self._troubles, key=lambda r: (KINDS.index(self._troubles[r].kind), self._troubles[r].since))
        trouble = self._troubles[rank]
        where = place(rank, self.bundle.rank(rank).stages, doing[rank], self._host(rank))
        if trouble.kind in ("error", "symptom"):
            failed = Failed(
                trouble.error, trouble.what, "" if trouble.where == f"rank {rank}" else trouble.where, trouble.hint
            )
            return error_of(failed, where, doing, rank, note)
        if trouble.kind == "unreachable":
            return self._unreachable(doing, note)
        what = f"{self._named(rank)} {trouble.what} during {describe_line(doing[rank])}"
        return PeerLost("; ".join([what, note, *others(doing, rank)]), where=where, hint=trouble.hint)

    def _unreachable(self, doing: dict[int, str], note: str) -> PeerLost:
        lost = sorted(rank for rank, trouble in self._troubles.items() if trouble.kind == "unreachable")
        seconds = self.options.heartbeat
        if len(lost) > 1 and len(lost) == len(self._heard):
            what = (
                f"{self._named(self.rank)} heard nothing of any other rank for {seconds:g} s: the network of "
                f"{self._host(self.rank)} is cut"
            )
            where = place(self.rank, self.bundle.rank(self.rank).stages, doing[self.rank], self._host(self.rank))
        else:
            listed = " and ".join(f"{self._named(rank)}, which was at {describe_line(doing[rank])}," for rank in lost)
            what = (
                f"nothing was heard for {seconds:g} s of {listed} the network is cut, the host is down, or the "
                "processes are stopped"
            )
            where = place(lost[0], self.bundle.rank(lost[0]).stages, doing[lost[0]], self._host(lost[0]))
        return PeerLost(
            "; ".join([what, note, *others({r: text for r, text in doing.items() if r not in lost})]), where=where
        )

    def _host(self, rank: int) -> str:
        return self._group.hosts[rank] if self._group is not None else self.seat.host

    def _named(self, rank: int) -> str:
        process = self._group.processes[rank] if self._group is not None else self._process.pid
        return named(rank, self.bundle.rank(rank).stages, process, self._host(rank))

    def _own_doing(self) -> str:
        return self._board.read(0)

    def _own_steps(self) -> int:
        step = self._board.last_step()
        return 0 if step is None else step + 1


def launcher_of(environment: Mapping[str, str]) -> int | None:
    """Return the process whose end ends the group: the parent under torchrun, its agent. Other launchers may start
    ranks and leave them."""
    return os.getppid() if "TORCHELASTIC_RUN_ID" in environment else None


def _tell_torchrun(text: str) -> None:
    """Write the message into the file that torchrun shows in its own summary."""
    path = os.environ.get("TORCHELASTIC_ERROR_FILE")
    if path:
        # With a stack, even an empty one, that would be shown in place of the message.
        content = {"message": {"message": text, "extraInfo": {"timestamp": str(int(time.time()))}}}
        try:
            with open(path, "w", encoding="utf-8") as file:
                json.dump(content, file)
        except OSError:
            return  # the message stands on stderr in any case
