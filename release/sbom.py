"""Writes a bill of materials of what `penstock` runs on here: CycloneDX 1.6, JSON.

In: the distributions installed in this environment that penstock needs, with what those need, followed through their metadata; extras add
theirs. Out: a component for each, with name, version, licence as its metadata say it, and what it depends on. The same environment gives
the same bytes: there is no date, and the serial number is made of the content. Fails, naming all of them, where a component is missing or
is not pinned in constraints.txt with the version that is installed.

Known limits: only Python distributions; libraries inside of wheels, such as those of torch's build, are not taken apart.
"""

from __future__ import annotations

import argparse
import json
import re
import sys
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from importlib.metadata import Distribution, PackageNotFoundError, distribution
from pathlib import Path
from typing import Any
from urllib.parse import quote

from packaging.requirements import Requirement
from packaging.utils import canonicalize_name
from packaging.version import Version

ROOT = Path(__file__).resolve().parents[1]
START, TORCH = "penstock", "torch"
# Makes serial numbers of documents of this kind differ from those made of the same bytes by others.
_SPACE = uuid.uuid5(uuid.NAMESPACE_OID, "penstock bill of materials")


@dataclass(frozen=True)
class Part:
    """An installed distribution and the canonical names of those it needs here."""

    found: Distribution
    needs: tuple[str, ...]


def parts_of(start: str, extras: Sequence[str]) -> tuple[dict[str, Part], list[str]]:
    """All distributions that `start` needs with these extras, by canonical name, and those that are needed and not installed."""
    parts: dict[str, Part] = {}
    missing: list[str] = []
    asked: dict[str, set[str]] = {}
    waiting = [(canonicalize_name(start), frozenset(extras))]
    while waiting:
        name, more = waiting.pop()
        if name in asked and more <= asked[name]:
            continue
        asked.setdefault(name, set()).update(more)
        try:
            found = distribution(name)
        except PackageNotFoundError:
            missing.append(name)
            continue
        needed = [Requirement(text) for text in found.requires or ()]
        chosen = [
            need
            for need in needed
            if need.marker is None or any(need.marker.evaluate({"extra": e}) for e in ("", *asked[name]))
        ]
        parts[name] = Part(found, tuple(sorted({canonicalize_name(need.name) for need in chosen})))
        waiting += [(canonicalize_name(need.name), frozenset(need.extras)) for need in chosen]
    return dict(sorted(parts.items())), sorted(set(missing))


def pins(text: str) -> dict[str, str]:
    """The versions of a constraints file, by canonical name."""
    found = re.findall(r"^([\w.\-]+)==(\S+)$", text, re.MULTILINE)
    return {canonicalize_name(name): version for name, version in found}


def not_pinned(parts: Mapping[str, Part], pinned: Mapping[str, str]) -> list[str]:
    """What of the parts has no pin, or another one; builds of a version (torch's +cpu) count as that version. What torch alone brings may
    go without: its builds for GPUs need other packages than the one for CPUs, in versions that torch itself pins."""
    wrong, others = [], _needed_without(TORCH, parts)
    for name, part in parts.items():
        version = Version(part.found.version).public
        if name != START and pinned.get(name) != version and (name in pinned or name in others):
            wrong.append(f"{name}: installed is {version}, constraints.txt has {pinned.get(name, 'no pin')}")
    return wrong


def _needed_without(left_out: str, parts: Mapping[str, Part]) -> set[str]:
    """What is needed, not counting what that one needs."""
    found, waiting = {START, left_out}, [START]
    while waiting:
        more = {need for need in parts[waiting.pop()].needs if need in parts} - found
        found |= more
        waiting += more
    return found


def _licenses(found: Distribution) -> list[dict[str, Any]]:
    """As the metadata say it: an expression, else the names of classifiers, else a short text."""
    said = found.metadata
    if said["License-Expression"]:
        return [{"expression": said["License-Expression"]}]
    classified = [
        text.rpartition(" :: ")[2] for text in said.get_all("Classifier", []) if text.startswith("License :: ")
    ]
    short = [said["License"]] if said["License"] and len(said["License"]) < 80 and "\n" not in said["License"] else []
    return [{"license": {"name": name}} for name in classified or short]


def _reference(part: Part) -> str:
    return f"pkg:pypi/{canonicalize_name(part.found.name)}@{quote(part.found.version)}"


def _component(part: Part, kind: str) -> dict[str, Any]:
    reference = _reference(part)
    fields = {
        "type": kind,
        "bom-ref": reference,
        "name": part.found.name,
        "version": part.found.version,
        "purl": reference,
    }
    licenses = _licenses(part.found)
    return fields | ({"licenses": licenses} if licenses else {})


def bill(parts: Mapping[str, Part]) -> dict[str, Any]:
    """The document."""
    content = {
        "metadata": {"component": _component(parts[START], "application")},
        "components": [_component(part, "library") for name, part in parts.items() if name != START],
        "dependencies": [
            {"ref": _reference(part), "dependsOn": sorted(_reference(parts[need]) for need in part.needs)}
            for part in parts.values()
        ],
    }
    serial = uuid.uuid5(_SPACE, json.dumps(content, sort_keys=True))
    return {
        "bomFormat": "CycloneDX",
        "specVersion": "1.6",
        "serialNumber": f"urn:uuid:{serial}",
        "version": 1,
        **content,
    }


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n\n")[0] if __doc__ else None)
    parser.add_argument("--out", type=Path, required=True, metavar="FILE.json")
    parser.add_argument(
        "--extra", action="append", default=[], metavar="NAME", help="an extra of penstock to count in, such as parquet"
    )
    parser.add_argument("--constraints", type=Path, default=ROOT / "constraints.txt", metavar="FILE")
    options = parser.parse_args(arguments)
    parts, missing = parts_of(START, options.extra)
    wrong = [f"{name} is needed and not installed" for name in missing]
    wrong += not_pinned(parts, pins(options.constraints.read_text(encoding="utf-8")))
    if wrong:
        sys.exit("\n".join(wrong))
    options.out.parent.mkdir(parents=True, exist_ok=True)
    options.out.write_text(json.dumps(bill(parts), indent=2) + "\n", encoding="utf-8")
    print(f"{options.out}: penstock and {len(parts) - 1} distributions that it needs")


if __name__ == "__main__":
    main()
