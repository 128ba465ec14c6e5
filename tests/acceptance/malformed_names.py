"""Names with control characters of terminals, or that look like a line of Penstock, from every source of names: models,
bundles, data, checkpoints, settings, words of the command line, variables. Each of them stands in something that is
refused, so that it is told."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
from acceptance.malformed_bundles import seal
from acceptance.malformed_case import FORGED, HOSTILE, Case, Good, copy_of
from acceptance.malformed_data import _index

_QUOTED = json.dumps(HOSTILE)

# ------------------------------------------------------------------------------------------------ models


def _model(folder: Path, change: Callable[[Any], object]) -> Path:
    """A model of two nodes, changed."""
    import onnx
    from onnx import TensorProto, helper, numpy_helper

    weight = numpy_helper.from_array(np.zeros((4, 4), np.float32), "w")
    nodes = [
        helper.make_node("MatMul", ["x", "w"], ["h"], name="first"),
        helper.make_node("Relu", ["h"], ["y"], name="second"),
    ]
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [2, 4]) for name in "xy"]
    graph = helper.make_graph(nodes, "main", values[:1], values[1:], [weight])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 20)], ir_version=10)
    change(model)
    onnx.save(model, folder / "model.onnx")
    return folder / "model.onnx"


def _external(model: Any) -> None:
    weight = model.graph.initializer[0]
    weight.ClearField("raw_data")
    weight.data_location = 1
    entry = weight.external_data.add()
    entry.key, entry.value = "location", HOSTILE


def _set(path: str, value: str = HOSTILE) -> Callable[[Any], object]:
    """Sets a field by its path below the graph, such as node.0.op_type."""

    def change(model: Any) -> None:
        *parts, last = path.split(".")
        found = model.graph
        for part in parts:
            found = found[int(part)] if part.isdecimal() else getattr(found, part)
        if last.isdecimal():
            found[int(last)] = value
        else:
            setattr(found, last, value)

    return change


def _both(*changes: Callable[[Any], object]) -> Callable[[Any], object]:
    return lambda model: [change(model) for change in changes]


_UNKNOWN_OP = _set("node.0.op_type", "Unheard")
_MODELS: dict[str, Callable[[Any], object]] = {
    "operator": _set("node.0.op_type"),
    "domain": _set("node.0.domain"),
    "opset": lambda m: m.opset_import.add(domain=HOSTILE, version=3) and _set("node.0.domain")(m),
    "node": _both(_UNKNOWN_OP, _set("node.0.name")),
    "graph": _both(_UNKNOWN_OP, _set("name")),
    "result": _both(_UNKNOWN_OP, _set("node.0.output.0"), _set("node.1.input.0")),
    "operand": _set("node.0.input.1"),
    "dimension": _set("input.0.type.tensor_type.shape.dim.0.dim_param"),
    "input-dimension": _both(
        _set("input.0.name"), _set("node.0.input.0"), _set("input.0.type.tensor_type.shape.dim.0.dim_param")
    ),
    "input-type": _both(
        _set("input.0.name"),
        _set("node.0.input.0"),
        lambda m: setattr(m.graph.input[0].type.tensor_type, "elem_type", 8),
    ),
    "output": _set("output.0.name"),
    "weight": _both(
        _set("initializer.0.name"),
        _set("node.0.input.1"),
        lambda m: setattr(m.graph.initializer[0], "raw_data", b"\0" * 9),
    ),
    "weight-type": _both(
        _set("initializer.0.name"), _set("node.0.input.1"), lambda m: setattr(m.graph.initializer[0], "data_type", 14)
    ),
    "external": _external,
    "attribute": lambda m: m.graph.node[0].attribute.add(name=HOSTILE, type=2, i=1),
    "function": lambda m: (
        m.functions.add(name=HOSTILE, domain=HOSTILE),
        _set("node.0.op_type")(m),
        _set("node.0.domain")(m),
    ),
    "twice": _both(_set("node.0.output.0", "y"), _set("node.0.name"), _set("node.1.name")),
}


def _models() -> Iterator[Case]:
    for name, change in _MODELS.items():
        yield Case(f"model-{name}", lambda folder, good, change=change: ["plan", str(_model(folder, change))])
    for name, more in {
        "dim": ["--dim", f"{HOSTILE}=2"],
        "loss": ["--dim", "batch=2", "--loss", HOSTILE],
        "loss-output": ["--dim", "batch=2", "--loss", f"output:{HOSTILE}"],
        "frozen": ["--dim", "batch=2", "--loss", "cross_entropy", "--frozen", f"({HOSTILE}"],
        "split": ["--dim", "batch=2", "--devices", "2", "--split-at", HOSTILE],
        "devices": ["--dim", "batch=2", "--devices", HOSTILE],
        "known": ["--dim", "batch=2", "--known", f"{HOSTILE}=3"],
        "optimizer": ["--dim", "batch=2", "--loss", "cross_entropy", "--optimizer", HOSTILE],
    }.items():
        yield Case(f"words-{name}", lambda folder, good, more=more: ["plan", str(good.model), *more])


# ------------------------------------------------------------------------------------------------ bundles and checkpoints

_MANIFESTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "backend": lambda m: m | {"backend": HOSTILE},
    "device": lambda m: m | {"ranks": [r | {"device": HOSTILE} for r in m["ranks"]]},
    "file": lambda m: m | {"files": m["files"] | {HOSTILE: m["files"]["module.ir"]}},
    "file-out": lambda m: m | {"files": m["files"] | {f"../{HOSTILE}": m["files"]["module.ir"]}},
    "rank-file": lambda m: m | {"ranks": [r | {"files": [HOSTILE]} for r in m["ranks"]]},
    "field": lambda m: m | {HOSTILE: 1},
    "format": lambda m: m | {"format": HOSTILE},
    "hash": lambda m: m | {"files": {k: v | {"sha256": HOSTILE} for k, v in m["files"].items()}},
}
_CHECKPOINTS: dict[str, Callable[[dict[str, Any]], Any]] = {
    "module": lambda i: i | {"module": HOSTILE, "source": HOSTILE},
    "schedule": lambda i: i | {"schedule": HOSTILE, "microbatches": 3, "format": 1},
    "file": lambda i: i | {"files": {HOSTILE: next(iter(i["files"].values()))}},
    "tensors": lambda i: i | {"files": {k: v | {"tensors": {HOSTILE: "f32[1]"}} for k, v in i["files"].items()}},
    "types": lambda i: (
        i | {"files": {k: v | {"tensors": dict.fromkeys(v["tensors"], HOSTILE)} for k, v in i["files"].items()}}
    ),
    "field": lambda i: i | {HOSTILE: 1},
}


def _bundles() -> Iterator[Case]:
    for name, change in _MANIFESTS.items():

        def make(folder: Path, good: Good, change: Any = change) -> list[str]:
            bundle = copy_of(good.bundle, folder)
            seal(bundle, change(json.loads((bundle / "manifest.json").read_bytes())))
            return ["run", str(bundle), "--steps", "1"]

        yield Case(f"manifest-{name}", make)

    def names(folder: Path, good: Good) -> list[str]:
        bundle = copy_of(good.bundle, folder)
        (bundle / "source/names.json").write_text(json.dumps({HOSTILE: [HOSTILE]}))
        seal(bundle)
        return ["export", str(bundle), "--safetensors", str(folder / "out.safetensors")]

    def stray(folder: Path, good: Good) -> list[str]:
        bundle = copy_of(good.bundle, folder)
        (bundle / HOSTILE).write_text("x")
        (bundle / "manifest.json").write_text("{}")
        return ["run", str(bundle)]

    yield Case("names", names)
    yield Case("stray", stray)
    for name, change in _CHECKPOINTS.items():

        def forge(folder: Path, good: Good, change: Any = change) -> list[str]:
            place = copy_of(good.checkpoint, folder)
            _index(change)(next(path for path in place.iterdir() if path.name.startswith("step-")))
            return ["run", str(good.bundle), "--steps", "1", "--resume", str(place)]

        yield Case(f"checkpoint-{name}", forge)

    def latest(folder: Path, good: Good) -> list[str]:
        place = copy_of(good.checkpoint, folder)
        (place / "latest").write_text(HOSTILE)
        for path in place.glob("step-*/index.json"):
            path.unlink()
        return ["run", str(good.bundle), "--steps", "1", "--resume", str(place)]

    yield Case("latest", latest)


# ------------------------------------------------------------------------------------------------ data, settings, words

_TOML = _QUOTED.replace("\\u007f", "\\u007F")
_FILES: dict[str, tuple[str, str, list[str]]] = {
    "cluster-key": (
        "c.toml",
        f'[[device]]\nname = "cpu:0"\n{_TOML} = 1\n',
        ["plan", "MODEL", "--dim", "batch=2", "--cluster", "FILE"],
    ),
    "cluster-device": (
        "c.toml",
        f"[[device]]\nname = {_TOML}\n" * 2,
        ["plan", "MODEL", "--dim", "batch=2", "--cluster", "FILE"],
    ),
    "cluster-kind": (
        "c.toml",
        f'[[device]]\nname = "cpu:0"\nkind = {_TOML}\n',
        ["plan", "MODEL", "--dim", "batch=2", "--cluster", "FILE"],
    ),
    "cluster-unit": (
        "c.toml",
        f'[[device]]\nname = "cpu:0"\nmemory = {_TOML}\n',
        ["plan", "MODEL", "--dim", "batch=2", "--cluster", "FILE"],
    ),
    "cluster-table": ("c.toml", f"[{_TOML}]\na = 1\n", ["simulate", "BUNDLE", "--cluster", "FILE"]),
    "cluster-yaml": (
        "c.yaml",
        f"device:\n- name: cpu:0\n  {_QUOTED}: 1\n",
        ["plan", "MODEL", "--dim", "batch=2", "--cluster", "FILE"],
    ),
    "cluster-yaml-twice": (
        "c.yaml",
        f"{_QUOTED}: 1\n{_QUOTED}: 1\n",
        ["plan", "MODEL", "--dim", "batch=2", "--cluster", "FILE"],
    ),
    "cluster-yaml-tag": (
        "c.yaml",
        "device: !<tag:x%1b%5b31m> 1\n",
        ["plan", "MODEL", "--dim", "batch=2", "--cluster", "FILE"],
    ),
    "training-loss": ("t.toml", f"loss = {_TOML}\n", ["plan", "MODEL", "--dim", "batch=2", "--train", "FILE"]),
    "training-key": (
        "t.toml",
        f'loss = "mse"\n{_TOML} = 1\n',
        ["plan", "MODEL", "--dim", "batch=2", "--train", "FILE"],
    ),
    "training-optimizer": (
        "t.toml",
        f'loss = "mse"\n[optimizer]\nkind = {_TOML}\n',
        ["plan", "MODEL", "--dim", "batch=2", "--train", "FILE"],
    ),
    "training-group": (
        "t.toml",
        f'loss = "cross_entropy"\n[[group]]\nname = {_TOML}\n',
        ["plan", "MODEL", "--dim", "batch=2", "--train", "FILE"],
    ),
    "plan-device": (
        "p.json",
        json.dumps({"schedule": "1f1b", "microbatches": 2, "stages": [{"devices": [HOSTILE]}]}),
        ["plan", "MODEL", "--dim", "batch=2", "--loss", "cross_entropy", "--plan", "FILE"],
    ),
    "plan-key": ("p.json", json.dumps({HOSTILE: 1}), ["plan", "MODEL", "--dim", "batch=2", "--plan", "FILE"]),
    "plan-schedule": (
        "p.json",
        json.dumps({"schedule": HOSTILE, "stages": 2}),
        ["plan", "MODEL", "--dim", "batch=2", "--plan", "FILE"],
    ),
    "workload": (
        "w.json",
        json.dumps({"nodes": [{"id": HOSTILE}], "edges": [HOSTILE], HOSTILE: 1}),
        ["plan", "--workload", "FILE"],
    ),
    "metrics": ("m.jsonl", json.dumps({"step": HOSTILE, HOSTILE: 1}) + "\n", ["plan", "BUNDLE", "--grade", "FILE"]),
    "trace": (
        "t.json",
        json.dumps({"traceEvents": [{"name": HOSTILE, "ph": HOSTILE}]}),
        ["inspect", "BUNDLE", "--memory", "--trace", "FILE"],
    ),
    "ir": ("m.ir", f"module @x {{\n  {HOSTILE}\n}}\n", ["inspect", "FILE"]),
    "pipeline": ("m.ir", "module @x {\n}\n", ["opt", "FILE", "-p", HOSTILE]),
    "pipeline-option": ("m.ir", "module @x {\n}\n", ["opt", "FILE", "-p", f"partition{{{HOSTILE}=1}}"]),
    "pipeline-file": ("p.txt", f"{HOSTILE}\n", ["opt", "MODEL", "--pipeline", "FILE"]),
    "why": ("x", "", ["inspect", "BUNDLE", "--why", HOSTILE]),
    "graph": ("x", "", ["inspect", "BUNDLE", "--graph", HOSTILE]),
    "flow": ("x", "", ["inspect", "BUNDLE", "--flow", HOSTILE]),
    "source": ("x", "", ["inspect", "BUNDLE", "--source", HOSTILE]),
    "op": ("x", "", ["inspect", "BUNDLE", "--op", f"({HOSTILE}"]),
    "export": ("x", "", ["inspect", "BUNDLE", "--export", HOSTILE]),
    "command": ("x", "", [HOSTILE]),
    "option": ("x", "", ["run", "BUNDLE", f"--{HOSTILE}"]),
    "number": ("x", "", ["run", "BUNDLE", "--steps", HOSTILE]),
    "log": ("x", "", ["run", "BUNDLE", "--log", f"{HOSTILE}:x"]),
    "log-ranks": ("x", "", ["run", "BUNDLE", "--log-ranks", HOSTILE]),
    "rate": ("x", "", ["run", "BUNDLE", "--lr-schedule", f"{HOSTILE}{{a=1}}"]),
    "pass": ("x", "", ["passes", HOSTILE]),
    "operation": ("x", "", ["ops", HOSTILE]),
    "missing": ("x", "", ["run", HOSTILE]),
    "missing-model": ("x", "", ["plan", f"{HOSTILE}.onnx"]),
    "missing-ir": ("x", "", ["diff", f"{HOSTILE}.ir", "BUNDLE"]),
    "missing-data": ("x", "", ["run", "BUNDLE", "--data", f"{HOSTILE}.npz"]),
    "data-input": ("x", "", ["run", "BUNDLE", "--data", f"{HOSTILE}=FILE"]),
    "data-options": ("x", "", ["run", "BUNDLE", "--data", f"FILE:{HOSTILE}"]),
    "key": ("x", "", ["sign", "BUNDLE", "--key", HOSTILE]),
}


def _array(folder: Path, good: Good) -> list[str]:
    np.savez(folder / "d.npz", **{"x": np.zeros((8, 4), np.float32), HOSTILE: np.zeros(8)})
    return ["run", str(good.bundle), "--data", str(folder / "d.npz")]


def _tensor(folder: Path, good: Good) -> list[str]:
    from safetensors.numpy import save_file

    save_file({"x": np.zeros((8, 4), np.float32), HOSTILE: np.zeros(8)}, folder / "d.safetensors")
    return ["run", str(good.bundle), "--data", str(folder / "d.safetensors")]


def _column(folder: Path, good: Good) -> list[str]:
    import pyarrow
    import pyarrow.parquet

    pyarrow.parquet.write_table(pyarrow.table({"x": np.zeros(8), HOSTILE: np.zeros(8)}), folder / "d.parquet")
    return ["run", str(good.bundle), "--data", str(folder / "d.parquet")]


def names() -> Iterator[Case]:
    found = [*_models(), *_bundles(), Case("array", _array), Case("tensor", _tensor), Case("column", _column)]
    for name, (file, text, words) in _FILES.items():

        def make(folder: Path, good: Good, file: str = file, text: str = text, words: list[str] = words) -> list[str]:
            (folder / file).write_bytes(text.encode())
            places = {"FILE": str(folder / file), "MODEL": str(good.model), "BUNDLE": str(good.bundle)}
            return [places.get(word, word.replace("FILE", str(folder / file))) for word in words]

        found.append(Case(f"told-{name}", make))
    group = {"RANK": HOSTILE, "WORLD_SIZE": "2", "MASTER_ADDR": HOSTILE, "MASTER_PORT": "1"}
    found.append(Case("group", lambda folder, good: ["run", str(good.bundle)], group))
    found.append(
        Case(
            "cache",
            lambda folder, good: ["compile", str(good.model), "--dim", "batch=2", "-o", str(folder / "b")],
            {"PENSTOCK_CACHE_SIZE": HOSTILE},
        )
    )
    assert FORGED in HOSTILE
    return (Case(f"hostile-{case.name}", case.make, case.environment) for case in found)
