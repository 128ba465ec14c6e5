"""Descriptions of the machine that a benchmark runs on, and writers of its results.

Facts are lines for people, by name. Tables are Markdown; files are JSON.
"""

from __future__ import annotations

import json
import os
import platform
import statistics
import time
from collections.abc import Sequence
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

VECTORS = ("avx2", "fma", "avx512f", "avx512vl", "amx_tile")


def processor(cores: Sequence[int]) -> str:
    """Describe the processor: its name, its vector and tile instructions, and the cores in use."""
    cpu = _field("/proc/cpuinfo", "model name") or platform.processor() or "unknown"
    flags = (_field("/proc/cpuinfo", "flags") or "").split()
    vectors = " ".join(flag for flag in VECTORS if flag in flags)
    memory = int((_field("/proc/meminfo", "MemTotal") or "0 kB").split()[0]) / 2**20
    used = f"core{'s' if len(cores) > 1 else ''} {', '.join(map(str, cores))} of {os.cpu_count()}"
    return f"{cpu} ({vectors}), {used}, {memory:.0f} GiB memory"


def system() -> str:
    return f"{platform.system()} {platform.release()}, Python {platform.python_version()}"


def versions(*names: str) -> str:
    """List the versions of packages. Those that are not installed are left out."""
    lines = []
    for name in names:
        try:
            lines.append(f"{name} {version(name)}")
        except PackageNotFoundError:
            continue
    return ", ".join(lines)


def load() -> str:
    return " ".join(f"{x:.2f}" for x in os.getloadavg()) + " (1, 5, 15 minutes)"


def speed(seconds: float = 1.0) -> float:
    """Measure how many products of floats a second one thread of torch takes now, in the median."""
    import torch  # lazy: heavy

    torch.set_num_threads(1)
    one, other, found = torch.ones(512, 512), torch.ones(512, 512), list[float]()
    end = time.perf_counter() + seconds
    while (begin := time.perf_counter()) < end:
        for _ in range(8):
            one @ other
        found.append(8 * 512**3 / (time.perf_counter() - begin))
    return statistics.median(found)


def _field(path: str, name: str) -> str | None:
    for line in Path(path).read_text(encoding="utf-8").splitlines():
        key, _, value = line.partition(":")
        if key.strip() == name:
            return value.strip()
    return None


# ------------------------------------------------------------------------------------------------ writing


def markdown(heads: Sequence[str], lines: Sequence[Sequence[object]]) -> str:
    """Write a table."""
    return "\n".join(f"| {' | '.join(map(str, line))} |" for line in [heads, ["---"] * len(heads), *lines])


def write_json(path: str | Path | None, document: Any) -> None:
    """Write the document if there is a path."""
    if path:
        Path(path).write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")
