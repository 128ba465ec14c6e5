"""The help of commands: `--help` has what is usual, `--help-all` has everything, and both come without heavy imports."""

from __future__ import annotations

import argparse
import re
import subprocess
import sys
from collections.abc import Iterator

import pytest

from penstock.commands.parser import COMMANDS, command_line, main
from penstock.commands.rare import is_rare
from penstock.inspection.reference.completion import commands_of, script
from penstock.planning.options import BuildOptions, PlanOptions, ReadingOptions, TrainingOptions
from penstock.runtime.launch.options import RunOptions
from penstock.support.settings import flags_of, settings_of

# A newcomer reads so many lines in a minute, and a command of so many options has rare ones among them.
MOST_LINES, MANY = 65, 20
_EVERYWHERE = ("help", "verbose", "help_all")


def _parsers() -> Iterator[tuple[str, argparse.ArgumentParser]]:
    for action in command_line()._actions:
        if isinstance(action, argparse._SubParsersAction):
            yield from action.choices.items()


PARSERS = dict(_parsers())
LARGE = [name for name, parser in PARSERS.items() if any(map(is_rare, parser._actions))]


def _printed(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, *words: str) -> str:
    monkeypatch.setenv("COLUMNS", "80")
    with pytest.raises(SystemExit) as ended:
        main(words)
    assert not ended.value.code
    return capsys.readouterr().out


def _options(text: str) -> set[str]:
    """Return the options that have a line of their own."""
    lines = [line for line in text.splitlines() if re.match(r"  -", line)]
    return {flag for line in lines for flag in re.findall(r"(?:^  |, )(--?[a-z][\w-]*)", line)}


def _spelled(parser: argparse.ArgumentParser, *, rare: bool) -> set[str]:
    return {flag for action in parser._actions if is_rare(action) == rare for flag in action.option_strings}


@pytest.mark.parametrize("name", list(COMMANDS))
def test_help_is_read_in_a_minute(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    text = _printed(capsys, monkeypatch, name, "--help")
    assert len(text.splitlines()) <= MOST_LINES
    usual = _spelled(PARSERS[name], rare=False)
    assert _options(text) == usual
    own = [action for action in PARSERS[name]._actions if action.option_strings and action.dest not in _EVERYWHERE]
    assert (len(own) > MANY) == (name in LARGE)


@pytest.mark.parametrize("name", LARGE)
def test_what_is_rare_stands_in_help_all(
    name: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    parser = PARSERS[name]
    rare, every = _spelled(parser, rare=True), {flag for action in parser._actions for flag in action.option_strings}
    short = _printed(capsys, monkeypatch, name, "--help")
    whole = _printed(capsys, monkeypatch, name, "--help-all")
    assert _options(whole) == every
    assert rare
    assert not rare & _options(short)
    assert "--help-all" in _options(short)
    count = sum(map(is_rare, parser._actions))
    assert short.splitlines()[-1] == f"{count} more options: penstock {name} --help-all"
    assert "more options" not in whole
    needed = [action.option_strings[0] for action in parser._actions if action.required and action.option_strings]
    usage = short.partition("\n\n")[0]
    assert all(flag in usage for flag in needed), "what must be given stands in the usage"
    # Control: one mark more, and one line less.
    usual = next(action for action in command_line(name)._actions if action.dest == "command").choices[name]  # type: ignore[union-attr,index]
    action = next(action for action in usual._actions if action.option_strings and action.dest not in ("help", "out"))
    vars(action)["rare"] = True
    assert action.option_strings[0] not in _options(usual.format_help())


def test_marks_are_those_of_the_settings() -> None:
    """A flag is rare because its field says so, under every command that reads it."""
    kinds = {"compile": (PlanOptions, ReadingOptions, TrainingOptions, BuildOptions), "run": (RunOptions,)}
    for name, described in kinds.items():
        marked = _spelled(PARSERS[name], rare=True)
        settings = {
            flags_of(field, about)[0]: about.rare for kind in described for field, about in settings_of(kind).items()
        }
        for flag, rare in settings.items():
            assert (flag in marked) == rare, flag
        assert {True, False} == set(settings.values())


def test_rare_options_are_read_and_completed_like_others(capsys: pytest.CaptureFixture[str]) -> None:
    offered = {command.name: set(command.options) for command in commands_of(command_line())}
    for name, parser in PARSERS.items():
        assert offered[name] >= {flag for action in parser._actions for flag in action.option_strings}
    assert all("--cuda-libraries" in script(shell, command_line()) for shell in ("bash", "zsh"))
    assert "-l cuda-libraries" in script("fish", command_line())
    assert main(["compile", "none.onnx", "-o", "b", "--cuda-libraries", "none"]) == 2
    assert "none.onnx: no such file" in capsys.readouterr().err


def test_help_loads_no_library() -> None:
    """Help comes at once: no library that computes or reads models is imported for it."""
    heavy = {"numpy", "onnx", "torch", "tvm", "onnxruntime", "networkx", "safetensors", "msgspec", "yaml"}
    program = (
        "import sys\nfrom penstock.commands.parser import main\ntry:\n    main(sys.argv[1:])\n"
        "except SystemExit:\n    print('loaded', *{name.partition('.')[0] for name in sys.modules}, file=sys.stderr)"
    )
    for words in (["--help"], ["compile", "--help"], ["compile", "--help-all"]):
        done = subprocess.run(
            [sys.executable, "-c", program, *words], capture_output=True, text=True, check=True, timeout=60
        )
        loaded = set(done.stderr.split("loaded ")[-1].split())
        assert "penstock" in loaded, "control: the list of modules is there"
        assert not heavy & loaded
