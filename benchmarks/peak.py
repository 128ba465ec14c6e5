"""The peak rates of one core of this machine: multiply-adds in registers, and streaming memory.

In: nothing but the machine. Out: floating-point operations per second in float32, and bytes per second read plus
written. The first is a loop of independent multiply-adds on vectors that never leave registers, compiled for this CPU.
The second is torch streaming a tensor larger than any cache. Both are the best of several tries, by processor time of
the thread. Without a compiler the first is None, and the caller takes the best rate of a matrix product that it has
seen.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import torch

# More accumulators than latency times units, fewer than registers.
SOURCE = """
#ifdef __AVX512F__
enum { WIDTH = 16, COUNT = 24 };
#elif defined(__AVX__)
enum { WIDTH = 8, COUNT = 12 };
#else
enum { WIDTH = 4, COUNT = 12 };
#endif
typedef float vec __attribute__((vector_size(WIDTH * sizeof(float))));
extern "C" double operations(long rounds) { return 2.0 * WIDTH * COUNT * rounds; }
extern "C" float spin(long rounds) {
    vec sum[COUNT], x = {}, y = {};
    for (int lane = 0; lane < WIDTH; ++lane) { x[lane] = 0.999f; y[lane] = 0.001f * lane; }
    for (int i = 0; i < COUNT; ++i) sum[i] = y;
    for (long round = 0; round < rounds; ++round) {
#pragma GCC unroll 24
        for (int i = 0; i < COUNT; ++i) sum[i] = sum[i] * x + y;
    }
    float total = 0;
    for (int i = 0; i < COUNT; ++i) for (int lane = 0; lane < WIDTH; ++lane) total += sum[i][lane];
    return total;
}
"""
ROUNDS = 2_000_000
TRIES = 7
COPIED = 1 << 26


class RegisterLoop:
    """The compiled loop; `rate` runs it."""

    def __init__(self) -> None:
        with tempfile.TemporaryDirectory(prefix="peak-") as folder:
            source, library = Path(folder) / "peak.cpp", Path(folder) / "peak.so"
            source.write_text(SOURCE)
            subprocess.run(
                ["g++", "-O2", "-march=native", "-shared", "-fPIC", str(source), "-o", str(library)], check=True
            )
            self._library = ctypes.CDLL(str(library))
        self._library.operations.restype = ctypes.c_double
        self._library.operations.argtypes = self._library.spin.argtypes = [ctypes.c_long]
        self._library.spin.restype = ctypes.c_float

    def rate(self) -> float:
        """Return floating-point operations per second, the best of several tries."""
        best = 0.0
        for _ in range(TRIES):
            begin = time.thread_time()
            self._library.spin(ROUNDS)
            best = max(best, self._library.operations(ROUNDS) / (time.thread_time() - begin))
        return best


def register_loop() -> RegisterLoop | None:
    """Compile the loop. Return None where there is no compiler for it."""
    try:
        return RegisterLoop()
    except (FileNotFoundError, subprocess.CalledProcessError):
        return None


def rate_of_cores(loop: RegisterLoop, cores: Sequence[int]) -> float:
    """Return floating-point operations per second of some cores together, all busy at once.

    Two that are threads of one core share its units.
    """
    begin = threading.Barrier(len(cores))

    def on(core: int) -> float:
        # The affinity of the calling thread alone.
        os.sched_setaffinity(0, {core})
        begin.wait()
        return loop.rate()

    with ThreadPoolExecutor(len(cores)) as threads:
        return sum(threads.map(on, cores))


def memory_rate() -> float:
    """Return bytes read plus written per second, the best of copying, scaling in place and summing a large tensor.

    A copy alone would be too low a bound: the lines that it writes are read first.
    """
    source = torch.ones(COPIED)
    target = torch.empty_like(source).copy_(source)
    streams = (
        (2 * source.nbytes, lambda: target.copy_(source)),
        (2 * source.nbytes, lambda: target.mul_(1.0)),
        (source.nbytes, lambda: source.sum()),
    )
    best = 0.0
    for moved, run in streams * TRIES:
        begin = time.thread_time()
        run()
        best = max(best, moved / (time.thread_time() - begin))
    return best
