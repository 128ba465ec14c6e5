"""The rules of docs/layout.md: which room may import which, how large rooms, files and functions are, and how they are named.

Syntax trees tell all of it, so lazy and type-only imports count. What a process really loads at its start is asked of
processes, at the end of this file. Every rule has a control: a made-up source that breaks it.
"""

from __future__ import annotations

import ast
import json
import os
import re
import subprocess
import sys
from collections import Counter, defaultdict
from collections.abc import Callable, Iterable, Iterator
from functools import cache

import pytest

from penstock.support.entry_points import ENTRY_POINTS

from .source_tree import PACKAGE, ROOT, Arrow, SourceFile, Sources, arrows, circles, made_up, product

FOLDERS = ("ir", "frontends", "passes", "backends", "runtime")
HEAVY = ("torch", "onnx", "onnxruntime", "tvm", "tvm_ffi")

Rule = Callable[[Sources], list[str]]

# ---------------------------------------------------------------------------------------- floors

# From the ground up. A room imports rooms of lower floors; rooms of one floor do not know each other. The facade
# `penstock` itself hands on names of all floors, and is imported by nobody.
HOUSE: tuple[tuple[str, ...], ...] = (
    ("version", "support"),
    ("ir",),
    ("frontends", "passes", "backends"),
    ("runtime", "models"),
    ("calibration",),
    ("planning",),
    ("inspection",),
    ("doctor",),
    ("verification",),
    ("api",),
    ("demo", "commands"),
    ("__main__",),
)
# The same inside of the rooms that have rooms of their own.
FLOORS: dict[str, tuple[tuple[str, ...], ...]] = {
    "": HOUSE,
    "ir": (
        ("attrs", "types", "action_kinds", "memo", "schedule_names", "ladder"),
        ("schedule",),
        ("cluster",),
        ("graph",),
        ("training", "messages", "names"),
        ("ops",),
        ("sharding",),
        ("liveness", "text", "grid", "batch_shares", "collective_calls"),
        ("memory",),
        ("verify", "interpreter"),
        ("files",),
    ),
    "passes": (
        ("manager", "placement", "rewrite", "communicate", "kernels", "sharding"),
        ("lengths",),
        ("schedules", "training", "costs"),
        ("simulator", "memory"),
        ("partition",),
        ("planner", "pipelines"),
    ),
    "runtime": (
        ("messages",),
        ("state",),
        ("group", "telemetry", "generation"),
        ("data", "transport"),
        ("checkpoint",),
        ("worker",),
        ("launch",),
        ("job",),
    ),
}
# What a floor would allow, and a room shall not import all the same.
NEVER = {"runtime": ("passes", "frontends"), "ir.cluster": ("ir.graph",)}


def _part(module: str, house: str) -> str:
    """Name the part of a house that a module lies in: `memory` for ir.memory.walk in the house ir."""
    inside = module.removeprefix(f"{PACKAGE}.{house}." if house else f"{PACKAGE}.")
    return "" if inside == module else inside.partition(".")[0]


def climbing(sources: Sources) -> list[str]:
    """List the imports that do not go down."""
    lines = []
    for house, floors in FLOORS.items():
        floor = {part: number for number, parts in enumerate(floors) for part in parts}
        for arrow in arrows(sources):
            source, target = _part(arrow.source, house), _part(arrow.target, house)
            if not source or not target or source == target:
                continue
            unknown = [part for part in (source, target) if part not in floor]
            if unknown:
                lines.append(f"{arrow}: {unknown[0]!r} stands on no floor of {house or 'the house'}")
            elif floor[target] >= floor[source]:
                lines.append(f"{arrow}: {target} is no lower floor than {source}")
    for room, banned in NEVER.items():
        below = tuple(f"{PACKAGE}.{other}" for other in banned)
        for arrow in arrows(sources):
            if arrow.source.startswith(f"{PACKAGE}.{room}.") and _is_below(arrow.target, below):
                lines.append(f"{arrow}: {room} shall not know of it")
    return lines


