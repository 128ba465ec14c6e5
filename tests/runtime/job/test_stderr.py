"""Words for people: wherever stderr leads, they never decide about the work."""

from __future__ import annotations

import ast
import json
import os
import subprocess
import sys
from pathlib import Path

import pytest

from penstock.support.terminal import Progress, StatusLine, say

from ...project.source_tree import Sources, made_up, product

# Steps of a run whose words nobody can read.
STEPS = 12
# The interpreter's own streams are emptied before a process is forked or ends at once.
FLUSHING = {"penstock.runtime.launch.forkserver", "penstock.support.processes"}


def writers(sources: Sources) -> list[str]:
    """List the modules that write to stderr themselves."""
    return [
        f"{name}:{node.lineno}"
        for name, source in sources.items()
        if name != "penstock.support.terminal" and name not in FLUSHING
        for node in ast.walk(source.tree)
        if isinstance(node, ast.Attribute) and ast.unparse(node) in ("sys.stderr", "sys.__stderr__")
    ]


def test_one_module_writes_to_stderr():
    assert writers(product()) == []
    assert writers(made_up(ir__graph="import sys\nprint(1, file=sys.stderr)")) == ["penstock.ir.graph:2"]


WORDS = """
import sys
from penstock.support.terminal import Progress, StatusLine, say
say("a line")
line = StatusLine()
line.show("a status")
line.interrupt("a line in its place")
line.close()
Progress("work")(1, 1, "done")
print("the work is done")
"""


def ends(stderr: str, work: list[str]) -> subprocess.CompletedProcess[str]:
    """Run a command whose stderr is closed, a full disk, or a pipe that nobody reads."""
    read, unread = os.pipe()
    os.close(read)
    full = os.open("/dev/full", os.O_WRONLY)
    try:
        command = ["sh", "-c", 'exec "$@" 2>&-', "sh", *work] if stderr == "closed" else work
        return subprocess.run(
            command, stdout=subprocess.PIPE, stderr=full if stderr == "full" else unread, text=True, timeout=120
        )
    finally:
        os.close(unread)
        os.close(full)


@pytest.mark.parametrize("stderr", ["closed", "full", "unread"])
def test_words_that_cannot_be_written_are_lost_alone(stderr):
    done = ends(stderr, [sys.executable, "-c", WORDS])
    assert (done.returncode, done.stdout) == (0, "the work is done\n")
    # Control: what writes by itself ends with an error there, but where stderr is closed, and print says nothing.
    plain = ends(stderr, [sys.executable, "-c", "import sys\nprint('a line', file=sys.stderr, flush=True)"])
    assert (plain.returncode != 0) == (stderr != "closed")


@pytest.mark.parametrize("stderr", ["closed", "full", "unread"])
def test_a_run_whose_words_cannot_be_written_trains_to_its_end(bundle_of, tmp_path, stderr):
    metrics, checkpoint = tmp_path / "metrics.jsonl", tmp_path / "checkpoint"
    settings = [f"--steps={STEPS}", f"--metrics={metrics}", f"--checkpoint={checkpoint}", "--timeout=60"]
    done = ends(stderr, [sys.executable, "-m", "penstock", "run", str(bundle_of(2, "2bw", 4).path), *settings])
    steps = [row["step"] for row in map(json.loads, metrics.read_text().splitlines()) if "loss" in row]
    assert (done.returncode, len(steps)) == (0, STEPS)
    assert (checkpoint / "latest").exists()


def test_files_of_a_command_never_get_the_number_of_a_closed_stream(tmp_path):
    """What a library writes to descriptor 2 would go into them."""
    script = (
        "import os\nfrom penstock.commands.parser import main\n"
        "main(['completion', 'bash'])\n"
        f"file = os.open({str(tmp_path / 'file')!r}, os.O_CREAT | os.O_WRONLY)\n"
        "os.write(2, b'noise')\n"
        "assert file > 2, file\n"
    )
    done = ends("closed", [sys.executable, "-c", script])
    assert (done.returncode, (tmp_path / "file").read_bytes()) == (0, b"")


def test_a_status_goes_on_where_the_stream_fails(monkeypatch):
    class Full:
        def write(self, text: str) -> int:
            raise OSError(28, "No space left on device")

        def flush(self) -> None: ...

        def isatty(self) -> bool:
            return False

        def fileno(self) -> int:
            raise OSError("no descriptor")

    monkeypatch.setattr(sys, "stderr", Full())
    say("lost")
    StatusLine().show("lost")
    Progress("work")(1, 1, "lost")
    assert Path(os.devnull).exists()
