"""Checkpoints of split tensors: saved under one layout, loaded under others, bit for bit. Each rank reads its slices.

The oracle is the whole tensor of every variable, which is made of its name; no file is joined for it.
"""

from __future__ import annotations

import json
import math
import shutil
from dataclasses import replace

import msgspec
import numpy as np
import pytest
import torch
from oracles.sharding.local_modules import local_mlp
from safetensors import safe_open

from penstock.backends.bundle.tensor_file import map_tensors, write_tensors
from penstock.inspection.exports.weights import export_parameters
from penstock.inspection.weights import checkpoint_arrays
from penstock.ir.cluster.cluster import Cluster
from penstock.ir.cluster.spaces import Space
from penstock.ir.sharding.tiles import copy, cut, packed_tile, seat_of, tile_of, whole_tile
from penstock.ir.types import parse_type
from penstock.runtime.checkpoint import format as checkpoints
from penstock.runtime.checkpoint import resuming
from penstock.runtime.checkpoint.finding import choose, damage_of
from penstock.runtime.checkpoint.saving import write_index
from penstock.runtime.checkpoint.stored_tiles import files_for
from penstock.runtime.job.ranks import whole_parameters
from penstock.runtime.state.tensors import as_array
from penstock.support.errors import VerifyError

from .layouts import LAYOUTS, STEP, HandBundle, at_step, check, plan, save, whole

# (stages, axes of the mesh) of the runs that go on.
RESUMED = {
    "one device": (1, ()),
    "tp=4": (1, (("tp", 4),)),
    "tp=3": (1, (("tp", 3),)),
    "dp=4": (1, (("dp", 4),)),
    "four stages": (4, ()),
    "dp=2 x tp=2": (1, (("dp", 2), ("tp", 2))),
    "two stages, tp=2 x dp=2": (2, (("tp", 2), ("dp", 2))),
}


@pytest.fixture(scope="module")
def saved(tmp_path_factory):
    """Save a checkpoint of two stages x tp=2, with two versions of the weights."""
    folder = tmp_path_factory.mktemp("saved")
    bundle = HandBundle(plan(2, ("tp", 2), versions=2), folder / "bundle")
    return bundle, save(bundle, folder / "ckpt")


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_goes_on_under_another_layout(saved, tmp_path, name):
    stages, axes = RESUMED[name]
    for versions in (1, 2):
        bundle = HandBundle(plan(stages, *axes, versions=versions), tmp_path / f"bundle{versions}")
        index = checkpoints.read_index(saved[1])
        resuming.check_resume(index, bundle.module, None, "here", "5" * 64)
        check(bundle, saved[1], older=STEP - 1 if versions == 2 else None)


@pytest.mark.parametrize("name", RESUMED)
def test_a_checkpoint_of_any_layout_goes_on_on_one_device(tmp_path, name):
    stages, axes = RESUMED[name]
    place = save(HandBundle(plan(stages, *axes), tmp_path / "bundle"), tmp_path / "ckpt")
    assert damage_of(place) == []
    check(HandBundle(plan(1), tmp_path / "one"), place)
    check(HandBundle(plan(2, ("tp", 2)), tmp_path / "two"), place)
    # What nothing splits is written as before: old versions of the program read it.
    index = json.loads((place / "index.json").read_bytes())
    splits = any(size > 1 for _, size in axes)
    assert index["format"] == (3 if splits else 2)
    assert any("tiles" in file for file in index["files"].values()) == splits
    # Every element is written once.
    elements = {}
    for key in index["files"]:
        for tensor, array in map_tensors(place / key).items():
            elements[tensor] = elements.get(tensor, 0) + array.size
    assert elements == {name: math.prod(parse_type(text).dims) for name, text in types_of(place).items()}


def types_of(place):
    return checkpoints.read_index(place).types()


def test_modules_in_local_form_go_on_under_other_meshes(tmp_path):
    """The variables, versions and graphs of compiled trainings, rather than some made by hand."""

    def trained(number, schedule, *mesh):
        return HandBundle(local_mlp(schedule, *mesh).local, tmp_path / str(number))

    place = save(trained(0, "2bw", 2, 1, 2), tmp_path / "ckpt")
    check(trained(1, "2bw", 2, 2, 2), place, older=STEP - 1)
    for number, mesh in enumerate(((1, 1, 1), (1, 1, 4), (1, 1, 3), (1, 4, 1), (1, 2, 2), (2, 2, 1)), 2):
        check(trained(number, "1f1b", *mesh), place)


