"""Train on two hosts under torchrun, with network namespaces of this machine as hosts.

Makes two namespaces, joined by a virtual cable, with addresses and names as two machines have. Starts on each the
command that a user types on a machine: torchrun, which starts `penstock run`. The bundle is made for a cluster file
with both hosts, so that ranks know their host.

Prints which ranks met on which hosts, and the losses. Fails unless they are, bit for bit, those of the same bundle on
one host. Namespaces need root and iproute2; without them the example says so and ends with exit code 77. On machines of
your own, use the commands that it prints.

Takes about half a minute on two cores (README.md).
"""

from __future__ import annotations

import argparse
import json
import os
import secrets
import shlex
import shutil
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from pathlib import Path

import penstock as ps
from penstock.models import write_mlp

CANNOT_RUN = 77
HOSTS = {"alpha": "10.99.0.1", "beta": "10.99.0.2"}
CLUSTER = """
host = [{ name = "alpha", address = "10.99.0.1" }, { name = "beta", address = "10.99.0.2" }]
device = [{ name = "cpu:0", host = "alpha" }, { name = "cpu:1", host = "beta" }]
links = { other-host = { bandwidth = "1 GB/s", latency = "100 us" } }
"""


def ip(*words: str) -> None:
    subprocess.run(["ip", *words], check=True, capture_output=True, text=True, timeout=20)


@contextmanager
def namespaces() -> Iterator[dict[str, str]]:
    """Make a namespace for each host. Processes that still run in one are killed at the end."""
    spaces: dict[str, str] = {}
    try:
        for host in HOSTS:
            spaces[host] = f"{host}-{secrets.token_hex(3)}"
            ip("netns", "add", spaces[host])
        first, second = spaces.values()
        ip("-n", first, "link", "add", "eth0", "type", "veth", "peer", "name", "eth0", "netns", second)
        for host, space in spaces.items():
            ip("-n", space, "addr", "add", f"{HOSTS[host]}/24", "dev", "eth0")
            ip("-n", space, "link", "set", "eth0", "up")
            ip("-n", space, "link", "set", "lo", "up")
        yield spaces
    finally:
        for space in spaces.values():
            left = subprocess.run(
                ["ip", "netns", "pids", space], capture_output=True, text=True, timeout=20, check=False
            ).stdout.split()
            for pid in left:
                os.kill(int(pid), 9)
            subprocess.run(["ip", "netns", "del", space], capture_output=True, timeout=20, check=False)


def train(spaces: dict[str, str], bundle: Path, folder: Path, options: argparse.Namespace) -> list[float]:
    """Run torchrun on each host, and read the metrics that rank 0 wrote."""
    metrics, running = folder / "metrics.jsonl", []
    # torchrun looks up the name of a caller, and there is no name server here.
    (folder / "hosts").write_text(
        "\n".join(["127.0.0.1 localhost", *(f"{address} {host}" for host, address in HOSTS.items())]) + "\n"
    )
    alike = 'hostname "$0" && mount --bind "$1" /etc/hosts && shift && exec "$@"'
    run = [
        sys.executable,
        "-m",
        "penstock",
        "run",
        str(bundle),
        "--steps",
        str(options.steps),
        "--metrics",
        str(metrics),
    ]
    for i, (host, space) in enumerate(spaces.items()):
        meet = (
            f"--nnodes 2 --node-rank {i} --nproc-per-node 1 --master-addr {HOSTS['alpha']} --master-port 29500".split()
        )
        command = [sys.executable, "-m", "torch.distributed.run", *meet, "--no-python", *run]
        print(f"{host}: {shlex.join(command)}", file=sys.stderr)
        named = [
            "ip",
            "netns",
            "exec",
            space,
            "unshare",
            "--uts",
            "sh",
            "-c",
            alike,
            host,
            str(folder / "hosts"),
            *command,
        ]
        running.append(
            subprocess.Popen(named, stdin=subprocess.DEVNULL, stderr=subprocess.PIPE if i == 0 else None, text=True)
        )
    log = running[0].communicate(timeout=options.timeout)[1]
    codes = [process.wait(timeout=options.timeout) for process in running]
    sys.stderr.write(log)
    if any(codes):
        sys.exit(f"exit codes of the two hosts: {codes}")
    print(
        next(
            (line for line in log.splitlines() if "2 ranks on 2 hosts" in line),
            "the ranks did not say that they are on two hosts",
        )
    )
    return [json.loads(line)["loss"] for line in metrics.read_text().splitlines()]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument(
        "--out", type=Path, help="keep model, cluster file, bundle and metrics in this folder (default: keep nothing)"
    )
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--timeout", type=float, default=300, help="seconds that the hosts may take")
    parser.add_argument(
        "--backend",
        default="tvm",
        choices=("tvm", "numpy"),
        help="numpy interprets stages instead of compiling them: slow steps, at once",
    )
    options = parser.parse_args()
    signal.signal(signal.SIGTERM, lambda *_: sys.exit("ended"))  # so that namespaces are removed then, too
    missing = [] if os.geteuid() == 0 else ["root"]
    missing += [tool for tool in ("ip", "unshare") if shutil.which(tool) is None]
    if missing:
        print(f"cannot make network namespaces here, which needs {' and '.join(missing)}", file=sys.stderr)
        sys.exit(CANNOT_RUN)

    with tempfile.TemporaryDirectory() if options.out is None else nullcontext(options.out) as place:
        folder = Path(place).resolve()
        folder.mkdir(parents=True, exist_ok=True)
        (folder / "cluster.toml").write_text(CLUSTER)
        model = ps.from_onnx(write_mlp(folder / "mlp.onnx", [16, 256, 256, 4], batch=16))
        training = ps.Training("cross_entropy", ps.Momentum(lr=0.02), microbatches=4)
        plan = ps.plan(model, ps.Cluster.load(folder / "cluster.toml"), training, schedule="2bw")
        bundle = ps.compile(plan, folder / "bundle", backend=options.backend)
        try:
            with namespaces() as spaces:
                losses = train(spaces, bundle, folder, options)
        except subprocess.CalledProcessError as error:
            print(f"cannot make network namespaces here: {error.stderr.strip()}", file=sys.stderr)
            sys.exit(CANNOT_RUN)
        alone = ps.run_bundle(bundle, steps=options.steps).losses
    print(
        f"{len(losses)} steps on two hosts: loss {losses[0]:.4f} -> {losses[-1]:.4f}; "
        f"on one: {alone[0]:.4f} -> {alone[-1]:.4f}"
    )
    if losses != alone:
        sys.exit("losses are not those of one host")


if __name__ == "__main__":
    main()
