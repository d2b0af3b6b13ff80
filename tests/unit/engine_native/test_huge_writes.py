"""Whatever is appended arrives, in pieces as the page cache wants them."""

from __future__ import annotations

import os
import tempfile

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pdserve.engine.native import huge_writes
from pdserve.engine.native.huge_writes import PIECE_BYTES, HugeWriter


@given(sizes=st.lists(st.integers(0, 40), max_size=8), most=st.integers(1, 20), pad=st.booleans())
def test_pieces_are_whole_and_in_their_places(sizes: list[int], most: int, pad: bool) -> None:
    """With pieces of 16 bytes, on a disk that takes no more than `most` at once."""
    writes: list[tuple[int, int]] = []  # position, bytes that were offered
    expected = b""
    with tempfile.TemporaryFile(buffering=0) as file, pytest.MonkeyPatch.context() as patch:

        def write(fd: int, data: memoryview) -> int:
            writes.append((os.lseek(fd, 0, os.SEEK_CUR), len(data)))
            return file.write(data[:most])

        patch.setattr(huge_writes, "PIECE_BYTES", 16)
        patch.setattr(huge_writes.os, "write", write)
        writer = HugeWriter(file.fileno())
        for number, size in enumerate(sizes):
            writer.write(memoryview(bytes([number + 1]) * size))
            expected += bytes([number + 1]) * size
            if pad:
                writer.pad(8)
                expected += bytes(-len(expected) % 8)
            assert writer.tell() == len(expected)
        writer.flush()
        file.seek(0)
        assert file.read() == expected
    whole = len(expected) // 16 * 16
    for position, size in writes:  # each goes up to the end of its piece
        assert (position + size) % 16 == 0 or position >= whole


def test_a_full_disk() -> None:
    with (
        open("/dev/full", "wb", buffering=0) as full,
        pytest.raises(OSError, match="No space"),
    ):
        HugeWriter(full.fileno()).write(memoryview(bytes(PIECE_BYTES)))