def test_first_weights_are_the_ranks_own_slices(tmp_path):
    for number, (stages, axes) in enumerate(RESUMED.values()):
        bundle = HandBundle(plan(stages, *axes, versions=2), tmp_path / f"b{number}")
        for rank in range(bundle.world_size):
            mesh, seat = seat_of(bundle.module, rank)
            store = bundle.load(rank, None)
            for name in store.variables:
                type = bundle.module.vars[name].type
                expected = cut(whole(name, type, 0), type, mesh, seat)
                if name.endswith("momentum"):
                    expected = np.zeros_like(expected)
                assert as_array(store.newest(name)).tobytes() == np.ascontiguousarray(expected).tobytes()


def test_parameters_of_all_ranks_are_joined(tmp_path):
    for number, (stages, axes) in enumerate(RESUMED.values()):
        bundle = HandBundle(plan(stages, *axes), tmp_path / f"b{number}")
        stores = [at_step(bundle, rank) for rank in range(bundle.world_size)]
        answers = [{n: as_array(s.newest(n)) for n in s.variables if n in LAYOUTS} for s in stores]
        joined = whole_parameters(bundle.module, answers)
        assert joined.keys() == LAYOUTS.keys()
        for name, array in joined.items():
            assert array.tobytes() == whole(name, bundle.module.vars[name].type, STEP).tobytes()


# ------------------------------------------------------------------------------------------------ bytes that are read


class Counted:
    """A safetensors file whose reads are counted, in bytes, and how often it is opened."""

    read = opened = 0

    def __init__(self, *arguments, **named):
        self.file = safe_open(*arguments, **named)
        Counted.opened += 1

    def __enter__(self):
        self.file.__enter__()
        return self

    def __exit__(self, *error):
        return self.file.__exit__(*error)

    def get_tensor(self, name):
        tensor = self.file.get_tensor(name)
        Counted.read += tensor.nbytes
        return tensor

    def get_slice(self, name):
        return CountedSlice(self.file.get_slice(name))


class CountedSlice:
    """Slices of a tensor, counted."""

    def __init__(self, slices):
        self.slices = slices

    def get_shape(self):
        return self.slices.get_shape()

    def __getitem__(self, index):
        part = self.slices[index]
        Counted.read += part.nbytes
        return part


def big_layouts():
    return {"w": "f32[1200/tp,40]", "v": "f32[40,3*400/tp]", "b": "f32[1200/tp]", "n": "f32[40]"}


@pytest.mark.parametrize("name", RESUMED)
def test_each_rank_reads_its_own_bytes(tmp_path, monkeypatch, name):
    place = save(HandBundle(plan(2, ("tp", 2), layouts=big_layouts()), tmp_path / "bundle"), tmp_path / "ckpt")
    stages, axes = RESUMED[name]
    bundle = HandBundle(plan(stages, *axes, layouts=big_layouts()), tmp_path / "again")
    hashed = []
    problems = checkpoints.file_problems
    monkeypatch.setattr(resuming, "safe_open", Counted)
    monkeypatch.setattr(checkpoints, "file_problems", lambda path, *rest: hashed.append(path) or problems(path, *rest))
    for rank in range(bundle.world_size):
        hashed.clear()
        Counted.read = 0
        store = bundle.load(rank, place)
        own = sum(t.nbytes for n, t in ((n, store.newest(n)) for n in store.variables))
        if not any("tp" in axis for axis, _ in axes):
            assert Counted.read == own
        # Padding is not read, so tp=3 may read less.
        assert 0.9 * own <= Counted.read <= 1.05 * own
        # A hash is compared by a rank that takes all of a file alone: no file is read for it that is not read anyhow.
        for path in hashed:
            assert (
                all(
                    tile_of(bundle.module.vars[tensor].type, *seat_of(bundle.module, rank)).size == array.size
                    for tensor, array in map_tensors(path).items()
                )
                or sum(array.nbytes for array in map_tensors(path).values()) <= own
            )


def test_files_of_tiles_are_hashed_once_where_state_comes_item_by_item(tmp_path, monkeypatch):
    """A changed byte of a file that the rank takes whole is refused. The control: a rank that takes less goes on."""
    module = plan(1, ("tp", 2))
    place = save(HandBundle(module, tmp_path / "bundle"), tmp_path / "ckpt")
    states = [name for name in module.vars if name.endswith("momentum")]
    at_home = {n: replace(module.vars[n], home="disk", chunk=i % 3) for i, n in enumerate(states)}
    cluster = replace(Cluster.local(2), spaces=(Space("disk", path=str(tmp_path)),))
    bundle = HandBundle(module.but(vars={**module.vars, **at_home}, cluster=cluster), tmp_path / "again")
    hashed, problems = [], checkpoints.file_problems
    monkeypatch.setattr(
        checkpoints, "file_problems", lambda path, *rest: hashed.append(path.name) or problems(path, *rest)
    )
    store = bundle.load(0, place)
    assert len(store.items) == 3
    assert hashed == ["rank0.safetensors"]
    momentum = as_array(store.newest("up.momentum"))
    type = module.vars["up.momentum"].type
    assert momentum.tobytes() == cut(whole("up.momentum", type, STEP), type, *seat_of(module, 0)).tobytes()
    content = bytearray((place / "rank0.safetensors").read_bytes())
    content[-1] ^= 1
    (place / "rank0.safetensors").write_bytes(content)
    with pytest.raises(VerifyError, match=r"the checkpoint is damaged: rank0.safetensors"):
        bundle.load(0, place)
    HandBundle(plan(1, ("tp", 3)), tmp_path / "three").load(0, place)


