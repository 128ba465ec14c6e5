"""Network namespaces as hosts.

Each has its own interface eth0 and host name, and all are joined by a bridge in one more namespace. They need root and
iproute2. `shape` limits the rate of their network cards. `cut` takes a host off the bridge, so that its packets vanish
in silence, as when a cable is pulled behind a switch.
"""

from __future__ import annotations

import contextlib
import os
import secrets
import shutil
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterable, Sequence
from pathlib import Path
from types import FrameType, TracebackType
from typing import IO, Any

_SECONDS = 20
# Bytes of a frame behind its own header, on shaped cards.
JUMBO = 9000
_NAMES = Path("/etc/netns")


def available() -> str:
    """Say why there can be no namespaces here, "" if there can."""
    if os.geteuid() != 0:
        return "not root"
    missing = [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing:
        return f"no {' and no '.join(missing)}"
    name = f"ps{secrets.token_hex(3)}"
    try:
        _ip("netns", "add", name)
        try:
            _ip("-n", name, "link", "add", "bridge0", "type", "bridge")
        finally:
            _ip("netns", "del", name)
    except subprocess.CalledProcessError as error:
        return f"ip says: {error.stderr.strip()}"
    return ""


class Hosts:
    """Hosts with these `names`; host i has the address 10.77.0.(i + 1)."""

    def __init__(self, names: Sequence[str]) -> None:
        self.names = list(names)
        self._prefix = f"ps{secrets.token_hex(3)}"
        self._spaces: list[str] = []
        self._started: list[subprocess.Popen[str]] = []
        self._shaped = False
        self._handler: Any = None

    def __enter__(self) -> Hosts:
        # A terminated benchmark leaves no namespaces either.
        if signal.getsignal(signal.SIGTERM) is signal.SIG_DFL and threading.current_thread() is threading.main_thread():
            self._handler = signal.signal(signal.SIGTERM, _interrupt)
        try:
            self._add("switch")
            switch = self._spaces[0]
            _ip("-n", switch, "link", "add", "bridge0", "type", "bridge")
            _ip("-n", switch, "link", "set", "bridge0", "up")
            for i in range(len(self.names)):
                self._add(str(i))
                space = self._spaces[-1]
                _ip("-n", switch, "link", "add", f"port{i}", "type", "veth", "peer", "name", "eth0", "netns", space)
                _ip("-n", switch, "link", "set", f"port{i}", "master", "bridge0", "up")
                _ip("-n", space, "addr", "add", f"{self.address(i)}/24", "dev", "eth0")
                _ip("-n", space, "link", "set", "eth0", "up")
                _ip("-n", space, "link", "set", "lo", "up")
                self._name(space)
        except BaseException:
            self.__exit__(None, None, None)
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        problems = []
        # One that was just started need not be in its namespace yet.
        for process in self._started:
            if process.poll() is None:
                process.kill()
        for space in reversed(self._spaces):
            try:
                kill(_pids(space))
                _ip("netns", "del", space)
            except (subprocess.SubprocessError, OSError) as failed:
                problems.append(f"{space}: {getattr(failed, 'stderr', None) or failed}")
            shutil.rmtree(_NAMES / space, ignore_errors=True)
        self._spaces.clear()
        if self._handler is not None:
            signal.signal(signal.SIGTERM, self._handler)
            self._handler = None
        if problems and error is None:
            raise RuntimeError(f"namespaces cannot be removed: {'; '.join(problems)}")

    def address(self, host: int) -> str:
        return f"10.77.0.{host + 1}"

    def start(
        self, host: int, command: Sequence[str], environment: dict[str, str], out: IO[str] | int, session: bool = True
    ) -> subprocess.Popen[str]:
        """Start a process on a host; its number is that of the command."""
        named = ["unshare", "--uts", "sh", "-c", 'hostname "$0" && exec "$@"', self.names[host], *command]
        inside = ["ip", "netns", "exec", self._spaces[host + 1], *named]
        process = subprocess.Popen(
            inside,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=out,
            stderr=subprocess.STDOUT,
            start_new_session=session,
            text=True,
        )
        self._started.append(process)
        return process

    def cut(self, host: int) -> None:
        _ip("-n", self._spaces[0], "link", "set", f"port{host}", "nomaster")

    def mend(self, host: int) -> None:
        _ip("-n", self._spaces[0], "link", "set", f"port{host}", "master", "bridge0")

    def shape(self, rate: float) -> None:
        """Limit every host to so many bytes per second out and in, as a network card of that rate does.

        Each direction is limited by itself. The limit is a token bucket (tbf) of 32 kB, less than a message, with room
        for all bytes that TCP has under way. Bare acknowledgements bypass it: behind megabytes in one queue they would
        delay the data they acknowledge, which fair queues in front of real cards prevent. Frames are jumbo ones,
        because every frame goes through two buckets and a bridge on the cores that compute.
        """
        ways = [
            *(["qdisc del dev {} root"] if self._shaped else []),
            "qdisc add dev {} root handle 1: htb default 2",
            "class add dev {} parent 1: classid 1:1 htb rate 10gbit burst 1mb quantum 60000",
            "class add dev {} parent 1: classid 1:2 htb rate 10gbit burst 1mb quantum 60000",
            f"qdisc add dev {{}} parent 1:2 handle 2: tbf rate {round(rate * 8)}bit burst 32kb limit 16mb",
            # By the length that the header of IP states: less than 64 bytes.
            "filter add dev {} parent 1: prio 1 protocol ip handle 800::1 u32 match u16 0 0xffc0 at 2 flowid 1:1",
        ]
        for i, space in enumerate(self._spaces[1:]):
            for place, device in ((space, "eth0"), (self._spaces[0], f"port{i}")):
                _ip("-n", place, "link", "set", device, "mtu", str(JUMBO))
                for way in ways:
                    _ip("netns", "exec", place, "tc", *way.format(device).split())
        self._shaped = True

    def processes(self) -> list[int]:
        """List every process that still runs on the hosts."""
        return [pid for space in self._spaces for pid in _pids(space)]

    def processes_of(self, host: int) -> list[int]:
        """List every process that runs on a host."""
        return _pids(self._spaces[host + 1])

    def end(self, started: Iterable[subprocess.Popen[str]]) -> None:
        """Kill the started processes that still run, and all that they left on the hosts."""
        for process in started:
            if process.poll() is None:
                process.kill()
            process.wait()
        for pid in self.processes():
            os.kill(pid, 9)

    def _name(self, space: str) -> None:
        """Write the file that `ip netns exec` mounts over /etc/hosts."""
        (_NAMES / space).mkdir(parents=True)
        lines = ["127.0.0.1 localhost", *(f"{self.address(i)} {name}" for i, name in enumerate(self.names))]
        (_NAMES / space / "hosts").write_text("\n".join(lines) + "\n")

    def _add(self, name: str) -> None:
        # Noted before it exists: an interrupt may come in between.
        self._spaces.append(f"{self._prefix}-{name}")
        _ip("netns", "add", f"{self._prefix}-{name}")


def kill(processes: Iterable[int]) -> None:
    """Kill processes, some of which may have ended."""
    for pid in processes:
        with contextlib.suppress(ProcessLookupError):
            os.kill(pid, signal.SIGKILL)


def _pids(space: str) -> list[int]:
    return [int(pid) for pid in _ip("netns", "pids", space).split()]


def _interrupt(number: int, frame: FrameType | None) -> None:
    # Once: the clean-up afterwards is not interrupted.
    signal.signal(number, signal.SIG_IGN)
    raise KeyboardInterrupt(f"ended by {signal.Signals(number).name}")


def torchrun(hosts: Hosts, command: Sequence[str], log: Path, seconds: float) -> None:
    """Run a command of penstock under torchrun on all hosts, one rank on each. Raise RuntimeError, with what all said, where
    one fails or does not end in time."""
    meeting = [f"--nnodes={len(hosts.names)}", "--nproc-per-node=1", f"--master-addr={hosts.address(0)}"]
    environment = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"}
    running: list[subprocess.Popen[str]] = []
    with log.open("w+") as out:
        try:
            for i in range(len(hosts.names)):
                identity = [
                    "--master-port=29400",
                    f"--node-rank={i}",
                    f"--local-addr={hosts.address(i)}",
                    "--no-python",
                ]
                rank = [*meeting, *identity, sys.executable, "-m", "penstock", *command]
                words = [sys.executable, "-m", "torch.distributed.run", *rank]
                running.append(hosts.start(i, words, environment, out))
            deadline = time.monotonic() + seconds
            while any(process.poll() is None for process in running) and time.monotonic() < deadline:
                time.sleep(0.2)
        finally:
            hosts.end(running)
        out.seek(0)
        if any(process.returncode for process in running):
            raise RuntimeError(f"the run failed:\n{out.read()}")


def _ip(*words: str) -> str:
    return subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=_SECONDS).stdout
