"""Mutants of a source file: the file with one small change each, of kinds that programmers make by mistake.

In: source text. Out: mutants, in the order of the file. What is changed:

    compare     a comparison is negated, or moved by one at its border (< for <=)
    logic       `and` for `or` and back; `not`, or one side of an `and` or `or`, is left out
    condition   the condition of an if, a while or a filter is negated
    arithmetic  + for -, * for //, % for //, | for &, & for |, - for | of sets; a sign is left out
    constant    a number is one more, True is False, a name in quotes is another; capitals in quotes, which may be a list of them, lose the last
    call        min for max, any for all, and back
    statement   a call, yield, assignment to a part of something, continue, break, raise or del is left out
    return      a function returns at once, without a value

Messages are left alone: a string with blanks, and f-strings. So are docstrings, annotations, decorators, names of types, `assert`s and
`strict` of `zip`, which are for our own bugs, and lists of exported names.
"""

from __future__ import annotations

import ast
import copy
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import TypeAlias

_NEGATED: dict[type[ast.cmpop], type[ast.cmpop]] = {
    ast.Eq: ast.NotEq, ast.NotEq: ast.Eq, ast.Lt: ast.GtE, ast.GtE: ast.Lt, ast.Gt: ast.LtE, ast.LtE: ast.Gt,
    ast.In: ast.NotIn, ast.NotIn: ast.In, ast.Is: ast.IsNot, ast.IsNot: ast.Is,
}  # fmt: skip
_BORDER: dict[type[ast.cmpop], type[ast.cmpop]] = {ast.Lt: ast.LtE, ast.LtE: ast.Lt, ast.Gt: ast.GtE, ast.GtE: ast.Gt}
_ARITHMETIC: dict[type[ast.operator], type[ast.operator]] = {
    ast.Add: ast.Sub, ast.Sub: ast.Add, ast.Mult: ast.FloorDiv, ast.Div: ast.Mult, ast.FloorDiv: ast.Mult, ast.Mod: ast.FloorDiv,
    ast.BitOr: ast.BitAnd, ast.BitAnd: ast.BitOr,
}  # fmt: skip
_CALLS = {"min": "max", "max": "min", "any": "all", "all": "any"}
_DROPPED = ast.Expr | ast.AugAssign | ast.Continue | ast.Break | ast.Raise | ast.Delete
# A node of the tree: the field of its parent, and its place in that field where this is a list.
Step: TypeAlias = tuple[str, int | None]


@dataclass(frozen=True)
class Mutant:
    """`name` says where and what, and stays the same when lines move; `function` is the one that the change is in, behind the names of those and of
    the classes around it; `line` is that of the change, `span` the lines of the statement that it is in, without those inside of that;
    `during_import` is whether it runs when the module is imported."""

    name: str
    kind: str
    function: str
    line: int
    span: range
    during_import: bool
    tree: ast.Module

    @property
    def source(self) -> str:
        return ast.unparse(self.tree)


def mutants(source: str) -> Iterator[Mutant]:
    tree = ast.parse(source)
    seen: Counter[str] = Counter()
    for place in _places(tree, (), "", True, range(1)):
        for kind, new in _changes(place.node, place.context):
            changed = _replaced(tree, place.path, new)
            name = f"{place.function or 'module'}: {_told(place.node, new)}"
            seen[name] += 1
            name += f" ({seen[name]})" if seen[name] > 1 else ""
            span, importing = place.span, place.during_import
            if isinstance(
                place.node, ast.FunctionDef
            ):  # its line runs when it is defined, its first statement when it is called
                span, importing = _span(_statements(place.node)[0]), False
            line = getattr(place.node, "lineno", span.start)
            yield Mutant(name, kind, place.function, line, span, importing, changed)


# ---------------------------------------------------------------------------------------- where


@dataclass(frozen=True)
class _Place:
    node: ast.AST
    path: tuple[Step, ...]
    function: str
    during_import: bool
    context: str
    span: range


def _places(node: ast.AST, path: tuple[Step, ...], function: str, during_import: bool, span: range) -> Iterator[_Place]:
    """Every node below that may be changed. The context of a node is the field of its parent, for conditions."""
    for name, value in ast.iter_fields(node):
        children = list(enumerate(value)) if isinstance(value, list) else [(None, value)]
        for i, child in children:
            if not isinstance(child, ast.AST) or _left_alone(node, name, i, child):
                continue
            inside, importing = function, during_import
            if isinstance(node, ast.Lambda) and name == "body":
                importing = False
            if isinstance(child, ast.FunctionDef | ast.ClassDef) and during_import:
                inside = f"{function}.{child.name}" if function else child.name
            here, lines = (*path, (name, i)), _span(child) if isinstance(child, ast.stmt) else span
            yield _Place(child, here, inside, importing, name, lines)
            if isinstance(child, ast.FunctionDef):
                yield from _places_of_function(child, here, inside, importing, lines)
            else:
                yield from _places(child, here, inside, importing, lines)


def _span(node: ast.stmt) -> range:
    """The lines of a statement; of one with others inside those before them."""
    inside: list[ast.stmt] = getattr(node, "body", [])
    last = max(node.lineno, inside[0].lineno - 1) if inside else node.end_lineno or node.lineno
    return range(node.lineno, last + 1)


def _places_of_function(
    node: ast.FunctionDef, path: tuple[Step, ...], function: str, during_import: bool, span: range
) -> Iterator[_Place]:
    """Its body runs when it is called; defaults and decorators when it is defined."""
    for place in _places(node, path, function, during_import, span):
        in_body = place.path[len(path)][0] == "body"
        yield replace(place, during_import=False) if in_body else place


