"""Write the parts of the documentation that come from the code: between `<!-- begin NAME -->` and `<!-- end NAME -->`.

python docs/refresh.py            rewrite what is out of date (`make docs`)
python docs/refresh.py --check    exit 1 and name what is out of date; the tests do the same
"""

from __future__ import annotations

import json
import re
import sys
import textwrap
from collections.abc import Callable, Iterator, Sequence
from importlib import import_module
from pathlib import Path

HERE = Path(__file__).resolve().parent
BISECT = HERE.parent / "tests" / "verification" / "bisect"
REGION = re.compile(r"(?P<begin><!-- begin (?P<name>[\w-]+) -->\n).*?(?P<end><!-- end (?P=name) -->\n)", re.DOTALL)


def block(text: str) -> str:
    """Text set as it stands."""
    return f"```text\n{text.rstrip()}\n```\n"


def docstring(module: str, first: str, last: str | None = None) -> str:
    """Lines of a module's docstring, from the one that begins with `first` up to (not with) the one that begins with `last`."""
    from inspect import cleandoc

    lines = cleandoc(import_module(module).__doc__ or "").splitlines()
    begin = next(i for i, line in enumerate(lines) if line.strip().startswith(first))
    end = next(
        (i for i, line in enumerate(lines) if last is not None and i > begin and line.strip().startswith(last)),
        len(lines),
    )
    return block("\n".join(lines[begin:end]))


def ops() -> str:
    """The op table with what supports each row."""
    from penstock.inspection.reference.coverage import coverage

    header, rows = coverage()
    lines = [
        header,
        ["---"] * len(header),
        *(["`" + row[0] + "`", *(str(cell).replace("|", "\\|") for cell in row[1:])] for row in rows),
    ]
    return "".join(f"| {' | '.join(line)} |\n" for line in lines)


def zero_levels() -> str:
    """The levels of the pass `zero`."""
    return docstring("penstock.passes.sharding.replicas.zero", "level ", "Types say it")


def coverage_words() -> str:
    """What stands in the columns of the op table."""
    from penstock.inspection.reference.coverage import MEANINGS

    return "\n".join(["", *(f"* `{word}`: {meaning}" for word, meaning in MEANINGS.items()), "", ""])


def seeded_bugs() -> str:
    """What the bugs of tests/verification/bisect were found to be."""
    rows = json.loads((BISECT / "record.json").read_text(encoding="utf-8"))
    lines = [
        f"| {row['bug']} | {row['found by']} | {row['place']} | `{row['tensor']}` | {row['error'] or '-'} |"
        for row in rows
    ]
    return "\n".join(["| bug | found by | place | tensor | error |", "| --- | --- | --- | --- | --- |", *lines, ""])


def walkthrough(name: str) -> str:
    """A case of debugging, as its test keeps it."""
    return block((BISECT / "walkthrough" / f"{name}.txt").read_text(encoding="utf-8"))


def gpu_sheets() -> str:
    """The table of architectures and their usual cards."""
    from penstock.ir.cluster.gpus import SHEETS

    def rate(value: float, unit: float) -> str:
        return f"{value / unit:,.4g}" if value else "-"

    lines = [
        "| architecture | card | f32 | tf32 | bf16 | f16 | memory |",
        "| --- | --- | --- | --- | --- | --- | --- |",
    ]
    for target, sheet in SHEETS.items():
        cells = [rate(value, 1e12) for value in (sheet.f32, sheet.tf32, sheet.bf16, sheet.f16)]
        lines.append(f"| {' | '.join([target, sheet.card, *cells, rate(sheet.bandwidth, 1e9)])} |")
    return "\n".join(["", *lines, "", ""])


def onnx_operators() -> str:
    import onnx

    from penstock.frontends.onnx.control import CONTROL
    from penstock.frontends.onnx.functions import has_definition
    from penstock.frontends.onnx.table import FOLD_ONLY, OTHERS, RULES

    own = {*RULES, *CONTROL}
    defined = {s.name for s in onnx.defs.get_all_schemas() if s.domain == "" and has_definition(s.name)} - own
    others = "".join(f"Of {domain}: {', '.join(sorted(rules))}.\n\n" for domain, rules in OTHERS.items())
    return (
        f"{len(own)} operators: {', '.join(sorted(own))}.\n\n{others}"
        f"By the definition that ONNX gives, where it comes to these: {', '.join(sorted(defined))}.\n\n"
        f"Only on operands known at import: {', '.join(sorted(FOLD_ONLY - defined))}.\n"
    )


