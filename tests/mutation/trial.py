"""Tries mutants against tests. In: files of code with their mutants, and files of tests. Out: for each mutant whether a test noticed it.

Tests are imported once. Each mutant then has a forked process, in which the code of one function is replaced, and which runs the tests that come by
the line of the change, the quickest first, until one fails, but no more than take `budget` seconds as they are. What runs only when the module is
imported is tried otherwise: the process imports the mutated module, and everything that depends on it, before it runs the tests, `budget` seconds of each file.
Seconds of tests are those of the processor.

A mutant is killed if a test fails, or if the process crashes or takes longer than the limit. It survives if every test passes that it is tried with.
Limit: fork copies one thread, so that nothing that starts threads may be imported before.
"""

from __future__ import annotations

import ast
import json
import os
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from importlib.abc import Loader, MetaPathFinder
from importlib.machinery import ModuleSpec
from importlib.util import spec_from_file_location
from itertools import accumulate
from pathlib import Path
from types import CodeType, FunctionType, ModuleType

import coverage
import pytest
from hypothesis import HealthCheck, Phase, settings
from oracles.limits import ANSWERED, HUNG, each

from mutation.mutants import Mutant

ROOT = Path(__file__).resolve().parents[2]
KILLED, SURVIVED, UNSEEN = "killed", "survived", "unseen"
# Limits of a process: many times what it takes, so that a busy machine kills no mutant.
SECONDS_CALLED, SECONDS_IMPORTED, GROWTH = 60.0, 600.0, 4 << 30


@dataclass(frozen=True)
class Target:
    """A file of code, from the root of the repository: its mutants stand in for `module`."""

    path: str

    @property
    def module(self) -> str:
        parts = Path(self.path).with_suffix("").parts
        return ".".join(("penstock", *parts[: -1 if parts[-1] == "__init__" else None]))

    @property
    def file(self) -> str:
        return str(ROOT / self.path)


@dataclass(frozen=True)
class Tests:
    """Files, and which of their tests, by pytest's -k."""

    files: tuple[str, ...]
    chosen: str = ""

    @property
    def words(self) -> list[str]:
        return [*_WORDS, "-k", self.chosen]


@dataclass(frozen=True)
class Verdict:
    """`by` is the test that failed, or how the process ended."""

    target: Target
    mutant: Mutant
    ended: str
    by: str = ""


def try_mutants(
    chosen: Mapping[Target, Sequence[Mutant]],
    tests: Tests,
    budget: float,
    jobs: int,
    tell: Callable[[Verdict], None],
    enough: Callable[[], bool] = lambda: False,
) -> None:
    """`tell` gets each verdict as it comes, until it is `enough`. Raises RuntimeError if a test fails without any mutant."""
    every = [(target, mutant) for target, found in chosen.items() for mutant in found]
    # These first: nothing of Penstock's is imported yet.
    importing = [pair for pair in every if pair[1].during_import]
    if importing:
        same = [(importing[0][0], unchanged(importing[0][0]))]
        wrong = [
            v
            for v in _verdicts(same, lambda pair: _run_imported(*pair, tests, budget), SECONDS_IMPORTED, jobs)
            if v.ended != SURVIVED
        ]
        if wrong:
            raise RuntimeError(f"tests fail without any mutant: {', '.join(f'{v.target.path} {v.by}' for v in wrong)}")
    for verdict in _verdicts(importing, lambda pair: _run_imported(*pair, tests, budget), SECONDS_IMPORTED, jobs):
        tell(verdict)
        if enough():
            return
    called = [pair for pair in every if not pair[1].during_import]
    if not called:
        return

    def drive(session: pytest.Session) -> None:
        for verdict in _try_called(session, called, budget, jobs):
            tell(verdict)
            if enough():
                return

    loop = _Loop(drive)
    _prepare_hypothesis()
    code = pytest.main([*tests.words, *_paths(tests.files)], plugins=[loop])
    if loop.failed or code not in (pytest.ExitCode.OK, pytest.ExitCode.NO_TESTS_COLLECTED):
        raise RuntimeError(f"tests fail without any mutant: {', '.join(loop.failed) or code}")


