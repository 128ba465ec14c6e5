"""The kinds of trials: what is done to a run, and the promise of docs/runtime.md that it is held to.

In: a place with nothing running, and a source of chance. Out: a result, with what was broken of the promise. Kinds in
which the run is to end measure the seconds until nobody is left; in the others the run has to come to its own end,
with every step and the last checkpoint.
"""

from __future__ import annotations

import contextlib
import os
import random
import shutil
import signal
import socket
import struct
import subprocess
import time
from collections.abc import Callable, Iterator
from pathlib import Path

from failure_hosts import fail_host
from failure_runs import RANKS, Place, Result, Started, children, send, steps_in, wait_for, workers
from hostile_index import spoil_index
from namespaces import available

Act = Callable[[Place, random.Random], Result]


def _after(place: Place, chance: random.Random) -> int:
    return chance.randrange(1, max(2, place.shared.steps // 2))


def _start(place: Place, form: str) -> Started:
    return {"local": place.local, "group": place.group, "torchrun": place.torchrun}[form]()


def stderr(place: Place, chance: random.Random) -> Result:
    """Let nobody hear what the run says: its end is not decided by that."""
    target = chance.choice(("closed", "full", "unread"))
    read, unread = os.pipe()
    os.close(read)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        if target == "closed":
            run = place.spawn(["sh", "-c", 'exec "$@" 2>&-', "sh", *place.command()])
        else:
            run = place.spawn(place.command(), stderr=full if target == "full" else unread)
    finally:
        os.close(full)
        os.close(unread)
    place.expect_well(run)
    return Result("stderr", target)


def launcher(place: Place, chance: random.Random) -> Result:
    """Kill the launcher of a local run. It can say nothing any more."""
    run, after = place.local(), _after(place, chance)
    place.reached(after, run)
    send(run.pid, signal.SIGKILL)
    seconds = place.await_end(2.0)
    return Result("launcher", after=after, seconds=seconds, within=2.0, again_s=place.go_on())


def agent(place: Place, chance: random.Random) -> Result:
    """Kill torchrun's agent: its ranks end, and one of them says why."""
    run, after = place.torchrun(), _after(place, chance)
    place.reached(after, run)
    send(run.pid, signal.SIGKILL)
    seconds = place.await_end(4.0)
    said = place.expect(run, [-signal.SIGKILL], "has no launcher any longer")
    return Result("agent", after=after, seconds=seconds, within=4.0, again_s=place.go_on(place.torchrun), said=said)


def forkserver(place: Place, chance: random.Random) -> Result:
    """Kill or stop the process that local ranks are forked from, or stop it while it imports."""
    target = chance.choice(("kill", "stop", "stop at start"))
    run, after = place.local(), _after(place, chance)
    if target == "stop at start":
        after = 0
        # Also before it has become another program.
        wait_for(lambda: children(run.pid) or not run.lives())
    else:
        place.reached(after, run)
    (server,) = children(run.pid)[:1] or [0]
    if not server:
        place.problems.append(f"there was no server: {run.text()}")
        return Result("forkserver", target)
    send(server, signal.SIGKILL if target == "kill" else signal.SIGSTOP)
    if target == "stop":
        place.expect_well(run)
        return Result("forkserver", target, after=after)
    within = 2.0 if target == "kill" else 12.0
    seconds = place.await_end(within)
    said = place.expect(run, [6], "the process that ranks are forked from")
    return Result("forkserver", target, 0, after, seconds, within, place.go_on(), said=said)


def signals(place: Place, chance: random.Random) -> Result:
    """Send SIGTERM or SIGINT to one rank's worker, to one keeper, or to the launcher of a local run."""
    target, number = chance.choice(("worker", "keeper", "launcher")), chance.choice((signal.SIGTERM, signal.SIGINT))
    rank, after = chance.randrange(RANKS), _after(place, chance)
    run = _start(place, "group" if target == "keeper" else "local")
    place.reached(after, run)
    name = f"{number.name} to {target}"
    if target == "launcher":
        send(run.pid, number)
        # It waits for a checkpoint that is being written.
        seconds = place.await_end(4.0)
        wait_for(lambda: not run.lives())
        if run.codes() != [128 + number]:
            place.problems.append(f"exit codes {run.codes()}, expected {128 + number}")
        return Result("signals", name, 0, after, seconds, 4.0, place.go_on(), said=run.text().splitlines()[-1])
    if target == "worker":
        ranks = workers(run.pid)
        send(ranks[rank % len(ranks)] if ranks else run.pid, number)
        seconds = place.await_end(2.0)
        said = place.expect(run, [6], f"was killed by {number.name} during")
        return Result("signals", name, rank, after, seconds, 2.0, place.go_on(), said=said)
    send(run.processes[rank].pid, number)
    seconds = place.await_end(4.0)
    said = place.expect(run, [6, 128 + number], f"was ended by {number.name} from its launcher")
    return Result("signals", name, rank, after, seconds, 4.0, place.go_on(place.group), said=said)


def packs(place: Place, chance: random.Random) -> Result:
    """Kill one rank's worker, or its keeper, in a run whose ranks have two stages each."""
    schedule, target = chance.choice((*place.shared.packed,)), chance.choice(("worker", "worker", "keeper"))
    place.shared = place.shared.packed[schedule]
    rank, after = chance.randrange(RANKS), _after(place, chance)
    form = chance.choice(("local", "group")) if target == "worker" else "group"
    run = _start(place, form)
    place.reached(after, run)
    if form == "group":
        keeper = run.processes[rank].pid
        victim = keeper if target == "keeper" else next(iter(children(keeper)), keeper)
    else:
        victim = next(iter(workers(run.pid)[rank:]), run.pid)
    send(victim, signal.SIGKILL)
    seconds = place.await_end(2.0)
    said = place.expect(run, [6, -signal.SIGKILL], f"rank {rank} (")
    again = place.go_on(place.group if form == "group" else None)
    return Result("packs", f"{target}, {schedule}", rank, after, seconds, 2.0, again, said=said)


@contextlib.contextmanager
def small_disk(folder: Path, kilobytes: int) -> Iterator[None]:
    """Mount a file system of that size."""
    folder.mkdir()
    subprocess.run(["mount", "-t", "tmpfs", "-o", f"size={kilobytes}k", "tmpfs", str(folder)], check=True)
    try:
        yield
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def disk(place: Place, chance: random.Random) -> Result:
    """Let the disk of checkpoints fill up, and give it room again."""
    form = chance.choice(("local", "group"))
    with small_disk(place.checkpoints, chance.randrange(48, 160, 4)):
        run = _start(place, form)
        wait_for(lambda: not run.lives())
        place.await_end(2.0)
        said = place.expect(run, [1], "No space left on device")
        if str(place.checkpoints) not in said:
            place.problems.append(f"the place is not named: {said}")
        after = steps_in(place.metrics)
        subprocess.run(["mount", "-o", "remount,size=64m", str(place.checkpoints)], check=True)
        again = place.go_on(place.group if form == "group" else None)
        # What is mounted there goes with the block.
        left = sorted(path.name for path in place.checkpoints.iterdir() if path.name.startswith("."))
        place.problems += [f"left in the directory: {left}"] * bool(left)
    return Result("disk", form, after=after, again_s=again, said=said)


def descriptors(place: Place, chance: random.Random) -> Result:
    """Allow the run 16 open files."""
    run = place.spawn(["prlimit", "--nofile=16:16", *place.command()])
    wait_for(lambda: not run.lives())
    place.await_end(2.0)
    said = place.expect(run, [2], "may have 16 open files")
    return Result("descriptors", again_s=place.go_on(), said=said)


def pipe(place: Place, chance: random.Random) -> Result:
    """Put a pipe in the place of `latest`, which nobody writes into."""
    place.take_half()
    latest = place.checkpoints / "latest"
    latest.unlink()
    os.mkfifo(latest)
    left = place.shared.steps - place.shared.half_steps
    run = place.local("--resume", str(place.checkpoints), steps=left)
    wait_for(lambda: not run.lives())
    place.await_end(2.0)
    said = place.expect(run, [5], "cannot read latest: is no plain file")
    latest.unlink()
    again = place.go_on(lambda: place.local("--resume", str(place.checkpoints), steps=left))
    return Result("pipe", again_s=again, said=said)


def metrics(place: Place, chance: random.Random) -> Result:
    """Start a second run with the metrics file of the first."""
    run, after = place.local(), 1
    place.reached(after, run)
    # Long enough to be still there when the second one has looked.
    send(run.pid, signal.SIGSTOP)
    second = place.spawn(place.command(checkpoints=place.folder / "other"))
    wait_for(lambda: second.codes() != [None], 60)
    send(run.pid, signal.SIGCONT)
    said = place.expect(second, [2], "another run writes its metrics there")
    place.expect_well(run)
    return Result("metrics", after=after, said=said)


def index(place: Place, chance: random.Random) -> Result:
    """Spoil the index of the newest checkpoint. The one before is used, or the run ends with one line."""
    place.take_half()
    newest = place.checkpoints / f"step-{place.shared.half_steps:06}"
    kept = place.folder / "kept"
    shutil.copytree(newest, kept)
    target = spoil_index(newest, chance)
    done = place.shared.half_steps - place.shared.every
    run = place.local("--resume", str(place.checkpoints), steps=place.shared.steps - done)
    wait_for(lambda: not run.lives())
    if run.codes() == [0]:
        place.expect_well(run)
        if "is damaged" not in run.text():
            place.problems.append("a damaged checkpoint was passed over without a word")
        return Result("index", target)
    place.await_end(2.0)
    said = place.expect(run, [2, 5], "checkpoint")
    shutil.rmtree(newest)
    kept.rename(newest)
    return Result("index", target, again_s=place.go_on(), said=said)


def start(place: Place, chance: random.Random) -> Result:
    """Stop one worker of a local run as it starts."""
    rank = chance.randrange(RANKS)
    run = place.local()
    wait_for(lambda: len(workers(run.pid)) > rank or not run.lives())
    victims = workers(run.pid)
    if len(victims) <= rank:
        place.problems.append(f"rank {rank} did not start: {run.text()}")
        return Result("start")
    send(victims[rank], signal.SIGSTOP)
    within = place.shared.heartbeat + 2.0
    seconds = place.await_end(within)
    said = place.expect(run, [6], f"rank {rank} (stage {rank}, process {victims[rank]}")
    if "is stopped: no sign of life for" not in said:
        place.problems.append(f"the message does not say that it is stopped: {said}")
    return Result("start", "worker", rank, 0, seconds, within, place.go_on(), said=said)


def suspend(place: Place, chance: random.Random) -> Result:
    """Stop all processes of a run, its launcher among them, for longer than any silence, and let them go on in any
    order."""
    form, after = chance.choice(("local", "group", "torchrun")), _after(place, chance)
    run = _start(place, form)
    place.reached(after, run)
    stopped: list[int] = []
    try:
        while left := [pid for pid in place.everyone() if pid not in stopped]:
            chance.shuffle(left)
            for pid in left:
                send(pid, signal.SIGSTOP)
            stopped += left
        time.sleep(place.shared.heartbeat + chance.uniform(1.0, 5.0))
    finally:
        chance.shuffle(stopped)
        for pid in stopped:
            send(pid, signal.SIGCONT)
            time.sleep(chance.uniform(0, 0.1))
    place.expect_well(run)
    return Result("suspend", form, after=after)


def strangers(place: Place, chance: random.Random) -> Result:
    """Connect to every port that the run listens on: with random bytes, with nothing, and to break off at once."""
    form = chance.choice(("local", "group"))
    run, held, visits = _start(place, form), [], 0
    try:
        while run.lives():
            for port in _ports(place.everyone()):
                with contextlib.suppress(OSError):  # it has ended meanwhile, or does not take any more
                    held.append(socket.create_connection(("127.0.0.1", port), 1.0))
                    visits += 1
                    _disturb(held, chance)
            time.sleep(0.02)
    finally:
        for one in held:
            one.close()
    place.expect_well(run)
    if not visits:
        place.problems.append("no port was found")
    return Result("strangers", form, after=visits)


def _disturb(held: list[socket.socket], chance: random.Random) -> None:
    """Do something on the newest connection."""
    way = chance.choice(("bytes", "silence", "reset"))
    if way == "bytes":
        held[-1].sendall(chance.randbytes(chance.choice((1, 3, 7, 64, 4096))))
    elif way == "reset":
        held[-1].setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        held.pop().close()
    # Of those that say nothing some stay, and the oldest leave.
    while len(held) > 40:
        held.pop(0).close()


def _ports(pids: list[int]) -> list[int]:
    """List the TCP ports that processes listen on."""
    owned = set()
    for pid in pids:
        with contextlib.suppress(OSError):
            for descriptor in Path(f"/proc/{pid}/fd").iterdir():
                with contextlib.suppress(OSError):
                    owned.add(os.readlink(descriptor))
    rows = [line.split() for line in Path("/proc/net/tcp").read_text().splitlines()[1:]]
    return sorted({int(row[1].split(":")[1], 16) for row in rows if row[3] == "0A" and f"socket:[{row[9]}]" in owned})


def may_mount() -> str:
    """Say why nothing can be mounted here, "" if it can."""
    if os.geteuid():
        return "not root"
    tried = subprocess.run(["unshare", "-m", "mount", "-t", "tmpfs", "tmpfs", "/mnt"], capture_output=True, text=True)
    return tried.stderr.strip() or "" if tried.returncode else ""


# The kinds that are drawn from, and what says why one cannot be tried here.
KINDS: dict[str, Act] = {
    "kill": lambda place, chance: fail_host("kill", place, chance),
    "stop": lambda place, chance: fail_host("stop", place, chance),
    "cut": lambda place, chance: fail_host("cut", place, chance),
    "stderr": stderr,
    "launcher": launcher,
    "agent": agent,
    "forkserver": forkserver,
    "signals": signals,
    "packs": packs,
    "disk": disk,
    "descriptors": descriptors,
    "pipe": pipe,
    "metrics": metrics,
    "index": index,
    "start": start,
    "suspend": suspend,
    "strangers": strangers,
}
NEEDS: dict[str, Callable[[], str]] = {"kill": available, "stop": available, "cut": available, "disk": may_mount}
