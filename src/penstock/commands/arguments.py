"""Arguments that commands have in common: flags of settings, and those of a model, its inputs, devices, training and
dumps.

Help texts and checks of single values are those of the settings. What arguments mean together is for the commands.
"""

from __future__ import annotations

import argparse
import os
import re
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING, Any, TypeVar

from penstock.planning.options import PlanOptions, ReadingOptions, SearchOptions, TrainingOptions
from penstock.support.errors import UsageError
from penstock.support.paths import file_problem
from penstock.support.settings import Description, defaults_of, flags_of, settings_of

from .rare import show_rarely
from .types import device_list, reader

if TYPE_CHECKING:
    from penstock.inspection.dump import Dump
    from penstock.ir.ladder.bounds import Bound

Flags = argparse._ActionsContainer
Kind = TypeVar("Kind")

# ------------------------------------------------------------------------------------------------ settings


def add_settings(parser: Flags, kind: type, *names: str, left_open: bool = False) -> None:
    """Add a flag for each of these settings of a verb, or for all of them. Where they may be `left_open`, one that is
    not given is None instead of its default."""
    defaults = {} if left_open else defaults_of(kind)
    for name, setting in settings_of(kind).items():
        if not names or name in names:
            _add_setting(parser, name, setting, name not in defaults and not left_open, defaults.get(name))


def _add_setting(parser: Flags, name: str, setting: Description, needed: bool, default: Any) -> None:
    about: dict[str, Any] = {"help": setting.help, "metavar": setting.shown}
    if setting.many:
        about |= {"action": "append", "default": []}
    elif setting.words is not None:
        about |= {"choices": tuple(setting.words), "default": _word(setting, default)}
    elif default is False:
        about = {"help": setting.help, "action": "store_true"}
    else:
        about |= {"choices": setting.choices or None, "default": default}
    if setting.check is not None:
        about["type"] = reader(setting.check)
    if setting.read is not None:
        about["type"] = setting.read
    if needed:
        about["required"] = True
    action = parser.add_argument(*flags_of(name, setting), dest=name, **about)
    if setting.rare:
        show_rarely(action)


def _word(setting: Description, default: object) -> str | None:
    return next((word for word, value in (setting.words or {}).items() if value == default), None)


def settings_from(kind: type[Kind], arguments: argparse.Namespace, **known: Any) -> Kind:
    """Return the settings of a verb: those that are `known`, those that arguments give, and defaults for all others."""
    described = {name: (setting, getattr(arguments, name, None)) for name, setting in settings_of(kind).items()}
    values = {
        name: value if setting.words is None else setting.words[value]
        for name, (setting, value) in described.items()
        if value is not None
    }
    return kind(**{**values, **known})


# ------------------------------------------------------------------------------------------------ models


def add_model_arguments(parser: argparse.ArgumentParser, optional: bool = False, metavar: str = "MODEL.onnx") -> None:
    """Add the arguments of `plan` and `compile`, and of `verify`, which takes more than models."""
    _add_reading(parser.add_argument_group("model"), optional, metavar)
    _add_dividing(parser.add_argument_group("devices and plan"))
    add_settings(parser.add_argument_group("training (without a loss, the bundle is for inference)"), TrainingOptions)
    add_dump_arguments(parser, default=os.environ.get("PENSTOCK_DUMP"))


def _add_reading(model: Flags, optional: bool, metavar: str) -> None:
    """Add the model, and the settings of its import."""
    model.add_argument("model", metavar=metavar, nargs="?" if optional else None)
    add_settings(model, ReadingOptions)
    add_settings(model, PlanOptions, "precision", left_open=True)
    add_settings(model, PlanOptions, "weights")


def _add_dividing(dividing: Flags) -> None:
    """Add the division of the work: devices, stages, microbatches, their order, and where stages begin."""
    devices = dividing.add_mutually_exclusive_group()
    devices.add_argument("--cluster", metavar="FILE", help="cluster file, TOML or YAML (.yaml, .yml)")
    devices.add_argument(
        "--devices",
        type=device_list,
        metavar="N|LIST",
        help="N equal CPU devices on this machine, or a list of `cpu` and CUDA architectures, e.g. cpu,sm_90 "
        "(default: 1)",
    )
    add_settings(dividing, PlanOptions, "stages", left_open=True)
    add_settings(dividing, PlanOptions, "microbatches", left_open=True)
    add_settings(dividing, SearchOptions, "batch", left_open=True)
    add_settings(dividing, PlanOptions, "schedule", left_open=True)
    plan = dividing.add_argument(
        "--plan",
        metavar="FILE.json",
        help="carry out this plan: what `penstock plan --json` printed, or the plan.json of a bundle, perhaps edited",
    )
    show_rarely(plan)
    add_settings(dividing, PlanOptions, "mesh", "shard", "zero")
    add_settings(dividing, PlanOptions, "packs", "replicas", "recompute", "wire", left_open=True)
    add_settings(dividing, PlanOptions, "offload", "spill", "update_on", "objective", left_open=True)
    add_settings(dividing, PlanOptions, "split_by", left_open=True)
    add_settings(dividing, PlanOptions, "split_at", "pin", "hints", "cuda_libraries")


