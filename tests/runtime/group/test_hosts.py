"""Tests with several hosts: the launcher's data on a process, its network interface, whether the bundle fits, and runs
in network namespaces."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace

import pytest
from hypothesis import given
from hypothesis import strategies as st
from namespaces import Hosts, available
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError, ProcessFailure

from penstock.backends.bundle.format import open_bundle
from penstock.runtime.group.hosts import (
    Present,
    ProcessPlace,
    check_hosts,
    check_world,
    choose_interface,
    describe_hosts,
    expand_nodes,
    in_group,
    interfaces,
    place_of,
)
from penstock.runtime.job.run import run_bundle
from penstock.support.errors import UsageError

NO_NAMESPACES = available()
needs_namespaces = pytest.mark.skipif(bool(NO_NAMESPACES), reason=f"no network namespaces: {NO_NAMESPACES}")

# ------------------------------------------------------------------------------------------------ the place


def test_places_of_torchrun_and_srun():
    torchrun = {
        "RANK": "3",
        "WORLD_SIZE": "4",
        "MASTER_ADDR": "a",
        "MASTER_PORT": "29500",
        "LOCAL_RANK": "1",
        "TORCHELASTIC_RUN_ID": "x",
    }
    found = place_of(torchrun | {"TORCHELASTIC_USE_AGENT_STORE": "True"})
    assert found == ProcessPlace(3, 4, 1, "a", 29500, socket.gethostname(), "torchrun", served=True)
    srun = {
        "SLURM_PROCID": "3",
        "SLURM_NTASKS": "4",
        "SLURM_NODELIST": "n[07-08]",
        "SLURM_LOCALID": "1",
        "SLURMD_NODENAME": "n08",
    }
    assert place_of(srun | {"SLURM_JOB_ID": "10012", "SLURM_STEP_ID": "0"}) == ProcessPlace(
        3, 4, 1, "n07", 20012, "n08", "srun"
    )
    named = {"MASTER_ADDR": "b", "MASTER_PORT": "1234"}
    assert place_of(srun | named) == ProcessPlace(3, 4, 1, "b", 1234, "n08", "srun")
    # torchrun inside of a Slurm job: its own variables count.
    assert place_of(srun | torchrun).launcher == "torchrun"


@pytest.mark.parametrize(
    ("environment", "expected"),
    [
        ({}, False),
        ({"RANK": "0"}, False),
        ({"RANK": "0", "WORLD_SIZE": "1"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, True),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "1"}, False),
        # A batch script is no task, though it has their variables.
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7"}, False),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_JOB_ID": "7", "SLURM_STEP_ID": "0"}, True),
    ],
)
def test_who_is_in_a_group(environment, expected):
    assert in_group(environment) is expected


@pytest.mark.parametrize(
    ("environment", "said"),
    [
        (
            {"RANK": "x", "WORLD_SIZE": "2"},
            ["MASTER_ADDR is not set", "MASTER_PORT is not set", "RANK is 'x', expected a number"],
        ),
        (
            {"RANK": "2", "WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "0"},
            ["RANK is 2, but WORLD_SIZE is 2", "expected 1 to 65535"],
        ),
        ({"SLURM_PROCID": "0", "SLURM_NTASKS": "2"}, ["MASTER_ADDR is not set", "MASTER_PORT is not set"]),
        (
            {"SLURM_PROCID": "0", "SLURM_NTASKS": "2", "SLURM_NODELIST": "n[1-x]"},
            ["cannot read the list of nodes: '1-x'"],
        ),
    ],
)
def test_environments_that_say_too_little(environment, said):
    with pytest.raises(UsageError) as caught:
        place_of(environment)
    assert caught.value.exit_code == 2
    for words in said:
        assert words in str(caught.value)


@given(
    st.lists(
        st.tuples(st.from_regex(r"[a-z]{1,4}-?", fullmatch=True), st.lists(st.integers(0, 120), max_size=4)),
        min_size=1,
        max_size=4,
    )
)
def test_lists_of_nodes(groups):
    """Written as Slurm does, with ranges where numbers follow each other; read back one by one."""
    words, names = [], []
    for stem, numbers in groups:
        ranges, i = [], 0
        while i < len(numbers):
            j = i
            while j + 1 < len(numbers) and numbers[j + 1] == numbers[j] + 1:
                j += 1
            ranges.append(f"{numbers[i]:03}" + (f"-{numbers[j]:03}" if j > i else ""))
            i = j + 1
        words.append(f"{stem}[{','.join(ranges)}]" if ranges else stem)
        names += [f"{stem}{number:03}" for number in numbers] or [stem]
    assert expand_nodes(",".join(words)) == names


# ------------------------------------------------------------------------------------------------ the interface


def test_interfaces():
    assert interfaces()["lo"] == "127.0.0.1"
    place = ProcessPlace(0, 2, 0, "127.0.0.1", 29500, "here", "torchrun")
    assert choose_interface(place, "", {}).name == "lo"
    with pytest.raises(
        UsageError,
        match=r"interface eth9, chosen by GLOO_SOCKET_IFNAME, is not on this host .* there are: lo \(127.0.0.1\)",
    ):
        choose_interface(place, "", {"GLOO_SOCKET_IFNAME": "eth9"})
    with pytest.raises(UsageError, match="interface ib7, chosen by the cluster file"):
        choose_interface(place, "ib7", {})
    assert choose_interface(place, "ib7", {"GLOO_SOCKET_IFNAME": "lo"}).why == "by GLOO_SOCKET_IFNAME"
    with pytest.raises(UsageError, match=r"nowhere\.invalid, where the group meets, has no IPv4 address"):
        choose_interface(ProcessPlace(1, 2, 0, "nowhere.invalid", 29500, "here", "torchrun"), "", {})


# ------------------------------------------------------------------------------------------------ the bundle's hosts


def planned(*hosts):
    ranks = tuple(SimpleNamespace(rank=i, host=host, stage=i, device=f"cpu:{i}") for i, host in enumerate(hosts))
    return SimpleNamespace(manifest=SimpleNamespace(ranks=ranks), world_size=len(ranks), path=Path("bundle"))


def present(*hosts):
    return [Present(host, f"10.0.0.{sorted(set(hosts)).index(host)}", "eth0", 1) for host in hosts]


def test_hosts_that_fit():
    assert check_hosts(planned("a", "a", "b"), present("a.domain", "a.domain", "b.domain")) == []
    # Names that say nothing: only who is together is compared.
    assert check_hosts(planned("one", "one", "two"), present("x", "x", "y")) == []
    assert check_hosts(planned("localhost", "localhost"), present("x", "x")) == []
    (told,) = check_hosts(planned("localhost", "localhost"), present("x", "y"))
    assert told == "the bundle was planned for 1 host, the ranks are on 2 hosts: times will be other than planned"
    # One that stands in for another.
    assert check_hosts(planned("a", "b"), present("a", "c")) == []


def test_hosts_in_the_wrong_order():
    with pytest.raises(UsageError) as caught:
        check_hosts(planned("a", "a", "b"), present("b", "a", "a"))
    assert (
        "rank 0: the bundle has it on a, it was started on b\n  - rank 2: the bundle has it on b, it was started on a"
        in str(caught.value)
    )
    assert "rank 1" not in str(caught.value)
    assert "start the hosts in the order a, b" in caught.value.hint


def test_another_number_of_ranks():
    place = ProcessPlace(0, 3, 0, "a", 1, "a", "srun")
    with pytest.raises(
        UsageError,
        match=r"for 2 ranks, 3 were started by srun:\n  - rank 0: stage 0 on cpu:0 of host a\n  - rank 1: stage 1",
    ):
        check_world("bundle", planned("a", "b").manifest.ranks, place)
    check_world("bundle", planned("a", "b", "c").manifest.ranks, place)


def test_who_is_where():
    assert describe_hosts(present("a", "b", "a")) == "3 ranks on 2 hosts: a eth0 10.0.0.0: 0 2; b eth0 10.0.0.1: 1"


# ------------------------------------------------------------------------------------------------ runs


def listening(pids):
    """Addresses at which processes listen, seen from their own namespaces."""
    found = set()
    for pid in pids:
        try:
            owned = {
                os.readlink(d)[8:-1] for d in Path(f"/proc/{pid}/fd").iterdir() if os.readlink(d).startswith("socket:[")
            }
            rows = [
                line.split()
                for name in ("tcp", "tcp6")
                for line in Path(f"/proc/{pid}/net/{name}").read_text().splitlines()[1:]
            ]
        except OSError:
            continue
        hosts = [row[1].split(":")[0] for row in rows if row[3] == "0A" and row[9] in owned]
        found |= {socket.inet_ntoa(bytes.fromhex(host)[::-1]) if len(host) == 8 else host for host in hosts}
    return found


def run_on(hosts, commands, environments, folder, seconds=90):
    """One process per host; return codes, what each said, and where their processes listened meanwhile."""
    logs = [(folder / f"log{i}").open("w+") for i in range(len(commands))]
    base = {k: v for k, v in os.environ.items() if k != "GLOO_SOCKET_IFNAME"} | {"OMP_NUM_THREADS": "1"}
    running, heard = [], set()
    try:
        for i, command in enumerate(commands):
            running.append(hosts.start(i, command, base | environments[i], logs[i]))
        deadline = time.monotonic() + seconds
        while any(process.poll() is None for process in running) and time.monotonic() < deadline:
            heard |= listening(hosts.processes())
            time.sleep(0.1)
    finally:
        hosts.end(running)
    said = []
    for log in logs:
        log.seek(0)
        said.append(log.read())
        log.close()
    return [process.returncode for process in running], said, heard


@needs_namespaces
def test_srun_on_two_hosts(bundle_of, tmp_path):
    path, steps = str(bundle_of(2, "2bw", 2).path), 40
    command = [
        sys.executable,
        "-m",
        "penstock",
        "run",
        path,
        "--steps",
        str(steps),
        "--metrics",
        str(tmp_path / "m.jsonl"),
    ]
    slurm = {"SLURM_NTASKS": "2", "SLURM_NODELIST": "n[1-2]", "SLURM_JOB_ID": "77", "SLURM_STEP_ID": "0"}
    with Hosts(["n1", "n2"]) as hosts:
        places = [slurm | {"SLURM_PROCID": str(i)} for i in range(2)]
        codes, said, heard = run_on(hosts, [command, command], places, tmp_path)
    assert codes == [0, 0], said
    assert (
        "2 ranks on 2 hosts: n1 eth0 10.77.0.1: 0; n2 eth0 10.77.0.2: 1 (interface chosen on the way to n1)" in said[0]
    )
    assert "the bundle was planned for 1 host, the ranks are on 2 hosts" in said[0]
    assert "hosts" not in said[1]
    assert heard == {"10.77.0.1", "10.77.0.2"}
    expected = run_bundle(path, steps=steps, timeout=20, progress=False)
    assert [json.loads(line)["loss"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == expected.losses


@needs_namespaces
@pytest.mark.slow
@pytest.mark.parametrize("kind", ["elastic", "static"])
def test_torchrun_on_two_hosts(bundle_of, tmp_path, kind):
    path = str(bundle_of(2, "1f1b", 2).path)
    with Hosts(["n1", "n2"]) as hosts:
        meeting = {
            "elastic": ["--rdzv-backend=c10d", f"--rdzv-endpoint={hosts.address(0)}:29400", "--rdzv-id=job"],
            "static": [f"--master-addr={hosts.address(0)}", "--master-port=29400"],
        }[kind]
        commands = []
        for i in range(2):
            own = [f"--local-addr={hosts.address(i)}", *([f"--node-rank={i}"] if kind == "static" else [])]
            run = [
                "--no-python",
                sys.executable,
                "-m",
                "penstock",
                "run",
                path,
                "--steps",
                "3",
                "--metrics",
                str(tmp_path / "m.jsonl"),
            ]
            commands.append(
                [
                    sys.executable,
                    "-m",
                    "torch.distributed.run",
                    "--nnodes=2",
                    "--nproc-per-node=1",
                    *meeting,
                    *own,
                    *run,
                ]
            )
        codes, said, _ = run_on(hosts, commands, [{}, {}], tmp_path)
    assert codes == [0, 0], said
    assert "2 ranks on 2 hosts" in "".join(said)
    expected = run_bundle(path, steps=3, timeout=20, progress=False)
    assert [json.loads(line)["loss"] for line in (tmp_path / "m.jsonl").read_text().splitlines()] == expected.losses


def test_one_host_says_that_the_world_does_not_match(bundle_of, tmp_path):
    """All ranks find it, one that the bundle lacks as well; the first of each host says it, and each tells torchrun, which shows what the first
    to end has told."""
    path = str(bundle_of(2, "1f1b", 2).path)
    said, told = [], []
    for local in ("0", "1", "2"):
        group = {
            "RANK": local,
            "WORLD_SIZE": "3",
            "LOCAL_RANK": local,
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": "29500",
        }
        group["TORCHELASTIC_ERROR_FILE"] = str(tmp_path / local)
        done = subprocess.run(
            [sys.executable, "-m", "penstock", "run", path],
            env=os.environ | group,
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert done.returncode == 2
        said.append(done.stderr)
        failure = ProcessFailure(int(local), 1, 2, str(tmp_path / local))
        told.append(str(ChildFailedError("run", {int(local): failure})))
    why = "the bundle is for 2 ranks, 3 were started by the environment"
    assert why in said[0]
    assert said[1:] == ["", ""]
    assert all(why in text for text in told)
    # Control: a rank too many that looks for its files before that says something else, which is no help.
    with pytest.raises(UsageError, match="there is no rank 2") as caught:
        open_bundle(path, 2)
    assert why not in str(caught.value)
