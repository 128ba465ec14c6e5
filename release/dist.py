"""Builds the distributions as a stranger would get them, and tries them.

In: the files of a git checkout that git tracks, as they stand. Out: an sdist, and the wheel that is built from it, in a folder. On the way:

contents   the sdist holds every tracked file (but those whose names begin with a dot), the wheel the package and nothing else; the five folders that
           src/penstock links to are in both as files, not as links
metadata   one version, the licence and its files, `twine check --strict`
trial      the wheel, installed into an empty environment with the versions of constraints.txt, compiles and trains a small model, writes a report
           and is typed for its users

Needs git and a package index, as every installation does.
"""

from __future__ import annotations

import argparse
import os
import re
import shutil
import stat
import subprocess
import sys
import tarfile
import tempfile
import zipfile
from collections.abc import Iterable, Sequence
from email import message_from_bytes
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("ir", "frontends", "passes", "backends", "runtime")
TOOLS = ("build>=1.2", "twine>=6")
_VERSION = re.compile(r'^__version__ = "([^"]+)"$', re.MULTILINE)
_MADE_BY_SETUPTOOLS = re.compile(r"PKG-INFO|setup\.cfg|src/penstock\.egg-info/.*")
_LICENSES = ("LICENSE", "NOTICE")

TRIAL = """
import numpy as np
from penstock.models import write_mlp
write_mlp("model.onnx", [8, 16, 16, 4])
x = np.random.default_rng(0).normal(size=(64, 8)).astype(np.float32)
np.savez("train.npz", x=x, labels=np.abs(x[:, :4]).argmax(axis=1))
"""
# One error is right: that the result is no integer. A package without types gives another one.
TYPED = """
import penstock as ps
found: int = ps.from_onnx("model.onnx")
"""


def tracked(root: Path) -> list[str]:
    """The files that git tracks, links included."""
    done = subprocess.run(["git", "ls-files", "-z"], cwd=root, check=True, capture_output=True)
    return sorted(name for name in done.stdout.decode().split("\0") if name)


def version(root: Path) -> str:
    """The version, from the one place where it stands."""
    found = _VERSION.findall((root / "src/penstock/version.py").read_text(encoding="utf-8"))
    assert len(found) == 1, "src/penstock/version.py must say __version__ once"
    return str(found[0])


def packaged(names: Iterable[str]) -> set[str]:
    """Those of the tracked files that the wheel must hold, by their names in it."""
    links = {f"src/penstock/{folder}" for folder in FOLDERS}
    own = {name.removeprefix("src/") for name in names if name.startswith("src/penstock/") and name not in links}
    return own | {f"penstock/{name}" for name in names if name.split("/")[0] in FOLDERS}


def wrong_in_sdist(archive: tarfile.TarFile, names: Sequence[str]) -> list[str]:
    """What is missing from an sdist, and what should not be there; `names` are the tracked files."""
    members = [(member.name.partition("/")[2], member) for member in archive.getmembers()]
    held = {name for name, member in members if member.isfile()}
    wanted = {f"src/{name}" for name in packaged(names)}
    wanted |= {name for name in names if not name.startswith((".", "src/")) and name.split("/")[0] not in FOLDERS}
    more = {name for name in held - wanted if not _MADE_BY_SETUPTOOLS.fullmatch(name)}
    links = [name for name, member in members if member.issym() or member.islnk()]
    return _told("sdist", wanted - held, more, links)


def wrong_in_wheel(archive: zipfile.ZipFile, names: Sequence[str], number: str) -> list[str]:
    """The same of a wheel, and what its metadata say otherwise than they should."""
    about = f"penstock-{number}.dist-info"
    made = {f"{about}/{name}" for name in ("METADATA", "WHEEL", "RECORD", "entry_points.txt", "top_level.txt")}
    wanted = packaged(names) | made | {f"{about}/licenses/{name}" for name in _LICENSES}
    held = set(archive.namelist())
    links = [info.filename for info in archive.infolist() if stat.S_ISLNK(info.external_attr >> 16)]
    wrong = _told("wheel", wanted - held, held - wanted, links)
    if f"{about}/METADATA" in held:
        said = message_from_bytes(archive.read(f"{about}/METADATA"))
        for field, value in (("Version", number), ("License-Expression", "Apache-2.0")):
            if said[field] != value:
                wrong.append(f"wheel: {field} is {said[field]!r}, expected {value!r}")
        if sorted(said.get_all("License-File", [])) != list(_LICENSES):
            wrong.append(f"wheel: License-File is {said.get_all('License-File')}, expected {' and '.join(_LICENSES)}")
    return wrong


