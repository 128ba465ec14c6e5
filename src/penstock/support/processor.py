"""The description of this machine's processor, for the keys of entries that depend on it."""

from __future__ import annotations

from functools import cache
from pathlib import Path

# The fields that distinguish processors for a compiler. Other fields, such as clock rates, change from minute to
# minute.
_CPU_FIELDS = ("vendor_id", "cpu family", "model", "stepping", "flags", "CPU implementer", "CPU part", "Features")


@cache
def processor() -> str:
    """Return Linux's description of the processor; empty where there is none."""
    try:
        text = Path("/proc/cpuinfo").read_text()
    except OSError:
        return ""
    first = text.partition("\n\n")[0]
    return "\n".join(line for line in first.splitlines() if line.partition(":")[0].strip() in _CPU_FIELDS)
