"""Output for people: progress on stderr, one line that is rewritten on a terminal, plain lines elsewhere; and tables.

Control characters of a terminal are escaped, as names in the output come from files. Words for people never decide
about the work: where stderr is closed, full or no longer read, they are lost, and the work goes on.
"""

from __future__ import annotations

import contextlib
import os
import re
import select
import sys
import time
import warnings
from collections.abc import Iterator, Sequence

from .words import counted, shortened, visible, visible_lines

# Work that ends within so many seconds needs no progress.
PATIENCE = 2.0
PLAIN_EVERY = 5.0
_STDERR = 2
# How long a reader of stderr may take before it counts as gone, where writing does not wait for it.
_READER_SECONDS = 2.0


def write_to_people(text: str) -> None:
    """Write a text to stderr as it is. If that fails, the text is lost, and descriptor 2 leads nowhere from then on."""
    if sys.stderr is None:
        return
    encoding = getattr(sys.stderr, "encoding", None) or "utf-8"
    text = text.encode(encoding, "backslashreplace").decode(encoding)
    try:
        is_stderr = sys.stderr.fileno() == _STDERR
    except (OSError, ValueError):
        is_stderr = False
    if not is_stderr:  # the calling program put a stream of its own in the place of stderr
        with contextlib.suppress(OSError, ValueError):
            sys.stderr.write(text)
            sys.stderr.flush()
        return
    try:
        sys.stderr.flush()
        _write_all(text.encode(encoding))
    except OSError:  # a full disk, a pipe without a reader, a closed file
        nowhere = os.open(os.devnull, os.O_WRONLY)
        os.dup2(nowhere, _STDERR)
        os.close(nowhere)


def _write_all(data: bytes) -> None:
    """Write to descriptor 2. Where that does not block and is full, wait for its reader, who may only be slow."""
    until = time.monotonic() + _READER_SECONDS
    while data:
        try:
            data = data[os.write(_STDERR, data) :]
        except BlockingIOError:
            left = until - time.monotonic()
            if left <= 0 or not select.select((), (_STDERR,), (), left)[1]:
                raise


def is_terminal() -> bool:
    """Return True where stderr is a terminal."""
    try:
        return sys.stderr is not None and sys.stderr.isatty()
    except ValueError:
        return False


def open_standard_streams() -> None:
    """Let descriptors 0 to 2 lead nowhere where they are closed, as files opened later would take their numbers."""
    while (descriptor := os.open(os.devnull, os.O_RDWR)) <= 2:
        pass
    os.close(descriptor)
    if sys.stdout is None:
        sys.stdout = os.fdopen(1, "w")
    if sys.stderr is None:
        sys.stderr = os.fdopen(_STDERR, "w")


class StatusLine:
    """A line on stderr, rewritten on a terminal at most every `rewrite_every` seconds; elsewhere a plain line every few
    seconds.
    """

    def __init__(self, quiet: bool = False, rewrite_every: float = 0.0) -> None:
        self.quiet = quiet
        self.terminal = not quiet and is_terminal()
        self._every = rewrite_every if self.terminal else PLAIN_EVERY
        self._shown = time.monotonic()
        self._open = False

    @property
    def due(self) -> bool:
        """Return whether enough time has passed for another line."""
        return not self.quiet and time.monotonic() - self._shown >= self._every

    def show(self, text: str) -> None:
        """Show a text, unless quiet."""
        if self.quiet:
            return
        text = visible(text)
        self._shown = time.monotonic()
        write_to_people(f"\r\x1b[K{text}" if self.terminal else f"{text}\n")
        self._open = self.terminal

    def interrupt(self, text: str) -> None:
        """Print a line in the place of the status, quiet or not."""
        text = visible_lines(text)
        write_to_people(f"\r\x1b[K{text}\n" if self._open else f"{text}\n")
        self._open = False

    def close(self) -> None:
        """End a line that was left open, before other output."""
        if self._open:
            write_to_people("\n")
            self._open = False