def rules_of_constants() -> str:
    """The rules by which an import takes initializers for parameters or constants, in their order."""
    from penstock.frontends.onnx.constants.rules import RULES

    rows = [f"| `{rule.name}` | {'trained' if rule.trained else 'constant'} | {rule.reason} |\n" for rule in RULES]
    return "".join(["| rule | makes it | because it is |\n", "| --- | --- | --- |\n", *rows])


def torch_operations() -> str:
    from penstock.frontends.torch.table import CHECKS, RULES, WHOLE

    lines = [
        f"{len(RULES)} operations and overloads of ATen: {', '.join(f'`{name}`' for name in sorted(RULES))}.",
        f"Kept whole, though torch could decompose them: {', '.join(f'`{name}`' for name in sorted(WHOLE))}.",
        f"Left out, because they compute nothing: {', '.join(f'`{name}`' for name in sorted(CHECKS))}.",
    ]
    return "\n\n".join(lines) + "\n"


def families() -> str:
    """The families that tests/models tries."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from models.families import FAMILIES

    return f"{len(FAMILIES)} families: {', '.join(FAMILIES)}.\n"


def conformance() -> str:
    """How many of ONNX's node tests pass, by the lists of those that do not, which the tests keep true."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from conformance.cases import COUNTS, NUMERIC, PLAIN
    from conformance.execution import FAILED, FOLDED, INTERPRETER, KNOWN, TVM
    from conformance.gaps import file_of, read_gaps

    lines = [
        "| tests | through | passed | of them as given | with shapes known | all inputs known | failed |\n",
        "| --- " * 7 + "|\n",
    ]
    for way, sets in ((INTERPRETER, (NUMERIC, PLAIN)), (TVM, (PLAIN,))):
        listed = read_gaps(file_of(way))
        for name in sets:
            rows = [status for test, (status, _) in listed.items() if name == NUMERIC or "_expanded" not in test]
            failed, known, folded = (rows.count(status) for status in (FAILED, KNOWN, FOLDED))
            counts = (COUNTS[name] - failed, COUNTS[name] - len(rows), known, folded, failed)
            lines.append(f"| {COUNTS[name]} {name} | {way} | {' | '.join(map(str, counts))} |\n")
    return "".join(lines)


def mutants() -> str:
    """What the last runs of the mutation tool found."""
    sys.path.insert(0, str(HERE.parent / "tests"))
    from mutation.results import read_results, table

    return "".join(f"{line}\n" for line in table(read_results()))


def onnx_support() -> str:
    """What ONNX's node tests say of each operator, and whether what it becomes can be trained and has kernels."""
    import json

    from penstock.backends.tvm.cuda.kernels.generate import KINDS
    from penstock.passes.rewrite.decompose import DECOMPOSE
    from penstock.passes.training.vjp import STOPS, VJP

    sys.path.insert(0, str(HERE.parent / "tests"))
    from conformance.execution import FAILED, INTERPRETER, TVM
    from conformance.gaps import file_of, read_gaps
    from conformance.operators import FILE

    failing = {
        way: {test for test, (status, _) in read_gaps(file_of(way)).items() if status == FAILED}
        for way in (INTERPRETER, TVM)
    }
    lines = [
        "| operator | node tests | interpreter | compiled for CPU | kernels for CUDA | training |\n",
        "| --- " * 6 + "|\n",
    ]
    for name, row in json.loads(FILE.read_text(encoding="utf-8")).items():
        passed = [len(set(row["tests"]) - failing[way]) for way in (INTERPRETER, TVM)]
        missing = sorted(set(row["floats"]).difference(VJP, STOPS, DECOMPOSE))
        flat = f"{' and '.join(f'`{kind}`' for kind in row['flat'])} {'is' if len(row['flat']) == 1 else 'are'} flat"
        training = (
            f"no gradient of {', '.join(f'`{kind}`' for kind in missing)}"
            if missing
            else "yes"
            if row["floats"]
            else "-"
        )
        if row["flat"]:
            training = f"{training}, but not of all operands: {flat}" if row["floats"] else f"no: {flat}"
        cuda = "-" if not row["kinds"] else "yes" if KINDS.union(DECOMPOSE, ["read"]).issuperset(row["kinds"]) else "no"
        lines.append(f"| {name} | {len(row['tests'])} | {passed[0]} | {passed[1]} | {cuda} | {training} |\n")
    return "".join(lines)


