"""Bugs put into the compiler one at a time: each is refused by the verifier, or `verify --bisect` names the place and the tensor where it shows first.

What was found is kept in record.json, which the table in docs/debugging.md is made of; `python tests/verification/bisect/test_seeded_bugs.py` writes it again.
"""

from __future__ import annotations

import json
import re
import sys
from contextlib import redirect_stderr, redirect_stdout
from io import StringIO
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

if __name__ == "__main__":
    # Relative imports of a program start where its package is said to be.
    sys.path[0], __package__ = str(Path(__file__).resolve().parents[2]), "verification.bisect"

from penstock.backends.tvm.compile import pool
from penstock.commands.parser import main

from .seeded_bugs import BUGS, Bug
from .small_models import ARGUMENTS, write_models

RECORD = Path(__file__).with_name("record.json")
Row = dict[str, str]


@pytest.fixture(scope="module")
def models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return write_models(tmp_path_factory.mktemp("bisect"))


def bisected(model: Path, *more: str) -> int:
    return main(["verify", str(model), "--bisect", *ARGUMENTS[model.stem], "--repro", "none", *more])


def found(bug: Bug, out: str, err: str) -> Row:
    """What a person reads off the output: who found it, where, in which tensor, and how far it is off."""
    if refused := re.search(r"^refused by the verifier after: ([\w-]+)", out, re.MULTILINE):
        told = err[err.index("error: ") :]
        tensor = re.search(re.escape(bug.tensor) + r"[\w./:<>@-]*", told)
        return {
            "bug": bug.name,
            "found by": "verifier",
            "place": f"pass {refused[1]}",
            "tensor": tensor[0] if tensor else "",
            "error": "",
        }
    first = re.search(r"^first wrong(?: after)?: (?:the )?(.*)$", out, re.MULTILINE)
    assert first is not None, out
    place = first[1] if first[1] == "import" else re.split(r"[{ ]", first[1])[0]
    kind = "" if place == "import" else "kernel " if "/" in place else "pass "
    lines = dict(re.findall(r"^  (tensor|error) +(\S+)", out, re.MULTILINE))
    return {
        "bug": bug.name,
        "found by": "bisect",
        "place": kind + place,
        "tensor": lines.get("tensor", ""),
        "error": lines.get("error", ""),
    }


def seek(bug: Bug, model: Path, cache: Path) -> Row:
    """Bisect the model in a compiler that has the bug."""
    out, err = StringIO(), StringIO()
    with pytest.MonkeyPatch.context() as patch, redirect_stdout(out), redirect_stderr(err):
        # Kernels of the right compiler are found by nobody here.
        patch.setenv("PENSTOCK_CACHE", str(cache))
        patch.setattr(pool, "usable_cores", lambda: 1)
        bug.patch(patch)
        code = bisected(model, *bug.more, *([] if bug.compiles else ["--backend", "numpy"]))
    assert code == 5, out.getvalue() + err.getvalue()
    return found(bug, out.getvalue(), err.getvalue())


@pytest.mark.parametrize("bug", BUGS, ids=[bug.name for bug in BUGS])
def test_a_bug_is_found(bug: Bug, models: dict[str, Path], tmp_path: Path) -> None:
    row = seek(bug, models[bug.model], tmp_path / "cache")
    assert (row["found by"] == "verifier") == bug.refused
    assert row["place"] == bug.place
    assert bug.tensor in row["tensor"]
    assert row in json.loads(RECORD.read_text(encoding="utf-8")), (
        "python tests/verification/bisect/test_seeded_bugs.py writes the record again"
    )


@pytest.mark.parametrize("model", list(ARGUMENTS))
def test_what_is_right_passes(model: str, models: dict[str, Path], capsys: pytest.CaptureFixture[str]) -> None:
    """The control: the same models without a bug, compiled kernels of the smallest included."""
    assert bisected(models[model], *([] if model == "mlp" else ["--backend", "numpy"])) == 0
    assert f"nothing changes what {model} computes" in capsys.readouterr().out


def test_an_update_that_is_guarded_is_what_later_modules_are_compared_with(
    models: dict[str, Path], capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert bisected(models["tied"], "--clip", "0.1", "--backend", "numpy") == 0
    next(bug for bug in BUGS if bug.name == "a missing sum of tied gradients").patch(monkeypatch)
    assert bisected(models["tied"], "--clip", "0.1", "--backend", "numpy") == 5
    assert "after: split" in capsys.readouterr().out


def test_the_record_has_all_bugs() -> None:
    record = json.loads(RECORD.read_text(encoding="utf-8"))
    assert [row["bug"] for row in record] == [bug.name for bug in BUGS]
    assert len(record) >= 20
    assert sum(bool(row["tensor"]) for row in record) >= 18


def write_record() -> None:
    with TemporaryDirectory() as folder:
        models = write_models(Path(folder))
        rows = [seek(bug, models[bug.model], Path(folder) / str(number)) for number, bug in enumerate(BUGS)]
    RECORD.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    write_record()