def _is_below(module: str, prefixes: Iterable[str]) -> bool:
    return any(module == prefix or module.startswith(prefix + ".") for prefix in prefixes)


# Where each heavy library may be imported, lazily or not.
LIBRARIES = {
    "tvm": ("backends.tvm",),
    "tvm_ffi": ("backends.tvm",),
    "torch": (
        *("frontends.torch", "frontends.huggingface", "backends", "runtime", "doctor", "calibration"),
        *("inspection.kernels", "verification"),
    ),
    "onnx": ("frontends.onnx", "inspection", "verification", "models"),
    "onnxruntime": ("verification",),
}


def libraries_out_of_place(sources: Sources) -> list[str]:
    lines = []
    for source in sources.values():
        for module, _, line, _ in source.imports():
            places = LIBRARIES.get(module.partition(".")[0])
            if places is not None and not _is_below(source.name, [f"{PACKAGE}.{place}" for place in places]):
                lines.append(f"{source.name}:{line} imports {module}, which belongs to {', '.join(places)}")
    return lines


# ---------------------------------------------------------------------------------------- circles

# A class may import its own reader or writer lazily, inside of its room: at most four such pairs.
PAIRS = {
    # Cluster.load and Cluster.to_toml
    ("penstock.ir.cluster.cluster", "penstock.ir.cluster.file"),
}


def modules_in_circles(sources: Sources) -> list[str]:
    return [str(arrow) for group in _circles_beside(sources) for arrow in group]


def _circles_beside(sources: Sources) -> list[list[Arrow]]:
    result = []
    for group in circles(sources):
        members = {arrow.source for arrow in group}
        if not any(members == set(pair) for pair in PAIRS) or not any(arrow.lazy for arrow in group):
            result.append(group)
    return result


def rooms_in_pairs(sources: Sources) -> list[str]:
    """List pairs of rooms that import each other, but a room and one inside of it."""
    between: dict[tuple[str, str], list[Arrow]] = defaultdict(list)
    for arrow in arrows(sources):
        if arrow.target in sources and PACKAGE not in (arrow.source, arrow.target):
            between[sources[arrow.source].room, sources[arrow.target].room].append(arrow)
    return [
        str(arrow)
        for (one, other), there in between.items()
        if one < other and (other, one) in between and not other.startswith(one + ".")
        for arrow in (there + between[other, one])
    ]


# ---------------------------------------------------------------------------------------- names of modules as strings

# Files whose strings are names of modules by their purpose: each is a table that is read below.
TABLES = ("penstock", "penstock.support.entry_points", "penstock.commands.parser")


def unregistered_names(sources: Sources) -> list[str]:
    """List strings outside of the tables that name a module of ours: imports that no test of arrows sees."""
    lines = []
    for source in sources.values():
        if source.name in TABLES:
            continue
        for node in source.nodes:
            if (
                isinstance(node, ast.Constant)
                and isinstance(node.value, str)
                and node.value in sources
                and node.value != PACKAGE
            ):
                lines.append(f"{source.name}:{node.lineno} names {node.value} in a string")
    return lines


# ---------------------------------------------------------------------------------------- sizes

MOST_FILES, MOST_LINES, MOST_COLUMNS, MOST_FUNCTION_LINES, MOST_PARAMETERS = 15, 500, 120, 60, 8
# The facade's verbs show their settings one by one: their signatures are the API (tests/public_api.txt), and tests hold
# them against the dataclasses that the settings travel in.
FACADE = {
    ("penstock.api", "plan"),
    ("penstock.api", "compile"),
    ("penstock.api", "plan_best"),
    ("penstock.runtime.job.job", "open"),
    ("penstock.runtime.job.job", "__init__"),
    ("penstock.runtime.job.run", "run_bundle"),
    ("penstock.models", "write_bert"),
    ("penstock.models", "write_gpt"),
}