def passes() -> str:
    """Every pass with its options and the facts it needs and gives."""
    from dataclasses import MISSING, fields

    from penstock.ir.attrs import print_literal
    from penstock.passes.pipelines import PASSES

    lines = ["| pass | options | needs | gives | does |\n", "| --- | --- | --- | --- | --- |\n"]
    for row in PASSES.values():
        options = [
            f"`{f.name}`" if f.default is MISSING else f"`{f.name}={print_literal(f.default)}`"
            for f in fields(row.options)
        ]
        lines.append(
            f"| `{row.name}` | {' '.join(options)} | {', '.join(row.needs)} | {', '.join(row.gives)} | {row.doc} |\n"
        )
    return "".join(lines)


def pipeline(training: bool) -> Callable[[], str]:
    def text() -> str:
        from penstock.passes.manager import print_pipeline
        from penstock.passes.pipelines import PipelineOptions, inference_pipeline, training_pipeline

        calls = (
            training_pipeline(
                {"kind": "adamw", "lr": 3e-4}, {"stages": 2}, PipelineOptions(schedule="2bw", microbatches=4)
            )
            if training
            else inference_pipeline({"stages": 2}, PipelineOptions(microbatches=1))
        )
        return block(
            print_pipeline(calls)
            .replace(",", ",\n")
            .replace(",\nlr", ",lr")
            .replace(",\nmicrobatches", ",microbatches")
        )

    return text


def grid(kind: str, stages: int, microbatches: int, batches: int) -> Callable[[], str]:
    def text() -> str:
        from penstock.inspection.views.schedule_grid import format_grid
        from penstock.passes.schedules.schedule import build_schedule

        return block(format_grid(build_schedule(kind, stages, microbatches), batches))

    return text


def period(kind: str, stages: int, microbatches: int) -> Callable[[], str]:
    def text() -> str:
        from penstock.ir.text import print_schedule
        from penstock.passes.schedules.schedule import build_schedule

        return block("\n".join(line[2:] for line in print_schedule(build_schedule(kind, stages, microbatches))))

    return text


def moves_of_state(
    layers: int,
    offload: str = "state",
    microbatches: int = 4,
    batch: int = 4,
    memory: Sequence[int] = (),
    **options: object,
) -> str:
    """The computations and moves of a rank whose optimiser state is elsewhere, or what its forwards saved. Devices have
    so much memory each; two have no limit if none is given."""
    import tempfile
    from dataclasses import replace

    import penstock as ps
    from penstock.ir.schedule import COMPUTE
    from penstock.models import write_mlp

    with tempfile.TemporaryDirectory() as folder:
        model = ps.from_onnx(write_mlp(Path(folder) / "mlp.onnx", [8] * layers, batch=batch))
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=microbatches)
    cluster = ps.Cluster.local(len(memory) or 2)
    devices = (replace(d, spaces=(("ram", size),)) for d, size in zip(cluster.devices, memory, strict=False))
    cluster = replace(cluster, devices=tuple(devices) or cluster.devices)
    schedule = ps.plan(model, cluster, training, offload=offload, **options).module.schedule
    assert schedule is not None
    shown = [str(a) for a in schedule.ranks[0].batch if a.kind in COMPUTE or a.item]
    return block(textwrap.fill("rank 0 batch: " + " ".join(shown), 100, subsequent_indent="  "))