def _statements(node: ast.FunctionDef) -> list[ast.stmt]:
    """Without the docstring, unless it is all there is."""
    return node.body[1:] if ast.get_docstring(node) is not None and len(node.body) > 1 else node.body


def _left_alone(parent: ast.AST, field: str, index: int | None, child: ast.AST) -> bool:
    if isinstance(parent, ast.AnnAssign | ast.arg) and field == "annotation":
        return True
    if isinstance(parent, ast.FunctionDef | ast.ClassDef) and field in ("returns", "decorator_list"):
        return True
    if isinstance(child, ast.Import | ast.ImportFrom | ast.Assert | ast.JoinedStr):
        return True
    if isinstance(parent, ast.keyword) and parent.arg == "strict":
        return True
    if isinstance(child, ast.Expr) and isinstance(child.value, ast.Constant):
        return True  # a docstring
    if isinstance(child, ast.Assign) and isinstance(child.targets[0], ast.Name) and child.targets[0].id == "__all__":
        return True
    # The name of a type, as in `Programs = Mapping[int, Sequence[Action]]`.
    return isinstance(parent, ast.Module) and isinstance(child, ast.Assign) and isinstance(child.value, ast.Subscript)


# ---------------------------------------------------------------------------------------- what


def _changes(node: ast.AST, context: str) -> Iterator[tuple[str, ast.AST]]:
    """The mutants of one node, by kind."""
    match node:
        case ast.Compare(ops=[op]):
            yield "compare", ast.Compare(node.left, [_NEGATED[type(op)]()], node.comparators)
            if type(op) in _BORDER:
                yield "compare", ast.Compare(node.left, [_BORDER[type(op)]()], node.comparators)
        case ast.Compare():
            for i, op in enumerate(node.ops):
                for table in (_NEGATED, _BORDER):
                    if type(op) in table:
                        yield (
                            "compare",
                            ast.Compare(
                                node.left, [*node.ops[:i], table[type(op)](), *node.ops[i + 1 :]], node.comparators
                            ),
                        )
        case ast.BoolOp():
            yield "logic", ast.BoolOp(ast.And() if isinstance(node.op, ast.Or) else ast.Or(), node.values)
            for i in range(len(node.values)):
                rest = [*node.values[:i], *node.values[i + 1 :]]
                yield "logic", rest[0] if len(rest) == 1 else ast.BoolOp(node.op, rest)
        case ast.UnaryOp(op=ast.Not()):
            yield "logic", node.operand
        case ast.UnaryOp(op=ast.USub()):
            yield "arithmetic", node.operand
        case ast.BinOp() if type(node.op) in _ARITHMETIC and not _is_text(node):
            yield "arithmetic", ast.BinOp(node.left, _ARITHMETIC[type(node.op)](), node.right)
            if isinstance(node.op, ast.Sub):
                yield "arithmetic", ast.BinOp(node.left, ast.BitOr(), node.right)
        case ast.AugAssign() if type(node.op) in _ARITHMETIC:
            yield "arithmetic", ast.AugAssign(node.target, _ARITHMETIC[type(node.op)](), node.value)
        case ast.Constant(value=bool()):
            yield "constant", ast.Constant(not node.value)
        case ast.Constant(value=int() | float()):
            yield "constant", ast.Constant(node.value + 1)
        case ast.Constant(value=str()) if node.value and not any(c.isspace() for c in node.value):
            several = len(node.value) > 1 and node.value.isupper()
            yield "constant", ast.Constant(node.value[:-1] if several else node.value + "x")
        case ast.Call(func=ast.Name(id=name)) if name in _CALLS:
            yield "call", ast.Call(ast.Name(_CALLS[name], ast.Load()), node.args, node.keywords)
    if context in ("test", "ifs") and not isinstance(node, ast.Compare | ast.UnaryOp | ast.Constant):
        yield "condition", ast.UnaryOp(ast.Not(), node)
    if isinstance(node, _DROPPED) or (
        isinstance(node, ast.Assign) and not isinstance(node.targets[0], ast.Name | ast.Tuple)
    ):
        yield "statement", ast.Pass()
    if isinstance(node, ast.FunctionDef):
        early = copy.copy(node)
        early.body = [ast.Return(None), *node.body]
        yield "return", early


def _is_text(node: ast.BinOp) -> bool:
    """Whether something is put together for people to read."""
    return any(
        isinstance(n, ast.JoinedStr) or (isinstance(n, ast.Constant) and isinstance(n.value, str))
        for n in ast.walk(node)
    )


def _replaced(tree: ast.Module, path: tuple[Step, ...], new: ast.AST) -> ast.Module:
    """The tree with another node at a place. What is not on the way there is shared."""
    top = copy.copy(tree)
    node: ast.AST = top
    for name, i in path[:-1]:
        value = getattr(node, name)
        if i is None:
            child = copy.copy(value)
            setattr(node, name, child)
        else:
            child = copy.copy(value[i])
            setattr(node, name, [*value[:i], child, *value[i + 1 :]])
        node = child
    name, i = path[-1]
    value = getattr(node, name)
    setattr(node, name, new if i is None else [*value[:i], new, *value[i + 1 :]])
    return top


def _told(old: ast.AST, new: ast.AST) -> str:
    if isinstance(old, ast.FunctionDef):
        return f"{old.name} returns at once"
    return f"{_shown(old)} -> {_shown(new)}"


def _shown(node: ast.AST, most: int = 80) -> str:
    text = " ".join(ast.unparse(ast.fix_missing_locations(copy.deepcopy(node))).split())
    return text if len(text) <= most else text[: most - 3] + "..."
