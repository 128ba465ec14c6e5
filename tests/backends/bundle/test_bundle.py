"""Tests of bundles: the same inputs give the same bytes. Damage of any kind is found before anything is parsed. Files
that do not belong to the bundle are left alone."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from pathlib import Path

import msgspec
import numpy as np
import pytest
from safetensors.numpy import load_file

from penstock.backends.bundle import format as bundles
from penstock.backends.bundle import writer as bundle_writer
from penstock.backends.bundle.format import Manifest, contained, open_bundle
from penstock.backends.bundle.tensor_file import write_tensors
from penstock.backends.bundle.writer import Provenance, write_bundle
from penstock.ir.cluster.cluster import Cluster
from penstock.passes.communicate.communicate import communicate
from penstock.passes.memory.lifetimes import lifetimes
from penstock.passes.schedules.schedule import ScheduleOptions, schedule
from penstock.passes.schedules.weight_versions import weight_versions
from penstock.support.errors import UsageError, VerifyError

STAGES = 2


@pytest.fixture
def module(toy):
    module = toy(STAGES).but(cluster=Cluster.local(STAGES))
    return lifetimes(communicate(weight_versions(schedule(module, ScheduleOptions(kind="2bw", microbatches=2)))))


@pytest.fixture
def weights():
    return {f"w{i}": np.arange(4, dtype=np.float32) + i for i in range(STAGES)}


@pytest.fixture
def write(tmp_path, module, weights):
    code = tmp_path / "code"
    code.mkdir()
    for stage in range(STAGES):
        (code / f"s{stage}.so").write_bytes(bytes([stage]) * 5000)

    def write(name="bundle", **named):
        files = {stage: [code / f"s{stage}.so"] for stage in range(STAGES)}
        given = {"weights": weights, "backend": "numpy", "plan": {"why": "test"}} | named
        provenance = Provenance(given.pop("source_hash", "ab" * 32))
        return write_bundle(tmp_path / name, module, files, given.pop("weights"), provenance=provenance, **given)

    return write


def all_files(root: Path) -> dict[str, bytes]:
    return {p.relative_to(root).as_posix(): p.read_bytes() for p in sorted(root.rglob("*")) if p.is_file()}


def test_written_and_read(write, module, weights):
    path = write().path
    found = open_bundle(path)
    assert found.module == module
    assert found.plan == {"why": "test"}
    assert found.world_size == STAGES
    assert [(r.rank, r.stage, r.device) for r in found.manifest.ranks] == [(0, 0, "cpu:0"), (1, 1, "cpu:1")]
    assert found.stage_files(1)[0].read_bytes() == b"\1" * 5000
    for stage in range(STAGES):
        # Only what the stage needs; read by the safetensors package, not by us.
        arrays = load_file(found.weights_file(stage))
        assert arrays.keys() == {f"w{stage}"}
        np.testing.assert_array_equal(arrays[f"w{stage}"], weights[f"w{stage}"])
    listed = {name: entry.sha256 for name, entry in found.manifest.files.items()}
    assert listed == {
        n: hashlib.sha256(b).hexdigest() for n, b in all_files(path).items() if not n.startswith("manifest")
    }


def test_same_inputs_same_bytes_and_movable(write, tmp_path):
    first = write("a").path
    second = write("elsewhere").path
    assert all_files(first) == all_files(second)
    assert all_files(write("b", source_hash="cd" * 32).path) != all_files(first)
    assert str(tmp_path).encode() not in b"".join(all_files(first).values())
    moved = tmp_path / "moved"
    shutil.move(first, moved)
    assert open_bundle(moved).module == open_bundle(second).module


def test_replaces_bundles_and_nothing_else(write, tmp_path):
    write()
    write(source_hash="cd" * 32)
    assert open_bundle(tmp_path / "bundle").manifest.source_hash == "cd" * 32
    (tmp_path / "empty").mkdir()
    write("empty")
    (tmp_path / "mine").mkdir()
    (tmp_path / "mine" / "thesis.txt").write_text("years of work")
    with pytest.raises(UsageError, match="not a bundle"):
        write("mine")
    (tmp_path / "link").symlink_to(tmp_path / "mine")
    (tmp_path / "file").write_text("")
    for name in ("link", "file"):
        with pytest.raises(UsageError, match="not a directory"):
            write(name)
    assert (tmp_path / "mine" / "thesis.txt").read_text() == "years of work"


def test_a_failed_write_leaves_the_old_bundle(write, tmp_path, monkeypatch):
    before = all_files(write().path)

    def fail(path, arrays):
        raise OSError("no space left on device")

    monkeypatch.setattr(bundle_writer, "write_tensors", fail)
    with pytest.raises(OSError, match="no space"):
        write(source_hash="cd" * 32)
    assert all_files(tmp_path / "bundle") == before
    assert sorted(p.name for p in tmp_path.iterdir()) == ["bundle", "code"]


@pytest.mark.parametrize("damage", ["truncate", "flip", "remove", "empty"])
def test_every_damaged_file_is_refused_by_name(write, tmp_path, damage, monkeypatch):
    whole = write().path
    # Nothing may be parsed before the hashes are right.
    monkeypatch.setattr(bundles, "read_module", lambda *given: pytest.fail("parsed a damaged bundle"))
    names = list(all_files(whole))
    assert len(names) == 9
    for name in names:
        copy = tmp_path / "copy"
        shutil.copytree(whole, copy)
        data = bytearray((copy / name).read_bytes())
        if damage == "remove":
            (copy / name).unlink()
        else:
            data[len(data) // 2] ^= 1
            (copy / name).write_bytes(
                {"truncate": data[: len(data) - 1 if len(data) % 2 else len(data) // 2], "flip": data, "empty": b""}[
                    damage
                ]
            )
        with pytest.raises(VerifyError) as caught:
            open_bundle(copy)
        assert name in str(caught.value)
        if damage == "flip" and not name.startswith("manifest"):
            good = open_bundle(whole).manifest.files[name].sha256
            assert good in str(caught.value)
            assert hashlib.sha256(data).hexdigest() in str(caught.value)
        shutil.rmtree(copy)
    open_bundle(whole)


def test_a_rank_checks_what_it_loads(write):
    path = write().path
    (path / "stages/s1.so").write_bytes(b"other")
    assert open_bundle(path, 0).rank(0).stage == 0
    with pytest.raises(VerifyError, match=r"stages/s1\.so"):
        open_bundle(path, 1)
    # A host may hold the files of its own rank alone.
    (path / "stages/s1.so").unlink()
    open_bundle(path, 0)
    with pytest.raises(UsageError, match="no rank 2"):
        open_bundle(path, 2)


def test_strays_and_links_are_refused(write, tmp_path):
    path = write().path
    (path / "stages" / "extra.so").write_bytes(b"")
    with pytest.raises(VerifyError, match=r"stages/extra\.so: not listed"):
        open_bundle(path)
    (path / "stages" / "extra.so").unlink()
    same = tmp_path / "same.so"
    (path / "stages/s0.so").rename(same)
    (path / "stages/s0.so").symlink_to(same)
    with pytest.raises(VerifyError, match=r"stages/s0\.so: is a link"):
        open_bundle(path)


def rewrite_manifest(path: Path, change) -> None:
    """A manifest that someone changed on purpose, hash and all."""
    found = json.loads((path / "manifest.json").read_text())
    change(found)
    text = json.dumps(found).encode()
    (path / "manifest.json").write_bytes(text)
    (path / "manifest.sha256").write_text(f"{hashlib.sha256(text).hexdigest()}  manifest.json\n")


@pytest.mark.parametrize(
    ("change", "message"),
    [
        (lambda m: m.update(extra=1), "unknown field `extra`"),
        (lambda m: m["ranks"][0].update(extra=1), "unknown field `extra`"),
        (lambda m: m.pop("backend"), "missing required field `backend`"),
        (lambda m: m.update(format=2), "bundle format 2, this version reads format 1"),
        (lambda m: m["files"].update({"../secret": m["files"]["module.ir"]}), "not a relative name"),
        (lambda m: m["files"].update({"/etc/passwd": m["files"]["module.ir"]}), "not a relative name"),
        (lambda m: m["files"].update({"a\\b": m["files"]["module.ir"]}), "not a relative name"),
        (
            lambda m: m["ranks"][1]["files"].append("stages/other.so"),
            "rank 1: needs 'stages/other.so', which is not listed",
        ),
        (lambda m: m["ranks"].reverse(), "expected rank 0 here"),
        (lambda m: m["files"].pop("module.ir"), "not listed"),
        (lambda m: m["files"]["module.ir"].update(sha256="0" * 64), "expected " + "0" * 64),
    ],
)
def test_manifests_are_checked(write, change, message):
    path = write().path
    rewrite_manifest(path, lambda m: None)
    open_bundle(path)
    rewrite_manifest(path, change)
    with pytest.raises(VerifyError) as caught:
        open_bundle(path)
    assert message in str(caught.value)


def test_all_problems_at_once(write):
    path = write().path
    (path / "stages/s0.so").write_bytes(b"")
    (path / "weights/s1.safetensors").unlink()
    with pytest.raises(VerifyError) as caught:
        open_bundle(path)
    assert "stages/s0.so" in str(caught.value)
    assert "weights/s1.safetensors: missing" in str(caught.value)


def test_no_bundle_at_all(tmp_path):
    with pytest.raises(UsageError, match="not a bundle directory"):
        open_bundle(tmp_path / "nothing")
    with pytest.raises(VerifyError, match=r"manifest\.json: missing"):
        open_bundle(tmp_path)


def test_weights_must_fit(write, weights):
    with pytest.raises(VerifyError) as caught:
        write(weights={"w0": weights["w0"].astype(np.float64)})
    assert "w0: the variable is f32[4], its weights are f64[4]" in str(caught.value)
    assert "w1: no weights were given" in str(caught.value)


def test_contained():
    assert all(map(contained, ("a", "a/b.so", "a.b/c-d_e", "..a/b")))
    assert not any(map(contained, ("", "/a", "../a", "a/../b", "a//b", "./a", "a/", "a\\b", "a\0b", "..", ".")))


def test_tensor_file_holds_every_type(tmp_path):
    import ml_dtypes

    random = np.random.default_rng(0)
    arrays = {
        f"t{i}": random.integers(0, 2, (3, 5)).astype(t)
        for i, t in enumerate(["f4", "f2", "f8", "i8", "i4", "i1", "u1", "?"])
    }
    arrays |= {
        "scalar": np.float32(3.5),
        "empty": np.zeros((0, 2), np.float32),
        "turned": random.standard_normal((4, 6)).T,
    }
    digest, size = write_tensors(tmp_path / "t.safetensors", arrays)
    data = (tmp_path / "t.safetensors").read_bytes()
    assert (digest, size) == (hashlib.sha256(data).hexdigest(), len(data))
    assert (8 + int.from_bytes(data[:8], "little")) % 64 == 0
    found = load_file(tmp_path / "t.safetensors")
    assert found.keys() == arrays.keys()
    for name, array in arrays.items():
        assert found[name].dtype == array.dtype
        np.testing.assert_array_equal(found[name], array)
    write_tensors(tmp_path / "b.safetensors", {"h": np.array([1.5, -2.0], ml_dtypes.bfloat16)})
    from safetensors.torch import load_file as load_torch

    assert load_torch(tmp_path / "b.safetensors")["h"].tolist() == [1.5, -2.0]


def test_manifest_is_plain_json(write):
    text = (write().path / "manifest.json").read_bytes()
    assert msgspec.json.decode(text, type=Manifest) == open_bundle(write().path).manifest
    assert os.linesep.encode() in text
