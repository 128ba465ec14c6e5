"""The files of a dump folder: writing them, and removing those of an older dump.

In: a folder, which may hold an older dump and files of the user. Out: files in it, and a list of them, dump-files.txt.

A new dump removes the files that the older list names, and the folders of that dump once they are empty. It removes
nothing else and overwrites nothing: where another file has the name of a dump's file, there is no dump.

The list may be a stranger's. An entry counts only if it has a name that dumps use, lies in the folder and is reached
through no link.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path

from penstock.support.atomic_files import naming
from penstock.support.errors import UsageError

LIST = "dump-files.txt"
_HEADER = "# what a dump of Penstock wrote here, and the next one removes\n"
_FILE = re.compile(
    r"\d\d+_[a-z0-9-]+\.(ir|diff)|repro\.ir|passes\.tsv|events\.jsonl|plan\.json"
    r"|schedule\.svg|index\.html|dump-files\.txt"
    r"|stages/s\d+/(module\.ir|relax\.py|kernels\.tsv|kernels\.cu|kernels/[^/]+\.py)"
    r"|ranks/r\d+/(module\.ir|actions\.tsv)"
)
_FOLDER = re.compile(r"stages(/s\d+(/kernels)?)?|ranks(/r\d+)?")
_SHOWN = 3


class Files:
    """The files of a dump: it makes room for them, writes them, and removes them where planning begins again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._own: dict[str, None] = {}
        if (folder / "manifest.json").exists():
            raise UsageError("is a bundle", where=str(folder), hint="give dumps a folder of their own")
        try:
            folder.mkdir(parents=True, exist_ok=True)
            self._make_room()
        except OSError as error:
            raise UsageError(
                f"cannot be written: {error.strerror or error}", where=str(folder), hint="give another folder"
            ) from error

    def _make_room(self) -> None:
        listed = _listed(self._folder)
        files, folders, others = [], [], []
        for name, entry in _named_as_ours(self._folder):
            if name in listed and entry.is_file(follow_symlinks=False):
                files.append(name)
            elif entry.is_dir(follow_symlinks=False) and _FOLDER.fullmatch(name):
                folders += [name] if f"{name}/" in listed else []
            else:
                others.append(name)
        if others:
            shown = ", ".join(sorted(others)[:_SHOWN]) + (
                f" and {len(others) - _SHOWN} more" if len(others) > _SHOWN else ""
            )
            raise UsageError(
                f"a dump would write over {shown}, which no dump listed as its own in {LIST}",
                where=str(self._folder),
                hint="give another folder, or move these away",
            )
        self._remove(files, folders)

    def clear(self) -> None:
        """Remove the files written so far."""
        self._remove(
            [name for name in self._own if name[-1] != "/"], [name[:-1] for name in self._own if name[-1] == "/"]
        )
        self._own.clear()

    def _remove(self, files: Iterable[str], folders: Iterable[str]) -> None:
        for name in files:
            (self._folder / name).unlink(missing_ok=True)
        for name in sorted(folders, reverse=True):
            path = self._folder / name
            if path.is_dir() and not any(path.iterdir()):
                path.rmdir()

    def write(self, texts: Mapping[str, str]) -> None:
        """Write files by name, and the folders that the names need."""
        wanted = dict.fromkeys(
            folder for name in texts for folder in _folders_of(name) if f"{folder}/" not in self._own
        )
        folders = [folder for folder in wanted if not (self._folder / folder).is_dir()]
        self._list([*(f"{folder}/" for folder in folders), *texts])
        for folder in folders:
            (self._folder / folder).mkdir()
        for name, text in texts.items():
            self._put(name, text, os.O_TRUNC)

    def append(self, name: str, text: str) -> None:
        """Append text to a file."""
        self._list([name])
        self._put(name, text, os.O_APPEND)

    def _put(self, name: str, text: str, flag: int) -> None:
        # There are many files, and most are small.
        file = os.open(self._folder / name, os.O_WRONLY | os.O_CREAT | flag, 0o666)
        try:
            unwritten = memoryview(text.encode())
            with naming(self._folder / name):
                while unwritten:
                    unwritten = unwritten[os.write(file, unwritten) :]
        finally:
            os.close(file)

    def _list(self, names: Iterable[str]) -> None:
        """Add names to the list before the files exist: an entry without a file does no harm."""
        new = [name for name in (names if self._own else [LIST, *names]) if name not in self._own]
        if new:
            self._put(LIST, ("" if self._own else _HEADER) + "".join(f"{name}\n" for name in new), os.O_APPEND)
            self._own |= dict.fromkeys(new)


def _folders_of(name: str) -> list[str]:
    """Return the folders of a name, outermost first: `stages`, `stages/s0`, `stages/s0/kernels`."""
    parts = name.split("/")[:-1]
    return ["/".join(parts[:end]) for end in range(1, 1 + len(parts))]


def _listed(folder: Path) -> set[str]:
    """Return the names in the list of an older dump; none where there is no list."""
    path = folder / LIST
    if path.is_symlink() or not path.is_file():
        return set()
    text = path.read_text(encoding="utf-8", errors="replace")
    return {*text[len(_HEADER) :].split("\n"), LIST} if text.startswith(_HEADER) else set()


def _named_as_ours(folder: Path, within: str = "") -> Iterator[tuple[str, os.DirEntry[str]]]:
    """Yield all entries of a folder that have a name of a dump's file or folder. Links are not followed."""
    with os.scandir(folder) as entries:
        for entry in entries:
            name = within + entry.name
            if _FOLDER.fullmatch(name) and entry.is_dir(follow_symlinks=False):
                yield from _named_as_ours(folder / entry.name, f"{name}/")
            if _FOLDER.fullmatch(name) or _FILE.fullmatch(name):
                yield name, entry
