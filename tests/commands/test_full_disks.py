"""Disks that fill up and file systems that run no code: one line that names the file, exit code 1, and nothing half done."""

from __future__ import annotations

import errno
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

from penstock.models import write_mlp
from penstock.support.atomic_files import naming, replacing


def penstock(*words: object, **environment: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "penstock", *map(str, words)],
        capture_output=True,
        text=True,
        timeout=120,
        env=os.environ | environment,
    )


def may_mount(folder: Path) -> bool:
    return not subprocess.run(["mount", "-t", "tmpfs", "tmpfs", str(folder)], capture_output=True).returncode


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    """A file system of some pages; `mount -o remount` changes it."""
    folder = tmp_path / "disk"
    folder.mkdir()
    if not may_mount(folder):
        pytest.skip("this user may mount nothing")
    try:
        resize(folder, "size=64k")
        yield folder
    finally:
        subprocess.run(["umount", "-l", str(folder)], check=True)


def resize(folder: Path, options: str) -> None:
    subprocess.run(["mount", "-o", f"remount,{options}", str(folder)], check=True)


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A model whose weights alone fill the disk."""
    path = tmp_path_factory.mktemp("model") / "model.onnx"
    write_mlp(path, [256, 256, 256])
    return path


@pytest.fixture(scope="module")
def bundle(model: Path) -> Path:
    path = model.with_name("bundle")
    done = penstock("compile", model, "--dim", "batch=4", "-o", path)
    assert done.returncode == 0, done.stderr
    return path


def failed(done: subprocess.CompletedProcess[str], place: Path) -> bool:
    """Return whether a command ended as it should where `place` has no room."""
    lines = [line for line in done.stderr.splitlines() if line.startswith("penstock: ")]
    (error,) = lines
    return done.returncode == 1 and error.startswith(f"penstock: error: {place}") and "No space left" in error


def test_a_bundle(model: Path, small_disk: Path) -> None:
    done = penstock("compile", model, "--dim", "batch=4", "--backend", "numpy", "-o", small_disk / "bundle")
    assert failed(done, small_disk), done.stderr
    assert list(small_disk.iterdir()) == []


def test_a_dump(model: Path, small_disk: Path) -> None:
    resize(small_disk, "size=8k")
    done = penstock("plan", model, "--dim", "batch=4", "--dump-ir", small_disk / "dump")
    assert failed(done, small_disk / "dump"), done.stderr


def test_the_folder_of_temporary_files(model: Path, tmp_path: Path, small_disk: Path) -> None:
    """The compiler writes there, and is not to blame."""
    resize(small_disk, "size=8k")
    done = penstock("compile", model, "--dim", "batch=4", "-o", tmp_path / "bundle", TMPDIR=str(small_disk))
    assert failed(done, small_disk), done.stderr
    assert not (tmp_path / "bundle").exists()


def test_outputs(bundle: Path, tmp_path: Path, small_disk: Path) -> None:
    """An older file stays, and no half of a new one."""
    data, outputs = tmp_path / "x.npz", small_disk / "y.npz"
    np.savez(data, x=np.zeros((400, 256), np.float32))
    outputs.write_text("older")
    done = penstock("infer", bundle, "--data", data, "--output", outputs)
    assert failed(done, outputs), done.stderr
    assert [path.name for path in small_disk.iterdir()] == ["y.npz"]
    assert outputs.read_text() == "older"
    resize(small_disk, "size=8m")
    assert penstock("infer", bundle, "--data", data, "--output", outputs).returncode == 0


def test_a_file_system_that_runs_no_code(bundle: Path, tmp_path: Path, small_disk: Path) -> None:
    """The loader says that memory ended, as it does where memory ends."""
    resize(small_disk, "size=64m")
    copy = small_disk / "bundle"
    subprocess.run(["cp", "-r", str(bundle), str(copy)], check=True)
    data = tmp_path / "x.npz"
    np.savez(data, x=np.zeros((4, 256), np.float32))
    words = ("infer", copy, "--data", data, "--output", tmp_path / "y.npz")
    assert penstock(*words).returncode == 0
    resize(small_disk, "noexec")
    done = penstock(*words)
    assert done.returncode == 2
    assert "lies on a file system that is mounted noexec" in done.stderr


def test_errors_name_what_they_are_of(tmp_path: Path) -> None:
    with pytest.raises(OSError, match=r"No space left on device: '/a/b'"), naming("/a/b"):
        raise OSError(errno.ENOSPC, "No space left on device")
    with pytest.raises(OSError, match="'/other'"), naming("/a/b"):
        raise OSError(errno.ENOENT, "No such file or directory", "/other")
    with pytest.raises(ValueError, match="x"), naming("/a/b"):
        raise ValueError("x")
    with pytest.raises(OSError, match=r"No space left on device: '.*file'"), replacing(tmp_path / "file"):
        raise OSError(errno.ENOSPC, "No space left on device")
    assert list(tmp_path.iterdir()) == []
