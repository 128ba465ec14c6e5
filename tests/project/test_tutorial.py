"""The commands of the tutorial and of the how-to guides, run in their order in one folder; what they print has to be what the pages show.

A page holds files, as ```python title="NAME", and terminals, as ```console: lines with `$ ` are commands, what follows is their output. A line `...`
stands for any lines. Numbers, units of time and lines of progress are not compared, nor whether a run of few steps knew how busy its stages were:
they depend on the machine. The folder is called ~/tutorial. `python tests/project/test_tutorial.py` runs everything
and writes what came out into the pages, at the places that were shown before; of a command without any output, all of it."""

from __future__ import annotations

import os
import re
import shlex
import subprocess
import sys
from collections.abc import Iterator, Sequence
from contextlib import chdir, redirect_stderr, redirect_stdout
from dataclasses import dataclass
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory
from time import monotonic

import pytest

from penstock.commands.parser import main

DOCS = Path(__file__).resolve().parents[2] / "docs"
PAGES = [*sorted((DOCS / "tutorial").glob("[0-9]*.md")), *sorted((DOCS / "how-to").glob("*.md"))]
BLOCK = re.compile(
    r"^```(?:(?P<terminal>console)|\w+ title=\"(?P<file>[\w.]+)\")\n(?P<body>.*?)^```$", re.MULTILINE | re.DOTALL
)
PROGRESS = re.compile(r"(passes|compile|cases) \d+/\d+ ")
BUSY = re.compile(r"(?<=samples/s)  busy( \d+%)+(?=  )")
TIME = re.compile(r"(?<=#)( ?)(s|ms|us|ns)\b")


@dataclass
class Command:
    """A command of a page, and the lines that the page shows behind it."""

    text: str
    shown: list[str]


@dataclass
class File:
    name: str
    text: str


Part = Command | File


def parts(page: str) -> list[Part]:
    """What a reader of the page does, in order."""
    found: list[Part] = []
    for block in BLOCK.finditer(page):
        found += [File(block["file"], block["body"])] if block["file"] else terminal(block["body"])
    return found


def terminal(body: str) -> list[Command]:
    commands: list[Command] = []
    for line in body.splitlines():
        if line.startswith("$ "):
            commands.append(Command(line[2:], []))
        elif commands[-1].text.endswith("\\"):
            commands[-1].text += f"\n{line}"
        else:
            commands[-1].shown.append(line)
    return commands


def run(command: str) -> list[str]:
    """What a terminal would show, but for progress."""
    words = shlex.split(command.replace("\\\n", " "))
    if words[0] == "penstock" and not re.search("[|>*]", command):
        out = StringIO()
        with redirect_stdout(out), redirect_stderr(out):
            code = main(words[1:])
        text = out.getvalue()
    else:
        folder = Path(sys.executable).parent
        environment = os.environ | {"PATH": f"{folder}{os.pathsep}{os.environ['PATH']}"}
        done = subprocess.run(
            ["bash", "-c", command],
            env=environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=300,
        )
        text, code = done.stdout, done.returncode
    lines = [line.rstrip() for line in text.replace(str(Path.cwd()), "~/tutorial").splitlines()]
    return [*(line for line in lines if not PROGRESS.match(line)), *([f"(exit code {code})"] if code else [])]


def told(line: str) -> str:
    """What is compared of a line."""
    masked = re.sub(r"\d{4}-\d\d-\d\dT[\d:]+Z", "#", BUSY.sub("", line))
    masked = re.sub(r"(?<![\w.%@:])[-+]?\d[\d.,]*(e[+-]?\d+)?", "#", masked)
    return re.sub(r"-{3,}|[─━]{2,}| {2,}", " ", TIME.sub(r"\1s", masked)).strip()


def matched(shown: Sequence[str], came: Sequence[str]) -> list[str] | None:
    """The lines that are shown, as they came out this time; None where they did not. Lines between two `...` follow each other."""
    runs: list[list[str]] = [[]]
    for line in shown:
        if line.strip() == "...":
            runs.append([])
        else:
            runs[-1].append(line)
    told_all, place, lines = [told(line) for line in came], 0, []
    for number, wanted in enumerate(runs):
        size, words = len(wanted), [told(line) for line in wanted]
        last = number == len(runs) - 1
        places = range(place, len(came) - size + 1) if number else [0]
        if last and (number or size):
            places = [len(came) - size] if number else [0]
        begin = next((i for i in places if i >= place and told_all[i : i + size] == words), None)
        if begin is None or (last and begin + size != len(came)):
            return None
        lines += [*(["..."] if number else []), *came[begin : begin + size]]
        place = begin + size
    return lines


