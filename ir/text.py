"""The text form of a module: printer and parser, side by side.

One operation per line, so that every error has a line number and `diff` works.

    module    = "module @" name [" facts(" name {", " name} ")"] " {" {line} "}"
    line      = links | host | space | device | link | way | mesh | stage | rank | input | output | batch | bound \
| var | edge | graph | schedule | note                             links to way: see ir/cluster/lines.py
    mesh      = "mesh @" name " (" axis "=" size {", " axis "=" size} ") " device {" " device}
    stage     = "stage " index " on " place [" saves to " space]
    rank      = "rank " number " on " device " runs" {" " index}   of every rank, where ranks run several stages
    input     = "input " value                             value  = "%" name " : " type
    output    = "output %" name
    batch     = "batch %" name " " (dimension | "whole")   where its samples lie, if not along the first dimension
    bound     = "bound " name " " size [" rows"] " : %" name "[" dimension "]" {", %" name "[" dimension "]"}
    var       = "var @" name " : " type [" stage " index] " " role [" versions " n] [" policy " name] \
[" init " (name | numbers)] [" from @" name " as " name] [" home " space [" chunk " number]]
    edge      = "edge " src ">" dst " " phase " : " value [" to " type] {", " value [" to " type]}
    graph     = "graph @" name "(" [value {", " value}] ") {" {op} ["save " names] "return" [" " names] "}"
    op        = [value {", " value} " = "] kind "(" [argument {", " argument}] ")" [" ; " loc]
    argument  = "%" name | "@" name | key "=" literal      "@" name is the attribute `var`
    numbers   = "[" float {"," float} "]"                  the elements in order
    literal   = "true" | "false" | integer | float | word | JSON string | "[" [literal {"," literal}] "]"
    schedule  = "schedule " name " microbatches " n " {" {"rank " r " start:" {" " action}  \
"rank " r " batch:" {" " action}} "}"
    note      = "note " origin ": " text                   text and loc have no control characters
    name      = letters, digits and _ . / : -              type   = see ir/types.py       action = see ir/schedule.py

A module is printed in the order of this list. The parser skips indentation, blank lines, and lines after `//`.
`print_module(parse_module(t)) == t` for every printed t. Variables name weights; elements of tables are written out.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import NoReturn, TypeVar

from penstock.ir.cluster.lines import ClusterLines, cluster_lines
from penstock.support.errors import ParseError
from penstock.support.gc_pause import nothing_collected
from penstock.support.words import visible

from .attrs import Attr, parse_literal, print_literal, split_items
from .graph import FORMER_ROLES, ROLES, Edge, Graph, Mesh, Module, Note, Op, Stage, Value, Var
from .ladder.bounds import Bounded, parse_bounded
from .schedule import Action, Program, Schedule
from .sharding.between_meshes import arriving_values
from .types import TYPE_PATTERN, parse_type

NAME = r"[\w./:\-]+"
T = TypeVar("T")


def print_op(op: Op) -> str:
    """Return the line of an operation. It is made once, as modules between passes share most operations."""
    if op.line is None:
        object.__setattr__(op, "line", _line(op))
    assert op.line is not None
    return op.line


def _line(op: Op) -> str:
    args = ["%" + v.name for v in op.ins]
    for name, value in op.attrs.items():
        args.append(f"@{value}" if name == "var" else f"{name}={print_literal(value)}")
    call = f"{op.kind}({', '.join(args)}) ; {op.loc}" if op.loc else f"{op.kind}({', '.join(args)})"
    if len(op.outs) == 1:
        return f"%{op.outs[0].name} : {op.outs[0].type} = {call}"
    return f"{', '.join(map(repr, op.outs))} = {call}" if op.outs else call


def _names(values: Iterable[Value]) -> str:
    return ", ".join("%" + v.name for v in values)


def print_graph(graph: Graph) -> str:
    """Return the lines of one graph, indented as inside a module."""
    first, *last = print_frame(graph)
    ops = "\n    ".join([first, *[op.line or print_op(op) for op in graph.ops]])
    return "\n".join([ops, *last, "  }"])


def print_frame(graph: Graph) -> Iterator[str]:
    """Yield the lines around the operations of a graph, but for the brace that closes it."""
    yield f"  graph @{graph.name}({', '.join(map(repr, graph.ins))}) {{"
    if graph.saved:
        yield f"    save {_names(graph.saved)}"
    yield f"    return {_names(graph.outs)}" if graph.outs else "    return"


def print_schedule(schedule: Schedule) -> Iterator[str]:
    yield f"  schedule {schedule.name} microbatches {schedule.microbatches} {{"
    for rank, program in schedule.ranks.items():
        for part, actions in (("start", program.start), ("batch", program.batch)):
            yield f"    rank {rank} {part}:" + "".join(f" {a}" for a in actions)
    yield "  }"


def print_var(var: Var) -> str:
    text = f"var @{var.name} : {var.type}"
    if var.stage is not None:
        text += f" stage {var.stage}"
    text += f" {var.role}"
    if var.versions != 1:
        text += f" versions {var.versions}"
    if var.policy:
        text += f" policy {var.policy}"
    if var.init != "file":
        text += f" init {print_literal(var.init) if isinstance(var.init, tuple) else var.init}"
    text += f" from @{var.source} as {var.form}" if var.source else ""
    text += f" home {var.home}" if var.home else ""
    return text if var.chunk is None else f"{text} chunk {var.chunk}"


def print_head(module: Module, variables: Iterable[str] = ()) -> Iterator[str]:
    """Yield the lines above the graphs, with those of variables as the caller passes them."""
    facts = f" facts({', '.join(module.facts)})" if module.facts else ""
    yield f"module @{module.name}{facts} {{"
    if module.cluster is not None:
        for line in cluster_lines(module.cluster):
            yield f"  {line}"
    for mesh in module.meshes:
        yield f"  mesh @{mesh.name} ({', '.join(f'{a}={n}' for a, n in mesh.axes)}) {' '.join(mesh.devices)}"
    for stage in module.stages:
        yield f"  stage {stage.index} on {stage.place}" + (f" saves to {stage.home}" if stage.home else "")
    for rank, (stages, device) in enumerate(zip(module.packs, module.rank_devices(), strict=False)):
        yield f"  rank {rank} on {device} runs {' '.join(map(str, stages))}"
    for value in module.inputs:
        yield f"  input {value!r}"
    for name in module.outputs:
        yield f"  output %{name}"
    for name, axis in module.batch.items():
        yield f"  batch %{name} {'whole' if axis is None else axis}"
    for bound in module.bounds:
        yield f"  {bound}"
    yield from variables
    for edge in module.edges:
        whole = edge.to == tuple(value.type for value in edge.values)
        listed = [
            repr(v) if v == arrived and not whole else f"{v!r} to {arrived.type}"
            for v, arrived in zip(edge.values, arriving_values(edge), strict=True)
        ]
        yield f"  edge {edge.src}>{edge.dst} {edge.phase} : {', '.join(listed)}"


class Printer:
    """A printer of modules that have much in common: it prints every graph and variable once."""

    def __init__(self) -> None:
        # The cache holds the object beside its text, so that no other object gets its address.
        self._known: dict[int, tuple[object, str]] = {}

    def print(self, module: Module) -> str:
        variables = [self._once(module.vars, self._variables)] if module.vars else []
        lines = [*print_head(module, variables), *[self._once(graph, print_graph) for graph in module.graphs.values()]]
        if module.schedule is not None:
            lines += print_schedule(module.schedule)
        lines += [f"  note {note.origin}: {note.text}" for note in module.notes]
        return "\n".join([*lines, "}"]) + "\n"

    def _variables(self, variables: Mapping[str, Var]) -> str:
        return "\n".join([f"  {self._once(var, print_var)}" for var in variables.values()])

    def _once(self, what: T, text_of: Callable[[T], str]) -> str:
        if (known := self._known.get(id(what))) is None:
            known = self._known[id(what)] = what, text_of(what)
        return known[1]


def print_module(module: Module) -> str:
    return Printer().print(module)


_VALUE = re.compile(rf"%({NAME}) : ({TYPE_PATTERN})")
_TRAVELLING = re.compile(rf"%({NAME}) : ({TYPE_PATTERN})(?: to ({TYPE_PATTERN}))?")
# Control characters of terminals, but for tabs and ends of lines. The printer writes them as escapes, in strings.
_CONTROL = re.compile(r"[\x00-\x08\x0b-\x1f\x7f-\x9f]")
_CALL = re.compile(r'(?:(%.*?) = )?(\w+)\(([^")]*(?:"(?:[^"\\]|\\.)*"[^")]*)*)\)(?: ; (.*))?')
_MODULE = re.compile(rf"module @({NAME})(?: facts\(([\w\-, ]*)\))? \{{")
_GRAPH = re.compile(rf"graph @({NAME})\((.*)\) \{{")
_VAR = re.compile(
    rf"var @({NAME}) : (\S+)(?: stage (\d+))? ({'|'.join((*ROLES, *FORMER_ROLES))})(?: versions (\d+))?"
    rf"(?: policy ({NAME}))?(?: init ({NAME}|\[.*\]))?(?: from @({NAME}) as ({NAME}))?"
    rf"(?: home ({NAME})(?: chunk (\d+))?)?"
)
_MESH = re.compile(rf"mesh @({NAME}) \(([^)]*)\) (.+)")
_STAGE = re.compile(rf"stage (\d+) on ({NAME})(?: saves to ({NAME}))?")
_PACK = re.compile(rf"rank (\d+) on ({NAME}) runs((?: \d+)+)")
_OUTPUT = re.compile(rf"output %({NAME})")
_BATCH = re.compile(rf"batch %({NAME}) (\d{{1,9}}|whole)")
_EDGE = re.compile(r"edge (\d+)>(\d+) ([FBPNU]) : (.*)")
_SCHEDULE = re.compile(rf"schedule ({NAME}) microbatches (\d+) \{{")
_RANK = re.compile(r"rank (\d+) (start|batch):(.*)")
_NOTE = re.compile(rf"note ({NAME}): (.*)")


def _parse_init(text: str) -> str | tuple[float, ...]:
    first = parse_literal(text) if text.startswith("[") else text
    if isinstance(first, tuple) and any(type(x) not in (int, float) for x in first):
        raise ValueError(f"a variable begins with numbers, got {text}")
    return tuple(map(float, first)) if isinstance(first, tuple) else text


def _listed(pattern: re.Pattern[str], text: str, expected: str) -> Iterator[re.Match[str]]:
    """Yield the matches of a pattern in a list with commas."""
    at = 0
    while at < len(text):
        match = pattern.match(text, at)
        if match is None:
            raise ValueError(f"cannot read {text[at:]!r}, expected {expected!r}")
        yield match
        at = match.end()
        if at < len(text):
            if not text.startswith(", ", at):
                raise ValueError(f"cannot read {text[at:]!r}, expected ', '")
            at += 2


def _parse_values(text: str) -> tuple[Value, ...]:
    return tuple(Value(match[1], parse_type(match[2])) for match in _listed(_VALUE, text, "%name : type"))


def _parse_edge(ends: re.Match[str]) -> Edge:
    matches = list(_listed(_TRAVELLING, ends[4], "%name : type [to type]"))
    values = tuple(Value(match[1], parse_type(match[2])) for match in matches)
    to = tuple(parse_type(match[3] or match[2]) for match in matches) if any(match[3] for match in matches) else ()
    return Edge(int(ends[1]), int(ends[2]), ends[3], values, to)


class _GraphParser:
    """The parser of the lines between `graph … {` and `}`."""

    def __init__(self, name: str, ins: tuple[Value, ...]) -> None:
        self.name, self.ins = name, ins
        self.env: dict[str, Value] = {}
        self.ops: list[Op] = []
        self.saved: tuple[Value, ...] = ()
        self.outs: tuple[Value, ...] | None = None
        self._define(ins)

    def _define(self, values: tuple[Value, ...]) -> None:
        for value in values:
            if value.name in self.env:
                raise ValueError(f"%{value.name} is defined twice")
            self.env[value.name] = value

    def _use(self, text: str) -> Value:
        value = self.env.get(text[1:]) if text.startswith("%") else None
        if value is None:
            raise ValueError(f"{text} is not defined above this line")
        return value

    def read(self, line: str) -> None:
        if self.outs is not None:
            raise ValueError("expected '}' after return")
        if line == "return" or line.startswith("return "):
            self.outs = tuple(self._use(t) for t in line[7:].split(", ") if t)
        elif line.startswith("save "):
            self.saved = tuple(self._use(t) for t in line[5:].split(", "))
        else:
            self.ops.append(self._op(line))

    def _op(self, line: str) -> Op:
        match = _CALL.fullmatch(line)
        if match is None:
            raise ValueError("expected '%name : type = op(...)', 'op(...)', 'save ...' or 'return ...'")
        results, kind, arguments, loc = match.groups()
        ins: list[Value] = []
        attrs: dict[str, Attr] = {}
        simple = '"' not in arguments and "[" not in arguments
        for text in arguments.split(", ") if simple and arguments else split_items(arguments):
            if text[0] == "%":
                ins.append(self._use(text))
            elif text[0] == "@":
                attrs["var"] = text[1:]
            else:
                key, equals, value = text.partition("=")
                if not equals or not key.isidentifier():
                    raise ValueError(f"bad argument {text!r}, expected %value, @variable or name=literal")
                if key in attrs:
                    raise ValueError(f"attribute {key} is given twice")
                attrs[key] = parse_literal(value)
        outs = _parse_values(results) if results else ()
        self._define(outs)
        return Op(kind, tuple(ins), outs, attrs, loc or "")

    def finish(self) -> Graph:
        if self.outs is None:
            raise ValueError(f"graph @{self.name} ends without return")
        return Graph(self.name, self.ins, self.outs, tuple(self.ops), self.saved)


class _ModuleParser:
    """The parser of modules, a state machine over lines: inside nothing, the module, a graph, or the schedule."""

    def __init__(self) -> None:
        self.name: str | None = None
        self.closed = False
        self.facts: tuple[str, ...] = ()
        self.cluster = ClusterLines()
        self.meshes: list[Mesh] = []
        self.stages: list[Stage] = []
        self.packs: list[tuple[int, ...]] = []
        self.inputs: list[Value] = []
        self.outputs: list[str] = []
        self.bounds: list[Bounded] = []
        self.vars: dict[str, Var] = {}
        self.edges: list[Edge] = []
        self.graphs: dict[str, Graph] = {}
        self.graph: _GraphParser | None = None
        self.schedule: Schedule | None = None
        self.programs: dict[int, dict[str, tuple[Action, ...]]] | None = None
        self.notes: list[Note] = []
        self.batch: dict[str, int | None] = {}
        self.rules: dict[str, Callable[[str], None]] = {
            **self.cluster.rules, "mesh": self._mesh,
            "stage": self._stage, "rank": self._pack, "input": self._input, "output": self._output,
            "batch": self._batch, "bound": self._bound,
            "var": self._var, "edge": self._edge, "graph": self._graph, "schedule": self._schedule, "note": self._note,
        }  # fmt: skip

    def read(self, line: str) -> None:
        if self.graph is not None:
            if line != "}":
                self.graph.read(line)
                return
            graph = self.graph.finish()
            self.graphs[graph.name], self.graph = graph, None
        elif self.programs is not None:
            self._rank(line)
        elif self.name is None:
            match = _fullmatch(_MODULE, line, "module @name [facts(...)] {")
            self.name, self.facts = match[1], tuple(f for f in (match[2] or "").split(", ") if f)
        elif self.closed:
            raise ValueError("there is text after the end of the module")
        elif line == "}":
            self.closed = True
        else:
            keyword = line.split(" ", 1)[0]
            if keyword not in self.rules:
                raise ValueError(f"expected one of {', '.join(self.rules)} or '}}'")
            self.rules[keyword](line)

    def _mesh(self, line: str) -> None:
        match = _fullmatch(_MESH, line, "mesh @name (axis=size, ...) device ...")
        axes = [part.split("=") for part in match[2].split(", ")]
        self.meshes.append(Mesh(match[1], tuple((a, int(n)) for a, n in axes), tuple(match[3].split(" "))))

    def _stage(self, line: str) -> None:
        match = _fullmatch(_STAGE, line, "stage INDEX on DEVICE [saves to SPACE]")
        self.stages.append(Stage(int(match[1]), match[2], match[3] or ""))

    def _pack(self, line: str) -> None:
        number, device, stages = _fullmatch(_PACK, line, "rank NUMBER on DEVICE runs STAGE ...").groups()
        meshes = {mesh.name: mesh.devices for mesh in self.meshes}
        places = {str(stage.index): meshes.get(stage.place, (stage.place,)) for stage in self.stages}
        pack = tuple(map(int, stages.split()))
        # The ranks of a pack come in the order of its devices.
        at = slice(self.packs.count(pack), self.packs.count(pack) + 1)
        if int(number) != len(self.packs) or any(places.get(stage, ())[at] != (device,) for stage in stages.split()):
            raise ValueError(f"expected rank {len(self.packs)}, and stages whose next device is {device}")
        self.packs.append(pack)

    def _input(self, line: str) -> None:
        self.inputs += _parse_values(line[6:])

    def _output(self, line: str) -> None:
        self.outputs.append(_fullmatch(_OUTPUT, line, "output %name")[1])

    def _batch(self, line: str) -> None:
        name, axis = _fullmatch(_BATCH, line, "batch %name DIMENSION|whole").groups()
        self.batch[name] = None if axis == "whole" else int(axis)

    def _bound(self, line: str) -> None:
        self.bounds.append(parse_bounded(line))

    def _var(self, line: str) -> None:
        match = _fullmatch(
            _VAR,
            line,
            f"var @name : type [stage N] {'|'.join(ROLES)} [versions N] [policy NAME] [init ...] [from @name as FORM] "
            "[home SPACE [chunk N]]",
        )
        name, type_text, stage, role, versions, policy, init, source, form, home, chunk = match.groups()
        if name in self.vars:
            raise ValueError(f"@{name} is declared twice")
        self.vars[name] = Var(
            name,
            parse_type(type_text),
            FORMER_ROLES.get(role, role),
            None if stage is None else int(stage),
            int(versions or 1),
            policy or "",
            _parse_init(init or "file"),
            *(source or "", form or "", home or ""),
            None if chunk is None else int(chunk),
        )

    def _edge(self, line: str) -> None:
        self.edges.append(_parse_edge(_fullmatch(_EDGE, line, "edge SRC>DST F|B : %name : type [to type], ...")))

    def _graph(self, line: str) -> None:
        match = _fullmatch(_GRAPH, line, "graph @name(%name : type, ...) {")
        if match[1] in self.graphs:
            raise ValueError(f"graph @{match[1]} is defined twice")
        self.graph = _GraphParser(match[1], _parse_values(match[2]))

    def _schedule(self, line: str) -> None:
        match = _fullmatch(_SCHEDULE, line, "schedule NAME microbatches N {")
        if self.schedule is not None:
            raise ValueError("there are two schedules")
        self.schedule, self.programs = Schedule(match[1], int(match[2])), {}

    def _rank(self, line: str) -> None:
        assert self.schedule is not None
        assert self.programs is not None
        if line == "}":
            ranks = {r: Program(parts.get("start", ()), parts.get("batch", ())) for r, parts in self.programs.items()}
            self.schedule, self.programs = Schedule(self.schedule.name, self.schedule.microbatches, ranks), None
            return
        match = _fullmatch(_RANK, line, "rank R start|batch: action ...")
        parts = self.programs.setdefault(int(match[1]), {})
        if match[2] in parts:
            raise ValueError(f"rank {match[1]} has two '{match[2]}' lines")
        parts[match[2]] = tuple(Action.parse(a) for a in match[3].split())

    def _note(self, line: str) -> None:
        match = _fullmatch(_NOTE, line, "note ORIGIN: text")
        self.notes.append(Note(match[1], match[2]))

    def finish(self) -> Module:
        if not self.closed or self.name is None:
            raise ValueError("the text ends before the module does, expected '}'")
        cluster = self.cluster.cluster()
        return Module(
            self.name, tuple(self.inputs), tuple(self.outputs), cluster, tuple(self.meshes), tuple(self.stages),
            self.vars, self.graphs, tuple(self.edges), self.schedule, self.facts, tuple(self.notes), self.batch,
            tuple(self.bounds), tuple(self.packs),
        )  # fmt: skip


def _fullmatch(pattern: re.Pattern[str], line: str, expected: str) -> re.Match[str]:
    match = pattern.fullmatch(line)
    if match is None:
        raise ValueError(f"expected '{expected}'")
    return match


def parse_module(text: str, path: str = "<text>") -> Module:
    """Return the module that prints as `text`. A ParseError names file and line, and shows the line."""
    with nothing_collected():
        return _parsed(text, path)


def _parsed(text: str, path: str) -> Module:
    parser = _ModuleParser()
    lines = text.split("\n")
    strange = _CONTROL.search(text) is not None
    for number, raw in enumerate(lines, 1):
        line = raw.strip()
        if not line or line.startswith("//"):
            continue
        try:
            if strange and (control := _CONTROL.search(line)):
                raise ValueError(f"there is the control character {visible(control[0])} in the line")
            parser.read(line)
        except ValueError as error:
            _fail(path, number, lines, str(error))
    try:
        return parser.finish()
    except ValueError as error:
        _fail(path, len(lines), lines, str(error))


def _fail(path: str, number: int, lines: list[str], message: str) -> NoReturn:
    first = max(1, number - 2)
    shown = [
        f"  {'>' if n == number else ' '} {n:5d} | {visible(lines[n - 1][:300])}"
        for n in range(first, min(number + 1, len(lines)) + 1)
    ]
    raise ParseError("\n".join([visible(message), *shown]), where=f"{path}:{number}")
