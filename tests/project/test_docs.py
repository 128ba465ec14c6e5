"""Tests of the documentation against the code: generated parts, links, commands, IR, and the README's example."""

from __future__ import annotations

import argparse
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
from oracles.repository import ROOT

import penstock
from penstock.commands.parser import command_line
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.text import parse_module, print_module
from penstock.ir.verify.verifier import verify
from penstock.support.errors import PenstockError

PAGES = sorted(
    [
        *ROOT.glob("*.md"),
        *(ROOT / "docs").rglob("*.md"),
        *(ROOT / "benchmarks").glob("*.md"),
        *(ROOT / "examples").glob("*.md"),
    ]
)
FENCE = re.compile(r"^```(\w*)(?: [^\n]*)?\n(.*?)^```$", re.MULTILINE | re.DOTALL)
LINK = re.compile(r"\[[^\]]*\]\(([^)\s]+)\)")


def _docs_module(name: str) -> ModuleType:
    spec = importlib.util.spec_from_file_location(name, ROOT / "docs" / f"{name}.py")
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
            re.findall(r"^#+ (.*)$", file.read_text(encoding="utf-8"), re.MULTILINE)
            if file.suffix == ".md" and file.is_file()
            else []
        )
        if not file.exists() or (anchor and anchor not in map(_anchor, headings)):
            broken.append(target)
    return broken


def _commands(text: str) -> list[list[str]]:
    """The `penstock ...` command lines of a page: in code blocks, in code set off by indentation, and in running text (not bare names)."""
    prose = FENCE.sub("", text)
    lines = "\n".join(
        [*(body for _, body in FENCE.findall(text)), *re.findall(r"^    (.*)$", prose, re.MULTILINE)]
    ).splitlines()
    lines += re.findall(r"`(penstock [\w-]+ [^`]+)`", prose)
    parts = [part for line in lines for part in line.removeprefix("$ ").split(" && ")]
    words = [
        shlex.split(part, comments=True)[1:] for part in parts if part.startswith("penstock ") and "..." not in part
    ]
    # Where the output goes is the shell's business.
    return [list(takewhile(lambda word: word not in (">", "|"), command)) for command in words]


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_generated_parts_are_up_to_date(page: Path) -> None:
    text = page.read_text(encoding="utf-8")
    assert text == _docs_module("refresh").refreshed(text), "run `make docs`"


def test_a_stale_part_is_noticed() -> None:
    stale = "<!-- begin grammar -->\nnothing\n<!-- end grammar -->\n"
    assert _docs_module("refresh").refreshed(stale) != stale


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_links_lead_somewhere(page: Path) -> None:
    assert not _broken_links(page, page.read_text(encoding="utf-8"))


def test_a_broken_link_is_noticed() -> None:
    page = ROOT / "docs" / "index.md"
    assert _broken_links(page, "[a](nowhere.md) [b](ir.md#no-such-heading) [c](ir.md)") == [
        "nowhere.md",
        "ir.md#no-such-heading",
    ]


@pytest.mark.parametrize(
    "page", [p for p in PAGES if p.parent.name != "reference"], ids=lambda page: str(page.relative_to(ROOT))
)
def test_commands_are_understood(page: Path) -> None:
    for words in _commands(page.read_text(encoding="utf-8")):
        if words[-1] == "--help":
            with pytest.raises(SystemExit, match=r"^0$"):
                command_line().parse_args(words)
        else:
            command_line().parse_args(words)


def test_commands_are_found_and_wrong_ones_refused() -> None:
    assert sum(len(_commands(page.read_text(encoding="utf-8"))) for page in PAGES) > 25
    with pytest.raises(PenstockError):
        command_line().parse_args(_commands("    penstock compile model.onnx --no-such-flag\n")[0])


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_ir_examples_are_valid(page: Path) -> None:
    for text in _fenced(page, "ir"):
        module = parse_module(text, str(page))
        verify(module)
        assert print_module(module) == text


@pytest.mark.parametrize("page", PAGES, ids=lambda page: str(page.relative_to(ROOT)))
def test_python_examples_are_python(page: Path) -> None:
    for text in _fenced(page, "python"):
        ast.parse(text)