def _told(kind: str, missing: Iterable[str], more: Iterable[str], links: Iterable[str]) -> list[str]:
    facts = (("is missing", missing), ("does not belong there", more), ("is a link", links))
    return [f"{kind}: {name} {what}" for what, found in facts for name in sorted(found)]


def _run(*command: str | Path, cwd: Path, seconds: int = 900) -> str:
    """What a command printed; ends this program, with all that it said, if it fails. It sees neither this checkout nor its environment."""
    hidden = ("PYTHONPATH", "PYTHONHOME", "VIRTUAL_ENV")
    environment = {name: value for name, value in os.environ.items() if name not in hidden} | {
        "PENSTOCK_CACHE": str(cwd / "cache")
    }
    done = subprocess.run(
        command, cwd=cwd, env=environment, capture_output=True, text=True, timeout=seconds, check=False
    )
    if done.returncode:
        sys.exit(f"{' '.join(map(str, command))} failed ({done.returncode}):\n{done.stdout}{done.stderr}")
    return done.stdout


def _environment(place: Path, *wanted: str | Path) -> Path:
    """The folder of programs of a new environment that has these packages, in the versions of constraints.txt."""
    _run(sys.executable, "-m", "venv", place, cwd=place.parent)
    pip = (place / "bin/python", "-m", "pip", "install", "--quiet", "--disable-pip-version-check")
    for package in wanted:
        _run(*pip, "-c", ROOT / "constraints.txt", package, cwd=place.parent)
    return place / "bin"


def build(names: Sequence[str], out: Path, scratch: Path) -> tuple[Path, Path]:
    """An sdist of these files and the wheel made of it, both in `out`."""
    checkout = scratch / "checkout"
    for name in names:
        (checkout / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy2(ROOT / name, checkout / name, follow_symlinks=False)
    tools = _environment(scratch / "tools", *TOOLS)
    made = scratch / "made"
    _run(tools / "python", "-m", "build", "--outdir", made, checkout, cwd=scratch)
    found = sorted(made.iterdir())
    print(_run(tools / "twine", "check", "--strict", *found, cwd=scratch), end="")
    (wheel,), (sdist,) = made.glob("*.whl"), made.glob("*.tar.gz")
    out.mkdir(parents=True, exist_ok=True)
    return Path(shutil.copy2(sdist, out)), Path(shutil.copy2(wheel, out))


def try_wheel(wheel: Path, number: str, scratch: Path) -> None:
    """Install into an empty environment, and use it there, far from the checkout."""
    # torch goes in first, alone, as in the Makefile.
    programs, place = _environment(scratch / "empty", "torch==2.13.0", wheel, "mypy"), scratch / "trial"
    place.mkdir()
    penstock = programs / "penstock"
    found = _run(penstock, "--version", cwd=place).strip()
    if found != f"penstock {number}":
        sys.exit(f"`penstock --version` printed {found!r}, expected 'penstock {number}'")
    _run(penstock, "--help", cwd=place)
    _run(programs / "python", "-c", TRIAL, cwd=place)
    _run(
        penstock,
        "compile",
        "model.onnx",
        "-o",
        "bundle",
        "--devices",
        "2",
        "--loss",
        "cross_entropy",
        "--dim",
        "batch=8",
        "--microbatches",
        "2",
        cwd=place,
    )
    _run(penstock, "run", "bundle", "--data", "train.npz", "--steps", "3", cwd=place)
    _run(penstock, "inspect", "bundle", "--html", "report.html", cwd=place)
    (place / "typed.py").write_text(TYPED, encoding="utf-8")
    types = subprocess.run(
        [programs / "mypy", "--strict", "typed.py"], cwd=place, capture_output=True, text=True, timeout=600, check=False
    )
    wrong = [line for line in types.stdout.splitlines() if "error:" in line]
    if len(wrong) != 1 or 'expression has type "Model"' not in wrong[0]:
        sys.exit(f"users of the wheel do not get its types:\n{types.stdout}{types.stderr}")
    print(f"penstock {number} compiled, trained, wrote a report and gave its types in an empty environment")


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument(
        "--out", type=Path, default=ROOT / "dist", metavar="DIR", help="where sdist and wheel go (default: dist)"
    )
    options = parser.parse_args(arguments)
    names, number = tracked(ROOT), version(ROOT)
    with tempfile.TemporaryDirectory() as folder:
        scratch = Path(folder)
        sdist, wheel = build(names, options.out, scratch)
        with tarfile.open(sdist) as archive:
            wrong = wrong_in_sdist(archive, names)
        with zipfile.ZipFile(wheel) as held:
            wrong += wrong_in_wheel(held, names, number)
        if wrong:
            sys.exit("\n".join(wrong))
        print(f"{sdist.name} and {wheel.name} hold what they should and nothing else")
        try_wheel(wheel, number, scratch)


if __name__ == "__main__":
    main()
