"""The quota and the free memory of a control group, by files as the kernel writes them."""

from __future__ import annotations

from pathlib import Path

import pytest

from penstock.support import hardware

MIB = 1 << 20


def test_files_that_the_system_would_drop_are_free(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Of both versions of groups. The control: without its list of what it holds, a group uses all that it counts."""
    monkeypatch.setattr(hardware, "_CGROUP", tmp_path)
    monkeypatch.setattr(hardware, "physical_memory", lambda: 1 << 40)
    known = {Path("/proc/self/cgroup"): "4:memory:/\n0::/", Path("/proc/meminfo"): f"MemAvailable: {1 << 30} kB"}
    read = hardware._read
    monkeypatch.setattr(hardware, "_read", lambda path: known.get(path) or read(path))
    (tmp_path / "memory").mkdir()
    for folder, limit, used, field in (
        (tmp_path, "memory.max", "memory.current", "inactive_file"),
        (tmp_path / "memory", "memory.limit_in_bytes", "memory.usage_in_bytes", "total_inactive_file"),
    ):
        (folder / limit).write_text(str(100 * MIB))
        (folder / used).write_text(str(90 * MIB))
        assert hardware.free_memory() == 10 * MIB
        (folder / "memory.stat").write_text(f"anon 1\nactive_file {5 * MIB}\n{field} {60 * MIB}\n")
        assert hardware.free_memory() == 70 * MIB
        for file in (folder / limit, folder / used):
            file.unlink()


def test_quotas_of_both_kinds_of_control_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The narrowest of all groups that a process is in."""
    monkeypatch.setattr(hardware, "_CGROUP", tmp_path)
    read = hardware._read
    own = "4:memory:/job\n2:cpuacct,cpu:/job/rank\n0::/job/rank"
    monkeypatch.setattr(hardware, "_read", lambda path: own if path == Path("/proc/self/cgroup") else read(path))
    assert hardware.core_quota() is None
    for top in (tmp_path, tmp_path / "cpu"):
        (top / "job" / "rank").mkdir(parents=True)
    (tmp_path / "job" / "rank" / "cpu.max").write_text("max 100000")
    assert hardware.core_quota() is None
    (tmp_path / "job" / "cpu.max").write_text("150000 100000")
    assert hardware.core_quota() == (1.5, 0.1)
    for name, quota in (("job", 20_000), ("job/rank", -1)):
        (tmp_path / "cpu" / name / "cpu.cfs_quota_us").write_text(str(quota))
        (tmp_path / "cpu" / name / "cpu.cfs_period_us").write_text("100000")
    assert hardware.core_quota() == (0.2, 0.1)
    (tmp_path / "cpu" / "job" / "rank" / "cpu.cfs_quota_us").write_text("500")
    (tmp_path / "cpu" / "job" / "rank" / "cpu.cfs_period_us").write_text("10000")
    assert hardware.core_quota() == (0.05, 0.01)