class Progress:
    """A progress line, called with (done, total, what).

    On a terminal the line is rewritten; otherwise there is a line every few seconds, and the last one. Work that ends
    within `after` seconds has none.
    """

    def __init__(self, task: str, quiet: bool = False, after: float = 0.0) -> None:
        self.task, self._line, self._begin = task, StatusLine(quiet), time.monotonic() + after

    def __call__(self, done: int, total: int, what: str) -> None:
        if time.monotonic() < self._begin:
            return
        finished = done >= total
        if finished or self._line.due:
            self._line.show(f"{self.task} {done}/{total} {what}")
        if finished:
            self._line.close()

    def close(self) -> None:
        """End a line that was left open, before other output."""
        self._line.close()


def say(text: str) -> None:
    """Print a line for people on stderr, its control characters escaped."""
    say_as_is(visible_lines(text))


def say_as_is(text: str) -> None:
    """Print lines for people on stderr, whose parts were escaped already."""
    write_to_people(f"{text}\n")


# A warning as the logger of onnxruntime writes it, perhaps in colour.
_WARNED = re.compile(r"(?:\x1b\[[\d;]*m)?\d{4}-\d\d-\d\d [\d:.]+ \[W:onnxruntime:[^\]]*\] (.*?)\s*(?:\x1b\[0?m)?")


@contextlib.contextmanager
def python_warnings_counted() -> Iterator[None]:
    """Say in one line how often libraries warned through Python, and what the first warning was."""
    with warnings.catch_warnings(record=True) as caught:
        try:
            yield
        finally:
            said = [f"{item.category.__name__}: {' '.join(str(item.message).split())}" for item in caught]
            _say_warned("Python", said)


@contextlib.contextmanager
def onnxruntime_warnings_counted() -> Iterator[None]:
    """Say in one line how often the logger of onnxruntime warned, and what came first.

    It writes to descriptor 2 directly, which leads into a file for the while. All other lines are written to stderr
    afterwards; they are lost where the process is ended by a signal.
    """
    if sys.stderr is not None:
        sys.stderr.flush()
    kept = os.dup(2)
    with open(os.memfd_create("stderr"), "w+b") as file:
        os.dup2(file.fileno(), 2)
        try:
            yield
        finally:
            os.dup2(kept, 2)
            os.close(kept)
            file.seek(0)
            said = []
            for line in file.read().decode(errors="replace").splitlines(keepends=True):
                if (warned := _WARNED.fullmatch(line.rstrip("\r\n"))) is not None:
                    said.append(warned[1])
                else:
                    write_to_people(line)
            _say_warned("onnxruntime", said)


def _say_warned(source: str, said: Sequence[str]) -> None:
    if said:
        say(f"{source} warned {counted(len(said), 'time')}; first: {shortened(said[0])}")


def terminal_width() -> int | None:
    """Return the width of lines: that in COLUMNS, else of the terminal of standard output; None for a file or a
    program.
    """
    columns = os.environ.get("COLUMNS", "")
    if columns.isdecimal() and int(columns):
        return int(columns)
    return os.get_terminal_size(sys.stdout.fileno()).columns if sys.stdout.isatty() else None


def table(
    header: Sequence[str], rows: Sequence[Sequence[object]], width: int | None = None, cut: Sequence[int] = ()
) -> str:
    """Return columns under a header, numbers to the right.

    Where lines would be longer than `width`, the columns `cut` are cut, one after the other.
    """
    cells = [[visible(str(cell)) for cell in row] for row in rows]
    widths = [max(map(len, column)) for column in zip(header, *cells, strict=True)]
    for i in cut if width is not None else ():
        over = sum(widths) + 2 * (len(widths) - 1) - (width or 0)
        widths[i] = max(len(header[i]), widths[i] - max(over, 0))
    numeric = [
        all(isinstance(row[i], int | float) or _looks_numeric(str(row[i])) for row in rows) and bool(rows)
        for i in range(len(header))
    ]

    def line(row: Sequence[str]) -> str:
        shown = [c if len(c) <= w else f"{c[: w - 3]}..." for c, w in zip(row, widths, strict=True)]
        return "  ".join(
            c.rjust(w) if right else c.ljust(w) for c, w, right in zip(shown, widths, numeric, strict=True)
        ).rstrip()

    return "\n".join([line(header), line(["-" * w for w in widths]), *map(line, cells)])


def _looks_numeric(cell: str) -> bool:
    number = cell.split(" ")[0].rstrip("%")
    return number.replace(".", "", 1).replace("-", "", 1).isdigit() or cell in ("", "-")