def add_dump_arguments(parser: argparse.ArgumentParser, default: str | None = None) -> None:
    """Add the arguments of commands that run passes; `default` is the folder if none is named."""
    dumping = parser.add_argument_group("dumps (docs/debugging.md)")
    dumping.add_argument(
        "--dump-ir",
        metavar="DIR",
        default=default,
        help="dump the module after every pass that changes it, and what is made of it"
        + (" (default: $PENSTOCK_DUMP, else no dump)" if parser.prog.endswith(("plan", "compile")) else ""),
    )
    only = dumping.add_argument(
        "--dump-ir-filter",
        metavar="REGEX",
        help="dump only operations whose line FILE @GRAPH OPERATION matches, e.g. '_fuse @' for a pass, '@s0[.]F ' "
        "for a graph, '= matmul'",
    )
    changed = dumping.add_argument(
        "--dump-ir-changed",
        action="store_true",
        help="dump what each pass changed, by name, in place of whole modules; without --dump-ir print it on stderr",
    )
    if parser.prog.endswith(("plan", "compile")):
        show_rarely(only, changed)


# ------------------------------------------------------------------------------------------------ values


def dims_of(words: Iterable[str]) -> dict[str, int]:
    """Read sizes of symbolic dimensions."""
    dims = bounded_dims_of(words)
    bounds = [name for name, size in dims.items() if not isinstance(size, int)]
    if bounds:
        raise UsageError(
            f"--dim {bounds[0]}{dims[bounds[0]]}: a bound is for `compile` and `plan`",
            hint=f"give one size, such as --dim {bounds[0]}=4",
        )
    return {name: size for name, size in dims.items() if isinstance(size, int)}


def bounded_dims_of(words: Iterable[str]) -> dict[str, int | Bound]:
    """Read sizes and bounds of symbolic dimensions."""
    from penstock.ir.ladder.bounds import parse_bound  # lazy: heavy

    dims: dict[str, int | Bound] = {}
    for word in words:
        name, bounded, bound = word.partition("<=")
        if bounded and name:
            try:
                dims[name.strip()] = parse_bound(f"<={bound}")
            except ValueError as error:
                raise UsageError(f"bad --dim {word!r}: {error}", hint="write --dim 'seq<=512'") from error
            continue
        # A name may hold the sign, a number does not.
        name, equals, number = word.rpartition("=")
        if not equals or not (number.isascii() and number.isdecimal()) or not 1 <= int(number) < 2**31:
            raise UsageError(
                f"bad --dim {word!r}, expected NAME=INT with a number from 1 to {2**31 - 1}, e.g. --dim batch=4, "
                "or NAME<=INT for all sizes up to it"
            )
        dims[name] = int(number)
    return dims


def known_of(words: Iterable[str]) -> dict[str, object]:
    """Read values of inputs: numbers between commas, or the path of an array file."""
    import numpy as np  # lazy: heavy

    values: dict[str, object] = {}
    for word in words:
        name, equals, text = word.partition("=")
        if not name or not equals:
            raise UsageError(f"bad --known {word!r}, expected NAME=NUMBERS or NAME=FILE.npy, e.g. --known axes=0,1")
        if text.endswith(".npy"):
            try:
                values[name] = np.load(text, allow_pickle=False)
            except (OSError, ValueError) as error:
                raise UsageError(f"--known {name}: {text} cannot be read: {error}") from error
            continue
        try:
            values[name] = [_number(part.strip()) for part in text.split(",")] if text else []
        except ValueError:
            raise UsageError(
                f"bad --known {word!r}: {text!r} is neither numbers between commas nor the path of a .npy file"
            ) from None
    return values


def _number(text: str) -> bool | int | float:
    if text in ("true", "false"):
        return text == "true"
    return int(text) if re.fullmatch(r"[+-]?[0-9]+", text) else float(text)


def check_writable(places: Mapping[str, str | None]) -> None:
    """Raise UsageError for files, by their flags, that cannot be written: before the work that would fill them."""
    problems = [
        f"cannot write {flag} {path}: {problem}"
        for flag, path in places.items()
        if path is not None and (problem := file_problem(os.path.abspath(path)))
    ]
    if problems:
        raise UsageError("; ".join(problems))


def dump_of(arguments: argparse.Namespace) -> Dump | None:
    """Return the dump folder that --dump-ir and its sisters request; None without them."""
    from penstock.inspection.dump import Dump  # lazy: heavy

    if arguments.dump_ir or arguments.dump_ir_changed:
        return Dump(arguments.dump_ir or None, only=arguments.dump_ir_filter, changed=arguments.dump_ir_changed)
    if arguments.dump_ir_filter is not None:
        raise UsageError("--dump-ir-filter without a dump to filter", hint="add --dump-ir DIR, or --dump-ir-changed")
    return None