def large_rooms(sources: Sources) -> list[str]:
    files = Counter(source.room for source in sources.values() if not source.is_package)
    return [f"{room} has {count} files" for room, count in sorted(files.items()) if count > MOST_FILES]


def long_files(sources: Sources) -> list[str]:
    lengths = {name: source.text.count("\n") for name, source in sources.items()}
    return [f"{name} has {length} lines" for name, length in lengths.items() if length > MOST_LINES]


def wide_lines(sources: Sources) -> list[str]:
    return [
        f"{source.name}:{number} has {len(line)} columns"
        for source in sources.values()
        for number, line in enumerate(source.text.splitlines(), 1)
        if len(line) > MOST_COLUMNS
    ]


def large_functions(sources: Sources) -> list[str]:
    lines = []
    for source in sources.values():
        for function in source.functions():
            where = f"{source.name}:{function.lineno} {function.name}"
            length = (function.end_lineno or 0) - function.lineno + 1
            if length > MOST_FUNCTION_LINES:
                lines.append(f"{where} has {length} lines")
            arguments = [a.arg for a in (*function.args.posonlyargs, *function.args.args, *function.args.kwonlyargs)]
            count = len(arguments) - (arguments[:1] in (["self"], ["cls"]))
            if count > MOST_PARAMETERS and (source.name, function.name) not in FACADE:
                lines.append(f"{where} has {count} parameters")
    return lines


# ---------------------------------------------------------------------------------------- names and words


def repeated_classes(sources: Sources) -> list[str]:
    homes: dict[str, list[str]] = defaultdict(list)
    for source in sources.values():
        for node in source.classes():
            if not node.name.startswith("_"):
                homes[node.name].append(source.name)
    return [f"{name} stands in {', '.join(where)}" for name, where in sorted(homes.items()) if len(where) > 1]


VAGUE_CLASSES = ("Part", "Step", "Work", "Place", "Call", "Line")
# Names that the public API shows.
CLEAR_CLASSES = {("penstock.runtime.messages.control", "Step"), ("penstock.passes.manager", "Call")}
VAGUE_NAMES = ("found", "told", "made", "came", "asked", "own", "rest", "given", "taken")
QUESTIONS = ("What", "Whether", "Who", "Where", "Of", "How", "Which", "When", "Why")
_PERSONS = re.compile(r"\b(?:some|no|any|every)body\b|\bwhoever\b|\banyone\b|\bsomeone\b", re.IGNORECASE)


def vague_names(sources: Sources) -> list[str]:
    """List classes and local names that do not say what they hold. Fields of classes may be keys of files."""
    lines = []
    for source in sources.values():
        vague = []
        for node in source.nodes:
            if isinstance(node, ast.ClassDef) and (source.name, node.name) not in CLEAR_CLASSES:
                lines += [f"{source.name}:{node.lineno} class {node.name}"] * (node.name.lstrip("_") in VAGUE_CLASSES)
            if isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store) and node.id in VAGUE_NAMES:
                vague.append(node)
        if vague:
            fields = {field for cls in source.classes() for statement in cls.body for field in ast.walk(statement)}
            fields -= {node for function in source.functions() for node in ast.walk(function)}
            lines += [f"{source.name}:{node.lineno} {node.id} = ..." for node in vague if node not in fields]
    return lines


def _docstrings(source: SourceFile) -> Iterator[tuple[int, str]]:
    for node in source.nodes:
        if isinstance(node, ast.Module | ast.ClassDef | ast.FunctionDef | ast.AsyncFunctionDef):
            text = ast.get_docstring(node)
            if text and text.split():
                yield getattr(node, "lineno", 1), text


def unplain_docstrings(sources: Sources) -> list[str]:
    """List docstrings that begin like a question, or that speak of parts of the program as of persons."""
    lines = []
    for source in sources.values():
        for line, text in _docstrings(source):
            if text.split()[0].strip(",:;?") in QUESTIONS:
                lines.append(f"{source.name}:{line} begins with {text.split()[0]}")
            if person := _PERSONS.search(text):
                lines.append(f"{source.name}:{line} says {person.group()}")
    return lines


