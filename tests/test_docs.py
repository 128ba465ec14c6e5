"""What the documentation promises, checked against the code: generated parts, links, commands, IR, and the README's example."""

from __future__ import annotations

import ast
import importlib.util
import os
import re
import shlex
import subprocess
import sys
from itertools import takewhile
from pathlib import Path
from types import ModuleType

import pytest

from penstock.cli import _parser
from penstock.ir.cluster import Cluster
from penstock.ir.errors import PenstockError
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify import verify

ROOT = Path(__file__).resolve().parents[1]
PAGES = sorted([*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *(ROOT / "benchmarks").glob("*.md"), *(ROOT / "examples").glob("*.md")])
FENCE = re.compile(r"^```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def _refresh() -> ModuleType:
    spec = importlib.util.spec_from_file_location("refresh", ROOT / "docs" / "refresh.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def _fenced(page: Path, language: str) -> list[str]:
    return [body for found, body in FENCE.findall(page.read_text(encoding="utf-8")) if found == language]


def _anchor(heading: str) -> str:
    return re.sub(r"[^\w\- ]", "", heading.lower()).strip().replace(" ", "-")


def _broken_links(page: Path, text: str) -> list[str]:
    broken = []
    for target in LINK.findall(FENCE.sub("", text)):
        if target.startswith(("http://", "https://")):
            continue
        name, _, anchor = target.partition("#")
        file = page.parent / name if name else page
        headings = (
            re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE) if file.suffix == ".md" and file.is_file() else []
        )
        if not file.exists() or (anchor and anchor not in map(_anchor, headings)):
            broken.append(target)
    return broken


def _commands(text: str) -> list[list[str]]:
    """The `penstock ...` command lines of a page: in code blocks, in code set off by indentation, and in running text (not bare names)."""
    prose = FENCE.sub("", text)
    lines = "\n".join([*(body for _, body in FENCE.findall(text)), *re.findall(r"^    (.*)$", prose, re.MULTILINE)]).splitlines()
    lines += re.findall(r"`(penstock [\w-]+ [^`]+)`", prose)
    parts = [part for line in lines for part in line.removeprefix("$ ").split(" && ")]
    words = [shlex.split(part, comments=True)[1:] for part in parts if part.startswith("penstock ") and "..." not in part]
    # Where the output goes is the shell's business.
    return [list(takewhile(lambda word: word not in (">", "|"), command)) for command in words]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == _refresh().refreshed(text), "run `make docs`"


def test_a_stale_part_is_noticed() -> None:
    stale = "<!-- begin grammar -->\nnothing\n<!-- end grammar -->\n"
    assert _refresh().refreshed(stale) != stale


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_links_lead_somewhere(page: Path) -> None:
    assert not _broken_links(page, page.read_text(encoding="utf-8"))


def test_a_broken_link_is_noticed() -> None:
    page = ROOT / "docs" / "index.md"
    assert _broken_links(page, "[a](nowhere.md) [b](ir.md#no-such-heading) [c](ir.md)") == ["nowhere.md", "ir.md#no-such-heading"]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_commands_are_understood(page: Path) -> None:
    for words in _commands(page.read_text(encoding="utf-8")):
        _parser().parse_args(words)


def test_commands_are_found_and_wrong_ones_refused() -> None:
    assert sum(len(_commands(page.read_text(encoding="utf-8"))) for page in PAGES) > 25
    with pytest.raises(PenstockError):
        _parser().parse_args(_commands("    penstock compile model.onnx --no-such-flag\n")[0])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_ir_examples_are_valid(page: Path) -> None:
    for text in _fenced(page, "ir"):
        module = parse_module(text, str(page))
        verify(module)
        assert print_module(module) == text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_python_examples_are_python(page: Path) -> None:
    for text in _fenced(page, "python"):
        ast.parse(text)


@pytest.mark.slow
def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    script = "set -e\n" + "\n".join(_fenced(ROOT / "README.md", "sh"))
    done = subprocess.run(["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False)
    assert done.returncode == 0, done.stderr
    (tmp_path / "example.py").write_text("\n".join(_fenced(ROOT / "README.md", "python")))
    done = subprocess.run(
        [sys.executable, "example.py"], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 100
    assert sum(losses[-10:]) < sum(losses[:10])


@pytest.mark.slow
@pytest.mark.parametrize("script", sorted((ROOT / "examples").glob("*.py")), ids=lambda script: script.name)
def test_examples_run(script: Path, tmp_path: Path) -> None:
    if "transformers" in script.read_text(encoding="utf-8"):
        pytest.importorskip("transformers")
    done = subprocess.run([sys.executable, str(script)], cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert done.stdout


def test_the_example_cluster_is_valid() -> None:
    cluster = Cluster.load(ROOT / "examples" / "two-unequal-cpus.toml")
    assert [device.flops for device in cluster.devices] == [1.5e11, 5e10]
