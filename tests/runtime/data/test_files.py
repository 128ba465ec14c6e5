"""Every format gives the same samples; only files that are needed are opened; what cannot be read is said, all of it at once."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from oracles.classifier import CLASSES, ROWS, WIDTH, classifier
from safetensors.numpy import save_file

from penstock.ir.text import parse_module
from penstock.runtime.data.files import absolute_source, parse_source
from penstock.runtime.data.samples import LAST, FileSamples, Order, check_data
from penstock.runtime.job.job import Job
from penstock.runtime.messages.control import DataSpec
from penstock.support.errors import PenstockError, UsageError

COUNT = 10


@pytest.fixture(scope="module")
def module():
    return classifier(2, "1f1b", 2)


def arrays():
    rng = np.random.default_rng(5)
    return {"x": rng.standard_normal((COUNT, WIDTH)).astype(np.float32), "labels": rng.integers(0, CLASSES, COUNT)}


def write_parquet(path, columns):
    pyarrow = pytest.importorskip("pyarrow")
    from pyarrow import parquet

    parquet.write_table(pyarrow.table(columns), path, row_group_size=3)


def as_npz(path):
    np.savez(path / "d.npz", **arrays())
    return path / "d.npz"


def as_packed_npz(path):
    np.savez_compressed(path / "d.npz", **arrays())
    return path / "d.npz"


def as_folder(path):
    for name, array in arrays().items():
        np.save(path / f"{name}.npy", array)
    (path / "notes.txt").write_text("not data")
    return path


def as_list(path):
    as_folder(path)
    return f"x={path}/x.npy,labels={path}/labels.npy"


def as_safetensors(path):
    save_file(arrays(), path / "d.safetensors")
    return path / "d.safetensors"


def as_mixed(path):
    save_file({"x": arrays()["x"]}, path / "d.safetensors")
    np.save(path / "l.npy", arrays()["labels"])
    return f"{path}/d.safetensors,labels={path}/l.npy"


def as_parquet(path):
    pyarrow = pytest.importorskip("pyarrow")
    found = arrays()
    flat = pyarrow.array(found["x"].reshape(-1))
    write_parquet(
        path / "d.parquet",
        {"more": ["a"] * COUNT, "labels": found["labels"], "x": pyarrow.FixedSizeListArray.from_arrays(flat, WIDTH)},
    )
    return path / "d.parquet"


def as_parquet_lists(path):
    pytest.importorskip("pyarrow")
    found = arrays()
    write_parquet(path / "d.pq", {"labels": found["labels"], "x": list(found["x"])})
    return path / "d.pq"


FORMATS = [as_npz, as_packed_npz, as_folder, as_list, as_safetensors, as_mixed, as_parquet, as_parquet_lists]


@pytest.mark.parametrize("write", FORMATS)
@pytest.mark.parametrize("shuffle", [False, True])
def test_every_format_gives_the_same_samples(module, tmp_path, write, shuffle):
    spec, expected = DataSpec(str(write(tmp_path)), shuffle, 3), arrays()
    assert check_data(module, spec) == COUNT
    found = FileSamples(module, spec, ["x", "labels"])
    order = np.concatenate(
        [np.random.default_rng([3, e]).permutation(COUNT) if shuffle else np.arange(COUNT) for e in range(3)]
    )
    for mb in range(3 * COUNT // ROWS):
        for name, array in expected.items():
            one = found.microbatch(mb, name)
            assert one.dtype == array.dtype
            np.testing.assert_array_equal(one, array[order[mb * ROWS : (mb + 1) * ROWS]])


@given(
    count=st.integers(1, 40),
    batch=st.integers(1, 12),
    last=st.sampled_from(LAST),
    shuffle=st.booleans(),
    seed=st.integers(0, 2**63 - 1),
    data=st.data(),
)
@settings(max_examples=150, deadline=None)
def test_law_of_the_order(count, batch, last, shuffle, seed, data):
    """No sample comes twice in an epoch but what pads its last batch, all come where none are dropped, and any position can be asked for first."""
    if last == "drop" and count < batch:
        return
    length = {"wrap": count, "drop": count // batch * batch, "pad": -(-count // batch) * batch}[last]
    whole = Order(count, batch, last, shuffle=shuffle, seed=seed).places(0, 4 * length)
    for epoch in range(4):
        own = whole[epoch * length : (epoch + 1) * length]
        once = own[: min(count, length)]
        assert len(set(once)) == len(once)
        assert set(own) <= set(range(count))
        if last != "drop":
            assert set(once) == set(range(count))
            np.testing.assert_array_equal(own[count:], np.resize(own[:count], max(0, length - count)))
    assert last == "wrap" or length % batch == 0
    first = data.draw(st.integers(0, 3 * length))
    number = data.draw(st.integers(1, length))
    np.testing.assert_array_equal(
        Order(count, batch, last, shuffle=shuffle, seed=seed).places(first, number), whole[first : first + number]
    )
    if count > 20 and shuffle:  # control: seeds and epochs matter
        assert list(whole[:length]) != list(whole[length : 2 * length])
        assert list(whole) != list(Order(count, batch, last, shuffle=True, seed=seed ^ 1).places(0, 4 * length))


# ------------------------------------------------------------------------------------------------ tokens

LANGUAGE = """module @language {
  input %ids : i64[2,3]
  input %targets : i32[6]
  output %l
  var @table : f32[50,50] buffer
  graph @main(%ids : i64[2,3], %targets : i32[6]) {
    %flat : i64[6] = reshape(%ids, shape=[6])
    %t : f32[50,50] = read(@table)
    %rows : f32[6,50] = gather(%t, %flat)
    %y : i64[6] = cast(%targets, dtype=i64)
    %l : f32[], %lse : f32[6] = cross_entropy(%rows, %y)
    return %l
  }
}
"""


@pytest.fixture(scope="module")
def language():
    return parse_module(LANGUAGE, "language.ir")


@pytest.mark.parametrize("width", ["u16", "u32"])
@pytest.mark.parametrize("count", [12, 13, 14])
def test_tokens_are_windows_and_labels_those_behind(language, tmp_path, width, count):
    tokens = (np.arange(count) * 7 % 50).astype({"u16": "<u2", "u32": "<u4"}[width])
    tokens.tofile(tmp_path / "t.bin")
    windows = [(i, tokens[3 * i : 3 * i + 3], tokens[3 * i + 1 : 3 * i + 4]) for i in range((count - 1) // 3)]
    words = (f"{tmp_path}/t.bin:{width}", f"ids={tmp_path}/t.bin:{width},targets={tmp_path}/t.bin:{width}+1")
    for word in words:
        found = FileSamples(language, DataSpec(word), ["ids", "targets"])
        assert found.count == len(windows)
        for mb in range(4):
            one, other = found.microbatch(mb, "ids"), found.microbatch(mb, "targets")
            assert (one.dtype, one.shape, other.dtype, other.shape) == (np.int64, (2, 3), np.int32, (6,))
            for row in range(2):
                _, here, behind = windows[(2 * mb + row) % len(windows)]
                np.testing.assert_array_equal(one[row], here)
                np.testing.assert_array_equal(other[3 * row : 3 * row + 3], behind)
                assert list(here) != list(behind)


def test_tokens_that_do_not_fit(language, module, tmp_path):
    def said(text, of, name="ids"):
        with pytest.raises(UsageError) as caught:
            FileSamples(of, DataSpec(text), ["ids", "targets"]).microbatch(0, name)
        return str(caught.value)

    (tmp_path / "odd.bin").write_bytes(bytes(15))
    assert "15 bytes are no whole number of tokens of 2" in said(f"{tmp_path}/odd.bin:u16", language)
    (tmp_path / "short.bin").write_bytes(bytes(6))
    assert f"targets: {tmp_path}/short.bin has 3 tokens, a sample takes 4" in said(
        f"{tmp_path}/short.bin:u16", language
    )
    assert f"{tmp_path}/none.bin: cannot read the data" in said(f"{tmp_path}/none.bin:u16", language)
    high = tmp_path / "high.bin"
    np.array([0, 1, 2, 3, 4, 5, 60, 7], "<u2").tofile(high)
    assert "targets: sample 1 has the value 60, the model takes 0 to 49" in said(f"{high}:u16", language, "targets")
    assert "is of no known format" in said(f"{high}", language)
    assert f"{high}:u16" in said(f"{high}", language)
    assert "a file of tokens does not say what x are: the model has the inputs x, labels" in said(f"{high}:u16", module)
    assert "x: tokens are whole numbers, the input is f32[4,8]" in said(f"x={high}:u16", module)
    assert "nothing: the model has no such input, it has ids, targets" in said(f"nothing={high}:u16", language)
    # A token beyond the input's element type does not come round as a negative one.
    np.full(20, 2**32 - 1, "<u4").tofile(tmp_path / "wide.bin")
    assert "the token 4294967295 has no place in int32" in said(f"{tmp_path}/wide.bin:u32", language, "targets")


# ------------------------------------------------------------------------------------------------ words


def test_words_are_read(tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    assert [tuple(p) for p in parse_source("a=b/c.npy,d=t.bin:u16+1")] == [
        ("a", tmp_path.joinpath("b/c.npy").relative_to(tmp_path), None, None),
        ("d", tmp_path.joinpath("t.bin").relative_to(tmp_path), "u16", 1),
    ]
    assert absolute_source("a=b/c.npy,d=t.bin:u16+1") == f"a={tmp_path}/b/c.npy,d={tmp_path}/t.bin:u16+1"
    assert absolute_source("x.npz") == f"{tmp_path}/x.npz"
    for odd in ("a=b.npz", "t:u16", "one,two=3.npz"):
        (tmp_path / odd).write_bytes(b"")
        assert [str(p.path) for p in parse_source(odd)] == [odd]


def test_all_problems_of_several_files_are_one_error(module, tmp_path):
    (tmp_path / "x.npy").write_bytes(b"hello")
    with pytest.raises(UsageError) as caught:
        check_data(module, DataSpec(f"x={tmp_path}/x.npy,labels={tmp_path}/none.npy,x={tmp_path}/x.npy"))
    for text in ("x.npy: cannot read the data", "none.npy: cannot read the data", "input x is given twice"):
        assert text in str(caught.value)


@pytest.mark.parametrize(
    ("make", "said"),
    [
        (lambda p: os.mkfifo(p / "d.npz") or p / "d.npz", "is not a plain file"),
        (lambda p: p, "has no .npy files"),
        (lambda p: (p / "d.npz").write_bytes(b"PK\3\4") and p / "d.npz", "cannot read the data"),
        (
            lambda p: np.save(p / "x.npy", np.zeros(3)) or p / "x.npy",
            "has one array, the model has the inputs x, labels",
        ),
        (
            lambda p: np.save(p / "x.npy", np.array([{}]), allow_pickle=True) or f"x={p}/x.npy",
            "arrays of Python objects are not read",
        ),
        (
            lambda p: (p / "d.safetensors").write_bytes(b"\xff" * 20) and p / "d.safetensors",
            "not a readable safetensors file",
        ),
        (lambda p: "", "names no file"),
        (lambda p: "x\0.npz", "cannot read the data"),
    ],
)
def test_what_cannot_be_read_is_said(module, tmp_path, make, said):
    with pytest.raises(PenstockError) as caught:
        check_data(module, DataSpec(str(make(tmp_path))))
    assert said in str(caught.value)


def test_parquet_that_does_not_fit(module, tmp_path, monkeypatch):
    pytest.importorskip("pyarrow")
    good = arrays()
    cases = {
        "lists have 7 to 9 elements": {
            "x": [*good["x"][:-2], good["x"][0][:7], np.append(good["x"][0], np.float32(1))],
            "labels": good["labels"],
        },
        "x: a row has 4 numbers, expected 8": {"x": list(good["x"][:, :4]), "labels": good["labels"]},
        "labels: 1 values are missing": {"x": list(good["x"]), "labels": [None, *good["labels"][1:].tolist()]},
        "x: element type string has no counterpart": {"x": ["a"] * COUNT, "labels": good["labels"]},
        "labels: missing, expected i64[4]": {"x": list(good["x"])},
        "x: element type is f64, expected f32": {"x": list(good["x"].astype(float)), "labels": good["labels"]},
    }
    for said, columns in cases.items():
        write_parquet(tmp_path / "d.parquet", columns)
        with pytest.raises(UsageError) as caught:
            check_data(module, DataSpec(str(tmp_path / "d.parquet")))
        assert said in str(caught.value)
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    with pytest.raises(UsageError, match=r"penstock\[parquet\]"):
        check_data(module, DataSpec(str(tmp_path / "d.parquet")))


def test_a_last_batch_that_never_comes(module, tmp_path):
    np.savez(tmp_path / "d.npz", **{name: array[:6] for name, array in arrays().items()})
    for last in LAST:
        spec = DataSpec(str(tmp_path / "d.npz"), last=last)
        if last == "drop":
            with pytest.raises(UsageError, match="6 samples make no batch of 8"):
                check_data(module, spec)
        else:
            found = FileSamples(module, spec, ["labels"])
            places = [i % 6 for i in range(24)] if last == "wrap" else [0, 1, 2, 3, 4, 5, 0, 1] * 3
            whole = np.concatenate([found.microbatch(mb, "labels") for mb in range(6)])
            np.testing.assert_array_equal(whole, arrays()["labels"][places])


# ------------------------------------------------------------------------------------------------ who opens what

_OPENED: list[str] = []
_HOOKED: list[bool] = []


def _watch(event, given):
    if event == "open" and isinstance(given[0], str):
        _OPENED.append(given[0])


@pytest.mark.parametrize("write", [as_folder, as_list])
def test_files_of_other_inputs_are_not_opened(module, tmp_path, write):
    if not _HOOKED:  # a hook stays for the life of the process
        sys.addaudithook(_watch)
        _HOOKED.append(True)
    text = str(write(tmp_path))
    for names in (["x"], ["labels"], ["x", "labels"]):
        _OPENED.clear()
        FileSamples(module, DataSpec(text), names).microbatch(0, names[0])
        assert {name for name in ("x", "labels") if f"{tmp_path}/{name}.npy" in _OPENED} == set(names)


@pytest.mark.slow
def test_each_rank_maps_its_own_files_and_trains_the_same(bundle_of, tmp_path):
    as_folder(tmp_path)
    bundle = bundle_of(2, "1f1b", 2)
    losses = {}
    for prefetch in (4, 0):
        with Job(bundle, timeout=20, data=DataSpec(str(tmp_path), True, 1), prefetch=prefetch) as job:
            for rank, own in enumerate(("x.npy", "labels.npy")):
                maps = Path(f"/proc/{job.workers.process_ids()[rank]}/maps").read_text()
                assert [name for name in ("x.npy", "labels.npy") if f"{tmp_path}/{name}" in maps] == [own]
            losses[prefetch] = [step.loss for step in job.steps_from_data(5)]
    assert losses[4] == losses[0]
    order = np.concatenate([np.random.default_rng([1, e]).permutation(COUNT) for e in range(4)])
    batches = [{name: array[order[8 * t : 8 * t + 8]] for name, array in arrays().items()} for t in range(5)]
    with Job(bundle, timeout=20) as job:
        assert list(job.run(batches)) == losses[4]