# ---------------------------------------------------------------------------------------- the rules, and their controls

RULES: dict[str, tuple[Rule, dict[str, str]]] = {
    "floors": (
        climbing,
        {"ir__graph": "def f():\n    from penstock.passes.manager import Call", "passes__manager": ""},
    ),
    "floors inside": (climbing, {"ir__graph": "from .files import read_module", "ir__files": ""}),
    "never": (
        climbing,
        {"runtime__state__store": "import penstock.passes.manager", "passes__manager": ""},
    ),
    "libraries": (libraries_out_of_place, {"passes__manager": "def f():\n    import torch.nn"}),
    "circles": (
        modules_in_circles,
        {
            "ir__a": "from typing import TYPE_CHECKING\nif TYPE_CHECKING:\n    from .b import x",
            "ir__b": "def f():\n    from .a import y",
        },
    ),
    "rooms": (
        rooms_in_pairs,
        {
            "ir__a__one": "import penstock.ir.b.one",
            "ir__b__two": "import penstock.ir.a.two",
            "ir__a__two": "",
            "ir__b__one": "",
        },
    ),
    "strings": (unregistered_names, {"runtime__worker__worker": 'command = ["-m", "penstock.runtime.worker.worker"]'}),
    "files in a room": (large_rooms, {f"ir__room__file{number}": "" for number in range(16)}),
    "lines of a file": (long_files, {"ir__graph": "\n" * 501}),
    "columns": (wide_lines, {"ir__graph": "#" * 121}),
    "lines of a function": (large_functions, {"ir__graph": "def f():\n" + "    x = 1\n" * 60}),
    "parameters": (large_functions, {"ir__graph": f"def f(self, {', '.join('abcdefghi')}): ..."}),
    "classes": (repeated_classes, {"ir__graph": "class Edge: ...", "passes__manager": "class Edge: ..."}),
    "vague classes": (vague_names, {"ir__graph": "class _Work: ..."}),
    "vague names": (vague_names, {"ir__graph": "def f():\n    found = 1\n    return found"}),
    "questions": (unplain_docstrings, {"ir__graph": 'def f():\n    """Whether it is."""'}),
    "persons": (unplain_docstrings, {"ir__graph": '"""The value that somebody reads."""'}),
}


@pytest.mark.parametrize("rule", dict.fromkeys(rule for rule, _ in RULES.values()), ids=lambda rule: rule.__name__)
def test_rule_holds(rule: Rule) -> None:
    problems = rule(product())
    assert not problems, "\n".join(["docs/layout.md has the rules", *problems])


@pytest.mark.parametrize("name", RULES)
def test_rule_notices(name: str) -> None:
    """The controls."""
    rule, texts = RULES[name]
    assert rule(made_up(**texts))


def test_pairs_are_few_and_there() -> None:
    assert len(PAIRS) <= 4
    assert all(name in product() for pair in PAIRS for name in pair)


def test_entry_points_are_modules() -> None:
    assert set(ENTRY_POINTS.values()) <= set(product())


def test_the_package_is_made_of_links() -> None:
    for folder in FOLDERS:
        link = ROOT / "src" / PACKAGE / folder
        assert link.is_symlink(), f"{link} must be a link; a copy would go stale"
        assert os.readlink(link) == f"../../{folder}"


# ---------------------------------------------------------------------------------------- what is loaded

