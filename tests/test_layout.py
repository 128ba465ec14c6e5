"""The layout's promises: who may import what, and one copy of every module."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from functools import cache
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("ir", "frontends", "passes", "backends", "runtime")
HEAVY = ("torch", "onnx", "onnxruntime", "tvm", "tvm_ffi")

# For each part of the package: what it must not pull in, among our own parts and among heavy libraries.
FORBIDDEN = {
    "ir": (("frontends", "passes", "backends", "runtime", "cli", "commands", "api"), HEAVY),
    "frontends": (
        ("passes", "backends", "runtime", "cli", "commands", "api"),
        ("torch", "onnxruntime", "tvm", "tvm_ffi"),
    ),
    "frontends.torch": (
        ("passes", "backends", "runtime", "cli", "commands", "api"),
        ("onnx", "onnxruntime", "tvm", "tvm_ffi"),
    ),
    "passes": (("frontends", "backends", "runtime", "cli", "commands", "api"), HEAVY),
    "backends": (("frontends", "runtime", "cli", "commands", "api"), ("onnx", "onnxruntime")),
    "backends.bundle": (("frontends", "passes", "runtime", "backends.tvm"), ("onnx", "onnxruntime", "tvm", "tvm_ffi")),
    "runtime": (
        ("frontends", "passes", "backends.tvm", "cli", "commands", "api"),
        ("onnx", "onnxruntime", "tvm", "tvm_ffi"),
    ),
    "cli": ((*FOLDERS[1:], "api"), HEAVY),
    "": (("frontends", "passes", "backends", "runtime"), HEAVY),
}

# The code generator, which may import tvm, and the reader of torch's programs, which imports torch, have processes of their own below.
_APART = {"backends": "tvm", "frontends": "torch"}


def _modules_of(part: str) -> tuple[str, ...]:
    """All modules of a part by their dotted names; the part itself when it is a single module."""
    if not part:
        return ("penstock",)
    folder = ROOT / "src" / "penstock" / part.replace(".", "/")
    if folder.with_suffix(".py").is_file():
        return (f"penstock.{part}",)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    apart = _APART.get(part)
    files = [path for path in files if path.parts[0] != apart]
    dotted = [".".join((f"penstock.{part}", *path.with_suffix("").parts)).removesuffix(".__init__") for path in files]
    assert dotted, f"no modules in {folder}"
    return tuple(dotted)


@cache
def _imported_by(modules: tuple[str, ...], *, extra_code: str = "") -> list[str]:
    """Names in sys.modules of a fresh process, run outside the checkout, after importing `modules`."""
    code = f"import gc, importlib, json, os, sys\ngc.disable()\n{extra_code}\nfor name in {modules!r}: importlib.import_module(name)\n"
    # Garbage, and taking apart what was imported, would take as long again.
    code += "print(json.dumps(list(sys.modules)), flush=True)\nos._exit(0)"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd="/", env=environment, check=False
    )
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
    imported = _imported_by(("penstock.ir.types",), extra_code="import onnx, penstock.passes.manager")
    assert {"onnx", "penstock.passes.manager"} <= set(_offenders(imported, *FORBIDDEN["ir"]))


def test_the_package_is_made_of_links() -> None:
    for folder in FOLDERS:
        link = ROOT / "src" / "penstock" / folder
        assert link.is_symlink(), f"{link} must be a link; a copy would go stale"
        assert os.readlink(link) == f"../../{folder}"
