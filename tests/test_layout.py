"""The layout's promises: who may import what, one copy of every module, and distributions that hold everything."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
import tarfile
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("ir", "frontends", "passes", "backends", "runtime")
HEAVY = ("torch", "onnx", "onnxruntime", "tvm", "tvm_ffi")

# For each part of the package: what it must not pull in, among our own parts and among heavy libraries.
FORBIDDEN = {
    "ir": (("frontends", "passes", "backends", "runtime", "cli", "commands", "api"), HEAVY),
    "frontends": (("passes", "backends", "runtime", "cli", "commands", "api"), ("torch", "onnxruntime", "tvm", "tvm_ffi")),
    "frontends.torch": (("passes", "backends", "runtime", "cli", "commands", "api"), ("onnx", "onnxruntime", "tvm", "tvm_ffi")),
    "passes": (("frontends", "backends", "runtime", "cli", "commands", "api"), HEAVY),
    "backends": (("frontends", "runtime", "cli", "commands", "api"), ("onnx", "onnxruntime")),
    "backends.bundle": (("frontends", "passes", "runtime", "backends.tvm"), ("onnx", "onnxruntime", "tvm", "tvm_ffi")),
    "runtime": (("frontends", "passes", "backends.tvm", "cli", "commands", "api"), ("onnx", "onnxruntime", "tvm", "tvm_ffi")),
    "cli": ((*FOLDERS[1:], "api"), HEAVY),
    "": (("frontends", "passes", "backends", "runtime"), HEAVY),
}

# The code generator, which may import tvm, and the reader of torch's programs, which imports torch, have processes of their own below.
_APART = {"backends": "tvm", "frontends": "torch"}


def _modules_of(part: str) -> list[str]:
    """All modules of a part by their dotted names; the part itself when it is a single module."""
    if not part:
        return ["penstock"]
    folder = ROOT / "src" / "penstock" / part.replace(".", "/")
    if folder.with_suffix(".py").is_file():
        return [f"penstock.{part}"]
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    apart = _APART.get(part)
    files = [path for path in files if path.parts[0] != apart]
    dotted = [".".join((f"penstock.{part}", *path.with_suffix("").parts)).removesuffix(".__init__") for path in files]
    assert dotted, f"no modules in {folder}"
    return dotted


def _imported_by(modules: list[str], *, extra_code: str = "") -> list[str]:
    """Names in sys.modules of a fresh process, run outside the checkout, after importing `modules`."""
    code = f"import importlib, json, sys\n{extra_code}\nfor name in {modules!r}: importlib.import_module(name)\nprint(json.dumps(list(sys.modules)))"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd="/", env=environment, check=False)
    assert done.returncode == 0, done.stderr
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def _offenders(imported: list[str], ours: tuple[str, ...], libraries: tuple[str, ...]) -> list[str]:
    banned = (*(f"penstock.{part}" for part in ours), *libraries)
    return [name for name in imported if any(name == prefix or name.startswith(prefix + ".") for prefix in banned)]


@pytest.mark.parametrize("part", FORBIDDEN, ids=lambda part: part or "penstock")
def test_imports_go_one_way(part: str) -> None:
    imported = _imported_by(_modules_of(part))
    assert not _offenders(imported, *FORBIDDEN[part])
    # A folder imported as a top-level package would be a second copy of every class in it.
    assert not [folder for folder in FOLDERS if folder in imported]


def test_only_the_tvm_backend_imports_tvm() -> None:
    assert "tvm" in _imported_by(_modules_of("backends.tvm"))


def test_only_the_torch_frontend_imports_torch() -> None:
    assert "torch" in _imported_by(_modules_of("frontends.torch"))


def test_the_import_check_sees_an_offender() -> None:
    """The control: a part that does import what it must not is found."""
    imported = _imported_by(["penstock.ir.types"], extra_code="import onnx, penstock.passes.manager")
    assert {"onnx", "penstock.passes.manager"} <= set(_offenders(imported, *FORBIDDEN["ir"]))


def test_the_package_is_made_of_links() -> None:
    for folder in FOLDERS:
        link = ROOT / "src" / "penstock" / folder
        assert link.is_symlink(), f"{link} must be a link; a copy would go stale"
        assert os.readlink(link) == f"../../{folder}"


def _sources() -> set[str]:
    """Every file that a distribution must hold, as a path below `penstock/`."""
    package = ROOT / "src" / "penstock"
    found = {path.name for path in package.iterdir() if path.is_file()}
    for own in (folder for folder in package.iterdir() if folder.is_dir() and not folder.is_symlink() and folder.name != "__pycache__"):
        found |= {str(path.relative_to(package)) for path in own.rglob("*") if path.is_file()}
    for folder in FOLDERS:
        found |= {str(Path(folder) / path.relative_to(ROOT / folder)) for path in (ROOT / folder).rglob("*.py")}
    return {name for name in found if not name.endswith(".pyc")}


@pytest.mark.slow
def test_wheel_and_sdist_are_complete(tmp_path: Path) -> None:
    """Needs setuptools from pip's configured sources, as every build does."""
    build = "import setuptools.build_meta as b, sys; print(b.build_sdist(sys.argv[1]))"
    subprocess.run([sys.executable, "-m", "venv", tmp_path / "env"], check=True, timeout=120)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([python, "-m", "pip", "install", "-q", "setuptools>=77"], check=True, timeout=300)
    checkout = tmp_path / "checkout"
    left_behind = shutil.ignore_patterns(".*", "__pycache__", "*.egg-info", "build", "dist", "demo-out")
    shutil.copytree(ROOT, checkout, symlinks=True, ignore=left_behind)

    subprocess.run([python, "-c", build, tmp_path], cwd=checkout, check=True, timeout=300, capture_output=True)
    (sdist,) = tmp_path.glob("*.tar.gz")
    with tarfile.open(sdist) as archive:
        held = {name.partition("/")[2] for name in archive.getnames()}
        archive.extractall(tmp_path / "unpacked", filter="data")
    assert not {f"src/penstock/{name}" for name in _sources()} - held
    assert {"README.md", "CHANGELOG.md", "Makefile", "constraints.txt", "tests/test_layout.py", "docs/index.md"} <= held

    # The wheel is made from the sdist, so that one that cannot be built from would be noticed.
    (unpacked,) = (tmp_path / "unpacked").iterdir()
    wheel_command = [python, "-m", "pip", "wheel", "-q", "--no-deps", "--no-build-isolation", "-w", tmp_path, unpacked]
    subprocess.run(wheel_command, check=True, timeout=300, capture_output=True)
    (wheel,) = tmp_path.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        held = set(archive.namelist())
    assert {f"penstock/{name}" for name in _sources()} == {name for name in held if name.startswith("penstock/")}
