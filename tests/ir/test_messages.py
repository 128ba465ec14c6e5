"""Every value with elements is in one message, by itself or beside others that it does not touch."""

from __future__ import annotations

from hypothesis import given
from hypothesis import strategies as st

from penstock.ir.graph import Value
from penstock.ir.messages import TOGETHER, parcels
from penstock.ir.types import TensorType

SIZES = st.lists(
    st.sampled_from([0, 1, 63, 64, 65, 1000, TOGETHER - 1, TOGETHER, TOGETHER + 1, 4 * TOGETHER]), max_size=8
)


@given(SIZES)
def test_every_value_is_in_one_message(sizes: list[int]) -> None:
    values = [Value(f"v{i}", TensorType("u8", (size,))) for i, size in enumerate(sizes)]
    made = parcels(values)
    assert sorted(i for parcel in made for i in parcel.numbers) == [i for i, size in enumerate(sizes) if size]
    assert sum(len(parcel.numbers) > 1 for parcel in made) <= 1
    for parcel in made:
        ends = [place + sizes[i] for i, place in zip(parcel.numbers, parcel.places, strict=True)]
        assert all(end <= place for end, place in zip(ends, parcel.places[1:], strict=False))
        assert ends[-1] <= parcel.nbytes < ends[-1] + 64
        assert all(place % 64 == 0 for place in parcel.places)
        if len(parcel.numbers) > 1:
            assert max(sizes[i] for i in parcel.numbers) <= TOGETHER
        else:
            assert parcel.nbytes == sizes[parcel.numbers[0]]
    assert len(made) == sum(size > TOGETHER for size in sizes) + any(0 < size <= TOGETHER for size in sizes)
