"""The processes that compile kernels: their bytes, their ends, and that none is left. The oracles are bytes and process tables."""

from __future__ import annotations

import importlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from penstock.backends.interface import CompileOptions
from penstock.backends.tvm import fingerprint
from penstock.backends.tvm.compile import pool
from penstock.backends.tvm.compile.build import build_graphs
from penstock.backends.tvm.compile.pool import BuildError, WorkerPool
from penstock.backends.tvm.group import Fusion, rename
from penstock.backends.tvm.kernels.tools import elements
from penstock.backends.tvm.messages import GroupRefused, KernelMade, MakeKernel
from penstock.commands.parser import main
from penstock.support.cache import Cache
from penstock.support.errors import UnsupportedModel, UsageError

from ..cases import chain

BOUND_S = 60.0


def job(kind: str, folder: Path) -> MakeKernel:
    graph = chain("s0.F", kind)
    return MakeKernel(rename(Fusion(graph.ops, graph.outs)).text, "host", f"{kind}_0", str(folder / f"{kind}.o"))


def alive(pid: int) -> bool:
    """Whether a process is there and no zombie."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False


def wait_until(what: Callable[[], object]) -> None:
    end = time.monotonic() + BOUND_S
    while not what():
        assert time.monotonic() < end, "it did not happen in time"
        time.sleep(0.02)


@pytest.fixture
def workers(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[pool._Worker]]:
    """All workers that the test starts, on a machine of two cores; none may be left at its end."""
    monkeypatch.setattr(pool, "usable_cores", lambda: 2)
    importlib.import_module("tvm")  # where it is loaded, few jobs are done in this process
    started: list[pool._Worker] = []
    begin = pool._Worker.__init__

    def record(self: pool._Worker, command: Sequence[str]) -> None:
        begin(self, command)
        started.append(self)

    monkeypatch.setattr(pool._Worker, "__init__", record)
    yield started
    assert not [worker.process.pid for worker in started if alive(worker.process.pid)]


def test_workers_make_the_bytes_that_this_process_makes(workers: list[Any], tmp_path: Path) -> None:
    kinds = ("exp", "tanh", "sqrt", "sigmoid", "erf", "relu")
    with WorkerPool() as here:
        here.run([job(kind, tmp_path) for kind in kinds[:2]])
    assert not workers
    (tmp_path / "apart").mkdir()
    done: list[str] = []
    with WorkerPool() as shared:
        answers = shared.run([job(kind, tmp_path / "apart") for kind in kinds], lambda job: done.append(job.symbol))  # type: ignore[union-attr]
    assert workers
    assert all(isinstance(answer, KernelMade) for answer in answers)
    assert sorted(done) == sorted(f"{kind}_0" for kind in kinds)
    for kind in kinds[:2]:
        assert (tmp_path / f"{kind}.o").read_bytes() == (tmp_path / "apart" / f"{kind}.o").read_bytes()


def test_one_core_means_at_most_one_process(
    workers: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(pool, "usable_cores", lambda: 1)
    with WorkerPool() as alone:
        assert alone.most == 1
        alone.run([job(kind, tmp_path) for kind in ("exp", "tanh", "sqrt", "sigmoid", "erf")])
    assert not workers
    with pytest.raises(UsageError, match="0 compiler processes"):
        WorkerPool(0)


SAY_HELLO = "import json,sys; print(json.dumps({'type':'CompilerHello','fingerprint':sys.argv[1]}),flush=True);"


@pytest.mark.parametrize(
    ("does", "says"),
    [
        ("sys.stdin.readline(); sys.exit(3)", "ended with exit code 3 on kernel exp"),
        ("import os; sys.stdin.readline(); os.kill(os.getpid(), 9)", "was ended by SIGKILL on kernel exp"),
        (
            "import os; sys.stdin.readline(); os.write(1, b'{'); os.close(1); sys.stdin.read()",
            "closed its output on kernel exp",
        ),
    ],
)
def test_a_worker_that_dies_is_one_clear_error(
    does: str, says: str, workers: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    command = [sys.executable, "-c", SAY_HELLO + does, fingerprint.source_fingerprint()]
    monkeypatch.setattr(pool, "usable_cores", lambda: 3)
    monkeypatch.setattr(pool, "_LAST_WORDS_S", 0.2)
    with WorkerPool(command=command) as crew, pytest.raises(BuildError, match=says):
        crew.run([job("exp", tmp_path)] * 12)
    assert len(workers) == 3


@pytest.mark.parametrize(
    ("patience", "does", "says"),
    [
        ("_COMPILES_S", "sys.stdin.readline(); time.sleep(600)", "on kernel exp, and was ended"),
        ("_COMPILES_S", "sys.stdin.readline(); os.write(1, b'{'); time.sleep(600)", "on kernel exp, and was ended"),
        ("_STARTS_S", "", "as it started, and was ended"),
    ],
)
def test_a_worker_that_hangs_is_ended(
    patience: str, does: str, says: str, workers: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    code = "import os,time;" + (SAY_HELLO + does if does else "time.sleep(600)")
    monkeypatch.setattr(pool, patience, 0.3)
    with (
        WorkerPool(command=[sys.executable, "-c", code, fingerprint.source_fingerprint()]) as crew,
        pytest.raises(BuildError, match=says),
    ):
        crew.run([job("exp", tmp_path)] * 12)
    assert len(workers) == 2


def test_control_patience_is_for_each_job(workers: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two workers take longer for all jobs than they may for one."""
    answer = json.dumps({"type": "GroupRefused", "reason": "slowly"})
    code = f"import time; {SAY_HELLO}\nfor line in sys.stdin: time.sleep(0.4); print({answer!r}, flush=True)"
    monkeypatch.setattr(pool, "_COMPILES_S", 3.0)
    with WorkerPool(command=[sys.executable, "-c", code, fingerprint.source_fingerprint()]) as crew:
        answers = crew.run([job("exp", tmp_path)] * 16)
    assert answers == [GroupRefused("slowly")] * 16


