"""Dump folders of strangers: a report takes nothing from outside of them, and what is damaged in them is one error of ours."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path

import pytest
from small_plan import Planned

from penstock.cli import main
from penstock.inspecting.subject import open_subject
from penstock.report.material import read_material

HEADER = "graph\tkernel\tfile\toperations\n"


@pytest.fixture
def dump(planned: Planned, tmp_path: Path) -> Path:
    """A copy of a dump with one kernel of one stage, and the only pass that a page needs."""
    folder, home = tmp_path / "dumps", tmp_path / "dumps/stages/s0"
    (home / "kernels").mkdir(parents=True)
    shutil.copy(sorted(planned.folder.glob("*.ir"))[0], folder / "00_input.ir")
    (folder / "passes.tsv").write_text("number\tpass\tms\n0\tinput\t0\n")
    (home / "kernels.tsv").write_text(f"{HEADER}s0.F\tk0\tkernels/one.py\t%a = exp\n")
    (home / "kernels/one.py").write_text("def one(): ...\n")
    (home / "relax.py").write_text("# for here\n")
    (tmp_path / "secret.txt").write_text("// secret\n// secret\n")
    return folder


def test_a_whole_dump_gives_its_sources(dump: Path, tmp_path: Path) -> None:
    """The control of what follows; folders may be reached by links."""
    (tmp_path / "link").symlink_to(dump)
    for folder in (dump, tmp_path / "link"):
        read = read_material(open_subject(folder))
        assert (read.sources, read.programs) == ({"s0.F/k0": "def one(): ...\n"}, {"s0/relax.py": "# for here\n"})


def linked(name: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).unlink(missing_ok=True)
        (folder / name).symlink_to(folder.parent / "secret.txt")

    return make


def says(name: str, data: bytes) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        (folder / name).write_bytes(data)

    return make


def names(file: str) -> Callable[[Path], None]:
    def make(folder: Path) -> None:
        place = str(folder.parent / "secret.txt") if file == "/" else file
        (folder / "stages/s0/kernels.tsv").write_text(f"{HEADER}s0.F\tk0\t{place}\t%a = exp\n")

    return make


def linked_folder(folder: Path) -> None:
    """Where a whole folder is elsewhere, names of files in it are of no harm to look at."""
    shutil.move(folder / "stages/s0", folder.parent / "s0")
    (folder / "stages/s0").symlink_to(folder.parent / "s0")


LINKS = (
    "stages/s0/relax.py",
    "stages/s0/kernels.cu",
    "stages/s0/kernels/one.py",
    "stages/s0/kernels.tsv",
    "repro.ir",
    "passes.tsv",
    "00_input.ir",
)


@pytest.mark.parametrize(
    "spoil", [*map(linked, LINKS), *map(names, ("/", "../../../secret.txt", "kernels/../../../../secret.txt")), linked_folder]
)
def test_nothing_outside_of_a_dump_gets_into_a_report(
    dump: Path, tmp_path: Path, spoil: Callable[[Path], None], capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(dump)
    assert main(["inspect", str(dump), "--html", str(tmp_path / "page.html")]) == 5
    told = capsys.readouterr().err
    assert "secret\n" not in told
    assert "outside of the dump folder" in told or "expected a graph, a kernel and kernels/NAME.py" in told
    assert not (tmp_path / "page.html").exists()


@pytest.mark.parametrize(
    ("spoil", "part"),
    [
        (says("stages/s0/kernels.tsv", b"header\none\ttwo\n"), "kernels.tsv:2: expected a graph"),
        (says("stages/s0/kernels.tsv", b"\xff"), "kernels.tsv: is no text"),
        (says("stages/s0/relax.py", b"a\xff"), "relax.py: is no text: invalid start byte at byte 1"),
        (says("stages/s0/kernels/one.py", b"\xff"), "one.py: is no text"),
        (says("repro.ir", b"// \xff"), "repro.ir: is no text"),
        (says("passes.tsv", b"\xff"), "passes.tsv: is no text"),
        (says("passes.tsv", b"number\tpass\tms\n0\tinput\t0\n\n1\tx\t0\n"), "passes.tsv:3: expected the number"),
        (says("passes.tsv", "number\tpass\tms\n\u00b2\tx\t0\n".encode()), "passes.tsv:2: expected the number"),
        (says("passes.tsv", b"number\tpass\tms\n1\tx\tnan\n"), "passes.tsv:2: expected the number"),
        (says("passes.tsv", b"number\tpass\tms\n" + b"1" * 5000 + b"\tx\t0\n"), "passes.tsv:2: expected the number"),
        (says("passes.tsv", b"what\n1\tx\t0\n"), "passes.tsv:2: expected the number"),
    ],
)
def test_what_is_damaged_is_one_error(
    dump: Path, tmp_path: Path, spoil: Callable[[Path], None], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    spoil(dump)
    assert main(["inspect", str(dump), "--html", str(tmp_path / "page.html")]) == 5
    assert part in capsys.readouterr().err
    if "passes.tsv" in part:
        assert main(["inspect", str(dump)]) == 5
        assert part in capsys.readouterr().err
