"""The package as syntax trees: its modules, what each imports, and where.

Nothing is imported to find that out. Lazy imports (inside of a function) and those that only a type checker reads count
like all others, so an arrow that runs the wrong way is found wherever it hides.
"""

from __future__ import annotations

import ast
import gc
import io
import re
import tokenize
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cache, cached_property
from itertools import groupby
from pathlib import Path

from oracles.repository import ROOT

PACKAGE = "penstock"
_PRAGMA = re.compile(r"#\s*(?:type: ignore|noqa|lazy: heavy|fmt:|-{5})")


@dataclass(frozen=True)
class Arrow:
    """Module `source` imports `name` from module `target`."""

    source: str
    target: str
    name: str
    line: int
    lazy: bool = False

    def __str__(self) -> str:
        return f"{self.source}:{self.line} imports {self.name} from {self.target}{' (lazily)' if self.lazy else ''}"


@dataclass(frozen=True)
class SourceFile:
    """One module of the package: its dotted name, its file and its text."""

    name: str
    path: Path
    text: str

    @property
    def is_package(self) -> bool:
        return self.path.name == "__init__.py"

    @property
    def room(self) -> str:
        return self.name if self.is_package else self.name.rpartition(".")[0]

    @cached_property
    def tree(self) -> ast.Module:
        return ast.parse(self.text)

    @cached_property
    def nodes(self) -> list[ast.AST]:
        """All nodes of the tree, in the order of `ast.walk`."""
        return list(ast.walk(self.tree))

    def functions(self) -> Iterator[ast.FunctionDef | ast.AsyncFunctionDef]:
        for node in self.nodes:
            if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
                yield node

    def classes(self) -> Iterator[ast.ClassDef]:
        for node in self.nodes:
            if isinstance(node, ast.ClassDef):
                yield node

    def docstrings(self) -> Iterator[tuple[int, str]]:
        """Yield the docstrings, each with the line of what it describes."""
        for node in self.nodes:
            if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
                yield getattr(node, "lineno", 1), ast.get_docstring(node) or ""

    def comments(self) -> Iterator[tuple[int, str]]:
        """Yield blocks of comments: those in consecutive lines at one column are one block."""
        tokens = tokenize.generate_tokens(io.StringIO(self.text).readline)
        comments = [t for t in tokens if t.type == tokenize.COMMENT and not _PRAGMA.match(t.string)]
        places = enumerate(comments)
        for _, group in groupby(places, key=lambda place: (place[1].start[0] - place[0], place[1].start[1])):
            block = [comment for _, comment in group]
            yield block[0].start[0], "\n".join(comment.string.removeprefix("#").removeprefix(" ") for comment in block)

    def imports(self) -> list[tuple[str, str, int, bool]]:
        """Give (module, name, line, lazy) of every import; the name is empty where a whole module is imported."""
        return self._imports

    @cached_property
    def _imports(self) -> list[tuple[str, str, int, bool]]:
        return list(self._found_imports())

    def _found_imports(self) -> Iterator[tuple[str, str, int, bool]]:
        pending: list[tuple[ast.AST, bool]] = [(self.tree, False)]
        while pending:
            node, lazy = pending.pop()
            if isinstance(node, ast.Import):
                yield from ((alias.name, "", node.lineno, lazy) for alias in node.names)
            elif isinstance(node, ast.ImportFrom):
                base = self._base(node)
                yield from ((base, alias.name, node.lineno, lazy) for alias in node.names)
            inside = lazy or isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef | ast.Lambda)
            pending += [(child, inside) for child in ast.iter_child_nodes(node)]

    def _base(self, node: ast.ImportFrom) -> str:
        if not node.level:
            return node.module or ""
        parts = self.name.split(".")
        parts = parts[: len(parts) - node.level + self.is_package]
        return ".".join([*parts, node.module] if node.module else parts)


Sources = Mapping[str, SourceFile]


def sources_below(folder: Path, package: str = PACKAGE) -> dict[str, SourceFile]:
    """Read all modules below a folder, which is the package of that name; links to folders are followed."""
    sources: dict[str, SourceFile] = {}
    for path in sorted(folder.iterdir()):
        if path.is_dir() and path.name != "__pycache__":
            sources |= sources_below(path, f"{package}.{path.name}")
        elif path.suffix == ".py":
            name = package if path.stem == "__init__" else f"{package}.{path.stem}"
            sources[name] = SourceFile(name, path, path.read_text(encoding="utf-8"))
    return sources


@cache
def product() -> dict[str, SourceFile]:
    """Read and parse the package, once for all tests of a process. Its millions of nodes stay to the end, so the
    collector of garbage is told to leave them out: it would walk through them again and again."""
    sources = sources_below(ROOT / "src" / PACKAGE)
    gc.collect()
    gc.disable()
    try:
        for source in sources.values():
            _ = source.nodes, source.imports()
    finally:
        gc.enable()
    gc.freeze()
    return sources


def made_up(**texts: str) -> dict[str, SourceFile]:
    """Return sources for controls: `ir__graph="import torch"` is the module penstock.ir.graph of that text."""
    names = {key: ".".join((PACKAGE, *key.split("__"))) for key in texts}
    return {name: SourceFile(name, Path(name.replace(".", "/") + ".py"), texts[key]) for key, name in names.items()}


def arrows(sources: Sources) -> list[Arrow]:
    """List the imports of our own modules. `from package import module` is an arrow to the module."""
    result: list[Arrow] = []
    for name, source in sources.items():
        for base, imported, line, lazy in source.imports():
            if base != PACKAGE and not base.startswith(PACKAGE + "."):
                continue
            module = f"{base}.{imported}" if f"{base}.{imported}" in sources else base
            if module != name:
                result.append(Arrow(name, module, imported or "all", line, lazy))
    return result


def circles(sources: Sources) -> list[list[Arrow]]:
    """Find the groups of modules that import each other, each as the arrows inside of it (Tarjan's algorithm)."""
    targets: dict[str, set[str]] = {name: set() for name in sources}
    every = arrows(sources)
    for arrow in every:
        targets[arrow.source].add(arrow.target)
    index: dict[str, int] = {}
    low: dict[str, int] = {}
    stack: list[str] = []
    groups: list[set[str]] = []

    def visit(name: str) -> None:
        index[name] = low[name] = len(index)
        stack.append(name)
        for target in sorted(targets.get(name, ())):
            if target not in index:
                visit(target)
                low[name] = min(low[name], low[target])
            elif target in stack:
                low[name] = min(low[name], index[target])
        if low[name] == index[name]:
            group = set(stack[(at := stack.index(name)) :])
            del stack[at:]
            if len(group) > 1:
                groups.append(group)

    for name in sorted(sources):
        if name not in index:
            visit(name)
    return [[arrow for arrow in every if {arrow.source, arrow.target} <= group] for group in groups]