def test_what_a_hung_worker_started_is_ended_with_it(
    workers: list[Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    file = tmp_path / "pid"
    code = f"import subprocess,time; {SAY_HELLO} open({str(file)!r}, 'a').write(f'{{subprocess.Popen([\"sleep\", \"600\"]).pid}} '); time.sleep(600)"
    monkeypatch.setattr(pool, "_COMPILES_S", 1.0)
    with (
        WorkerPool(command=[sys.executable, "-c", code, fingerprint.source_fingerprint()]) as crew,
        pytest.raises(BuildError, match="kernel exp"),
    ):
        crew.run([job("exp", tmp_path)] * 12)
    wait_until(lambda: not any(alive(int(word)) for word in file.read_text().split()))
    assert file.read_text()


def test_a_worker_of_other_sources_is_refused(workers: list[Any], tmp_path: Path) -> None:
    command = [sys.executable, "-c", SAY_HELLO + "sys.stdin.read()", "other sources"]
    with WorkerPool(command=command) as crew, pytest.raises(BuildError, match="sources of the compiler changed"):
        crew.run([job("exp", tmp_path)] * 12)
    with (
        WorkerPool(command=[sys.executable, "-c", "raise SystemExit(1)"]) as crew,
        pytest.raises(BuildError, match="exit code 1 as it started"),
    ):
        crew.run([job("exp", tmp_path)] * 12)


def test_our_own_mistakes_come_with_their_place(workers: list[Any], tmp_path: Path) -> None:
    wrong = MakeKernel("module @m {\n  graph @k() {\n    return\n  }\n}", "host", "nothing_0", str(tmp_path / "k.o"))
    with WorkerPool() as crew, pytest.raises(AssertionError, match=r"kernel nothing.*Traceback"):
        crew.run([wrong])


def test_a_rule_that_makes_no_kernel_is_told_by_its_operation(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Whether it fails by itself or where its result is used, for who compiles and for who asks what there is. Without one the operation is not supported."""
    monkeypatch.setenv("PENSTOCK_CACHE", str(tmp_path / "cache"))  # refusals are kept
    assert main(["ops", "exp"]) == 0
    assert "kernels for CPUs: a rule, and on a small example it gave a kernel\n" in capsys.readouterr().out, (
        "the control"
    )
    for rule, told in (
        (lambda f, a, x: x.nothing, "AttributeError"),
        (lambda f, a, x: f.larger(x, "1"), ""),
        (lambda f, a, x: (x, x), "ValueError"),
    ):
        monkeypatch.setitem(elements.POINTWISE, "exp", rule)
        with (
            WorkerPool() as crew,
            pytest.raises(
                BuildError, match=rf"^kernel exp: no kernel can be made of exp: {told}.* \(backends/tvm/\S+:\d+\)\n"
            ) as caught,
        ):
            crew.run([job("exp", tmp_path)])
        assert "Traceback" in str(caught.value.__cause__)
        assert main(["ops", "exp"]) == 0
        assert "kernels for CPUs: no: no kernel can be made of exp: " in capsys.readouterr().out
    monkeypatch.delitem(elements.POINTWISE, "exp")
    with pytest.raises(
        UnsupportedModel,
        match=r"there is no kernel for exp of f32\[.*\] that gives f32\[.*\]: exp is not an elementwise",
    ) as refused:
        build_graphs((chain("s0.F", "exp"),), tmp_path / "s0.so", CompileOptions(jobs=1))
    assert "`penstock ops exp`" in refused.value.hint


def children_of(pid: int) -> list[int]:
    return [int(word) for word in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


COMPILE = """
import sys
from pathlib import Path
from penstock.backends.interface import CompileOptions
from penstock.backends.tvm.compile.build import build_graphs
from penstock.ir.text import parse_module
graphs = tuple(parse_module(Path(sys.argv[1]).read_text()).graphs.values())
try:
    print(build_graphs(graphs, Path(sys.argv[2]), CompileOptions()).sha256)
except KeyboardInterrupt:
    sys.exit(130)
"""


def compile_apart(source: Path, out: Path) -> subprocess.Popen[str]:
    return subprocess.Popen([sys.executable, "-c", COMPILE, str(source), str(out)], stdout=subprocess.PIPE, text=True)


def many_kernels(folder: Path, graphs: int = 6) -> Path:
    from penstock.backends.tvm.group import module_text

    kinds = ("exp", "tanh", "sqrt", "sigmoid", "erf", "relu", "log", "neg")
    path = folder / "many.ir"
    path.write_text(module_text([chain(f"s0.g{n}", *kinds, type=f"f32[{n},96]") for n in range(3, 3 + graphs)]))
    return path


@pytest.mark.parametrize(
    ("number", "code"),
    [
        (signal.SIGINT, 130),
        pytest.param(signal.SIGTERM, -signal.SIGTERM, marks=pytest.mark.slow),
        (signal.SIGKILL, -signal.SIGKILL),
    ],
)
def test_an_interrupted_compile_leaves_no_process(number: int, code: int, kept: Path, tmp_path: Path) -> None:
    """By the interrupt key, and by signals that leave no time for anything: then workers see the end of their input."""
    compiler = compile_apart(many_kernels(tmp_path), tmp_path / "a.so")
    found: list[int] = []
    try:
        wait_until(lambda: kept.is_dir() and children_of(compiler.pid))
        found = children_of(compiler.pid)
        compiler.send_signal(number)
        assert compiler.wait(BOUND_S) == code
        wait_until(lambda: not any(map(alive, found)))
    finally:
        for pid in (compiler.pid, *found):
            if alive(pid):
                os.kill(pid, signal.SIGKILL)
        compiler.communicate()
    assert not (tmp_path / "a.so").exists()


def test_two_processes_may_compile_at_once(kept: Path, tmp_path: Path) -> None:
    source = many_kernels(tmp_path, 1)
    compilers = [compile_apart(source, tmp_path / f"{i}.so") for i in range(2)]
    said = [compiler.communicate(timeout=BOUND_S)[0] for compiler in compilers]
    assert [compiler.returncode for compiler in compilers] == [0, 0]
    assert said[0] == said[1]
    assert not [path for path in kept.iterdir() if path.suffix == ".part"]
    for path in kept.iterdir():
        assert Cache(kept.parent, part="tvm").get(path.name) is not None


def test_threads_get_what_they_would_get_alone(tmp_path: Path) -> None:
    """TVM's block builder has one stack per process: building side by side must not mix stages up."""
    graphs = [chain(f"s{i}.F", "softmax" if i % 2 else "tanh", axis=1) for i in range(4)]
    alone = [build_graphs([g], tmp_path / f"alone{i}.so").sha256 for i, g in enumerate(graphs)]
    with ThreadPoolExecutor(4) as threads:
        together = list(threads.map(lambda i: build_graphs([graphs[i]], tmp_path / f"together{i}.so").sha256, range(4)))
    assert together == alone
    assert len(set(alone)) == 4
