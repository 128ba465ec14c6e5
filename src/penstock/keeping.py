"""`penstock checkpoint`: what is in a folder of checkpoints, whether it is whole, and the weights out of one. None of it needs the bundle.

ls       one row per checkpoint; sizes and the index are looked at, contents are not
verify   every file is read and compared with its hash; exit code 5 when anything is wrong
export   parameters, and other tensors that the model stores, by the model's names, as one safetensors file
"""

from __future__ import annotations

import json
import os
from argparse import Namespace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from penstock.backends.bundle.tensor_file import write_tensors
from penstock.backends.bundle.writer import flush_directory
from penstock.runtime.checkpoint.finding import damage_of, directory_meant, find_checkpoint, is_place, latest_name
from penstock.runtime.checkpoint.format import Index, left_behind, read_index, read_tensors, saved_steps
from penstock.support.atomic_files import replacing
from penstock.support.errors import PenstockError, UsageError, VerifyError
from penstock.support.paths import file_problem, is_inside
from penstock.support.terminal import say, table
from penstock.support.words import shown_bytes


def checkpoint_command(arguments: Namespace) -> None:
    {"ls": list_command, "verify": verify_command, "export": export_command}[arguments.action](arguments)


# ------------------------------------------------------------------------------------------------ what there is


def list_command(arguments: Namespace) -> None:
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


def _places(given: str) -> list[Path]:
    """The checkpoint of a path, or all of a directory, oldest first."""
    path = directory_meant(given)
    if is_place(path):
        return [path]
    found = list(reversed(saved_steps(path)))
    if not found:
        find_checkpoint(path)  # which says what is missing
        raise UsageError("there is no checkpoint", where=given)
    return found


def _row(place: Path) -> dict[str, Any]:
    """What the index of a checkpoint says, and what can be seen to be wrong without reading tensors."""
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
    try:
        return read_index(place), []
    except PenstockError as error:
        return None, [error.what]


# ------------------------------------------------------------------------------------------------ is it whole


def verify_command(arguments: Namespace) -> None:
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
    try:
        return damage_of(place)
    except UsageError as error:
        return [error.what]


# ------------------------------------------------------------------------------------------------ weights out


def export_command(arguments: Namespace) -> None:
    place, out = find_checkpoint(arguments.place), Path(os.path.abspath(arguments.to))
    problem = file_problem(str(out))
    if is_inside(str(out), str(place)):
        problem = "lies in the checkpoint"
    if problem:
        raise UsageError(f"cannot write {arguments.to}: {problem}", where="checkpoint export")
    count, bytes_, step = export_parameters(place, out)
    if arguments.json:
        print(json.dumps({"file": str(out), "tensors": count, "bytes": bytes_, "step": step}))
    say(f"wrote {out}: {count} tensors after {step} steps, {shown_bytes(bytes_)}")


def export_parameters(place: Path, out: Path) -> tuple[int, int, int]:
    """Write the newest parameters of a checkpoint, and other tensors that the model stores, by its own
    names; their number, bytes, and the step."""
    index = read_index(place)
    if not index.names:
        raise UsageError(
            "does not say what the model calls its tensors",
            where=str(place),
            hint=f"penstock export BUNDLE --checkpoint {place} --safetensors FILE",
        )
    arrays = read_tensors(place, index, set(index.names))
    if lost := sorted(index.names.keys() - arrays.keys()):
        raise VerifyError(f"lacks {', '.join(lost)}, which its index names", where=str(place))
    named = {name: arrays[ours] for ours, names in index.names.items() for name in names}
    with replacing(out) as work:
        write_tensors(work, named, {"format": "pt"})  # transformers does not read files that do not say so
    flush_directory(out.parent)
    return len(named), sum(array.nbytes for array in named.values()), index.step
