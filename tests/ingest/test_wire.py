"""The primitives of a body: arrays come back whatever their width."""

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from draftkeep.errors import CodecError
from draftkeep.ingest.wire import Reader, Writer


@given(
    values=st.integers(0, 2**32 - 1).flatmap(lambda top: st.lists(st.integers(0, top), max_size=9)),
    before=st.binary(max_size=5),
)
def test_an_array_comes_back_in_the_smallest_type(values: list[int], before: bytes) -> None:
    writer = Writer()
    writer.blob(before)
    writer.array(np.array(values, np.int64))
    reader = Reader(b"".join(writer.parts()))
    assert reader.blob() == before
    found = reader.array(len(values))
    reader.end()
    assert found.tolist() == values
    peak = max(values, default=0)
    assert found.dtype.itemsize == (1 if peak < 2**8 else 2 if peak < 2**16 else 4)


@pytest.mark.parametrize("width", [1, 2, 3, 4])
def test_a_wider_array_than_needed_reads_the_same(width: int) -> None:
    planes = bytes([7, 9]) + bytes(2 * (width - 1))
    assert Reader(bytes([2, width]) + planes).array().tolist() == [7, 9]
    assert Reader(bytes([0, width])).array().tolist() == []
    for cut in range(len(planes)):
        with pytest.raises(CodecError, match="ends early"):
            Reader(bytes([2, width]) + planes[:cut]).array()