def unchanged(target: Target) -> Mutant:
    """The control: the file as it is."""
    return Mutant("nothing", "none", "", 0, range(1), True, ast.parse(Path(target.file).read_text(encoding="utf-8")))


# ---------------------------------------------------------------------------------------- one process for each

_WORDS = (
    "-q",
    "-p",
    "no:cacheprovider",
    "-p",
    "no:xdist",
    "-m",
    "not slow",
    "--no-header",
    "--tb=no",
    "--hypothesis-profile",
    "mutation",
    "-W",
    "ignore",
    "--rootdir",
    str(ROOT),
)


def _paths(tests: Sequence[str]) -> list[str]:
    return [str(ROOT / test) for test in tests]


def _verdicts(
    pairs: Sequence[tuple[Target, Mutant]], work: Callable[[tuple[Target, Mutant]], str], seconds: float, jobs: int
) -> Iterator[Verdict]:
    """`work` answers with a verdict and who gave it."""
    for index, outcome in each(work, pairs, seconds=seconds, growth=GROWTH, jobs=jobs):
        if outcome.ended == ANSWERED:
            ended, _, by = outcome.text.partition(" by ")
            yield Verdict(*pairs[index], ended, by)
        else:
            yield Verdict(
                *pairs[index],
                KILLED,
                "the limit of time" if outcome.ended == HUNG else f"{outcome.ended} {outcome.text}",
            )


def _prepare_hypothesis() -> None:
    """The same examples for every mutant; one that fails is enough, however large."""
    phases, checks = (Phase.explicit, Phase.generate), list(HealthCheck)
    settings.register_profile(
        "mutation", phases=phases, suppress_health_check=checks, derandomize=True, deadline=None, database=None
    )


# ---------------------------------------------------------------------------------------- what runs at import


class _Finder(MetaPathFinder, Loader):
    """Imports one module from another source."""

    def __init__(self, target: Target, source: str) -> None:
        self.target, self.source = target, source

    def find_spec(self, name: str, path: object, target: object = None) -> ModuleSpec | None:
        if name != self.target.module:
            return None
        inside = [str(Path(self.target.file).parent)] if self.target.path.endswith("__init__.py") else None
        return spec_from_file_location(name, self.target.file, loader=self, submodule_search_locations=inside)

    def exec_module(self, module: ModuleType) -> None:
        exec(compile(self.source, self.target.file, "exec"), module.__dict__)


class _Enough:
    """A plugin of pytest: ends a run of tests after so many seconds of the processor."""

    def __init__(self, seconds: float) -> None:
        self.end = time.process_time() + seconds

    def pytest_runtest_teardown(self, item: pytest.Item) -> None:
        if time.process_time() > self.end:
            item.session.shouldstop = "long enough"


def _run_imported(target: Target, mutant: Mutant, tests: Tests, budget: float) -> str:
    sys.meta_path.insert(0, _Finder(target, mutant.source))
    _prepare_hypothesis()
    for path in _paths(tests.files):
        loop = _Loop(None)
        code = pytest.main([*tests.words, "-x", path], plugins=[loop, _Enough(budget)])
        if loop.failed or code not in (pytest.ExitCode.OK, pytest.ExitCode.INTERRUPTED):
            return f"{KILLED} by {''.join(loop.failed[:1]) or 'what imports it'}"
    return f"{SURVIVED} by "


# ---------------------------------------------------------------------------------------- what runs when it is called


class _Loop:
    """A plugin of pytest: notes what failed; `drive` does something else with the tests that were collected than to run them."""

    def __init__(self, drive: Callable[[pytest.Session], None] | None) -> None:
        self.drive = drive
        self.failed: list[str] = []

    def pytest_runtestloop(self, session: pytest.Session) -> bool | None:
        if self.drive is None or session.testsfailed:
            return None
        self.drive(session)
        return True

    def pytest_runtest_logreport(self, report: pytest.TestReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)

    def pytest_collectreport(self, report: pytest.CollectReport) -> None:
        if report.failed:
            self.failed.append(report.nodeid)