def updates_elsewhere() -> str:
    """The batches of two ranks and of the one that runs their updates, without what ranks send each other for
    microbatches."""
    import tempfile

    import penstock as ps
    from penstock.ir.schedule import COMPUTE
    from penstock.models import write_mlp

    with tempfile.TemporaryDirectory() as folder:
        model = ps.from_onnx(write_mlp(Path(folder) / "mlp.onnx", [8] * 6, batch=4))
    training = ps.Training(loss="mse", optimizer=ps.AdamW(lr=0.01), microbatches=4)
    options = {"schedule": "2bw", "update_on": "cpu:2", "split_at": ["fc3.product"]}
    schedule = ps.plan(model, ps.Cluster.local(3), training, **options).module.schedule
    assert schedule is not None
    lines = []
    for rank, program in schedule.ranks.items():
        shown = [str(a) for a in program.batch if a.kind in (*COMPUTE, "SP", "RP", "SU", "RU")]
        lines.append(textwrap.fill(f"rank {rank} batch: " + " ".join(shown), 100, subsequent_indent="  "))
    return block("\n".join(lines))


def prices_of_fates(widths: Sequence[int], batch: int, memory: int, microbatches: int, optimizer: str) -> str:
    """The argument of a plan under a limit of memory for what it moves and computes again."""
    import tempfile
    from dataclasses import replace

    import penstock as ps
    from penstock.ir.cluster.spaces import Space
    from penstock.models import write_mlp

    with tempfile.TemporaryDirectory() as folder:
        model = ps.from_onnx(write_mlp(Path(folder) / "mlp.onnx", widths, batch=batch))
    local = ps.Cluster.local(1, threads=(1,))
    small = replace(local, devices=(replace(local.devices[0], spaces=(("ram", memory),)),), spaces=(Space("disk"),))
    training = ps.Training(loss="mse", optimizer=getattr(ps, optimizer)(lr=0.01), microbatches=microbatches)
    prices = ps.plan(model, small, training, schedule="gpipe", offload="auto").prices
    assert prices is not None
    return block("\n".join(line for line in prices.lines() if ": no plan by " not in line))


def commands() -> str:
    """The first lines of `penstock --help`."""
    from penstock.commands.parser import command_line

    choices = next(action for action in command_line()._actions if action.dest == "command")
    return "".join(f"| `penstock {a.dest}` | {a.help} |\n" for a in choices._choices_actions)  # type: ignore[attr-defined]


def reference(part: str) -> Callable[[], str]:
    """What docs/code_reference.py has to say."""

    def text() -> str:
        sys.path.insert(0, str(HERE))
        import code_reference

        written: Callable[[], str] = getattr(code_reference, part)
        return written()

    return text


def index(part: str) -> Callable[[], str]:
    """Give a part of the index of files, by docs/file_index.py."""

    def text() -> str:
        sys.path.insert(0, str(HERE))
        import file_index

        written: Callable[[], str] = getattr(file_index, part)
        return written()

    return text


def committed() -> dict[str, Callable[[], str]]:
    """The parts that docs/committed_results.py makes."""
    sys.path.insert(0, str(HERE))
    import committed_results

    parts: dict[str, Callable[[], str]] = committed_results.parts()
    return parts


def pictures_of_memory() -> dict[str, Callable[[], str]]:
    """The parts that docs/memory_pictures.py makes."""
    sys.path.insert(0, str(HERE))
    import memory_pictures

    parts: dict[str, Callable[[], str]] = memory_pictures.parts()
    return parts


