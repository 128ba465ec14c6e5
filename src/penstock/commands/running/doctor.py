"""`penstock doctor`: what this machine is and can do, and a cluster file of it."""

from __future__ import annotations

import json
from argparse import ArgumentParser, Namespace
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from penstock.commands.arguments import add_settings, settings_from
from penstock.ir.cluster.cluster import MEASURED
from penstock.ir.cluster.gpus import sheet_of
from penstock.support.atomic_files import replacing
from penstock.support.errors import UsageError
from penstock.support.settings import POSITIVE, setting
from penstock.support.terminal import say, table
from penstock.support.words import shown_bytes

if TYPE_CHECKING:
    from penstock.doctor.examine import DoctorReport
    from penstock.ir.cluster.cluster import Cluster, Device


@dataclass(frozen=True)
class DoctorOptions:
    """Settings of an examination of this machine."""

    cluster_out: str | None = setting(None, "cluster file to write, TOML or YAML (.yaml)", shown="FILE")
    devices: int | None = setting(
        None, "equal CPU devices to divide the machine into (default: 1)", check=POSITIVE, shown="N"
    )
    threads: str | None = setting(None, "threads of each CPU device, e.g. 3,1", shown="LIST")
    json: bool = setting(False, "print everything as JSON")


def add_arguments(parser: ArgumentParser) -> None:
    """Add the devices to make of it, and where the cluster file goes."""
    add_settings(parser, DoctorOptions)


def run(arguments: Namespace) -> None:
    """Measure, print what there is, and write the cluster file."""
    from penstock.doctor.examine import examine  # lazy: heavy
    from penstock.ir.cluster.file import cluster_text  # lazy: heavy

    options = settings_from(DoctorOptions, arguments)
    if options.cluster_out:
        _check_place(Path(options.cluster_out))
    threads = _threads(options.threads)
    if threads and options.devices not in (None, len(threads)):
        raise UsageError(f"--threads has {len(threads)} numbers, --devices is {options.devices}")
    report = examine(threads, options.devices, say)
    if report is None:
        return
    if options.json:
        print(json.dumps(_plain(report), indent=2))
    else:
        print("\n".join(_lines(report)))
    for problem in report.problems:
        say(f"problem: {problem}")
    if options.cluster_out:
        path = Path(options.cluster_out)
        with replacing(path) as work:
            work.write_text(cluster_text(report.cluster, path), encoding="utf-8")
        say(f"wrote {options.cluster_out}")


def _threads(text: str | None) -> tuple[int, ...]:
    if text is None:
        return ()
    words = [word.strip() for word in text.split(",")]
    if not all(word.isascii() and word.isdecimal() and 1 <= int(word) < 2**16 for word in words):
        raise UsageError(f"bad --threads {text!r}, expected a number of threads for each device, e.g. --threads 3,1")
    return tuple(map(int, words))


def _check_place(path: Path) -> None:
    """Raise UsageError where the file cannot be written: measuring takes a minute, and should not end in a folder that
    is not there."""
    if path.is_dir() or not path.absolute().parent.is_dir():
        raise UsageError(
            "is a folder" if path.is_dir() else f"there is no folder {path.absolute().parent}",
            where=f"--cluster-out {path}",
        )


def _plain(report: DoctorReport) -> dict[str, object]:
    import msgspec  # lazy: heavy

    return {
        "hosts": [msgspec.to_builtins(host) for host in report.hosts],
        "cluster": {
            "devices": [{"name": d.name, **d.fields(), "spaces": dict(d.spaces)} for d in report.cluster.devices],
            "links": [asdict(link) for link in report.cluster.links],
            "hosts": [asdict(host) for host in report.cluster.hosts],
            "classes": {c.kind: c.fields() for c in report.cluster.classes},
            "spaces": [{"name": space.name, **space.fields()} for space in report.cluster.spaces],
        },
        "pairs": [
            {"hosts": [report.hosts[i].name for i in pair], **wire._asdict()} for pair, wire in report.pairs.items()
        ],
        "problems": report.problems,
        "seconds": round(report.seconds, 3),
    }


def _sheet_lines(devices: Sequence[Device]) -> list[str]:
    """Return what data sheets say of GPUs whose rates are not measured."""
    lines = []
    for device in devices:
        if device.kind == "cuda" and device.source != MEASURED:
            sheet = sheet_of(device.target)
            rates = {"f32": sheet.f32, "tf32": sheet.tf32, "bf16": sheet.bf16, "f16": sheet.f16}
            listed = ", ".join(f"{name} {rate / 1e12:.4g}" for name, rate in rates.items() if rate)
            lines.append(f"{device.name}: not measured; data sheet of {sheet.card}: {listed} TFLOP/s")
    return lines


def _lines(report: DoctorReport) -> list[str]:
    lines = []
    for host in report.hosts:
        quota = "" if host.quota is None else f", {host.quota:g} cores' worth of time allowed"
        free = "unknown" if host.free is None else shown_bytes(host.free)
        caches = ", ".join(f"{level} {shown_bytes(count)}" for level, count in host.caches.items()) or "unknown"
        lines += [
            f"host {host.name}: {host.processor or 'unknown processor'}, {host.cores} cores{quota}, caches {caches}",
            f"memory: {shown_bytes(host.memory)}, free {free}",
            ", ".join(f"{name} {version}" for name, version in host.versions.items()),
            "",
        ]
    rows = []
    for d in report.cluster.devices:
        shares = dict(d.efficiency)
        cells = [
            f"{shares[k]:.2f}" if k in shares else "-"
            for k in ("products", "products.bf16", "convolutions", "squares", "attention", "elements")
        ]
        memory = "-" if d.memory is None else shown_bytes(d.memory)
        near = f"{d.cache_bandwidth / 1e9:.1f} ({shown_bytes(d.cache)})" if d.cache else "-"
        rows.append(
            [
                d.name,
                d.target,
                d.threads,
                memory,
                f"{d.flops / 1e9:.4g}",
                f"{d.bandwidth / 1e9:.3g}",
                near,
                *cells,
                f"{d.overhead * 1e6:.2f}",
            ]
        )
    heads = [
        "device",
        "target",
        "threads",
        "memory",
        "GFLOP/s",
        "GB/s",
        "cache GB/s",
        "products",
        "bf16",
        "conv",
        "squares",
        "attention",
        "elements",
        "kernel us",
    ]
    shares_of = "columns products to elements: share of GFLOP/s that this work reaches"
    lines += [table(heads, rows), "", shares_of, *_sheet_lines(report.cluster.devices), ""]
    lines += _link_lines(report.cluster)
    return [*lines, f"measured in {report.seconds:.0f} s"]


def _link_lines(cluster: Cluster) -> list[str]:
    """Return the rates of links, and of ways to disks."""
    wires = [[c.kind, f"{c.bandwidth / 1e9:.3g}", f"{c.latency * 1e6:.1f}"] for c in cluster.classes]
    wires += [
        [f"{link.a} - {link.b}", f"{link.bandwidth / 1e9:.3g}", f"{link.latency * 1e6:.1f}"] for link in cluster.links
    ]
    wires += [
        [" of ".join(filter(None, (space.name, space.host))), f"{space.bandwidth / 1e9:.3g}", "-"]
        for space in cluster.spaces
    ]
    return [table(["link", "GB/s", "latency us"], wires), ""] if wires else []
