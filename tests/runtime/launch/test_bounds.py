"""Hosts without a loopback interface or with few open files end a run with one line, in place of a long wait."""

from __future__ import annotations

import resource
import shutil
import subprocess
import sys

import pytest

from penstock.runtime.launch import local
from penstock.support.errors import UsageError


def train(bundle, *before: str) -> subprocess.CompletedProcess[str]:
    """Train for two steps, behind a command that changes what the process finds."""
    command = [*before, sys.executable, "-m", "penstock", "run", str(bundle.path), "--steps", "2"]
    return subprocess.run(command, capture_output=True, text=True, timeout=60)


def has_namespaces() -> bool:
    unshare = shutil.which("unshare")
    return unshare is not None and not subprocess.run([unshare, "-n", "true"], capture_output=True).returncode


@pytest.mark.skipif(not has_namespaces(), reason="this user may make no network namespaces")
def test_a_host_without_loopback(bundle_of):
    """Ranks that share memory and rates meet there, too."""
    done = train(bundle_of(2, "1f1b", 2), "unshare", "-n")
    assert done.returncode == 2
    assert "ranks of one host meet at 127.0.0.1, which cannot be reached" in done.stderr
    assert done.stderr.count("penstock: error") == 1
    assert (
        train(bundle_of(2, "1f1b", 2), "unshare", "-n", "sh", "-c", 'ip link set lo up && exec "$@"', "sh").returncode
        == 0
    )


@pytest.mark.skipif(shutil.which("prlimit") is None, reason="there is no prlimit")
def test_few_open_files(bundle_of):
    bundle = bundle_of(2, "1f1b", 2)
    done = train(bundle, "prlimit", "--nofile=16:16")
    assert done.returncode == 2
    assert "a process may have 16 open files here, and a run of 2 ranks needs 32" in done.stderr
    # A limit that may be raised is raised, and one that is enough is left.
    assert train(bundle, "prlimit", "--nofile=16:64").returncode == 0
    assert train(bundle, "prlimit", "--nofile=32:32").returncode == 0


@pytest.mark.parametrize(
    ("limits", "changed"),
    [((16, 4096), (40, 4096)), ((1024, 4096), None), ((16, resource.RLIM_INFINITY), (40, resource.RLIM_INFINITY))],
)
def test_limits_are_raised_as_far_as_needed(monkeypatch, limits, changed):
    calls: list[tuple[int, int]] = []
    monkeypatch.setattr(local.resource, "getrlimit", lambda kind: limits)
    monkeypatch.setattr(local.resource, "setrlimit", lambda kind, given: calls.append(given))
    local.check_descriptors(4)
    assert calls == ([changed] if changed else [])
    monkeypatch.setattr(local.resource, "getrlimit", lambda kind: (16, 39))
    with pytest.raises(UsageError, match="needs 40"):
        local.check_descriptors(4)
