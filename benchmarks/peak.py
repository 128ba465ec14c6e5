"""The peak rates of cores of this machine: multiply-adds in registers, streaming memory, and reading a list.

In: nothing but the machine. Out: floating-point operations per second in float32, and bytes per second. The first is a
loop of independent multiply-adds on vectors that never leave registers, compiled for this CPU. Bytes read plus written
are those of torch streaming a tensor larger than any cache. Bytes read are those of a compiled loop that adds up a list
again and again, from whatever cache holds it. All are the best of several tries, by processor time of the thread.
Without a compiler there is no such loop, and the caller takes the best rate of a matrix product that it has seen, or
none.
"""

from __future__ import annotations

import ctypes
import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import numpy as np
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
enum { BLOCK = 8 * WIDTH };
typedef float vec __attribute__((vector_size(WIDTH * sizeof(float)), aligned(4)));
extern "C" long block() { return BLOCK; }
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
extern "C" float add_up(const float *list, long blocks, long rounds) {
    vec sum[8] = {};
    for (long round = 0; round < rounds; ++round)
        for (long block = 0; block < blocks; ++block) {
            const vec *from = (const vec *)(list + block * BLOCK);
#pragma GCC unroll 8
            for (int i = 0; i < 8; ++i) sum[i] += from[i];
        }
    float total = 0;
    for (int i = 0; i < 8; ++i) for (int lane = 0; lane < WIDTH; ++lane) total += sum[i][lane];
    return total;
}
"""
ROUNDS = 2_000_000
# Bytes that a try of reading reads at least.
READ = 1 << 27
TRIES = 7
COPIED = 1 << 26


class RegisterLoop:
    """The compiled loops; `rate` and `read_rate` run them."""

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
        self._library.spin.restype = self._library.add_up.restype = ctypes.c_float
        self._library.block.restype = ctypes.c_long
        self._library.add_up.argtypes = [ctypes.c_void_p, ctypes.c_long, ctypes.c_long]

    def rate(self) -> float:
        """Return floating-point operations per second, the best of several tries."""
        best = 0.0
        for _ in range(TRIES):
            begin = time.thread_time()
            self._library.spin(ROUNDS)
            best = max(best, self._library.operations(ROUNDS) / (time.thread_time() - begin))
        return best

    def read_rate(self, size: int) -> float:
        """Return bytes per second of adding up a list of about this many bytes, the best of several tries."""
        block = self._library.block()
        blocks = max(size // (4 * block), 1)
        numbers = np.ones(blocks * block, np.float32)
        rounds, best = max(READ // numbers.nbytes, 1), 0.0
        for _ in range(TRIES):
            begin = time.thread_time()
            self._library.add_up(numbers.ctypes.data, blocks, rounds)
            best = max(best, rounds * numbers.nbytes / (time.thread_time() - begin))
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
    return _at_once(loop.rate, cores)


def read_rate_of_cores(loop: RegisterLoop, cores: Sequence[int], size: int) -> float:
    """Return bytes per second of some cores together that read equal parts of a list of this many bytes at once."""
    return _at_once(lambda: loop.read_rate(size // len(cores)), cores)


def _at_once(rate: Callable[[], float], cores: Sequence[int]) -> float:
    """Return the sum of the rates of some cores, all busy at once."""
    begin = threading.Barrier(len(cores))

    def on(core: int) -> float:
        # The affinity of the calling thread alone.
        os.sched_setaffinity(0, {core})
        begin.wait()
        return rate()

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