PARTS: dict[str, Callable[[], str]] = {
    "grammar": lambda: docstring("penstock.ir.text", "module    =", "A module is printed"),
    "verifier": lambda: docstring("penstock.ir.verify.verifier", "typed ", "Cost:"),
    "ops": ops,
    "coverage-words": coverage_words,
    "gpu-sheets": gpu_sheets,
    "onnx-operators": onnx_operators,
    "onnx-support": onnx_support,
    "constants": rules_of_constants,
    "torch-operations": torch_operations,
    "conformance": conformance,
    "families": families,
    "mutants": mutants,
    "passes": passes,
    "training-pipeline": pipeline(True),
    "inference-pipeline": pipeline(False),
    "serving-modes": lambda: docstring("penstock.runtime.job.dispatcher", "throughput", "The queue holds"),
    "grid-1f1b": grid("1f1b", 3, 4, 2),
    "grid-gpipe": grid("gpipe", 3, 4, 2),
    "grid-2bw": grid("2bw", 3, 4, 2),
    "grid-eager-2bw": grid("eager-2bw", 3, 4, 2),
    "grid-zb-1f1b": grid("zb-1f1b", 3, 4, 2),
    "period-2bw": period("2bw", 3, 4),
    "moves-of-state": lambda: moves_of_state(
        6, schedule="interleaved", packs=2, split_at=[f"fc{i}.product" for i in range(2, 5)]
    ),
    "moves-of-versions": lambda: moves_of_state(
        7,
        "weights",
        2,
        schedule="interleaved-2bw",
        packs=3,
        split_at=[f"{name}.product" for name in ("fc2", "fc3", "fc4", "fc5", "y")],
    ),
    "moves-of-sets": lambda: moves_of_state(9, "activations", 6, schedule="gpipe", split_at=["fc5.product"]),
    "moves-of-both": lambda: moves_of_state(
        17,
        "activations",
        8,
        batch=32,
        memory=(62 << 10, *[1 << 20] * 3),
        schedule="2bw",
        split_at=[f"fc{i}.product" for i in (5, 9, 13)],
    ),
    "moves-of-chunks": lambda: moves_of_state(9, split_at=["fc5.product"]),
    "updates-elsewhere": updates_elsewhere,
    "prices-of-fates": lambda: prices_of_fates([512] * 6, 256, 59 << 20, 5, "AdamW"),
    "prices-of-both": lambda: prices_of_fates([8, *[64] * 24, 8], 64, 2 << 20, 8, "SGD"),
    "sinks": lambda: docstring("penstock.runtime.telemetry.sinks", "tensorboard:DIR", "Where PENSTOCK"),
    "cluster-file": lambda: docstring("penstock.ir.cluster.file", "[[device]]", "Numbers are in bytes"),
    "planner-model": lambda: docstring("penstock.passes.planner.cost", "Notation"),
    "workload-format": lambda: docstring("penstock.passes.placement.workload", "maxSizePerFPGA", "Accelerators pay"),
    "profile-format": lambda: docstring("penstock.passes.placement.joint.reading", "maxMemoryPerDevice", "Anything"),
    "dump-files": lambda: docstring("penstock.inspection.dump", "00_input.ir", "Modules can be"),
    "bundle-files": lambda: docstring("penstock.backends.bundle.format", "manifest.json", "`open_bundle`"),
    "checkpoint-files": lambda: docstring("penstock.runtime.checkpoint.format", "DIR/latest", "A checkpoint is"),
    "seeded-bugs": lambda: seeded_bugs(),
    "zero": lambda: zero_levels(),
    "walk-wrong-number": lambda: walkthrough("wrong-number"),
    "walk-hang": lambda: walkthrough("hang"),
    "walk-does-not-fit": lambda: walkthrough("does-not-fit"),
    "commands": lambda: "| command | does |\n| --- | --- |\n" + commands(),
    "all-commands": reference("commands"),
    "python": reference("python"),
    "attributes": reference("operations"),
    "all-passes": reference("passes"),
    "errors": reference("errors"),
    "rooms": index("rooms"),
    "files": index("files"),
    **committed(),
    **pictures_of_memory(),
}


def pages() -> Iterator[Path]:
    yield HERE.parent / "README.md"
    yield HERE.parent / "CONTRIBUTING.md"
    yield from sorted(HERE.rglob("*.md"))


def refreshed(text: str) -> str:
    """The page with every region written anew."""
    return REGION.sub(lambda m: m["begin"] + PARTS[m["name"]]() + m["end"], text)


def main() -> int:
    stale = [
        path for path in pages() if path.read_text(encoding="utf-8") != refreshed(path.read_text(encoding="utf-8"))
    ]
    if "--check" in sys.argv[1:]:
        for path in stale:
            print(f"{path} is out of date; run `make docs`")
        return 1 if stale else 0
    for path in stale:
        path.write_text(refreshed(path.read_text(encoding="utf-8")), encoding="utf-8")
        print(f"wrote {path}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
