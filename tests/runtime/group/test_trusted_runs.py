"""Tests of whole runs with a secret and TLS: what a group says, and what a local run listens on. Every wait is bounded."""

from __future__ import annotations

import contextlib
import os
import socket
from datetime import timedelta
from pathlib import Path

import failure_runs
import pytest
from torch.distributed import TCPStore

from penstock.runtime.group.sealed import SealedStore
from penstock.runtime.job.job import Job
from penstock.runtime.launch import local as launch
from penstock.runtime.messages.control import DataSpec, Join
from penstock.support.errors import PeerLost, UsageError

from ..launch.two_ranks import finish, start
from .secrets_and_certificates import SECRET, needs_openssl

# ------------------------------------------------------------------------------------------------ runs


@pytest.fixture
def secrets(tmp_path):
    found = [tmp_path / "a", tmp_path / "b"]
    for path in found:
        path.write_text(os.urandom(32).hex())
    return found


def argument_texts(pid: int) -> list[str]:
    """The arguments of a process and of its children, as far as these still run."""
    texts = []
    for one in (pid, *failure_runs.children(pid)):
        with contextlib.suppress(FileNotFoundError, ProcessLookupError):
            texts.append(Path(f"/proc/{one}/cmdline").read_bytes().decode())
    return texts


@needs_openssl
def test_a_group_with_a_secret_over_tls(bundle_of, tmp_path, tls, secrets):
    """It trains, and the secret is in no argument of any of its processes, nor in what they say."""
    both = start(bundle_of(2, "1f1b", 2).path, tmp_path, 20, more=("--secret", str(secrets[0]), "--tls", str(tls)))
    arguments: list[str] = []

    def all_have_begun() -> bool:
        """Read the arguments of keepers and workers. The control: each of the four names the file of the secret."""
        arguments[:] = [text for process in both for text in argument_texts(process.pid)]
        return sum(str(secrets[0]) in text for text in arguments) == 4

    # Workers take seconds to import what they need.
    assert failure_runs.wait_for(all_have_begun), arguments
    said = finish(both)
    assert [process.returncode for process in both] == [0, 0], said
    assert not [text for text in said + arguments if secrets[0].read_text() in text]
    assert failure_runs.steps_in(tmp_path / "m.jsonl") == 20


@needs_openssl
@pytest.mark.slow
def test_a_group_with_two_secrets(bundle_of, tmp_path, tls, secrets):
    """Both ranks end, soon, and say why."""
    both = start(
        bundle_of(2, "1f1b", 2).path,
        tmp_path,
        20,
        more=[("--secret", str(secret), "--tls", str(tls)) for secret in secrets],
    )
    said = finish(both)
    assert [process.returncode for process in both] == [5, 5], said
    assert "the ranks do not have the same trust" in said[0] + said[1]
    assert not [text for text in said for secret in secrets if secret.read_text() in text]


def listening(processes: list[int]) -> set[tuple[str, int]]:
    """Addresses and ports, IPv4 and IPv6, as the system has them."""
    own = set()
    for pid in processes:
        for entry in Path(f"/proc/{pid}/fd").iterdir():
            with contextlib.suppress(FileNotFoundError):
                own.add(os.readlink(entry))
    found = set()
    for table in ("tcp", "tcp6"):
        for line in Path(f"/proc/net/{table}").read_text().splitlines()[1:]:
            _, local, _, state, *_, inode = line.split()[:10]
            if state == "0A" and f"socket:[{inode}]" in own:
                address, port = local.split(":")
                words = [bytes.fromhex(address[i : i + 8])[::-1] for i in range(0, len(address), 8)]
                found.add(
                    (
                        socket.inet_ntop(socket.AF_INET if table == "tcp" else socket.AF_INET6, b"".join(words)),
                        int(port, 16),
                    )
                )
    return found


@pytest.mark.parametrize("shared", ["1", "0"])
def test_what_a_local_run_listens_on(bundle_of, monkeypatch, shared):
    """Loopback alone, and where its ranks share memory nothing but the place where they meet, whose values are sealed: what a stranger writes there is seen."""
    monkeypatch.setenv("PENSTOCK_SHARED_MEMORY", shared)
    ports = []
    monkeypatch.setattr(launch, "Join", lambda port: (ports.append(port), Join(port))[1])
    with Job(bundle_of(2, "1f1b", 2), timeout=20, data=DataSpec()) as job:
        found = listening(job.workers.process_ids())
        value = TCPStore("127.0.0.1", ports[0], None, False, timedelta(seconds=5), wait_for_workers=False).get(
            "agree/module.ir/0"
        )
        list(job.steps_from_data(2))
    assert ("127.0.0.1", ports[0]) in found
    if shared == "1":
        assert {port for _, port in found} == {ports[0]}
    else:
        assert len(found) >= 3, "the store, and gloo of both ranks"
    # Gloo listens as IPv4 or as IPv6.
    assert {address for address, _ in found} <= {"127.0.0.1", "::ffff:127.0.0.1", "::1"}
    assert value[32:] == job.bundle.module_hash.encode()
    assert len(value) == 32 + len(job.bundle.module_hash)
    with socket.create_server(("0.0.0.0", 0)) as control:
        assert ("0.0.0.0", control.getsockname()[1]) in listening([os.getpid()])


def test_a_local_run_has_none_of_it(bundle_of, tmp_path):
    from penstock.runtime.job.run import run_bundle

    (tmp_path / "secret").write_text("s" * 32)
    with pytest.raises(UsageError, match="--secret is for groups"):
        run_bundle(bundle_of(2, "1f1b", 2).path, steps=1, secret=tmp_path / "secret")


def test_what_is_lost_is_not_what_is_forged(store):
    """The control: a value that is missing is a lost peer, as before."""
    from penstock.runtime.group.group import RankGroup

    with pytest.raises(PeerLost, match="waited up to"):
        RankGroup(SealedStore(store, SECRET), 0, 2, 0.2).get("never", "what never comes")