@pytest.mark.parametrize("room", [10_000, 2_000_000])
def test_no_more_of_a_file_is_mapped_at_once_than_there_is_room_for(tmp_path, monkeypatch, room):
    place = save(HandBundle(plan(2, ("tp", 2), layouts=big_layouts()), tmp_path / "bundle"), tmp_path / "ckpt")
    bundle = HandBundle(plan(1, ("tp", 3), layouts=big_layouts()), tmp_path / "again")
    monkeypatch.setattr(resuming, "safe_open", Counted)
    monkeypatch.setattr(resuming, "_MAPPED", room)
    check(bundle, place)
    files = len(json.loads((place / "index.json").read_text())["files"])
    for rank in range(bundle.world_size):
        Counted.read = Counted.opened = 0
        bundle.load(rank, place)
        assert Counted.opened >= Counted.read // room
        # The control: with room for all, each file is opened once.
        assert (Counted.opened <= files) == (room > Counted.read)


# ------------------------------------------------------------------------------------------------ whole tensors


def test_whole_tensors_are_read_from_tiles(saved, tmp_path):
    bundle, place = saved
    arrays, step = checkpoint_arrays(place, bundle.module)
    assert step == STEP
    for name, array in arrays.items():
        assert np.array_equal(array, whole(name, bundle.module.vars[name].type, STEP)), name
    assert arrays.keys() == bundle.module.vars.keys()
    newest = checkpoints.read_newest(place, checkpoints.read_index(place), bundle.module)
    assert newest.keys() == LAYOUTS.keys()
    export_parameters(place, tmp_path / "weights.safetensors")
    for name, array in map_tensors(tmp_path / "weights.safetensors").items():
        assert np.array_equal(array, whole(name, bundle.module.vars[name].type, STEP))


def test_a_tied_tensor_is_read_once(tmp_path):
    """Two stages hold it in other tiles: a tile is filled from as few files as hold it."""
    whole_file = {"rank0.safetensors": {"w": None}, "rank1.safetensors": {"w": (((0, 3),),)}}
    files = {
        name: checkpoints.SavedFile("", 0, 1, {"w": "f32[8]"}, {n: r for n, r in tiles.items() if r is not None})
        for name, tiles in whole_file.items()
    }
    halves = {
        f"half{i}": checkpoints.SavedFile("", 0, 1, {"w": "f32[8]"}, {"w": (((4 * i, 4 * i + 4),),)}) for i in (0, 1)
    }
    wanted = {"w": packed_tile((((0, 3),),))}
    assert files_for({**files, **halves}, wanted, 1).keys() == {"rank0.safetensors"}
    assert files_for({"rank1": files["rank1.safetensors"], **halves}, {"w": None}, 1).keys() == {"half0", "half1"}
    assert files_for(halves, {"w": packed_tile((((3, 5),),))}, 1).keys() == {"half0", "half1"}
    assert files_for(halves, wanted, 2) == {}


# ------------------------------------------------------------------------------------------------ what is refused


def rewritten(place, target, change):
    """Copy a checkpoint with its index changed, under a hash that fits."""
    shutil.copytree(place, target)
    index = checkpoints.read_index(place)
    files = dict(index.files)
    change(target, files)
    write_index(target, msgspec.structs.replace(index, files=files))
    return target


def tiled_file(files, name="up"):
    return next(key for key, file in files.items() if name in file.tiles and file.version == STEP)


def with_tile(files, key, name, ranges):
    tiles = {**files[key].tiles, name: ranges}
    files[key] = msgspec.structs.replace(files[key], tiles=tiles)


def move_tile(place, files):
    """Say that the first half lies one column further."""
    key = tiled_file(files)
    rows, ((first, end),) = files[key].tiles["up"]
    with_tile(files, key, "up", (rows, ((first + 1, end + 1),)))


