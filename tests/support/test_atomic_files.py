"""Files that are written whole or not at all: links, long names, and the path that an error names."""

from __future__ import annotations

import errno
import os
from pathlib import Path

import pytest

from penstock.support.atomic_files import naming, replacing
from penstock.support.paths import replacing_problem


def test_a_link_stays_a_link(tmp_path: Path) -> None:
    (tmp_path / "far").mkdir()
    target, link = tmp_path / "far" / "real", tmp_path / "link"
    target.write_text("old")
    link.symlink_to(target)
    with replacing(link) as work:
        assert work.parent == target.parent
        work.write_text("new")
    assert link.is_symlink()
    assert target.read_text() == "new"
    assert os.listdir(tmp_path / "far") == ["real"]


@pytest.mark.parametrize("name", ["x" * 255, "ä" * 127])
def test_a_name_as_long_as_names_may_be(name: str, tmp_path: Path) -> None:
    with replacing(tmp_path / name) as work:
        work.write_text("new")
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [(name, "new")]


def test_an_error_names_the_file_that_was_wanted(tmp_path: Path) -> None:
    with pytest.raises(FileNotFoundError) as caught, replacing(tmp_path / "gone" / "x") as work:
        work.write_text("new")
    assert caught.value.filename == str(tmp_path / "gone" / "x")
    (tmp_path / "x").write_text("old")

    def halfway() -> None:
        with replacing(tmp_path / "x") as work:
            work.write_text("new")
            raise ValueError("halfway")

    with pytest.raises(ValueError, match="halfway"):
        halfway()
    assert [(path.name, path.read_text()) for path in tmp_path.iterdir()] == [("x", "old")]


def test_a_disk_gets_the_name_of_the_file_and_other_errors_do_not() -> None:
    with pytest.raises(OSError, match="No space") as caught, naming("/x/y"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert caught.value.filename == "/x/y"
    with pytest.raises(OSError, match="Too many") as caught, naming("/x/y"):
        raise OSError(errno.EMFILE, "Too many open files")
    assert caught.value.filename is None


def test_what_cannot_be_replaced(tmp_path: Path) -> None:
    (tmp_path / "x").write_text("old")
    assert replacing_problem(str(tmp_path / "x")) == replacing_problem(str(tmp_path / "y" / "z")) == ""
    assert replacing_problem(str(tmp_path)) == "is a directory, not a file"
    assert "not a directory" in replacing_problem(str(tmp_path / "x" / "y")).lower()
    os.mkfifo(tmp_path / "pipe")
    assert replacing_problem(str(tmp_path / "pipe")) == ""
    # A file that may be written in a folder that takes no others, for everybody.
    assert replacing_problem("/proc/self/comm") != ""
