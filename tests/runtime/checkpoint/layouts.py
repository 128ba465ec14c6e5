"""Modules of one set of variables laid out by hand over stages and meshes, with weights, and the state of their ranks.

The graphs read and write the variables, and compute nothing. Values differ by element, variable and version.
"""

from __future__ import annotations

import math
import threading
import zlib
from dataclasses import dataclass
from pathlib import Path
from types import SimpleNamespace

import numpy as np
import torch

from penstock.backends.bundle.tensor_file import write_tensors
from penstock.ir.graph import PARAM, STATE, Graph, Mesh, Module, Op, Stage, Value, Var, stage_vars
from penstock.ir.schedule import Action, Program, Schedule
from penstock.ir.sharding.tiles import cut, seat_of
from penstock.ir.types import TensorType, parse_type
from penstock.runtime.checkpoint import saving
from penstock.runtime.checkpoint.format import is_kept
from penstock.runtime.group.group import RankGroup, host_store
from penstock.runtime.messages.control import Setup
from penstock.runtime.messages.status import Status
from penstock.runtime.state.store import Store
from penstock.runtime.state.tensors import TORCH_DTYPES, as_array, fill
from penstock.runtime.worker.loading import StateSource, load_store

TIMEOUT, STEP = 30, 3

# Sizes that no number of devices divides, blocks, several axes on one dimension, tensors smaller than the mesh. `/tp`
# is on every mesh, `/dp` on some: an axis that a mesh lacks splits nothing.
LAYOUTS = {
    "embedding": "f32[11/tp,6]",
    "qkv": "f32[6,3*5/tp]",
    "up": "f32[6,13/tp]",
    "bias": "f32[2/tp]",
    "down": "f32[13/tp/dp,6]",
    "norm": "f32[6]",
    "half": "bf16[9,7/tp]",
    "count": "i64[]",
    "none": "f32[0,4]",
}
# Layouts of the optimiser's state, where it is split over other axes than its parameter.
STATES = {"up": "f32[6/dp,13/tp]", "norm": "f32[6/dp]"}


