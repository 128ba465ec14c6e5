"""Distributions hold what they should, and the bill of materials names what runs: release/ against archives made here and against what is imported."""

from __future__ import annotations

import importlib.util
import io
import json
import subprocess
import sys
import tarfile
import zipfile
from importlib.metadata import packages_distributions, version
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
from oracles.repository import ROOT
from packaging.utils import canonicalize_name

import penstock

# Some of what git tracks: the package, a folder it links to, the link, and what belongs into no wheel.
TRACKED = [
    "Makefile",
    ".gitignore",
    "ir/graph.py",
    "src/penstock/ir",
    "src/penstock/py.typed",
    "src/penstock/inspection/report/page/main.js",
    "tests/test_x.py",
]
METADATA = "Metadata-Version: 2.4\nName: penstock\nVersion: 0.1.0\nLicense-Expression: Apache-2.0\nLicense-File: LICENSE\nLicense-File: NOTICE\n"
ABOUT = ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt", "licenses/LICENSE", "licenses/NOTICE")


def _load(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(f"release_{name}", ROOT / "release" / f"{name}.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module
    spec.loader.exec_module(module)
    return module


dist, sbom = _load("dist"), _load("sbom")


def _wheel(held: dict[str, str]) -> zipfile.ZipFile:
    file = io.BytesIO()
    with zipfile.ZipFile(file, "w") as archive:
        for name, text in held.items():
            archive.writestr(name, text)
    return zipfile.ZipFile(file)


def _whole_wheel() -> dict[str, str]:
    held = dict.fromkeys(("penstock/ir/graph.py", "penstock/py.typed", "penstock/inspection/report/page/main.js"), "")
    return held | {f"penstock-0.1.0.dist-info/{name}": METADATA if name == "METADATA" else "" for name in ABOUT}


def test_a_wheel_that_is_whole() -> None:
    assert dist.wrong_in_wheel(_wheel(_whole_wheel()), TRACKED, "0.1.0") == []


@pytest.mark.parametrize(
    ("name", "text", "told"),
    [
        ("penstock/py.typed", None, "penstock/py.typed is missing"),
        ("penstock/inspection/report/page/main.js", None, "main.js is missing"),
        ("penstock-0.1.0.dist-info/licenses/NOTICE", None, "NOTICE is missing"),
        ("tests/test_x.py", "", "tests/test_x.py does not belong there"),
        ("ir/graph.py", "", "ir/graph.py does not belong there"),
        (
            "penstock-0.1.0.dist-info/METADATA",
            METADATA.replace("Version: 0.1.0", "Version: 0.0.0"),
            "Version is '0.0.0'",
        ),
        ("penstock-0.1.0.dist-info/METADATA", METADATA.replace("Apache-2.0", "MIT"), "License-Expression is 'MIT'"),
    ],
)
def test_what_is_wrong_with_a_wheel_is_told(name: str, text: str | None, told: str) -> None:
    held = _whole_wheel()
    if text is None:
        del held[name]
    else:
        held[name] = text
    (wrong,) = dist.wrong_in_wheel(_wheel(held), TRACKED, "0.1.0")
    assert told in wrong


def test_sdists_hold_files_in_the_place_of_links() -> None:
    def told(names: list[str], link: str = "") -> list[str]:
        file = io.BytesIO()
        with tarfile.open(fileobj=file, mode="w") as archive:
            for name in names:
                archive.addfile(tarfile.TarInfo(f"penstock-0.1.0/{name}"))
            if link:
                found = tarfile.TarInfo(f"penstock-0.1.0/{link}")
                found.type, found.linkname = tarfile.SYMTYPE, "../../ir"
                archive.addfile(found)
        file.seek(0)
        with tarfile.open(fileobj=file) as archive:
            return list(dist.wrong_in_sdist(archive, TRACKED))

    whole = [
        "Makefile",
        "src/penstock/ir/graph.py",
        "src/penstock/py.typed",
        "src/penstock/inspection/report/page/main.js",
        "tests/test_x.py",
        "PKG-INFO",
    ]
    assert told(whole) == []
    assert told(whole[2:], "src/penstock/ir") == [
        "sdist: Makefile is missing",
        "sdist: src/penstock/ir/graph.py is missing",
        "sdist: src/penstock/ir is a link",
    ]
    assert told([*whole, "demo-out/model.bin"]) == ["sdist: demo-out/model.bin does not belong there"]


@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="git says what belongs to the sdist")
def test_the_sdist_is_told_of_everything() -> None:
    """What stands at the top, and is new, has to be named in MANIFEST.in; the rest setuptools finds by itself."""
    words = [line.split() for line in (ROOT / "MANIFEST.in").read_text(encoding="utf-8").splitlines()]
    told = {name for kind, *names in words if kind in ("include", "graft") for name in names}
    found = {name.split("/")[0] for name in dist.tracked(ROOT) if not name.startswith(".")}
    known = {"pyproject.toml", "README.md", "LICENSE", "NOTICE", "MANIFEST.in", "src", *dist.FOLDERS}
    assert found - known == told


def test_the_version_stands_in_one_place() -> None:
    assert dist.version(ROOT) == penstock.__version__
    assert 'dynamic = ["version"]' in (ROOT / "pyproject.toml").read_text(encoding="utf-8")


def _bill(tmp_path: Path, constraints: Path = ROOT / "constraints.txt") -> dict[str, Any]:
    sbom.main(["--out", str(tmp_path / "bill.json"), "--constraints", str(constraints)])
    found: dict[str, Any] = json.loads((tmp_path / "bill.json").read_text(encoding="utf-8"))
    return found


def test_the_bill_names_what_is_imported(tmp_path: Path) -> None:
    """The oracle is what a process loads that imports all heavy parts: each distribution it comes from is in the bill, with its version."""
    bill = _bill(tmp_path)
    versions = {canonicalize_name(part["name"]): part["version"] for part in bill["components"]}
    assert {name: version(name) for name in versions} == versions
    code = (
        "import gc, importlib, os, sys\ngc.disable()\nsys.modules.update(dict.fromkeys(sys.argv[1:]))\nbefore = set(sys.modules)\n"
        "for name in ('penstock.backends.tvm.kernels.tools.emit', 'penstock.frontends.onnx', 'penstock.frontends.torch', 'penstock.verification.checks', 'penstock.runtime.worker.worker', "
        "'penstock.planning.search', 'penstock.inspection.exports.weights', 'penstock.ir.cluster.file'): importlib.import_module(name)\n"
        "print(*{name.partition('.')[0] for name in set(sys.modules) - before}, flush=True)\n"
        "os._exit(0)"  # taking apart what was imported takes long
    )
    homes = packages_distributions()

    def imported(*without: str) -> dict[str, set[str]]:
        """Packages that are loaded where some cannot be, with the distributions they are of."""
        done = subprocess.run(
            [sys.executable, "-c", code, *without], capture_output=True, text=True, timeout=120, check=True
        )
        found = {
            name: {canonicalize_name(home) for home in homes.get(name, ())}
            for name in done.stdout.split()
            if name not in without
        }
        return {name: of - {"penstock", "setuptools", "pip"} for name, of in found.items()}

    packages = imported()
    # What torch takes because it is there and does well without, such as tqdm, is no part of penstock.
    if beside := [name for name, of in packages.items() if not of <= versions.keys()]:
        packages = imported(*beside)
    loaded = set().union(*packages.values())
    assert {"torch", "apache-tvm", "onnx", "numpy"} <= loaded
    assert loaded <= versions.keys(), f"imported and not in the bill: {sorted(loaded - versions.keys())}"
    assert not loaded <= versions.keys() - {"numpy"}, "the control: a bill without numpy"
    references = {part["bom-ref"] for part in (*bill["components"], bill["metadata"]["component"])}
    assert all(row["ref"] in references and set(row["dependsOn"]) <= references for row in bill["dependencies"])


def test_the_same_environment_gives_the_same_bill(tmp_path: Path) -> None:
    assert _bill(tmp_path) == _bill(tmp_path)


def test_what_is_not_pinned_is_told(tmp_path: Path) -> None:
    text = (ROOT / "constraints.txt").read_text(encoding="utf-8")
    other = tmp_path / "constraints.txt"
    other.write_text(
        text.replace(f"msgspec=={version('msgspec')}", "").replace(f"sympy=={version('sympy')}", "sympy==0.1"),
        encoding="utf-8",
    )
    with pytest.raises(SystemExit) as ended:
        _bill(tmp_path, other)
    assert str(ended.value).splitlines() == [
        f"msgspec: installed is {version('msgspec')}, constraints.txt has no pin",
        f"sympy: installed is {version('sympy')}, constraints.txt has 0.1",
    ]
    assert not (tmp_path / "bill.json").exists()


@pytest.mark.slow
@pytest.mark.skipif(not (ROOT / ".git").exists(), reason="distributions are made from a git checkout")
def test_distributions_are_built_and_work(tmp_path: Path) -> None:
    """Needs pip's configured sources, as every installation does."""
    done = subprocess.run(
        [sys.executable, ROOT / "release" / "dist.py", "--out", tmp_path],
        capture_output=True,
        text=True,
        timeout=1800,
        check=False,
    )
    assert done.returncode == 0, done.stdout + done.stderr
    assert "in an empty environment" in done.stdout
    assert len(list(tmp_path.iterdir())) == 2