@dataclass(frozen=True)
class _Passage:
    """How long a test takes, and by which lines of which files it comes."""

    seconds: float
    lines: Mapping[str, set[int]]


def _try_called(
    session: pytest.Session, pairs: Sequence[tuple[Target, Mutant]], budget: float, jobs: int
) -> Iterator[Verdict]:
    passages = _passages(session, sorted({target.file for target, _ in pairs}))
    quickest = sorted(range(len(passages)), key=lambda i: passages[i].seconds)

    def work(pair: tuple[Target, Mutant]) -> str:
        target, mutant = pair
        by = [i for i in quickest if not passages[i].lines.get(target.file, set()).isdisjoint(mutant.span)]
        taken = list(accumulate(passages[i].seconds for i in by))
        items = [session.items[i] for i, seconds in zip(by, taken, strict=True) if seconds <= max(budget, taken[0])]
        if not items:
            return f"{UNSEEN} by "
        _swap(target, mutant)
        return _first_failure(session, items)

    yield from _verdicts(pairs, work, SECONDS_CALLED, jobs)


def _first_failure(session: pytest.Session, items: Sequence[pytest.Item]) -> str:
    seen = _Loop(None)
    session.config.pluginmanager.register(seen)
    for item, following in zip(items, [*items[1:], None], strict=True):
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        if seen.failed:
            return f"{KILLED} by {item.nodeid}"
    return f"{SURVIVED} by "


def _passages(session: pytest.Session, files: Sequence[str]) -> list[_Passage]:
    """Runs all tests once as they are, in a process of their own, which leaves this one as it is."""
    ((_, outcome),) = each(lambda _: _watched(session, files), [None], seconds=1800.0, growth=GROWTH)
    if outcome.ended != ANSWERED:
        raise RuntimeError(f"the tests without any mutant: {outcome.ended} {outcome.text}")
    return [
        _Passage(seconds, {file: set(found) for file, found in lines.items()})
        for seconds, lines in json.loads(outcome.text)
    ]


def _watched(session: pytest.Session, files: Sequence[str]) -> str:
    seen = _Loop(None)
    session.config.pluginmanager.register(seen)
    watch = coverage.Coverage(data_file=None, config_file=False, include=list(files))
    seconds = []
    watch.start()
    for i, (item, following) in enumerate(zip(session.items, [*session.items[1:], None], strict=True)):
        watch.switch_context(str(i))
        began = time.process_time()
        session.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
        seconds.append(time.process_time() - began)
    watch.stop()
    if seen.failed:
        raise RuntimeError(f"tests fail without any mutant: {', '.join(seen.failed)}")
    found: list[dict[str, list[int]]] = [{} for _ in seconds]
    data = watch.get_data()
    for file in files:
        for line, contexts in data.contexts_by_lineno(file).items():
            for context in filter(None, contexts):
                found[int(context)].setdefault(file, []).append(line)
    return json.dumps(list(zip(seconds, found, strict=True)))


def _swap(target: Target, mutant: Mutant) -> None:
    """Give the function that the change is in the code that the mutant has for it: whoever has got hold of the function runs it."""
    holder: object = sys.modules[target.module]
    names: list[str] = []
    for name in mutant.function.split("."):
        holder, names = vars(holder)[name], [*names, name]
        holder = (
            getattr(holder, "fget", None)
            or getattr(holder, "__func__", None)
            or getattr(holder, "func", None)
            or holder
        )
        if isinstance(holder, FunctionType):
            break
    assert isinstance(holder, FunctionType), mutant.name
    codes = {code.co_qualname: code for code in _codes(compile(mutant.source, target.file, "exec"))}
    holder.__code__ = codes[".".join(names)]


def _codes(code: CodeType) -> Iterator[CodeType]:
    for constant in code.co_consts:
        if isinstance(constant, CodeType):
            yield constant
            yield from _codes(constant)


def preload() -> None:
    """What every process would import anew. None of it starts threads."""
    os.environ.setdefault("OMP_NUM_THREADS", "1")
    for name in ("numpy", "networkx", "ml_dtypes", "onnx", "tvm", "torch"):
        __import__(name)
