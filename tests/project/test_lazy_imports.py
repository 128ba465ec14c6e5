"""A lazy import is for weight: it is marked, and it brings a library that its file would not load otherwise.

What is imported for type checkers alone is not there at run time, so nothing that runs may name it. What a module loads is read from syntax trees: the closure of its eager imports, and the libraries named in it.
"""

from __future__ import annotations

import ast
import symtable
from collections.abc import Iterator, Mapping

import pytest

from .source_tree import PACKAGE, Arrow, Sources, arrows, made_up, product

MARK = "# lazy: heavy"
LIBRARIES = {
    "highspy", "ml_dtypes", "msgspec", "networkx", "numpy", "onnx", "onnxruntime", "pyarrow", "safetensors", "sympy",
    "torch", "tvm", "tvm_ffi", "yaml",
}  # fmt: skip
# Every command is imported to print the help, so modules are weight there; and the registry loads the back end asked for.
LAZY_WITHOUT_LIBRARIES = (f"{PACKAGE}.commands.", f"{PACKAGE}.backends.registry")


def _lines_for_types(tree: ast.Module) -> set[int]:
    """Return the lines of blocks that only type checkers read."""
    blocks = (node for node in ast.walk(tree) if isinstance(node, ast.If) and "TYPE_CHECKING" in ast.unparse(node.test))
    return {line for block in blocks for line in range(block.lineno, (block.end_lineno or block.lineno) + 1)}


def libraries_loaded(sources: Sources) -> Mapping[str, frozenset[str]]:
    """Return the libraries that importing each module loads, through all modules that it imports eagerly."""
    direct: dict[str, set[str]] = {}
    targets: dict[str, set[str]] = {}
    for name, source in sources.items():
        for_types = _lines_for_types(source.tree)
        eager = [(base, what) for base, what, line, lazy in source.imports() if not lazy and line not in for_types]
        direct[name] = {base.split(".")[0] for base, _ in eager} & LIBRARIES
        parts = name.split(".")
        targets[name] = {".".join(parts[:end]) for end in range(1, len(parts))}
        targets[name] |= {f"{base}.{what}" if f"{base}.{what}" in sources else base for base, what in eager}
    return {name: frozenset().union(*(direct[one] for one in _closure(name, targets))) for name in sources}


def _closure(name: str, targets: Mapping[str, set[str]]) -> set[str]:
    reached: set[str] = set()
    pending = [name]
    while pending:
        one = pending.pop()
        if one in targets and one not in reached:
            reached.add(one)
            pending += targets[one]
    return reached


def _line(sources: Sources, arrow: Arrow) -> str:
    return sources[arrow.source].text.splitlines()[arrow.line - 1]


def unmarked(sources: Sources) -> list[str]:
    """List the lazy imports of our own modules that do not say that they are."""
    return [str(arrow) for arrow in arrows(sources) if arrow.lazy and MARK not in _line(sources, arrow)]


def weightless(sources: Sources) -> list[str]:
    """List the lazy imports that bring no library, so that they could stand at the top of their file."""
    loaded = libraries_loaded(sources)
    needless: dict[tuple[str, int], list[Arrow]] = {}
    for arrow in arrows(sources):
        chosen = arrow.source.startswith(LAZY_WITHOUT_LIBRARIES) and not arrow.target.startswith(f"{PACKAGE}.support")
        if arrow.lazy and not chosen:
            needless.setdefault((arrow.source, arrow.line), []).append(arrow)
    return [
        str(group[0])
        for group in needless.values()
        if all(loaded[arrow.target] <= loaded[arrow.source] for arrow in group)
    ]


def _names_for_types(tree: ast.Module) -> set[str]:
    """Return the names that only blocks for type checkers bring."""
    lines = _lines_for_types(tree)
    there: dict[bool, set[str]] = {True: set(), False: set()}
    for node in tree.body:
        inside = node.lineno in lines
        for one in ast.walk(node) if inside else [node]:
            if isinstance(one, ast.Import | ast.ImportFrom):
                there[inside] |= {(alias.asname or alias.name).split(".")[0] for alias in one.names}
    return there[True] - there[False]


def absent_at_run_time(sources: Sources) -> list[str]:
    """List the functions that read a name which is imported for type checkers alone."""

    def readers(table: symtable.SymbolTable, names: set[str]) -> Iterator[tuple[str, str]]:
        for symbol in table.get_symbols():
            if symbol.get_name() in names and symbol.is_referenced() and symbol.is_global():
                yield table.get_name(), symbol.get_name()
        for child in table.get_children():
            yield from readers(child, names)

    offenders = []
    for module, source in sources.items():
        if names := _names_for_types(source.tree):
            for child in symtable.symtable(source.text, module, "exec").get_children():
                offenders += [f"{module}: {function} reads {name}" for function, name in readers(child, names)]
    return offenders


def test_nothing_reads_what_type_checkers_alone_import() -> None:
    assert not absent_at_run_time(product())


def test_lazy_imports_are_marked() -> None:
    assert not unmarked(product())


def test_lazy_imports_bring_a_library() -> None:
    assert not weightless(product())


HEAVY = "import torch\ndef f(): pass"


@pytest.mark.parametrize(
    ("text", "seen"),
    [
        ("def g():\n    from penstock.ir.heavy import f  # lazy: heavy", []),
        ("import torch\ndef g():\n    from penstock.ir.heavy import f  # lazy: heavy", ["weightless"]),
        ("def g():\n    from penstock.ir.heavy import f", ["unmarked"]),
        ("def g():\n    from penstock.ir.light import f  # lazy: heavy", ["weightless"]),
        ("if TYPE_CHECKING:\n    import torch\ndef g():\n    from penstock.ir.heavy import f  # lazy: heavy", []),
        ("if TYPE_CHECKING:\n    import torch\ndef g(x: torch.Tensor):\n    return x", []),
        (
            "if TYPE_CHECKING:\n    import torch\ndef g(x: torch.Tensor):\n    return torch.relu(x)",
            ["absent_at_run_time"],
        ),
        ("if TYPE_CHECKING:\n    import torch\ndef g():\n    import torch  # lazy: heavy\n    return torch.relu", []),
    ],
)
def test_offenders_are_noticed(text: str, seen: list[str]) -> None:
    sources = made_up(
        ir__user=f"from __future__ import annotations\n{text}", ir__heavy=HEAVY, ir__light="def f(): pass"
    )
    assert [rule.__name__ for rule in (unmarked, weightless, absent_at_run_time) if rule(sources)] == seen
