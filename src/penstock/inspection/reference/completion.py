"""`penstock completion SHELL`: a script that completes the words of a command line.

It completes commands, options and their values, passes in pipelines, and operations.

In: the parser of the command line, and the tables of passes and operations. Out: a script for bash, zsh or fish. It
holds all words, so that a completion starts no Python; after an update it is printed anew (`source <(penstock
completion bash)` does so with every shell).

The command, and the option before the word, decide what can come next:

    words    a choice, a command, a pass, an operation: one of a list
    parts    a pipeline: passes with commas between them, the last of which is completed
    files    the name of a file or folder
    nothing  numbers, names and patterns

Limit: options of passes inside braces are not completed.
"""

from __future__ import annotations

import argparse
import re
from collections.abc import Iterator
from dataclasses import dataclass, field

from penstock.ir.ops import OPS
from penstock.passes.pipelines import PASSES

WORDS, PARTS, FILES, NOTHING = "words", "parts", "files", "nothing"
# Placeholders of arguments that name files or folders; all others are free text.
_FILES = re.compile(r"FILE|DIR|BUNDLE|CHECKPOINT|DUMPS|METRICS|[.][a-z]+|^[AB]$")
_BY_PLACE = {"PASS": (WORDS, tuple(PASSES)), "OP": (WORDS, tuple(OPS)), "PIPELINE": (PARTS, tuple(PASSES))}


@dataclass(frozen=True)
class CompletionSlot:
    """The words or files that can stand at one place of a command line."""

    kind: str
    words: tuple[str, ...] = ()


@dataclass(frozen=True)
class Command:
    """A command: its options, the values of those that take one, and its positional argument.

    The name is that after `penstock` (`checkpoint ls`); penstock itself has an empty one.
    """

    name: str
    options: tuple[str, ...]
    values: dict[str, CompletionSlot] = field(default_factory=dict)
    place: CompletionSlot = CompletionSlot(NOTHING)


def script(shell: str, parser: argparse.ArgumentParser) -> str:
    """Return the script that makes a shell complete the arguments of a parser."""
    return {"bash": bash, "zsh": zsh, "fish": fish}[shell](list(commands_of(parser)))


def commands_of(parser: argparse.ArgumentParser, name: str = "") -> Iterator[Command]:
    """Yield a command, then those below it."""
    children: dict[str, argparse.ArgumentParser] = {}
    options: list[str] = []
    values: dict[str, CompletionSlot] = {}
    place = CompletionSlot(NOTHING)
    for action in parser._actions:
        if isinstance(action, argparse._SubParsersAction):
            children = dict(action.choices)
            place = CompletionSlot(WORDS, tuple(children))
        elif not action.option_strings:
            place = place if place.kind != NOTHING else _slot(action)
        else:
            options += action.option_strings
            if action.nargs != 0:
                values |= dict.fromkeys(action.option_strings, _slot(action))
    yield Command(name, tuple(options), values, place)
    for word, child in children.items():
        yield from commands_of(child, f"{name} {word}".strip())


def _slot(action: argparse.Action) -> CompletionSlot:
    if action.choices is not None:
        return CompletionSlot(WORDS, tuple(map(str, action.choices)))
    place = action.metavar if isinstance(action.metavar, str) else ""
    if place in _BY_PLACE:
        return CompletionSlot(*_BY_PLACE[place])
    return CompletionSlot(FILES if _FILES.search(place) else NOTHING)


# ------------------------------------------------------------------------------------------------ bash


def bash(commands: list[Command]) -> str:
    """Return one function: it finds the command, then completes the option's value, an option or the positional
    argument.
    """
    names = [c.name for c in commands if c.name]
    finding = "".join(f'            "{_above(name)} {_last(name)}") command="{name}" ;;\n' for name in names)
    values = "".join(
        f'        "{c.name}|{option}") kind={slot.kind} words="{" ".join(slot.words)}" ;;\n'
        for c in commands
        for option, slot in c.values.items()
    )
    places = "".join(
        f'            "{c.name}") kind={c.place.kind} words="{" ".join(c.place.words)}" '
        f'options="{" ".join(c.options)}" ;;\n'
        for c in commands
    )
    return f"""# bash completion of penstock: source <(penstock completion bash)
_penstock() {{
    local current="${{COMP_WORDS[COMP_CWORD]}}" previous="${{COMP_WORDS[COMP_CWORD-1]}}" command="" kind=""
    local words="" options="" head="" i
    for ((i = 1; i < COMP_CWORD; i++)); do
        case "$command ${{COMP_WORDS[i]}}" in
{finding}        esac
    done
    # --option=value comes as three words.
    if [[ $current == "=" ]]; then
        current=""
    elif [[ $previous == "=" ]]; then
        previous="${{COMP_WORDS[COMP_CWORD-2]}}"
    fi
    case "$command|$previous" in
{values}    esac
    if [[ -z $kind ]]; then
        case "$command" in
{places}        esac
        if [[ $current == -* ]]; then
            kind=words words="$options"
        fi
    fi
    current="${{current#[\\"\\']}}"
    case "$kind" in
        words) COMPREPLY=($(compgen -W "$words" -- "$current")) ;;
        parts)
            head="${{current%"${{current##*,}}"}}"
            COMPREPLY=($(compgen -P "$head" -W "$words" -- "${{current##*,}}"))
            compopt -o nospace 2>/dev/null ;;
        files)
            COMPREPLY=($(compgen -f -- "$current"))
            compopt -o filenames 2>/dev/null ;;
        *) COMPREPLY=() ;;
    esac
}}
complete -F _penstock penstock
"""


