"""Samples: in order, wrapped, shuffled the same way on every rank; what does not fit is refused by name."""

from __future__ import annotations

import numpy as np
import pytest
from oracles.classifier import CLASSES, ROWS, WIDTH, classifier

from penstock.ir.text import parse_module
from penstock.runtime.data.batches import check_batch
from penstock.runtime.data.domains import domain_of
from penstock.runtime.data.files import read_npz, write_npz
from penstock.runtime.data.ranges import first_outside, integer_range
from penstock.runtime.data.samples import FileSamples, SyntheticSamples, check_data, open_data
from penstock.runtime.messages.control import DataSpec
from penstock.support.errors import UsageError


@pytest.fixture(scope="module")
def module():
    return classifier(2, "1f1b", 2)


def samples_of(count):
    return {
        "x": np.arange(count * WIDTH, dtype=np.float32).reshape(count, WIDTH),
        "labels": np.arange(count, dtype=np.int64) % CLASSES,
    }


@pytest.fixture
def save(tmp_path):
    def save(arrays, compressed=False):
        path = tmp_path / "data.npz"
        (np.savez_compressed if compressed else np.savez)(path, **arrays)
        return path

    return save


@pytest.mark.parametrize("count", [1, 3, 4, 10, 16])
@pytest.mark.parametrize("compressed", [False, True])
def test_in_order_and_wrapping_round(module, save, count, compressed):
    arrays = samples_of(count)
    found = FileSamples(module, DataSpec(str(save(arrays, compressed))), ["x", "labels"])
    for mb in range(8):
        places = [(mb * ROWS + i) % count for i in range(ROWS)]
        for name in arrays:
            np.testing.assert_array_equal(found.microbatch(mb, name), arrays[name][places])


def test_arrays_are_written_whatever_their_names(tmp_path):
    """Also those that numpy.savez takes for its own arguments, and those with a folder's separator."""
    arrays = {
        "file": np.arange(6).reshape(2, 3),
        "allow_pickle": np.float32(1.5),
        "a/b c": np.zeros((0, 4), bool),
        "x": np.arange(5)[::2],
    }
    with (tmp_path / "out.npz").open("wb") as file:
        write_npz(file, arrays)
    for found in (read_npz(tmp_path / "out.npz"), np.load(tmp_path / "out.npz")):
        assert set(found) == set(arrays)
        for name, array in arrays.items():
            assert found[name].dtype == np.asarray(array).dtype
            np.testing.assert_array_equal(found[name], array)


def test_plain_arrays_are_mapped(save):
    assert all(isinstance(a, np.memmap) for a in read_npz(save(samples_of(8))).values())
    assert not any(isinstance(a, np.memmap) for a in read_npz(save(samples_of(8), compressed=True)).values())
    odd = {
        "scalar": np.float32(2),
        "empty": np.zeros((0, 3)),
        "turned": np.asfortranarray(np.arange(6.0).reshape(2, 3)),
        "plain": np.arange(3),
    }
    for name, array in read_npz(save(odd)).items():
        np.testing.assert_array_equal(array, odd[name])