def plan(stages: int, *axes: tuple[str, int], versions: int = 1, layouts: dict[str, str] = LAYOUTS) -> Module:
    """Return a module on meshes of these axes, its parameters dealt out to the stages."""
    each = math.prod(size for _, size in axes)
    meshes = tuple(
        Mesh(f"m{s}", axes, tuple(f"cpu:{i}" for i in range(s * each, s * each + each))) for s in range(stages)
    )
    vars: dict[str, Var] = {}
    for number, (name, text) in enumerate(layouts.items()):
        stage, type = number * stages // len(layouts), parse_type(text)
        vars[name] = Var(name, type, PARAM, stage, versions if type.dtype != "i64" else 1)
        state = parse_type(STATES.get(name, text))
        vars[f"{name}.momentum"] = Var(f"{name}.momentum", state, STATE, stage, init="zeros")
    graphs = {}
    for stage in range(stages):
        mine = [var for var in vars.values() if var.stage == stage]
        sizes = meshes[stage].sizes
        values = {var.name: Value(f"v.{var.name}", var.type.local(sizes)) for var in mine}
        reads = [Op("read", (), (values[v.name],), {"var": v.name, "version": "mb"}) for v in mine if v.role == PARAM]
        late = [Op("read", (), (values[v.name],), {"var": v.name}) for v in mine]
        writes = [Op("write", (values[v.name],), (), {"var": v.name}) for v in mine if v.type.dtype != "i64"]
        graphs[f"s{stage}.F"] = Graph(f"s{stage}.F", (), (), tuple(reads))
        graphs[f"s{stage}.U"] = Graph(f"s{stage}.U", (), (), tuple(late + writes))
    programs = {
        rank: Program((), tuple(Action(kind, rank // each, 0) for kind in "FBU")) for rank in range(stages * each)
    }
    return Module(
        "m",
        (Value("x", TensorType("f32", (2, 6))),),
        meshes=meshes,
        stages=tuple(Stage(s, f"m{s}") for s in range(stages)),
        vars=vars,
        graphs=graphs,
        schedule=Schedule("2bw" if versions > 1 else "1f1b", 1, programs),
    )


def whole(name: str, type: TensorType, version: int) -> np.ndarray:
    """Return the contents of a variable at a version."""
    rng = np.random.default_rng([version, zlib.crc32(name.encode())])
    array = rng.integers(1, 1 << 16, type.dims)
    # Every finite element is written and read by its bits.
    return as_array(torch.from_numpy(np.asarray(array)).to(TORCH_DTYPES[type.dtype]))


@dataclass
class HandBundle:
    """What loading and saving ask of a bundle."""

    module: Module
    path: Path

    def __post_init__(self) -> None:
        self.manifest = SimpleNamespace(source_hash="5" * 64)
        self.source_names = None
        self.world_size = len(self.module.rank_stages())
        self.path.mkdir(exist_ok=True)
        for stage in self.module.stages:
            variables = stage_vars(self.module, stage.index)
            arrays = {n: whole(n, v.type, 0) for n, v in variables.items() if v.init == "file"}
            write_tensors(self.weights_file(stage.index), arrays)

    def rank(self, rank: int) -> SimpleNamespace:
        """Return what is listed of a rank."""
        return SimpleNamespace(rank=rank, stage=self.module.rank_stages()[rank], device=f"cpu:{rank}")

    def weights_file(self, stage: int) -> Path:
        """Return the file with the weights of a stage."""
        return self.path / f"s{stage}.safetensors"

    def load(self, rank: int, place: Path | None) -> Store:
        """Load the state of one rank."""
        source = StateSource(self, rank, self.rank(rank).stage, {}, place)  # type: ignore[arg-type]
        return load_store(source, torch.device("cpu"))


def at_step(bundle: HandBundle, rank: int) -> Store:
    """Return the state of a rank after some steps; its older version is still needed where there are two."""
    mesh, place = seat_of(bundle.module, rank)
    store = bundle.load(rank, None)
    for version in range(1, STEP + 1):
        store.retire(version - max(var.versions for var in store.variables.values()))
        store.start_update(version)
        for name, versions in store.versioned.items():
            array = cut(whole(name, bundle.module.vars[name].type, version), bundle.module.vars[name].type, mesh, place)
            fill(versions.target(version, False), array)
        store.finish_update(version)
    for name in store.single:
        type = bundle.module.vars[name].type
        fill(store.single[name], cut(whole(name, type, STEP), type, mesh, place))
    return store


def save(bundle: HandBundle, directory: Path) -> Path:
    """Save a checkpoint by all ranks at once, in threads, and return its place."""
    meeting = host_store(bundle.world_size, TIMEOUT)
    setup = Setup(str(bundle.path), TIMEOUT)
    savers = []
    for rank in range(bundle.world_size):
        group = RankGroup(meeting.clone(), rank, bundle.world_size, TIMEOUT)
        savers.append(saving.Saver(bundle, rank, group, setup, at_step(bundle, rank), Status(None, rank)))
    threads = [threading.Thread(target=saver.save, args=(directory, STEP), daemon=True) for saver in savers]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(TIMEOUT)
        assert not thread.is_alive()
    return directory / f"step-{STEP:06}"


def check(bundle: HandBundle, place: Path, older: int | None = None) -> None:
    """Compare the state of every rank with slices of whole tensors, bit for bit, padding included."""
    for rank in range(bundle.world_size):
        mesh, seat = seat_of(bundle.module, rank)
        store = bundle.load(rank, place)
        for name in filter(lambda name: is_kept(store.variables[name]), store.variables):
            type = bundle.module.vars[name].type
            expected = cut(whole(name, type, STEP), type, mesh, seat)
            assert as_array(store.newest(name)).tobytes() == np.ascontiguousarray(expected).tobytes(), (rank, name)
        for name, versions in store.versioned.items() if older is not None else ():
            type = bundle.module.vars[name].type
            expected = cut(whole(name, type, older), type, mesh, seat)
            found = as_array(versions.place(STEP - 1))
            assert found.tobytes() == np.ascontiguousarray(expected).tobytes(), (rank, name)