def test_every_page_has_its_place_in_the_site() -> None:
    named = re.findall(
        r"^ +- (?:[^:\n]+: )?([\w/.-]+\.md)$", (ROOT / "mkdocs.yml").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(name for name in named if not name.startswith("repository/")) == sorted(
        str(page.relative_to(ROOT / "docs")) for page in PAGES if ROOT / "docs" in page.parents
    )


def test_links_out_of_the_folder_lead_to_pages_of_the_site() -> None:
    site = _docs_module("site_hooks")
    text = "[a](../README.md#more) [b](ir.md) [c](../examples/gpt.py) `[d](../README.md)` [e](https://example.org) [f](../benchmarks)"
    relinked = "[a](repository/README.md#more) [b](ir.md) [c](repository/examples/gpt.py.md) `[d](../README.md)` "
    assert site.relinked(text, "index.md") == relinked + "[e](https://example.org) [f](repository/benchmarks/README.md)"
    assert (
        site.relinked("[a](../docs/ir.md) [b](README.md)", "repository/benchmarks/README.md")
        == "[a](../../ir.md) [b](README.md)"
    )
    pages = site.outside({"docs/index.md": text})
    assert set(pages) > {"repository/README.md", "repository/benchmarks/README.md", "repository/CONTRIBUTING.md"}
    assert pages["repository/examples/gpt.py.md"].startswith("# gpt.py\n\n```python\n")


LOADING = (
    '<script src="https://cdn.example/a.js"></script>',
    "<link rel=stylesheet href=//fonts.example/css>",
    '<img alt="a" src="http://example.org/a.png">',
    "<style>@import 'https://example.org/a.css';</style>",
    '<pre class="mermaid">',
)


@pytest.mark.parametrize("text", LOADING)
def test_a_site_that_loads_from_elsewhere_is_noticed(text: str) -> None:
    loads = _docs_module("site_hooks").loads
    assert loads("a.html", f"<html>{text}</html>")
    assert not loads(
        "a.html",
        '<a href="https://example.org">a</a> <script src="a.js"></script> <link href="a.css"> https://example.org',
    )
    assert loads("a.css", "@font-face { src: url(https://fonts.example/a.woff2) }")
    assert not loads("a.css", "a { background: url(a.png) } /* https://example.org */")


def test_the_site_is_built(tmp_path: Path) -> None:
    pytest.importorskip("material", reason="the site needs what `make docs` installs")
    command = [
        sys.executable,
        "-m",
        "mkdocs",
        "build",
        "--strict",
        "--quiet",
        "--config-file",
        str(ROOT / "mkdocs.yml"),
        "--site-dir",
        str(tmp_path / "site"),
    ]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=300, check=False)
    assert done.returncode == 0, done.stderr
    assert "penstock compile" in (tmp_path / "site" / "reference" / "commands.html").read_text(encoding="utf-8")


def test_every_environment_variable_is_listed() -> None:
    sources = [
        file
        for part in ("src", "ir", "frontends", "passes", "backends", "runtime")
        for file in (ROOT / part).rglob("*.py")
    ]
    read = {
        name
        for source in sources
        for name in re.findall(r"[\"'](PENSTOCK_[A-Z_]+)[\"']", source.read_text(encoding="utf-8"))
    }
    listed = re.findall(
        r"^\| `(PENSTOCK_[A-Z_]+)`", (ROOT / "docs" / "cli.md").read_text(encoding="utf-8"), re.MULTILINE
    )
    assert sorted(listed) == sorted(read)


def _options(parser: argparse.ArgumentParser) -> set[str]:
    """The options of a command and of the commands below it."""
    below = [sub for a in parser._actions if isinstance(a, argparse._SubParsersAction) for sub in a.choices.values()]
    return {option for action in parser._actions for option in action.option_strings}.union(*map(_options, below))


def test_the_reference_has_every_option_and_every_name() -> None:
    sections = (ROOT / "docs" / "reference" / "commands.md").read_text(encoding="utf-8").split("\n## penstock ")[1:]
    commands = next(a.choices for a in command_line()._actions if isinstance(a, argparse._SubParsersAction))
    assert [section.splitlines()[0] for section in sections] == list(commands)
    for section, parser in zip(sections, commands.values(), strict=True):
        spelled = " ".join(re.findall(r"^\* `(-[^`]+)`", section, re.MULTILINE))
        assert set(re.findall(r"(?<![\w-])--?[a-z][\w-]*", spelled)) == _options(parser) - {
            "-h",
            "--help",
            "--help-all",
            "-v",
            "--verbose",
        }
    python = (ROOT / "docs" / "reference" / "python.md").read_text(encoding="utf-8")
    assert set(re.findall(r"^### (\w+)$", python, re.MULTILINE)) > set(penstock.__all__)


@pytest.mark.slow
def test_the_example_of_the_readme_runs(tmp_path: Path) -> None:
    environment = os.environ | {"PATH": f"{Path(sys.executable).parent}{os.pathsep}{os.environ['PATH']}"}
    script = "set -e\n" + "\n".join(_fenced(ROOT / "README.md", "sh"))
    done = subprocess.run(
        ["bash", "-c", script], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=600, check=False
    )
    assert done.returncode == 0, done.stderr
    (tmp_path / "example.py").write_text("\n".join(_fenced(ROOT / "README.md", "python")))
    done = subprocess.run(
        [sys.executable, "example.py"],
        cwd=tmp_path,
        env=environment,
        capture_output=True,
        text=True,
        timeout=600,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    losses = [float(line.split()[1]) for line in done.stdout.splitlines()]
    assert len(losses) == 100
    assert sum(losses[-10:]) < sum(losses[:10])


def test_the_example_cluster_is_valid() -> None:
    cluster = Cluster.load(ROOT / "examples" / "two-unequal-cpus.toml")
    assert [device.flops for device in cluster.devices] == [1.5e11, 5e10]
