"""`penstock checkpoint`: list the checkpoints of a folder, check them, and take the weights out of one.

None of it needs the bundle.

ls       one row per checkpoint; sizes and the index are looked at, contents are not
verify   every file is read and compared with its hash; exit code 5 when anything is wrong
export   parameters, and other tensors that the model stores, by the model's names, as one safetensors file
"""

from __future__ import annotations

import json
import os
from argparse import ArgumentParser, Namespace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.support.errors import PenstockError, UsageError, VerifyError
from penstock.support.paths import is_inside, replacing_problem
from penstock.support.terminal import say, table
from penstock.support.words import shown_bytes

if TYPE_CHECKING:
    from penstock.runtime.checkpoint.format import Index


def add_arguments(parser: ArgumentParser) -> None:
    """Add its actions, each with its arguments."""
    rows = (
        ("ls", "DIR", "list the checkpoints of a directory"),
        ("verify", "DIR|CHECKPOINT", "compare all files with their hashes"),
        (
            "export",
            "DIR|CHECKPOINT",
            "write parameters by the model's names; of a directory, those of the newest checkpoint",
        ),
    )
    # The placeholder is what an error says is missing.
    actions = parser.add_subparsers(dest="action", metavar="|".join(name for name, _, _ in rows), required=True)
    for name, place, text in rows:
        action = actions.add_parser(name, help=text, description=text[0].upper() + text[1:] + ".")
        action.set_defaults(explained_by=action)
        action.add_argument("place" if name == "export" else "path", metavar=place)
        action.add_argument("--json", action="store_true", help="print JSON")
        if name == "export":
            action.add_argument("--to", required=True, metavar="FILE.safetensors", help="the file to write")


def run(arguments: Namespace) -> None:
    """List, check or export."""
    {"ls": _list, "verify": _verify, "export": _export}[arguments.action](arguments)


# ------------------------------------------------------------------------------------------------ what there is


def _list(arguments: Namespace) -> None:
    rows = [_row(place) for place in _places(arguments.path)]
    if arguments.json:
        print(json.dumps(rows, indent=2))
        return
    shown = [
        (
            row["name"],
            "-" if row["step"] is None else row["step"],
            "-" if row["samples"] is None else row["samples"],
            row["schedule"] or "-",
            "-" if row["saved"] is None else row["saved"],
            shown_bytes(row["bytes"]),
            "damaged" if row["problems"] else "complete",
            "latest" if row["latest"] else "",
        )
        for row in rows
    ]
    print(table(("checkpoint", "step", "samples", "schedule", "saved", "size", "state", ""), shown))
    for row in rows:
        for problem in row["problems"]:
            say(f"warning: {row['name']}: {problem}")


def _places(named: str) -> list[Path]:
    """Return the checkpoint of a path, or all of a directory, oldest first."""
    from penstock.runtime.checkpoint.finding import directory_meant, find_checkpoint, is_place  # lazy: heavy
    from penstock.runtime.checkpoint.format import saved_steps  # lazy: heavy

    path = directory_meant(named)
    if is_place(path):
        return [path]
    places = list(reversed(saved_steps(path)))
    if not places:
        find_checkpoint(path)  # its error names the missing argument
        raise UsageError("there is no checkpoint", where=named)
    return places


def _row(place: Path) -> dict[str, Any]:
    """Read the index of a checkpoint, and list the problems that can be seen without reading tensors."""
    from datetime import UTC, datetime  # lazy: heavy

    from penstock.runtime.checkpoint.finding import latest_name  # lazy: heavy

    index, problems = _index(place)
    saved, bytes_ = None, 0
    if index is not None:
        saved = datetime.fromtimestamp((place / "index.json").stat().st_mtime, UTC).strftime("%Y-%m-%dT%H:%M:%SZ")
        bytes_ = sum(file.size for file in index.files.values())
        for name, file in index.files.items():
            path = place / name
            if path.is_symlink() or not path.is_file():
                problems.append(f"{name}: missing, or not a plain file")
            elif path.stat().st_size != file.size:
                problems.append(f"{name}: {path.stat().st_size} bytes, expected {file.size}")
    return {
        "name": place.name,
        "path": str(place),
        "step": None if index is None else index.step,
        "samples": None if index is None else index.samples,
        "schedule": "" if index is None else index.schedule,
        "microbatches": None if index is None else index.microbatches,
        "saved": saved,
        "bytes": bytes_,
        "latest": latest_name(place.parent) == place.name,
        "problems": problems,
    }


def _index(place: Path) -> tuple[Index | None, list[str]]:
    from penstock.runtime.checkpoint.format import read_index  # lazy: heavy

    try:
        return read_index(place), []
    except PenstockError as error:
        return None, [error.what]


# ------------------------------------------------------------------------------------------------ is it whole


def _verify(arguments: Namespace) -> None:
    from penstock.runtime.checkpoint.finding import is_place, latest_name  # lazy: heavy
    from penstock.runtime.checkpoint.format import left_behind  # lazy: heavy

    places = _places(arguments.path)
    rows = [{"name": place.name, "path": str(place), "problems": _damage(place)} for place in places]
    directory = places[0].parent
    name = latest_name(directory)
    lost = (
        []
        if is_place(Path(os.path.abspath(arguments.path))) or any(p.name == name for p in places)
        else [f"latest names {name!r}, which is not there"]
    )
    if arguments.json:
        print(json.dumps({"checkpoints": rows, "problems": lost}, indent=2))
    else:
        for row in rows:
            print(f"{row['name']}: {'damaged' if row['problems'] else 'whole'}")
    for path, _ in left_behind(directory):
        say(f"note: {path.name} was left by a save that did not come to its end; the next save removes it")
    problems = [f"{row['name']}: {problem}" for row in rows for problem in row["problems"]] + lost
    if problems:
        raise VerifyError("damaged:" + "".join(f"\n  - {problem}" for problem in problems), where=arguments.path)


def _damage(place: Path) -> list[str]:
    from penstock.runtime.checkpoint.finding import damage_of  # lazy: heavy

    try:
        return damage_of(place)
    except UsageError as error:
        return [error.what]


# ------------------------------------------------------------------------------------------------ weights out


def _export(arguments: Namespace) -> None:
    from penstock.inspection.exports.weights import export_parameters  # lazy: heavy
    from penstock.runtime.checkpoint.finding import find_checkpoint  # lazy: heavy

    place, out = find_checkpoint(arguments.place), Path(os.path.abspath(arguments.to))
    problem = replacing_problem(str(out))
    if is_inside(str(out), str(place)):
        problem = "lies in the checkpoint"
    if problem:
        raise UsageError(f"cannot write {arguments.to}: {problem}", where="checkpoint export")
    count, bytes_, step = export_parameters(place, out)
    if arguments.json:
        print(json.dumps({"file": str(out), "tensors": count, "bytes": bytes_, "step": step}))
    say(f"wrote {out}: {count} tensors after {step} steps, {shown_bytes(bytes_)}")
