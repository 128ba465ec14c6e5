"""The index of files: every room and every file of the package with the first sentence of its docstring.

In: the files of the package, read as text. Out: Markdown for docs/refresh.py to put into pages.
"""

from __future__ import annotations

import ast
import re
from collections.abc import Iterator
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
# In the order in which a model is processed, as the pages of docs/ are.
TOP = ("ir", "frontends", "passes", "backends", "runtime")
SENTENCE = re.compile(r"(.+?\.)(?:\s|$)", re.DOTALL)


def rooms() -> str:
    """Every room in one line."""
    rows = [
        f"| `{_shown(folder)}/` | {len(_files(folder))} | {_escaped(_first_sentence(folder / '__init__.py'))} |"
        for folder in _folders()
    ]
    return "| room | files | holds |\n| --- | --- | --- |\n" + "\n".join(rows) + "\n"


def files() -> str:
    """Every file in one line, room by room."""
    parts = []
    for folder in _folders():
        if not _files(folder):
            continue
        rows = [f"| `{path.name}` | {_escaped(_first_sentence(path))} |" for path in _files(folder)]
        head = f"## {_shown(folder)}/\n\n{_escaped(_first_sentence(folder / '__init__.py'))}\n\n| file | holds |\n| --- | --- |\n"
        parts.append(head + "\n".join(rows) + "\n")
    return "\n".join(parts)


def _folders() -> Iterator[Path]:
    yield ROOT / "src" / "penstock"
    own = [path for path in sorted((ROOT / "src" / "penstock").iterdir()) if path.is_dir() and not path.is_symlink()]
    for top in [ROOT / name for name in TOP] + own:
        if (top / "__init__.py").is_file():
            yield from (init.parent for init in sorted(top.rglob("__init__.py"), key=lambda init: init.parent.parts))


def _files(folder: Path) -> list[Path]:
    return [path for path in sorted(folder.glob("*.py")) if path.name != "__init__.py"]


def _shown(folder: Path) -> str:
    return str(folder.relative_to(ROOT))


def _first_sentence(path: Path) -> str:
    text = " ".join((ast.get_docstring(ast.parse(path.read_text(encoding="utf-8"))) or "").split("\n\n")[0].split())
    match = SENTENCE.match(text)
    return match[1] if match else text


def _escaped(text: str) -> str:
    return text.replace("|", "\\|").rstrip(":")


__all__ = ["files", "rooms"]