# For each part of the package: what importing all of it must not load, among our own parts and among heavy libraries.
UNLOADED = {
    "support": (FOLDERS, HEAVY),
    "ir": (("frontends", "passes", "backends", "runtime", "commands", "api"), HEAVY),
    "frontends": (("passes", "backends", "runtime", "commands", "api"), ("torch", "onnxruntime", "tvm", "tvm_ffi")),
    "frontends.torch": (("passes", "backends", "runtime"), ("onnx", "onnxruntime", "tvm", "tvm_ffi")),
    "frontends.huggingface": (("passes", "backends", "runtime"), ("onnx", "onnxruntime", "tvm", "tvm_ffi")),
    "passes": (("frontends", "backends", "runtime", "commands", "api"), HEAVY),
    "backends": (("frontends", "runtime", "commands", "api"), ("onnx", "onnxruntime")),
    "backends.bundle": (("frontends", "passes", "runtime", "backends.tvm"), ("onnx", "onnxruntime", "tvm", "tvm_ffi")),
    "runtime": (("frontends", "passes", "backends.tvm", "commands", "api"), ("onnx", "onnxruntime", "tvm", "tvm_ffi")),
    "commands.parser": ((*FOLDERS[1:], "api"), HEAVY),
    "": (("frontends", "passes", "backends", "runtime"), HEAVY),
}

# The code generator, which may import tvm, and the reader of torch's programs, which imports torch, have processes of their own below.
_APART = {"backends": ("tvm",), "frontends": ("torch", "huggingface")}


def _modules_of(part: str) -> tuple[str, ...]:
    """All modules of a part by their dotted names; the part itself when it is a single module."""
    if not part:
        return ("penstock",)
    folder = ROOT / "src" / "penstock" / part.replace(".", "/")
    if folder.with_suffix(".py").is_file():
        return (f"penstock.{part}",)
    files = sorted(path.relative_to(folder) for path in folder.rglob("*.py"))
    apart = _APART.get(part, ())
    files = [path for path in files if path.parts[0] not in apart]
    dotted = [".".join((f"penstock.{part}", *path.with_suffix("").parts)).removesuffix(".__init__") for path in files]
    assert dotted, f"no modules in {folder}"
    return tuple(dotted)


@cache
def _imported_by(modules: tuple[str, ...], *, extra_code: str = "") -> list[str]:
    """Names in sys.modules of a fresh process, run outside the checkout, after importing `modules`."""
    code = f"import gc, importlib, json, os, sys\ngc.disable()\n{extra_code}\n"
    code += f"for name in {modules!r}: importlib.import_module(name)\n"
    # Garbage, and taking apart what was imported, would take as long again.
    code += "print(json.dumps(list(sys.modules)), flush=True)\nos._exit(0)"
    environment = {key: value for key, value in os.environ.items() if key != "PYTHONPATH"}
    done = subprocess.run(
        [sys.executable, "-c", code], capture_output=True, text=True, timeout=120, cwd="/", env=environment, check=False
    )
    assert done.returncode == 0, done.stderr
    names: list[str] = json.loads(done.stdout.splitlines()[-1])
    return names


def _offenders(imported: list[str], ours: tuple[str, ...], libraries: tuple[str, ...]) -> list[str]:
    banned = (*(f"penstock.{part}" for part in ours), *libraries)
    return [name for name in imported if _is_below(name, banned)]


@pytest.mark.parametrize("part", UNLOADED, ids=lambda part: part or "penstock")
def test_a_part_loads_no_more_than_it_may(part: str) -> None:
    imported = _imported_by(_modules_of(part))
    assert not _offenders(imported, *UNLOADED[part])
    # A folder imported as a top-level package would be a second copy of every class in it.
    assert not [folder for folder in FOLDERS if folder in imported]


def test_only_the_tvm_backend_loads_tvm() -> None:
    assert "tvm" in _imported_by(_modules_of("backends.tvm"))


def test_only_the_torch_frontend_loads_torch() -> None:
    assert "torch" in _imported_by(_modules_of("frontends.torch"))


def test_the_check_of_what_is_loaded_sees_an_offender() -> None:
    """The control: a part that does load what it must not is found."""
    imported = _imported_by(("penstock.ir.types",), extra_code="import onnx, penstock.passes.manager")
    assert {"onnx", "penstock.passes.manager"} <= set(_offenders(imported, *UNLOADED["ir"]))