def test_shuffling_is_a_permutation_per_epoch_and_a_function_of_the_place(module, save):
    path, count = save(samples_of(10)), 10

    def places(seed, shuffle=True, names=("x",)):
        found = FileSamples(module, DataSpec(str(path), shuffle, seed), names)
        return np.concatenate([found.microbatch(mb, "x")[:, 0] // WIDTH for mb in range(5)])

    first = places(0)
    np.testing.assert_array_equal(first, places(0, names=("x", "labels")))
    assert sorted(first[:count]) == sorted(first[count:]) == list(range(count))
    assert list(first[:count]) != list(first[count:])
    assert list(first) != list(places(1))
    assert list(first) != list(places(0, shuffle=False))
    # Any place can be asked for first: that is what resuming does.
    again = FileSamples(module, DataSpec(str(path), True, 0), ["labels", "x"])
    np.testing.assert_array_equal(again.microbatch(4, "labels"), first[16:20] % CLASSES)
    np.testing.assert_array_equal(again.microbatch(1, "labels"), first[4:8] % CLASSES)
    np.testing.assert_array_equal(again.microbatch(1, "x")[:, 0], first[4:8] * WIDTH)


@pytest.mark.parametrize(
    ("change", "messages"),
    [
        ({"labels": None}, ["labels: missing, expected i64[4]"]),
        ({"y": np.zeros(8)}, ["y: the model has no such input, it has x, labels"]),
        (
            {"labels": np.zeros(8, np.int32)},
            ["labels: element type is i32, expected i64 (array.astype('int64') converts)"],
        ),
        ({"x": np.zeros((8, 3), np.float32)}, ["x: shape is [8, 3], expected [8, 8]"]),
        ({"x": np.zeros(8, np.float32)}, ["x: shape is [8], expected [8, 8]"]),
        ({"labels": np.zeros(7, np.int64)}, ["numbers of samples differ: x has 8, labels has 7"]),
        (
            {"labels": np.zeros(8), "x": np.zeros((8, 2))},
            ["labels: element type is f64", "x: element type is f64", "x: shape is [8, 2]"],
        ),
        ({"labels": np.array(["a"] * 8)}, ["labels: element type str"]),
        (
            {"labels": np.zeros(0, np.int64), "x": np.zeros((0, WIDTH), np.float32)},
            ["x: has no whole number of samples"],
        ),
    ],
)
def test_what_does_not_fit_is_named(module, save, change, messages):
    arrays = {name: array for name, array in (samples_of(8) | change).items() if array is not None}
    path = save(arrays)
    with pytest.raises(UsageError) as caught:
        check_data(module, DataSpec(str(path)))
    for message in messages:
        assert message in str(caught.value)
    assert str(path) in str(caught.value)


def test_batches_are_checked_alike(module):
    good = samples_of(ROWS * 2)
    check_batch(module, good)
    with pytest.raises(UsageError) as caught:
        check_batch(module, {"x": good["x"][:-1], "z": good["x"]})
    for message in ("labels: missing", "z: the model has no such input", "x: shape is [7, 8], expected [8, 8]"):
        assert message in str(caught.value)


def test_unreadable_files(module, tmp_path, save):
    for name, data in (
        ("none.npz", None),
        ("text.npz", b"hello"),
        ("torn.npz", save(samples_of(8)).read_bytes()[:-30]),
    ):
        path = tmp_path / name
        if data is not None:
            path.write_bytes(data)
        with pytest.raises(UsageError, match="cannot read the data"):
            check_data(module, DataSpec(str(path)))


def test_objects_are_not_unpickled(module, save):
    with pytest.raises(UsageError):
        check_data(module, DataSpec(str(save({"x": np.array([{}], dtype=object), "labels": np.zeros(1, np.int64)}))))


def test_synthetic_data_is_legal_and_seeded(module):
    found = open_data(module, DataSpec("synthetic", seed=3), ["x", "labels"])
    assert isinstance(found, SyntheticSamples)
    labels = np.concatenate([found.microbatch(mb, "labels") for mb in range(200)])
    assert (labels.min(), labels.max()) == (0, CLASSES - 1)
    x = found.microbatch(5, "x")
    assert (x.dtype, x.shape) == (np.float32, (ROWS, WIDTH))
    np.testing.assert_array_equal(x, SyntheticSamples(module, 3).microbatch(5, "x"))
    assert not np.array_equal(x, SyntheticSamples(module, 4).microbatch(5, "x"))
    assert not np.array_equal(x, found.microbatch(6, "x"))


def test_limits_of_integers_are_found_through_layout_changes():
    module = parse_module(
        """module @tokens {
  input %ids : i32[2,3]
  input %targets : i64[2,3]
  input %free : i64[2]
  output %l
  var @table : f32[11,4] buffer
  graph @main(%ids : i32[2,3], %targets : i64[2,3], %free : i64[2]) {
    %flat : i32[6] = reshape(%ids, shape=[6])
    %wide : i64[6] = cast(%flat, dtype=i64)
    %t : f32[11,4] = read(@table)
    %rows : f32[6,4] = gather(%t, %wide)
    %y : i64[6] = reshape(%targets, shape=[6])
    %l : f32[], %lse : f32[6] = cross_entropy(%rows, %y)
    return %l
  }
}
""",
        "tokens.ir",
    )
    assert [domain_of(module, v.name).high for v in module.inputs] == [11, 4, 2]
    # Negative indices count from the end, negative labels mean nothing.
    assert [integer_range(module, v.name) for v in module.inputs] == [(-11, 11), (0, 4), None]


def test_limits_are_found_in_a_later_stage_and_not_behind_a_slice():
    module = parse_module(
        """module @stages {
  device cpu:0
  device cpu:1
  stage 0 on cpu:0
  stage 1 on cpu:1
  input %ids : i64[2,3]
  input %part : i64[4]
  output %rows
  var @table : f32[11,4] stage 1 buffer
  graph @s0.F(%ids : i64[2,3]) {
    %flat : i64[6] = reshape(%ids, shape=[6])
    return %flat
  }
  graph @s1.F(%flat : i64[6], %part : i64[4]) {
    %t : f32[11,4] = read(@table)
    %rows : f32[6,4] = gather(%t, %flat)
    %two : i64[2] = slice(%part, starts=[0], stops=[2])
    %more : f32[2,4] = gather(%t, %two)
    return %rows, %more
  }
}
""",
        "stages.ir",
    )
    assert [integer_range(module, v.name) for v in module.inputs] == [(-11, 11), None]
    assert [domain_of(module, v.name).high for v in module.inputs] == [11, 11]


@pytest.mark.parametrize("value", [-1, CLASSES, 7, -100, 10**8])
@pytest.mark.parametrize("shuffle", [False, True])
def test_labels_out_of_range_are_refused_when_they_are_reached(module, save, value, shuffle):
    arrays = samples_of(16)
    arrays["labels"][9] = value
    batch = {name: array[8:] for name, array in arrays.items()}
    text = f"labels: sample {{}} has the value {value}, the model takes 0 to {CLASSES - 1}"
    with pytest.raises(UsageError) as caught:
        check_batch(module, batch, "batch 1")
    assert text.format(1) in str(caught.value)
    check_batch(module, {name: array[:8] for name, array in arrays.items()})
    path = save(arrays)
    found = FileSamples(module, DataSpec(str(path), shuffle, 1), ["x", "labels"])
    order = np.random.default_rng([1, 0]).permutation(16) if shuffle else np.arange(16)
    hit = list(order).index(9) // ROWS
    for mb in range(4):
        found.microbatch(mb, "x")
        if mb != hit:
            np.testing.assert_array_equal(
                found.microbatch(mb, "labels"), arrays["labels"][order[mb * ROWS : (mb + 1) * ROWS]]
            )
            continue
        with pytest.raises(UsageError) as caught:
            found.microbatch(mb, "labels")
        assert text.format(9) in str(caught.value)
        assert str(path) in str(caught.value)


@pytest.mark.parametrize(
    ("values", "dtype", "bounds", "expected"),
    [
        ([[0, 3], [-3, 2]], "int64", (-3, 4), None),
        ([[0, 3], [-4, 2]], "int64", (-3, 4), (1, "-4")),
        ([[0, 4], [0, 2]], "int32", (-3, 4), (0, "4")),
        ([0, 255], "uint8", (-300, 300), None),
        ([0, 255], "uint8", (-200, 200), (1, "255")),
        ([0, 2**64 - 1], "uint64", (-3, 4), (1, str(2**64 - 1))),
        ([-128, 0], "int8", (0, 300), (0, "-128")),
        (7, "int64", (0, 7), (0, "7")),
        ([9.0], "float32", (0, 7), None),
        ([9], "int64", None, None),
        (np.zeros((0, 2)), "int64", (0, 7), None),
    ],
)
def test_the_first_value_outside(values, dtype, bounds, expected):
    found = first_outside(np.array(values, dtype), bounds)
    assert (found and (found[0], found[1].split(",")[0].removeprefix("the value "))) == expected


def test_inputs_with_more_rows_per_sample(save):
    module = parse_module(
        "module @m {\n  input %a : f32[2,3]\n  input %b : f32[6]\n  input %s : f32[]\n  output %a\n"
        "  graph @main(%a : f32[2,3], %b : f32[6], %s : f32[]) {\n    return %a\n  }\n}\n",
        "m.ir",
    )
    arrays = {
        "a": np.arange(15, dtype=np.float32).reshape(5, 3),
        "b": np.arange(15, dtype=np.float32),
        "s": np.float32(2),
    }
    for shuffle in (False, True):
        found = FileSamples(module, DataSpec(str(save(arrays)), shuffle), list(arrays))
        for mb in range(7):
            np.testing.assert_array_equal(found.microbatch(mb, "a").reshape(-1), found.microbatch(mb, "b"))
            assert found.microbatch(mb, "s") == 2