def walk(pages: Sequence[Path], until: str = "") -> Iterator[tuple[Path, Command, list[str]]]:
    """Do what the pages say, in the folder that is current; every command with what it printed. Ends before the first command with `until` in it."""
    for page in pages:
        for part in parts(page.read_text(encoding="utf-8")):
            if isinstance(part, File):
                Path(part.name).write_text(part.text, encoding="utf-8")
                continue
            if until and until in part.text:
                return
            yield page, part, run(part.text)


def differences(pages: Sequence[Path], folder: Path, until: str = "") -> list[str]:
    """Commands that did not print what their pages show."""
    with chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(folder / ".cache"))
        patch.setenv("PENSTOCK_RATES", "assumed")
        patch.setenv("COLUMNS", "160")
        return [
            f"{page.name}: $ {part.text}\n" + "\n".join(came)
            for page, part, came in walk(pages, until)
            if matched(part.shown, came) is None
        ]


def test_the_tutorial_up_to_the_first_compilation(tmp_path: Path) -> None:
    assert not differences(PAGES[:1], tmp_path, until="penstock compile"), (
        "python tests/project/test_tutorial.py writes the pages again"
    )


@pytest.mark.slow
def test_tutorial_and_guides_come_out_as_they_are_told(tmp_path: Path) -> None:
    assert not differences(PAGES, tmp_path), "python tests/project/test_tutorial.py writes the pages again"


def test_other_output_is_noticed() -> None:
    came = ["one 1", "two 2.5 ms", "three", "four 17%"]
    assert matched(["one 7", "two 3 us", "three", "four 1%"], came) == came
    assert matched(["one 7", "...", "four 1%"], came) == ["one 1", "...", "four 17%"]
    assert matched(["...", "three", "..."], came) == ["...", "three", "..."]
    assert matched(["..."], came) == ["..."]
    step, longer = "step 3/3  loss 2.0  98.1 samples/s  0s left", "step 3/3  loss 1.0  9 samples/s  busy 0% 7%  1s left"
    assert matched([step], [longer]) == [longer]
    for wrong in (
        [],
        ["one 7"],
        ["one 7", "...", "two 3 ms"],
        ["two 3 ms", "..."],
        ["...", "one 7", "three", "..."],
        ["...", "five"],
    ):
        assert matched(wrong, came) is None
    assert matched([step], [longer.replace("busy", "idle")]) is None
    assert matched([], []) == []


def test_pages_are_read_as_they_are_written() -> None:
    page = 'a\n\n```python title="make.py"\nprint(1)\n```\n\n```console\n$ penstock plan m.onnx \\\n    --devices 2\nplan 1\n$ ls\n```\n'
    assert parts(page) == [
        File("make.py", "print(1)\n"),
        Command("penstock plan m.onnx \\\n    --devices 2", ["plan 1"]),
        Command("ls", []),
    ]


def write_pages() -> None:
    """Run all pages, and show in them what came out. A page whose lines are others than before has to be looked at by whoever changed that."""
    texts = {page: page.read_text(encoding="utf-8") for page in PAGES}
    with TemporaryDirectory() as folder, chdir(folder), pytest.MonkeyPatch.context() as patch:
        patch.setenv("PENSTOCK_CACHE", str(Path(folder) / ".cache"))
        patch.setenv("PENSTOCK_RATES", "assumed")
        patch.setenv("COLUMNS", "160")
        places, began = dict.fromkeys(PAGES, 0), monotonic()
        for page, part, came in walk(PAGES):
            print(f"{monotonic() - began:.1f} s after the beginning: {page.name}: {part.text}", flush=True)
            lines = matched(part.shown, came) if part.shown else came
            if lines is None:
                print(
                    f"{page.name}: $ {part.text}\nprinted other lines than the page shows, which stays as it is:\n"
                    + "\n".join(came)
                )
                continue
            head = "\n".join([f"$ {part.text}", *part.shown])
            begin = texts[page].index(head, places[page])
            text = "\n".join([f"$ {part.text}", *lines])
            texts[page] = texts[page][:begin] + text + texts[page][begin + len(head) :]
            places[page] = begin + len(text)
            page.write_text(texts[page], encoding="utf-8")


if __name__ == "__main__":
    write_pages()