def leave_the_tensor(place, files):
    key = tiled_file(files)
    rows, _ = files[key].tiles["up"]
    with_tile(files, key, "up", (rows, ((9, 16),)))


def lose_a_dimension(place, files):
    key = tiled_file(files)
    with_tile(files, key, "up", files[key].tiles["up"][1:])


def lose_a_file(place, files):
    key = tiled_file(files)
    (place / key).unlink()
    del files[key]


def overlap(place, files):
    """Add a file with another half of the tensor, where one element differs."""
    array = whole("up", parse_type("f32[6,13]"), STEP)[:, 3:9].copy()
    array[2, 2] += 1
    digest, size = write_tensors(place / "rank9.safetensors", {"up": array})
    tiles = {"up": (((0, 6),), ((3, 9),))}
    files["rank9.safetensors"] = checkpoints.SavedFile(digest, size, STEP, {"up": "f32[6,13]"}, tiles)


def overlap_alike(place, files):
    array = whole("up", parse_type("f32[6,13]"), STEP)[:, 3:9].copy()
    digest, size = write_tensors(place / "rank9.safetensors", {"up": array})
    tiles = {"up": (((0, 6),), ((3, 9),))}
    files["rank9.safetensors"] = checkpoints.SavedFile(digest, size, STEP, {"up": "f32[6,13]"}, tiles)


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (move_tile, r"no file of version 3 holds up\[0, 0\]"),
        (leave_the_tensor, r"has a tile of up, whose ranges \[\[9, 16\]\] do not fit f32\[6,13\]"),
        (lose_a_dimension, r"has a tile of up, which has 1 dimensions, of f32\[6,13\]"),
        (lose_a_file, r"no file of version 3 holds "),
        (overlap, r"up: rank\d.safetensors and rank9.safetensors hold the same elements with other contents"),
    ],
)
def test_wrong_tiles_are_refused(saved, tmp_path, change, words):
    place = rewritten(saved[1], tmp_path / f"step-{STEP:06}", change)
    with pytest.raises(VerifyError, match=words):
        choose(place)


def test_equal_overlaps_are_accepted(saved, tmp_path):
    """The control: the same elements in two files are no damage."""
    place = rewritten(saved[1], tmp_path / f"step-{STEP:06}", overlap_alike)
    choose(place)
    check(HandBundle(plan(1), tmp_path / "one"), place)


def test_a_tile_of_another_shape_is_refused(saved, tmp_path):
    """A file with a right hash, whose tensor is not what its index says."""

    def change(place, files):
        key = tiled_file(files)
        arrays = {name: np.array(array) for name, array in map_tensors(place / key).items()}
        arrays["up"] = arrays["up"][:, 1:]
        digest, size = write_tensors(place / key, arrays)
        files[key] = msgspec.structs.replace(files[key], sha256=digest, size=size)

    place = rewritten(saved[1], tmp_path / f"step-{STEP:06}", change)
    with pytest.raises(VerifyError, match=r"up is \[6, 6\], expected \[6, 7\]"):
        HandBundle(plan(1), tmp_path / "one").load(0, place)
    with pytest.raises(VerifyError, match=r"has \[6, 6\] of up, expected \[6, 7\]"):
        checkpoints.read_tensors(place, checkpoints.read_index(place), {"up"})


def test_a_missing_file_is_named(saved, tmp_path):
    place = tmp_path / f"step-{STEP:06}"
    shutil.copytree(saved[1], place)
    key = tiled_file(checkpoints.read_index(place).files)
    (place / key).unlink()
    with pytest.raises(VerifyError, match=f"{key}: missing"):
        choose(place)
    with pytest.raises(VerifyError, match=key):
        HandBundle(plan(1, ("tp", 3)), tmp_path / "three").load(0, place)


def test_a_swapped_tile_would_be_noticed(saved, tmp_path):
    """Controls of the comparison above: tiles that changed places, and padding that is not zero."""
    bundle = HandBundle(plan(1, ("tp", 3)), tmp_path / "bundle")
    mesh, _ = seat_of(bundle.module, 0)
    type = bundle.module.vars["up"].type
    expected = [cut(whole("up", type, STEP), type, mesh, place) for place in range(3)]
    assert expected[0].tobytes() != expected[1].tobytes()
    last = expected[2].copy()
    last[:, -1] = 1
    target = np.zeros(type.dims, np.float32)
    copy(last, tile_of(type, mesh, 2), target, whole_tile(type))
    assert last.tobytes() != expected[2].tobytes()
    assert not target[:, :10].any()
    assert torch.equal(torch.from_numpy(target[:, 10:]), torch.from_numpy(whole("up", type, STEP)[:, 10:]))
