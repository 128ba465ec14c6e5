"""Words for people: streams of the calling program, slow readers, and closed streams."""

from __future__ import annotations

import contextlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from penstock.support.terminal import PATIENCE, Progress, say

LINES, LENGTH = 40, 5000
# Writes more than a pipe holds to one that does not block.
WRITES = f"""
import fcntl, os
from penstock.support.terminal import PATIENCE, Progress, say
fcntl.fcntl(2, fcntl.F_SETFL, os.O_NONBLOCK)
for i in range({LINES}):
    say(f"{{i}} " + "x" * {LENGTH})
say("the last line")
"""


def start(script: str) -> subprocess.Popen[bytes]:
    return subprocess.Popen([sys.executable, "-c", script], stderr=subprocess.PIPE)


def test_a_slow_reader_gets_every_line() -> None:
    with start(WRITES) as process:
        assert process.stderr is not None
        time.sleep(0.5)
        read = process.stderr.read().decode().splitlines()
    assert process.returncode == 0
    assert [len(line) for line in read[:-1]] == [len(f"{i} ") + LENGTH for i in range(LINES)]
    assert read[-1] == "the last line"


def test_no_reader_is_waited_for_without_end() -> None:
    """The control: the same program, whose reader never comes, ends by itself and without an error."""
    with start(WRITES) as process:
        assert process.wait(60) == 0


def test_plain_writing_loses_lines_there() -> None:
    """The control: print ends with an error where the pipe is full."""
    with start(
        WRITES.replace("say(", "import sys; print(file=sys.stderr, flush=True, *[").replace(")\n", "])\n")
    ) as process:
        assert process.wait(60) != 0


def test_a_stream_of_the_calling_program_stays_its_own(tmp_path: Path) -> None:
    with (tmp_path / "log").open("w", encoding="ascii") as log:
        with contextlib.redirect_stderr(log):
            say("12 µs")
        log.write("its own line\n")
    assert (tmp_path / "log").read_text() == "12 \\xb5s\nits own line\n"
    full = os.open("/dev/full", os.O_WRONLY)
    with contextlib.suppress(OSError), os.fdopen(full, "w") as stream, contextlib.redirect_stderr(stream):
        say("lost")
        assert os.readlink(f"/proc/self/fd/{full}") == "/dev/full"


@pytest.mark.parametrize("closed", [">&-", "2>&-", ">&- 2>&-"])
def test_a_command_whose_streams_are_closed(closed: str) -> None:
    command = f'exec "$0" -m penstock passes {closed}'
    done = subprocess.run(["sh", "-c", command, sys.executable], capture_output=True, text=True, timeout=120)
    assert (done.returncode, done.stderr) == (0, "")


def test_progress_waits_two_seconds(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Work that ends soon shows nothing, whatever it says."""
    now = [100.0]
    monkeypatch.setattr("time.monotonic", lambda: now[0])
    progress = Progress("plan", after=PATIENCE)
    progress(1, 10, "ideals")
    progress(10, 10, "ideals")
    now[0] += 60.0
    progress(2, 10, "ideals")
    progress.close()
    assert capsys.readouterr().err == "plan 2/10 ideals\n"
