"""The subject of `penstock inspect` and other views: a bundle, an IR file or a dump folder, opened as one module.

In: the path of a bundle, an IR file or a dump folder. Out: its module, with the bundle or the dumps if it is one.

The module of a dump folder is its last one. A bundle may come with the dump folder of its compilation, which records
the changes of passes.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

from penstock.inspection.dump_reading import dumped_passes
from penstock.ir.files import read_module
from penstock.ir.graph import Module
from penstock.support.errors import UsageError
from penstock.support.words import visible

if TYPE_CHECKING:
    from penstock.backends.bundle.format import Bundle
    from penstock.inspection.dump_reading import Dumped
    from penstock.ir.ladder.ladder import Ladder

_EXPECTED = "expected a bundle directory, a dump folder or an IR file"


@dataclass(frozen=True)
class Subject:
    """A module with the bundle or the dumps that it was read from."""

    path: Path
    module: Module
    bundle: Bundle | None = None
    dumps: tuple[Dumped, ...] = ()

    @cached_property
    def plan(self) -> dict[str, Any]:
        """The plan.json of a bundle or a dump folder; empty for all else."""
        # Imported here: a subject without a plan needs no reader of plans.
        from .plan_reading import checked_plan, plan_of_folder  # lazy: heavy

        return plan_of_folder(self.path) if self.bundle is None else checked_plan(self.bundle.plan, self.path)

    @property
    def ladder(self) -> Ladder[Module] | None:
        """The modules of all sizes of a bundle."""
        return None if self.bundle is None else self.bundle.ladder

    @property
    def source_names(self) -> dict[str, list[str]]:
        """The source model's names, by those of the module of a bundle."""
        names = (self.bundle.source_names if self.bundle is not None else None) or {}
        return {ours.removeprefix("%"): theirs for ours, theirs in names.items()}

    @property
    def renamed(self) -> dict[str, str]:
        """The source model's names of what the module of a bundle spells otherwise."""
        names = self.source_names.items()
        return {ours: visible(theirs[0]) for ours, theirs in names if theirs and ours not in theirs}

    @property
    def backend(self) -> str:
        """The back end of a bundle, else the one that kernels are for."""
        return "tvm" if self.bundle is None else self.bundle.manifest.backend


def open_subject(path: str | Path, dumps: str | Path | None = None) -> Subject:
    """Open the thing at a path. `dumps` is a dump folder beside it. A bundle is checked as for a run."""
    place = Path(path)
    if place.suffix == ".onnx":
        raise UsageError(
            "is a model, and not compiled",
            where=str(path),
            hint="`penstock plan` says what would become of it; `penstock compile` makes a bundle to look at",
        )
    if dumps is None and not place.is_dir():
        return Subject(place, read_module(place, _EXPECTED))

    beside = tuple(dumped_passes(dumps)) if dumps is not None else ()
    if dumps is not None and not beside:
        raise UsageError(
            "holds no NN_pass.ir", where=str(dumps), hint="give a folder that `penstock compile --dump-ir` wrote"
        )
    if not place.is_dir():
        return Subject(place, read_module(place), None, beside)
    if listed := tuple(dumped_passes(place)):
        if dumps is not None:
            raise UsageError(
                "is a dump folder itself", where=str(path), hint="--dumps goes with a bundle or an IR file"
            )
        return Subject(place, listed[-1].module, None, listed)
    from penstock.backends.bundle.format import open_bundle  # lazy: heavy

    bundle = open_bundle(place)
    return Subject(place, bundle.module, bundle, beside)


def load_module(path: str | Path) -> Module:
    """Return the module of a bundle, of an IR file, or the last one of a dump folder."""
    return open_subject(path).module
