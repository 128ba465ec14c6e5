"""Tests of untrusted dump folders: a report takes nothing from outside of them, and damage is one error of Penstock."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable
from pathlib import Path

import pytest

from penstock.commands.parser import main
from penstock.inspection.plan_reading import checked_plan
from penstock.inspection.report.reading import read_material
from penstock.inspection.subject import open_subject
from penstock.models import write_mlp
from penstock.support.errors import VerifyError

from .small_plan import Planned

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
    "plan.json",
    "00_input.ir",
)


@pytest.mark.parametrize(
    "spoil",
    [*map(linked, LINKS), *map(names, ("/", "../../../secret.txt", "kernels/../../../../secret.txt")), linked_folder],
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
        (says("stages/s0/kernels.tsv", b"\xff"), "kernels.tsv: it is no text"),
        (says("stages/s0/relax.py", b"a\xff"), "relax.py: it is no text, at byte 1"),
        (says("stages/s0/kernels/one.py", b"\xff"), "one.py: it is no text"),
        (says("repro.ir", b"// \xff"), "repro.ir: it is no text"),
        (says("passes.tsv", b"\xff"), "passes.tsv: it is no text"),
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
    code = 2 if "is no text" in part else 5
    assert main(["inspect", str(dump), "--html", str(tmp_path / "page.html")]) == code
    assert part in capsys.readouterr().err
    if "passes.tsv" in part:
        assert main(["inspect", str(dump)]) == code
        assert part in capsys.readouterr().err


PLANNER = {
    "step_s": 1.0,
    "bound_s": 1.0,
    "proven": True,
    "schedules": {"2bw": 1.0},
    "refused": {},
    "left_out": [],
    "what_if": {"x": None},
}


@pytest.mark.parametrize(
    ("text", "part"),
    [
        ("[1]", "Expected `object`, got `array`"),
        ("{", "Expecting property name"),
        ("[" * 100_000, "recursion"),
        ('{"planner": NaN}', "not JSON compliant"),
        ('{"memory": [1e999]}', "not JSON compliant"),
        ('{"stages": 5}', "`$.stages`"),
        ('{"stages": [{"stage": [1], "starts_at": null}]}', "`$.stages[0].stage`"),
        ('{"stages": [{"stage": 0, "starts_at": 5}]}', "`$.stages[0].starts_at`"),
        ('{"precision": "\\ud800"}', "surrogates"),
        ('{"wire": {}}', "`$.wire`"),
        ('{"planner": {"step_s": 1}}', "`$.planner`"),
        (json.dumps({"planner": PLANNER | {"schedules": {"2bw": "x"}}}), "`$.planner.schedules[...]`"),
        (json.dumps({"planner": PLANNER | {"step_s": 10**400}}), "plan.json is not as"),
        ('{"predicted": {"busy_s": 1}}', "`$.predicted.busy_s`"),
    ],
)
def test_plans_are_checked_where_they_are_read(
    dump: Path, tmp_path: Path, text: str, part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    (dump / "plan.json").write_text(json.dumps({"planner": PLANNER, "stages": [{"stage": 0, "starts_at": None}]}))
    assert read_material(open_subject(dump)).plan["planner"] == PLANNER
    (dump / "plan.json").write_text(text)
    with pytest.raises(VerifyError) as caught:
        read_material(open_subject(dump))
    assert part in str(caught.value)
    # As well where the dump lies beside what is looked at.
    assert (
        main(["inspect", str(dump / "00_input.ir"), "--dumps", str(dump), "--html", str(tmp_path / "page.html")]) == 5
    )
    assert part in capsys.readouterr().err


def test_plans_that_are_written_are_as_expected(
    planned: Planned, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those of stages that were asked for, and those that were searched for."""
    model = write_mlp(tmp_path / "mlp.onnx", [8, 8, 4], batch=2)
    assert main(["plan", str(model), "--loss", "mse", "--devices", "2", "--batch", "8", "--json"]) == 0
    searched = json.loads(capsys.readouterr().out)
    assert "what_if" in searched["planner"]
    for found in (searched, json.loads(json.dumps(planned.plan.as_dict()))):
        assert checked_plan(found, tmp_path) is found
