"""Tests of calls from threads that stay: results and errors come back, threads are used again, callers that come and go
leave no threads of TVM behind, and a forked process computes."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import threading
import time
from pathlib import Path

import pytest

import penstock as ps
from penstock.backends.tvm.run.callers import LastingThread, call_from_lasting_thread
from penstock.models import write_mlp

# Threads of the process after each of several rounds of callers that end: of the model, then of its inner function.
COUNTED = """
import faulthandler, json, os, sys, threading, time

faulthandler.dump_traceback_later(250, exit=True)
import numpy as np
import penstock as ps

model = ps.load(sys.argv[1])
x = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
expected = model(x)["y"]

def threads(ask):
    def same():
        wrong.extend([] if np.array_equal(ask(), expected) else [1])
    found, wrong = [], []
    for _ in range(3):
        for _ in range(5):
            caller = threading.Thread(target=same)
            caller.start()
            caller.join()
        time.sleep(0.2)  # threads that have ended go a moment later
        found.append(len(os.listdir("/proc/self/task")))
    return found, len(wrong)

lasting = threads(lambda: model(x)["y"])
model._call, model._call_arrays = model._call.args[0], model._call_arrays.args[0]
print(json.dumps([lasting, threads(lambda: model(x)["y"])]))
"""

# A process whose main thread has helpers, and a fork of it, which does not have them.
FORKED = """
import os, signal, sys

import numpy as np
import penstock as ps

model = ps.load(sys.argv[1])
x = np.random.default_rng(0).standard_normal((64, 512)).astype(np.float32)
expected = model(x)["y"]
child = os.fork()
if child == 0:
    signal.alarm(50)
    os._exit(0 if np.array_equal(model(x)["y"], expected) else 3)
assert np.array_equal(model(x)["y"], expected)
sys.exit(os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]))
"""


def two_threads(folder: Path) -> Path:
    path = write_mlp(folder / "m.onnx", [512, 1024, 512], batch=64)
    plan = ps.plan(ps.from_onnx(path), ps.Cluster.local(1, threads=[2]))
    return ps.compile(plan, folder / "bundle", jobs=1)


def test_results_and_errors_come_back() -> None:
    assert call_from_lasting_thread(divmod, 7, 3) == (2, 1)
    with pytest.raises(ZeroDivisionError):
        call_from_lasting_thread(divmod, 7, 0)


def test_the_main_thread_calls_by_itself_and_others_do_not() -> None:
    assert call_from_lasting_thread(threading.current_thread) is threading.main_thread()
    found: list[threading.Thread] = []
    other = threading.Thread(target=lambda: found.append(call_from_lasting_thread(threading.current_thread)))
    other.start()
    other.join(20)
    assert found[0] not in (other, threading.main_thread())


def test_threads_are_as_many_as_calls_at_one_time() -> None:
    together = threading.Barrier(4)

    def meet(number: int) -> tuple[int, threading.Thread]:
        together.wait(20)
        return number, threading.current_thread()

    found: list[tuple[int, threading.Thread]] = []
    for _ in range(3):
        callers = [
            threading.Thread(target=lambda number=number: found.append(call_from_lasting_thread(meet, number)))
            for number in range(4)
        ]
        for caller in callers:
            caller.start()
        for caller in callers:
            caller.join(20)
    assert sorted(number for number, _ in found) == sorted([*range(4)] * 3)
    assert len({thread for _, thread in found}) == 4


def test_an_interrupted_caller_waits_for_its_call() -> None:
    """The stage is busy until then; the next call has its own answer."""
    done: list[int] = []

    def work() -> int:
        time.sleep(0.3)
        done.append(1)
        return 1

    thread = LastingThread()
    previous = signal.signal(signal.SIGINT, signal.default_int_handler)
    timer = threading.Timer(0.1, os.kill, (os.getpid(), signal.SIGINT))
    timer.start()
    try:
        with pytest.raises(KeyboardInterrupt):
            thread.call(work, ())
    finally:
        timer.join(20)
        signal.signal(signal.SIGINT, previous)
    assert done == [1]
    assert thread.call(divmod, (7, 3)) == (2, 1)


def test_callers_that_end_leave_nothing(tmp_path: Path) -> None:
    """The control calls from the threads of the callers themselves: TVM keeps a helper for each."""
    bundle = two_threads(tmp_path)
    done = subprocess.run(
        [sys.executable, "-c", COUNTED, str(bundle)], capture_output=True, text=True, timeout=300, check=False
    )
    assert done.returncode == 0, done.stderr
    (lasting, wrong), (own, wrong_own) = json.loads(done.stdout)
    assert (wrong, wrong_own) == (0, 0)
    assert lasting[-1] <= lasting[0] + 2, lasting
    assert own[-1] >= own[0] + 10, own


def test_a_forked_process_computes(tmp_path: Path) -> None:
    command = [sys.executable, "-c", FORKED, str(two_threads(tmp_path))]
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, check=False)
    assert done.returncode == 0, done.stderr