def _above(name: str) -> str:
    """Return the command that this one is below."""
    return name.rpartition(" ")[0]


def _last(name: str) -> str:
    return name.rpartition(" ")[2]


# ------------------------------------------------------------------------------------------------ zsh


def zsh(commands: list[Command]) -> str:
    """Return the completion script for zsh, which does the same as that for bash."""
    names = [c.name for c in commands if c.name]
    finding = "".join(f'      "{_above(name)} {_last(name)}") command="{name}" ;;\n' for name in names)
    values = "".join(
        f'    "{c.name}|{option}") kind={slot.kind}; list=({" ".join(slot.words)}) ;;\n'
        for c in commands
        for option, slot in c.values.items()
    )
    places = "".join(
        f'      "{c.name}") kind={c.place.kind}; list=({" ".join(c.place.words)}); options=({" ".join(c.options)}) ;;\n'
        for c in commands
    )
    return f"""#compdef penstock
# zsh completion of penstock: source <(penstock completion zsh)
_penstock() {{
  local command="" kind="" previous="${{words[CURRENT-1]}}" i
  local -a list options
  for ((i = 2; i < CURRENT; i++)); do
    case "$command ${{words[i]}}" in
{finding}    esac
  done
  if [[ $PREFIX == --*=* ]]; then
    previous="${{PREFIX%%=*}}"
    compset -P '--*='
  fi
  case "$command|$previous" in
{values}  esac
  if [[ -z $kind ]]; then
    case "$command" in
{places}    esac
    if [[ $PREFIX == -* ]]; then
      kind=words
      list=($options)
    fi
  fi
  case "$kind" in
    words) compadd -- $list ;;
    parts) compset -P '*,'; compadd -q -S '' -- $list ;;
    files) _files ;;
  esac
}}
if [[ $funcstack[1] == _penstock ]]; then
  _penstock "$@"
else
  compdef _penstock penstock
fi
"""


# ------------------------------------------------------------------------------------------------ fish


def fish(commands: list[Command]) -> str:
    """Return a function that finds the command, and a line for every option and place."""
    finding = "".join(
        f"            case '{_above(c.name)} {_last(c.name)}'\n                set command '{c.name}'\n"
        for c in commands
        if c.name
    )
    lines = []
    for c in commands:
        condition = f"__penstock_is \\'{c.name}\\'"
        lines += _fish_slot(condition, "", c.place)
        for option in c.options:
            flag = f"-l {option[2:]}" if option.startswith("--") else f"-s {option[1:]}"
            lines += (
                _fish_slot(condition, flag, c.values[option])
                if option in c.values
                else [f"complete -c penstock -n '{condition}' {flag}"]
            )
    return f"""# fish completion of penstock: penstock completion fish | source
function __penstock_is
    set -l command ''
    for word in (commandline -opc)[2..-1]
        switch "$command $word"
{finding}        end
    end
    test "$command" = "$argv[1]"
end
complete -c penstock -f
{chr(10).join(lines)}
"""


def _fish_slot(condition: str, flag: str, slot: CompletionSlot) -> list[str]:
    start = f"complete -c penstock -n '{condition}'" + (f" {flag}" if flag else "")
    if slot.kind == WORDS:
        return [f"{start} {'-x ' if flag else ''}-a '{' '.join(slot.words)}'"]
    if slot.kind == PARTS:
        return [f'{start} -x -a \'(__fish_complete_list , "string split \\" \\" -- {" ".join(slot.words)}")\'']
    if slot.kind == FILES:
        return [f"{start} {'-r -F' if flag else '-F'}"]
    return [f"{start} -x"] if flag else []
