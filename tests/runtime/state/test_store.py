"""Version slots: two buffers are enough when versions are retired, and only then."""

from __future__ import annotations

import tracemalloc

import numpy as np
import pytest
import torch

from penstock.ir.graph import Slot, Var
from penstock.ir.types import TensorType, parse_type
from penstock.runtime.state.store import Store
from penstock.runtime.state.tensors import TORCH_DTYPES, allocate, as_array, fill
from penstock.support.errors import VerifyError

TYPE = parse_type("f32[4]")


def make(versions: int, **named) -> Store:
    variables = {
        "w": Var("w", TYPE, "param", 0, versions),
        "w.grad": Var("w.grad", TYPE, "grad", 0),
        "fixed": Var("fixed", TYPE, "param", 0),
    }
    store = Store(variables, {"w"}, **named)
    store.newest("w").fill_(store.version)
    return store


def update(store: Store) -> None:
    """What an update does: the new value is the number of its version."""
    version = store.version + 1
    store.start_update(version)
    store.buffer(Slot("w", "next"), version).fill_(version)
    store.finish_update(version)


def read(store: Store, version: int) -> float:
    return float(store.buffer(Slot("w", "mb"), version)[0])


def test_version_v_lives_in_buffer_v_mod_2():
    store = make(2)
    for version in range(1, 9):
        update(store)
        assert read(store, version) == version
        assert read(store, version - 1) == version - 1
        assert store.newest("w").data_ptr() == store.versioned["w"].buffers[version % 2].data_ptr()
        store.retire(version - 1)
    assert store.versioned["w"].most_live == 2
    assert len(store.versioned["w"].buffers) == 2


def test_one_version_is_updated_in_place():
    store = make(1)
    for version in range(1, 4):
        store.retire(version - 1)
        update(store)
        assert read(store, version) == version
    assert store.versioned["w"].most_live == 1
    assert len(store.versioned["w"].buffers) == 1


def test_a_version_that_is_not_there_is_refused():
    store = make(2)
    update(store)
    store.retire(0)
    update(store)
    with pytest.raises(VerifyError, match=r"@w: version 0 was asked for, versions present: 1, 2"):
        read(store, 0)
    with pytest.raises(VerifyError, match="version 3 was asked for"):
        read(store, 3)
    store.retire(1)
    with pytest.raises(VerifyError, match="versions present: 2"):
        read(store, 1)
    assert read(store, 2) == 2


@pytest.mark.parametrize("versions", [1, 2])
def test_without_retirement_an_overwrite_is_refused_or_needs_more_buffers(versions):
    store = make(versions)
    for _ in range(versions - 1):
        update(store)
    with pytest.raises(VerifyError, match="would overwrite version 0, which still has readers"):
        update(store)
    grown = make(versions, grow=True)
    for _ in range(versions):
        update(grown)
    assert grown.versioned["w"].most_live == versions + 1
    assert len(grown.versioned["w"].buffers) == versions + 1
    assert [read(grown, v) for v in range(versions + 1)] == list(range(versions + 1))


def test_updates_come_one_after_the_other():
    with pytest.raises(VerifyError, match="an update makes version 2, the newest one is 0"):
        make(2).start_update(2)


def test_what_no_update_writes_is_the_same_in_all_versions():
    store = make(2)
    store.newest("fixed").fill_(9)
    update(store)
    assert float(store.buffer(Slot("fixed", "mb"), 0)[0]) == float(store.buffer(Slot("fixed", "mb"), 1)[0]) == 9


def test_older_versions_are_handed_out_and_restored():
    store = make(2)
    update(store)
    assert {v: float(t["w"][0]) for v, t in store.older().items()} == {0: 0.0}
    store.retire(0)
    assert store.older() == {}
    again = make(2, version=7)
    again.restore_older(6, "w").fill_(6)
    assert read(again, 6) == 6
    with pytest.raises(VerifyError, match="has no room for version 5"):
        again.restore_older(5, "w")


def lookups_kept(store: Store, batches: int) -> int:
    """Look up the tensors of a graph in so many batches, and return the bytes that stay behind."""
    slots = [Slot("w", "mb"), Slot("w.grad", "grad")]
    store.buffers("f", slots, 0, 0)
    tracemalloc.start()
    try:
        for batch in range(batches):
            weight, gradient = store.buffers("f", slots, 0, batch)
            assert weight is store.newest("w")
            assert gradient is store.gradients["w.grad"][batch % len(store.gradients["w.grad"])]
        return tracemalloc.get_traced_memory()[0]
    finally:
        tracemalloc.stop()


def test_lookups_of_many_batches_leave_nothing():
    """A job of inference has no updates, after which lookups are made anew."""
    store = make(1)
    store.gradients["w.grad"] *= 3
    store._turns = 3
    assert lookups_kept(store, 3000) < 10_000
    store._turns = 10**9  # control: each batch has an entry of its own
    assert lookups_kept(store, 3000) > 100_000


def test_values_are_counted_and_let_go():
    store = make(1)
    for mb in range(3):
        store.put(mb, "a", torch.zeros(10))
        store.put(mb, "b", torch.zeros(5))
    store.put(0, "a", torch.zeros(10))
    assert store.value_bytes == 3 * 60
    store.keep_only(0, frozenset({"b"}))
    store.keep_only(1, frozenset())
    assert store.get(0, "a") is None
    assert store.get(0, "b") is not None
    assert 1 not in store.values
    assert (store.value_bytes, store.most_value_bytes) == (80, 180)


@pytest.mark.parametrize("dtype", TORCH_DTYPES)
def test_tensors_are_aligned_and_round_trip(dtype):
    from penstock.ir.types import numpy_dtype

    array = np.arange(6).reshape(2, 3).astype(numpy_dtype(dtype))
    tensor = allocate(TensorType(dtype, (2, 3)))
    assert tensor.data_ptr() % 64 == 0
    np.testing.assert_array_equal(as_array(fill(tensor, array)), array)
    assert allocate(TensorType(dtype, ())).shape == ()
    assert allocate(TensorType(dtype, (0, 3))).numel() == 0
