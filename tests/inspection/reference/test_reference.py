"""Tests of the command line's reference of passes, pipelines and operations, and of completions. Oracles are the
tables, argparse, and the shells themselves."""

from __future__ import annotations

import argparse
import shutil
import subprocess
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest

import penstock
import penstock as ps
from penstock.commands.parser import command_line, main
from penstock.inspection.dump import Dump
from penstock.inspection.reference import trial
from penstock.inspection.reference.completion import commands_of
from penstock.inspection.reference.coverage import coverage
from penstock.ir.ops import OPS, Required
from penstock.ir.text import parse_module, print_module
from penstock.models import write_mlp
from penstock.passes.manager import parse_pipeline, run_passes
from penstock.passes.pipelines import PASSES, PIPELINES, PipelineOptions, calls_of, pipeline_text, training_pipeline
from penstock.passes.training.vjp import VJP
from penstock.support.errors import UsageError


def told(capsys: pytest.CaptureFixture[str], *words: str | Path) -> str:
    assert main([str(word) for word in words]) == 0
    return capsys.readouterr().out


# ------------------------------------------------------------------------------------------------ pipelines


@pytest.mark.parametrize("name", PIPELINES)
def test_a_printed_pipeline_is_the_one_that_runs(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text = told(capsys, "passes", "--pipeline", name)
    entries = PIPELINES[name][1]()
    assert parse_pipeline(text, PASSES) == calls_of(entries)
    assert [line.split("//")[1].strip() for line in text.splitlines()[1:] if not line.startswith("//")] == [
        entry.why for entry in entries if entry.wanted
    ]
    # With what has to be asked for, it is the longest there is.
    rows = [line.removeprefix("// ").partition("  ")[0] for line in text.splitlines()[1:]]
    assert [call.name for call in parse_pipeline("\n".join(rows), PASSES)] == [entry.name for entry in entries]
    assert any(not entry.wanted for entry in entries)


def test_a_pipeline_file_does_what_its_text_does(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    model = ps.from_onnx(write_mlp(tmp_path / "mlp.onnx", [8, 16, 4]), dims={"batch": 2})
    ps.plan(model, ps.Cluster.local(2), ps.Training(loss="mse"), dump=Dump(tmp_path / "d"))
    start, file = tmp_path / "d" / "00_input.ir", tmp_path / "train.pipeline"
    file.write_text(pipeline_text("train"))
    expected = print_module(
        run_passes(
            parse_module(start.read_text()),
            training_pipeline({}, {}, PipelineOptions(schedule="1f1b", microbatches=1)),
            PASSES,
        )
    )
    assert told(capsys, "opt", start, "--pipeline", file) == expected
    assert told(capsys, "opt", start, "-p", f"@{file}") == expected
    assert main(["opt", str(start), "--pipeline", str(file), "-p", "simplify"]) == 2
    assert main(["opt", str(start), "--pipeline", str(tmp_path / "none")]) == 2
    assert "expected a file with a pipeline" in capsys.readouterr().err


def test_line_ends_are_commas_and_comments_are_nothing() -> None:
    text = '// all of it\n\nsimplify // a, b{c}\n  partition{split_at=["a//b", // no node\n  c]}, split\n'
    assert parse_pipeline(text, PASSES) == parse_pipeline('simplify,partition{split_at=["a//b",c]},split', PASSES)
    assert parse_pipeline("// nothing", PASSES) == []


def test_problems_of_a_file_have_lines() -> None:
    with pytest.raises(UsageError) as caught:
        parse_pipeline("simplify\n// here\nsplit{x=1}\nnope", PASSES, "a.pipeline")
    assert caught.value.where == "a.pipeline"
    assert "line 3: split: unknown option 'x'" in caught.value.what
    assert "line 4: unknown pass 'nope'" in caught.value.what
    with pytest.raises(UsageError, match=r"line 2: cannot read the pipeline at '\{a'"):
        parse_pipeline("simplify,\n{a\n", PASSES)
    with pytest.raises(UsageError, match="cannot read the pipeline at ',split'"):
        parse_pipeline("simplify,,split", PASSES)


# ------------------------------------------------------------------------------------------------ passes and operations


@pytest.mark.parametrize("name", PASSES)
def test_a_pass_is_explained(name: str, capsys: pytest.CaptureFixture[str]) -> None:
    text, row = told(capsys, "passes", name), PASSES[name]
    lines = text.splitlines()
    assert lines[1].strip() == row.doc
    for option in row.options.__dataclass_fields__:
        assert any(line.startswith(f"{option} ") for line in lines)
    for word, facts in (("needs", row.needs), ("gives", row.gives)):
        for fact in facts:
            (found,) = [line for line in lines if line.startswith((f"{word} {fact}:", f"{word} {fact} "))]
            assert len(found.partition(": ")[2]) > 20
    for kind, (_, entries) in PIPELINES.items():
        assert sum(line.startswith(f"in {kind},") for line in lines) == sum(entry.name == name for entry in entries())


def test_an_operation_is_explained_as_the_matrix_says(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    # What trying kernels says has a test of its own.
    monkeypatch.setattr(trial, "trouble_with", lambda op: "")
    rows = {row[0]: row for row in coverage()[1]}
    for name, op in OPS.items():
        text = told(capsys, "ops", name)
        lines = text.splitlines()
        assert lines[0].startswith(f"{name}(")
        assert lines[1].strip() == op.doc
        for attribute, spec in op.attrs.items():
            (found,) = [line for line in lines if line.split()[:1] == [attribute]]
            assert found.endswith("must be given") == isinstance(spec, Required)
        facts = dict(line.partition(": ")[::2] for line in lines if ": " in line)
        _, family, numpy, gradient, kernel, _ = rows[name]
        assert facts["family"].startswith(family)
        assert facts["interpreter"].startswith({"rule": "a rule", "built in": "built in", "-": "no"}[numpy])
        starts = {
            "rule": "a rule, ",
            "zero": ("zero", "none: gradients end"),
            "decomposed": "that of what",
            "-": "none",
        }
        assert facts["gradient"].startswith(starts[gradient])
        assert facts["kernels for CPUs"].startswith(
            {"rule": "a rule, ", "built in": "built in", "decomposed": "that of", "-": "no"}[kernel]
        )


def test_the_matrix_claims_no_more_than_it_looked_at(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A rule that raises is in it like any other, as a rule that was not tried; all words of the matrix are explained below it."""
    monkeypatch.setattr(trial, "trouble_with", lambda op: pytest.fail("the matrix tries no kernels"))
    monkeypatch.setitem(VJP, "not", lambda *given: pytest.fail("nor gradients"))  # type: ignore[arg-type]
    matrix, _, words = told(capsys, "ops").partition("\n\n")
    cells = {row[0]: row for row in coverage()[1]}
    assert cells["not"][3] == "rule"
    used = {word for row in cells.values() for word in row[2:5]}
    assert used <= {line.partition(": ")[0] for line in words.splitlines()}
    assert "rule: there is one, and it was not tried" in words
    assert len(matrix.splitlines()) == 2 + len(OPS)


def test_a_rule_is_named_by_where_it_says_something(capsys: pytest.CaptureFixture[str]) -> None:
    """Many rules are made by a helper, which is the same place for all of them: the control."""
    made = [VJP[name] for name in ("neg", "exp", "log", "rsqrt")]
    assert len({rule.__code__.co_firstlineno for rule in made}) == 1
    for name in ("neg", "exp", "log", "rsqrt", "mul"):
        facts = dict(line.partition(": ")[::2] for line in told(capsys, "ops", name).splitlines() if ": " in line)
        path, _, number = facts["gradient"].removeprefix("a rule, ").partition(":")
        line = Path(penstock.__path__[0], path).read_text(encoding="utf-8").splitlines()[int(number) - 1].strip()
        assert line.startswith((f'"{name}": ', f"def _{name}("))
        function = facts["interpreter"].removeprefix("a rule, numpy.")
        assert name == "rsqrt" or callable(getattr(np, function))


@pytest.mark.parametrize(
    ("words", "part"),
    [
        (["passes", "simplfy"], "did you mean simplify?"),
        (["passes", "weight_version"], "did you mean weight-versions?"),
        (["ops", "matmull"], "did you mean matmul"),
        (["ops", "qqqqqq"], "`penstock ops` lists those there are"),
        (["passes", "fuse", "--pipeline", "train"], "not allowed with"),
    ],
)
def test_what_is_not_there_is_said_with_what_is_close(
    words: list[str], part: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(words) == 2
    assert part in capsys.readouterr().err


# ------------------------------------------------------------------------------------------------ completion


def parsers(
    parser: argparse.ArgumentParser, words: tuple[str, ...] = ()
) -> Iterator[tuple[tuple[str, ...], argparse.ArgumentParser]]:
    yield words, parser
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            for name, child in action.choices.items():
                yield from parsers(child, (*words, name))


def cases() -> list[tuple[tuple[str, ...], set[str]]]:
    """Words before the one that is completed, that one, and what it may become, by argparse and the tables."""
    found: list[tuple[tuple[str, ...], set[str]]] = []
    for words, parser in parsers(command_line()):
        options = {option for action in parser._actions for option in action.option_strings}
        found.append(((*words, "--"), {option for option in options if option.startswith("--")}))
        found += [
            ((*words, option, ""), set(map(str, action.choices)))
            for action in parser._actions
            if action.choices is not None
            for option in action.option_strings
        ]
        below = [action.choices for action in parser._actions if isinstance(action, argparse._SubParsersAction)]
        found += [((*words, ""), set(names)) for names in below]
    found.append((("passes", "s"), {name for name in PASSES if name.startswith("s")}))
    found.append((("ops", "conv"), {name for name in OPS if name.startswith("conv")}))
    found.append(
        (("opt", "x.ir", "-p", "simplify,sp"), {f"simplify,{name}" for name in PASSES if name.startswith("sp")})
    )
    found.append((("compile", "m.onnx", "--stages", ""), set()))
    return found


def script(shell: str, capsys: pytest.CaptureFixture[str], folder: Path) -> Path:
    file = folder / f"penstock.{shell}"
    file.write_text(told(capsys, "completion", shell))
    return file


def complete_in_bash(file: Path, lines: list[tuple[str, ...]], folder: Path) -> list[set[str]]:
    """What a shell offers for each of these lines, all in one process."""
    calls = "".join(f"show {' '.join(_quoted(word) for word in ('penstock', *words))}\n" for words in lines)
    program = f"""set -u
source {_quoted(str(file))}
show() {{ COMP_WORDS=("$@"); COMP_CWORD=$(($# - 1)); COMPREPLY=(); _penstock; echo "${{COMPREPLY[*]-}}"; }}
{calls}"""
    done = subprocess.run(["bash", "-c", program], capture_output=True, text=True, timeout=60, check=True, cwd=folder)
    assert not done.stderr
    return [set(line.split()) for line in done.stdout.splitlines()]


def _quoted(word: str) -> str:
    return "'" + word.replace("'", "'\\''") + "'"


def test_bash_completes_what_argparse_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = script("bash", capsys, tmp_path)
    expected = cases()
    assert len(expected) > 40
    assert complete_in_bash(file, [words for words, _ in expected], tmp_path) == [found for _, found in expected]


def test_bash_completes_files_quotes_and_equal_signs(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = script("bash", capsys, tmp_path)
    (tmp_path / "model.onnx").touch()
    lines = {
        ("compile", "mod"): {"model.onnx"},
        ("compile", "x", "-o", "mod"): {"model.onnx"},
        ("opt", "x.ir", "-p", "'simplify,fu"): {"simplify,fuse"},
        ("opt", "x.ir", "--passes", "="): set(PASSES),
        ("compile", "x", "--wire", "=", "b"): {"bf16"},
        # The name of a command that is the value of something else.
        ("inspect", "run", "--sched"): {"--schedule"},
    }
    assert complete_in_bash(file, list(lines), tmp_path) == list(lines.values())


@pytest.mark.skipif(shutil.which("fish") is None, reason="there is no fish")
def test_fish_completes_what_argparse_takes(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = script("fish", capsys, tmp_path)
    expected = [(words, found) for words, found in cases() if found]
    program = f"source {file}\n" + "".join(
        f"complete -C 'penstock {' '.join(words)}' | string join ' '\n" for words, _ in expected
    )
    done = subprocess.run(["fish", "-N", "-c", program], capture_output=True, text=True, timeout=120, check=True)
    assert [set(line.split()) for line in done.stdout.splitlines()] == [found for _, found in expected]


@pytest.mark.parametrize("shell", ["zsh", "fish"])
def test_other_shells_are_told_the_same(shell: str, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    file = script(shell, capsys, tmp_path)
    text = file.read_text()
    for command in commands_of(command_line()):
        assert " ".join(command.place.words) in text
        for option in command.options:
            assert (option if shell == "zsh" else option.lstrip("-")) in text
    if shutil.which(shell):
        subprocess.run([shell, "-n", str(file)], check=True, timeout=30)
